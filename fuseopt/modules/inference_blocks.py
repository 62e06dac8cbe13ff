"""GPT-2 without gradients: blocks as a few operations on their weights, and stacks that run all of them at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from fuseopt import ops
from fuseopt.modules.base import BlockForward, FusedModule
from fuseopt.modules.block_chain import BlockChain
from fuseopt.modules.structure import Structure, is_special, modules_below, only_captures_outputs
from fuseopt.ops.library import is_unobserved
from fuseopt.ops.short_attention import is_fast

_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
_HALVES = (torch.float16, torch.bfloat16)
# Arguments that make no difference to attention by "sdpa" alone.
_NOT_READ = frozenset(("encoder_attention_mask", "position_ids", "use_cache"))


class GPT2InferenceForward(BlockForward):
    """GPT2Block in eval mode without gradients: [batch, length, hidden] -> the same.

    Computes what the class's own forward computes: the attention function of transformers that the config names, the
    caller's cache and masks. Each linear layer is one product with its bias, and, in half precision on a GPU, with a
    tanh GELU behind it, which then sees a sum that was not rounded before. The first residual add is a part of the norm
    that follows.

    Not plain, beside training and gradients, is whatever a module inside may do beyond its class's forward, as
    adapters, quantised leaves and hooks do, but for those by which transformers captures attentions; autocast,
    torch.compile and tracing; torch.func's transforms; dispatch modes; cross-attention to an encoder; weights of
    several dtypes.

    Args:
        block: a GPT2Block.
        classes: full names of the classes that the modules inside may have, beside activations.
        tanh_gelus: full names of activations that compute GELU's tanh form.
        chain: what may run all blocks of the stack at once.
    """

    def __init__(
        self,
        block: nn.Module,
        backend: str = "auto",
        *,
        classes: Collection[str] = (),
        tanh_gelus: Collection[str] = (),
        chain: BlockChain | None = None,
    ) -> None:
        super().__init__(block, backend)
        self.classes, self.tanh_gelus, self.chain = classes, tanh_gelus, chain
        self._structure: Structure | None = None
        self._is_known = False

    def __getstate__(self) -> dict[str, Any]:
        # What there is to compare with would be of the modules that are copied.
        return {**self.__dict__, "_structure": None}

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
        if self.chain is not None and encoder_hidden_states is None and _NOT_READ.issuperset(kwargs):
            output = self.chain(self, hidden_states, past_key_values, attention_mask)
            if output is not None:
                return output
        return super().__call__(hidden_states, past_key_values, attention_mask, encoder_hidden_states, **kwargs)

    def can_chain(self, hidden_states: Tensor) -> bool:
        return self.block.attn.config._attn_implementation == "sdpa" and self._is_plain(hidden_states)

    def settings(self) -> Hashable:
        attention: Any = self.block.attn
        return attention.config._attn_implementation, _transformers_attention(attention)

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
        """What the block does with the sum of the first two, as two addends."""
        block: Any = self.block
        attention, mlp = block.attn, block.mlp
        residual = hidden_states.reshape(-1, hidden_states.shape[-1])
        if added is None:
            normed = block.ln_1(residual)
        else:
            normed, residual = self._added(added.view(residual.shape), residual, block.ln_1)
        qkv = _product(normed, attention.c_attn)
        qkv = qkv.view(*hidden_states.shape[:-1], 3, -1, attention.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        if past_key_values is not None:
            cache = getattr(past_key_values, "self_attention_cache", past_key_values)
            key, value = cache.update(key, value, attention.layer_idx)
        attended, weights = _attention_function(attention, query, key, attention_mask)(
            attention, query, key, value, attention_mask, dropout=0.0, scaling=attention.scaling, **kwargs
        )
        added = _product(attended.reshape(residual.shape), attention.c_proj)
        for capture in attention._forward_hooks.values():
            capture(attention, (), (added, weights))
        normed, residual = self._added(added, residual, block.ln_2)
        added = _product(self._activated(normed), mlp.c_proj)
        return residual.view(hidden_states.shape), added.view(hidden_states.shape)

    def _added(self, added: Tensor, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        """The norm of a sum, and the sum."""
        return ops.add_layer_norm(added, residual, norm.weight, norm.bias, norm.eps, backend=self.backend)

    def _activated(self, normed: Tensor) -> Tensor:
        mlp: Any = self.block.mlp
        if normed.is_cuda and normed.dtype in _HALVES and _full_name(mlp.act) in self.tanh_gelus:
            # The GELU is the tanh approximation on CUDA.
            return torch._addmm_activation(mlp.c_fc.bias, normed, mlp.c_fc.weight, use_gelu=True)
        return mlp.act(_product(normed, mlp.c_fc))

    def _is_untouched(self) -> bool:
        """Whether calling the block means no more than the forwards of its class, and of known classes inside."""
        if self._structure is None or not self._structure.is_unchanged():
            self._structure = Structure(modules_below(self.block))
            self._is_known = not unknown_modules(self.block, self.classes) and not any(
                "forward" in state for state in self._structure.states[1:]
            )
        # Hooks on the block itself run around its forward, whichever that is.
        if not self._is_known or self.block.training:
            return False
        return not self._structure.is_special(1) or self._only_captures_attentions()

    def _only_captures_attentions(self) -> bool:
        attention: Any = self.block.attn
        others = (module for module in modules_below(*self.block.children()) if module is not attention)
        return not attention.training and only_captures_outputs(attention) and not any(map(is_special, others))

    def _is_of_one_dtype(self, hidden_states: Tensor) -> bool:
        block: Any = self.block
        attention, mlp = block.attn, block.mlp
        modules = (block.ln_1, attention.c_attn, attention.c_proj, block.ln_2, mlp.c_fc, mlp.c_proj)
        dtype = hidden_states.dtype
        return (
            type(hidden_states) is Tensor
            and not torch.is_autocast_enabled(hidden_states.device.type)
            and all(
                type(tensor) is nn.Parameter and tensor.dtype is dtype
                for module in modules
                for tensor in (module.weight, module.bias)
            )
        )


class GPT2StackForward:
    """The `forward` of a GPT2Model whose blocks are chained: the class's own, during which the chain may run them.

    A call with nothing but tokens, of a size that has been captured, passes that forward by, which waits for the GPU to
    learn whether positions that it has just counted up start anew anywhere.

    It belongs to one stack and is copied and pickled with it.
    """

    def __init__(self, stack: nn.Module, chain: BlockChain) -> None:
        self.stack, self.chain = stack, chain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self.stack).forward
        if torch.compiler.is_compiling():
            return forward(self.stack, *args, **kwargs)
        if self._are_captured_tokens(*args, **kwargs):
            outputs = self._of_tokens(*args, **kwargs)
            # Which the chain has had its look at.
            return forward(self.stack, *args, **kwargs) if outputs is None else outputs
        with self.chain.in_stack():
            return forward(self.stack, *args, **kwargs)

    def _are_captured_tokens(
        self,
        input_ids: Any = None,
        *args: Any,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> bool:
        """Whether a call has no other arguments than tokens of a size that has been captured."""
        if type(input_ids) is not Tensor or input_ids.dim() != 2 or not self.chain.has_captured(*input_ids.shape):
            return False
        if args or output_attentions or output_hidden_states or any(value is not None for value in kwargs.values()):
            return False
        config: Any = self.stack.config
        return (
            (config.return_dict if return_dict is None else return_dict)
            and getattr(config, "is_causal", None) is None
            and not (config.output_attentions or config.output_hidden_states or config.add_cross_attention)
        )

    def _of_tokens(self, input_ids: Tensor, *, use_cache: bool | None = None, **kwargs: Any) -> Any:
        """What the class's forward returns, or None where that has to run."""
        stack: Any = self.stack
        modeling: Any = sys.modules[type(stack).__module__]
        stack.warn_if_padding_and_no_attention_mask(input_ids, None)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = stack.drop(stack.wte(input_ids) + stack.wpe(positions[None]))
        caches = stack.config.use_cache if use_cache is None else use_cache
        cache = modeling.DynamicCache(config=stack.config) if caches else None
        output = self.chain.at_once(hidden, cache, None)
        if output is None:
            return None
        return modeling.BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=stack.ln_f(output), past_key_values=cache
        )

    def report_lines(self) -> tuple[str, ...]:
        """What the report says of the chain."""
        return self.chain.report_lines()


