"""Rollback: undoes what a decoding that ran out of memory has changed outside fuseopt."""

from __future__ import annotations

from typing import Any

import torch

from fuseopt.generation.engine.token_stream import RemainingStream, TokenStream
from fuseopt.generation.hf.saved_cache import SavedCache
from fuseopt.generation.prepared_call import PreparedCall
from fuseopt.runtime.memory import is_out_of_memory


class Rollback:
    """What decoding a prepared call may change and transformers reads: the cache, the call's arguments for the model,
    the random state of the device.

    Args:
        device: of the model.

    Attributes:
        is_possible: no code of the caller's has seen tokens, except for the streamer in `stream`.
        stream: what the streamer has got so far; None without a streamer.
    """

    def __init__(self, prepared: PreparedCall, device: torch.device) -> None:
        self.prepared, self.device = prepared, device
        self.is_possible = True
        self.stream: TokenStream | None = None
        self._model_kwargs = dict(prepared.model_kwargs)
        self._cache = SavedCache(prepared.model_kwargs.get("past_key_values"))
        self._random: Any = None
        if prepared.config.do_sample:
            self._random = torch.get_rng_state() if device.type == "cpu" else _generator(device).get_offset()

    def undoes(self, error: BaseException) -> bool:
        """Whether memory ran out, and transformers can decode the call after `undo`."""
        has_raised = self.stream is not None and self.stream.has_raised
        return self.is_possible and not has_raised and is_out_of_memory(error)

    def undo(self) -> PreparedCall:
        """The call as it was prepared, for transformers to decode. Its streamer drops what the caller's has got."""
        prepared = self.prepared
        prepared.model_kwargs.clear()
        prepared.model_kwargs.update(self._model_kwargs)
        self._cache.restore()
        if self._random is not None and self.device.type == "cpu":
            torch.set_rng_state(self._random)
        elif self._random is not None:
            _generator(self.device).set_offset(self._random)
        return prepared if self.stream is None else prepared._replace(streamer=RemainingStream(self.stream))


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index]
