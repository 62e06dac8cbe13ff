"""A residual add and the layer normalisation of its sum as one op: see `add_rms_norm`."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

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


def _fake(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    sum = input.new_empty(input.shape, dtype=torch.promote_types(input.dtype, residual.dtype))
    return sum.new_empty(sum.shape, dtype=output_dtype), sum


def _fwd_fake(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    output, sum = _fake(input, residual, weight, bias, eps, output_dtype)
    mean = input.new_empty(input.shape[:-1], dtype=compute_dtype(sum))
    return output, sum, mean, torch.empty_like(mean)


def _bwd_fake(
    grad_output: Tensor,
    grad_sum: Tensor | None,
    sum: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    need_weight_grad: bool,
    need_bias_grad: bool,
    bias_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    parameter = sum if weight is None else weight
    grad_weight = parameter.new_empty(sum.shape[-1:] if need_weight_grad else (0,))
    grad_bias = parameter.new_empty(sum.shape[-1:] if need_bias_grad else (0,), dtype=bias_dtype)
    return sum.new_empty(sum.shape), grad_weight, grad_bias


_ARGUMENTS = "Tensor input, Tensor residual, Tensor? weight, Tensor? bias, float eps, ScalarType? output_dtype=None"

# For calls without gradient. It returns no mean and rstd: allocating them takes more host time than all arguments.
INFERENCE = define(f"add_layer_norm({_ARGUMENTS}) -> (Tensor, Tensor)", _fake)
FWD = define(f"add_layer_norm_fwd({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)", _fwd_fake)
BWD = define(
    "add_layer_norm_bwd(Tensor grad_output, Tensor? grad_sum, Tensor sum, Tensor? weight, Tensor mean, Tensor rstd,"
    " bool need_weight_grad, bool need_bias_grad, ScalarType? bias_dtype=None) -> (Tensor, Tensor, Tensor)",
    _bwd_fake,
)


_DIRECT = registry.Direct("add_layer_norm", INFERENCE, autocasts=True)


def add_layer_norm_reference(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """`add_layer_norm` in plain PyTorch: torch's own add, then `layer_norm_reference`."""
    sum = input + residual
    return layer_norm_reference(sum, sum.shape[-1:], weight, bias, eps), sum


class _AddLayerNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return FWD[backend](*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        ctx.backend, input, residual, weight, bias, *ctx.scalars = inputs
        _, sum, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.dtypes = input.dtype, residual.dtype
        # Both addends have the gradient of the sum. A second derivative reaches them through the sum too.
        ctx.save_for_backward(sum, weight, bias, mean, rstd)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_sum: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        sum, weight, bias, mean, rstd = ctx.saved_tensors
        eps, output_dtype = ctx.scalars
        _, _, _, need_weight_grad, need_bias_grad, *_ = ctx.needs_input_grad
        grad, grad_weight, grad_bias = grad_sum, None, None
        if grad_output is not None and is_differentiated_again():
            reference = partial(normalise, eps=eps, output_dtype=output_dtype)
            grad, grad_weight, grad_bias = reference_vjp(reference, grad_output, (sum, weight, bias))
            grad = grad if grad_sum is None else grad + grad_sum
        elif grad_output is not None:
            grad, grad_weight, grad_bias = BWD[ctx.backend](
                grad_output,
                grad_sum,
                sum,
                weight,
                mean,
                rstd,
                need_weight_grad,
                need_bias_grad,
                None if bias is None else bias.dtype,
            )
        grad_input, grad_residual = (None if grad is None else grad.to(dtype) for dtype in ctx.dtypes)
        grad_weight = grad_weight if need_weight_grad else None
        grad_bias = grad_bias if need_bias_grad else None
        return None, grad_input, grad_residual, grad_weight, grad_bias, None, None


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`sum = input + residual`, rounded as torch's add rounds it, and its `layer_norm`, in one pass.

    Args:
        input: [..., H], any strides; float32, float16, bfloat16 or float64.
        residual: the shape of `input`; may have another of these dtypes.
        weight, bias: [H] or None; their dtypes may differ from the sum's.
        eps: added to the variance.
        backend: "auto", "cuda", "cpu" or "reference".

    Returns:
        (norm, sum), both [..., H] and contiguous. The sum has the dtype that `input` and `residual` promote to, the
        norm the sum's, or float32 under CUDA's autocast, as F.layer_norm.

    Raises:
        ValueError: a residual or parameter of another shape.
        BackendError: the backend named cannot run here; the message says why.
    """
    if not is_dynamo_compiling():
        outputs = _DIRECT.run(backend, input, residual, weight, bias, eps)
        if outputs is not NotImplemented:
            return outputs
    check_shape("residual", residual, input.shape)
    if weight is not None:
        check_shape("weight", weight, input.shape[-1:])
    if bias is not None:
        check_shape("bias", bias, input.shape[-1:])
    parameters = (None if parameter is None else parameter.dtype for parameter in (weight, bias))
    dtypes = (input.dtype, residual.dtype, *parameters)
    chosen = registry.pick("add_layer_norm", backend, input.device, dtypes)
    if chosen == "reference":
        return add_layer_norm_reference(input, residual, weight, bias, eps)
    output_dtype = autocast_dtype(input) if residual.dtype is input.dtype else None
    if needs_autograd(input, residual, weight, bias):
        return apply(_AddLayerNorm, chosen, input, residual, weight, bias, eps, output_dtype)[:2]
    return INFERENCE[chosen](input, residual, weight, bias, eps, output_dtype)


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_(requires_grad)

    wide = torch.promote_types(dtype, torch.float32)
    yield registry.SampleInput((make(2, 3, 17), make(2, 3, 17), make(17), make(17)))
    yield registry.SampleInput((make(4, 64), make(4, 64, dtype=wide), make(64, dtype=wide), make(64, dtype=wide)))
    yield registry.SampleInput((make(5, 32, dtype=wide), make(5, 32), None, None, 1e-3))
    yield registry.SampleInput((make(5, 8), make(5, 8), make(8), None))
    yield registry.SampleInput((make(5, 8), make(5, 8), None, make(8)))
    yield registry.SampleInput((make(16), make(16), make(16), make(16)))
    yield registry.SampleInput((make(0, 8), make(0, 8), make(8), make(8)))
    yield registry.SampleInput((make(3, 0), make(3, 0), make(0), make(0)))


def bench_input(device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> registry.SampleInput:
    shapes = ((rows, columns), (rows, columns), (columns,), (columns,))
    return registry.SampleInput(
        tuple(torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
    )


registry.register(
    registry.Op(
        name="add_layer_norm",
        raw=("add_layer_norm", "add_layer_norm_fwd", "add_layer_norm_bwd"),
        function=add_layer_norm,
        reference=add_layer_norm_reference,
        sample_inputs=sample_inputs,
        backends=(registry.CUDA, registry.CPU, registry.REFERENCE),
        benchmarks=(
            registry.Benchmark(
                bench_input,
                shapes=("65536x768", "16384x4096"),
                more_shapes=("4096x768", "16384x1600", "8192x1001"),
                eager=add_layer_norm_reference,
            ),
        ),
    )
)
