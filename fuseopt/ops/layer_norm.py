"""Layer normalisation (Ba, Kiros and Hinton 2016, arXiv 1607.06450), as torch.nn.functional.layer_norm."""

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fuseopt.ops import registry
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
    input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, output_dtype: torch.dtype | None = None
) -> Tensor:
    return input.new_empty(input.shape, dtype=output_dtype)


def _fwd_fake(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, output_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    mean = input.new_empty(input.shape[:-1], dtype=compute_dtype(input))
    return input.new_empty(input.shape, dtype=output_dtype), mean, torch.empty_like(mean)


def _bwd_fake(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    need_weight_grad: bool,
    need_bias_grad: bool,
    bias_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    parameter = input if weight is None else weight
    grad_weight = parameter.new_empty(input.shape[-1:] if need_weight_grad else (0,))
    grad_bias = parameter.new_empty(input.shape[-1:] if need_bias_grad else (0,), dtype=bias_dtype)
    return input.new_empty(input.shape), grad_weight, grad_bias


_ARGUMENTS = "Tensor input, Tensor? weight, Tensor? bias, float eps, ScalarType? output_dtype=None"

# Where nothing will be differentiated: without mean and rstd, whose allocation costs a call more than all arguments.
_TRITON = "fuseopt.ops.triton.layer_norm"
INFERENCE = define(f"layer_norm({_ARGUMENTS}) -> Tensor", _fake, triton=_TRITON)
FWD = define(f"layer_norm_fwd({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)", _fwd_fake, triton=_TRITON)
BWD = define(
    "layer_norm_bwd(Tensor grad_output, Tensor input, Tensor? weight, Tensor mean, Tensor rstd,"
    " bool need_weight_grad, bool need_bias_grad, ScalarType? bias_dtype=None) -> (Tensor, Tensor, Tensor)",
    _bwd_fake,
    triton=_TRITON,
)


_DIRECT = registry.Direct("layer_norm", INFERENCE, autocasts=True)


def normalise(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, output_dtype: torch.dtype | None = None
) -> Tensor:
    """The norm in plain PyTorch; arguments as those of the raw op."""
    output_dtype = output_dtype or input.dtype
    if weight is None and bias is not None:
        # Without a weight, torch's double backward leaves the bias out.
        weight = torch.ones_like(bias)
    dtype = input.dtype
    if {tensor.dtype for tensor in (weight, bias) if tensor is not None} | {output_dtype} != {dtype}:
        dtype = compute_dtype(input, weight, bias)
    weight = None if weight is None else weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    return F.layer_norm(input.to(dtype), input.shape[-1:], weight, bias, eps).to(output_dtype)


def _checked(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`input`, `weight` and `bias`, of fitting shapes, with the dimensions of `normalized_shape` made one."""
    if isinstance(normalized_shape, Tensor):
        raise TypeError("normalized_shape must be a sequence of int, not a tensor; weight and bias come after it")
    dims = len(normalized_shape)
    shape = input.shape[-dims:]
    if dims == 0 or shape != tuple(normalized_shape):
        raise ValueError(
            f"normalized_shape {tuple(normalized_shape)} is not the end of input's shape {tuple(input.shape)}"
        )
    if weight is not None:
        check_shape("weight", weight, shape)
    if bias is not None:
        check_shape("bias", bias, shape)
    if dims == 1:
        return input, weight, bias
    rows = input.reshape(*input.shape[:-dims], prod(normalized_shape))
    return rows, None if weight is None else weight.reshape(-1), None if bias is None else bias.reshape(-1)


def layer_norm_reference(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`layer_norm` by torch's own, with mixed dtypes brought to float32 (float64) first."""
    rows, weight, bias = _checked(input, normalized_shape, weight, bias)
    return normalise(rows, weight, bias, eps, autocast_dtype(input)).view(input.shape)


class _LayerNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return FWD[backend](*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.backend, input, weight, bias, *ctx.scalars = inputs
        _, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, weight, bias, mean, rstd)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return (None,) * 6
        input, weight, bias, mean, rstd = ctx.saved_tensors
        eps, output_dtype = ctx.scalars
        _, _, need_weight_grad, need_bias_grad, *_ = ctx.needs_input_grad
        if is_differentiated_again():
            reference = partial(normalise, eps=eps, output_dtype=output_dtype)
            grad_input, grad_weight, grad_bias = reference_vjp(reference, grad_output, (input, weight, bias))
        else:
            grad_input, grad_weight, grad_bias = BWD[ctx.backend](
                grad_output,
                input,
                weight,
                mean,
                rstd,
                need_weight_grad,
                need_bias_grad,
                None if bias is None else bias.dtype,
            )
        grad_weight = grad_weight if need_weight_grad else None
        grad_bias = grad_bias if need_bias_grad else None
        return None, grad_input, grad_weight, grad_bias, None, None


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str = "auto",
) -> Tensor:
    """`(input - mean) / sqrt(variance + eps) * weight + bias` over the dimensions of `normalized_shape`.

    The arithmetic is in float32, in float64 where a tensor is float64.

    Args:
        input: [..., *normalized_shape], any strides; float32, float16, bfloat16 or float64.
        normalized_shape: sizes of the last dimensions.
        weight, bias: of shape `normalized_shape`, or None; their dtypes may differ from `input`'s.
        eps: added to the variance.
        backend: "auto", "cuda", "triton", "cpu" or "reference".

    Returns:
        `input`'s shape, contiguous; `input`'s dtype, or float32 under CUDA's autocast, as F.layer_norm.

    Raises:
        TypeError: `normalized_shape` is a tensor.
        ValueError: `input` does not end in `normalized_shape`, or a parameter has another shape.
        BackendError: the backend named cannot run here; the message says why.
    """
    if not is_dynamo_compiling() and len(normalized_shape) == 1 and normalized_shape[0] == input.size(-1):
        output = _DIRECT.run(backend, input, weight, bias, eps)
        if output is not NotImplemented:
            return output
    rows, weight, bias = _checked(input, normalized_shape, weight, bias)
    output_dtype = autocast_dtype(input)
    dtypes = (input.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype)
    chosen = registry.pick("layer_norm", backend, input.device, dtypes)
    if chosen == "reference":
        output = normalise(rows, weight, bias, eps, output_dtype)
    elif needs_autograd(input, weight, bias):
        output = apply(_LayerNorm, chosen, rows, weight, bias, eps, output_dtype)[0]
    else:
        output = INFERENCE[chosen](rows, weight, bias, eps, output_dtype)
    return output if rows is input else output.view(input.shape)


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_(requires_grad)

    wide = torch.promote_types(dtype, torch.float32)
    yield registry.SampleInput((make(2, 3, 17), (17,), make(17), make(17)))
    yield registry.SampleInput((make(4, 64), (64,)), {"eps": 1e-3})
    yield registry.SampleInput((make(5, 33), (33,), make(33, dtype=wide), make(33, dtype=wide)))
    yield registry.SampleInput((make(5, 8), (8,), make(8), None))
    yield registry.SampleInput((make(5, 8), (8,), None, make(8)))
    yield registry.SampleInput((make(3, 4, 5), (4, 5), make(4, 5), make(4, 5)))
    yield registry.SampleInput((make(16), (16,), make(16), make(16)))
    yield registry.SampleInput((make(0, 8), (8,), make(8), make(8)))
    yield registry.SampleInput((make(3, 0), (0,), make(0), make(0)))


def bench_input(device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> registry.SampleInput:
    input, weight, bias = (
        torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
        for shape in ((rows, columns), (columns,), (columns,))
    )
    return registry.SampleInput((input, (columns,), weight, bias))


registry.register(
    registry.Op(
        name="layer_norm",
        raw=("layer_norm", "layer_norm_fwd", "layer_norm_bwd"),
        function=layer_norm,
        reference=layer_norm_reference,
        sample_inputs=sample_inputs,
        backends=(registry.CUDA, registry.TRITON, registry.CPU, registry.REFERENCE),
        benchmarks=(
            registry.Benchmark(
                bench_input,
                shapes=("65536x768", "16384x4096", "4096x768", "8x768"),
                more_shapes=("65536x128", "16384x1600", "8192x1001"),
                torch=F.layer_norm,
            ),
        ),
    )
)
