"""Samples of tensors' values, to detect writes that do not change their versions."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fuseopt.runtime.cuda_graphs import Work
from fuseopt.runtime.host_copy import HostCopy

_LEAST = 64


class WeightVersions(NamedTuple):
    """What differs after a write to a weight.

    Attributes:
        known: versions, which the host knows.
        sampled: waits for the device, and returns samples of the values. A write that changes no version, such as a
            fused optimizer's, is seen if it changes a sampled value: at least 64 of each weight are.
    """

    known: Hashable
    sampled: Callable[[], Hashable]


class Samples:
    """At least 64 values of each of several tensors, or all if there are fewer.

    They detect writes that do not change a tensor's version: by PyTorch's fused optimizers, and through `tensor.data`,
    as in peft's merge of adapters.

    Args:
        tensors: at least one, on one device. Shapes and dtypes are arbitrary but must not change. References are kept.

    Attributes:
        joined: the values that the last `join` read, one tensor for each dtype.
    """

    sizes = None

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.device = tensors[0].device
        self.joined: list[Tensor] = []
        # By dtype, since torch.cat converts its arguments to one dtype.
        self._spaced: dict[torch.dtype, list[tuple[Tensor, tuple[int], tuple[int]]]] = {}
        for tensor in tensors:
            self._spaced.setdefault(tensor.dtype, []).append((tensor, *_spacing(tensor)))

    @property
    def bytes(self) -> int:
        return sum(values.nbytes for values in self.joined)

    def join(self) -> None:
        """Reads the values into `joined`, at the same addresses each time."""
        with torch.inference_mode(False), torch.no_grad():
            views = [[torch.as_strided(*each) for each in those] for those in self._spaced.values()]
            self.joined = self.joined or [these[0].new_empty(sum(view.numel() for view in these)) for these in views]
            for these, values in zip(views, self.joined, strict=True):
                torch.cat(these, out=values)

    def copied(self) -> Callable[[], builtins.bytes]:
        """Queues a copy of `joined` to the host; returns a function that waits for it and returns its bytes."""
        copies = [HostCopy(values, values.dtype) for values in self.joined]
        return lambda: b"".join(copy.read().view(torch.uint8).numpy().tobytes() for copy in copies)

    def values(self) -> builtins.bytes:
        """The bytes of `joined`; waits for the current stream."""
        return self.copied()()


class ReadSamples(Work[Samples]):
    """Reads samples. Its CUDA graph is valid for as long as the tensors have the same addresses.

    Attributes:
        runs: number of calls of `run`, including a capture.
    """

    def __init__(self, samples: Samples) -> None:
        super().__init__("samples of weights", samples)
        self.runs = 0

    def run(self) -> None:
        self.state.join()
        self.runs += 1

    def start(self) -> Callable[[], bytes]:
        """Queues a read of the values; returns a function that waits for it and returns their bytes."""
        self()
        return self.state.copied()

    def read(self) -> bytes:
        """The bytes of the values as they are now; waits for the device."""
        return self.start()()


def _spacing(tensor: Tensor) -> tuple[tuple[int], tuple[int]]:
    """Size and stride of a sample that is spread over the rows and the columns of a tensor's memory."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    row, step = max((1, *tensor.stride())), max(length // _LEAST, 1)
    if step >= row:
        # The step is a part of a row by the golden ratio, so that samples are not all in the same columns.
        step = (step // row - 1) * row + max(int(row * 0.618), 1)
    return (-(-length // step) if tensor.numel() else 0,), (step,)
