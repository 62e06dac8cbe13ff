"""GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415) with an optional bias, as torch.nn.functional.gelu."""

from collections.abc import Iterator
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
    compute_dtype,
    define,
    is_differentiated_again,
    needs_autograd,
    reference_vjp,
)


def _fwd_fake(
    input: Tensor, tanh: bool = False, bias: Tensor | None = None, output_dtype: torch.dtype | None = None
) -> Tensor:
    return input.new_empty(input.shape, dtype=output_dtype)


def _bwd_fake(grad_output: Tensor, input: Tensor, tanh: bool = False, bias: Tensor | None = None) -> Tensor:
    return input.new_empty(input.shape)


def _bias_bwd_fake(grad_output: Tensor, input: Tensor, tanh: bool, bias: Tensor) -> tuple[Tensor, Tensor]:
    return input.new_empty(input.shape), bias.new_empty(bias.shape)


FWD = define(
    "gelu_fwd(Tensor input, bool tanh=False, Tensor? bias=None, ScalarType? output_dtype=None) -> Tensor",
    _fwd_fake,
    triton="fuseopt.ops.triton.gelu",
)
BWD = define(
    "gelu_bwd(Tensor grad_output, Tensor input, bool tanh=False, Tensor? bias=None) -> Tensor",
    _bwd_fake,
    triton="fuseopt.ops.triton.gelu",
)

# Also returns the gradient of the bias; the CPU library has no such kernel.
BIAS_BWD = define(
    "gelu_bias_bwd(Tensor grad_output, Tensor input, bool tanh, Tensor bias) -> (Tensor, Tensor)",
    _bias_bwd_fake,
    triton="fuseopt.ops.triton.gelu",
)
_DIRECT = registry.Direct("gelu", FWD)


def _reference(input: Tensor, bias: Tensor | None, tanh: bool, output_dtype: torch.dtype | None) -> Tensor:
    approximate = "tanh" if tanh else "none"
    output_dtype = output_dtype or input.dtype
    if bias is None and output_dtype == input.dtype:
        return F.gelu(input, approximate=approximate)
    dtype = compute_dtype(input, bias)
    x = input.to(dtype)
    if bias is not None:
        x = x + bias.to(dtype)
    return F.gelu(x, approximate=approximate).to(output_dtype)


