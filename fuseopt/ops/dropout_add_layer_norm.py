"""Dropout, a residual add and the layer normalisation of the sum as one op that keeps no mask."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fuseopt.ops import registry
from fuseopt.ops.layer_norm import layer_norm_reference, normalise
from fuseopt.ops.library import (
    apply,
    autocast_dtype,
    check_shape,
    compute_dtype,
    define,
    is_differentiated_again,
    needs_autograd,
    reference_vjp,
)
from fuseopt.ops.philox import keep_mask


def _fwd_fake(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor,
    p: float,
    eps: float,
    output_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sum = input.new_empty(input.shape, dtype=torch.promote_types(input.dtype, residual.dtype))
    mean = input.new_empty(input.shape[:-1], dtype=compute_dtype(sum))
    return input.new_empty(input.shape, dtype=output_dtype), sum, mean, torch.empty_like(mean)


def _bwd_fake(
    grad_output: Tensor,
    grad_sum: Tensor | None,
    sum: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    seed: Tensor,
    p: float,
    input_dtype: torch.dtype,
    *need_grad: bool,
) -> tuple[Tensor, ...]:
    dtype = compute_dtype(grad_output, sum, weight)
    parameters = (sum.new_empty(sum.shape[-1:] if need else (0,), dtype=dtype) for need in need_grad)
    return sum.new_empty(sum.shape, dtype=input_dtype), sum.new_empty(sum.shape), *parameters


FWD = define(
    "dropout_add_layer_norm_fwd(Tensor input, Tensor residual, Tensor? weight, Tensor? bias, Tensor seed, float p,"
    " float eps, ScalarType output_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    _fwd_fake,
    triton="fuseopt.ops.triton.dropout_add_norm",
)
BWD = define(
    "dropout_add_layer_norm_bwd(Tensor grad_output, Tensor? grad_sum, Tensor sum, Tensor? weight, Tensor mean,"
    " Tensor rstd, Tensor seed, float p, ScalarType input_dtype, bool need_weight_grad, bool need_bias_grad)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _bwd_fake,
    triton="fuseopt.ops.triton.dropout_add_norm",
)


# Kernels hold whole rows. For longer rows "auto" takes the reference.
MOST_ROW_BYTES = 32 * 1024


def dropout(input: Tensor, seed: Tensor, p: float) -> Tensor:
    """F.dropout, of the elements that `keep_mask` drops, in float32; float64 for a float64 input."""
    input = input.to(compute_dtype(input))
    if p == 0.0:
        return input
    return (input * (1.0 / (1.0 - p))).masked_fill(~keep_mask(seed, input.shape, p), 0.0)


def check_dropout_add(input: Tensor, residual: Tensor, seed: Tensor, p: float) -> None:
    """Raises ValueError for arguments whose shapes do not fit together."""
    check_shape("residual", residual, input.shape)
    check_shape("seed", seed, torch.Size((1,)))
    if not 0.0 <= p < 1.0:
        raise ValueError(f"p must be at least 0 and less than 1, not {p}")


def dropout_add_layer_norm_reference(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    seed: Tensor,
    p: float,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """`dropout_add_layer_norm` in plain PyTorch."""
    sum = (dropout(input, seed, p) + residual).to(torch.promote_types(input.dtype, residual.dtype))
    return layer_norm_reference(sum, sum.shape[-1:], weight, bias, eps), sum


class _DropoutAddLayerNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return FWD[backend](*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        ctx.backend, input, residual, weight, bias, seed, *ctx.scalars = inputs
        _, sum, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.dtypes = input.dtype, residual.dtype
        # Both addends have the gradient of the sum. A second derivative reaches them through the sum too.
        ctx.save_for_backward(sum, weight, bias, mean, rstd, seed)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_sum: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        sum, weight, bias, mean, rstd, seed = ctx.saved_tensors
        p, eps, output_dtype = ctx.scalars
        input_dtype, residual_dtype = ctx.dtypes
        _, _, _, need_weight_grad, need_bias_grad, *_ = ctx.needs_input_grad
        grad_input, grad, grad_weight, grad_bias = None, grad_sum, None, None
        if grad_output is not None and not is_differentiated_again():
            grad_input, grad, grad_weight, grad_bias = BWD[ctx.backend](
                grad_output,
                grad_sum,
                sum,
                weight,
                mean,
                rstd,
                seed,
                p,
                input_dtype,
                need_weight_grad,
                need_bias_grad,
            )
        elif grad_output is not None:

            def reference(sum: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
                return normalise(sum, weight, bias, eps, output_dtype)

            grad, grad_weight, grad_bias = reference_vjp(reference, grad_output, (sum, weight, bias))
            grad = grad if grad_sum is None else grad + grad_sum
        if grad_input is None and grad is not None:
            grad_input = dropout(grad, seed, p).to(input_dtype)
        grad_residual = None if grad is None else grad.to(residual_dtype)
        grad_weight = grad_weight.to(weight.dtype) if need_weight_grad and grad_weight is not None else None
        grad_bias = grad_bias.to(bias.dtype) if need_bias_grad and grad_bias is not None else None
        return None, grad_input, grad_residual, grad_weight, grad_bias, None, None, None, None


def dropout_add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    seed: Tensor,
    p: float,
    eps: float = 1e-5,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`sum = dropout(input) + residual`, rounded once, and its `layer_norm`, in one pass.

    Which elements are dropped is a function of `seed`, whatever the backend. The backward draws them again, so neither
    a mask nor the result of the dropout is kept.

    Args:
        input: [..., H], any strides; float32, float16, bfloat16 or float64. A kernel takes H up to 8192, up
            to 4096 where a tensor is float64; longer rows are left to the reference.
        residual: the shape of `input`; may have another of these dtypes.
        weight, bias: [H] or None; their dtypes may differ from the sum's.
        seed: [1], int64, on the device of `input`; draw one for each call: `philox.draw_seed`.
        p: the probability that an element of `input` is dropped, to a 2**16th, less than 1; 0 in eval mode.
        eps: added to the variance.
        backend: "auto", "triton" or "reference".

    Returns:
        (norm, sum), both [..., H] and contiguous. The sum has the dtype that `input` and `residual` promote to, the
        norm the sum's, or float32 under CUDA's autocast, as F.layer_norm.

    Raises:
        ValueError: a residual, parameter or seed of another shape, `p` out of range, rows too long for the kernel.
        BackendError: the backend named cannot run here; the message says why.
    """
    check_dropout_add(input, residual, seed, p)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            check_shape(name, parameter, input.shape[-1:])
    parameters = (None if parameter is None else parameter.dtype for parameter in (weight, bias))
    dtypes = (input.dtype, residual.dtype, *parameters)
    chosen = registry.pick("dropout_add_layer_norm", backend, input.device, dtypes)
    row_bytes = input.shape[-1] * compute_dtype(input, residual, weight, bias).itemsize
    if chosen == "reference" or (backend == "auto" and row_bytes > MOST_ROW_BYTES):
        return dropout_add_layer_norm_reference(input, residual, weight, bias, seed=seed, p=p, eps=eps)
    output_dtype = autocast_dtype(input) if residual.dtype is input.dtype else None
    output_dtype = output_dtype or torch.promote_types(input.dtype, residual.dtype)
    arguments = (input, residual, weight, bias, seed, p, eps, output_dtype)
    if needs_autograd(input, residual, weight, bias):
        output, sum, *_ = apply(_DropoutAddLayerNorm, chosen, *arguments)
    else:
        output, sum, *_ = FWD[chosen](*arguments)
    return output, sum


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    wide = torch.promote_types(dtype, torch.float32)

    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_(requires_grad)

    def drawn(*args: Tensor | None, p: float = 0.3, **kwargs: Any) -> registry.SampleInput:
        return registry.SampleInput(args, {"seed": torch.randint(2**62, (1,), device=device), "p": p, **kwargs})

    yield drawn(make(2, 3, 17), make(2, 3, 17), make(17), make(17))
    yield drawn(make(4, 64), make(4, 64, dtype=wide), make(64, dtype=wide), make(64, dtype=wide), p=0.1)
    yield drawn(make(5, 32, dtype=wide), make(5, 32), None, None, eps=1e-3)
    yield drawn(make(5, 8), make(5, 8), make(8), None, p=0.0)
    yield drawn(make(5, 8), make(5, 8), None, make(8))
    yield drawn(make(16), make(16), make(16), make(16), p=0.5)
    yield drawn(make(0, 8), make(0, 8), make(8), make(8))
    yield drawn(make(3, 0), make(3, 0), make(0), make(0))


def bench_input(device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> registry.SampleInput:
    shapes = ((rows, columns), (rows, columns), (columns,), (columns,))
    tensors = tuple(torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
    return registry.SampleInput(tensors, {"seed": torch.zeros(1, dtype=torch.int64, device=device), "p": 0.1})


registry.register(
    registry.Op(
        name="dropout_add_layer_norm",
        function=dropout_add_layer_norm,
        reference=dropout_add_layer_norm_reference,
        sample_inputs=sample_inputs,
        backends=(registry.TRITON, registry.REFERENCE),
        benchmarks=(registry.Benchmark(bench_input, shapes=("65536x768", "16384x4096")),),
    )
)
