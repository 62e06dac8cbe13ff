"""QuantisedCache: keys and values of a layer in 8 bits, with a scale for each head and slot."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fuseopt import ops
from fuseopt.ops import registry
from fuseopt.ops.decode.quantized_heads import EIGHT_BIT_ATTENTION, LARGEST, dequantize_heads, is_head_dim_of_kernel

CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Names in a config -> dtypes of caches."""
CACHE_NAMES = {dtype: name for name, dtype in CACHE_DTYPES.items()}
assert set(CACHE_DTYPES.values()) == LARGEST.keys()


def no_8_bit_cache_reason(
    device: torch.device, dtype: torch.dtype, head_dim: int, *, may_build: bool = False
) -> str | None:
    """The reason why caches on a device keep the model's dtype; None if they may be quantised.

    Args:
        may_build: a CUDA library that could be compiled counts as present (for planning).
    """
    if device.type in ("cpu", "meta"):
        return None
    choice = registry.get(EIGHT_BIT_ATTENTION).choose("auto", device, [dtype], may_build=may_build)
    if choice.backend != "cuda":
        return f"the kernel {'; '.join(choice.refused['cuda'])}"
    return None if is_head_dim_of_kernel(head_dim) else f"the kernel does not support heads of {head_dim} dimensions"


class QuantisedCache(NamedTuple):
    """A layer's cache in 8 bits, in place of a tensor [2, rows, kv_heads, capacity, head_dim] of the model's dtype.

    Attributes:
        elements: [2, rows, kv_heads, capacity, head_dim] int8 or float8_e4m3fn; keys, then values.
        scales: [2, rows, kv_heads, capacity] float32.
    """

    elements: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.elements.shape


LayerCache: TypeAlias = Tensor | QuantisedCache
"""Keys and values of one layer in a DecodeState."""


def op_arguments(cache: LayerCache) -> tuple[Tensor, dict[str, Tensor]]:
    """Keys and values [2, rows, kv_heads, capacity, head_dim], and their scales as options of ops.decode_attention."""
    if isinstance(cache, Tensor):
        return cache, {}
    return cache.elements, {"key_scales": cache.scales[0], "value_scales": cache.scales[1]}


def filled(cache: LayerCache, slots: int, dtype: torch.dtype) -> Tensor:
    """[2, rows, kv_heads, slots, head_dim]: a view of the first `slots`, or a dequantised copy in `dtype`."""
    if isinstance(cache, Tensor):
        return cache[:, :, :, :slots]
    return dequantize_heads(cache.elements[:, :, :, :slots], cache.scales[:, :, :, :slots], dtype)


def fill(cache: LayerCache, first: int, vectors: Tensor, part: int | slice = slice(None)) -> None:
    """Stores keys and values [2, rows, kv_heads, any, head_dim] in the slots from `first` on.

    Args:
        part: 0 or 1 if `vectors`, [rows, kv_heads, any, head_dim], are keys or values only.
    """
    slots = slice(first, first + vectors.shape[-2])
    if isinstance(cache, Tensor):
        cache[part, ..., slots, :] = vectors
        return
    elements, cache.scales[part, ..., slots] = ops.quantize_heads(vectors, cache.elements.dtype)
    # As bytes, since PyTorch has few operations on float8.
    cache.elements.view(torch.uint8)[part, ..., slots, :] = elements.view(torch.uint8)


def append(cache: LayerCache, slot: Tensor, key: Tensor, value: Tensor) -> None:
    """Stores one token's `key` and `value` [rows, kv_heads, head_dim] in slot `slot` [1]."""
    for part, vectors in enumerate((key, value)):
        if isinstance(cache, Tensor):
            cache[part].index_copy_(2, slot, vectors.unsqueeze(2))
            continue
        elements, scales = ops.quantize_heads(vectors, cache.elements.dtype)
        cache.elements[part].view(torch.uint8).index_copy_(2, slot, elements.view(torch.uint8).unsqueeze(2))
        cache.scales[part].index_copy_(2, slot, scales.unsqueeze(2))
