"""T5Step: one decode step of T5ForConditionalGeneration (v1.0 and v1.1) on the model's own Parameters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fuseopt import ops
from fuseopt.blocks.t5_inference import clamped
from fuseopt.generation.engine.attention import StepAttention, additive
from fuseopt.generation.engine.layers import (
    BeforeHead,
    Embedding,
    Linear,
    Norm,
    has_kernel,
    linear,
    linear_of,
    look_ahead,
)
from fuseopt.generation.engine.state import CacheShape, DecodeState, FoldedCross
from fuseopt.generation.families.step_interface import DecodeStep
from fuseopt.generation.families.t5_encoder import T5Encoder
from fuseopt.generation.families.t5_layers import (
    FeedForward,
    SelfAttention,
    fed_forward,
    feed_forward_of,
    norm_of,
    self_attention_of,
)
from fuseopt.generation.prompt.prompts import store
from fuseopt.modules.children import t5_children
from fuseopt.ops.decode.softmax_linear import GROUP, MOST_GROUPS


class _CrossAttention(NamedTuple):
    """Folded, `query` gives scores, and `out` takes their softmax."""

    norm: Norm
    query: Linear
    key_and_value: Linear
    out: Linear
    scale: float


class _Layer(NamedTuple):
    self_attention: SelfAttention
    cross_attention: _CrossAttention
    feed_forward: FeedForward

    def linears(self) -> tuple[Linear, ...]:
        """In the order in which a step runs them."""
        own, cross, feed_forward = self
        return own.qkv, own.out, cross.query, cross.out, feed_forward.up, feed_forward.down

    def folded(self, keys: Tensor, values: Tensor) -> _Layer:
        """With its share of a FoldedCross, and copies of the linear layers that look ahead at that."""
        own, cross, feed_forward = self
        return _Layer(
            own._replace(qkv=replace(own.qkv), out=replace(own.out)),
            cross._replace(query=Linear((keys,)), out=Linear((values.T,))),
            feed_forward,
        )


class T5Step(DecodeStep):
    """Call: a DecodeState -> logits [rows, vocab], with the step's keys and values written.

    Upstream: the decoder of `T5ForConditionalGeneration.forward` for one token a row. Weights are read where they are,
    so editing them in place shows.
    """

    model_class = "transformers.models.t5.modeling_t5.T5ForConditionalGeneration"
    children = t5_children("transformers.models.t5.modeling_t5.T5")
    encoder_class = T5Encoder
    # Relative positions go on for ever.
    max_length = None

    def __init__(self, model: nn.Module) -> None:
        decoder = model.decoder
        self.token_embedding = decoder.embed_tokens.weight
        self.layers = [_layer(block) for block in decoder.block]
        self.decoder_norm = norm_of(decoder.final_layer_norm)
        self.head = linear_of(model.lm_head)
        self._look_ahead(self.layers)
        *self.buckets, width = self.constants(model)
        self.head_scale = None if width is None else width**-0.5
        self.vocab = model.lm_head.weight.shape[0]
        attention = decoder.block[0].layer[0].SelfAttention
        self.relative_bias = attention.relative_attention_bias.weight
        self.bucket_of = attention._relative_position_bucket
        # Norms return their weight's dtype, so that is what attention is computed in.
        dtype = attention.k.weight.dtype
        self.shape = CacheShape(
            len(self.layers),
            attention.n_heads,
            attention.key_value_proj_dim,
            dtype,
            self.token_embedding.device,
            encoder_width=model.model_dim,
            folded_slots=self._folded_slots(attention.n_heads),
        )
        # What `begin` fills: the relative bias by distance, and the last norm with what is multiplied behind it.
        # A tensor made in inference mode could not be written to outside it later.
        with torch.inference_mode(False):
            size = len(self._buckets_by_distance), self.relative_bias.shape[1]
            self.bias = self.relative_bias.new_zeros(size).T.contiguous()
            self.final_norm = self.decoder_norm
            if self.head_scale is not None:
                self.final_norm = self.decoder_norm._replace(weight=torch.zeros_like(self.decoder_norm.weight))

    @staticmethod
    def roots(model: nn.Module) -> tuple[nn.Module, ...]:
        """Whose work the step does itself."""
        return model.decoder, model.lm_head

    @staticmethod
    def constants(model: nn.Module) -> tuple[Any, ...]:
        """What a step takes from the model beside modules' weights and the constants that a survey looks at."""
        attention = model.decoder.block[0].layer[0].SelfAttention
        buckets = (attention.relative_attention_num_buckets, attention.relative_attention_max_distance)
        return (*buckets, model.model_dim if model.config.scale_decoder_outputs else None)

    def begin(self) -> None:
        """Works out, before the first step of a call, what is the same for all of them."""
        self.bias.copy_(F.embedding(self._buckets_by_distance, self.relative_bias).T)
        if self.head_scale is not None:
            self.final_norm.weight.copy_(self.decoder_norm.weight * self.head_scale)

    def __call__(self, state: DecodeState) -> BeforeHead:
        hidden = Embedding(state.tokens, self.token_embedding).total()
        attention = StepAttention(state, self.bias)
        layers = self.layers if state.folded is None else self._folded(state.folded)
        for layer, cache, cross_cache in zip(layers, state.cache, state.cross_cache, strict=True):
            own, cross, feed_forward = layer
            qkv = self._heads(linear(hidden, own.qkv, norm=own.norm), 3)
            attended = attention.to_slots(qkv, cache, own.scale)
            hidden = clamped(linear(attended, own.out, residual=hidden))
            if state.folded is None:
                query = self._heads(linear(hidden, cross.query, norm=cross.norm), 1)[:, 0]
                attended = attention.to_encoder(query, cross_cache, cross.scale)
                hidden = clamped(linear(attended, cross.out, residual=hidden))
            else:
                hidden = clamped(self._attended_folded(hidden, cross, state.folded.mask))
            hidden = fed_forward(hidden, feed_forward)
        return BeforeHead(hidden, self.head, self.final_norm)

    def cross_cache_filled(self, state: DecodeState) -> None:
        """Brings `state.folded`, if there is one, up to what the cross-attention cache holds of its item."""
        if state.folded is None:
            return
        keep, heads = state.cross_keep[0], self.shape.heads
        kept = torch.where(keep[:, None], state.cross_cache[:, :, 0], 0)
        for layer, (keys, values), *folded in zip(
            self.layers, kept, state.folded.keys, state.folded.values, strict=True
        ):
            (query,), (out,) = layer.cross_attention.query.weights, layer.cross_attention.out.weights
            to_scores, to_output = (tensor.unflatten(0, (heads, -1)) for tensor in folded)
            torch.bmm(keys, query.unflatten(0, (heads, -1)), out=to_scores)
            torch.bmm(values, out.T.unflatten(0, (heads, -1)), out=to_output)
        state.folded.mask.copy_(additive(state.cross_keep, torch.float32).flatten().repeat(heads))

    def prefill(self, state: DecodeState, length: int, masked: bool) -> None:
        """Fills the first slots of the cross-attention cache from as many of `encoded`, and takes the first tokens.

        Leaves their keys and values, and the logits that follow. Masks are for who reads the cache.
        """
        items = state.sizes.items
        flat = state.encoded[:, :length].flatten(0, 1)
        for layer, cache in zip(self.layers, state.cross_cache, strict=True):
            projected = self._heads(linear(flat, layer.cross_attention.key_and_value), 2).unflatten(0, (items, length))
            store(cache[:, :, :, :length], projected.permute(2, 0, 3, 1, 4))
        self.cross_cache_filled(state)
        state.logits.copy_(self(state).logits())
        state.counters += 1

    def _heads(self, projected: Tensor, count: int) -> Tensor:
        return projected.unflatten(1, (count, self.shape.heads, self.shape.head_dim))

    def _folded_slots(self, heads: int) -> int:
        """Folded, cross-attention is two launches, not three; more slots would take longer to read than that spares.

        In bfloat16 alone, which has room for whatever the products come to, and unscaled, as T5's attention is.
        """
        cross = [layer.cross_attention for layer in self.layers]
        weight = cross[0].query.weights[0]
        unscaled = all(attention.scale == 1 for attention in cross)
        projections = (part.weights[0] for attention in cross for part in (attention.query, attention.out))
        alike = all(projection.dtype is torch.bfloat16 for projection in projections)
        has_kernels = has_kernel("decode_softmax_linear", weight) and has_kernel("decode_linear", weight)
        return GROUP if unscaled and alike and has_kernels and heads <= MOST_GROUPS else 0

    def _folded(self, folded: FoldedCross) -> list[_Layer]:
        shares = zip(self.layers, folded.keys, folded.values, strict=True)
        layers = [layer.folded(*share) for layer, *share in shares]
        self._look_ahead(layers)
        return layers

    def _look_ahead(self, layers: Sequence[_Layer]) -> None:
        look_ahead([part for layer in layers for part in layer.linears()], self.head)

    def _attended_folded(self, hidden: Tensor, cross: _CrossAttention, mask: Tensor) -> Tensor:
        """`hidden` with the attention to a folded item added. `linear` might write over the mask."""
        kind, weight, _, eps = cross.norm
        scores = ops.decode_linear(
            hidden,
            cross.query.weights,
            residual=mask,
            norm=kind,
            norm_weight=weight,
            eps=eps,
            overlap=True,
            ahead=cross.query.ahead,
        )
        return ops.decode_softmax_linear(
            scores, cross.out.weights[0], self.shape.heads, residual=hidden, overlap=True, ahead=cross.out.ahead
        )

    @functools.cached_property
    def _buckets_by_distance(self) -> Tensor:
        """[max_distance + 1] int64: further back, all keys are in the last bucket."""
        num_buckets, max_distance = self.buckets
        distances = torch.arange(max_distance + 1, device=self.relative_bias.device)
        return self.bucket_of(-distances, bidirectional=False, num_buckets=num_buckets, max_distance=max_distance)


def _layer(block: nn.Module) -> _Layer:
    cross = block.layer[1]
    attention = cross.EncDecAttention
    return _Layer(
        self_attention_of(block.layer[0]),
        _CrossAttention(
            norm_of(cross.layer_norm),
            linear_of(attention.q),
            linear_of(attention.k, attention.v),
            linear_of(attention.o),
            attention.scaling,
        ),
        feed_forward_of(block.layer[2]),
    )
