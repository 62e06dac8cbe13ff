"""A stand-in for an empty key-value cache of transformers, which records what is written to it."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


class RecordingLayers:
    """The part of a cache for one kind of attention. `written` lists (keys, values, layer index)."""

    def __init__(self) -> None:
        self.written: list[tuple[Tensor, Tensor, int]] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        self.written.append((keys, values, layer))
        return keys, values


class RecordingCache:
    """Stands in for an empty transformers cache of any kind; `fill` copies what was written to a real one."""

    def __init__(self) -> None:
        self.self_attention_cache, self.cross_attention_cache = RecordingLayers(), RecordingLayers()
        self.is_updated: dict[int, bool] = {}

    def fill(self, cache: Any) -> None:
        """Writes the recorded keys and values to an empty cache, which copies them."""
        for name in ("self_attention_cache", "cross_attention_cache"):
            for keys_values in getattr(self, name).written:
                getattr(cache, name, cache).update(*keys_values)
        if self.is_updated:
            cache.is_updated.update(self.is_updated)


def is_empty_cache(cache: Any) -> bool:
    """True for None and for an empty dynamic cache of transformers, the kind that copies what is written to it."""
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
