"""Triton kernels compiled for a GPU that need not be there."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from fuseopt.ops.triton import rows


class CompileOnlyDriver:
    """What Triton asks of a driver in order to compile for an NVIDIA GPU of `capability`: 90 for 9.0."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # kernels are cached by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compile_only(capability: int, multiprocessors: int = 4) -> Iterator[list[Any]]:
    """Compiles what is launched inside, and collects the compiled kernels in place of running them.

    Holds for all threads of the process. Host code is to be given tensors on the meta device.

    Args:
        capability: compute capability of the GPU, 90 for 9.0.
        multiprocessors: of that GPU, for kernels whose programs share out the work.
    """
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_kernel(kernel: JITFunction, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        kernels.append(run(kernel, *args, grid=grid, warmup=True, **kwargs))

    with (
        mock.patch.object(driver, "_active", CompileOnlyDriver(capability)),
        mock.patch.object(JITFunction, "run", compile_kernel),
        mock.patch.object(rows, "MULTIPROCESSORS_ELSEWHERE", multiprocessors),
    ):
        yield kernels
