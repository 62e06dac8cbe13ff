"""T5Step: one decode step of T5ForConditionalGeneration (v1.0 and v1.1) on the model's own Parameters."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.t5 import modeling_t5

from fuseopt import ops
from fuseopt.generation.layers import Activation, Norm, activation_of, attend, identity, write_slot
from fuseopt.generation.state import CacheShape, DecodeState


class _Attention(NamedTuple):
    norm: Norm
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    scale: float


class _FeedForward(NamedTuple):
    """`gate` is None in v1.0, which has no gated activation."""

    norm: Norm
    gate: Tensor | None
    up: Tensor
    activation: Activation
    down: Tensor


class _Layer(NamedTuple):
    self_attention: _Attention
    cross_attention: _Attention
    feed_forward: _FeedForward


class T5Step:
    """Call: a DecodeState -> logits [rows, vocab], with the step's keys and values written.

    Upstream: the decoder of `T5ForConditionalGeneration.forward` for one token a row. Weights are read where they are,
    so editing them in place shows; `key` changes when anything is put elsewhere or the forward would be another.
    """

    model_class = modeling_t5.T5ForConditionalGeneration
    module_classes = (
        modeling_t5.T5ForConditionalGeneration,
        modeling_t5.T5Stack,
        modeling_t5.T5Block,
        modeling_t5.T5LayerSelfAttention,
        modeling_t5.T5LayerCrossAttention,
        modeling_t5.T5LayerFF,
        modeling_t5.T5Attention,
        modeling_t5.T5DenseActDense,
        modeling_t5.T5DenseGatedActDense,
        modeling_t5.T5LayerNorm,
        nn.Linear,
        nn.Embedding,
        nn.Dropout,
        nn.ModuleList,
    )

    def __init__(self, model: nn.Module) -> None:
        decoder = model.decoder
        self.token_embedding = decoder.embed_tokens.weight
        self.layers = [_layer(block) for block in decoder.block]
        self.final_norm = _norm(decoder.final_layer_norm)
        self.head, self.head_bias = model.lm_head.weight, model.lm_head.bias
        self.head_scale = model.model_dim**-0.5 if model.config.scale_decoder_outputs else None
        self.vocab = self.head.shape[0]
        attention = decoder.block[0].layer[0].SelfAttention
        self.relative_bias = attention.relative_attention_bias.weight
        self.buckets = (attention.relative_attention_num_buckets, attention.relative_attention_max_distance)
        self.bucket_of = attention._relative_position_bucket
        # Norms return their weight's dtype, so that is what attention is computed in.
        dtype = self.layers[0].self_attention.key.dtype
        self.shape = CacheShape(
            len(self.layers), attention.n_heads, attention.key_value_proj_dim, dtype, self.token_embedding.device
        )
        self.key = identity(
            self.token_embedding,
            *self.layers,
            self.final_norm,
            self.head,
            self.head_bias,
            self.head_scale,
            self.relative_bias,
            self.buckets,
        )

    @staticmethod
    def not_supported_reasons(model: nn.Module) -> list[str]:
        """Why this step would not compute what the model's forward does; `module_classes` are checked elsewhere."""
        return []

    @staticmethod
    def max_length(model: nn.Module) -> int | None:
        """None: relative positions go on for ever."""
        return None

    def __call__(self, state: DecodeState) -> Tensor:
        hidden = F.embedding(state.tokens, self.token_embedding)
        mask = state.attention_mask(self.shape.dtype) + self._position_bias(state)
        cross_mask = state.cross_attention_mask(self.shape.dtype)
        for layer, cache, cross_cache in zip(self.layers, state.cache, state.cross_cache, strict=True):
            attention = layer.self_attention
            normed = _rms_norm(hidden, attention.norm)
            keys_and_values = torch.stack((self._heads(normed, attention.key), self._heads(normed, attention.value)))
            write_slot(cache, keys_and_values, state.slot)
            attended = attend(self._heads(normed, attention.query), cache, mask, attention.scale)
            hidden = _clamped(hidden + F.linear(attended, attention.out))
            attention = layer.cross_attention
            query = self._heads(_rms_norm(hidden, attention.norm), attention.query)
            attended = attend(query, cross_cache, cross_mask, attention.scale)
            hidden = _clamped(hidden + F.linear(attended, attention.out))
            hidden = _clamped(hidden + _feed_forward(hidden, layer.feed_forward))
        hidden = _rms_norm(hidden, self.final_norm)
        if self.head_scale is not None:
            hidden = hidden * self.head_scale
        return F.linear(hidden, self.head, self.head_bias)

    def encode(self, state: DecodeState, encoded: Tensor) -> None:
        """Fills the cross-attention cache from the encoder's output [rows, encoder length, hidden]."""
        length = encoded.shape[1]
        for layer, cache in zip(self.layers, state.cross_cache, strict=True):
            for weight, target in zip((layer.cross_attention.key, layer.cross_attention.value), cache, strict=True):
                projected = F.linear(encoded, weight).unflatten(2, (self.shape.heads, self.shape.head_dim))
                target[:, :, :length] = projected.transpose(1, 2)

    def _heads(self, normed: Tensor, weight: Tensor) -> Tensor:
        return F.linear(normed, weight).unflatten(1, (self.shape.heads, self.shape.head_dim))

    def _position_bias(self, state: DecodeState) -> Tensor:
        """[1, heads, 1, capacity]: the relative bias of every slot, seen from this step's."""
        num_buckets, max_distance = self.buckets
        buckets = self.bucket_of(
            state.slots - state.slot, bidirectional=False, num_buckets=num_buckets, max_distance=max_distance
        )
        return F.embedding(buckets, self.relative_bias).t()[None, :, None, :]


