"""FusedLMHead: logits of a vocabulary whose size is not what a GPU's matrix products are made for."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fuseopt.modules.base import FusedModule, is_plain_tensor
from fuseopt.ops.library import is_unobserved

# Numbers of half precision in the 16 bytes that a GPU's matrix product writes at once.
_ALIGNED = 8
# Of fewer rows all parts of a product take longer than the whole.
_FEWEST_ROWS = 512


class FusedLMHead(FusedModule, nn.Linear):
    """Stands in for the torch.nn.Linear that makes the logits; remains one to `isinstance`.

    Without gradients, in half precision on a GPU, its product is `aligned_product`'s.

    forward: `input` [..., in_features] -> [..., out_features], in the dtype of F.linear.
    """

    @classmethod
    def not_supported_reasons(cls, source: nn.Module) -> list[str]:
        if len(source.weight) % _ALIGNED == 0:
            return [
                f"its {len(source.weight)} columns are a multiple of {_ALIGNED}, which PyTorch's products are fast for"
            ]
        return ["it has a bias"] if source.bias is not None else []

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear(input, weight, bias)`, by `aligned_product` where that is faster."""
    if (
        bias is None
        and input.is_cuda
        and input.dtype in (torch.float16, torch.bfloat16)
        and input.dtype is weight.dtype
        and is_plain_tensor(weight)
        and len(weight) % _ALIGNED
        and input.dim() > 0
        and (rows := input.numel() // max(input.shape[-1], 1)) >= _FEWEST_ROWS
        and is_unobserved()
        and not torch.is_autocast_enabled("cuda")
    ):
        return aligned_product(input.reshape(rows, -1), weight).view(*input.shape[:-1], -1)
    return F.linear(input, weight, bias)


def aligned_product(input: Tensor, weight: Tensor) -> Tensor:
    """[rows, in], [out, in] -> [rows, out], as `F.linear`, in products whose results begin at multiples of 16 bytes.

    With an odd number of columns rows begin anywhere, and products into them take several times as long. Every eighth
    row begins alike. So the columns from where such rows reach a multiple of 16 bytes are one product, and what is left
    of the first and last columns another.

    `out` is at least 16; the dtype of half precision.
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
