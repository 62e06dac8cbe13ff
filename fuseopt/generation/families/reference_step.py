"""ReferenceDecoder: runs any DecoderSpec in plain PyTorch, top to bottom. What the kernels are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from fuseopt.blocks.t5_inference import clamped
from fuseopt.generation.engine.layers import Activation, Linear, Norm
from fuseopt.generation.families.decoder_spec import (
    CrossAttention,
    DecoderSpec,
    FeedForward,
    RotaryPositions,
    SelfAttention,
)
from fuseopt.ops.decode.linear import ACTIVATIONS
from fuseopt.ops.decode.quantized_heads import dequantize_heads, quantize_heads


@dataclass
class KeyValueCache:
    """Keys and values of all tokens so far, a pair [rows, kv_heads, length, head_dim] a layer.

    Attributes:
        cross: likewise of an encoder's output.
        keep: [rows, length] bool, False for tokens that are padding.
        cross_keep: [rows, encoder length] bool.
        stored_dtype: int8 or float8_e4m3fn to round keys and values as a cache in 8 bits does; None not to.
    """

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    cross: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    keep: Tensor | None = None
    cross_keep: Tensor | None = None
    stored_dtype: torch.dtype | None = None

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[2] if self.layers else 0

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds new tokens to a layer's cache; returns the keys and values that they attend to.

        These are the whole cache. Several tokens at once, a prompt, attend to their own before rounding.
        """
        before, stored = self.layers[layer : layer + 1], (self.rounded(keys), self.rounded(values))
        self.layers[layer : layer + 1] = [_joined(before, stored)]
        return self.layers[layer] if keys.shape[2] == 1 else _joined(before, (keys, values))

    def rounded(self, vectors: Tensor) -> Tensor:
        """`vectors` [..., head_dim] quantised and dequantised; unchanged without a `stored_dtype`."""
        if self.stored_dtype is None:
            return vectors
        return dequantize_heads(*quantize_heads(vectors, self.stored_dtype), vectors.dtype)


