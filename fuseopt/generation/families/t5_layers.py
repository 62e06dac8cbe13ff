"""What T5's encoder and its decode step have in common, on the model's own tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from fuseopt.blocks.t5_inference import clamped
from fuseopt.generation.engine.layers import Activation, Linear, Norm, activation_of, linear, linear_of


class SelfAttention(NamedTuple):
    norm: Norm
    qkv: Linear
    out: Linear
    scale: float


class FeedForward(NamedTuple):
    """`up` has two weights in v1.1, where the first is the gate."""

    norm: Norm
    up: Linear
    activation: Activation
    down: Linear


def self_attention_of(layer: nn.Module) -> SelfAttention:
    """Of a T5LayerSelfAttention."""
    attention = layer.SelfAttention
    return SelfAttention(
        norm_of(layer.layer_norm),
        linear_of(attention.q, attention.k, attention.v),
        linear_of(attention.o),
        attention.scaling,
    )


def feed_forward_of(layer: nn.Module) -> FeedForward:
    """Of a T5LayerFF."""
    dense = layer.DenseReluDense
    up = linear_of(dense.wi_0, dense.wi_1) if hasattr(dense, "wi_0") else linear_of(dense.wi)
    return FeedForward(norm_of(layer.layer_norm), up, activation_of(dense.act), linear_of(dense.wo))


def norm_of(norm: nn.Module) -> Norm:
    """Of a T5LayerNorm."""
    return Norm("t5_rms_norm", norm.weight, None, norm.variance_epsilon)


def fed_forward(hidden: Tensor, layer: FeedForward) -> Tensor:
    """[tokens, hidden] -> the same, after a T5LayerFF."""
    gated = len(layer.up.weights) > 1
    inner = linear(hidden, layer.up, norm=layer.norm, activation=layer.activation, gated=gated)
    return clamped(linear(inner, layer.down, residual=hidden))
