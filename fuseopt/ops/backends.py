"""Backends of ops: what device, dtypes and machine each of them needs."""

import contextlib
import contextvars
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fuseopt.build import loader
from fuseopt.ops.library import FLOATING, TRITON_INTERPRETED

_assumed_capability: contextvars.ContextVar[tuple[int, int] | None] = contextvars.ContextVar("gpu", default=None)


@contextlib.contextmanager
def assume_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Plans made inside are for a GPU of this compute capability with Triton and the CUDA library, here or not."""
    token = _assumed_capability.set(capability)
    try:
        yield
    finally:
        _assumed_capability.reset(token)


def assumed_gpu() -> torch.device | None:
    """The device to plan for inside `assume_gpu`, wherever the model is; else None."""
    return None if _assumed_capability.get() is None else torch.device("cuda")


@dataclass(frozen=True)
class Backend:
    """One way to run an op. The base class is plain PyTorch on any device; subclasses need more."""

    name: str
    dtypes: tuple[torch.dtype, ...] = FLOATING

    def runs_on(self, device: torch.device) -> bool:
        """Whether the backend is for tensors on `device`."""
        return True

    def not_supported_reasons(
        self, device: torch.device, dtypes: Sequence[torch.dtype], *, may_build: bool = False
    ) -> list[str]:
        """Why this backend cannot run on tensors of `dtypes` on `device`; empty if it can.

        Args:
            may_build: a native library that could be compiled counts as present, and nothing is loaded (for planning).
                If False, the library must be on disk, and is loaded. Nothing is compiled in either case.
        """
        return [f"does not take {dtype}" for dtype in dict.fromkeys(dtypes) if dtype not in self.dtypes]


@dataclass(frozen=True)
class NativeBackend(Backend):
    """A kernel from the native library of the same name.

    Attributes:
        capability: lowest compute capability of a GPU that it runs on.
    """

    name: loader.Kind
    capability: tuple[int, int] = (0, 0)

    def runs_on(self, device: torch.device) -> bool:
        return device.type == self.name

    def not_supported_reasons(
        self, device: torch.device, dtypes: Sequence[torch.dtype], *, may_build: bool = False
    ) -> list[str]:
        if not self.runs_on(device):
            return [f"runs on {self.name} tensors, not on {device.type}"]
        reasons = super().not_supported_reasons(device, dtypes)
        assumed = _assumed_capability.get() if may_build and self.name == "cuda" else None
        if not reasons and assumed is None:
            state = loader.state(self.name) if may_build else loader.load(self.name, build=False)
            if state.status == "absent" or (not may_build and state.status != "loaded"):
                reasons.append(f"its native library is {state.status}: {state.reason or 'not compiled yet'}")
        if not reasons and self.capability > (0, 0):
            present = assumed or torch.cuda.get_device_capability(device)
            if present < self.capability:
                least, given = (".".join(map(str, capability)) for capability in (self.capability, present))
                reasons.append(f"needs a GPU of compute capability {least}, not {given}")
        return reasons

    def missing_kernels(self, raw: Sequence[str]) -> list[str]:
        """One reason for each raw op that the loaded library has no kernel for; empty if no library is loaded."""
        if loader.state(self.name).status != "loaded":
            return []
        key = self.name.upper()
        return [
            f"its native library has no kernel of {name}"
            for name in raw
            if torch._C._dispatch_has_kernel(f"fuseopt::{name}")
            and not torch._C._dispatch_has_kernel_for_dispatch_key(f"fuseopt::{name}", key)
        ]


class TritonBackend(Backend):
    """A Triton kernel, for CUDA tensors; also for CPU tensors if the process was started with TRITON_INTERPRET=1."""

    def runs_on(self, device: torch.device) -> bool:
        return device.type == "cuda" or (device.type == "cpu" and TRITON_INTERPRETED)

    def not_supported_reasons(
        self, device: torch.device, dtypes: Sequence[torch.dtype], *, may_build: bool = False
    ) -> list[str]:
        if not self.runs_on(device):
            return [f"runs on cuda tensors, not on {device.type}"]
        if _assumed_capability.get() is None and importlib.util.find_spec("triton") is None:
            return ["the package triton is not installed"]
        return super().not_supported_reasons(device, dtypes)


CPU = NativeBackend("cpu")
CUDA = NativeBackend("cuda")
TRITON = TritonBackend("triton")
REFERENCE = Backend("reference")
