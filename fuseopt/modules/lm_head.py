"""FusedLMHead: fast logits for a vocabulary size that is not a multiple of 8, such as GPT-2's 50257."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fuseopt.modules.base import FusedModule, is_plain_tensor
from fuseopt.ops.library import is_unobserved
from fuseopt.tuning import tuned

# 16-bit elements in the 16 bytes that a matrix product writes at a time.
_ALIGNED = 8


class FusedLMHead(FusedModule, nn.Linear):
    """Replaces the torch.nn.Linear that computes the logits; remains a Linear to `isinstance`.

    Computes `aligned_product` in half precision on a GPU without gradients, else F.linear.

    forward: `input` [..., in_features] -> [..., out_features], in the dtype of F.linear.
    """

    @classmethod
    def not_supported_reasons(cls, source: nn.Module) -> list[str]:
        if len(source.weight) % _ALIGNED == 0:
            return [
                f"its {len(source.weight)} columns are a multiple of {_ALIGNED}, for which PyTorch's products are fast"
            ]
        return ["it has a bias"] if source.bias is not None else []

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear(input, weight, bias)`, computed by `aligned_product` if that is faster."""
    if (
        bias is None
        and input.is_cuda
        and input.dtype in (torch.float16, torch.bfloat16)
        and input.dtype is weight.dtype
        and is_plain_tensor(weight)
        and len(weight) % _ALIGNED
        and input.dim() > 0
        and is_unobserved()
        and not torch.is_autocast_enabled("cuda")
        # With fewer rows the separate products take longer than one unaligned product.
        and (rows := input.numel() // max(input.shape[-1], 1)) >= tuned("lm_head_min_rows", input.device)
    ):
        return aligned_product(input.reshape(rows, -1), weight).view(*input.shape[:-1], -1)
    return F.linear(input, weight, bias)


def aligned_product(input: Tensor, weight: Tensor) -> Tensor:
    """`F.linear` in half precision, as products whose result rows are aligned to 16 bytes.

    With an odd number of columns most rows are unaligned, and a product into them takes several times as long. Every
    eighth row has the same alignment. So each group of such rows gets one product, into the columns from the first
    aligned one on. The first and last eight columns are computed by two small products before.

    Args:
        input: [rows, in].
        weight: [out, in], `out` at least 16.

    Returns:
        [rows, out].
    """
    columns = len(weight)
    output = input.new_empty(len(input), columns)
    for edge in (slice(0, _ALIGNED), slice(columns - _ALIGNED, columns)):
        torch.mm(input, weight[edge].T, out=output[:, edge])
    for first in range(min(_ALIGNED, len(input))):
        begin = -first * columns % _ALIGNED
        aligned = slice(begin, begin + (columns - begin) // _ALIGNED * _ALIGNED)
        torch.mm(input[first::_ALIGNED], weight[aligned].T, out=output[first::_ALIGNED, aligned])
    return output
