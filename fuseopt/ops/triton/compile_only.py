"""Compiles kernels without launching them, for a GPU that need not be present: helper processes do this for another.

What is compiled stays in Triton's cache on disk, where a process that launches the same finds it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from fuseopt.ops.layout import Layout
from fuseopt.ops.triton.rows import MULTIPROCESSORS, multiprocessor_count


class CompileOnlyDriver:
    """The part of a Triton driver that compilation needs, for a GPU of `capability`, such as 90 for 9.0."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> CompileOnlyDriver:
        # Kernels are kept by device: those of another time may have gone to another cache on disk.
        return self

    def get_current_stream(self, device: CompileOnlyDriver) -> int:
        return 0


@contextlib.contextmanager
def compile_only(capability: int, multiprocessors: int) -> Iterator[list[Any]]:
    """A context in which launches in this process, in any thread, only compile; gives the kernels, as they come.

    Args:
        capability: of the GPU, 90 for 9.0.
        multiprocessors: that it has, as this thread takes tensors on "meta" to be on it.
    """
    kernels: list[Any] = []
    active, run = driver._active, JITFunction.run

    def compile_it(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    driver._active, JITFunction.run = CompileOnlyDriver(capability), compile_it
    token = MULTIPROCESSORS.set(multiprocessors)
    try:
        yield kernels
    finally:
        MULTIPROCESSORS.reset(token)
        driver._active, JITFunction.run = active, run


def settings() -> dict[str, str]:
    """The environment variables that Triton reads: its cache folder, and all that compiled code depends on."""
    return {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}


class Target(NamedTuple):
    """A GPU, and a process on it."""

    capability: int  # 90 for 9.0
    multiprocessors: int
    settings: dict[str, str]  # `settings()` there
    assembler: str  # ptxas' version, as the process knows it: part of the name of what is compiled

    @classmethod
    def of(cls, device: torch.device) -> Target:
        """That device in this process."""
        major, minor = torch.cuda.get_device_capability(device)
        capability = 10 * major + minor
        # Triton asks ptxas once in a process: Inductor may have set another one since.
        assembler = nvidia.CUDABackend(CompileOnlyDriver(capability).get_current_target()).hash()
        return cls(capability, multiprocessor_count(device), settings(), assembler)


def compile_call(function: Callable[..., Any], arguments: Sequence[Any], target: Target) -> list[str]:
    """Compiles the kernels that a call launches on `target`, and returns their names.

    Args:
        function: of a module, as those behind the ops' overloads `.triton`.
        arguments: its own, with a `Layout` for each tensor, whose address is taken to be aligned.

    Raises:
        What the function or Triton raises, with nothing left changed in this process.
    """
    tensors = [argument.empty("meta") if isinstance(argument, Layout) else argument for argument in arguments]
    with _names_as_at(target), compile_only(target.capability, target.multiprocessors) as kernels:
        function(*tensors)
    return [kernel.metadata.name for kernel in kernels]


@contextlib.contextmanager
def _names_as_at(target: Target) -> Iterator[None]:
    """Where Triton's cache is `target`'s, and what is compiled gets the name that it would have there."""
    own, assembler = settings(), nvidia.CUDABackend.hash
    _set(target.settings)
    nvidia.CUDABackend.hash = lambda _: target.assembler
    try:
        yield
    finally:
        nvidia.CUDABackend.hash = assembler
        _set(own)


def _set(given: Mapping[str, str]) -> None:
    for name in settings():
        del os.environ[name]
    os.environ.update(given)
