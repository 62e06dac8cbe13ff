"""Dropout, a residual add and the RMSNorm of the sum as one op that keeps no mask."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fuseopt.ops import registry
from fuseopt.ops.dropout_add_layer_norm import MOST_ROW_BYTES, check_dropout_add, dropout
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


def _fwd_fake(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    seed: Tensor,
    p: float,
    eps: float,
    cast_order: int,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor]:
    sum = input.new_empty(input.shape, dtype=torch.promote_types(input.dtype, residual.dtype))
    _, output_dtype = cast_dtypes(cast_order, sum.dtype, None if weight is None else weight.dtype)
    rstd = input.new_empty(input.shape[:-1], dtype=compute_dtype(sum))
    return input.new_empty(input.shape, dtype=output_dtype), sum, rstd


def _bwd_fake(
    grad_output: Tensor,
    grad_sum: Tensor | None,
    sum: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    seed: Tensor,
    p: float,
    offset: float,
    input_dtype: torch.dtype,
    need_weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_weight_shape = sum.shape[-1:] if need_weight_grad else (0,)
    grad_weight = sum.new_empty(grad_weight_shape, dtype=compute_dtype(grad_output, sum, weight))
    return sum.new_empty(sum.shape, dtype=input_dtype), sum.new_empty(sum.shape), grad_weight


FWD = define(
    "dropout_add_rms_norm_fwd(Tensor input, Tensor residual, Tensor? weight, Tensor seed, float p, float eps,"
    " int cast_order, float offset) -> (Tensor, Tensor, Tensor)",
    _fwd_fake,
    triton="fuseopt.ops.triton.dropout_add_norm",
)
BWD = define(
    "dropout_add_rms_norm_bwd(Tensor grad_output, Tensor? grad_sum, Tensor sum, Tensor? weight, Tensor rstd,"
    " Tensor seed, float p, float offset, ScalarType input_dtype, bool need_weight_grad) -> (Tensor, Tensor, Tensor)",
    _bwd_fake,
    triton="fuseopt.ops.triton.dropout_add_norm",
)


def dropout_add_rms_norm_reference(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    seed: Tensor,
    p: float,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_order: str = "input",
) -> tuple[Tensor, Tensor]:
    """`dropout_add_rms_norm` in plain PyTorch."""
    sum = (dropout(input, seed, p) + residual).to(torch.promote_types(input.dtype, residual.dtype))
    return rms_norm_reference(sum, weight, eps, offset=offset, cast_order=cast_order), sum


class _DropoutAddRMSNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return FWD[backend](*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.backend, input, residual, weight, seed, *ctx.scalars = inputs
        _, sum, rstd = output
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        ctx.dtypes = input.dtype, residual.dtype
        # Both addends have the gradient of the sum. A second derivative reaches them through the sum too.
        ctx.save_for_backward(sum, weight, rstd, seed)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_sum: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        sum, weight, rstd, seed = ctx.saved_tensors
        p, eps, cast_order, offset = ctx.scalars
        input_dtype, residual_dtype = ctx.dtypes
        need_weight_grad = ctx.needs_input_grad[3]
        grad_input, grad, grad_weight = None, grad_sum, None
        if grad_output is not None and not is_differentiated_again():
            grad_input, grad, grad_weight = BWD[ctx.backend](
                grad_output, grad_sum, sum, weight, rstd, seed, p, offset, input_dtype, need_weight_grad
            )
        elif grad_output is not None:
            reference = partial(normalise, eps=eps, cast_order=cast_order, offset=offset)
            grad, grad_weight = reference_vjp(reference, grad_output, (sum, weight))
            grad = grad if grad_sum is None else grad + grad_sum
        if grad_input is None and grad is not None:
            grad_input = dropout(grad, seed, p).to(input_dtype)
        grad_residual = None if grad is None else grad.to(residual_dtype)
        grad_weight = grad_weight.to(weight.dtype) if need_weight_grad and grad_weight is not None else None
        return None, grad_input, grad_residual, grad_weight, None, None, None, None, None


def dropout_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    seed: Tensor,
    p: float,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_order: str = "input",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`sum = dropout(input) + residual`, rounded once, and `rms_norm(sum, weight, eps, ...)` in one pass.

    Which elements are dropped is a function of `seed`, whatever the backend. The backward draws them again, so neither
    a mask nor the result of the dropout is kept.

    Args:
        input, residual, seed, p: as for `dropout_add_layer_norm`.
        weight, eps, offset, cast_order: as for `rms_norm` of the sum.
        backend: "auto", "triton" or "reference".

    Returns:
        (norm, sum), both [..., H] and contiguous. The sum has the dtype that `input` and `residual` promote to, the
        norm the one that `rms_norm` gives for the sum.

    Raises:
        ValueError: an unknown `cast_order`, a residual, weight or seed of another shape, `p` out of range, rows too
            long for the kernel.
        BackendError: the backend named cannot run here; the message says why.
    """
    code = cast_order_code(cast_order)
    check_dropout_add(input, residual, seed, p)
    if weight is not None:
        check_shape("weight", weight, input.shape[-1:])
    dtypes = (input.dtype, residual.dtype, None if weight is None else weight.dtype)
    chosen = registry.pick("dropout_add_rms_norm", backend, input.device, dtypes)
    row_bytes = input.shape[-1] * compute_dtype(input, residual, weight).itemsize
    if chosen == "reference" or (backend == "auto" and row_bytes > MOST_ROW_BYTES):
        options = {"seed": seed, "p": p, "eps": eps, "offset": offset, "cast_order": cast_order}
        return dropout_add_rms_norm_reference(input, residual, weight, **options)
    arguments = (input, residual, weight, seed, p, eps, code, offset)
    if needs_autograd(input, residual, weight):
        output, sum, _ = apply(_DropoutAddRMSNorm, chosen, *arguments)
    else:
        output, sum, _ = FWD[chosen](*arguments)
    return output, sum


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    wide = torch.promote_types(dtype, torch.float32)

    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_(requires_grad)

    def drawn(*args: Tensor | None, p: float = 0.3, **kwargs: Any) -> registry.SampleInput:
        return registry.SampleInput(args, {"seed": torch.randint(2**62, (1,), device=device), "p": p, **kwargs})

    for cast_order, offset in (("input", 1.0), ("t5", 0.0), ("llama", 0.0)):
        yield drawn(make(2, 3, 17), make(2, 3, 17), make(17), offset=offset, cast_order=cast_order)
    yield drawn(make(4, 64), make(4, 64, dtype=wide), make(64, dtype=wide), p=0.1)
    yield drawn(make(5, 32, dtype=wide), make(5, 32), None, eps=1e-3, offset=1.0)
    yield drawn(make(16), make(16), make(16), p=0.0)
    yield drawn(make(0, 8), make(0, 8), make(8))
    yield drawn(make(3, 0), make(3, 0), make(0))


def bench_input(device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> registry.SampleInput:
    shapes = ((rows, columns), (rows, columns), (columns,))
    tensors = tuple(torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
    seed = torch.zeros(1, dtype=torch.int64, device=device)
    return registry.SampleInput(tensors, {"seed": seed, "p": 0.1, "cast_order": "t5"})


registry.register(
    registry.Op(
        name="dropout_add_rms_norm",
        function=dropout_add_rms_norm,
        reference=dropout_add_rms_norm_reference,
        sample_inputs=sample_inputs,
        backends=(registry.TRITON, registry.REFERENCE),
        benchmarks=(registry.Benchmark(bench_input, shapes=("65536x768", "16384x4096")),),
    )
)
