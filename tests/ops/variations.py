"""The registry's sample inputs in other sizes, strides and alignments, and memory that shows what was not written."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fuseopt.ops.registry import SampleInput
from tests.ops.cases import map_tensors, tensors

_BLOCK = 2**20 + 7

# `view(storage, n)`: rows of n elements out of [2, 3, more than n].
every_view_of_rows = pytest.mark.parametrize(
    "view",
    [
        lambda t, n: t[:, :, 5 : 5 + n],
        lambda t, n: t[:, 1, :n],
        lambda t, n: t[:, :, 1:].transpose(0, 1)[..., :n],
        lambda t, n: t[:1, :1, :n].expand(2, 3, -1),
        lambda t, n: t[..., :1].expand(-1, -1, n),
    ],
    ids=["slice", "one row of each", "rows transposed", "rows expanded", "columns expanded"],
)


def resized(sample: SampleInput, sizes: Mapping[int, int]) -> SampleInput:
    """`sample` with each dimension of size s of every tensor, and of every tuple of sizes, brought to `sizes[s]`.

    Dimensions that had equal sizes keep equal ones; those of size 1, which broadcast, stay. Values are drawn from the
    tensor's own, with some noise on floating point ones. Of a named tuple, which holds options, each field is resized.
    """

    def new_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size if size == 1 else sizes.get(size, size) for size in shape)

    def new_value(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _redrawn(value, new_shape(value.shape))
        if hasattr(value, "_fields"):
            return value._make(map(new_value, value))
        return new_shape(value) if isinstance(value, tuple) else value

    kwargs = {name: new_value(value) for name, value in sample.kwargs.items()}
    return SampleInput(tuple(map(new_value, sample.args)), kwargs)


def _redrawn(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    count = math.prod(shape)
    if tensor.numel() == 0 or count == 0:
        return tensor.detach().new_zeros(shape).requires_grad_(tensor.requires_grad)
    index = torch.randint(tensor.numel(), (min(count, _BLOCK),), device=tensor.device)
    values = tensor.detach().flatten()[index]
    if values.is_floating_point():
        values = values * (1 + 0.25 * torch.randn_like(values))
    values = values.repeat(-(-count // len(values)))[:count] if count > len(values) else values
    return values.view(shape).requires_grad_(tensor.requires_grad)


def columns_of(sample: SampleInput) -> int:
    """The size of the last dimension of the first floating point tensor: what a row kernel's row is."""
    return next(tensor.shape[-1] for tensor in tensors(sample) if tensor.is_floating_point())


def with_columns(sample: SampleInput, columns: int) -> SampleInput:
    return resized(sample, {columns_of(sample): columns})


def with_rows(sample: SampleInput, rows: int, columns: int) -> SampleInput:
    """`sample` with `columns` columns, and `rows` in the place of its other sizes, if need be their product."""
    width = columns_of(sample)
    others = sorted({size for tensor in tensors(sample) for size in tensor.shape} - {0, 1, width})
    return resized(sample, {**dict.fromkeys(others, 1), **dict.fromkeys(others[:1], rows), width: columns})


def every_second(tensor: Tensor) -> Tensor:
    if tensor.dim() == 0:
        return tensor
    return tensor.repeat_interleave(2, -1)[..., ::2]


def transposed(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


def broadcast(tensor: Tensor) -> Tensor:
    return tensor[:1].expand_as(tensor) if tensor.dim() > 0 else tensor


def padded(tensor: Tensor) -> Tensor:
    """Rows a little apart in memory, so that each starts at another alignment."""
    if tensor.dim() == 0:
        return tensor
    wide = tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] + 3))
    return wide[..., : tensor.shape[-1]].copy_(tensor)


def shifted(tensor: Tensor) -> Tensor:
    """Contiguous, and one element past an aligned address."""
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.clone,
    every_second,
    transposed,
    padded,
    shifted,
)


def laid_out(sample: SampleInput, layout: Callable[[Tensor], Tensor]) -> SampleInput:
    return map_tensors(lambda tensor: layout(tensor.detach()).requires_grad_(tensor.requires_grad), sample)


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """New CUDA tensors come filled with NaN (integers: their largest value), those that an op allocates too."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
