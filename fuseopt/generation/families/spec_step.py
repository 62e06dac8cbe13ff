"""SpecStep: the decode step of any family that a DecoderSpec describes, on the engine's kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fuseopt import ops
from fuseopt.generation.engine.attention import StepAttention, additive
from fuseopt.generation.engine.layers import (
    HeadInput,
    Linear,
    Norm,
    ResidualStream,
    causal_mask,
    embedded,
    has_kernel,
    linear,
    plan_l2_prefetch,
)
from fuseopt.generation.engine.state import AbsorbedCrossAttention, CacheShape, DecodeState
from fuseopt.generation.families.decoder_spec import (
    CrossAttention,
    DecoderSpec,
    FeedForward,
    Layer,
    SelfAttention,
    not_built_reasons,
)
from fuseopt.generation.families.step_interface import DecodeStep
from fuseopt.generation.prompt.prompts import store
from fuseopt.ops.decode.prompt_attention import is_fast
from fuseopt.ops.decode.softmax_linear import GROUP, MOST_GROUPS


class SpecStep(DecodeStep):
    """One token a row through the decoder that `spec_of(model)` describes.

    A family derives from this class and writes `spec_of` and the static members of DecodeStep. The spec selects these
    paths:

    - Decoder-only models run the prompt through all layers. Behind an encoder, the prompt is its output, which
      fills the cross-attention cache; for a single short item that is also computed as AbsorbedCrossAttention.
    - With learned positions the first layer's kernel looks up the embeddings itself, if there is one for its size.
    - Before a LayerNorm a linear layer may leave split-K partial sums, which the next layer's kernel adds up.
    - With one weight for queries, keys and values and no bias by distance, projection and attention may be one kernel.

    Raises:
        ValueError: the spec has something that `not_built_reasons` names.
    """

    def __init__(self, model: nn.Module) -> None:
        spec = self.spec = self.spec_of(model)
        reasons = list(not_built_reasons(spec))
        if reasons:
            raise ValueError(f"no decode step can run this {type(model).__name__}: {'; '.join(reasons)}")
        self.layers, self.head, self.token_embedding = spec.layers, spec.head, spec.token_embedding
        self.vocab, self.max_length = len(spec.head.weights[0]), spec.max_length
        self._plan_l2_prefetch(self.layers)
        self.shape = CacheShape(
            len(self.layers),
            spec.kv_heads,
            spec.head_dim,
            spec.cache_dtype,
            self.token_embedding.device,
            encoder_width=spec.encoder_width,
            absorbed_slots=self._absorbed_slots(),
        )
        # What `begin` fills. A tensor made in inference mode could not be written to outside it later.
        self.bias: Tensor | None = None
        self.final_norm = spec.final_norm
        with torch.inference_mode(False):
            if spec.relative_bias is not None:
                weight = spec.relative_bias.weight
                self.bias = weight.new_zeros(spec.relative_bias.max_distance + 1, weight.shape[1]).T.contiguous()
            if spec.head_scale is not None:
                self.final_norm = spec.final_norm._replace(weight=torch.zeros_like(spec.final_norm.weight))

    @staticmethod
    def spec_of(model: nn.Module) -> DecoderSpec:
        """Where the parts of `model` are."""
        raise NotImplementedError

    def begin(self) -> None:
        """Fills the relative bias by distance, and the final norm's weight with the factor after that norm."""
        spec = self.spec
        if spec.relative_bias is not None and self.bias is not None:
            self.bias.copy_(F.embedding(self._buckets_by_distance, spec.relative_bias.weight).T)
        if spec.head_scale is not None:
            self.final_norm.weight.copy_(spec.final_norm.weight * spec.head_scale)

    def __call__(self, state: DecodeState) -> HeadInput:
        slots = StepAttention(state, self.bias)
        stream = self._stream(state.tokens, state.positions)
        layers = self.layers if state.absorbed is None else self._absorbed_layers(state.absorbed)
        cross_caches: Iterable[Tensor | None] = state.cross_cache if self.spec.has_encoder else (None,) * len(layers)
        for layer, cache, cross_cache, following in zip(
            layers, state.cache, cross_caches, self._following(), strict=True
        ):
            own = layer.self_attention
            stream.add(slots.project_to_slots(stream, own.qkv, own.norm, cache, own.scale), own.out)
            if layer.cross_attention is not None and cross_cache is not None:
                self._add_cross_attention(stream, layer.cross_attention, cross_cache, slots)
            add_feed_forward(stream, layer.feed_forward, following)
        return stream.before(self.head, self.final_norm)

    def prefill(self, state: DecodeState, length: int, masked: bool) -> None:
        """See DecodeStep. In a decoder-only model the padding after a prompt leaves keys and values in the cache; no
        token of the prompt attends to them, and steps overwrite them before they read them.
        """
        if self.spec.has_encoder:
            self._prefill_from_encoder(state, length)
        else:
            self._prefill_prompt(state, length, masked)

    def cross_cache_filled(self, state: DecodeState) -> None:
        """Computes `state.absorbed`, if there is one, from the cached keys and values of the only item."""
        if state.absorbed is None:
            return
        keep, heads = state.cross_keep[0], self.spec.heads
        kept = torch.where(keep[:, None], state.cross_cache[:, :, 0], 0)
        for cross, (keys, values), *absorbed in zip(
            self._cross_attentions, kept, state.absorbed.keys, state.absorbed.values, strict=True
        ):
            (query,), (out,) = cross.query.weights, cross.out.weights
            to_scores, to_output = (tensor.unflatten(0, (heads, -1)) for tensor in absorbed)
            torch.bmm(keys, query.unflatten(0, (heads, -1)), out=to_scores)
            torch.bmm(values, out.T.unflatten(0, (heads, -1)), out=to_output)
        state.absorbed.mask.copy_(additive(state.cross_keep, torch.float32).flatten().repeat(heads))

    def _prefill_from_encoder(self, state: DecodeState, length: int) -> None:
        items = state.sizes.items
        flat = state.encoded[:, :length].flatten(0, 1)
        for cross, cache in zip(self._cross_attentions, state.cross_cache, strict=True):
            projected = self._split_heads(linear(flat, cross.key_value), 2).unflatten(0, (items, length))
            store(cache[:, :, :, :length], projected.permute(2, 0, 3, 1, 4))
        self.cross_cache_filled(state)
        state.logits.copy_(self(state).logits())
        state.counters += 1

    def _prefill_prompt(self, state: DecodeState, length: int, masked: bool) -> None:
        rows = state.sizes.rows
        in_prompt = state.slots[:length] < state.slot
        tokens, positions = (ids[:, :length] * in_prompt for ids in (state.ids, state.prompt_positions))
        mask = None
        if masked:
            # As numbers, since PyTorch would turn it into numbers in every layer.
            mask = torch.zeros(rows, 1, length, length, dtype=self.shape.dtype, device=state.device)
            seen = state.keep[:, None, None, :length] & causal_mask(length, state.device)
            mask = mask.masked_fill_(~seen, -torch.inf)

        last = torch.arange(0, rows * length, length, device=state.device) + (state.slot - 1)
        stream = self._stream(tokens.flatten(), positions.flatten())
        following = [*self._following()[:-1], None]
        for layer, cache, after in zip(self.layers, state.cache, following, strict=True):
            attended = self._attend_in_prompt(stream, layer.self_attention, cache, (rows, length), in_prompt, mask)
            if layer is self.layers[-1]:
                # Of all other tokens the last layer has only keys and values.
                attended, stream = attended[last], stream.of(last)
            stream.add(attended, layer.self_attention.out)
            add_feed_forward(stream, layer.feed_forward, after)
        state.logits.copy_(stream.before(self.head, self.final_norm).logits())

    def _attend_in_prompt(
        self,
        stream: ResidualStream,
        attention: SelfAttention,
        cache: Tensor,
        size: tuple[int, int],
        in_prompt: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """Causal attention within each row of a prompt, whose keys and values go into the first slots of a cache.

        Args:
            cache: [2, rows, heads, capacity, head_dim].
            size: rows, and tokens a row with the padding after them.
            in_prompt: [length] bool, False for that padding.
            mask: [rows, 1, length, length], added to the scores; None for a causal mask alone.

        Returns:
            [rows * length, heads * head_dim].
        """
        rows, length = size
        qkv = self._split_heads(stream.linear(attention.qkv, attention.norm), 3).unflatten(0, size)
        if mask is None and is_fast(qkv, cache[0], cache[1]):
            return ops.prompt_attention_(qkv, cache[0], cache[1], attention.scale, pdl=True).flatten(0, 1)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        # PyTorch's attention multiplies masked values by 0, and 0 * NaN is NaN, so padding gets zeros.
        store(cache[:, :, :, :length], qkv[1:], in_prompt[:, None])
        keys, values = cache[:, :, :, :length].unbind()
        attended = F.scaled_dot_product_attention(
            qkv[0], keys, values, attn_mask=mask, is_causal=mask is None, scale=attention.scale
        )
        return attended.transpose(1, 2).reshape(rows * length, -1)

    def _add_cross_attention(
        self, stream: ResidualStream, cross: CrossAttention, cache: Tensor, slots: StepAttention
    ) -> None:
        absorbed = slots.state.absorbed
        if absorbed is None:
            query = self._split_heads(stream.linear(cross.query, cross.norm), 1)[:, 0]
            stream.add(slots.to_encoder(query, cache, cross.scale), cross.out)
        else:
            stream.replace(self._plus_absorbed(stream.total(), cross, absorbed.mask))

    def _plus_absorbed(self, hidden: Tensor, cross: CrossAttention, mask: Tensor) -> Tensor:
        """`hidden` [rows, width] plus the attention to the only item; `engine.layers.linear` might overwrite the mask.

        Args:
            cross: of `_absorbed_layers`: `query` gives scores, `out` takes their softmax.
        """
        scores = ops.decode_linear(
            hidden,
            cross.query.weights,
            residual=mask,
            norm=cross.norm.op_kind,
            norm_weight=cross.norm.weight,
            eps=cross.norm.eps,
            pdl=True,
            prefetch=cross.query.prefetch,
        )
        return ops.decode_softmax_linear(
            scores, cross.out.weights[0], self.spec.heads, residual=hidden, pdl=True, prefetch=cross.out.prefetch
        )

    def _absorbed_layers(self, absorbed: AbsorbedCrossAttention) -> Sequence[Layer]:
        """The layers with queries and outputs of their cross-attentions as `absorbed` has them.

        Linears whose prefetch differs for that are copies.
        """
        layers = []
        for layer, keys, values in zip(self.layers, absorbed.keys, absorbed.values, strict=True):
            own, cross = layer.self_attention, layer.cross_attention
            assert cross is not None
            layers.append(
                layer._replace(
                    self_attention=own._replace(qkv=replace(own.qkv), out=replace(own.out)),
                    cross_attention=cross._replace(query=Linear((keys,)), out=Linear((values.T,))),
                )
            )
        self._plan_l2_prefetch(layers)
        return layers

    def _absorbed_slots(self) -> int:
        """How many slots of an item AbsorbedCrossAttention may have; 0 if it is never used.

        It makes cross-attention two launches instead of three; more slots would take longer to read than that saves.
        It needs unscaled scores, and bfloat16: in float16, products of weights with keys and values could overflow.
        """
        if not self.spec.has_encoder:
            return 0
        crosses = self._cross_attentions
        weight = crosses[0].query.weights[0]
        unscaled = all(cross.scale == 1 for cross in crosses)
        projections = (part.weights[0] for cross in crosses for part in (cross.query, cross.out))
        are_bfloat16 = all(projection.dtype is torch.bfloat16 for projection in projections)
        has_kernels = has_kernel("decode_softmax_linear", weight) and has_kernel("decode_linear", weight)
        return GROUP if unscaled and are_bfloat16 and has_kernels and self.spec.heads <= MOST_GROUPS else 0

    def _stream(self, tokens: Tensor, positions: Tensor) -> ResidualStream:
        """The residual stream of tokens [rows] before the first layer."""
        spec = self.spec
        of_positions = () if spec.position_embedding is None else (positions, spec.position_embedding)
        begin = embedded(tokens, spec.token_embedding, *of_positions)
        return ResidualStream(begin, clamps_float16=spec.clamps_float16)

    def _following(self) -> Sequence[tuple[Linear, Norm] | None]:
        """For each layer the linear layer that reads its sum, with its norm; None where no kernel takes split-K partial
        sums together with such a norm."""
        if self.final_norm.kind != "layer_norm":
            return (None,) * len(self.layers)
        attentions = (layer.self_attention for layer in self.layers[1:])
        return (*((attention.qkv, attention.norm) for attention in attentions), (self.head, self.final_norm))

    def _plan_l2_prefetch(self, layers: Sequence[Layer]) -> None:
        plan_l2_prefetch([part for layer in layers for part in layer.linears], self.head)

    def _split_heads(self, projected: Tensor, count: int) -> Tensor:
        return projected.unflatten(1, (count, self.spec.heads, self.spec.head_dim))

    @property
    def _cross_attentions(self) -> list[CrossAttention]:
        return [layer.cross_attention for layer in self.layers if layer.cross_attention is not None]

    @functools.cached_property
    def _buckets_by_distance(self) -> Tensor:
        """[max_distance + 1] int64: greater distances are all in the last bucket."""
        bias = self.spec.relative_bias
        assert bias is not None
        return bias.bucket_of(torch.arange(bias.max_distance + 1, device=bias.weight.device))


def add_feed_forward(
    stream: ResidualStream, feed_forward: FeedForward, following: tuple[Linear, Norm] | None = None
) -> None:
    """Adds a feed-forward's output to its input; `following` as in `ResidualStream.add`."""
    assert feed_forward.norm is not None, "parallel layers are refused"
    inner = stream.linear(feed_forward.up, feed_forward.norm, feed_forward.activation, gated=feed_forward.gated)
    stream.add(inner, feed_forward.down, following)