def unknown_modules(block: nn.Module, classes: Collection[str]) -> list[str]:
    """The modules inside `block` that are neither of `classes` nor activations, each with its class."""
    return [
        f"{path} ({type(module).__name__})"
        for path, module in block.named_modules()
        if module is not block and _full_name(module) not in classes and not _full_name(module).startswith(_ACTIVATIONS)
    ]


def _full_name(module: nn.Module) -> str:
    """Of the class of `module`, or of what it stands in for."""
    source = module._source_class if isinstance(module, FusedModule) else type(module)
    return f"{source.__module__}.{source.__qualname__}"


def _attention_function(
    attention: Any, query: Tensor, key: Tensor, mask: Tensor | None
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """transformers' function by the name in the config; where that is SDPA and sequences are short, our kernel."""
    attend = _transformers_attention(attention)
    if mask is not None or query.shape != key.shape or query.shape[2] == 1 or not is_fast(query):
        return attend
    sdpa = sys.modules["transformers.integrations.sdpa_attention"].sdpa_attention_forward
    return _short_attention if attend is sdpa else attend


def _transformers_attention(attention: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    modeling: Any = sys.modules[type(attention).__module__]
    name = attention.config._attn_implementation
    return modeling.ALL_ATTENTION_FUNCTIONS.get_interface(name, modeling.eager_attention_forward)


def _short_attention(
    attention: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' "sdpa" without a mask."""
    is_causal = kwargs.get("is_causal")
    causal = bool(attention.is_causal if is_causal is None else is_causal)
    return ops.short_attention(query, key, value, causal=causal, scale=scaling), None


def _product(input: Tensor, layer: Any) -> Tensor:
    """`layer(input)` of a Conv1D, for [rows, in] -> [rows, out]."""
    return torch.addmm(layer.bias, input, layer.weight)
