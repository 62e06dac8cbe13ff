"""`decode_linear` with weights in 8 or 4 bits, and a linear layer of any number of rows with such a weight."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseopt.errors import BackendError
from fuseopt.ops import registry
from fuseopt.ops.decode.linear import (
    LAYER_SCHEMA,
    LayerOptions,
    as_list,
    check_layer,
    new_output,
    quantised_list,
    reference_layer,
)
from fuseopt.ops.decode.low_bit_samples import low_bit_samples, sample_weight
from fuseopt.ops.decode.packed_linear import decode_packed_linear
from fuseopt.ops.dequantize_packed import dequantize_packed
from fuseopt.ops.library import define, without_autocast
from fuseopt.ops.low_bit import MAX_ROWS, LowBitWeight, check_low_bit, dequantize
from fuseopt.ops.packed_weight import PackedWeight, check_input, check_packed, unpacked

_CPU = registry.NativeBackend("cpu", dtypes=(torch.float32, torch.bfloat16, torch.float16))


def _fake(
    input: Tensor,
    values: Sequence[Tensor],
    scales: Sequence[Tensor],
    zeros: Sequence[Tensor],
    biases: Sequence[Tensor],
    *options: Any,
) -> Tensor:
    return new_output(input, [value.shape[0] for value in values], input.dtype, LayerOptions(*options))


RAW = define(
    "decode_low_bit_linear(Tensor input, Tensor[] values, Tensor[] scales, Tensor[] zeros, Tensor[] biases,"
    f" {LAYER_SCHEMA}) -> Tensor",
    _fake,
)


def _check(input: Tensor, weights: Sequence[LowBitWeight]) -> None:
    for weight in weights:
        check_low_bit(weight)
    check_input(input, weights)
    if len({(weight.bits, weight.group, weight.zeros is None, weight.scales.dtype) for weight in weights}) > 1:
        raise ValueError("weights must have the same bits, groups, zero points or none, and dtype of scales")


def decode_low_bit_linear(
    input: Tensor,
    weight: LowBitWeight | Sequence[LowBitWeight],
    bias: Tensor | Sequence[Tensor] | None = None,
    *,
    residual: Tensor | None = None,
    norm: str | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str | None = None,
    gated: bool = False,
    pdl: bool = False,
    prefetch: Sequence[Tensor] = (),
    backend: str = "auto",
) -> Tensor:
    """`decode_linear` with weights in 8 or 4 bits: `residual + activation(F.linear(norm(input), weight, bias))`.

    Computed in float32 (float64 if `input` is) with the dequantised weight, and rounded once at the end. The norm's
    result is rounded to `input`'s dtype too, as upstream. Autocast does not apply.

    Args:
        input: [..., K], any strides; float32, float16, bfloat16 or float64. More than `MAX_ROWS` rows are left to the
            reference.
        weight: one to three of [N, K], of the same bits, groups and kind of zero points. They may differ in N, unless
            `gated`.
        bias, residual, norm, norm_weight, norm_bias, eps, activation, gated: as `decode_linear` takes them.
        pdl, prefetch: as `decode_linear` takes them; without effect on a CPU.
        backend: "auto", "cpu" or "reference".

    Returns:
        [..., sum of all N] ([..., N] if gated), contiguous, of `input`'s dtype, or of what that and `residual`'s
        promote to.

    Raises:
        ValueError: shapes or options that do not fit together.
        TypeError: another weight than a LowBitWeight, or dtypes other than its own.
        BackendError: the backend named cannot run here; the message says why.
    """
    weights, biases = quantised_list(weight, LowBitWeight, "quantize"), as_list("bias", bias)
    _check(input, weights)
    options = LayerOptions(
        residual, norm or "", norm_weight, norm_bias, eps, activation or "", gated, pdl, list(prefetch)
    )
    check_layer(input, weights, biases, options)
    rows = input.shape[:-1].numel()
    if rows > MAX_ROWS:
        if backend not in ("auto", "reference"):
            raise BackendError(
                f"decode_low_bit_linear: {backend!r} takes {MAX_ROWS} rows at most, not {rows}; use low_bit_linear"
            )
        chosen = "reference"
    else:
        tensors = (input, *biases, *options.tensors)
        chosen = registry.pick_without_gradient("decode_low_bit_linear", backend, (input.dtype,), *tensors)
    if chosen == "reference":
        exact = torch.promote_types(input.dtype, torch.float32)
        dequantized = [dequantize(part, exact) for part in weights]
        return reference_layer(input, dequantized, biases, options, input.dtype)
    values, scales = [part.values for part in weights], [part.scales for part in weights]
    zeros = [part.zeros for part in weights if part.zeros is not None]
    return RAW[chosen](input, values, scales, zeros, biases, *options)


def low_bit_linear(
    input: Tensor, weight: LowBitWeight | PackedWeight, bias: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """`F.linear(input, weight, bias)` with a weight in 8 or 4 bits.

    Up to `MAX_ROWS` rows run on the kernels of `decode_low_bit_linear`, or of `decode_packed_linear` with a packed
    weight. For more rows the weight is dequantised to `input`'s dtype, and the BLAS library multiplies.

    Differentiable in `input` and `bias`.

    Args:
        input: [..., K], float32, float16, bfloat16 or float64, on the weight's device.
        weight: [N, K], of `fuseopt.ops.quantize`; on a GPU of `fuseopt.ops.pack_for_cuda`, since only packed weights
            have CUDA kernels.
        bias: [N], or None.
        backend: "auto", "cpu", or "cuda" for a packed weight, or "reference".

    Returns:
        [..., N] of `input`'s dtype.

    Raises:
        ValueError, TypeError, BackendError: as `decode_low_bit_linear` raises them.
    """
    check_input(input)
    if input.shape[:-1].numel() <= MAX_ROWS or backend != "auto":
        if isinstance(weight, PackedWeight):
            return decode_packed_linear(input, weight, bias, backend=backend)
        return decode_low_bit_linear(input, weight, bias, backend=backend)
    if isinstance(weight, PackedWeight):
        check_packed(weight)
    else:
        check_low_bit(weight)
    check_input(input, [weight])
    check_layer(input, [weight], as_list("bias", bias))
    if isinstance(weight, PackedWeight) and input.dtype is weight.dtype:
        dequantized = dequantize_packed(weight)
    else:
        dequantized = dequantize(unpacked(weight), input.dtype)
    with without_autocast(input):
        return F.linear(input, dequantized, None if bias is None else bias.to(input.dtype))


decode_low_bit_linear_reference = functools.partial(decode_low_bit_linear, backend="reference")
low_bit_linear_reference = functools.partial(low_bit_linear, backend="reference")


def plain_samples(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    for rows, bits, symmetric in ((1, 8, True), (3, 4, True), (MAX_ROWS, 4, False)):
        input = torch.randn(rows, 64, device=device, dtype=dtype)
        bias = torch.randn(40, device=device, dtype=dtype)
        yield registry.SampleInput((input, sample_weight(device, dtype, 40, 64, bits, symmetric), bias))
    yield registry.SampleInput((input[:0], sample_weight(device, dtype, 40, 64, 8)))


registry.register(
    registry.Op(
        name="decode_low_bit_linear",
        function=decode_low_bit_linear,
        reference=decode_low_bit_linear_reference,
        sample_inputs=low_bit_samples,
        backends=(_CPU, registry.REFERENCE),
    )
)
registry.register(
    registry.Op(
        name="low_bit_linear",
        function=low_bit_linear,
        reference=low_bit_linear_reference,
        sample_inputs=plain_samples,
        backends=(_CPU, registry.REFERENCE),
        raw=("decode_low_bit_linear",),
    )
)
