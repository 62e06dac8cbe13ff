"""Dequantises packed 8-bit and 4-bit weights to 16 bits, for products by the BLAS library."""

import torch
from torch import Tensor

from fuseopt.ops import registry
from fuseopt.ops.library import define
from fuseopt.ops.low_bit import dequantize
from fuseopt.ops.packed_weight import PackedWeight, check_packed, unpacked


def _fake(
    data: Tensor, outputs: int, inputs: int, bits: int, group: int, has_zeros: bool, dtype: torch.dtype
) -> Tensor:
    return data.new_empty((outputs, inputs), dtype=dtype)


RAW = define(
    "dequantize_packed(Tensor data, int outputs, int inputs, int bits, int group, bool has_zeros, ScalarType dtype)"
    " -> Tensor",
    _fake,
)


def dequantize_packed(weight: PackedWeight) -> Tensor:
    """The dequantised weight [N, K] in the dtype of the packed one, each value rounded once.

    A kernel computes it where `decode_packed_linear` has one.

    Raises:
        TypeError, ValueError: something else than `pack_for_cuda` makes.
    """
    check_packed(weight)
    chosen = registry.pick("decode_packed_linear", "auto", weight.data.device, (weight.dtype,))
    return dequantize(unpacked(weight), weight.dtype) if chosen == "reference" else RAW[chosen](*weight)
