"""Backward of a layer_norm whose input was a sum. The sum was not stored and is computed again."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fuseopt.ops import registry
from fuseopt.ops.library import check_shape, compute_dtype, define

MOST_ADDENDS = 6
MOST_COLUMNS = 2048
ALIGNMENT = 16
"""Bytes per access of the kernel; a row of each matrix must be a multiple of it."""


class LayerNormOfSumGrads(NamedTuple):
    """Results of `layer_norm_of_sum_bwd`.

    Attributes:
        output: the norm's, in the dtype of `grad_output` and of its shape, as the next two.
        grad: that of the sum, `grad_sum` included, in the dtype of `grad_sum`.
        rounded: the same in the dtype of `grad_output`.
        grad_weight: [columns], in the dtype of the weight, as the next two.
        grad_bias: likewise.
        grad_columns: the sums of `rounded` over its rows, which are the gradient of a bias added to the sum.
    """

    output: Tensor
    grad: Tensor
    rounded: Tensor
    grad_weight: Tensor
    grad_bias: Tensor
    grad_columns: Tensor


def _fake(
    grad_output: Tensor, grad_sum: Tensor, base: Tensor, addends: Sequence[Tensor], *others: Tensor
) -> list[Tensor]:
    like = (grad_output, grad_sum, grad_output, *3 * others[:1])
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in like]


RAW = define(
    "layer_norm_of_sum_bwd(Tensor grad_output, Tensor grad_sum, Tensor base, Tensor[] addends, Tensor weight,"
    " Tensor bias, Tensor mean, Tensor rstd) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake,
)


def _reference(
    grad_output: Tensor,
    grad_sum: Tensor,
    base: Tensor,
    addends: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
) -> LayerNormOfSumGrads:
    rows = tuple(range(grad_output.dim() - 1))
    x = base
    for addend in addends:
        x = x + addend
    xhat = (x - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    grad = grad_output.to(base.dtype)
    scaled = grad * weight
    centred = scaled - scaled.mean(-1, keepdim=True) - xhat * (scaled * xhat).mean(-1, keepdim=True)
    of_sum = rstd.unsqueeze(-1) * centred + grad_sum
    rounded = of_sum.to(grad_output.dtype, copy=True)
    return LayerNormOfSumGrads(
        (xhat * weight + bias).to(grad_output.dtype),
        of_sum,
        rounded,
        (grad * xhat).sum(rows),
        grad.sum(rows),
        rounded.to(base.dtype).sum(rows),
    )


def layer_norm_of_sum_bwd(
    grad_output: Tensor,
    grad_sum: Tensor,
    base: Tensor,
    addends: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    backend: str = "auto",
) -> LayerNormOfSumGrads:
    """The gradients of a layer_norm over `base + addends[0] + addends[1] ...`, and that norm once more.

    For a residual stream that is not kept for the backward. Matrices are [..., columns], statistics [...], parameters
    [columns]. With an empty list, the input is `base`.

    Args:
        grad_output: float32, float16 or bfloat16, or float64 like all else.
        grad_sum: what reaches the sum from elsewhere; float32, as all but `grad_output` and `addends`.
        base: what the others are added to, one after the other, in float32.
        addends: up to `MOST_ADDENDS`, in the dtype of `grad_output`.
        weight: of the norm.
        bias: likewise.
        mean: of the rows of the sum.
        rstd: one over their deviation.
        backend: "auto", "cuda" or "reference". CUDA takes up to `MOST_COLUMNS` columns, in rows of whole `ALIGNMENT`
            bytes; else, and where a gradient is asked for, "auto" takes the reference.

    Raises:
        TypeError: dtypes other than these.
        ValueError: shapes that do not fit together, too many addends.
        BackendError: the backend named cannot run here, or not with autograd.
    """
    _check(grad_output, grad_sum, base, addends, weight, bias, mean, rstd)
    given = (grad_output, grad_sum, base, *addends, weight, bias, mean, rstd)
    if backend == "auto" and not fits(grad_output.shape[-1], grad_output.dtype):
        backend = "reference"
    chosen = registry.pick_without_gradient("layer_norm_of_sum_bwd", backend, (grad_output.dtype,), *given)
    if chosen == "reference":
        return _reference(grad_output, grad_sum, base, addends, weight, bias, mean, rstd)
    return LayerNormOfSumGrads(*RAW[chosen](grad_output, grad_sum, base, addends, weight, bias, mean, rstd))


def fits(columns: int, dtype: torch.dtype) -> bool:
    """Whether the CUDA kernel takes rows of this many columns and a `grad_output` of this dtype."""
    return columns <= MOST_COLUMNS and columns * dtype.itemsize % ALIGNMENT == 0


def _check(
    grad_output: Tensor,
    grad_sum: Tensor,
    base: Tensor,
    addends: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
) -> None:
    if len(addends) > MOST_ADDENDS:
        raise ValueError(f"{len(addends)} addends, of {MOST_ADDENDS} at most")
    shape, wide = grad_output.shape, compute_dtype(grad_output)
    if not grad_output.is_floating_point() or not shape:
        raise TypeError(f"grad_output must be a floating point matrix, not {grad_output.dtype} {tuple(shape)}")
    tensors = {"grad_sum": grad_sum, "base": base, **{f"addends[{n}]": addend for n, addend in enumerate(addends)}}
    expected = {
        **{name: (tensor, shape) for name, tensor in tensors.items()},
        **{name: (tensor, shape[-1:]) for name, tensor in (("weight", weight), ("bias", bias))},
        **{name: (tensor, shape[:-1]) for name, tensor in (("mean", mean), ("rstd", rstd))},
    }
    for name, (tensor, of_shape) in expected.items():
        check_shape(name, tensor, of_shape)
        dtype = grad_output.dtype if name.startswith("addends") else wide
        if tensor.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, not {tensor.dtype}")


def random_arguments(
    device: torch.device, dtype: torch.dtype, addends: int, *shape: int
) -> tuple[Tensor | list[Tensor], ...]:
    """Arguments of a call; the statistics are those of the sum."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    grad_sum, base = (torch.randn(shape, device=device, dtype=wide) for _ in range(2))
    grad_output, *added = (torch.randn(shape, device=device, dtype=dtype) for _ in range(1 + addends))
    weight, bias = (torch.randn(shape[-1:], device=device, dtype=wide) for _ in range(2))
    x = base
    for addend in added:
        x = x + addend
    mean = x.mean(-1)
    rstd = ((x - mean.unsqueeze(-1)).square().mean(-1) + 1e-5).rsqrt()
    return grad_output, grad_sum, base, added, weight, bias, mean, rstd


layer_norm_of_sum_bwd_reference = partial(layer_norm_of_sum_bwd, backend="reference")


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    for addends, *shape in ((2, 4, 64), (0, 3, 5, 128), (6, 301, 40), (1, 2, 1600), (3, 0, 16)):
        yield registry.SampleInput(random_arguments(device, dtype, addends, *shape))


def _bench_input(
    device: torch.device, dtype: torch.dtype, rows: int, columns: int, addends: int
) -> registry.SampleInput:
    return registry.SampleInput(random_arguments(device, dtype, addends, rows, columns))


registry.register(
    registry.Op(
        name="layer_norm_of_sum_bwd",
        function=layer_norm_of_sum_bwd,
        reference=layer_norm_of_sum_bwd_reference,
        sample_inputs=sample_inputs,
        backends=(
            registry.NativeBackend("cuda", (torch.float32, torch.float16, torch.bfloat16)),
            registry.REFERENCE,
        ),
        benchmarks=(
            registry.Benchmark(
                _bench_input,
                shapes=("65536x768x0", "65536x768x3", "16384x1600x3"),
                eager=layer_norm_of_sum_bwd_reference,
            ),
        ),
    )
)
