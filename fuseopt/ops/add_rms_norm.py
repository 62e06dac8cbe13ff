"""A residual add and the RMSNorm of its sum in one op, as between two sublayers of a pre-norm transformer."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fuseopt.ops import registry
from fuseopt.ops.library import (
    apply,
    check_shape,
    compute_dtype,
    define,
    is_differentiated_again,
    needs_autograd,
    reference_vjp,
)
from fuseopt.ops.rms_norm import cast_dtypes, cast_order_code, normalise, rms_norm_reference


def _fake(
    input: Tensor, residual: Tensor, weight: Tensor | None, eps: float, cast_order: int = 0, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    sum = input.new_empty(input.shape, dtype=torch.promote_types(input.dtype, residual.dtype))
    _, output_dtype = cast_dtypes(cast_order, sum.dtype, None if weight is None else weight.dtype)
    return input.new_empty(input.shape, dtype=output_dtype), sum


def _fwd_fake(
    input: Tensor, residual: Tensor, weight: Tensor | None, eps: float, cast_order: int = 0, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    output, sum = _fake(input, residual, weight, eps, cast_order, offset)
    return output, sum, input.new_empty(input.shape[:-1], dtype=compute_dtype(sum))


def _bwd_fake(
    grad_output: Tensor,
    grad_sum: Tensor | None,
    sum: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    need_weight_grad: bool,
) -> tuple[Tensor, Tensor]:
    weight_grad_shape = weight.shape if weight is not None and need_weight_grad else (0,)
    return sum.new_empty(sum.shape), (sum if weight is None else weight).new_empty(weight_grad_shape)


_ARGUMENTS = "Tensor input, Tensor residual, Tensor? weight, float eps, int cast_order=0, float offset=0.0"

# For calls without gradient: it does not return rstd, whose allocation takes more host time than all arguments.
INFERENCE = define(f"add_rms_norm({_ARGUMENTS}) -> (Tensor, Tensor)", _fake)
FWD = define(f"add_rms_norm_fwd({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)", _fwd_fake)
BWD = define(
    "add_rms_norm_bwd(Tensor grad_output, Tensor? grad_sum, Tensor sum, Tensor? weight, Tensor rstd, float offset,"
    " bool need_weight_grad) -> (Tensor, Tensor)",
    _bwd_fake,
)


_DIRECT = registry.Direct("add_rms_norm", INFERENCE)


def add_rms_norm_reference(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast_order: str = "input",
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` in plain PyTorch: torch's own add, then `rms_norm_reference`."""
    sum = input + residual
    return rms_norm_reference(sum, weight, eps, offset=offset, cast_order=cast_order), sum


class _AddRMSNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return FWD[backend](*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.backend, input, residual, weight, *ctx.scalars = inputs
        _, sum, rstd = output
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        ctx.dtypes = input.dtype, residual.dtype
        # Both addends have the gradient of the sum. A second derivative reaches them through the sum too.
        ctx.save_for_backward(sum, weight, rstd)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_sum: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        sum, weight, rstd = ctx.saved_tensors
        eps, cast_order, offset = ctx.scalars
        need_weight_grad = ctx.needs_input_grad[3]
        grad, grad_weight = grad_sum, None
        if grad_output is not None and is_differentiated_again():
            reference = partial(normalise, eps=eps, cast_order=cast_order, offset=offset)
            grad, grad_weight = reference_vjp(reference, grad_output, (sum, weight))
            grad = grad if grad_sum is None else grad + grad_sum
        elif grad_output is not None:
            grad, grad_weight = BWD[ctx.backend](grad_output, grad_sum, sum, weight, rstd, offset, need_weight_grad)
        grad_input, grad_residual = (None if grad is None else grad.to(dtype) for dtype in ctx.dtypes)
        grad_weight = grad_weight if need_weight_grad else None
        return None, grad_input, grad_residual, grad_weight, None, None, None


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast_order: str = "input",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`sum = input + residual`, rounded as torch's add rounds it, and `rms_norm(sum, weight, eps, ...)` in one pass.

    Args:
        input: [..., H], any strides; float32, float16, bfloat16 or float64.
        residual: the shape of `input`; may have another of these dtypes.
        weight, eps, offset, cast_order: as for `rms_norm` of the sum.
        backend: "auto", "cuda", "cpu" or "reference".

    Returns:
        (norm, sum), both [..., H] and contiguous. The sum has the dtype that `input` and `residual` promote to, the
        norm the one that `rms_norm` gives for the sum.

    Raises:
        ValueError: an unknown `cast_order`, or a residual or weight of another shape.
        BackendError: the backend named cannot run here; the message says why.
    """
    code = cast_order_code(cast_order)
    if not is_dynamo_compiling():
        outputs = _DIRECT.run(backend, input, residual, weight, eps, code, offset)
        if outputs is not NotImplemented:
            return outputs
    check_shape("residual", residual, input.shape)
    if weight is not None:
        check_shape("weight", weight, input.shape[-1:])
    dtypes = (input.dtype, residual.dtype, None if weight is None else weight.dtype)
    chosen = registry.pick("add_rms_norm", backend, input.device, dtypes)
    if chosen == "reference":
        return add_rms_norm_reference(input, residual, weight, eps, offset=offset, cast_order=cast_order)
    if needs_autograd(input, residual, weight):
        return apply(_AddRMSNorm, chosen, input, residual, weight, eps, code, offset)[:2]
    return INFERENCE[chosen](input, residual, weight, eps, code, offset)


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_(requires_grad)

    wide = torch.promote_types(dtype, torch.float32)
    for cast_order, offset in (("input", 1.0), ("t5", 0.0), ("llama", 0.0)):
        arguments = {"offset": offset, "cast_order": cast_order}
        yield registry.SampleInput((make(2, 3, 17), make(2, 3, 17), make(17)), arguments)
    yield registry.SampleInput((make(4, 64), make(4, 64, dtype=wide), make(64, dtype=wide)))
    yield registry.SampleInput((make(5, 32, dtype=wide), make(5, 32), None, 1e-3), {"offset": 1.0})
    yield registry.SampleInput((make(16), make(16), make(16)))
    yield registry.SampleInput((make(0, 8), make(0, 8), make(8)))
    yield registry.SampleInput((make(3, 0), make(3, 0), make(0)))


def bench_input(device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> registry.SampleInput:
    shapes = ((rows, columns), (rows, columns), (columns,))
    tensors = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
    return registry.SampleInput(tuple(tensors), {"eps": 1e-6, "cast_order": "t5"})


registry.register(
    registry.Op(
        name="add_rms_norm",
        raw=("add_rms_norm", "add_rms_norm_fwd", "add_rms_norm_bwd"),
        function=add_rms_norm,
        reference=add_rms_norm_reference,
        sample_inputs=sample_inputs,
        backends=(registry.CUDA, registry.CPU, registry.REFERENCE),
        benchmarks=(
            registry.Benchmark(
                bench_input,
                shapes=("65536x768", "16384x4096"),
                more_shapes=("4096x768", "16384x1600", "8192x1001"),
                eager=add_rms_norm_reference,
            ),
        ),
    )
)
