"""Forwards of a GPT-2 block and stack without gradients, as a few operations on the weights.

`GPT2InferenceForward.run` is the block; read it first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from fuseopt import ops
from fuseopt.blocks.attention_functions import attention_function, sdpa_attention_function
from fuseopt.blocks.causal_attention import CausalStackForward
from fuseopt.blocks.inference_blocks import (
    HALVES,
    InferenceForward,
    StackForward,
    additive_mask,
)
from fuseopt.blocks.stack_runner import BlockInputs, StackRunner
from fuseopt.modules.base import full_name, source_class
from fuseopt.modules.children import GPT2_CHILDREN, Children
from fuseopt.ops.library import is_unobserved
from fuseopt.ops.short_attention import is_fast
from fuseopt.runtime.module_watch import modules_below, only_captures_outputs, trains_or_has_hooks

# Arguments that "sdpa" attention does not read.
_NOT_READ = frozenset(("encoder_attention_mask", "position_ids", "use_cache"))


class GPT2InferenceForward(InferenceForward):
    """Forward of GPT2Block in eval mode without gradients: [batch, length, hidden] -> the same.

    Computes what the class's own forward computes, with the attention function that the config names and the caller's
    cache and masks. Each linear layer is one product with its bias. In half precision on a GPU the tanh GELU is an
    epilogue of the first feed-forward product, and reads its sum before rounding. Residual adds are fused with the norm
    that follows.

    The class's own forward also runs for cross-attention. Hooks by which transformers records attentions are supported.

    Args:
        tanh_gelus: full class names of activations that compute GELU's tanh form.
    """

    def __init__(
        self,
        block: nn.Module,
        backend: str = "auto",
        *,
        children: Children = GPT2_CHILDREN,
        tanh_gelus: Collection[str] = (),
        runner: StackRunner | None = None,
    ) -> None:
        super().__init__(block, backend, children=children, runner=runner)
        self.tanh_gelus = tanh_gelus

    def __call__(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if torch.compiler.is_compiling():
            return type(self.block).forward(
                self.block, hidden_states, past_key_values, attention_mask, encoder_hidden_states, **kwargs
            )
        if self.runner is not None and encoder_hidden_states is None and _NOT_READ.issuperset(kwargs):
            output = self.runner(self, hidden_states, past_key_values, BlockInputs(attention_mask))
            if output is not None:
                return output
        return super().__call__(hidden_states, past_key_values, attention_mask, encoder_hidden_states, **kwargs)

    def can_run(self, hidden_states: Tensor, inputs: BlockInputs) -> bool:
        return self._is_plain(hidden_states) and self.block.attn.config._attn_implementation == "sdpa"

    def shared(self, hidden_states: Tensor, inputs: BlockInputs, constants: None) -> Tensor | None:
        return additive_mask(hidden_states, inputs.mask)

    def _is_plain(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> bool:
        if not is_unobserved() or nn.modules.module._has_any_global_hook():
            return False
        if encoder_hidden_states is not None or not self._is_untouched():
            return False
        attention = self.block.attn
        upcasts = attention.reorder_and_upcast_attn and attention.config._attn_implementation == "eager"
        return not upcasts and self._is_of_one_dtype(hidden_states)

    def _forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> Tensor:
        kwargs["use_cache"] = use_cache
        hidden_states, added = self.run(hidden_states, None, past_key_values, attention_mask, **kwargs)
        return hidden_states + added

    def run(
        self,
        hidden_states: Tensor,
        added: Tensor | None,
        past_key_values: Any,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """The block on `hidden_states + added`; see `stack_work.RunnableBlock.run`."""
        block: Any = self.block
        attention, mlp = block.attn, block.mlp
        residual = hidden_states.reshape(-1, hidden_states.shape[-1])
        if added is None:
            normed = block.ln_1(residual)
        else:
            normed, residual = self._add_and_norm(added.view(residual.shape), residual, block.ln_1)
        qkv = self._layer(normed, attention.c_attn)
        qkv = qkv.view(*hidden_states.shape[:-1], 3, -1, attention.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        if past_key_values is not None:
            cache = getattr(past_key_values, "self_attention_cache", past_key_values)
            key, value = cache.update(key, value, attention.layer_idx)
        attended, weights = _attention_function(attention, query, key, attention_mask)(
            attention, query, key, value, attention_mask, dropout=0.0, scaling=attention.scaling, **kwargs
        )
        added = self._layer(attended.reshape(residual.shape), attention.c_proj)
        for capture in attention._forward_hooks.values():
            capture(attention, (), (added, weights))
        normed, residual = self._add_and_norm(added, residual, block.ln_2)
        added = self._layer(self._activated(normed), mlp.c_proj)
        return residual.view(hidden_states.shape), added.view(hidden_states.shape)

    def _add_and_norm(self, added: Tensor, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        """(norm(added + residual), added + residual)"""
        return ops.add_layer_norm(added, residual, norm.weight, norm.bias, norm.eps, backend=self.backend)

    def _layer(self, input: Tensor, layer: Any) -> Tensor:
        """A Conv1D's [rows, in] -> [rows, out]."""
        return self._product(input, layer.weight, layer.bias)

    def _activated(self, normed: Tensor) -> Tensor:
        mlp: Any = self.block.mlp
        if normed.is_cuda and normed.dtype in HALVES and full_name(source_class(mlp.act)) in self.tanh_gelus:
            return self._product(normed, mlp.c_fc.weight, mlp.c_fc.bias, "gelu_tanh")
        return mlp.act(self._layer(normed, mlp.c_fc))

    def _only_captures(self) -> bool:
        attention: Any = self.block.attn
        others = (module for module in modules_below(*self.block.children()) if module is not attention)
        return not attention.training and only_captures_outputs(attention) and not any(map(trains_or_has_hooks, others))


class GPT2StackForward(StackForward):
    """Forward of GPT2Model. In training it passes padding to attentions, as `CausalStackForward` does."""

    class_forward = CausalStackForward

    def _run_tokens(self, input_ids: Tensor, *, use_cache: bool | None = None, **kwargs: Any) -> Any:
        stack: Any = self.stack
        if stack.config.add_cross_attention:
            return None
        modeling: Any = sys.modules[type(stack).__module__]
        stack.warn_if_padding_and_no_attention_mask(input_ids, None)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = stack.drop(stack.wte(input_ids) + stack.wpe(positions[None]))
        caches = stack.config.use_cache if use_cache is None else use_cache
        cache = modeling.DynamicCache(config=stack.config) if caches else None
        output = self.runner.at_once(hidden, cache, BlockInputs())
        if output is None:
            return None
        return modeling.BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=stack.ln_f(output), past_key_values=cache
        )


def _attention_function(
    attention: Any, query: Tensor, key: Tensor, mask: Tensor | None
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function that the config names; our kernel in place of "sdpa" for short sequences without a
    mask."""
    attend = attention_function(attention, attention.config)
    if mask is not None or query.shape != key.shape or query.shape[2] == 1 or not is_fast(query):
        return attend
    return _short_attention if attend is sdpa_attention_function() else attend


def _short_attention(
    attention: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """`ops.short_attention` with the signature of transformers' "sdpa" function, without a mask."""
    is_causal = kwargs.get("is_causal")
    causal = bool(attention.is_causal if is_causal is None else is_causal)
    return ops.short_attention(query, key, value, causal=causal, scale=scaling), None
