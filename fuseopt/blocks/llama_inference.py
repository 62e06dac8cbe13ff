"""Forwards of the blocks and stacks of Llama, Mistral, Qwen2 and Qwen3 without gradients, as a few operations on the
weights.

`LlamaInferenceForward.run` is the block; read it first.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseopt import ops
from fuseopt.blocks.attention_functions import attention_function, sdpa_attention_function
from fuseopt.blocks.causal_attention import CausalStackForward
from fuseopt.blocks.inference_blocks import InferenceForward, StackForward, additive_mask
from fuseopt.blocks.stack_runner import BlockInputs
from fuseopt.modules.base import full_name, source_class

# Arguments that the block does not read; recording outputs works by hooks, which are checked separately.
_NOT_READ = frozenset(("output_attentions", "output_hidden_states"))
_SILUS = ("transformers.activations.SiLUActivation", "torch.nn.modules.activation.SiLU")


class Shared(NamedTuple):
    """Tensors that all blocks of a stack use in one pass.

    Attributes:
        mask: numbers that attention adds to its scores, broadcastable to [batch, heads, queries, keys], or None.
        cos, sin: [batch or 1, length, rotary], the rotation of each position.
    """

    mask: Tensor | None
    cos: Tensor
    sin: Tensor


class LlamaInferenceForward(InferenceForward):
    """Forward of LlamaDecoderLayer, or of a family that computes the same, in eval mode without gradients:
    [batch, length, hidden] -> the same.

    Computes what the class's own forward computes with "sdpa" attention. Queries and keys are rotated by one op,
    residual adds are fused with the norm that follows, and the SiLU of the gate with its product. Blocks run as part
    of their `StackRunner`; otherwise the class's own forward runs.
    """

    needs_runner = True

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        if (
            not torch.compiler.is_compiling()
            and self.runner is not None
            and position_embeddings is not None
            and _NOT_READ.issuperset(kwargs)
        ):
            cos, sin = position_embeddings
            output = self.runner(self, hidden_states, past_key_values, BlockInputs(attention_mask, cos=cos, sin=sin))
            if output is not None:
                return output
        return type(self.block).forward(
            self.block,
            hidden_states,
            attention_mask,
            position_ids,
            past_key_values,
            use_cache,
            position_embeddings,
            **kwargs,
        )

    @classmethod
    def backend_reasons(cls, block: Any, backend: str) -> list[str]:
        config = block.self_attn.config
        kinds = set(getattr(config, "layer_types", None) or ())
        if kinds - {"full_attention"} or (not kinds and getattr(config, "sliding_window", None) is not None):
            return ["its attention has a sliding window, for which layers get masks of their own"]
        return []

    def can_run(self, hidden_states: Tensor, inputs: BlockInputs) -> bool:
        if not self._is_untouched() or not self._is_of_one_dtype(hidden_states):
            return False
        attention: Any = self.block.self_attn
        return (
            attention_function(self.block, attention.config) is sdpa_attention_function()
            and hidden_states.dim() == 3
            and inputs.cos is not None
            and inputs.cos.dtype is hidden_states.dtype
        )

    def shared(self, hidden_states: Tensor, inputs: BlockInputs, constants: None) -> Shared:
        assert inputs.cos is not None and inputs.sin is not None
        return Shared(additive_mask(hidden_states, inputs.mask), inputs.cos, inputs.sin)

    def run(
        self, hidden_states: Tensor, added: Tensor | None, past_key_values: Any, shared: Shared
    ) -> tuple[Tensor, Tensor]:
        block: Any = self.block
        mlp, shape = block.mlp, hidden_states.shape
        residual = hidden_states.reshape(-1, shape[-1])
        normed, residual = self._add_and_norm(added, residual, block.input_layernorm)
        added = self._attended(normed, shape[:-1], past_key_values, shared)
        normed, residual = self._add_and_norm(added, residual, block.post_attention_layernorm)
        gate, up = self._linear(normed, mlp.gate_proj), self._linear(normed, mlp.up_proj)
        added = self._linear(self._gated(gate, up), mlp.down_proj)
        return residual.view(shape), added.view(shape)

    def _add_and_norm(self, added: Tensor | None, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        """(norm(added + residual), added + residual)"""
        if added is None:
            return self._norm(residual, norm), residual
        return ops.add_rms_norm(
            added.view(residual.shape),
            residual,
            norm.weight,
            norm.variance_epsilon,
            cast_order="llama",
            backend=self.backend,
        )

    def _norm(self, input: Tensor, norm: Any) -> Tensor:
        return ops.rms_norm(input, norm.weight, norm.variance_epsilon, cast_order="llama", backend=self.backend)

    def _attended(self, normed: Tensor, shape: torch.Size, past_key_values: Any, shared: Shared) -> Tensor:
        """The attention's output: [rows, hidden] of `shape` (batch, length) -> the same."""
        attention: Any = self.block.self_attn
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        query, key, value = (self._linear(normed, layer).view(*shape, -1, attention.head_dim) for layer in projections)
        if hasattr(attention, "q_norm"):
            query, key = self._norm(query, attention.q_norm), self._norm(key, attention.k_norm)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        rotation = "reference" if self.backend == "reference" else "auto"
        query, key = ops.rotary_embedding(query, key, shared.cos, shared.sin, backend=rotation)
        if past_key_values is not None:
            cache = getattr(past_key_values, "self_attention_cache", past_key_values)
            key, value = cache.update(key, value, attention.layer_idx)
        attended, _ = sdpa_attention_function()(
            attention, query, key, value, shared.mask, dropout=0.0, scaling=attention.scaling
        )
        return self._linear(attended.reshape(len(normed), -1), attention.o_proj)

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        activation: Any = self.block.mlp.act_fn
        if full_name(source_class(activation)) in _SILUS:
            return ops.gated_activation(gate, up, "silu", backend=self.backend)
        return activation(gate) * up

    def _linear(self, input: Tensor, layer: nn.Linear) -> Tensor:
        """[rows, in] -> [rows, out]."""
        return self._product(input, layer.weight.t(), layer.bias)


class LlamaStackForward(StackForward):
    """Forward of LlamaModel and stacks like it. In training it passes padding on, as `CausalStackForward` does."""

    class_forward = CausalStackForward

    def _run_tokens(self, input_ids: Tensor, *, use_cache: bool | None = None, **kwargs: Any) -> Any:
        stack: Any = self.stack
        modeling: Any = sys.modules[type(stack).__module__]
        hidden = stack.embed_tokens(input_ids)
        cos, sin = stack.rotary_emb(hidden, torch.arange(input_ids.shape[1], device=input_ids.device)[None])
        caches = stack.config.use_cache if use_cache is None else use_cache
        cache = modeling.DynamicCache(config=stack.config) if caches else None
        output = self.runner.at_once(hidden, cache, BlockInputs(cos=cos, sin=sin))
        if output is None:
            return None
        return modeling.BaseModelOutputWithPast(last_hidden_state=stack.norm(output), past_key_values=cache)
