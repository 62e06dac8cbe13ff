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
    """Queries and keys are rotated by their position, in pairs (i, i + rotated / 2) of each head's first elements.

    Attributes:
        inverse_frequencies: [rotated / 2] float32.
        scale: factor on sines and cosines.
    """

    inverse_frequencies: Tensor
    scale: float = 1.0


class RelativeBias(NamedTuple):
    """A bias by distance, added to self-attention's scores; the same in all layers.

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
        q_norm, k_norm: norms of each query and key [head_dim], before they are rotated.
        window: a query sees this many keys, its own among them; None for all.
        softcap: scores are replaced by softcap * tanh(scores / softcap).
    """

    norm: Norm
    qkv: Linear
    out: Linear
    scale: float
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    window: int | None = None
    softcap: float | None = None


class CrossAttention(NamedTuple):
    """Attention to an encoder's output, with as many heads for keys and values as for queries.

    Attributes:
        key_value: two weights [heads * head_dim, encoder_width].
    """

    norm: Norm
    query: Linear
    key_value: Linear
    out: Linear
    scale: float


class FeedForward(NamedTuple):
    """`down(activation(up(x)))`; gated, `up` has two weights, and the first product is activated and multiplied with
    the second.

    Attributes:
        norm: of the input; None if the layer is parallel and both parts read the same norm.
    """

    norm: Norm | None
    up: Linear
    activation: Activation
    down: Linear

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
    """A pre-norm transformer decoder with a language-model head.

    Attributes:
        token_embedding: [vocab, width].
        head: [vocab, width]; its weight is `token_embedding` if they are tied.
        kv_heads: heads of keys and values, each shared by heads / kv_heads heads of queries.
        position_embedding: [positions, width], added to the tokens' embeddings.
        max_length: the number of positions; None if there is no bound.
        embedding_scale: factor on the embeddings.
        parallel_residual: attention and feed-forward read the same input, and their outputs are added to it together.
        clamps_float16: float16 residual sums are clamped as T5Block does.
        head_scale: factor on the final norm's output.
        head_softcap: logits are replaced by softcap * tanh(logits / softcap).
    """

    token_embedding: Tensor
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: Linear
    heads: int
    kv_heads: int
    head_dim: int
    max_length: int | None = None
    position_embedding: Tensor | None = None
    rotary: RotaryPositions | None = None
    relative_bias: RelativeBias | None = None
    embedding_scale: float | None = None
    parallel_residual: bool = False
    clamps_float16: bool = False
    head_scale: float | None = None
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


_BUILT_NORMS = ("layer_norm", "t5_rms_norm")


def not_built_reasons(spec: DecoderSpec) -> Iterator[str]:
    """Why `SpecStep` cannot run a spec: what the kernels, or the step around them, do not do yet."""
    if spec.kv_heads != spec.heads:
        yield f"{spec.heads} heads share {spec.kv_heads} heads of keys and values"
    if spec.rotary is not None:
        yield "queries and keys are rotated"
    if spec.embedding_scale is not None:
        yield "embeddings are scaled"
    if spec.parallel_residual:
        yield "attention and feed-forward are parallel"
    if spec.head_softcap is not None:
        yield "logits are capped"
    if spec.relative_bias is not None and not spec.has_encoder:
        yield "a decoder-only model has a relative bias"
    if spec.position_embedding is not None and spec.has_encoder:
        yield "the decoder behind an encoder has learned positions"
    norms = {norm.kind for layer in spec.layers for norm in _norms(layer)} | {spec.final_norm.kind}
    if len(norms) > 1:
        yield f"norms are of several kinds: {', '.join(sorted(norms))}"
    for kind in sorted(norms.difference(_BUILT_NORMS)):
        yield f"a norm is {kind}"
    if spec.has_encoder and "layer_norm" in norms:
        yield "the decoder behind an encoder has LayerNorms"
    for layer in spec.layers:
        attention, cross, feed_forward = layer.self_attention, layer.cross_attention, layer.feed_forward
        if (cross is None) == spec.has_encoder:
            yield "some layers have cross-attention and some do not"
            return
        if len({len(weight) for weight in attention.qkv.weights}) > 1:
            yield "weights of queries, keys and values have different widths"
            return
        if attention.q_norm is not None or attention.k_norm is not None:
            yield "queries or keys are normalised"
            return
        if attention.window is not None:
            yield f"attention sees {attention.window} keys"
            return
        if attention.softcap is not None:
            yield "scores are capped"
            return
        if feed_forward.gated and (norms == {"layer_norm"} or feed_forward.activation not in ("gelu_tanh", "relu")):
            yield f"a feed-forward is gated by {feed_forward.activation}"
            return


def _norms(layer: Layer) -> Iterator[Norm]:
    own, cross, feed_forward = layer.self_attention, layer.cross_attention, layer.feed_forward
    yield own.norm
    if cross is not None:
        yield cross.norm
    if feed_forward.norm is not None:
        yield feed_forward.norm
