"""Products with the weights of linear layers, by the BLAS library."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def products_by_library(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """The products with several weights, side by side; on a GPU rows are aligned to 16 bytes.

    cuBLAS takes several times as long if N is odd, as GPT-2's vocabulary is: the last few columns are a second product.

    Args:
        input: [rows, K], in the dtype and on the device of the weights.
        weights: [N, K] each, of any strides.
        biases: [N] for each weight, or none.

    Returns:
        [rows, sum of N].
    """
    widths = [len(weight) for weight in weights]
    step = 8 if input.is_cuda else 1
    if len(widths) == 1 and widths[0] % step == 0:
        return F.linear(input, weights[0], *biases)
    output = input.new_empty(len(input), -(-sum(widths) // 8) * 8)[:, : sum(widths)]
    for part, weight, bias in zip(output.split(widths, dim=1), weights, biases or (None,) * len(widths), strict=True):
        aligned = len(weight) // step * step
        for begin, end in ((0, aligned), (aligned, len(weight))):
            if begin == end:
                continue
            factor, out = weight[begin:end].T, part[:, begin:end]
            if bias is None:
                torch.mm(input, factor, out=out)
            else:
                torch.addmm(bias[begin:end], input, factor, out=out)
    return output
