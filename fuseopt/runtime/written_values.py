"""A sample of a tensor's values, to see writes that its version does not count."""

from __future__ import annotations

import torch
from torch import Tensor

_MOST = 16
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sample(matrix: Tensor) -> Tensor:
    """View of up to 16 x 16 evenly spaced values, as integers of their size, so that NaN equals itself.

    PyTorch's fused optimizers, and writes through `tensor.data`, as peft merges adapters, leave the version as it is.

    Args:
        matrix: [any, any], of any strides and device.
    """
    steps = [max(-(-size // _MOST), 1) for size in matrix.shape]
    size = [-(-size // step) for size, step in zip(matrix.shape, steps, strict=True)]
    stride = [stride * step for stride, step in zip(matrix.stride(), steps, strict=True)]
    return matrix.detach().as_strided(size, stride).view(_INTEGERS[matrix.itemsize])
