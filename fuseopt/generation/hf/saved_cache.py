"""SavedCache: what a cache of transformers holds, to put it back after an error."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import EncoderDecoderCache


class SavedCache:
    """The content of a plain cache of transformers, or of None; its updates replace tensors and never write to them."""

    def __init__(self, cache: Any) -> None:
        is_pair = isinstance(cache, EncoderDecoderCache)
        caches = (cache.self_attention_cache, cache.cross_attention_cache) if is_pair else (cache,)
        self._updated = cache.is_updated if is_pair else {}
        self._was_updated = dict(self._updated)
        self._layers = [
            (of.layers, [(layer, layer.__dict__.copy()) for layer in of.layers]) for of in caches if of is not None
        ]

    def restore(self) -> None:
        """Gives the cache back the layers and tensors that it had."""
        for layers, saved in self._layers:
            layers[:] = [layer for layer, _ in saved]
            for layer, attributes in saved:
                layer.__dict__.clear()
                layer.__dict__.update(attributes)
        self._updated.clear()
        self._updated.update(self._was_updated)
