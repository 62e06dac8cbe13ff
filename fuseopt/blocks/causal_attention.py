"""Causal attention of batches with padding, in training, on one op that is told which keys are padding."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from fuseopt import ops
from fuseopt.blocks.attention_functions import sdpa_attention_function
from fuseopt.modules.base import source_class
from fuseopt.ops.philox import draw_seed
from fuseopt.runtime.references import weak_attribute


class CausalStackForward:
    """The `forward` of a decoder's stack, which in training also hands its attentions the padding it was told of.

    The class's own makes a mask [batch, 1, length, length] of it, which rules out leaving the future out; attentions
    that do not run by `fused_attention` still get it.

    The mask is passed on only while all blocks and attentions are of classes that take further keyword arguments, and
    that were there when this was made.

    It belongs to one stack and is copied and pickled with it.
    """

    stack = weak_attribute("stack")

    def __init__(self, stack: nn.Module) -> None:
        self.stack = stack
        blocks = [block for container in _containers(stack) for block in container]
        self._names = {name for block in blocks for name, child in block.named_children() if _parameters_of(child)[0]}
        told = {module for block in blocks for module in (block, *map(block._modules.get, self._names)) if module}
        self._classes = {source_class(module) for module in told if _parameters_of(module)[1]}

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
    """Whether a module's forward takes `attention_mask`, and whether it takes any keyword argument."""
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
    """transformers' `sdpa_attention_forward`; where padding is known by itself, without a matrix of mask or scores.

    Args:
        module: the attention module; its config says by what `backend`.
        query: [batch, heads, length, head size], any floating dtype.
        key, value: [batch, heads of keys, length, head size]; fewer heads than the queries' are used by several.
        attention_mask: broadcastable to [batch, heads, length, length]; None: whole rows, which run by SDPA.
        key_mask: [batch, 1, 1, length], 0 for keys and -inf for padding, as `CausalStackForward` hands it on.

    Returns:
        [batch, length, heads, head size], and no attention weights. What padding sees nothing of is 0, as SDPA has it.
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
    """As autocast has SDPA's arguments: norms and rotations of queries and keys leave them in float32."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)
