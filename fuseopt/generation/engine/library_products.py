"""Products of linear layers by the BLAS library."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fuseopt.ops.dequantize_packed import dequantize_packed
from fuseopt.ops.packed_weight import PackedWeight, parts_of

PART_BYTES = 32 << 20
"""Most bytes of a packed weight that are dequantised at a time."""


def products_by_library(input: Tensor, weights: Sequence[Tensor | PackedWeight], biases: Sequence[Tensor]) -> Tensor:
    """Products of one input with several weights, side by side; on a GPU rows are aligned to 16 bytes.

    cuBLAS takes several times as long if N is odd, as GPT-2's vocabulary is: the last few columns are a second product.

    Args:
        input: [rows, K], in the dtype and on the device of the weights.
        weights: [N, K] each, of any strides. Packed ones are dequantised, at most `PART_BYTES` at a time.
        biases: [N] for each weight, or none.

    Returns:
        [rows, sum of N].
    """
    widths = [weight.shape[0] for weight in weights]
    first = weights[0]
    if len(widths) == 1 and widths[0] % (8 if input.is_cuda else 1) == 0 and isinstance(first, Tensor):
        return F.linear(input, first, *biases)
    output = input.new_empty(len(input), -(-sum(widths) // 8) * 8)[:, : sum(widths)]
    for columns, weight, bias in zip(
        output.split(widths, dim=1), weights, biases or (None,) * len(widths), strict=True
    ):
        if isinstance(weight, Tensor):
            _multiply_into(columns, input, weight, bias)
            continue
        for begin, part in parts_of(weight, PART_BYTES):
            place = slice(begin, begin + part.outputs)
            _multiply_into(columns[:, place], input, dequantize_packed(part), None if bias is None else bias[place])
    return output


def _multiply_into(output: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    aligned = len(weight) // 8 * 8 if input.is_cuda else len(weight)
    for begin, end in ((0, aligned), (aligned, len(weight))):
        if begin == end:
            continue
        factor, out = weight[begin:end].T, output[:, begin:end]
        if bias is None:
            torch.mm(input, factor, out=out)
        else:
            torch.addmm(bias[begin:end], input, factor, out=out)
