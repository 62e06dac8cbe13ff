"""What decode steps are made of: plain functions on the model's own tensors, one token a row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import NewGELUActivation

Activation = Callable[[Tensor], Tensor]


class Norm(NamedTuple):
    """The state of a LayerNorm, or without `bias` of an RMSNorm."""

    weight: Tensor
    bias: Tensor | None
    eps: float


def layer_norm(input: Tensor, norm: Norm) -> Tensor:
    return F.layer_norm(input, norm.weight.shape, norm.weight, norm.bias, norm.eps)


def activation_of(module: nn.Module) -> Activation:
    """`module`, or for the GELU that transformers writes out in eight operations the same function as one."""
    return _gelu_tanh if type(module) is NewGELUActivation else module


_gelu_tanh = functools.partial(F.gelu, approximate="tanh")


def write_slot(cache: Tensor, keys_and_values: Tensor, slot: Tensor) -> None:
    """Puts one token's keys and values into a layer's cache.

    Args:
        cache: [2, rows, heads, capacity, head_dim].
        keys_and_values: [2, rows, heads, head_dim], any strides.
        slot: [1] int64, on the device.
    """
    cache.index_copy_(3, slot, keys_and_values.unsqueeze(3))


def attend(query: Tensor, cache: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of one token a row over a layer's cache.

    Args:
        query: [rows, heads, head_dim].
        cache: [2, rows, heads, capacity, head_dim].
        mask: additive, broadcastable to [rows, heads, 1, capacity], of `query`'s dtype.

    Returns:
        [rows, heads * head_dim].
    """
    attended = F.scaled_dot_product_attention(query.unsqueeze(2), cache[0], cache[1], mask, scale=scale)
    return attended.flatten(1)


def causal_mask(length: int, device: torch.device) -> Tensor:
    """[length, length] bool: True where the key is not after the query."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril_()


def identity(*parts: Any) -> tuple[Hashable, ...]:
    """What tells whether tensors, nested in tuples with functions and numbers, are still the same memory and layout."""
    found: list[Hashable] = []
    for part in parts:
        if isinstance(part, Tensor):
            found.append((part.data_ptr(), part.dtype, part.device, part.shape, part.stride()))
        elif isinstance(part, tuple):
            found += identity(*part)
        else:
            found.append(part)  # modules and functions are hashed by identity
    return tuple(found)
