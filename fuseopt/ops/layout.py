"""What of a tensor compiled code depends on, without the tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Can be pickled, unlike a tensor without data."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self, device: torch.device | str | None = None) -> Tensor:
        """A tensor laid out like that, on its own device by default."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device or self.device)
