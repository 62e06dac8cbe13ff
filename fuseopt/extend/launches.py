"""Kernels that csrc/python launches by the driver, without a launcher in Python: bare CUDA kernels and Triton's."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

_INVALID_CONTEXT = 201  # of cuLaunchKernel


class PreparedLaunch(NamedTuple):
    """How calls of one kind launch a kernel; csrc/python reads it. Places count arguments, then results.

    Attributes:
        function: the kernel's handle, a CUfunction of the tensors' device.
        grid: blocks in three dimensions; or (a function of the arguments, one that makes three ints of what it gives).
        block: threads in three dimensions.
        shared: dynamic shared memory in bytes.
        results: (sizes, dtype) of each. Nothing is launched if none has elements.
        parameters: of the kernel: a place, or the bytes of a constant, at most 8.
        contiguous: places of tensors that are copied if they are not contiguous.
        keeps: what has to live as long as the launch.
    """

    function: int
    grid: tuple[int, int, int] | tuple[Callable[..., Any], Callable[[Any], tuple[int, int, int]]]
    block: tuple[int, int, int]
    shared: int
    results: list[tuple[tuple[int, ...], torch.dtype]]
    parameters: list[int | bytes]
    contiguous: list[int]
    keeps: Any = None


def launches_by(
    library: Any,
    prepare: Callable[..., PreparedLaunch | None],
    *,
    supports: Callable | None = None,
    is_watched: Callable[[], bool] | None = None,
    as_floats: bool = False,
) -> Any:
    """A `Launches` of csrc/python: called with arguments, it returns results; NotImplemented if Python has to launch.

    Args:
        library: csrc/python, loaded.
        prepare: called with the arguments of a new kind of call, gives its launch, or None. A kind is dtype, device,
            sizes, strides and alignment (to 16 bytes) of each tensor, and the numbers unless `as_floats`.
        supports: a predicate that says yes to every call of a prepared kind, and is not asked again.
        is_watched: whether launches have to go through Python now.
        as_floats: the kernel gets all numbers as float, and a launch serves all of them. Else it gets them as int and
            double, and a launch is for its numbers.
    """
    return library.Launches(prepare, _driver(), supports, is_watched, as_floats)


@functools.cache
def _driver() -> tuple[int | None, Callable[[int], int], Callable[..., None]]:
    """(Address of cuLaunchKernel, the current stream of a device, what is called if a launch fails)."""
    launch = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernel, ctypes.c_void_p).value
    return launch, torch._C._cuda_getCurrentRawStream, _failed


def _failed(status: int, device: int, is_last: bool) -> None:
    """Raises the error of a launch, unless it is worth a retry: the first one in a thread without a driver context."""
    if status == _INVALID_CONTEXT and not is_last:
        torch.cuda.mem_get_info(device)  # makes torch's context current in this thread
    else:
        torch.cuda._utils._check_cuda(status)


def as_list(results: Sequence[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    """The results of a `Launches` as a list."""
    return [results] if isinstance(results, torch.Tensor) else list(results)