def gelu_reference(
    input: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: str = "none",
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """`gelu` by torch's own."""
    return _reference(input, bias, _is_tanh(approximate), output_dtype)


def _is_tanh(approximate: str) -> bool:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', not {approximate!r}")
    return approximate == "tanh"


class _GELU(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Any) -> Tensor:
        return FWD[backend](*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.backend, input, ctx.tanh, bias, ctx.output_dtype = inputs
        ctx.save_for_backward(input, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, bias = ctx.saved_tensors
        need_bias_grad = ctx.needs_input_grad[3]
        if is_differentiated_again():
            reference = partial(_reference, tanh=ctx.tanh, output_dtype=ctx.output_dtype)
            grad_input, grad_bias = reference_vjp(reference, grad_output, (input, bias))
        elif need_bias_grad and ctx.backend != "cpu":
            grad_input, grad_bias = BIAS_BWD[ctx.backend](grad_output, input, ctx.tanh, bias)
        elif need_bias_grad:
            # Rows are summed in the wider dtype, before the gradient is rounded to the input's dtype.
            wide = torch.promote_types(input.dtype, bias.dtype)
            grad = BWD[ctx.backend](grad_output, input.to(wide), ctx.tanh, bias)
            grad_input, grad_bias = grad.to(input.dtype), grad.sum_to_size(bias.shape).to(bias.dtype)
        else:
            grad_input = BWD[ctx.backend](grad_output, input, ctx.tanh, bias)
        return None, grad_input, None, grad_bias if need_bias_grad else None, None


def gelu(
    input: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: str = "none",
    output_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """`GELU(input + bias)`, sum and GELU in float32 (float64 where a tensor is float64) with one rounding at the end.

    Autocast does not change it, as it does not change F.gelu.

    Args:
        input: [..., H], any strides; float32, float16, bfloat16 or float64.
        bias: [H] or None: of the layer before; its dtype may differ from `input`'s.
        approximate: "none" for the error function, "tanh" for the approximation (transformers' gelu_new).
        output_dtype: the result's dtype; `input`'s by default.
        backend: "auto", "cuda", "cpu", "reference" or "triton", which "auto" leaves: F.gelu is one kernel as well.

    Returns:
        `input`'s shape, contiguous.

    Raises:
        ValueError: an unknown `approximate`, or a bias of another shape.
        BackendError: the backend named cannot run here; the message says why.
    """
    tanh = approximate == "tanh" or (approximate != "none" and _is_tanh(approximate))
    if not is_dynamo_compiling():
        output = _DIRECT.run(backend, input, tanh, bias, output_dtype)
        if output is not NotImplemented:
            return output
    bias_dtype = None if bias is None else bias.dtype
    if bias is not None:
        check_shape("bias", bias, input.shape[-1:])
    chosen = registry.pick("gelu", backend, input.device, (input.dtype, bias_dtype))
    if chosen == "reference":
        return _reference(input, bias, tanh, output_dtype)
    if needs_autograd(input, bias):
        return apply(_GELU, chosen, input, tanh, bias, output_dtype)
    return FWD[chosen](input, tanh, bias, output_dtype)


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return (2 * torch.randn(shape, device=device, dtype=dtype)).requires_grad_(requires_grad)

    wide = torch.promote_types(dtype, torch.float32)
    for approximate in ("none", "tanh"):
        yield registry.SampleInput((make(2, 3, 17),), {"approximate": approximate})
        yield registry.SampleInput((make(2, 3, 17), make(17)), {"approximate": approximate})
    yield registry.SampleInput((make(5, 33), make(33, dtype=wide)), {"output_dtype": wide})
    yield registry.SampleInput((make(7),))
    yield registry.SampleInput((make(0, 8), make(8)))
    yield registry.SampleInput((make(3, 0), make(0)))


def bench_input(
    device: torch.device, dtype: torch.dtype, rows: int, columns: int, *, approximate: str, with_bias: bool
) -> registry.SampleInput:
    input, bias = (
        torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in ((rows, columns), (columns,))
    )
    return registry.SampleInput((input, bias) if with_bias else (input,), {"approximate": approximate})


def _plus(input: Tensor, bias: Tensor | None) -> Tensor:
    return input if bias is None else input + bias


def _gelu_new(module_class: Any, input: Tensor, bias: Tensor | None = None, *, approximate: str) -> Tensor:
    return module_class()(_plus(input, bias))


def _torch_gelu(input: Tensor, bias: Tensor | None = None, *, approximate: str) -> Tensor:
    return F.gelu(_plus(input, bias), approximate=approximate)


def _benchmark(variant: str, approximate: str, with_bias: bool) -> registry.Benchmark:
    return registry.Benchmark(
        partial(bench_input, approximate=approximate, with_bias=with_bias),
        shapes=("16384x3072", "8x3072"),
        more_shapes=("4096x3072",),
        variant=variant,
        eager=registry.Upstream("transformers.activations.NewGELUActivation", _gelu_new)
        if approximate == "tanh"
        else None,
        torch=_torch_gelu,
    )


registry.register(
    registry.Op(
        name="gelu",
        raw=("gelu_fwd", "gelu_bwd"),
        function=gelu,
        reference=gelu_reference,
        sample_inputs=sample_inputs,
        backends=(registry.CUDA, registry.CPU, registry.REFERENCE, registry.TRITON),
        benchmarks=(
            _benchmark("tanh", "tanh", with_bias=False),
            _benchmark("tanh, bias", "tanh", with_bias=True),
            _benchmark("erf", "none", with_bias=False),
            _benchmark("erf, bias", "none", with_bias=True),
        ),
    )
)
