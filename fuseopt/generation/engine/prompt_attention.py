"""PromptAttention: causal attention of the prompts of one prefill, with what all layers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, causal_lower_right

from fuseopt import ops
from fuseopt.generation.engine.attention import attend, is_plain
from fuseopt.generation.engine.layers import causal_mask, has_cuda_kernel
from fuseopt.generation.engine.positions import normalised_heads, options_of_op, rotated, split_heads
from fuseopt.generation.engine.quantised_cache import LayerCache, fill
from fuseopt.generation.engine.residual_stream import ResidualStream
from fuseopt.generation.engine.state import DecodeState
from fuseopt.generation.prompt.prompts import store
from fuseopt.ops.decode.prompt_attention import is_fast

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
        # By the window of a layer, what is added to its scores: [rows or 1, 1, length, end]; None: nothing, but a
        # token sees none after it.
        self.masks: dict[int | None, Tensor | None] = {}
        # Of capped scores PyTorch has no attention that takes a row without keys.
        is_capped = any(attention.softcap is not None for attention in attentions)
        hidden = torch.finfo(state.dtype).min if is_capped else -torch.inf
        for window in {attention.window for attention in attentions}:
            self.masks[window] = None
            is_windowed = window is not None and window < end
            is_flash = state.device.type == "cuda" and state.dtype.itemsize == 2
            if start and is_flash and not (masked or is_windowed or is_capped):
                self.masks[window] = causal_lower_right(length, end)
            elif masked or is_windowed or is_capped or start:
                seen = causal_mask(length, state.device, start)[None, None]
                seen = seen.triu(start + 1 - window) if window is not None and is_windowed else seen
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
        (rows, length), mask = self.size, self.masks[attention.window]
        kv_heads, head_dim = cache.shape[2], cache.shape[4]
        projected = stream.linear(attention.qkv, attention.norm)
        if not self.start and mask is None and is_plain(attention) and projected.shape[1] == 3 * kv_heads * head_dim:
            qkv = projected.unflatten(1, (3, kv_heads, head_dim)).unflatten(0, self.size)
            if is_fast(qkv, cache[0], cache[1]):
                return ops.prompt_attention_(qkv, cache[0], cache[1], attention.scale, pdl=True).flatten(0, 1)
        query = self._stored(projected, attention, cache)
        keys, values = cache[:, :, :, : self.end].unbind()
        if attention.softcap is None:
            groups = query.shape[1] // kv_heads
            shares = groups > 1
            if shares and cache.is_cuda and mask is not None and not isinstance(mask, CausalBias):
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

    def _stored(self, projected: Tensor, attention: SelfAttention, cache: Tensor) -> Tensor:
        """Writes keys and values of the projection [rows * length, any] to a layer's cache, and zeros for padding:
        PyTorch's attention multiplies masked values by 0, and 0 * NaN is NaN.

        Returns:
            the queries [rows, heads, length, head_dim].
        """
        cache = cache[:, :, :, self.start :]
        length, kv_heads, head_dim = self.size[1], cache.shape[2], cache.shape[4]
        if has_cuda_kernel("decode_rotary_store_", cache) and not attention.per_head:
            options = options_of_op(attention, head_dim, self.tables, self.positions)
            if options is not None:
                qkv = projected.unflatten(1, (-1, head_dim)).unflatten(0, self.size)
                if self.in_prompt is not None:
                    store(qkv, qkv, self.in_prompt[:, None, None])
                query = ops.decode_rotary_store_(qkv, cache[0], cache[1], **options, pdl=True)
                return query.transpose(1, 2)
        query, key, value = split_heads(projected, attention, kv_heads, head_dim)
        query, key = normalised_heads(query, attention.q_norm), normalised_heads(key, attention.k_norm)
        if attention.rotary is not None:
            table = self.tables[id(attention.rotary)].index_select(0, self.positions.flatten())
            query, key = (rotated(part, table, attention.rotary) for part in (query, key))
        query, key, value = (part.unflatten(0, self.size).transpose(1, 2) for part in (query, key, value))
        for slots, vectors in ((cache[0], key), (cache[1], value)):
            store(slots[:, :, :length], vectors, None if self.in_prompt is None else self.in_prompt[:, None])
        return query