def _rms_norm(input: Tensor, norm: Norm) -> Tensor:
    return ops.rms_norm(input, norm.weight, norm.eps, cast_order="t5")


def _feed_forward(hidden: Tensor, layer: _FeedForward) -> Tensor:
    normed = _rms_norm(hidden, layer.norm)
    inner = layer.activation(F.linear(normed, layer.up if layer.gate is None else layer.gate))
    if layer.gate is not None:
        inner = inner * F.linear(normed, layer.up)
    # transformers keeps `wo` in float32 in a model loaded as float16.
    return F.linear(inner.to(layer.down.dtype), layer.down)


def _clamped(hidden: Tensor) -> Tensor:
    """T5Block's clamp of float16 infinities."""
    if hidden.dtype != torch.float16:
        return hidden
    largest = torch.finfo(torch.float16).max
    limit = torch.where(torch.isinf(hidden).any(), largest - 1000, largest)
    return torch.clamp(hidden, min=-limit, max=limit)


def _layer(block: nn.Module) -> _Layer:
    self_attention, cross_attention, feed_forward = block.layer
    return _Layer(
        _attention(self_attention.layer_norm, self_attention.SelfAttention),
        _attention(cross_attention.layer_norm, cross_attention.EncDecAttention),
        _feed_forward_of(feed_forward.layer_norm, feed_forward.DenseReluDense),
    )


def _attention(norm: nn.Module, attention: nn.Module) -> _Attention:
    query, key, value, out = (getattr(attention, name).weight for name in ("q", "k", "v", "o"))
    return _Attention(_norm(norm), query, key, value, out, attention.scaling)


def _feed_forward_of(norm: nn.Module, dense: nn.Module) -> _FeedForward:
    gated = hasattr(dense, "wi_0")
    return _FeedForward(
        _norm(norm),
        dense.wi_0.weight if gated else None,
        dense.wi_1.weight if gated else dense.wi.weight,
        activation_of(dense.act),
        dense.wo.weight,
    )


def _norm(norm: nn.Module) -> Norm:
    return Norm(norm.weight, None, norm.variance_epsilon)
