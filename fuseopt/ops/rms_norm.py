"""RMSNorm over the last dimension, in the cast orders of T5, Llama, Gemma and torch.nn.RMSNorm.

Root Mean Square Layer Normalization, Zhang and Sennrich 2019 (arXiv 1910.07467). The upstream classes differ only in
where they round to a low precision and in an offset to the weight, so one op serves them all.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

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

CAST_ORDERS = {"input": 0, "t5": 1, "llama": 2}
"""The codes by which raw ops know them: a dtype costs a call several times what an integer does."""


def cast_dtypes(
    cast_order: int, input_dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes (norm_dtype, output_dtype) that the normalised input and the result are rounded to."""
    wide = torch.float64 if torch.float64 in (input_dtype, weight_dtype) else torch.float32
    weight_dtype = input_dtype if weight_dtype is None else weight_dtype
    if cast_order == CAST_ORDERS["input"]:
        return wide, input_dtype
    if cast_order == CAST_ORDERS["t5"]:
        norm_dtype = weight_dtype if weight_dtype in (torch.float16, torch.bfloat16) else wide
        return norm_dtype, norm_dtype
    return input_dtype, torch.promote_types(input_dtype, weight_dtype)


def cast_order_code(cast_order: str) -> int:
    """Its place in CAST_ORDERS; ValueError where it has none."""
    if cast_order not in CAST_ORDERS:
        raise ValueError(f"cast_order must be 'input', 't5' or 'llama', not {cast_order!r}")
    return CAST_ORDERS[cast_order]


def _fake(input: Tensor, weight: Tensor | None, eps: float, cast_order: int = 0, offset: float = 0.0) -> Tensor:
    _, output_dtype = cast_dtypes(cast_order, input.dtype, None if weight is None else weight.dtype)
    return input.new_empty(input.shape, dtype=output_dtype)


def _fwd_fake(
    input: Tensor, weight: Tensor | None, eps: float, cast_order: int = 0, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    rstd = input.new_empty(input.shape[:-1], dtype=compute_dtype(input))
    return _fake(input, weight, eps, cast_order, offset), rstd


def _bwd_fake(
    grad_output: Tensor, input: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, need_weight_grad: bool
) -> tuple[Tensor, Tensor]:
    weight_grad_shape = weight.shape if weight is not None and need_weight_grad else (0,)
    return input.new_empty(input.shape), (input if weight is None else weight).new_empty(weight_grad_shape)


_ARGUMENTS = "Tensor input, Tensor? weight, float eps, int cast_order=0, float offset=0.0"

# Where nothing will be differentiated: without rstd, whose allocation costs a call more than all arguments.
INFERENCE = define(f"rms_norm({_ARGUMENTS}) -> Tensor", _fake, triton="fuseopt.ops.triton.rms_norm")
FWD = define(f"rms_norm_fwd({_ARGUMENTS}) -> (Tensor, Tensor)", _fwd_fake, triton="fuseopt.ops.triton.rms_norm")
BWD = define(
    "rms_norm_bwd(Tensor grad_output, Tensor input, Tensor? weight, Tensor rstd, float offset, bool need_weight_grad)"
    " -> (Tensor, Tensor)",
    _bwd_fake,
    triton="fuseopt.ops.triton.rms_norm",
)


def normalise(input: Tensor, weight: Tensor | None, eps: float, cast_order: int, offset: float) -> Tensor:
    """The norm in plain PyTorch; arguments as those of the raw op."""
    dtype = compute_dtype(input, weight)
    norm_dtype, output_dtype = cast_dtypes(cast_order, input.dtype, None if weight is None else weight.dtype)
    x = input.to(dtype)
    xhat = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)).to(norm_dtype)
    if weight is None:
        return xhat.to(output_dtype)
    return (xhat.to(dtype) * (weight.to(dtype) + offset)).to(output_dtype)


_DIRECT = registry.Direct("rms_norm", INFERENCE)


def rms_norm_reference(
    input: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0, cast_order: str = "input"
) -> Tensor:
    """`rms_norm` in plain PyTorch: the arithmetic of T5LayerNorm, LlamaRMSNorm and GemmaRMSNorm, bit for bit."""
    return normalise(input, weight, eps, cast_order_code(cast_order), offset)


