"""transformers' caches for keys and values, while they are empty: which can be filled later, and what stands in."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


class KeptLayers:
    """Passes for a cache of one kind of attention: `written` are keys and values, and of which layer."""

    def __init__(self) -> None:
        self.written: list[tuple[Tensor, Tensor, int]] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        self.written.append((keys, values, layer))
        return keys, values


class KeptCache:
    """Passes for an empty cache of transformers', of whichever kind, and keeps what is written to it."""

    def __init__(self) -> None:
        self.self_attention_cache, self.cross_attention_cache = KeptLayers(), KeptLayers()
        self.is_updated: dict[int, bool] = {}

    def fill(self, cache: Any) -> None:
        """Writes the same to an empty cache, which copies it."""
        for name in ("self_attention_cache", "cross_attention_cache"):
            for keys_values in getattr(self, name).written:
                getattr(cache, name, cache).update(*keys_values)
        if self.is_updated:
            cache.is_updated.update(self.is_updated)


def is_empty_cache(cache: Any) -> bool:
    """Whether it is none, or one of transformers' plain caches without a token, which copy what they are given."""
    if cache is None:
        return True
    caches = sys.modules["transformers.cache_utils"]
    if type(cache) is not caches.EncoderDecoderCache:
        return _is_empty_dynamic(cache)
    parts = cache.self_attention_cache, cache.cross_attention_cache
    return not any(cache.is_updated.values()) and all(map(_is_empty_dynamic, parts))


def _is_empty_dynamic(cache: Any) -> bool:
    caches = sys.modules["transformers.cache_utils"]
    return (
        type(cache) is caches.DynamicCache
        and not cache.offloading
        and all(type(layer) is caches.DynamicLayer for layer in cache.layers)
        and cache.get_seq_length() == 0
    )
