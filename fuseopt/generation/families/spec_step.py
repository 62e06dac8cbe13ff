"""SpecStep: the decode step of any family that a DecoderSpec describes, on the engine's kernels."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fuseopt import ops
from fuseopt.config import LowBitOptions
from fuseopt.generation.engine.attention import StepAttention, additive, is_plain
from fuseopt.generation.engine.device_constants import version_of
from fuseopt.generation.engine.l2_prefetch import plan_l2_prefetch
from fuseopt.generation.engine.layers import (
    Linear,
    Norm,
    embedded,
    has_kernel,
    linear,
    normalised,
)
from fuseopt.generation.engine.low_bit import LowBitChoice, LowBitWeights, check_is_read, low_bit_choice
from fuseopt.generation.engine.low_rank import LowRankUpdates
from fuseopt.generation.engine.prompt_attention import PromptAttention, reads_start_on_device
from fuseopt.generation.engine.quantised_cache import LayerCache, fill, filled
from fuseopt.generation.engine.residual_stream import HeadInput, ResidualStream
from fuseopt.generation.engine.state import AbsorbedCrossAttention, CacheShape, DecodeState, Sizes
from fuseopt.generation.families.decoder_spec import (
    CrossAttention,
    DecoderSpec,
    FeedForward,
    Layer,
    not_built_reasons,
)
from fuseopt.generation.families.step_interface import DecodeStep
from fuseopt.generation.prompt.prompts import store
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

    Attributes:
        config_fields: what `spec_of`, or the forward that it describes, reads from the config.

    Raises:
        ValueError: the spec has something that `not_built_reasons` names.
    """

    config_fields: ClassVar[tuple[str, ...]] = ()
    takes_lora: ClassVar[bool] = True
    takes_quantised_cache: ClassVar[bool] = True
    takes_low_bit: ClassVar[bool] = True
    takes_prefix: ClassVar[bool] = True

    def __init__(self, model: nn.Module) -> None:
        spec = self.spec = self.spec_of(model)
        reasons = list(not_built_reasons(spec))
        if reasons:
            raise ValueError(f"no decode step can run this {type(model).__name__}: {'; '.join(reasons)}")
        self.layers, self.head, self.token_embedding = spec.layers, spec.head, spec.token_embedding
        for layer in spec.linears:
            layer.compute_in(spec.token_embedding.dtype)
        self.vocab, self.max_length = len(spec.head.weights[0]), spec.max_length
        self.bounds_positions = bool(spec.rotaries)
        self.low_rank = LowRankUpdates(linear.low_rank for linear in spec.linears)
        self.lora_layers = self.low_rank.layers
        self.windows = [layer.self_attention.window for layer in self.layers]
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
        self.biases: dict[int, Tensor] = {}
        self.final_norm = spec.final_norm
        with torch.inference_mode(False):
            for bias in spec.relative_biases:
                zeros = bias.weight.new_zeros(bias.max_distance + 1, bias.weight.shape[1])
                self.biases[id(bias)] = zeros.T.contiguous()
            if spec.head_scale is not None and spec.final_norm is not None:
                self.final_norm = spec.final_norm._replace(weight=torch.zeros_like(spec.final_norm.weight))

    @staticmethod
    def spec_of(model: nn.Module) -> DecoderSpec:
        """Where the parts of `model` are."""
        raise NotImplementedError

    @classmethod
    def constants(cls, model: nn.Module) -> tuple[Hashable, ...]:
        """`config_fields`, and the buffers of `buffers_of` by address and version."""
        fields = (getattr(model.config, name, None) for name in cls.config_fields)
        buffers = (
            (buffer.data_ptr(), buffer.dtype, version_of(buffer))
            for module in cls.buffers_of(model)
            for buffer in module._buffers.values()
            if buffer is not None
        )
        return (*(tuple(field) if isinstance(field, list) else field for field in fields), *buffers)

    @staticmethod
    def buffers_of(model: nn.Module) -> Sequence[nn.Module]:
        """The modules whose buffers `spec_of` reads."""
        return ()

    @classmethod
    def head_dim_of(cls, model: nn.Module) -> int:
        return cls.spec_of(model).head_dim

    @classmethod
    def low_bit_choice(cls, model: nn.Module, options: LowBitOptions) -> LowBitChoice:
        return _low_bit_choice(model, cls.spec_of(model), options)

    @classmethod
    def quantised_layers(cls, model: nn.Module) -> Sequence[Linear]:
        spec = cls.spec_of(model)
        layers = [layer for layer in spec.linears if layer.checkpoint]
        for layer in layers:
            layer.compute_in(spec.token_embedding.dtype)
            check_is_read(layer)
        return layers

    def quantise(self, model: nn.Module, weights: LowBitWeights) -> None:
        options = weights.options
        choice = None if options is None else _low_bit_choice(model, self.spec, options)
        weights.put_into(model, choice, self.spec.linears)
        self.is_quantised, self.most_quantised_rows = bool(weights.made_as), weights.most_rows
        self._plan_l2_prefetch(self.layers)

    def new_state(self, sizes: Sizes) -> DecodeState:
        state = DecodeState(sizes, self.shape, self.vocab)
        with torch.inference_mode(False):
            state.rotary_tables = tuple(
                rotary.table(state.slots, self.shape.dtype).contiguous() for rotary in self.spec.rotaries
            )
        return state

    def begin(self) -> None:
        """Fills the relative biases by distance, the final norm's weight with the factor after that norm, and the
        updates of low rank."""
        spec = self.spec
        self.low_rank.fill()
        for bias in spec.relative_biases:
            self.biases[id(bias)].copy_(F.embedding(self._buckets_by_distance[id(bias)], bias.weight).T)
        if spec.head_scale is not None and self.final_norm is not None and spec.final_norm is not None:
            self.final_norm.weight.copy_(spec.final_norm.weight * spec.head_scale)

    def __call__(self, state: DecodeState) -> HeadInput:
        self.low_rank.begin_step()
        slots = StepAttention(state, self.biases, self._tables(state))
        stream = self._stream(state.tokens, state.positions)
        layers = self.layers if state.absorbed is None else self._absorbed_layers(state.absorbed)
        cross_caches: Iterable[LayerCache | None] = (
            state.cross_caches if self.spec.has_encoder else (None,) * len(layers)
        )
        for layer, cache, cross_cache, following in zip(
            layers, state.layer_caches, cross_caches, self._following(), strict=True
        ):
            attended = slots.project_to_slots(stream, layer.self_attention, cache)
            self._end_layer(stream, layer, attended, following, slots, cross_cache)
        return self._head_input(stream)

    def prefill(self, state: DecodeState, length: int, masked: bool) -> None:
        """See DecodeStep. In a decoder-only model the padding after a prompt leaves keys and values in the cache; no
        token of the prompt attends to them, and steps overwrite them before they read them.
        """
        self.low_rank.begin_step()
        if self.spec.has_encoder:
            self._prefill_from_encoder(state, length)
        else:
            self._prefill_prompt(state, length, masked)

    def takes_any_start(self, state: DecodeState) -> bool:
        return reads_start_on_device(state, [layer.self_attention for layer in self.layers])

    def cross_cache_filled(self, state: DecodeState) -> None:
        """Computes `state.absorbed`, if there is one, from the cached keys and values of the only item."""
        if state.absorbed is None:
            return
        keep, heads = state.cross_keep[0], self.spec.heads
        for cross, cache, *absorbed in zip(
            self._cross_attentions, state.cross_caches, state.absorbed.keys, state.absorbed.values, strict=True
        ):
            keys, values = torch.where(keep[:, None], filled(cache, len(keep), state.dtype)[:, 0], 0)
            (query,), (out,) = cross.query.multiplied(), cross.out.multiplied()
            to_scores, to_output = (tensor.unflatten(0, (heads, -1)) for tensor in absorbed)
            torch.bmm(keys, query.unflatten(0, (heads, -1)), out=to_scores)
            torch.bmm(values, out.T.unflatten(0, (heads, -1)), out=to_output)
        state.absorbed.mask.copy_(additive(state.cross_keep, torch.float32).flatten().repeat(heads))

    def _prefill_from_encoder(self, state: DecodeState, length: int) -> None:
        items = state.sizes.items
        flat = state.encoded[:, :length].flatten(0, 1)
        for cross, cache in zip(self._cross_attentions, state.cross_caches, strict=True):
            projected = self._split_heads(linear(flat, cross.key_value), 2).unflatten(0, (items, length))
            vectors = projected.permute(2, 0, 3, 1, 4)
            if isinstance(cache, Tensor):
                store(cache[:, :, :, :length], vectors)
            else:
                fill(cache, 0, vectors)
        self.cross_cache_filled(state)
        state.logits.copy_(self(state).logits())
        state.counters += 1

    def _prefill_prompt(self, state: DecodeState, length: int, masked: bool) -> None:
        rows, run = state.sizes.rows, state.prefilled_slots(length)
        in_prompt = state.in_prompt(length)
        tokens, positions = (ids.index_select(1, run) for ids in (state.ids, state.prompt_positions))
        if in_prompt is not None:
            tokens, positions = tokens * in_prompt, positions * in_prompt
        attentions = [layer.self_attention for layer in self.layers]
        slots = PromptAttention(state, length, masked, attentions, self._tables(state), positions)
        last = torch.arange(0, rows * length, length, device=state.device) + (state.slot - 1 - run[0])
        stream = self._stream(tokens.flatten(), positions.flatten())
        following = [*self._following()[:-1], None]
        for layer, cache, after in zip(self.layers, state.layer_caches, following, strict=True):
            attended = slots.project(stream, layer.self_attention, cache)
            if layer is self.layers[-1]:
                # Of all other tokens the last layer has only keys and values.
                attended, stream = attended[last], stream.of(last)
            self._end_layer(stream, layer, attended, after)
        state.logits.copy_(self._head_input(stream).logits())

    def _end_layer(
        self,
        stream: ResidualStream,
        layer: Layer,
        attended: Tensor,
        following: tuple[Linear, Norm] | None,
        slots: StepAttention | None = None,
        cross_cache: LayerCache | None = None,
    ) -> None:
        """All of a layer after its self-attention, whose output projection has not been applied to `attended`."""
        own, cross, feed_forward = layer.self_attention, layer.cross_attention, layer.feed_forward
        if self.spec.parallel_residual:
            norm = feed_forward.norm or own.norm
            inner = stream.linear(feed_forward.up, norm, feed_forward.activation, gated=feed_forward.gated)
            stream.add(attended, own.out)
            stream.add(inner, feed_forward.down, following)
            return
        stream.add(attended, own.out, output_norm=own.output_norm, sum_norm=own.sum_norm)
        if cross is not None and cross_cache is not None and slots is not None:
            self._add_cross_attention(stream, cross, cross_cache, slots)
        add_feed_forward(stream, feed_forward, following)

    def _add_cross_attention(
        self, stream: ResidualStream, cross: CrossAttention, cache: LayerCache, slots: StepAttention
    ) -> None:
        absorbed = slots.state.absorbed
        if absorbed is None:
            query = self._split_heads(stream.linear(cross.query, cross.norm), 1)[:, 0]
            stream.add(slots.to_encoder(query, cache, cross.scale), cross.out, sum_norm=cross.sum_norm)
        else:
            stream.replace(self._plus_absorbed(stream.total(), cross, absorbed.mask))

    def _plus_absorbed(self, hidden: Tensor, cross: CrossAttention, mask: Tensor) -> Tensor:
        """`hidden` [rows, width] plus the attention to the only item; `engine.layers.linear` might overwrite the mask.

        Args:
            cross: of `_absorbed_layers`: `query` gives scores, `out` takes their softmax.
        """
        assert cross.norm is not None, "_absorbed_slots"
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
        It needs unscaled scores, and bfloat16 or float32: products of weights with keys and values overflow float16.
        """
        if not self.spec.has_encoder:
            return 0
        crosses = self._cross_attentions
        weight = crosses[0].query.weights[0]
        if any(part.low_rank is not None for cross in crosses for part in (cross.query, cross.out)):
            return 0
        unscaled = all(cross.scale == 1 and cross.norm is not None and not cross.query.biases for cross in crosses)
        projections = (part.weights[0] for cross in crosses for part in (cross.query, cross.out))
        has_range = all(projection.dtype in (torch.bfloat16, torch.float32) for projection in projections)
        has_kernels = has_kernel("decode_softmax_linear", weight) and has_kernel("decode_linear", weight)
        return GROUP if unscaled and has_range and has_kernels and self.spec.heads <= MOST_GROUPS else 0

    def _stream(self, tokens: Tensor, positions: Tensor) -> ResidualStream:
        """The residual stream of tokens [rows] before the first layer."""
        spec = self.spec
        of_positions = () if spec.position_embedding is None else (positions, spec.position_embedding)
        if spec.embedding_scale is None and spec.embedding_projection is None:
            begin = embedded(tokens, spec.token_embedding, *of_positions)
        else:
            begin = F.embedding(tokens, spec.token_embedding)
            begin = begin if spec.embedding_scale is None else begin * spec.embedding_scale
            begin = begin if spec.embedding_projection is None else linear(begin, spec.embedding_projection)
            begin = begin + F.embedding(*of_positions) if of_positions else begin
        begin = begin if spec.embedding_norm is None else normalised(begin, spec.embedding_norm)
        return ResidualStream(begin, clamps_float16=spec.clamps_float16, scale=spec.residual_scale)

    def _head_input(self, stream: ResidualStream) -> HeadInput:
        projection, softcap = self.spec.head_projection, self.spec.head_softcap
        if projection is None:
            return stream.before(self.head, self.final_norm, softcap)
        return HeadInput(stream.linear(projection, self.final_norm), self.head, None, softcap=softcap)

    def _tables(self, state: DecodeState) -> dict[int, Tensor]:
        return {id(rotary): table for rotary, table in zip(self.spec.rotaries, state.rotary_tables, strict=True)}

    def _following(self) -> Sequence[tuple[Linear, Norm] | None]:
        """For each layer the linear layer that reads its sum, with its norm; None where no kernel takes split-K partial
        sums together with such a norm."""
        readers = [(layer.self_attention.qkv, layer.self_attention.norm) for layer in self.layers[1:]]
        readers.append((self.spec.head_projection or self.head, self.final_norm))
        return [(layer, norm) if norm is not None and norm.kind == "layer_norm" else None for layer, norm in readers]

    def _plan_l2_prefetch(self, layers: Sequence[Layer]) -> None:
        last = () if self.spec.head_projection is None else (self.spec.head_projection,)
        plan_l2_prefetch([*(part for layer in layers for part in layer.linears), *last], self.head)

    def _split_heads(self, projected: Tensor, count: int) -> Tensor:
        return projected.unflatten(1, (count, self.spec.heads, self.spec.head_dim))

    @property
    def _cross_attentions(self) -> list[CrossAttention]:
        return [layer.cross_attention for layer in self.layers if layer.cross_attention is not None]

    @functools.cached_property
    def _buckets_by_distance(self) -> dict[int, Tensor]:
        """By the id of a RelativeBias, [max_distance + 1] int64: greater distances are all in the last bucket."""
        return {
            id(bias): bias.bucket_of(torch.arange(bias.max_distance + 1, device=bias.weight.device))
            for bias in self.spec.relative_biases
        }


def _low_bit_choice(model: nn.Module, spec: DecoderSpec, options: LowBitOptions) -> LowBitChoice:
    of_prompts = [layer.cross_attention.key_value for layer in spec.layers if layer.cross_attention is not None]
    others = [layer for layer in spec.linears if all(layer is not other for other in of_prompts)]
    plain = [layer.self_attention for layer in spec.layers if is_plain(layer.self_attention)]
    with_attention = [attention.qkv for attention in plain if len(attention.qkv.weights) == 1]
    return low_bit_choice(model, others, of_prompts, with_attention, options)


def add_feed_forward(
    stream: ResidualStream, feed_forward: FeedForward, following: tuple[Linear, Norm] | None = None
) -> None:
    """Adds a feed-forward's output to its input; `following` as in `ResidualStream.add`."""
    inner = stream.linear(feed_forward.up, feed_forward.norm, feed_forward.activation, gated=feed_forward.gated)
    stream.add(
        inner,
        feed_forward.down,
        following,
        output_norm=feed_forward.output_norm,
        sum_norm=feed_forward.sum_norm,
    )