class _RMSNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Any) -> tuple[Tensor, Tensor]:
        return FWD[backend](*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.backend, input, weight, *ctx.scalars = inputs
        _, rstd = output
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, weight, rstd)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return (None,) * 6
        input, weight, rstd = ctx.saved_tensors
        eps, cast_order, offset = ctx.scalars
        need_weight_grad = ctx.needs_input_grad[2]
        if is_differentiated_again():
            reference = partial(normalise, eps=eps, cast_order=cast_order, offset=offset)
            grad_input, grad_weight = reference_vjp(reference, grad_output, (input, weight))
        else:
            grad_input, grad_weight = BWD[ctx.backend](grad_output, input, weight, rstd, offset, need_weight_grad)
        return None, grad_input, grad_weight if need_weight_grad else None, None, None, None


def rms_norm(
    input: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast_order: str = "input",
    backend: str = "auto",
) -> Tensor:
    """`input / sqrt(mean(input**2) + eps) * (weight + offset)`, in float32 (float64 where a tensor is float64).

    Autocast does not change it: the arithmetic is never in half precision.

    Args:
        input: [..., H], any strides; float32, float16, bfloat16 or float64.
        weight: [H] or None; may have another dtype than `input`.
        eps: added to the mean square.
        offset: 1.0 for Gemma, which stores its weight minus one; nothing without a weight.
        cast_order: where the upstream class rounds. "input" (torch.nn.RMSNorm, Gemma): once, at the end, to `input`'s
            dtype. "t5": before the weight, to the weight's dtype if that is float16 or bfloat16, else not at all; this
            is also the result's dtype. "llama": before the weight, to `input`'s dtype; the result has the dtype that
            `input` and `weight` promote to.
        backend: "auto", "cuda", "triton", "cpu" or "reference".

    Returns:
        [..., H], contiguous.

    Raises:
        ValueError: an unknown `cast_order`, or a weight of another shape.
        BackendError: the backend named cannot run here; the message says why.
    """
    code = cast_order_code(cast_order)
    if not is_dynamo_compiling():
        output = _DIRECT.run(backend, input, weight, eps, code, offset)
        if output is not NotImplemented:
            return output
    if weight is not None:
        check_shape("weight", weight, input.shape[-1:])
    dtypes = (input.dtype, None if weight is None else weight.dtype)
    chosen = registry.pick("rms_norm", backend, input.device, dtypes)
    if chosen == "reference":
        return normalise(input, weight, eps, code, offset)
    if needs_autograd(input, weight):
        return apply(_RMSNorm, chosen, input, weight, eps, code, offset)[0]
    return INFERENCE[chosen](input, weight, eps, code, offset)


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_(requires_grad)

    for cast_order, offset in (("input", 0.0), ("input", 1.0), ("t5", 0.0), ("llama", 0.0)):
        yield registry.SampleInput((make(2, 3, 17), make(17)), {"offset": offset, "cast_order": cast_order})
    yield registry.SampleInput((make(4, 64), None, 1e-3), {"offset": 1.0})
    yield registry.SampleInput((make(5, 33), make(33, dtype=torch.promote_types(dtype, torch.float32))))
    yield registry.SampleInput((make(16), make(16)))
    yield registry.SampleInput((make(0, 8), make(8)))
    yield registry.SampleInput((make(3, 0), make(0)))


def bench_input(device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> registry.SampleInput:
    input, weight = (
        torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in ((rows, columns), (columns,))
    )
    return registry.SampleInput((input, weight), {"eps": 1e-6, "cast_order": "t5"})


class _T5LayerNormState(NamedTuple):
    weight: Tensor
    variance_epsilon: float


def _t5_layer_norm(module_class: Any, input: Tensor, weight: Tensor, eps: float, cast_order: str) -> Tensor:
    return module_class.forward(_T5LayerNormState(weight, eps), input)


def _torch_rms_norm(input: Tensor, weight: Tensor, eps: float, cast_order: str) -> Tensor:
    return F.rms_norm(input, weight.shape, weight, eps)


registry.register(
    registry.Op(
        name="rms_norm",
        raw=("rms_norm", "rms_norm_fwd", "rms_norm_bwd"),
        function=rms_norm,
        reference=rms_norm_reference,
        sample_inputs=sample_inputs,
        backends=(registry.CUDA, registry.TRITON, registry.CPU, registry.REFERENCE),
        benchmarks=(
            registry.Benchmark(
                bench_input,
                shapes=("65536x768", "16384x4096", "4096x768", "8x768"),
                more_shapes=("65536x128", "16384x1600", "8192x1001"),
                eager=registry.Upstream("transformers.models.t5.modeling_t5.T5LayerNorm", _t5_layer_norm),
                torch=_torch_rms_norm,
            ),
        ),
    )
)