def _joined(before: Sequence[tuple[Tensor, Tensor]], after: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    keys, values = (torch.cat(parts, dim=2) for parts in zip(*before, after, strict=True))
    return keys, values


class ReferenceDecoder:
    """Call: tokens and a cache -> logits; the cache then has the tokens' keys and values too.

    Computes in the dtype of the weights. Runs prompts, single tokens and anything between by the same code.
    """

    def __init__(self, spec: DecoderSpec) -> None:
        self.spec = spec

    def encode(self, cache: KeyValueCache, encoded: Tensor, keep: Tensor | None = None) -> None:
        """Fills the cross-attention cache.

        Args:
            encoded: an encoder's output [rows, length, encoder_width].
            keep: [rows, length], nonzero where a token counts; None if all do.
        """
        cache.cross_keep = None if keep is None else keep.bool()
        for layer in self.spec.layers:
            assert layer.cross_attention is not None, "the spec has no encoder"
            keys, values = linear(encoded, layer.cross_attention.key_value).chunk(2, dim=-1)
            cache.cross.append((cache.rounded(self.split_heads(keys)), cache.rounded(self.split_heads(values))))

    def __call__(
        self, cache: KeyValueCache, tokens: Tensor, positions: Tensor | None = None, keep: Tensor | None = None
    ) -> Tensor:
        """Runs tokens that follow those in the cache.

        Args:
            tokens: [rows, length] int64.
            positions: [rows, length] int64; None to count from the cache's length on.
            keep: [rows, length], nonzero where a token counts; None if all do.

        Returns:
            [rows, length, vocab].
        """
        spec, past = self.spec, cache.length
        if positions is None:
            positions = torch.arange(past, past + tokens.shape[1], device=tokens.device).expand_as(tokens)
        keep = torch.ones_like(tokens, dtype=torch.bool) if keep is None else keep.bool()
        cache.keep = keep if cache.keep is None else torch.cat((cache.keep, keep), dim=1)

        hidden = F.embedding(tokens, spec.token_embedding)
        if spec.embedding_scale is not None:
            hidden = hidden * spec.embedding_scale
        if spec.embedding_projection is not None:
            hidden = linear(hidden, spec.embedding_projection)
        if spec.position_embedding is not None:
            hidden = hidden + F.embedding(positions, spec.position_embedding)
        hidden = normalise(hidden, spec.embedding_norm)
        for index, layer in enumerate(spec.layers):
            own, following, cross = layer
            attended = self.attend_to_tokens(hidden, own, cache, index, positions, past)
            if spec.parallel_residual:
                before = following.norm or own.norm
                hidden = hidden + attended + feed_forward(normalise(hidden, before), following)
                continue
            hidden = self.add(hidden, attended, own)
            if cross is not None:
                hidden = self.add(hidden, self.attend_to_encoder(hidden, cross, cache, index), cross)
            hidden = self.add(hidden, feed_forward(normalise(hidden, following.norm), following), following)
        hidden = normalise(hidden, spec.final_norm)
        if spec.head_scale is not None:
            hidden = hidden * spec.head_scale
        if spec.head_projection is not None:
            hidden = linear(hidden, spec.head_projection)
        logits = linear(hidden, spec.head)
        return logits if spec.head_softcap is None else softcapped(logits, spec.head_softcap)

    def add(self, hidden: Tensor, output: Tensor, of: SelfAttention | CrossAttention | FeedForward) -> Tensor:
        output = output if isinstance(of, CrossAttention) else normalise(output, of.output_norm)
        hidden = hidden + (output if self.spec.residual_scale is None else output * self.spec.residual_scale)
        return normalise(clamped(hidden) if self.spec.clamps_float16 else hidden, of.sum_norm)

    def attend_to_tokens(
        self,
        hidden: Tensor,
        attention: SelfAttention,
        cache: KeyValueCache,
        index: int,
        positions: Tensor,
        past: int,
    ) -> Tensor:
        """[rows, length, width] -> the same, after the output projection; `past` tokens were in the cache before."""
        spec = self.spec
        projected = linear(normalise(hidden, attention.norm), attention.qkv)
        if attention.per_head:
            query, keys, values = projected.unflatten(-1, (spec.heads, 3, -1)).unbind(-2)
        else:
            each = (spec.heads, spec.kv_heads, spec.kv_heads)
            query, keys, values = projected.unflatten(-1, (-1, spec.head_dim)).split(each, dim=-2)
        query, keys = normalise_heads(query, attention.q_norm), normalise_heads(keys, attention.k_norm)
        query, keys, values = (part.transpose(1, 2) for part in (query, keys, values))
        if attention.rotary is not None:
            query, keys = (rotate(part, positions, attention.rotary) for part in (query, keys))
        keys, values = cache.append(index, keys, values)

        # [queries, keys]: how far a key lies before a query in the cache.
        slots = torch.arange(keys.shape[2], device=keys.device)
        distance = slots[past:, None] - slots
        seen = distance >= 0
        if attention.window is not None:
            seen = seen & (distance < attention.window)
        assert cache.keep is not None
        mask = additive(seen & cache.keep[:, None, None, :], query.dtype)
        if attention.relative_bias is not None:
            bias = F.embedding(attention.relative_bias.bucket_of(distance.clamp(min=0)), attention.relative_bias.weight)
            mask = mask + bias.permute(2, 0, 1)
        return linear(attend_heads(query, keys, values, mask, attention.scale, attention.softcap), attention.out)

    def attend_to_encoder(self, hidden: Tensor, attention: CrossAttention, cache: KeyValueCache, index: int) -> Tensor:
        query = self.split_heads(linear(normalise(hidden, attention.norm), attention.query))
        keys, values = cache.cross[index]
        mask = None if cache.cross_keep is None else additive(cache.cross_keep[:, None, None, :], query.dtype)
        return linear(attend_heads(query, keys, values, mask, attention.scale), attention.out)

    def split_heads(self, projected: Tensor) -> Tensor:
        """[rows, length, heads * head_dim] -> [rows, heads, length, head_dim]"""
        return projected.unflatten(-1, (-1, self.spec.head_dim)).transpose(1, 2)


def attend_heads(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float | None = None
) -> Tensor:
    """softmax(query @ keys + mask) @ values: [rows, heads, length, head_dim] -> [rows, length, heads * head_dim].

    Each head of keys and values serves heads / kv_heads neighbouring heads of queries.
    """
    queries_per_kv = query.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(queries_per_kv, dim=1) for part in (keys, values))
    scores = query @ keys.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcapped(scores, softcap)
    if mask is not None:
        scores = scores + mask
    weights = scores.float().softmax(dim=-1).to(values.dtype)
    return (weights @ values).transpose(1, 2).flatten(2)


