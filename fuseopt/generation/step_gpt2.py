"""GPT2Step: one decode step of GPT2LMHeadModel on the model's own Parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.gpt2 import modeling_gpt2
from transformers.pytorch_utils import Conv1D

from fuseopt.generation.layers import (
    Activation,
    Norm,
    activation_of,
    attend,
    causal_mask,
    identity,
    layer_norm,
    write_slot,
)
from fuseopt.generation.state import CacheShape, DecodeState

# qkv [tokens, 3, heads, head_dim], the layer's cache, scale -> [tokens, heads * head_dim]
_AttentionFunction = Callable[[Tensor, Tensor, float], Tensor]


class _Projection(NamedTuple):
    weight: Tensor
    bias: Tensor

    def __call__(self, input: Tensor) -> Tensor:
        return torch.addmm(self.bias, input, self.weight)


class _Layer(NamedTuple):
    norm_1: Norm
    qkv: _Projection
    scale: float
    out: _Projection
    norm_2: Norm
    up: _Projection
    activation: Activation
    down: _Projection


class GPT2Step:
    """Call: a DecodeState -> logits [rows, vocab] in the model's dtype, with the step's keys and values written.

    Upstream: `GPT2LMHeadModel.forward` for one token a row. Weights are read where they are, so editing them in place
    shows; `key` changes when anything is put elsewhere or the forward would be another.
    """

    model_class = modeling_gpt2.GPT2LMHeadModel
    module_classes = (
        modeling_gpt2.GPT2LMHeadModel,
        modeling_gpt2.GPT2Model,
        modeling_gpt2.GPT2Block,
        modeling_gpt2.GPT2Attention,
        modeling_gpt2.GPT2MLP,
        Conv1D,
        nn.Linear,
        nn.LayerNorm,
        nn.Embedding,
        nn.Dropout,
        nn.ModuleList,
    )

    def __init__(self, model: nn.Module) -> None:
        transformer = model.transformer
        self.token_embedding, self.position_embedding = transformer.wte.weight, transformer.wpe.weight
        self.layers = [_layer(block) for block in transformer.h]
        self.final_norm = _norm(transformer.ln_f)
        self.head, self.head_bias = model.lm_head.weight, model.lm_head.bias
        self.vocab = self.head.shape[0]
        attention = transformer.h[0].attn
        weight = self.token_embedding
        self.shape = CacheShape(len(self.layers), attention.num_heads, attention.head_dim, weight.dtype, weight.device)
        self.key = identity(
            self.token_embedding, self.position_embedding, *self.layers, self.final_norm, self.head, self.head_bias
        )

    @staticmethod
    def not_supported_reasons(model: nn.Module) -> list[str]:
        """Why this step would not compute what the model's forward does; `module_classes` are checked elsewhere."""
        if model.config.add_cross_attention:
            return ["it has cross-attention"]
        if model.config.reorder_and_upcast_attn:
            return ["reorder_and_upcast_attn computes attention in a float32 order of its own"]
        return []

    @staticmethod
    def max_length(model: nn.Module) -> int | None:
        """The longest sequence, as far as position embeddings go."""
        return model.transformer.wpe.num_embeddings

    def __call__(self, state: DecodeState) -> Tensor:
        mask = state.attention_mask(self.shape.dtype)

        def attention(qkv: Tensor, cache: Tensor, scale: float) -> Tensor:
            write_slot(cache, qkv[:, 1:].transpose(0, 1), state.slot)
            return attend(qkv[:, 0], cache, mask, scale)

        return self._logits(self._hidden(state.tokens, state.positions, state, attention))

    def prefill(self, state: DecodeState, input_ids: Tensor, positions: Tensor, keep: Tensor | None) -> Tensor:
        """The prompt in one go: fills the first slots of the empty cache.

        Args:
            input_ids, positions: [rows, length] int64.
            keep: attention mask [rows, length], or None where all tokens count.

        Returns:
            The last tokens' logits [rows, vocab].
        """
        rows, length = input_ids.shape
        mask = None if keep is None else keep.bool()[:, None, None, :] & causal_mask(length, input_ids.device)

        def attention(qkv: Tensor, cache: Tensor, scale: float) -> Tensor:
            query, keys, values = qkv.unflatten(0, (rows, length)).permute(2, 0, 3, 1, 4).unbind()
            cache[0, :, :, :length], cache[1, :, :, :length] = keys, values
            attended = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
            )
            return attended.transpose(1, 2).reshape(rows * length, -1)

        positions = positions.expand(rows, length).flatten()
        hidden = self._hidden(input_ids.flatten(), positions, state, attention)
        return self._logits(hidden.unflatten(0, (rows, length))[:, -1])

    def _hidden(self, tokens: Tensor, positions: Tensor, state: DecodeState, attention: _AttentionFunction) -> Tensor:
        """[tokens] -> [tokens, hidden], before the final norm."""
        hidden = F.embedding(tokens, self.token_embedding) + F.embedding(positions, self.position_embedding)
        for layer, cache in zip(self.layers, state.cache, strict=True):
            qkv = layer.qkv(layer_norm(hidden, layer.norm_1)).unflatten(1, (3, self.shape.heads, self.shape.head_dim))
            hidden = layer.out(attention(qkv, cache, layer.scale)) + hidden
            hidden = layer.down(layer.activation(layer.up(layer_norm(hidden, layer.norm_2)))) + hidden
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(layer_norm(hidden, self.final_norm), self.head, self.head_bias)


def _layer(block: nn.Module) -> _Layer:
    return _Layer(
        _norm(block.ln_1),
        _projection(block.attn.c_attn),
        block.attn.scaling,
        _projection(block.attn.c_proj),
        _norm(block.ln_2),
        _projection(block.mlp.c_fc),
        activation_of(block.mlp.act),
        _projection(block.mlp.c_proj),
    )


def _norm(norm: nn.Module) -> Norm:
    return Norm(norm.weight, norm.bias, norm.eps)


def _projection(projection: nn.Module) -> _Projection:
    return _Projection(projection.weight, projection.bias)
