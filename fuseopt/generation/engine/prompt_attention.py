"""PromptAttention: causal attention of the prompts of one prefill, with what all layers share."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from fuseopt import ops
from fuseopt.generation.engine.attention import attend, is_plain
from fuseopt.generation.engine.layers import HALVES, causal_mask, has_cuda_kernel
from fuseopt.generation.engine.positions import normalised_heads, options_of_op, rotated, split_heads
from fuseopt.generation.engine.quantised_cache import LayerCache, fill
from fuseopt.generation.engine.residual_stream import ResidualStream
from fuseopt.generation.engine.state import DecodeState
from fuseopt.generation.prompt.prompts import store
from fuseopt.ops.decode import prefix_attention, prompt_attention

_flash_attention = torch.ops.aten._flash_attention_forward
_MAX_FLASH_HEAD_DIM = 256

if TYPE_CHECKING:
    from fuseopt.generation.families.decoder_spec import SelfAttention


class PromptAttention:
    """Attention of each row's prompt to itself and to the slots before `state.start`.

    The keys and values of the prompts are written to a cache, from slot `state.start` on.

    Args:
        state: with the prompts.
        length: tokens a row to run, with the padding after them.
        masked: whether `state.keep` excludes any token of the prompts.
        attentions: of all layers.
        tables: by the id of a RotaryPositions, its table.
        positions: of the tokens [rows, length], rows of the tables.
    """

    def __init__(
        self,
        state: DecodeState,
        length: int,
        masked: bool,
        attentions: Sequence[SelfAttention],
        tables: Mapping[int, Tensor],
        positions: Tensor,
    ) -> None:
        self.size, self.tables, self.positions = (state.sizes.rows, length), tables, positions
        self.start, self.end = start, end = state.start, state.start + length
        self.in_prompt, self.dtype = state.in_prompt(length), state.dtype
        self.slot = state.start_slot if state.start_varies else None
        # By the window of a layer, the mask that is added to its scores, [rows or 1, 1, length, end]. With None the
        # attention is causal and adds nothing.
        self.masks: dict[int | None, Tensor | None] = {}
        self.without_masks: _AttentionFromSlot | None = None
        # For capped scores PyTorch has no attention that allows a row without keys.
        is_capped = any(attention.softcap is not None for attention in attentions)
        windows = set(map(self._window, attentions))
        hidden = torch.finfo(state.dtype).min if is_capped else -torch.inf
        if not masked and reads_start_on_device(state, attentions):
            self.without_masks = _AttentionFromSlot(state, length)
        for window in windows if self.without_masks is None else ():
            if masked or is_capped or start or window is not None:
                seen = causal_mask(length, state.device, start)[None, None]
                seen = seen if window is None else seen.triu(start + 1 - window)
                seen = seen & state.keep[:, None, None, :end] if masked else seen
                # As numbers, since PyTorch would turn it into numbers in every layer.
                mask = torch.zeros(seen.shape, dtype=state.dtype, device=state.device)
                self.masks[window] = mask.masked_fill_(~seen, hidden)

    def project(self, stream: ResidualStream, attention: SelfAttention, cache: LayerCache) -> Tensor:
        """Self-attention without its output projection.

        Args:
            cache: [2, rows, kv_heads, capacity, head_dim].

        Returns:
            [rows * length, heads * head_dim].
        """
        if isinstance(cache, Tensor):
            return self._project(stream, attention, cache)
        # The prompt attends to its unrounded keys and values; later tokens attend to the rounded ones.
        (rows, length), kv_heads, head_dim = self.size, cache.shape[2], cache.shape[4]
        computed = cache.scales.new_empty((2, rows, kv_heads, length, head_dim), dtype=self.dtype)
        attended = self._project(stream, attention, computed)
        fill(cache, 0, computed)
        return attended

    def _project(self, stream: ResidualStream, attention: SelfAttention, cache: Tensor) -> Tensor:
        (rows, length), mask = self.size, self.masks.get(self._window(attention))
        kv_heads, head_dim = cache.shape[2], cache.shape[4]
        projected = stream.linear(attention.qkv, attention.norm)
        if not self.start and mask is None and is_plain(attention) and projected.shape[1] == 3 * kv_heads * head_dim:
            qkv = projected.unflatten(1, (3, kv_heads, head_dim)).unflatten(0, self.size)
            if prompt_attention.is_fast(qkv, cache[0], cache[1]):
                return ops.prompt_attention_(qkv, cache[0], cache[1], attention.scale, pdl=True).flatten(0, 1)
        slots = self.without_masks
        if slots is not None and (slots.has_kernel or self.start or self._window(attention) is not None):
            query = self._stored(projected, attention, cache, None if slots.has_kernel else self.in_prompt)
            return slots.attend(query, cache, attention.scale, attention.window)
        query = self._stored(projected, attention, cache, self.in_prompt)
        keys, values = cache[:, :, :, : self.end].unbind()
        if attention.softcap is None:
            groups = query.shape[1] // kv_heads
            shares = groups > 1
            if shares and cache.is_cuda and mask is not None:
                # With a mask, PyTorch's fast kernels share no heads on a GPU.
                keys, values = (part.repeat_interleave(groups, dim=1) for part in (keys, values))
                shares = False
            attended = F.scaled_dot_product_attention(
                query,
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=attention.scale,
                enable_gqa=shares,
            )
        else:
            assert mask is not None, "layers with capped scores have one"
            grouped, each = query.unflatten(1, (kv_heads, -1)), (keys.unsqueeze(2), values.unsqueeze(2))
            attended = attend(grouped, *each, mask.unsqueeze(2), attention.scale, attention.softcap).flatten(1, 2)
        return attended.transpose(1, 2).reshape(rows * length, -1)

    def _window(self, attention: SelfAttention) -> int | None:
        """The layer's window; None if it is no smaller than the prompt."""
        return None if attention.window is None or attention.window >= self.end else attention.window

    def _stored(self, projected: Tensor, attention: SelfAttention, cache: Tensor, in_prompt: Tensor | None) -> Tensor:
        """Writes keys and values of the projection [rows * length, any] to a layer's cache, and zeros for tokens that
        are not `in_prompt`: PyTorch's attention multiplies masked values by 0, and 0 * NaN is NaN.

        Returns:
            the queries [rows, heads, length, head_dim].
        """
        cache = cache if self.slot is not None else cache[:, :, :, self.start :]
        length, kv_heads, head_dim = self.size[1], cache.shape[2], cache.shape[4]
        if has_cuda_kernel("decode_rotary_store_", cache) and not attention.per_head:
            options = options_of_op(attention, head_dim, self.tables, self.positions)
            if options is not None:
                qkv = projected.unflatten(1, (-1, head_dim)).unflatten(0, self.size)
                if in_prompt is not None:
                    store(qkv, qkv, in_prompt[:, None, None])
                query = ops.decode_rotary_store_(qkv, cache[0], cache[1], slot=self.slot, **options, pdl=True)
                return query.transpose(1, 2)
        query, key, value = split_heads(projected, attention, kv_heads, head_dim)
        query, key = normalised_heads(query, attention.q_norm), normalised_heads(key, attention.k_norm)
        if attention.rotary is not None:
            table = self.tables[id(attention.rotary)].index_select(0, self.positions.flatten())
            query, key = (rotated(part, table, attention.rotary) for part in (query, key))
        query, key, value = (part.unflatten(0, self.size).transpose(1, 2) for part in (query, key, value))
        counts = None if in_prompt is None else in_prompt[:, None]
        for slots, vectors in ((cache[0], key), (cache[1], value)):
            if self.slot is None:
                store(slots[:, :, :length], vectors, counts)
            else:
                vectors = vectors if counts is None else torch.where(counts, vectors, 0)
                slots.index_copy_(2, self.slot + torch.arange(length, device=slots.device), vectors)
        return query


