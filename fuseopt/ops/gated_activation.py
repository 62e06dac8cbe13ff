"""Gated activations, the elementwise middle of GEGLU, SwiGLU and ReGLU layers (Shazeer 2020, arXiv 2002.05202)."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fuseopt.ops import registry
from fuseopt.ops.library import (
    apply,
    check_shape,
    define,
    is_differentiated_again,
    needs_autograd,
    reference_vjp,
)

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


# Raw ops take an activation as its index in this tuple.
_CODES = {name: code for code, name in enumerate(ACTIVATIONS)}
_FUNCTIONS = tuple(ACTIVATIONS.values())


def _fwd_fake(gate: Tensor, up: Tensor, activation: int, activation_dtype: torch.dtype | None = None) -> Tensor:
    return gate.new_empty(gate.shape, dtype=torch.promote_types(activation_dtype or gate.dtype, up.dtype))


def _bwd_fake(
    grad_output: Tensor, gate: Tensor, up: Tensor, activation: int, activation_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


FWD = define(
    "gated_activation_fwd(Tensor gate, Tensor up, int activation, ScalarType? activation_dtype=None) -> Tensor",
    _fwd_fake,
    triton="fuseopt.ops.triton.gated_activation",
)
BWD = define(
    "gated_activation_bwd(Tensor grad_output, Tensor gate, Tensor up, int activation,"
    " ScalarType? activation_dtype=None) -> (Tensor, Tensor)",
    _bwd_fake,
    triton="fuseopt.ops.triton.gated_activation",
)


_DIRECT = registry.Direct("gated_activation", FWD)


def _reference(gate: Tensor, up: Tensor, activation: int, activation_dtype: torch.dtype | None) -> Tensor:
    return _FUNCTIONS[activation](gate if activation_dtype is None else gate.to(activation_dtype)) * up


def _code(activation: str) -> int:
    if activation not in _CODES:
        raise ValueError(f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}, not {activation!r}")
    return _CODES[activation]


def gated_activation_reference(
    gate: Tensor, up: Tensor, activation: str = "silu", *, activation_dtype: torch.dtype | None = None
) -> Tensor:
    """`gated_activation` by torch's own two operations."""
    return _reference(gate, up, _code(activation), activation_dtype)


class _GatedActivation(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Any) -> Tensor:
        return FWD[backend](*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.backend, gate, up, ctx.activation, ctx.activation_dtype = inputs
        ctx.save_for_backward(gate, up)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        if is_differentiated_again():
            reference = partial(_reference, activation=ctx.activation, activation_dtype=ctx.activation_dtype)
            gradients = reference_vjp(reference, grad_output, (gate, up))
        else:
            gradients = BWD[ctx.backend](grad_output, gate, up, ctx.activation, ctx.activation_dtype)
        needed = zip(gradients, ctx.needs_input_grad[1:3], strict=True)
        return None, *(gradient if is_needed else None for gradient, is_needed in needed), None, None


def gated_activation(
    gate: Tensor,
    up: Tensor,
    activation: str = "silu",
    *,
    activation_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """`activation(gate) * up` in one pass; the backward recomputes the activation from `gate`.

    The activation is computed in float32 (float64 where a tensor or `activation_dtype` is float64) and rounded to
    `activation_dtype` before the product, in the backward its gradient too: so the result is that of the two operations
    one after the other, which is what transformers' feed-forwards are. It is theirs to the bit for "relu", and on CUDA
    for "silu"; elsewhere the activation itself may fall on the neighbouring value. Autocast has no say in it.

    Args:
        gate: [..., H]; float32, float16, bfloat16 or float64. Any strides; on CUDA, rows that lie apart, as the halves
            of one [..., 2H] projection do, are read where they lie.
        up: `gate`'s shape; its dtype may differ.
        activation: "gelu" (erf), "gelu_tanh" (transformers' gelu_new and gelu_pytorch_tanh), "silu" or "relu".
        activation_dtype: dtype of `activation(gate)`; `gate`'s by default. float32 is what autocast makes of gelu_new.
        backend: "auto", "cuda", "triton", "cpu" or "reference".

    Returns:
        `gate`'s shape, contiguous, in the dtype that `activation_dtype` and `up`'s promote to.

    Raises:
        ValueError: an unknown `activation`, or an `up` of another shape.
        BackendError: the backend named cannot run here; the message says why.
    """
    code = _code(activation)
    if activation_dtype is gate.dtype:
        activation_dtype = None
    if not is_dynamo_compiling():
        output = _DIRECT.run(backend, gate, up, code, activation_dtype)
        if output is not NotImplemented:
            return output
    check_shape("up", up, gate.shape)
    chosen = registry.pick("gated_activation", backend, gate.device, (gate.dtype, up.dtype))
    if chosen == "reference":
        return _reference(gate, up, code, activation_dtype)
    if needs_autograd(gate, up):
        return apply(_GatedActivation, chosen, gate, up, code, activation_dtype)
    return FWD[chosen](gate, up, code, activation_dtype)


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return (2 * torch.randn(shape, device=device, dtype=dtype)).requires_grad_(requires_grad)

    wide = torch.promote_types(dtype, torch.float32)
    for activation in ACTIVATIONS:
        yield registry.SampleInput((make(2, 3, 17), make(2, 3, 17), activation))
    yield registry.SampleInput((make(4, 64), make(4, 64), "gelu_tanh"), {"activation_dtype": wide})
    yield registry.SampleInput((make(5, 33), make(5, 33, dtype=wide)))
    yield registry.SampleInput((make(0, 8), make(0, 8)))
    yield registry.SampleInput((make(3, 0), make(3, 0)))


def bench_input(
    device: torch.device, dtype: torch.dtype, rows: int, columns: int, *, activation: str
) -> registry.SampleInput:
    gate, up = (torch.randn(rows, columns, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    return registry.SampleInput((gate, up, activation))


def _gated_gelu_new(module_class: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return module_class()(gate) * up


registry.register(
    registry.Op(
        name="gated_activation",
        raw=("gated_activation_fwd", "gated_activation_bwd"),
        function=gated_activation,
        reference=gated_activation_reference,
        sample_inputs=sample_inputs,
        backends=(registry.CUDA, registry.TRITON, registry.CPU, registry.REFERENCE),
        benchmarks=(
            registry.Benchmark(
                partial(bench_input, activation="gelu_tanh"),
                shapes=("16384x2048", "8x2048"),
                variant="gelu_tanh",
                eager=registry.Upstream("transformers.activations.NewGELUActivation", _gated_gelu_new),
            ),
            registry.Benchmark(
                partial(bench_input, activation="silu"),
                shapes=("4096x11008", "8x11008"),
                variant="silu",
                eager=gated_activation_reference,
            ),
        ),
    )
)
