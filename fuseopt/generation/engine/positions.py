"""What happens to a layer's queries, keys and values between their projection and attention, in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fuseopt.generation.engine.layers import Norm, normalised

if TYPE_CHECKING:
    from fuseopt.generation.families.decoder_spec import RotaryPositions, SelfAttention


def split_heads(
    projected: Tensor, attention: SelfAttention, kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the projection [tokens, (heads + 2 * kv_heads) * head_dim] as queries [tokens, heads, head_dim], keys
    and values [tokens, kv_heads, head_dim]."""
    heads = projected.unflatten(1, (-1, head_dim))
    if attention.per_head:
        query, key, value = heads.unflatten(1, (kv_heads, 3)).unbind(2)
    else:
        query, key, value = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    return query, key, value


def normalised_heads(heads: Tensor, norm: Norm | None) -> Tensor:
    """[tokens, heads, head_dim]: each head by itself, or all together if the norm's weight has their size."""
    if norm is None:
        return heads
    if norm.weight.numel() == heads.shape[-1]:
        return normalised(heads, norm)
    return normalised(heads.flatten(1), norm).view_as(heads)


def rotated(heads: Tensor, table: Tensor, rotary: RotaryPositions) -> Tensor:
    """Queries or keys [tokens, heads, head_dim] rotated by their positions.

    Args:
        table: the rows of `rotary.table` for the tokens' positions [tokens, rotated].
    """
    cos, sin = table.unsqueeze(1).chunk(2, dim=-1)
    turning, rest = heads[..., : table.shape[-1]], heads[..., table.shape[-1] :]
    if rotary.interleaved:
        first, second = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = turning.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    turned = turned.to(heads.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
