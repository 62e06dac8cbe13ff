"""T5 without gradients: all blocks of a stack at once, as a few operations on their weights."""

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
from fuseopt.blocks.stack_runner import BlockInputs, StackRunner
from fuseopt.modules.base import source_class
from fuseopt.ops import registry
from fuseopt.ops.relative_attention import has_kernel

# Arguments of a block that make no difference, but for the hooks that transformers puts on its modules beforehand.
_NOT_READ = frozenset(("seen_keys", "output_attentions", "output_hidden_states"))


class Shared(NamedTuple):
    """What the blocks of a stack share in a pass.

    Attributes:
        bias: [heads, 2 * max_distance + 1], that of self-attention by distance; None: all are 0.
        mask, encoded_mask: bool, broadcastable to [batch, heads, queries, keys], True for keys that are seen.
        encoded: [batch * keys, hidden], what cross-attention takes keys and values of, if there is any.
    """

    bias: Tensor | None
    mask: Tensor | None
    encoded: Tensor | None
    encoded_mask: Tensor | None


class T5InferenceForward(InferenceForward):
    """T5Block, or MT5Block, in eval mode without gradients; returns [batch, length, hidden], None, None.

    Computes what the class's own forward computes with attention by "sdpa", but for queries whose keys are all masked
    (see `ops.relative_attention`): from the masks [batch, length] that the stack was given, and with the position bias
    as a number a distance. Residual adds are a part of the norms that follow, but in float16, where sums are clamped.
    A ReLU is a part of the product before it in half precision on a GPU.

    A block of T5 hands a position bias of another form on, so all blocks of the stack run at once or none.
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
            if self.runner is not None and _fills(past_key_values, inputs):
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
        if _has_kernel(backend, weight, attention.key_value_proj_dim):
            return []
        op = registry.get("relative_attention")
        refused = op.choose(_of_attention(backend), weight.device, [weight.dtype]).refused
        reasons = "; ".join(f"{name}: {', '.join(found)}" for name, found in refused.items())
        return ["its attention has no kernel here, which keeps no scores" + (f" ({reasons})" if reasons else "")]

    def can_run(self, hidden_states: Tensor, inputs: BlockInputs) -> bool:
        if not self._is_untouched() or not self._is_of_one_dtype(hidden_states):
            return False
        block: Any = self.block
        attention = block.layer[0].SelfAttention
        return (
            attention_function(block, attention.config) is sdpa_attention_function()
            and _has_kernel(self.backend, hidden_states, attention.key_value_proj_dim)
            and _fit(hidden_states, inputs)
        )

    def constants(self, hidden_states: Tensor) -> Tensor:
        """The buckets of distances, [2 * max_distance + 1] int64."""
        return distance_buckets(self.block.layer[0].SelfAttention, hidden_states.device)

    def shared(self, hidden_states: Tensor, inputs: BlockInputs, buckets: Tensor) -> Shared:
        attention = self.block.layer[0].SelfAttention
        bias = distance_bias(attention, buckets) if attention.has_relative_attention_bias else None
        encoded = inputs.encoded
        return Shared(
            bias,
            _seen(inputs.mask),
            None if encoded is None else encoded.reshape(-1, encoded.shape[-1]),
            _seen(inputs.encoded_mask),
        )

    def run(
        self, hidden_states: Tensor, added: Tensor | None, past_key_values: Any, shared: Shared
    ) -> tuple[Tensor, Tensor]:
        batch = len(hidden_states)
        residual = hidden_states.reshape(-1, hidden_states.shape[-1])
        layer, *others = self.block.layer
        normed, residual = self._normed(added, residual, layer.layer_norm)
        attention, cache = layer.SelfAttention, getattr(past_key_values, "self_attention_cache", past_key_values)
        added = self._attended(attention, batch, normed, normed, cache, shared.bias, shared.mask)
        layer = others[-1]
        if shared.encoded is not None:
            cross = others[0]
            normed, residual = self._normed(added, residual, cross.layer_norm)
            attention, cache = cross.EncDecAttention, getattr(past_key_values, "cross_attention_cache", None)
            added = self._attended(attention, batch, normed, shared.encoded, cache, None, shared.encoded_mask)
            if cache is not None:
                past_key_values.is_updated[attention.layer_idx] = True
        normed, residual = self._normed(added, residual, layer.layer_norm)
        added = self._fed_forward(layer.DenseReluDense, normed)
        return residual.view(hidden_states.shape), added.view(hidden_states.shape)

    def total(self, hidden_states: Tensor, added: Tensor) -> Tensor:
        return clamped(hidden_states + added)

    def _normed(self, added: Tensor | None, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        """The norm of a sum, and the sum."""
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
        """[rows, hidden], of the rows of `input` to those of `states`."""

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
            backend=_of_attention(self.backend),
        )
        return self._linear(attended.transpose(1, 2).flatten(2).flatten(0, 1), attention.o)

    def _fed_forward(self, dense: Any, normed: Tensor) -> Tensor:
        """What a T5DenseActDense or T5DenseGatedActDense gives."""
        if not hasattr(dense, "wi") or source_class(dense.act) is not nn.ReLU:
            return dense(normed)
        return self._linear(self._linear(normed, dense.wi, "relu"), dense.wo)

    def _linear(self, input: Tensor, layer: nn.Linear, activation: str | None = None) -> Tensor:
        """Of [rows, in] -> [rows, out], before the activation."""
        return self._product(input, layer.weight.t(), layer.bias, activation)


class T5StackForward(StackForward):
    """Of a T5 stack: also hands its blocks the masks that it was given, as `RelativeStackForward` does."""

    tensors = frozenset(("attention_mask", "encoder_hidden_states", "encoder_attention_mask"))

    def report_lines(self) -> tuple[str, ...]:
        return self.runner.report_lines("decoder blocks" if self.stack.is_decoder else "encoder blocks")

    def __init__(self, stack: nn.Module, runner: StackRunner) -> None:
        super().__init__(stack, runner)
        self._told = RelativeStackForward(stack)

    def _class_forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._told(*args, **kwargs)

    def _of_tokens(
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
                return None  # an error, which the class's forward words
            cache = modeling.DynamicCache(config=stack.config)
            if stack.config.is_encoder_decoder:
                cache = modeling.EncoderDecoderCache(cache, modeling.DynamicCache(config=stack.config))
        inputs = _inputs(stack, encoder_hidden_states, attention_mask, encoder_attention_mask)
        if not _fills(cache, inputs):
            return None
        output = self.runner.at_once(stack.dropout(stack.embed_tokens(input_ids)), cache, inputs)
        if output is None:
            return None
        return modeling.BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=stack.dropout(stack.final_layer_norm(output)), past_key_values=cache
        )


def clamped(hidden: Tensor) -> Tensor:
    """T5Block's clamp of float16 infinities."""
    if hidden.dtype != torch.float16:
        return hidden
    largest = torch.finfo(torch.float16).max
    limit = torch.where(torch.isinf(hidden).any(), largest - 1000, largest)
    return torch.clamp(hidden, min=-limit, max=limit)


def _inputs(module: Any, encoded: Tensor | None, mask: Tensor | None, encoded_mask: Tensor | None) -> BlockInputs:
    """Of a stack or a block, of which only a decoder's reads what was encoded."""
    return BlockInputs(mask) if encoded is None or not module.is_decoder else BlockInputs(mask, encoded, encoded_mask)


def _fills(cache: Any, inputs: BlockInputs) -> bool:
    """Whether there is no cache, or one with a part for each kind of attention."""
    return cache is None or inputs.encoded is None or hasattr(cache, "cross_attention_cache")


def _seen(mask: Tensor | None) -> Tensor | None:
    """[batch, keys], not 0 for keys that are seen -> [batch, 1, 1, keys] bool"""
    return None if mask is None else mask.bool()[:, None, None, :]


def _fit(hidden: Tensor, inputs: BlockInputs) -> bool:
    """Whether masks and encoded states are of the shapes, and the latter of the dtype, that blocks take."""
    mask, encoded, encoded_mask = inputs
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
    return has_kernel(_of_attention(backend), like.device, like.dtype, dim)


def _of_attention(backend: str) -> str:
    """The backend of attention beside that of norms, which has others."""
    return backend if backend == "reference" else "auto"
