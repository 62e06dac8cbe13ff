"""What happens to a layer's queries, keys and values between their projection and attention, in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fuseopt.generation.engine.layers import RMS_NORMS, Norm, normalised
from fuseopt.ops.decode.linear import NORMS

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


def options_of_op(
    query: Tensor, key: Tensor, attention: SelfAttention, tables: Mapping[int, Tensor], positions: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Queries and keys [tokens, heads, head_dim], and the options with which an op of `ops.decode` does the rest of
    their norms and rotation: norms of all heads together, and those that round otherwise, are applied here.

    Args:
        tables: by the id of a RotaryPositions, its table.
        positions: [tokens], rows of the table.
    """
    options: dict[str, Any] = {}
    norms = attention.q_norm, attention.k_norm
    by_op = all(n is not None and n.weight.numel() == query.shape[-1] and n.op_kind in NORMS for n in norms)
    if by_op and norms[0] is not None and norms[1] is not None and norms[0].eps == norms[1].eps:
        offset = RMS_NORMS[norms[0].kind].get("offset", 0.0)
        options |= {"q_norm": norms[0].weight, "k_norm": norms[1].weight}
        options |= {"norm_eps": norms[0].eps, "norm_offset": offset}
    else:
        query, key = normalised_heads(query, norms[0]), normalised_heads(key, norms[1])
    if attention.rotary is not None:
        options |= {"rotary": tables[id(attention.rotary)], "row_positions": positions}
        options["interleaved"] = attention.rotary.interleaved
    return query, key, options


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
