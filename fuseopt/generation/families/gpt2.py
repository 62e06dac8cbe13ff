"""GPT2Step: one decode step of GPT2LMHeadModel on the model's own Parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fuseopt import ops
from fuseopt.generation.engine.attention import StepAttention
from fuseopt.generation.engine.layers import (
    Activation,
    BeforeHead,
    Embedding,
    Linear,
    Norm,
    ResidualStream,
    activation_of,
    causal_mask,
    linear_of,
    look_ahead,
)
from fuseopt.generation.engine.state import CacheShape, DecodeState
from fuseopt.generation.families.step_interface import DecodeStep
from fuseopt.generation.prompt.prompts import store
from fuseopt.modules.children import GPT2_CHILDREN
from fuseopt.ops.decode.prompt_attention import is_fast


class _Layer(NamedTuple):
    norm_1: Norm
    qkv: Linear
    scale: float
    out: Linear
    norm_2: Norm
    up: Linear
    activation: Activation
    down: Linear


# Of what goes into a layer, the layer, and its cache, gives [tokens, heads * head_dim].
_AttentionFunction = Callable[[ResidualStream, _Layer, Tensor], Tensor]


class GPT2Step(DecodeStep):
    """Call: a DecodeState -> what the head's logits are made of, with the step's keys and values written.

    Upstream: `GPT2LMHeadModel.forward` for one token a row. Weights are read where they are, so editing them in place
    shows.
    """

    model_class = "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel"
    children = GPT2_CHILDREN

    def __init__(self, model: nn.Module) -> None:
        transformer = model.transformer
        self.token_embedding, self.position_embedding = transformer.wte.weight, transformer.wpe.weight
        self.layers = [_layer(block) for block in transformer.h]
        self.final_norm = _norm(transformer.ln_f)
        self.head = linear_of(model.lm_head)
        look_ahead([part for layer in self.layers for part in (layer.qkv, layer.out, layer.up, layer.down)], self.head)
        self.vocab = model.lm_head.weight.shape[0]
        # Of a sequence, as far as position embeddings go.
        self.max_length = self.position_embedding.shape[0]
        attention = transformer.h[0].attn
        weight = self.token_embedding
        self.shape = CacheShape(len(self.layers), attention.num_heads, attention.head_dim, weight.dtype, weight.device)

    @staticmethod
    def roots(model: nn.Module) -> tuple[nn.Module, ...]:
        """Whose work the step does itself."""
        return model.transformer, model.lm_head

    @staticmethod
    def not_supported_reasons(model: nn.Module) -> list[str]:
        """Why this step would not compute what the model's forward does; `children` are checked elsewhere."""
        if model.config.add_cross_attention:
            return ["it has cross-attention"]
        if model.config.reorder_and_upcast_attn:
            return ["reorder_and_upcast_attn computes attention in a float32 order of its own"]
        return []

    def __call__(self, state: DecodeState) -> BeforeHead:
        slots, head = StepAttention(state), (self.head, self.final_norm)

        def attention(stream: ResidualStream, layer: _Layer, cache: Tensor) -> Tensor:
            return slots.project_to_slots(stream, layer.qkv, layer.norm_1, cache, layer.scale)

        return self._through(state.tokens, state.positions, state, attention, head).before(*head)

    def prefill(self, state: DecodeState, length: int, masked: bool) -> None:
        """The prompt in one go: fills the first slots of the cache, and the logits of the last tokens.

        Args:
            state: `slot` says how long the prompt is.
            length: tokens a row, those behind the prompt being padding: no token of the prompt sees them, and a step
                overwrites what they leave in the cache before it reads it.
            masked: whether `keep` excludes any token.
        """
        rows = state.sizes.rows
        in_prompt = state.slots[:length] < state.slot
        tokens, positions = (ids[:, :length] * in_prompt for ids in (state.ids, state.prompt_positions))
        mask = None
        if masked:
            # As numbers, since PyTorch would turn it into numbers in every layer.
            mask = torch.zeros(rows, 1, length, length, dtype=self.shape.dtype, device=state.device)
            seen = state.keep[:, None, None, :length] & causal_mask(length, state.device)
            mask = mask.masked_fill_(~seen, -torch.inf)

        def attention(stream: ResidualStream, layer: _Layer, cache: Tensor) -> Tensor:
            heads = 3, self.shape.heads, self.shape.head_dim
            qkv = stream.linear(layer.qkv, layer.norm_1).unflatten(1, heads).unflatten(0, (rows, length))
            if mask is None and is_fast(qkv, cache[0], cache[1]):
                return ops.prompt_attention_(qkv, cache[0], cache[1], layer.scale, overlap=True).flatten(0, 1)
            qkv = qkv.permute(2, 0, 3, 1, 4)
            # PyTorch's attention multiplies masked values by 0, and 0 * NaN is NaN, so padding gets zeros.
            store(cache[:, :, :, :length], qkv[1:], in_prompt[:, None])
            keys, values = cache[:, :, :, :length].unbind()
            attended = F.scaled_dot_product_attention(
                qkv[0], keys, values, attn_mask=mask, is_causal=mask is None, scale=layer.scale
            )
            return attended.transpose(1, 2).reshape(rows * length, -1)

        last = torch.arange(0, rows * length, length, device=state.device) + (state.slot - 1)
        stream = self._through(tokens.flatten(), positions.flatten(), state, attention, None, last)
        state.logits.copy_(stream.before(self.head, self.final_norm).logits())

    def _through(
        self,
        tokens: Tensor,
        positions: Tensor,
        state: DecodeState,
        attention: _AttentionFunction,
        head: tuple[Linear, Norm] | None,
        wanted: Tensor | None = None,
    ) -> ResidualStream:
        """[tokens] -> [tokens, hidden] behind all layers.

        Args:
            head: whom it goes to as a whole.
            wanted: [any] int64, the tokens that are wanted; of the others the last layer has keys and values alone.
        """
        tables = self.token_embedding, self.position_embedding
        stream = ResidualStream(Embedding(tokens, tables[0], positions, tables[1], overlap=state.steps_overlap))
        nexts = [*((layer.qkv, layer.norm_1) for layer in self.layers[1:]), head]
        for layer, cache, following in zip(self.layers, state.cache, nexts, strict=True):
            attended = attention(stream, layer, cache)
            if wanted is not None and layer is self.layers[-1]:
                attended, stream = attended[wanted], stream.of(wanted)
            stream.add(attended, layer.out)
            inner = stream.linear(layer.up, layer.norm_2, layer.activation)
            stream.add(inner, layer.down, following)
        return stream


def _layer(block: nn.Module) -> _Layer:
    return _Layer(
        _norm(block.ln_1),
        _conv1d(block.attn.c_attn),
        block.attn.scaling,
        _conv1d(block.attn.c_proj),
        _norm(block.ln_2),
        _conv1d(block.mlp.c_fc),
        activation_of(block.mlp.act),
        _conv1d(block.mlp.c_proj),
    )


def _norm(norm: nn.Module) -> Norm:
    return Norm("layer_norm", norm.weight, norm.bias, norm.eps)


def _conv1d(module: nn.Module) -> Linear:
    return Linear((module.weight.T,), (module.bias,))
