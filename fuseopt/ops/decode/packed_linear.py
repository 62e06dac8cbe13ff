"""`decode_linear` with packed weights in 8 or 4 bits, as the CUDA kernels read them."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fuseopt.errors import BackendError
from fuseopt.ops import registry
from fuseopt.ops.decode.linear import (
    FEW_ROWS,
    LAYER_SCHEMA,
    LayerOptions,
    as_list,
    check_layer,
    new_output,
    quantised_list,
    reference_layer,
)
from fuseopt.ops.decode.low_bit_samples import low_bit_samples
from fuseopt.ops.library import define
from fuseopt.ops.low_bit import MAX_ROWS, dequantize
from fuseopt.ops.packed_weight import (
    DTYPES,
    PackedWeight,
    check_input,
    check_packed,
    not_packed_reason,
    pack_for_cuda,
    unpacked,
)

MOST_NORMALISED_ROWS = 8
"""With more rows a separate op computes the norm faster: the kernels for many rows have no norm."""

CUDA = registry.NativeBackend("cuda", DTYPES, capability=(8, 0))

# TUNED: us a token of 1 row in 16 | 8 | 4 bits, with query, key and value in 16 bits: GPT-2 medium 363 | 253 | 251,
# large 480 | 475 | 438, XL 856 | 817 | 721. With query, key and value in 8 | 4 bits: 258 | 253, 478 | 465, 738 | 807
# (H200, beead8e6). Smaller models were not measured.
LEAST_TRANSPOSED = 1024
"""Weights stored as [K, N] gain nothing if K or N is smaller than this."""
LEAST_WITH_ATTENTION = 7_000_000
"""With fewer values than this, or in 4 bits, a weight that one kernel computes with attention gains nothing."""

# TUNED: us of a layer of GPT-2 XL in 16 | 8 | 4 bits, 8 rows: 28.0 | 28.5 | 26.4; 16 rows: 47.3 | 30.9 | 29.7
# (docs/lab-notes/2026-11-30-low-bit-weights-with-many-rows.md). 2 to 7 rows were not measured.
SLOW_TRANSPOSED_ROWS = range(2, 9)
"""Products of so many rows gain nothing with weights stored as [K, N]."""


def _fake(
    input: Tensor,
    weights: Sequence[Tensor],
    outputs: Sequence[int],
    bits: int,
    group: int,
    has_zeros: bool,
    biases: Sequence[Tensor],
    *options: Any,
) -> Tensor:
    return new_output(input, outputs, input.dtype, LayerOptions(*options))


RAW = define(
    "decode_packed_linear(Tensor input, Tensor[] weights, int[] outputs, int bits, int group, bool has_zeros,"
    f" Tensor[] biases, {LAYER_SCHEMA}) -> Tensor",
    _fake,
)


def _check(input: Tensor, weights: Sequence[PackedWeight]) -> None:
    for weight in weights:
        check_packed(weight)
    check_input(input, weights)
    if len({weight[3:] for weight in weights}) > 1:
        raise ValueError("weights must have the same bits, groups, zero points or none, and dtype")


def decode_packed_linear(
    input: Tensor,
    weight: PackedWeight | Sequence[PackedWeight],
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
    """`decode_low_bit_linear` with weights that `pack_for_cuda` has reordered.

    Args:
        input: [..., K], any strides, of the weights' dtype, bfloat16 or float16, for the kernels; the reference takes
            float32 and float64 too. More than `MAX_ROWS` rows are left to the reference.
        weight: one to three of [N, K], of the same bits, groups, dtype, and kind of zero points. They may differ in N,
            unless `gated`.
        bias, residual, norm, norm_weight, norm_bias, eps, activation, gated: as in `decode_linear`. The CUDA
            kernels require `input`'s dtype for parameters, and that dtype or float32 for the residual. The reference
            accepts any dtype.
        pdl, prefetch: as `decode_linear` takes them; tensors to prefetch may be packed ones.
        backend: "auto", "cuda" (sm_80 or newer) or "reference", which dequantises in each call.

    Returns:
        [..., sum of all N] ([..., N] if gated), contiguous, of `input`'s dtype, or of what that and `residual`'s
        promote to.

    Raises:
        ValueError: shapes or options that do not fit together.
        TypeError: another weight or data than `pack_for_cuda` makes.
        BackendError: the backend named cannot run here; the message says why.
    """
    weights, biases = quantised_list(weight, PackedWeight, "pack_for_cuda"), as_list("bias", bias)
    _check(input, weights)
    options = LayerOptions(
        residual, norm or "", norm_weight, norm_bias, eps, activation or "", gated, pdl, list(prefetch)
    )
    check_layer(input, weights, biases, options)
    parameters = (*biases, norm_weight, norm_bias)
    reason = _no_kernel_reason(input, weights[0], parameters, residual)
    if reason is None:
        tensors = (input, *parameters, residual, *(part.data for part in weights))
        chosen = registry.pick_without_gradient("decode_packed_linear", backend, (input.dtype,), *tensors)
    elif backend in ("auto", "reference"):
        chosen = "reference"
    else:
        raise BackendError(f"decode_packed_linear: {backend!r} takes no {reason}")
    if chosen == "reference":
        exact = torch.promote_types(input.dtype, torch.float32)
        dequantized = [dequantize(unpacked(part), exact) for part in weights]
        return reference_layer(input, dequantized, biases, options, input.dtype)
    _, _, _, bits, group, has_zeros, _ = weights[0]
    stored = ([part.data for part in weights], [part.outputs for part in weights], bits, group, has_zeros)
    return RAW[chosen](input, *stored, biases, *options)


def most_fast_rows(outputs: Sequence[int], inputs: int) -> int:
    """The most rows for which the kernels are faster than 16-bit kernels, for weights [N, K] that share an input."""
    # TUNED: H200, 32 rows, us of 16, 8 and 4 bits with the norm: output of Llama-1B 9.0, 5.9, 5.8; of Llama-8B 14.2,
    # 10.8, 10.7, its gate and up 73, 41, 40, its down 34.2, 25.4, 24.5; GPT-2 XL's up 11.2, 11.4, 11.0 (a1d415c7).
    # Smaller layers were not measured. With 64 rows few layers gain.
    least = 6_000_000 if len(outputs) > 1 else 4_000_000
    return 32 if sum(outputs) * inputs >= least else FEW_ROWS


def _no_kernel_reason(
    input: Tensor, weight: PackedWeight, parameters: Sequence[Tensor | None], residual: Tensor | None
) -> str | None:
    rows, dtype = input.shape[:-1].numel(), input.dtype
    if rows > MAX_ROWS:
        return f"more than {MAX_ROWS} rows, such as {rows}"
    if dtype is not weight.dtype:
        return f"{dtype} input with weights packed for {weight.dtype}"
    if any(parameter is not None and parameter.dtype is not dtype for parameter in parameters):
        return f"bias or norm parameter of a dtype other than {dtype}"
    if residual is not None and residual.dtype not in (dtype, torch.float32):
        return f"residual of {residual.dtype}"
    return None


decode_packed_linear_reference = partial(decode_packed_linear, backend="reference")


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    packed_for = dtype if dtype in DTYPES else torch.bfloat16
    for sample in low_bit_samples(device, dtype, requires_grad):
        input, weights, *others = sample.args
        if not_packed_reason(input.shape[-1]) is not None:
            continue
        packed, options = [pack_for_cuda(weight, packed_for) for weight in weights], dict(sample.kwargs)
        if "residual" in options:
            # A float32 result would show where a kernel rounds the dequantised weight.
            options["residual"] = options["residual"].to(dtype)
        yield registry.SampleInput((input, packed, *others), options)


registry.register(
    registry.Op(
        name="decode_packed_linear",
        function=decode_packed_linear,
        reference=decode_packed_linear_reference,
        sample_inputs=sample_inputs,
        backends=(CUDA, registry.REFERENCE),
    )
)
