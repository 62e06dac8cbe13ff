"""Where the weights are that T5's encoder and decoder have alike."""

from __future__ import annotations

from torch import nn

from fuseopt.generation.engine.layers import Norm, activation_of, linear_of
from fuseopt.generation.families.decoder_spec import FeedForward, SelfAttention


def self_attention_of(layer: nn.Module) -> SelfAttention:
    """Of a T5LayerSelfAttention."""
    attention = layer.SelfAttention
    qkv = linear_of(attention.q, attention.k, attention.v)
    return SelfAttention(norm_of(layer.layer_norm), qkv, linear_of(attention.o), attention.scaling)


def feed_forward_of(layer: nn.Module) -> FeedForward:
    """Of a T5LayerFF, which is gated in v1.1."""
    dense = layer.DenseReluDense
    up = linear_of(dense.wi_0, dense.wi_1) if hasattr(dense, "wi_0") else linear_of(dense.wi)
    return FeedForward(norm_of(layer.layer_norm), up, activation_of(dense.act), linear_of(dense.wo))


def norm_of(norm: nn.Module) -> Norm:
    """Of a T5LayerNorm."""
    return Norm("t5_rms_norm", norm.weight, None, norm.variance_epsilon)
