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
    attention: SelfAttention, head_dim: int, tables: Mapping[int, Tensor], positions: Tensor
) -> dict[str, Any] | None:
    """Options with which an op of `ops.decode` normalises and rotates queries and keys.

    Args:
        tables: by the id of a RotaryPositions, its table.
        positions: of the tokens, rows of the table.

    Returns:
        None if the ops have no such norm: one of all heads together, or one that rounds otherwise.
    """
    options: dict[str, Any] = {}
    q_norm, k_norm = attention.q_norm, attention.k_norm
    if q_norm is not None and k_norm is not None:
        is_by_head = q_norm.weight.numel() == k_norm.weight.numel() == head_dim
        if not is_by_head or q_norm.op_kind not in NORMS or (q_norm.kind, q_norm.eps) != (k_norm.kind, k_norm.eps):
            return None
        options = {"q_norm": q_norm.weight, "k_norm": k_norm.weight, "norm_eps": q_norm.eps}
        options["norm_offset"] = RMS_NORMS[q_norm.kind].get("offset", 0.0)
    elif q_norm is not None or k_norm is not None:
        return None
    if attention.rotary is not None:
        options |= {"rotary": tables[id(attention.rotary)], "row_positions": positions}
        options["interleaved"] = attention.rotary.interleaved
    return options


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
