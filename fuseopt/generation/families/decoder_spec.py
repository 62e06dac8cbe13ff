"""DecoderSpec: what a decoder is, as data: its sizes, its kinds of parts, and where its weights are.

A family writes one function, `spec_of(model)`. `SpecStep` runs the spec with the kernels, and refuses what they cannot
do yet (`not_built_reasons`). `ReferenceDecoder` runs any spec in plain PyTorch.

All tensors are the model's own Parameters, or views of them, never copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fuseopt.generation.engine.layers import Activation, Linear, Norm


class RotaryPositions(NamedTuple):
    """Queries and keys are rotated by their position, in pairs of each head's first elements.

    Layers that share this object share its table.

    Attributes:
        inverse_frequencies: [rotated / 2] of any dtype; computed with in float32. None with `stored`.
        scale: factor on sines and cosines.
        interleaved: pairs are (2 i, 2 i + 1), as in GPT-J, instead of (i, i + rotated / 2).
        is_rounded: sines and cosines are rounded to the dtype of queries and keys.
        stored: [positions, rotated], the sines, then the cosines, of all positions that there are.
    """

    inverse_frequencies: Tensor | None
    scale: float = 1.0
    interleaved: bool = False
    is_rounded: bool = True
    stored: Tensor | None = None

    def table(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """[..., rotated] float32: cosines, then sines, of `positions` [...]; `dtype` is that of queries and keys."""
        if self.stored is not None:
            sines, cosines = self.stored[positions.clamp(max=len(self.stored) - 1)].float().chunk(2, dim=-1)
        else:
            assert self.inverse_frequencies is not None
            angles = positions[..., None].float() * self.inverse_frequencies.float()
            sines, cosines = angles.sin(), angles.cos()
        table = torch.cat((cosines, sines), dim=-1) * self.scale
        return table.to(dtype).float() if self.is_rounded else table


class RelativeBias(NamedTuple):
    """A bias by distance, added to self-attention's scores. Layers may share this object.

    Attributes:
        weight: [buckets, heads].
        bucket_of: query - key distances [any] int64 >= 0 -> their buckets.
        max_distance: all keys at least as far back are in one bucket.
    """

    weight: Tensor
    bucket_of: Callable[[Tensor], Tensor]
    max_distance: int


class SelfAttention(NamedTuple):
    """Causal self-attention and its output projection.

    Attributes:
        norm: of the input.
        qkv: one weight [(heads + 2 * kv_heads) * head_dim, width] of queries, keys and values, or one for each.
        scale: factor on the scores.
        per_head: a head's query, key and value are neighbours in `qkv`, as in GPT-NeoX.
        rotary: how queries and keys are rotated; None if they are not.
        relative_bias: None for none.
        q_norm, k_norm: norms of queries and keys before they are rotated: of each head if the weight has [head_dim],
            else of all heads together.
        window: a query sees this many keys, its own among them; None for all.
        softcap: scores are replaced by softcap * tanh(scores / softcap).
        output_norm: of the output, before it is added to the residual stream.
        sum_norm: of the sum, which replaces it in the residual stream.
    """

    norm: Norm | None
    qkv: Linear
    out: Linear
    scale: float
    per_head: bool = False
    rotary: RotaryPositions | None = None
    relative_bias: RelativeBias | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    window: int | None = None
    softcap: float | None = None
    output_norm: Norm | None = None
    sum_norm: Norm | None = None


class CrossAttention(NamedTuple):
    """Attention to an encoder's output, with as many heads for keys and values as for queries.

    Attributes:
        key_value: two weights [heads * head_dim, encoder_width].
        norm, sum_norm: as in SelfAttention.
    """

    norm: Norm | None
    query: Linear
    key_value: Linear
    out: Linear
    scale: float
    sum_norm: Norm | None = None


class FeedForward(NamedTuple):
    """`down(activation(up(x)))`; gated, `up` has two weights, and the first product is activated and multiplied with
    the second.

    Attributes:
        norm: of the input; in a parallel layer None if both parts read the attention's norm.
        output_norm, sum_norm: as in SelfAttention.
    """

    norm: Norm | None
    up: Linear
    activation: Activation
    down: Linear
    output_norm: Norm | None = None
    sum_norm: Norm | None = None

    @property
    def gated(self) -> bool:
        return len(self.up.weights) > 1


class Layer(NamedTuple):
    self_attention: SelfAttention
    feed_forward: FeedForward
    cross_attention: CrossAttention | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """In the order in which a step runs them."""
        own, cross, feed_forward = self.self_attention, self.cross_attention, self.feed_forward
        between = () if cross is None else (cross.query, cross.out)
        return (own.qkv, own.out, *between, feed_forward.up, feed_forward.down)


@dataclass(frozen=True)
class DecoderSpec:
    """A transformer decoder with a language-model head.

    Attributes:
        token_embedding: [vocab, width of embeddings].
        head: [vocab, width of embeddings]; its weight is `token_embedding` if they are tied.
        final_norm: None if the last layer's `sum_norm` is the last.
        kv_heads: heads of keys and values, each shared by heads / kv_heads heads of queries.
        position_embedding: [positions, width], added to the tokens' embeddings.
        max_length: the number of positions; None if there is no bound.
        embedding_scale: factor on the tokens' embeddings.
        embedding_projection: of the scaled embeddings, before positions are added; None if they are as wide as a layer.
        embedding_norm: of the embeddings, with positions.
        parallel_residual: attention and feed-forward read the same input, and their outputs are added to it together.
        residual_scale: factor on the outputs of attention and feed-forward.
        clamps_float16: float16 residual sums are clamped as T5Block does.
        head_scale: factor on the final norm's output.
        head_projection: between the final norm and the head; None if the head is as wide as a layer.
        head_softcap: logits are replaced by softcap * tanh(logits / softcap).
    """

    token_embedding: Tensor
    layers: tuple[Layer, ...]
    final_norm: Norm | None
    head: Linear
    heads: int
    kv_heads: int
    head_dim: int
    max_length: int | None = None
    position_embedding: Tensor | None = None
    embedding_scale: float | None = None
    embedding_projection: Linear | None = None
    embedding_norm: Norm | None = None
    parallel_residual: bool = False
    residual_scale: float | None = None
    clamps_float16: bool = False
    head_scale: float | None = None
    head_projection: Linear | None = None
    head_softcap: float | None = None

    @property
    def has_encoder(self) -> bool:
        return self.layers[0].cross_attention is not None

    @property
    def encoder_width(self) -> int:
        """Width of the encoder's output; 0 without an encoder."""
        cross = self.layers[0].cross_attention
        return 0 if cross is None else cross.key_value.weights[0].shape[1]

    @property
    def cache_dtype(self) -> torch.dtype:
        """That of keys and values, which their projection returns."""
        return self.layers[0].self_attention.qkv.weights[0].dtype

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All linear layers, also those that run on an encoder's output only."""
        of_layers = (linear for layer in self.layers for linear in layer.linears)
        crosses = (layer.cross_attention for layer in self.layers)
        of_encoder = (cross.key_value for cross in crosses if cross is not None)
        projections = (part for part in (self.embedding_projection, self.head_projection) if part is not None)
        return (*of_layers, *of_encoder, *projections, self.head)

    @property
    def rotaries(self) -> tuple[RotaryPositions, ...]:
        """The rotations of all layers, each once."""
        found = (layer.self_attention.rotary for layer in self.layers)
        return tuple({id(rotary): rotary for rotary in found if rotary is not None}.values())

    @property
    def relative_biases(self) -> tuple[RelativeBias, ...]:
        """The biases of all layers, each once."""
        found = (layer.self_attention.relative_bias for layer in self.layers)
        return tuple({id(bias): bias for bias in found if bias is not None}.values())


def not_built_reasons(spec: DecoderSpec) -> Iterator[str]:
    """Why `SpecStep` cannot run a spec."""
    if spec.head_scale is not None and spec.final_norm is None:
        yield "the head's input is scaled without a norm before it"
    for layer in spec.layers:
        attention, cross = layer.self_attention, layer.cross_attention
        if (cross is None) == spec.has_encoder:
            yield "some layers have cross-attention and some do not"
            return
        if attention.relative_bias is not None and spec.kv_heads != spec.heads:
            yield "a bias by distance, with heads that share keys and values"
            return
        if attention.per_head and spec.kv_heads != spec.heads:
            yield "queries, keys and values lie head by head, with heads that share keys and values"
            return
        if spec.parallel_residual and (cross is not None or attention.output_norm or attention.sum_norm):
            yield "parallel layers with cross-attention or norms after them"
            return
