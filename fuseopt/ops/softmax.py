"""Softmax of scaled and masked scores, as attention computes it: torch.softmax(input * scale + mask)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fuseopt.ops import registry
from fuseopt.ops.library import (
    apply,
    autocast_dtype,
    compute_dtype,
    define,
    is_differentiated_again,
    needs_autograd,
)


def _fwd_fake(
    input: Tensor, mask: Tensor | None = None, scale: float = 1.0, output_dtype: torch.dtype | None = None
) -> Tensor:
    return input.new_empty(input.shape, dtype=output_dtype)


def _bwd_fake(grad_output: Tensor, output: Tensor, scale: float, input_dtype: torch.dtype) -> Tensor:
    return output.new_empty(output.shape, dtype=input_dtype)


FWD = define(
    "softmax_fwd(Tensor input, Tensor? mask=None, float scale=1.0, ScalarType? output_dtype=None) -> Tensor",
    _fwd_fake,
    triton="fuseopt.ops.triton.softmax",
)
BWD = define(
    "softmax_bwd(Tensor grad_output, Tensor output, float scale, ScalarType input_dtype) -> Tensor",
    _bwd_fake,
    triton="fuseopt.ops.triton.softmax",
)


_DIRECT = registry.Direct("softmax", FWD, autocasts=True)


def _reference(
    input: Tensor, mask: Tensor | None, scale: float, output_dtype: torch.dtype | None, dim: int = -1
) -> Tensor:
    output_dtype = output_dtype or input.dtype
    if mask is None and scale == 1.0 and output_dtype == input.dtype:
        return torch.softmax(input, dim)
    dtype = compute_dtype(input, mask)
    scores = input.to(dtype) * scale
    if mask is not None:
        scores = scores + mask.to(dtype).expand(input.shape)
    return torch.softmax(scores, dim).to(output_dtype)


def softmax_reference(input: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, dim: int = -1) -> Tensor:
    """`softmax` by torch's own."""
    return _reference(input, mask, scale, autocast_dtype(input), dim)


class _Softmax(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Any) -> Tensor:
        return FWD[backend](*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.backend, input, mask, ctx.scale, _ = inputs
        ctx.input_dtype = input.dtype
        ctx.mask_like = None if mask is None else (mask.shape, mask.dtype)
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (output,) = ctx.saved_tensors
        need_mask_grad = ctx.needs_input_grad[2]
        dtype = compute_dtype(output, grad_output)
        if is_differentiated_again():
            # Computed from the output, which carries the graph, so the input need not be saved.
            y, grad = output.to(dtype), grad_output.to(dtype)
            grad_scores = y * (grad - (y * grad).sum(-1, keepdim=True))
        elif need_mask_grad:
            grad_scores = BWD[ctx.backend](grad_output, output, 1.0, dtype)
        else:
            return None, BWD[ctx.backend](grad_output, output, ctx.scale, ctx.input_dtype), None, None, None
        grad_mask = None
        if need_mask_grad:
            shape, mask_dtype = ctx.mask_like
            grad_mask = grad_scores.sum_to_size(shape).to(mask_dtype)
        return None, (grad_scores * ctx.scale).to(ctx.input_dtype), grad_mask, None, None


def softmax(
    input: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, dim: int = -1, backend: str = "auto"
) -> Tensor:
    """`torch.softmax(input * scale + mask, dim)`, in float32 (float64 where `input` is float64).

    A row masked with -inf throughout gives NaN, as in torch.

    Args:
        input: any shape and strides; float32, float16, bfloat16 or float64.
        mask: added to the scores: floating point, broadcastable to `input`; differentiable (T5's position bias).
        scale: multiplies `input` before the mask is added.
        dim: the dimension that sums to one; any but the last is transposed to be the last.
        backend: "auto", "cuda", "triton", "cpu" or "reference".

    Returns:
        `input`'s shape, contiguous if `dim` is the last; `input`'s dtype,
        or float32 under CUDA's autocast, as torch.softmax.

    Raises:
        TypeError: a mask that is not floating point, such as a boolean one.
        BackendError: the backend named cannot run here; the message says why.
    """
    if dim != -1 and dim != input.dim() - 1:
        mask = None if mask is None else mask.expand(input.shape).transpose(dim, -1)
        return softmax(input.transpose(dim, -1), mask, scale=scale, backend=backend).transpose(dim, -1)
    if mask is not None and not mask.dtype.is_floating_point:
        raise TypeError(f"mask is added to the scores and must be floating point, not {mask.dtype}")
    if not is_dynamo_compiling():
        output = _DIRECT.run(backend, input, mask, scale)
        if output is not NotImplemented:
            return output
    mask_dtype = None if mask is None else mask.dtype
    output_dtype = autocast_dtype(input)
    chosen = registry.pick("softmax", backend, input.device, (input.dtype, mask_dtype))
    if chosen == "reference":
        return _reference(input, mask, scale, output_dtype)
    if needs_autograd(input, mask):
        return apply(_Softmax, chosen, input, mask, scale, output_dtype)
    return FWD[chosen](input, mask, scale, output_dtype)


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_(requires_grad)

    yield registry.SampleInput((make(4, 33),))
    yield registry.SampleInput((make(2, 3, 5, 17), make(2, 1, 1, 17)), {"scale": 0.125})
    yield registry.SampleInput((make(2, 3, 5, 17), make(1, 3, 5, 17)))
    yield registry.SampleInput((make(2, 3, 5), make(5, dtype=torch.promote_types(dtype, torch.float32))))
    yield registry.SampleInput((make(2, 5, 3), make(5, 3)), {"dim": 1})
    yield registry.SampleInput((make(9),))
    yield registry.SampleInput((make(0, 8), make(1, 8)))
    yield registry.SampleInput((make(3, 0),))


def bench_input(device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> registry.SampleInput:
    return registry.SampleInput((torch.randn(rows, columns, device=device, dtype=dtype, requires_grad=True),))


def bench_attention_input(
    device: torch.device, dtype: torch.dtype, batch: int, heads: int, queries: int, keys: int
) -> registry.SampleInput:
    scores = torch.randn(batch, heads, queries, keys, device=device, dtype=dtype, requires_grad=True)
    mask = torch.full((batch, 1, queries, keys), float("-inf"), device=device, dtype=dtype).triu(1)
    return registry.SampleInput((scores, mask), {"scale": 0.125})


def _torch_softmax(input: Tensor) -> Tensor:
    return torch.softmax(input, -1)


def _eager_attention(input: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    return torch.softmax(input * scale + mask, -1)


registry.register(
    registry.Op(
        name="softmax",
        raw=("softmax_fwd", "softmax_bwd"),
        function=softmax,
        reference=softmax_reference,
        sample_inputs=sample_inputs,
        backends=(registry.CUDA, registry.TRITON, registry.CPU, registry.REFERENCE),
        benchmarks=(
            registry.Benchmark(
                bench_input,
                shapes=("8192x4096", "4096x50257", "64x262144"),
                more_shapes=("8x768",),
                torch=_torch_softmax,
            ),
            registry.Benchmark(
                bench_attention_input,
                shapes=("8x12x128x128",),
                variant="scale, mask",
                eager=_eager_attention,
            ),
        ),
    )
)
