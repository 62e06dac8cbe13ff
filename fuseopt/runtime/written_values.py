"""Samples of tensors' values, to detect writes that do not change their versions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LEAST = 64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sample(tensor: Tensor) -> Tensor:
    """View of at least 64 values, or all if there are fewer, as integers of their size, so that NaN equals itself.

    Such samples show writes that leave a tensor's version as it is: those of PyTorch's fused optimizers, and those
    through `tensor.data`, as peft's merge of adapters.

    Args:
        tensor: of any shape, strides and device, with elements of 1, 2, 4 or 8 bytes.
    """
    return tensor.detach().as_strided(*_spacing(tensor)).view(_INTEGERS[tensor.itemsize])


class Samples:
    """The values that `sample` takes, of several tensors on one device, which are read together.

    Args:
        tensors: of any shapes and dtypes, which must not change. The tensors are referenced.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        # By dtype, since torch.cat converts its arguments to one dtype.
        self._spaced: dict[torch.dtype, list[tuple[Tensor, tuple[int], tuple[int]]]] = {}
        for tensor in tensors:
            self._spaced.setdefault(tensor.dtype, []).append((tensor, *_spacing(tensor)))

    def read(self) -> bytes:
        """The bytes of the values as they are now; waits for the device."""
        with torch.no_grad():
            joined = [torch.cat([torch.as_strided(*each) for each in those]) for those in self._spaced.values()]
        return b"".join(values.cpu().view(torch.uint8).numpy().tobytes() for values in joined)


def _spacing(tensor: Tensor) -> tuple[tuple[int], tuple[int]]:
    """Size and stride of a sample that is spread over the rows and the columns of a tensor's memory."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    row, step = max(tensor.stride(), default=1), max(length // _LEAST, 1)
    if step >= row:
        # The step is a part of a row by the golden ratio, so that samples are not all in the same columns.
        step = (step // row - 1) * row + max(int(row * 0.618), 1)
    return (-(-length // step) if tensor.numel() else 0,), (step,)
