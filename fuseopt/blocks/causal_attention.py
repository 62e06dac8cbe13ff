"""Causal attention for training on padded batches: an op that takes the padding mask instead of a full mask."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from fuseopt import ops
from fuseopt.blocks.attention_functions import sdpa_attention_function
from fuseopt.modules.base import source_class
from fuseopt.ops.philox import draw_seed
from fuseopt.runtime.references import code_of_forward, weak_attribute


class CausalStackForward:
    """Forward of a decoder's stack, which in training also passes its padding mask to the attentions, as `key_mask`.

    The class's own forward expands padding to a mask [batch, 1, length, length], with which no kernel can skip future
    keys. Attentions that do not use `fused_attention` still get that mask.

    `key_mask` is passed only if all blocks and attentions have classes that were there at construction and whose
    forward takes any keyword argument.

    Belongs to one stack, and is copied and pickled with it.
    """

    stack = weak_attribute("stack")
    __code__ = code_of_forward("stack")

    def __init__(self, stack: nn.Module) -> None:
        self.stack = stack
        blocks = [block for container in _containers(stack) for block in container]
        self._names = {name for block in blocks for name, child in block.named_children() if _parameters_of(child)[0]}
        given_mask = {module for block in blocks for module in (block, *map(block._modules.get, self._names)) if module}
        self._classes = {source_class(module) for module in given_mask if _parameters_of(module)[1]}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stack: Any = self.stack
        mask = kwargs.get("attention_mask")
        causal = getattr(stack.config, "is_causal", True)
        if stack.training and causal and isinstance(mask, Tensor) and mask.dim() == 2 and self._are_known():
            hidden = torch.zeros(mask.shape, device=mask.device).masked_fill(mask == 0, float("-inf"))
            kwargs["key_mask"] = hidden[:, None, None, :]
        return type(stack).forward(stack, *args, **kwargs)

    def _are_known(self) -> bool:
        for container in _containers(self.stack):
            for block in container:
                for module in (block, *map(block._modules.get, self._names)):
                    if module is not None and source_class(module) not in self._classes:
                        return False
        return True


def _containers(stack: nn.Module) -> list[nn.ModuleList]:
    return [child for child in stack.children() if isinstance(child, nn.ModuleList)]


def _parameters_of(module: nn.Module) -> tuple[bool, bool]:
    """Whether a module's forward takes `attention_mask`, and whether it takes arbitrary keyword arguments."""
    parameters = inspect.signature(module.forward).parameters
    return "attention_mask" in parameters, any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def fused_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    key_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' `sdpa_attention_forward`; with a `key_mask`, an op that stores neither a full mask nor scores.

    Args:
        module: the attention module; `module.config.backend` is the op's backend.
        query: [batch, heads, length, head size], any floating dtype.
        key, value: [batch, kv heads, length, head size]; `heads` is a multiple of `kv heads`.
        attention_mask: broadcastable to [batch, heads, length, length]; None if there is no padding, then SDPA runs.
        key_mask: [batch, 1, 1, length], 0 for keys and -inf for padding, from `CausalStackForward`.

    Returns:
        [batch, length, heads, head size], and None for the attention weights. Rows whose keys are all masked are 0, as
        with SDPA.
    """
    options = {name: value for name, value in kwargs.items() if value is not None}
    same_length = query.shape[2] == key.shape[2] and key_mask is not None and key_mask.shape[3] == key.shape[2]
    if attention_mask is None or not same_length or "is_causal" in options or "sliding_window" in options:
        return sdpa_attention_function()(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    query, key, value = _cast(query, key, value)
    output = ops.relative_attention(
        query,
        key,
        value,
        mask=key_mask,
        seed=draw_seed(query.device) if dropout > 0.0 else None,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        p=dropout,
        causal=True,
        backend=module.config.backend,
    )
    return output.transpose(1, 2), None


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts as autocast does for SDPA; norms and rotations leave queries and keys in float32."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)
