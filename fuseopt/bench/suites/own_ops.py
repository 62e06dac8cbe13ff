"""`fuseopt bench own-ops`: host time of a call of a user's op, and of torch's op of the same kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fuseopt
from fuseopt.bench.harness.measure import measure
from fuseopt.bench.harness.records import Record, Results
from fuseopt.bench.harness.workloads import failed
from fuseopt.errors import FuseoptError
from fuseopt.extend.own_op import registered
from fuseopt.runtime.timer import host_seconds, time_in_turns

TORCH = "torch"
_ELEMENTS, _ROUNDS, _CALLS = 64, 15, 500
_NATIVE = """
#include <torch/csrc/stable/tensor.h>
#include "new_tensor.h"
using torch::stable::Tensor;

Tensor native(Tensor a, Tensor b, Tensor c) {
  Tensor output = fuseopt::new_tensor_like(a);
  const float *x = a.const_data_ptr<float>(), *y = b.const_data_ptr<float>(), *z = c.const_data_ptr<float>();
  float* result = output.mutable_data_ptr<float>();
  for (int64_t i = 0; i < a.numel(); ++i) result[i] = x[i] * y[i] + z[i];
  return output;
}
"""
_BARE = """
__global__ void mul_add(const float* a, const float* b, const float* c, float* output, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) output[i] = a[i] * b[i] + c[i];
}
"""


def _torch(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.addcmul(c, a, b)


def _in_python(name: str, device: str) -> Any:
    op = fuseopt.op(name)(_torch)
    op.kernel(device)(_torch)
    return op


def _native(name: str, device: str) -> Any:
    op = fuseopt.op(name)(_torch)
    if device == "cpu":
        return op.native(cpu=_NATIVE)
    return op.native(cuda=_BARE, kernel="mul_add", grid=lambda a, b, c: -(-a.numel() // 256))


def _elementwise(name: str, device: str) -> Any:
    return fuseopt.elementwise(name, "a * b + c")


OPS: Mapping[str, Callable[[str, str], Any]] = {
    "in_python": _in_python,
    "native": _native,
    "elementwise": _elementwise,
}
"""Name -> function that defines the op in that way. "native" is C++ on a CPU, and on a GPU a CUDA kernel without a host
function."""


@dataclass(frozen=True)
class _Case:
    """Calls of all ops with the same tensors.

    Attributes:
        with_autograd: whether the first tensor requires a gradient.
    """

    with_autograd: bool

    @property
    def name(self) -> str:
        return f"host time of a * b + c, {_ELEMENTS}, float32, {'with' if self.with_autograd else 'without'} autograd"


def run(*, device: torch.device) -> Results:
    """Times calls until they return to the host; the baseline is `torch.addcmul`.

    Notes name the backend that `auto` takes, or say why an op cannot be built.

    Raises:
        AssertionError: the result of an op differs from that of `torch.addcmul`.
    """
    made: dict[str, Any] = {}
    try:
        for name, make in OPS.items():
            try:
                made[name] = make(f"fuseopt_bench::{name}", device.type)
            except FuseoptError as error:
                made[name] = failed(error)
        records = measure([_Case(False), _Case(True)], functools.partial(_records, made=made, device=device))
    finally:
        for name in registered():
            if name.startswith("fuseopt_bench::"):
                fuseopt.unregister(name)
    return Results.measured_here("own-ops", records, unit="us")


def _records(case: _Case, made: Mapping[str, Any], device: torch.device) -> list[Record]:
    a, b, c = (torch.randn(_ELEMENTS, device=device) for _ in range(3))
    a.requires_grad_(case.with_autograd)
    calls: dict[str, Callable[[], Tensor]] = {TORCH: functools.partial(_torch, a, b, c)}
    notes: dict[str, str] = {}
    for name, op in made.items():
        if isinstance(op, str):
            notes[name] = op
            continue
        torch.testing.assert_close(op(a, b, c), calls[TORCH]())
        calls[name], notes[name] = functools.partial(op, a, b, c), f"runs on {op.choose(a, b, c).backend}"
    timings = time_in_turns(calls, functools.partial(host_seconds, repetitions=_CALLS), rounds=_ROUNDS)
    return [
        Record.of(case.name, name, timings[name], None if name == TORCH else timings[TORCH], note=notes.get(name))
        if name in timings
        else Record(case.name, name, note=notes[name])
        for name in (TORCH, *made)
    ]
