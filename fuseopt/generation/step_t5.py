"""T5Step: one decode step of T5ForConditionalGeneration (v1.0 and v1.1) on the model's own Parameters."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.t5 import modeling_t5

from fuseopt.generation.attention import StepAttention
from fuseopt.generation.layers import (
    Activation,
    Linear,
    Norm,
    activation_of,
    embedded,
    linear,
    linear_of,
    look_ahead,
    normalised,
)
from fuseopt.generation.state import CacheShape, DecodeState


class _SelfAttention(NamedTuple):
    norm: Norm
    qkv: Linear
    out: Linear
    scale: float


class _CrossAttention(NamedTuple):
    norm: Norm
    query: Linear
    key_and_value: Linear
    out: Linear
    scale: float


class _FeedForward(NamedTuple):
    """`up` has two weights in v1.1, where the first is the gate."""

    norm: Norm
    up: Linear
    activation: Activation
    down: Linear


class _Layer(NamedTuple):
    self_attention: _SelfAttention
    cross_attention: _CrossAttention
    feed_forward: _FeedForward

    def linears(self) -> tuple[Linear, ...]:
        """In the order in which a step runs them."""
        own, cross, feed_forward = self
        return own.qkv, own.out, cross.query, cross.out, feed_forward.up, feed_forward.down


class T5Step:
    """Call: a DecodeState -> logits [rows, vocab], with the step's keys and values written.

    Upstream: the decoder of `T5ForConditionalGeneration.forward` for one token a row. Weights are read where they are,
    so editing them in place shows.
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
        self.head = linear_of(model.lm_head)
        look_ahead([part for layer in self.layers for part in layer.linears()], self.head)
        *self.buckets, width = self.constants(model)
        self.head_scale = None if width is None else width**-0.5
        self.vocab = model.lm_head.weight.shape[0]
        attention = decoder.block[0].layer[0].SelfAttention
        self.relative_bias = attention.relative_attention_bias.weight
        self.bucket_of = attention._relative_position_bucket
        # Norms return their weight's dtype, so that is what attention is computed in.
        dtype = attention.k.weight.dtype
        self.shape = CacheShape(
            len(self.layers), attention.n_heads, attention.key_value_proj_dim, dtype, self.token_embedding.device
        )

    @staticmethod
    def roots(model: nn.Module) -> tuple[nn.Module, ...]:
        """Whose work the step does itself; the encoder stays transformers' own."""
        return model.decoder, model.lm_head

    @staticmethod
    def constants(model: nn.Module) -> tuple[Any, ...]:
        """What a step takes from the model beside modules' weights and the constants that a survey looks at."""
        attention = model.decoder.block[0].layer[0].SelfAttention
        buckets = (attention.relative_attention_num_buckets, attention.relative_attention_max_distance)
        return (*buckets, model.model_dim if model.config.scale_decoder_outputs else None)

    @staticmethod
    def not_supported_reasons(model: nn.Module) -> list[str]:
        """Why this step would not compute what the model's forward does; `module_classes` are checked elsewhere."""
        return []

    @staticmethod
    def max_length(model: nn.Module) -> int | None:
        """None: relative positions go on for ever."""
        return None

    def __call__(self, state: DecodeState) -> Tensor:
        hidden = embedded(state.tokens, self.token_embedding)
        attention = StepAttention(state, F.embedding(self._buckets_by_distance, self.relative_bias).T.contiguous())
        for layer, cache, cross_cache in zip(self.layers, state.cache, state.cross_cache, strict=True):
            own, cross, feed_forward = layer
            qkv = self._heads(linear(hidden, own.qkv, norm=own.norm), 3)
            attended = attention.to_slots(qkv, cache, own.scale)
            hidden = _clamped(linear(attended, own.out, residual=hidden))
            query = self._heads(linear(hidden, cross.query, norm=cross.norm), 1)[:, 0]
            attended = attention.to_encoder(query, cross_cache, cross.scale)
            hidden = _clamped(linear(attended, cross.out, residual=hidden))
            gated = len(feed_forward.up.weights) > 1
            inner = linear(
                hidden, feed_forward.up, norm=feed_forward.norm, activation=feed_forward.activation, gated=gated
            )
            hidden = _clamped(linear(inner, feed_forward.down, residual=hidden))
        if self.head_scale is None:
            return linear(hidden, self.head, norm=self.final_norm)
        return linear(normalised(hidden, self.final_norm) * self.head_scale, self.head)

    def encode(self, state: DecodeState, encoded: Tensor) -> None:
        """Fills the cross-attention cache from the encoder's output [items, encoder length, hidden]."""
        items, length, _ = encoded.shape
        flat = encoded.flatten(0, 1)
        for layer, cache in zip(self.layers, state.cross_cache, strict=True):
            projected = self._heads(linear(flat, layer.cross_attention.key_and_value), 2).unflatten(0, (items, length))
            cache[:, :, :, :length] = projected.permute(2, 0, 3, 1, 4)

    def _heads(self, projected: Tensor, count: int) -> Tensor:
        return projected.unflatten(1, (count, self.shape.heads, self.shape.head_dim))

    @functools.cached_property
    def _buckets_by_distance(self) -> Tensor:
        """[max_distance + 1] int64: further back, all keys are in the last bucket."""
        num_buckets, max_distance = self.buckets
        distances = torch.arange(max_distance + 1, device=self.relative_bias.device)
        return self.bucket_of(-distances, bidirectional=False, num_buckets=num_buckets, max_distance=max_distance)


def _clamped(hidden: Tensor) -> Tensor:
    """T5Block's clamp of float16 infinities."""
    if hidden.dtype != torch.float16:
        return hidden
    largest = torch.finfo(torch.float16).max
    limit = torch.where(torch.isinf(hidden).any(), largest - 1000, largest)
    return torch.clamp(hidden, min=-limit, max=limit)


def _layer(block: nn.Module) -> _Layer:
    own, cross, feed_forward = block.layer[0], block.layer[1], block.layer[2]
    attention, encoder_attention, dense = own.SelfAttention, cross.EncDecAttention, feed_forward.DenseReluDense
    up = linear_of(dense.wi_0, dense.wi_1) if hasattr(dense, "wi_0") else linear_of(dense.wi)
    return _Layer(
        _SelfAttention(
            _norm(own.layer_norm),
            linear_of(attention.q, attention.k, attention.v),
            linear_of(attention.o),
            attention.scaling,
        ),
        _CrossAttention(
            _norm(cross.layer_norm),
            linear_of(encoder_attention.q),
            linear_of(encoder_attention.k, encoder_attention.v),
            linear_of(encoder_attention.o),
            encoder_attention.scaling,
        ),
        _FeedForward(_norm(feed_forward.layer_norm), up, activation_of(dense.act), linear_of(dense.wo)),
    )


def _norm(norm: nn.Module) -> Norm:
    return Norm("t5_rms_norm", norm.weight, None, norm.variance_epsilon)