def reads_start_on_device(state: DecodeState, attentions: Sequence[SelfAttention]) -> bool:
    """Whether PromptAttention can read the start of unmasked prompts from `state.start_slot`.

    This needs PyTorch's FlashAttention, which reads the number of keys from the device.
    """
    like = state.cache
    return (
        like.is_cuda
        and torch.backends.cuda.flash_sdp_enabled()
        and _has_flash(like.device, like.dtype, like.shape[-1])
        and all(attention.softcap is None for attention in attentions)
    )


class _AttentionFromSlot:
    """Attention of prompts to their own tokens and to the slots before them, whose number is on the device.

    FlashAttention for sequences of different lengths (Dao 2023, arXiv 2307.08691) takes the cache of all rows as one
    sequence of slots: those of row i begin at slot i * kv_heads * capacity of the first head.

    Args:
        length: tokens a row, with the padding after them.

    Attributes:
        has_kernel: `ops.prefix_attention` computes it, which takes padding for zeros, and splits the keys among blocks.
    """

    def __init__(self, state: DecodeState, length: int) -> None:
        rows, (kv_heads, capacity) = state.sizes.rows, state.cache.shape[3:5]
        self.start, self.filled = state.start_slot if state.start else None, state.slot
        self.has_kernel = prefix_attention.is_fast(length, *state.cache[0])
        self.length, numbers = length, torch.arange(rows + 1, dtype=torch.int32, device=state.device)
        self.queries_begin, self.keys_begin = numbers * length, numbers * (kv_heads * capacity)
        self.keys = (state.prefilled_slots(length)[-1:] + 1).int().repeat(rows)

    def attend(self, query: Tensor, cache: Tensor, scale: float, window: int | None) -> Tensor:
        """Attention without masks.

        Args:
            query: [rows, heads, length, head_dim].
            cache: [2, rows, kv_heads, capacity, head_dim], with the keys and values of the queries' tokens.
            window: how many slots a token attends to, its own included; None for all.

        Returns:
            [rows * length, heads * head_dim].
        """
        if self.has_kernel:
            return ops.prefix_attention(
                query.transpose(1, 2),
                cache[0],
                cache[1],
                scale,
                start=self.start,
                filled=self.filled,
                window=window or 0,
                pdl=True,
            ).flatten(0, 1)
        _, rows, kv_heads, capacity, head_dim = cache.shape
        size = (rows - 1) * kv_heads * capacity + capacity, kv_heads, head_dim
        keys, values = (part.as_strided(size, (head_dim, capacity * head_dim, 1)) for part in cache)
        attended = _flash_attention(
            query.transpose(1, 2).flatten(0, 1),
            keys,
            values,
            self.queries_begin,
            self.keys_begin,
            self.length,
            capacity,
            0.0,
            True,
            False,
            scale=scale,
            window_size_left=None if window is None or window >= capacity else window - 1,
            seqused_k=self.keys,
        )[0]
        return attended.flatten(1)


@functools.cache
def _has_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    return (
        dtype in HALVES
        and head_dim % 8 == 0
        and head_dim <= _MAX_FLASH_HEAD_DIM
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )
