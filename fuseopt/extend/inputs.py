"""Variants of an op's sample arguments: other sizes, strides and broadcasts, from what the user's samples give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fuseopt.extend.signature import tensors_of, with_tensors
from fuseopt.ops import registry

Arguments = tuple[Any, ...]


def registry_samples(
    samples: Callable[[torch.device, torch.dtype], Iterator[Arguments]],
    device: torch.device,
    dtype: torch.dtype,
    requires_grad: bool,
) -> Iterator[registry.SampleInput]:
    """An op's samples as the registry of ops takes them."""
    for arguments in samples(device, dtype):
        for tensor in tensors_of(arguments):
            tensor.requires_grad_(requires_grad and tensor.is_floating_point())
        yield registry.SampleInput(arguments)


def resized(arguments: Sequence[Any], sizes: Callable[[int], int]) -> Arguments:
    """The arguments with every dimension of every tensor mapped by `sizes`; the same size always to the same.

    Floating point values are drawn anew where a tensor grows; other tensors repeat what they have.
    """
    return with_tensors(
        arguments, [_resized(tensor, [sizes(n) for n in tensor.shape]) for tensor in tensors_of(arguments)]
    )


def by_table(table: Mapping[int, int]) -> Callable[[int], int]:
    """Sizes by a table, and those that it lacks as they are."""
    return lambda size: table.get(size, size)


def _resized(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    if tensor.is_meta:
        return tensor.new_empty(shape)
    if tensor.is_floating_point():
        fresh = torch.randn(shape, dtype=torch.float32, device=tensor.device)
        spread = tensor.float().std() if tensor.numel() > 1 else torch.ones((), device=tensor.device)
        middle = tensor.float().mean() if tensor.numel() else torch.zeros((), device=tensor.device)
        is_positive = tensor.numel() > 0 and bool((tensor >= 0).all())
        values = fresh * spread + middle
        return (values.abs() if is_positive else values).to(tensor.dtype)
    if tensor.numel() == 0 or 0 in shape:
        return tensor.new_zeros(shape)
    flat, wanted = tensor.flatten(), torch.Size(shape).numel()
    return flat.repeat(-(-wanted // flat.numel()))[:wanted].reshape(shape).clone()


def variants(arguments: Arguments, optional: Sequence[bool]) -> Iterator[tuple[str, Arguments]]:
    """(kind, arguments): the sample in other sizes, strides, broadcasts and numbers. Not every function takes all.

    Args:
        optional: for each argument, whether it is a tensor that may be None.
    """
    arguments = copied(arguments)  # a kernel that writes into them must not spoil the samples
    yield "as sampled", arguments
    yield (
        "odd shapes",
        resized(
            arguments, lambda size: size if size == 1 else size + 1 - size % 2 if size < 8 else size - 1 - size % 2
        ),
    )
    yield "odd shapes", resized(arguments, lambda size: min(size, 3))
    tensors = list(tensors_of(arguments))
    columns = next((tensor.shape[-1] for tensor in tensors if tensor.dim()), 1)
    if columns > 1:
        yield "odd shapes", resized(arguments, by_table({columns: 1}))
    yield "non-contiguous", with_tensors(arguments, list(map(_spaced, tensors)))
    yield "non-contiguous", with_tensors(arguments, list(map(_turned, tensors)))
    yield "in larger memory", with_tensors(arguments, list(map(_surrounded, tensors)))
    if any(tensor.dim() for tensor in tensors):
        yield (
            "broadcast",
            with_tensors(arguments, [t[:1].expand(t.shape) if t.dim() and len(t) else t for t in tensors]),
        )
    for place, tensor in enumerate(tensors):
        if tensor.dim() and len(tensor) > 1 and len(tensors) > 1:
            narrow = [t[:1] if place == other else t for other, t in enumerate(tensors)]
            yield "broadcast", with_tensors(arguments, narrow)
            yield (
                "broadcast",
                with_tensors(arguments, [t[0] if place == other else t for other, t in enumerate(tensors)]),
            )
    leading = next((len(tensor) for tensor in tensors if tensor.dim()), None)
    if leading is not None:
        yield "empty", resized(arguments, by_table({leading: 0}))
    for place, may_be_none in enumerate(optional):
        if may_be_none and tensors:
            other = None if arguments[place] is not None else torch.ones_like(tensors[0])
            yield "optional arguments", (*arguments[:place], other, *arguments[place + 1 :])
    numbers = tuple(map(_another, arguments))
    if any(one is not other for one, other in zip(numbers, arguments, strict=True)):
        yield "other numbers", numbers
    yield "0-d", with_tensors(arguments, [_resized(tensor, ()) for tensor in tensors])


def _spaced(tensor: Tensor) -> Tensor:
    """The same values with a gap after each along the last dimension."""
    if tensor.dim() == 0:
        return tensor
    room = tensor.new_empty((*tensor.shape[:-1], 2 * tensor.shape[-1]))
    room.fill_(float("nan") if tensor.is_floating_point() else 0)
    view = room[..., ::2]
    view.copy_(tensor)
    return view


def _surrounded(tensor: Tensor) -> Tensor:
    """The same values inside a larger memory, with NaN before and after them, contiguous."""
    dense = tensor.contiguous()
    room = dense.new_zeros(dense.numel() + 128)
    if room.is_floating_point():
        room.fill_(float("nan"))
    view = room[64 : 64 + dense.numel()].view(dense.shape)
    view.copy_(dense)
    return view


def _another(argument: Any) -> Any:
    """Another number in place of a number."""
    if isinstance(argument, bool):
        return not argument
    if isinstance(argument, int):
        return argument + 1
    return 0.75 * argument + 0.17 if isinstance(argument, float) else argument  # 0.68 alone would stay the same


def _turned(tensor: Tensor) -> Tensor:
    """The same values, with the last two dimensions swapped in memory."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2) if tensor.dim() > 1 else tensor


def copied(arguments: Sequence[Any]) -> Arguments:
    """The arguments with their tensors in new memory."""
    return with_tensors(arguments, [tensor.detach().clone() for tensor in tensors_of(arguments)])


def to_dtype(arguments: Sequence[Any], dtype: torch.dtype, device: str | None = None) -> Arguments:
    """Floating point tensors in another dtype, all of them on `device` where that is given; in new memory."""
    moved = [
        tensor.detach().to(device or tensor.device, dtype if tensor.is_floating_point() else tensor.dtype).clone()
        for tensor in tensors_of(arguments)
    ]
    return with_tensors(arguments, moved)
