"""Where "auto" takes another backend than the first that can run: calls at which that was measured to be faster."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

MANY_ELEMENTS = 2**24
"""They take a GPU longer than a launch from Python takes the host."""

Limits = tuple[str, bool, int, int, int]
"""Of a Preference: backend, backward, least and most columns, elements. torch.compile takes them for constants."""


@dataclass(frozen=True)
class Preference:
    """Calls of an op for which "auto" takes `backend`: it takes less time on the device than those ahead of it.

    Attributes:
        backend: its name.
        backward: whether in the op's backward, or else in its forward.
        dtype: of all floating point arguments.
        columns: least and most elements in the first argument's last dimension.
        elements: of the first argument, at least. Fewer take the device less time than the call takes the host.
        capability: major compute capability of the GPU that it was measured on.
        gpu: part of that one's name, where another of the same capability was measured to differ.
    """

    backend: str
    backward: bool
    dtype: torch.dtype
    columns: tuple[int, int]
    elements: int
    capability: int = 9
    gpu: str = ""

    def holds_on(self, device: torch.device) -> bool:
        if device.type != "cuda" or not torch.cuda.is_available():
            return False
        is_capable = torch.cuda.get_device_capability(device)[0] == self.capability
        return is_capable and self.gpu in torch.cuda.get_device_name(device)

    @property
    def limits(self) -> Limits:
        return (self.backend, self.backward, *self.columns, self.elements)

    def __str__(self) -> str:
        direction = "backward" if self.backward else "forward"
        least, most = self.columns
        columns = f"{least}" if least == most else f"{least} to {most}"
        return f"{self.backend} {direction} over {columns} columns from {self.elements} elements on"


def by_size(picked: str, preferred: Iterable[Limits], shape: torch.Size) -> tuple[str, str]:
    """The backends of forward and backward for a first argument of `shape`: `picked`, or what is preferred to it."""
    forward = backward = picked
    for backend, is_backward, least, most, elements in preferred:
        if shape.numel() >= elements and least <= shape[-1] <= most:
            if is_backward:
                backward = backend
            else:
                forward = backend
    return forward, backward
