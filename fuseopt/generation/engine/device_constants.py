"""KeptTensors: what a call needs on the device of numbers that the host knows, kept for calls with the same ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

_KEPT = 64
# As large as a vocabulary.
_TABLES_KEPT = 16


class KeptTensors:
    """Tensors on a device that an earlier call on the same stream has made, unless one has been written to since.

    What is returned is for reading, as others may hold it, too.
    """

    def __init__(self) -> None:
        self._of_host: _Kept = _Kept(_KEPT)
        self._tables: _Kept = _Kept(_TABLES_KEPT)

    def to_device(self, values: Tensor, device: torch.device) -> Tensor:
        """As the function of this name, for few values."""
        key = (place_of(device), values.dtype, values.shape, *values.flatten().tolist())
        return self._of_host.get(key, (), lambda: to_device(values, device))

    def members(self, sets: Sequence[Tensor], vocab: int) -> Tensor:
        """Which tokens are in which of up to eight sets.

        Args:
            sets: int64 tensors of any number of tokens.

        Returns:
            [vocab] uint8, whose bit i says whether the token is in `sets[i]`.
        """

        def look() -> Tensor:
            vocabulary = torch.arange(vocab, device=sets[0].device)
            table = torch.zeros(vocab, dtype=torch.uint8, device=sets[0].device)
            for i, tokens in enumerate(sets):
                table += torch.isin(vocabulary, tokens).to(torch.uint8) << i
            return table

        key = (place_of(sets[0].device), vocab, *map(id, sets))
        return self._tables.get(key, tuple(sets), look)


class _Kept:
    """Up to `most` tensors by their keys, each with the tensors that it has been made of."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._entries: OrderedDict[Hashable, tuple[tuple[Tensor, ...], list[Any]]] = OrderedDict()

    def get(self, key: Hashable, sources: tuple[Tensor, ...], make: Callable[[], Tensor]) -> Tensor:
        if key in self._entries:
            tensors, versions = self._entries[key]
            if versions == list(map(version_of, tensors)):
                self._entries.move_to_end(key)
                return tensors[0]
        # A tensor made in inference mode would not say whether it has been written to.
        with torch.inference_mode(False), torch.no_grad():
            made = make()
        tensors = (made, *sources)
        versions = list(map(version_of, tensors))
        if None not in versions:
            self._entries[key] = tensors, versions
            if len(self._entries) > self.most:
                self._entries.popitem(last=False)
        return made


class Copied:
    """Call: a tensor -> nothing; copies it to `target`, unless that holds what it does.

    Args:
        target: a tensor that only operations of torch write to, none of them in a graph.
    """

    def __init__(self, target: Tensor) -> None:
        self.target = target
        self._source: Tensor | None = None
        self._versions: tuple[int | None, ...] = (None, None)

    def holds(self, source: Tensor) -> bool:
        """Whether the target is known to hold what `source` does."""
        return source is self.target or (source is self._source and self._versions == self._versions_with(source))

    def __call__(self, source: Tensor) -> None:
        if self.holds(source):
            return
        self._source = None
        self.target.copy_(source)
        self.trust(source)

    def trust(self, source: Tensor) -> None:
        """Takes it that the target holds what `source` does."""
        self._versions = self._versions_with(source)
        self._source = None if None in self._versions else source

    def _versions_with(self, source: Tensor) -> tuple[int | None, ...]:
        return version_of(source), version_of(self.target)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's on a device, without waiting for that, as a copy from memory that is not pinned does."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def version_of(tensor: Tensor) -> int | None:
    """How often it has been written to, or None where it does not count."""
    return None if tensor.is_inference() else tensor._version


def place_of(device: torch.device) -> Hashable:
    """Where what is queued finds what has been queued before."""
    return device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
