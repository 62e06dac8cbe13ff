"""Small elementwise functions, compiled by TorchScript or Inductor, or run eagerly.

A `Region` holds a function's name and not its compiled form: a scripted function as a module attribute would break
deepcopy and pickle.
"""

from __future__ import annotations

import functools
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseopt.ops.library import in_forward_mode


def relu(input: Tensor) -> Tensor:
    return F.relu(input)


def silu(input: Tensor) -> Tensor:
    return F.silu(input)


def gelu(input: Tensor) -> Tensor:
    return F.gelu(input)


def gelu_tanh(input: Tensor) -> Tensor:
    return F.gelu(input, approximate="tanh")


def quick_gelu(input: Tensor) -> Tensor:
    return input * torch.sigmoid(1.702 * input)


def bias_relu(input: Tensor, bias: Tensor) -> Tensor:
    return F.relu(input + bias)


def bias_silu(input: Tensor, bias: Tensor) -> Tensor:
    return F.silu(input + bias)


def bias_gelu(input: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(input + bias)


def bias_gelu_tanh(input: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(input + bias, approximate="tanh")


def gated_relu(gate: Tensor, input: Tensor) -> Tensor:
    return F.relu(gate) * input


def gated_silu(gate: Tensor, input: Tensor) -> Tensor:
    return F.silu(gate) * input


def gated_gelu(gate: Tensor, input: Tensor) -> Tensor:
    return F.gelu(gate) * input


def gated_gelu_tanh(gate: Tensor, input: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * input


REGIONS: Mapping[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (
        relu,
        silu,
        gelu,
        gelu_tanh,
        quick_gelu,
        bias_relu,
        bias_silu,
        bias_gelu,
        bias_gelu_tanh,
        gated_relu,
        gated_silu,
        gated_gelu,
        gated_gelu_tanh,
    )
}


@dataclass(frozen=True)
class Region:
    """A function of `REGIONS` by name; compiled at the first call in each process.

    The plain function runs under torch.compile, so that it fuses with its surroundings, and in torch.func's transforms
    and forward-mode AD, which compiled functions do not support.
    """

    name: str
    backend: str

    def __call__(self, *inputs: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or in_forward_mode() or torch._C._are_functorch_transforms_active():
            return REGIONS[self.name](*inputs)
        return _compiled(self.name, self.backend)(*inputs)


@dataclass(frozen=True)
class GatedRegion(Region):
    """One of the `gated_` functions, with the activation computed in `activation_dtype`."""

    def __call__(self, gate: Tensor, up: Tensor, *, activation_dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        return super().__call__(gate.to(activation_dtype), up)


def not_supported_reasons(backend: str) -> list[str]:
    """Why `backend` ("torchscript", "inductor", "aot_eager") cannot compile here; empty if it can."""
    if backend == "torchscript":
        try:
            _compiled("gelu_tanh", backend)
        except (AttributeError, RuntimeError) as error:
            return [f"torch {torch.__version__} cannot script it: {error}"]
    if backend in ("inductor", "aot_eager") and not torch._dynamo.is_dynamo_supported():
        return ["torch.compile does not support this Python or platform"]
    if backend == "inductor":
        compiler = os.environ.get("CXX", "g++")
        if not torch.cuda.is_available() and shutil.which(compiler) is None:
            return [f"Inductor needs a C++ compiler on CPU, and {compiler!r} is not on PATH"]
    return []


@functools.cache
def _compiled(name: str, backend: str) -> Callable[..., Tensor]:
    function = REGIONS[name]
    if backend == "torchscript":
        with warnings.catch_warnings():
            # torch 2.14 and later warn about TorchScript's deprecation in every call; the plan's reason says it
            # instead.
            warnings.simplefilter("ignore", category=DeprecationWarning)
            warnings.simplefilter("ignore", category=FutureWarning)
            return torch.jit.script(function)
    if backend == "inductor":
        return torch.compile(function, fullgraph=True, dynamic=True)
    return function