def feed_forward(hidden: Tensor, layer: FeedForward) -> Tensor:
    """[..., width] -> [..., width], without norm and residual."""
    up = linear(hidden, layer.up)
    if layer.gated:
        gate, up = up.chunk(2, dim=-1)
        return linear(activate(gate, layer.activation) * up, layer.down)
    return linear(activate(up, layer.activation), layer.down)


def activate(hidden: Tensor, activation: Activation) -> Tensor:
    return activation(hidden) if callable(activation) else ACTIVATIONS[activation](hidden)


def linear(hidden: Tensor, layer: Linear) -> Tensor:
    """[..., K] -> [..., N * number of weights], in the weights' dtype."""
    weights = layer.multiplied()
    hidden = hidden.to(weights[0].dtype)
    biases = layer.biases or (None,) * len(weights)
    products = [F.linear(hidden, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return torch.cat(products, dim=-1)


def normalise(hidden: Tensor, norm: Norm | None) -> Tensor:
    """Over the last dimension, in float32; `hidden` itself without a norm."""
    if norm is None:
        return hidden
    if norm.kind == "layer_norm":
        return F.layer_norm(hidden, hidden.shape[-1:], norm.weight, norm.bias, norm.eps)
    scaled = hidden.float() * torch.rsqrt(hidden.float().pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.kind == "gemma_rms_norm":
        return (scaled * (1 + norm.weight.float())).to(hidden.dtype)
    if norm.kind == "float32_rms_norm":
        return (scaled * norm.weight).to(hidden.dtype)
    if norm.kind in ("rms_norm", "t5_rms_norm"):
        # transformers' LlamaRMSNorm returns to the input's dtype, T5LayerNorm to the weight's, before the product.
        dtype = norm.weight.dtype if norm.kind == "t5_rms_norm" else hidden.dtype
        return norm.weight * scaled.to(dtype)
    raise ValueError(f"unknown norm {norm.kind!r}")


def normalise_heads(heads: Tensor, norm: Norm | None) -> Tensor:
    """[..., heads, head_dim], each head or all together, by the size of the weight."""
    if norm is None or norm.weight.numel() == heads.shape[-1]:
        return normalise(heads, norm)
    return normalise(heads.flatten(-2), norm).view_as(heads)


def rotate(vectors: Tensor, positions: Tensor, rotary: RotaryPositions) -> Tensor:
    """[rows, heads, length, head_dim], rotated by `positions` [rows, length]; elements after the rotated stay."""
    cos, sin = rotary.table(positions, vectors.dtype)[:, None].chunk(2, dim=-1)
    rotated, rest = vectors.tensor_split((2 * cos.shape[-1],), dim=-1)
    if rotary.interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    rotated = torch.stack(turned, dim=-1).flatten(-2) if rotary.interleaved else torch.cat(turned, dim=-1)
    return torch.cat((rotated.to(vectors.dtype), rest), dim=-1)


def softcapped(scores: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(scores / softcap)


def additive(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `keep` is True, the lowest number elsewhere."""
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill_(~keep, torch.finfo(dtype).min)
