"""Forwards of T5's blocks and stacks without gradients, as a few operations on the weights.

`T5InferenceForward.run` is the block; read it first.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseopt import ops
from fuseopt.blocks.attention_functions import attention_function, sdpa_attention_function
from fuseopt.blocks.inference_blocks import (
    InferenceForward,
    StackForward,
)
from fuseopt.blocks.relative_attention import RelativeStackForward, distance_bias, distance_buckets
from fuseopt.blocks.stack_runner import BlockInputs
from fuseopt.modules.base import source_class
from fuseopt.ops import registry
from fuseopt.ops.backends import assumed_gpu
from fuseopt.ops.relative_attention import has_kernel

# Arguments that the block does not read; recording outputs works by hooks, which are checked separately.
_NOT_READ = frozenset(("seen_keys", "output_attentions", "output_hidden_states"))


class Shared(NamedTuple):
    """Tensors that all blocks of a stack use in one pass.

    Attributes:
        bias: [heads, 2 * max_distance + 1], self-attention's position bias by distance; None for no bias.
        mask, encoded_mask: bool, broadcastable to [batch, heads, queries, keys], False for masked keys.
        encoded: [batch * keys, hidden], input of cross-attention's keys and values, or None.
    """

    bias: Tensor | None
    mask: Tensor | None
    encoded: Tensor | None
    encoded_mask: Tensor | None


class T5InferenceForward(InferenceForward):
    """Forward of T5Block or MT5Block in eval mode without gradients; returns ([batch, length, hidden], None, None).

    Computes what the class's own forward computes with "sdpa" attention, except for queries whose keys are all masked
    (see `ops.relative_attention`). It reads the stack's masks [batch, length], and a position bias by distance.
    Residual adds are fused with the norm that follows, except in float16, where T5 clamps the sum in between. In half
    precision on a GPU a ReLU is an epilogue of the product before it.

    A stock block returns the position bias in another form, so either all blocks of a stack run this way or none.
    """

    needs_runner = True
    read: tuple[str, ...] = (
        "has_relative_attention_bias",
        "is_decoder",
        "key_value_proj_dim",
        "relative_attention_num_buckets",
        "relative_attention_max_distance",
    )

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        encoder_decoder_position_bias: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        masks = kwargs.get("seen_keys")
        if not torch.compiler.is_compiling() and masks is not None and _NOT_READ.issuperset(kwargs):
            inputs = _inputs(self.block, encoder_hidden_states, *masks)
            if self.runner is not None and _has_cache_parts(past_key_values, inputs):
                output = self.runner(self, hidden_states, past_key_values, inputs)
                if output is not None:
                    return output, None, None
        return type(self.block).forward(
            self.block,
            hidden_states,
            attention_mask,
            position_bias,
            encoder_hidden_states,
            encoder_attention_mask,
            encoder_decoder_position_bias,
            past_key_values=past_key_values,
            **kwargs,
        )

    @classmethod
    def backend_reasons(cls, block: Any, backend: str) -> list[str]:
        attention = block.layer[0].SelfAttention
        weight = attention.q.weight
        device, attention_backend = assumed_gpu() or weight.device, _attention_backend(backend)
        if has_kernel(attention_backend, device, weight.dtype, attention.key_value_proj_dim):
            return []
        op = registry.get("relative_attention")
        refused = op.choose(attention_backend, device, [weight.dtype]).refused
        reasons = "; ".join(f"{name}: {', '.join(found)}" for name, found in refused.items())
        return [
            "its attention has no kernel here that avoids storing the scores" + (f" ({reasons})" if reasons else "")
        ]

    def can_run(self, hidden_states: Tensor, inputs: BlockInputs) -> bool:
        if not self._is_untouched() or not self._is_of_one_dtype(hidden_states):
            return False
        block: Any = self.block
        attention = block.layer[0].SelfAttention
        return (
            attention_function(block, attention.config) is sdpa_attention_function()
            and _has_kernel(self.backend, hidden_states, attention.key_value_proj_dim)
            and _has_valid_shapes(hidden_states, inputs)
        )

    def constants(self, hidden_states: Tensor) -> Tensor:
        """The bucket of each distance, [2 * max_distance + 1] int64."""
        return distance_buckets(self.block.layer[0].SelfAttention, hidden_states.device)

    def shared(self, hidden_states: Tensor, inputs: BlockInputs, buckets: Tensor) -> Shared:
        attention = self.block.layer[0].SelfAttention
        bias = distance_bias(attention, buckets) if attention.has_relative_attention_bias else None
        encoded = inputs.encoded
        return Shared(
            bias,
            _as_bool_mask(inputs.mask),
            None if encoded is None else encoded.reshape(-1, encoded.shape[-1]),
            _as_bool_mask(inputs.encoded_mask),
        )

    def run(
        self, hidden_states: Tensor, added: Tensor | None, past_key_values: Any, shared: Shared
    ) -> tuple[Tensor, Tensor]:
        batch = len(hidden_states)
        residual = hidden_states.reshape(-1, hidden_states.shape[-1])
        layer, *others = self.block.layer
        normed, residual = self._add_and_norm(added, residual, layer.layer_norm)
        attention, cache = layer.SelfAttention, getattr(past_key_values, "self_attention_cache", past_key_values)
        added = self._attended(attention, batch, normed, normed, cache, shared.bias, shared.mask)
        layer = others[-1]
        if shared.encoded is not None:
            cross = others[0]
            normed, residual = self._add_and_norm(added, residual, cross.layer_norm)
            attention, cache = cross.EncDecAttention, getattr(past_key_values, "cross_attention_cache", None)
            added = self._attended(attention, batch, normed, shared.encoded, cache, None, shared.encoded_mask)
            if cache is not None:
                past_key_values.is_updated[attention.layer_idx] = True
        normed, residual = self._add_and_norm(added, residual, layer.layer_norm)
        added = self._fed_forward(layer.DenseReluDense, normed)
        return residual.view(hidden_states.shape), added.view(hidden_states.shape)

    def total(self, hidden_states: Tensor, added: Tensor) -> Tensor:
        return clamped(hidden_states + added)

    def _add_and_norm(self, added: Tensor | None, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        """(norm(added + residual), added + residual)"""
        weight, eps = norm.weight, norm.variance_epsilon
        if added is not None and residual.dtype is not torch.float16:
            return ops.add_rms_norm(
                added.view(residual.shape), residual, weight, eps, cast_order="t5", backend=self.backend
            )
        if added is not None:
            residual = clamped(residual + added.view(residual.shape))
        return ops.rms_norm(residual, weight, eps, cast_order="t5", backend=self.backend), residual

    def _attended(
        self,
        attention: Any,
        batch: int,
        input: Tensor,
        states: Tensor,
        cache: Any,
        bias: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        """Attention from the rows of `input` to the rows of `states`: [rows, hidden]."""

        def heads(rows: Tensor, layer: nn.Linear) -> Tensor:
            shape = (batch, len(rows) // batch, -1, attention.key_value_proj_dim)
            return self._linear(rows, layer).view(shape).transpose(1, 2)

        query, key, value = heads(input, attention.q), heads(states, attention.k), heads(states, attention.v)
        if cache is not None:
            key, value = cache.update(key, value, attention.layer_idx)
        attended = ops.relative_attention(
            query,
            key,
            value,
            bias,
            mask=mask,
            scale=attention.scaling,
            causal=attention.is_causal,
            backend=_attention_backend(self.backend),
        )
        return self._linear(attended.transpose(1, 2).flatten(2).flatten(0, 1), attention.o)

    def _fed_forward(self, dense: Any, normed: Tensor) -> Tensor:
        """The output of a T5DenseActDense or T5DenseGatedActDense."""
        if not hasattr(dense, "wi") or source_class(dense.act) is not nn.ReLU:
            return dense(normed)
        return self._linear(self._linear(normed, dense.wi, "relu"), dense.wo)

    def _linear(self, input: Tensor, layer: nn.Linear, activation: str | None = None) -> Tensor:
        """activation(layer(input)): [rows, in] -> [rows, out]."""
        return self._product(input, layer.weight.t(), layer.bias, activation)


class T5StackForward(StackForward):
    """Forward of T5Stack, which also passes its masks to the blocks, as `RelativeStackForward` does."""

    class_forward = RelativeStackForward
    tensors = frozenset(("attention_mask", "encoder_hidden_states", "encoder_attention_mask"))

    def report_lines(self) -> tuple[str, ...]:
        return self.runner.report_lines("decoder blocks" if self.stack.is_decoder else "encoder blocks")

    def _run_tokens(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        stack: Any = self.stack
        modeling: Any = sys.modules[type(stack).__module__]
        cache = None
        if stack.config.use_cache if use_cache is None else use_cache:
            if not stack.is_decoder:
                return None  # the class's forward raises its error
            cache = modeling.DynamicCache(config=stack.config)
            if stack.config.is_encoder_decoder:
                cache = modeling.EncoderDecoderCache(cache, modeling.DynamicCache(config=stack.config))
        inputs = _inputs(stack, encoder_hidden_states, attention_mask, encoder_attention_mask)
        if not _has_cache_parts(cache, inputs):
            return None
        output = self.runner.at_once(stack.dropout(stack.embed_tokens(input_ids)), cache, inputs)
        if output is None:
            return None
        return modeling.BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=stack.dropout(stack.final_layer_norm(output)), past_key_values=cache
        )


def clamped(hidden: Tensor) -> Tensor:
    """`hidden` with infinities clamped if it is float16, as in T5Block."""
    if hidden.dtype != torch.float16:
        return hidden
    largest = torch.finfo(torch.float16).max
    limit = torch.where(torch.isinf(hidden).any(), largest - 1000, largest)
    return torch.clamp(hidden, min=-limit, max=limit)


def _inputs(module: Any, encoded: Tensor | None, mask: Tensor | None, encoded_mask: Tensor | None) -> BlockInputs:
    """Inputs of a stack's or a block's attentions; only a decoder reads `encoded`."""
    return BlockInputs(mask) if encoded is None or not module.is_decoder else BlockInputs(mask, encoded, encoded_mask)


def _has_cache_parts(cache: Any, inputs: BlockInputs) -> bool:
    """Whether `cache` is None, or has a part for each kind of attention that `inputs` need."""
    return cache is None or inputs.encoded is None or hasattr(cache, "cross_attention_cache")


def _as_bool_mask(mask: Tensor | None) -> Tensor | None:
    """[batch, keys], 0 for masked keys -> [batch, 1, 1, keys] bool, False for masked keys."""
    return None if mask is None else mask.bool()[:, None, None, :]


def _has_valid_shapes(hidden: Tensor, inputs: BlockInputs) -> bool:
    """Whether masks and `encoded` have the shapes that blocks support, and `encoded` the dtype of `hidden`."""
    mask, encoded, encoded_mask = inputs.mask, inputs.encoded, inputs.encoded_mask
    if hidden.dim() != 3 or len(hidden) == 0 or (mask is not None and mask.shape != hidden.shape[:2]):
        return False
    if encoded is None:
        return True
    return (
        encoded.dim() == 3
        and len(encoded) == len(hidden)
        and encoded.dtype is hidden.dtype
        and (encoded_mask is None or encoded_mask.shape == encoded.shape[:2])
    )


def _has_kernel(backend: str, like: Tensor, dim: int) -> bool:
    return has_kernel(_attention_backend(backend), like.device, like.dtype, dim)


def _attention_backend(backend: str) -> str:
    """The backend of attention for the block's backend, which names one of the norm ops."""
    return backend if backend == "reference" else "auto"
