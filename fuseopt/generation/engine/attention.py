"""StepAttention: attention of one decode step to the static caches, with what all layers share."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fuseopt import ops
from fuseopt.generation.engine.beam_state import along_ancestry
from fuseopt.generation.engine.layers import has_kernel
from fuseopt.generation.engine.positions import normalised_heads, options_of_op, rotated, split_heads
from fuseopt.generation.engine.quantised_cache import LayerCache, QuantisedCache, append, filled, op_arguments
from fuseopt.generation.engine.residual_stream import ResidualStream
from fuseopt.generation.engine.state import DecodeState
from fuseopt.ops.decode.qkv_attention import is_fast

if TYPE_CHECKING:
    from fuseopt.generation.families.decoder_spec import RotaryPositions, SelfAttention


class StepAttention:
    """Attention of one token a row, by the kernels of `ops.decode_attention` or by PyTorch's attention with masks.

    Args:
        state: the step's tensors.
        biases: by the id of a RelativeBias, what it adds to the score of a key that many slots back: [heads,
            distances]; keys further back take the last column.
        tables: by the id of a RotaryPositions, its table of the state's positions [capacity, rotated].
    """

    def __init__(self, state: DecodeState, biases: Mapping[int, Tensor], tables: Mapping[int, Tensor]) -> None:
        self.state, self.biases, self.tables = state, biases, tables
        self.ancestry = None if state.beams is None else state.beams.ancestry[0]
        self._tables_of_rows: dict[int, Tensor] = {}
        self._slot_masks: dict[int | None, Tensor] = {}
        self.by_kernel = has_kernel(state.attention_op, state.encoded)
        # On a CPU attention reads only the filled slots. On a GPU the host does not know how many.
        is_on_cpu = state.device.type == "cpu"
        self.filled = int(state.slot) + 1 if is_on_cpu and not self.by_kernel else state.sizes.capacity
        self.cross_filled = state.sizes.cross_capacity
        if is_on_cpu and not self.by_kernel:
            self.cross_filled = int(state.cross_length)

    def project_to_slots(self, stream: ResidualStream, attention: SelfAttention, cache: LayerCache) -> Tensor:
        """Self-attention without its output projection: writes the step's keys and values into a layer's cache, and
        attends to the filled slots.

        Args:
            cache: [2, rows, kv_heads, capacity, head_dim].

        Returns:
            [rows, heads * head_dim].
        """
        attended = self._in_one_kernel(stream, attention, cache)
        if attended is not None:
            return attended
        projected = stream.linear(attention.qkv, attention.norm)
        query, key, value = split_heads(projected, attention, cache.shape[2], cache.shape[4])
        return self._to_slots(query, key, value, attention, cache)

    def to_encoder(self, query: Tensor, cache: LayerCache, scale: float) -> Tensor:
        """Cross-attention to the keys and values in a layer's cache.

        Args:
            query: [rows, heads, head_dim].
            cache: [2, items, heads, cross_capacity, head_dim].

        Returns:
            [rows, heads * head_dim].
        """
        state = self.state
        if self.by_kernel:
            (keys, values), scales = op_arguments(cache)
            options: dict[str, Any] = {"mask": state.cross_keep, "scale": scale, "pdl": True} | scales
            return ops.decode_attention(query, keys, values, state.cross_length, **options)
        keys, values = filled(cache, self.cross_filled, query.dtype)
        query = query.unflatten(0, (state.sizes.items, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, keys, values, self._cross_mask, scale=scale)
        return attended.transpose(1, 2).flatten(0, 1).flatten(1)

    def _in_one_kernel(self, stream: ResidualStream, attention: SelfAttention, cache: LayerCache) -> Tensor | None:
        """Projection and attention in one kernel; None if that is not faster or does not exist."""
        qkv, norm = attention.qkv, attention.norm
        weight, *others = qkv.weights
        if not (self.by_kernel and self.ancestry is None and not others and stream.is_stored and norm is not None):
            return None
        if qkv.low_rank is not None or qkv.at(len(stream.total())).low_bit or isinstance(cache, QuantisedCache):
            return None
        parts = stream.total(), weight, qkv.biases[0] if qkv.biases else None, cache[0], cache[1]
        has_three_equal = is_plain(attention) and len(weight) == 3 * cache.shape[2] * cache.shape[4]
        if not (has_three_equal and has_kernel("decode_qkv_attention_", weight) and is_fast(*parts, **norm.of_op)):
            return None
        return ops.decode_qkv_attention_(
            *parts,
            self.state.slot,
            mask=self.state.keep,
            scale=attention.scale,
            **norm.of_op,
            eps=norm.eps,
            pdl=True,
        )

    def _to_slots(
        self, query: Tensor, key: Tensor, value: Tensor, attention: SelfAttention, cache: LayerCache
    ) -> Tensor:
        """`query` [rows, heads, head_dim], `key` and `value` [rows, kv_heads, head_dim], as they are projected."""
        if self.by_kernel:
            options = options_of_op(attention, cache.shape[4], self.tables, self.state.positions)
            if options is None:
                query, key = normalised_heads(query, attention.q_norm), normalised_heads(key, attention.k_norm)
                without = attention._replace(q_norm=None, k_norm=None)
                options = options_of_op(without, cache.shape[4], self.tables, self.state.positions) or {}
            options |= {"bias": self._bias(attention), "ancestry": self.ancestry, "scale": attention.scale}
            options |= {"window": attention.window or 0, "softcap": attention.softcap or 0.0}
            (keys, values), scales = op_arguments(cache)
            options |= {"mask": self.state.keep, "pdl": True} | scales
            return ops.decode_attention_(query, key, value, keys, values, self.state.slot, **options)
        query, key = normalised_heads(query, attention.q_norm), normalised_heads(key, attention.k_norm)
        if attention.rotary is not None:
            table = self._table_of_rows(attention.rotary)
            query, key = (rotated(part, table, attention.rotary) for part in (query, key))
        append(cache, self.state.slot, key, value)
        plain = filled(cache, self.filled, query.dtype)
        if self.ancestry is not None:
            plain = along_ancestry(plain, self.ancestry[:, : self.filled])
        # The heads that share keys and values are queries of one head.
        grouped = query.unflatten(1, (cache.shape[2], -1))
        mask = self._mask(attention)
        return attend(grouped, plain[0], plain[1], mask, attention.scale, attention.softcap).flatten(1)

    def _bias(self, attention: SelfAttention) -> Tensor | None:
        return None if attention.relative_bias is None else self.biases[id(attention.relative_bias)]

    def _mask(self, attention: SelfAttention) -> Tensor:
        """[rows, 1 or heads, 1, filled], added to the scores."""
        mask, bias = self._slot_mask(attention.window), self._bias(attention)
        if bias is None:
            return mask
        distances = (self.state.slot - self.state.slots[: self.filled]).clamp(0, bias.shape[1] - 1)
        return mask + bias[:, distances][None, :, None, :]

    def _table_of_rows(self, rotary: RotaryPositions) -> Tensor:
        """[rows, rotated]"""
        if id(rotary) not in self._tables_of_rows:
            self._tables_of_rows[id(rotary)] = self.tables[id(rotary)].index_select(0, self.state.positions)
        return self._tables_of_rows[id(rotary)]

    def _slot_mask(self, window: int | None) -> Tensor:
        if window not in self._slot_masks:
            state, slots = self.state, self.state.slots[: self.filled]
            seen = slots <= state.slot
            if window is not None:
                seen = seen & (slots > state.slot - window)
            self._slot_masks[window] = additive(state.keep[:, : self.filled] & seen, state.dtype)
        return self._slot_masks[window]

    @functools.cached_property
    def _cross_mask(self) -> Tensor:
        return additive(self.state.cross_keep[:, : self.cross_filled], self.state.dtype)


def is_plain(attention: SelfAttention) -> bool:
    """Whether nothing is done to queries, keys and scores but to scale them."""
    changes = attention.rotary, attention.relative_bias, attention.q_norm, attention.k_norm, attention.window
    return not attention.per_head and attention.softcap is None and all(change is None for change in changes)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """softmax(scores + mask) @ values: [..., queries, head_dim] -> the same."""
    if softcap is None:
        return F.scaled_dot_product_attention(query, keys, values, mask, scale=scale)
    scores = torch.tanh(query @ keys.mT * (scale / softcap)) * softcap + mask
    return scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype) @ values


def additive(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, 1, 1, slots]: 0 where `keep` [rows, slots] is True, the lowest number elsewhere."""
    mask = torch.zeros(keep.shape, dtype=dtype, device=keep.device)
    return mask.masked_fill_(~keep, torch.finfo(dtype).min)[:, None, None, :]
