"""DeviceConstantCache: small host constants copied to a device, kept for calls that need the same ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

_MAX_CONSTANTS = 64
# Each as large as a vocabulary.
_MAX_TABLES = 16


class DeviceConstantCache:
    """Cache of small host constants copied to a device, by value, device and stream.

    A tensor that has been written to since is made anew. Results are shared: read them only.
    """

    def __init__(self) -> None:
        self._constants = _TensorCache(_MAX_CONSTANTS)
        self._tables = _TensorCache(_MAX_TABLES)

    def to_device(self, values: Tensor, device: torch.device) -> Tensor:
        """As the function `to_device`, for a tensor of few values on the host."""
        key = (device_and_stream(device), values.dtype, values.shape, *values.flatten().tolist())
        return self._constants.get(key, (), lambda: to_device(values, device))

    def members(self, sets: Sequence[Tensor], vocab: int) -> Tensor:
        """Which tokens are in which of up to eight sets.

        Args:
            sets: int64 tensors of any number of token ids, on one device.

        Returns:
            [vocab] uint8; bit i says whether the token is in `sets[i]`.
        """

        def table_of() -> Tensor:
            vocabulary = torch.arange(vocab, device=sets[0].device)
            table = torch.zeros(vocab, dtype=torch.uint8, device=sets[0].device)
            for i, tokens in enumerate(sets):
                table += torch.isin(vocabulary, tokens).to(torch.uint8) << i
            return table

        key = (device_and_stream(sets[0].device), vocab, *map(id, sets))
        return self._tables.get(key, tuple(sets), table_of)


class _TensorCache:
    """The last tensors by key, up to a limit, each with the tensors that it was computed from.

    An entry is valid while the version counters of all of these are what they were.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: OrderedDict[Hashable, tuple[tuple[Tensor, ...], list[Any]]] = OrderedDict()

    def get(self, key: Hashable, sources: tuple[Tensor, ...], make: Callable[[], Tensor]) -> Tensor:
        if key in self._entries:
            tensors, versions = self._entries[key]
            if versions == list(map(version_of, tensors)):
                self._entries.move_to_end(key)
                return tensors[0]
        # A tensor made in inference mode has no version counter.
        with torch.inference_mode(False), torch.no_grad():
            made = make()
        tensors = (made, *sources)
        versions = list(map(version_of, tensors))
        if None not in versions:
            self._entries[key] = tensors, versions
            if len(self._entries) > self.limit:
                self._entries.popitem(last=False)
        return made


class TrackedCopy:
    """Call: a tensor -> nothing; copies it to `target` unless version counters show that `target` holds its values.

    Args:
        target: a tensor that only torch operations write to, none of them in a CUDA graph.
    """

    def __init__(self, target: Tensor) -> None:
        self.target = target
        self._source: Tensor | None = None
        self._versions: tuple[int | None, ...] = (None, None)

    def holds(self, source: Tensor) -> bool:
        """Whether `target` is known to hold the values of `source`; never waits for the device."""
        return source is self.target or (source is self._source and self._versions == self._versions_with(source))

    def __call__(self, source: Tensor) -> None:
        if self.holds(source):
            return
        self._source = None
        self.target.copy_(source)
        self.mark_equal(source)

    def mark_equal(self, source: Tensor) -> None:
        """Records that `target` holds the values of `source` now."""
        self._versions = self._versions_with(source)
        self._source = None if None in self._versions else source

    def _versions_with(self, source: Tensor) -> tuple[int | None, ...]:
        return version_of(source), version_of(self.target)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to `device` through pinned memory, so that the host does not wait for the device."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def version_of(tensor: Tensor) -> int | None:
    """How often `tensor` has been written to; None for a tensor of inference mode, which does not count."""
    return None if tensor.is_inference() else tensor._version


def device_and_stream(device: torch.device) -> Hashable:
    """A device and its current stream: a tensor queued on one stream may be unfinished on another."""
    return device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
