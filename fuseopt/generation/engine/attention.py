"""StepAttention: attention of one decode step to the static caches, with what all layers share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fuseopt import ops
from fuseopt.generation.engine.beam_state import along_ancestry
from fuseopt.generation.engine.layers import Linear, Norm, ResidualStream, has_kernel
from fuseopt.generation.engine.state import DecodeState
from fuseopt.ops.decode.qkv_attention import is_fast


class StepAttention:
    """Attention of one token a row, by the kernels of `ops.decode_attention` or by PyTorch's attention with masks.

    Args:
        state: the step's tensors.
        bias: [heads, distances], added to the score of a key that many slots back; keys further back take the last
            column. None for no bias.
    """

    def __init__(self, state: DecodeState, bias: Tensor | None = None) -> None:
        self.state, self.bias = state, bias
        self.ancestry = None if state.beams is None else state.beams.ancestry[0]
        self.by_kernel = has_kernel("decode_attention", state.cache)
        if self.by_kernel:
            return
        dtype = state.cache.dtype
        # On a CPU attention reads only the filled slots. On a GPU the host does not know how many.
        is_on_cpu = state.device.type == "cpu"
        self.filled = int(state.slot) + 1 if is_on_cpu else state.sizes.capacity
        self.cross_filled = int(state.cross_length) if is_on_cpu else state.sizes.cross_capacity
        slots = state.slots[: self.filled]
        self.mask = additive(state.keep[:, : self.filled] & (slots <= state.slot), dtype)
        self.cross_mask = additive(state.cross_keep[:, : self.cross_filled], dtype)
        if bias is not None:
            distances = (state.slot - slots).clamp(0, bias.shape[1] - 1)
            self.mask = self.mask + bias[:, distances][None, :, None, :]

    def to_slots(self, qkv: Tensor, cache: Tensor, scale: float) -> Tensor:
        """Self-attention: writes the step's keys and values into a layer's cache, and attends to all filled slots.

        Args:
            qkv: [rows, 3, heads, head_dim].
            cache: [2, rows, heads, capacity, head_dim].

        Returns:
            [rows, heads * head_dim].
        """
        state = self.state
        if self.by_kernel:
            query, key, value = qkv.unbind(1)
            return ops.decode_attention_(
                query,
                key,
                value,
                cache[0],
                cache[1],
                state.slot,
                mask=state.keep,
                bias=self.bias,
                ancestry=self.ancestry,
                scale=scale,
                pdl=True,
            )
        cache.index_copy_(3, state.slot, qkv[:, 1:].transpose(0, 1).unsqueeze(3))
        cache = cache[:, :, :, : self.filled]
        if self.ancestry is not None:
            cache = along_ancestry(cache, self.ancestry[:, : self.filled])
        return _attend(qkv[:, :1], cache, self.mask, scale)

    def project_to_slots(
        self, stream: ResidualStream, layer: Linear, norm: Norm, cache: Tensor, scale: float
    ) -> Tensor:
        """`to_slots` of `layer(norm(stream))`, in one kernel if that is fast."""
        weight, *others = layer.weights
        if self.by_kernel and self.bias is None and self.ancestry is None and not others and stream.is_stored:
            parts = stream.total(), weight, layer.biases[0] if layer.biases else None, cache[0], cache[1]
            if has_kernel("decode_qkv_attention_", weight) and is_fast(*parts, **norm.of_op):
                return ops.decode_qkv_attention_(
                    *parts,
                    self.state.slot,
                    mask=self.state.keep,
                    scale=scale,
                    **norm.of_op,
                    eps=norm.eps,
                    pdl=True,
                )
        qkv = stream.linear(layer, norm).unflatten(1, (3, cache.shape[2], cache.shape[4]))
        return self.to_slots(qkv, cache, scale)

    def to_encoder(self, query: Tensor, cache: Tensor, scale: float) -> Tensor:
        """Cross-attention to the keys and values in a layer's cache.

        Args:
            query: [rows, heads, head_dim].
            cache: [2, items, heads, cross_capacity, head_dim].

        Returns:
            [rows, heads * head_dim].
        """
        state = self.state
        if self.by_kernel:
            return ops.decode_attention(
                query, cache[0], cache[1], state.cross_length, mask=state.cross_keep, scale=scale, pdl=True
            )
        cache = cache[:, :, :, : self.cross_filled]
        return _attend(query.unflatten(0, (state.sizes.items, -1)), cache, self.cross_mask, scale)


def _attend(query: Tensor, cache: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Queries [items, queries_per_kv, heads, head_dim] -> [rows, heads * head_dim]."""
    attended = F.scaled_dot_product_attention(query.transpose(1, 2), cache[0], cache[1], mask, scale=scale)
    return attended.transpose(1, 2).flatten(0, 1).flatten(1)


def additive(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, 1, 1, slots]: 0 where `keep` [rows, slots] is True, the lowest number elsewhere."""
    mask = torch.zeros(keep.shape, dtype=dtype, device=keep.device)
    return mask.masked_fill_(~keep, torch.finfo(dtype).min)[:, None, None, :]
