"""One op at one size: the work, its contenders (ways to compute it), and their errors against float64."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fuseopt.bench.harness.workloads import dtype_name
from fuseopt.ops import registry
from fuseopt.ops.registry import SampleInput


@dataclass(frozen=True)
class OpCase:
    """The forward, or the backward, of one op at one size."""

    op: registry.Op
    benchmark: registry.Benchmark
    shape: str
    dtype: torch.dtype
    backward: bool

    @property
    def name(self) -> str:
        variant = f" ({self.benchmark.variant})" if self.benchmark.variant else ""
        direction = "bwd" if self.backward else "fwd"
        return f"{self.op.name}{variant} {direction}, {self.shape}, {dtype_name(self.dtype)}"

    def sample(self, device: torch.device) -> SampleInput:
        return sample(self.benchmark, self.shape, device, self.dtype)


def sample(benchmark: registry.Benchmark, shape: str, device: torch.device, dtype: torch.dtype) -> SampleInput:
    """The arguments of one call at the size that `shape` names."""
    return benchmark.make(device, dtype, *map(int, shape.split("x")))


def tensors(sample: SampleInput) -> list[Tensor]:
    return _tensors_in((sample.args, dict(sample.kwargs)))


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Work:
    """The forward, or the backward from `grad_outputs`, of one set of arguments.

    Call its methods under `torch.set_grad_enabled(backward)`.
    """

    sample: SampleInput
    grad_outputs: tuple[Tensor, ...] | None = None

    @classmethod
    def of(cls, case: OpCase, device: torch.device) -> Work:
        arguments = case.sample(device)
        if not case.backward:
            return cls(arguments)
        with torch.no_grad():
            outputs = _tensors_in(case.op.reference(*arguments.args, **arguments.kwargs))
        return cls(arguments, tuple(torch.randn_like(output) for output in outputs))

    def in_float64(self) -> Work:
        """The same work in float64, for `Float64Reference`."""

        def widened(tensor: Tensor) -> Tensor:
            if not tensor.dtype.is_floating_point:
                return tensor
            return tensor.detach().double().requires_grad_(tensor.requires_grad)

        args, kwargs, grads = tree_map_only(
            Tensor, widened, (self.sample.args, dict(self.sample.kwargs), self.grad_outputs)
        )
        return Work(SampleInput(args, kwargs), grads)

    def prepare(self, function: Callable) -> functools.partial:
        """The call to time. It may be repeated, and holds references to everything that it reads."""
        forward = functools.partial(function, *self.sample.args, **self.sample.kwargs)
        if self.grad_outputs is None:
            return forward
        inputs = [tensor for tensor in tensors(self.sample) if tensor.requires_grad]
        outputs = _tensors_in(forward())
        return functools.partial(torch.autograd.grad, outputs, inputs, self.grad_outputs, retain_graph=True)

    def results(self, function: Callable) -> list[Tensor]:
        """The outputs, or a gradient for each argument that requires one."""
        return _tensors_in(self.prepare(function)())

    def moved_bytes(self, function: Callable) -> int:
        """Bytes that `function` has to read or write at least: every argument, saved tensor and result counts once.

        Where all arguments are saved, the backward could do without the outputs, and saved ones do not count.
        """
        saved: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            saved.append(tensor.detach())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            call = self.prepare(function)
            results = _tensors_in(call())
        given = tensors(self.sample)
        if self.grad_outputs is not None:
            if {tensor.data_ptr() for tensor in given} <= {tensor.data_ptr() for tensor in saved}:
                outputs = {output.data_ptr() for output in call.args[0]}
                saved = [tensor for tensor in saved if tensor.data_ptr() not in outputs]
            given = [*saved, *self.grad_outputs]
        sizes = {tensor.data_ptr(): _bytes(tensor) for tensor in (*given, *results)}
        return sum(sizes.values())


def _bytes(tensor: Tensor) -> int:
    # A broadcast tensor takes less memory than its shape says.
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


@dataclass(frozen=True)
class Contender:
    """One way to compute an op; `own` says that it is one of the op's backends."""

    function: Callable
    own: bool


def contenders(case: OpCase, device: torch.device, compile: bool) -> dict[str, Contender | str]:
    """Every way to compute the op on `device`, by name; for a backend that cannot, the reasons instead."""
    dtypes = [tensor.dtype for tensor in tensors(case.sample(torch.device("meta"))) if tensor.is_floating_point()]
    found: dict[str, Contender | str] = {}
    for backend in case.op.backends:
        if backend.runs_on(device):
            reasons = backend.not_supported_reasons(device, dtypes)
            function = functools.partial(case.op.function, backend=backend.name)
            found[backend.name] = "; ".join(reasons) or Contender(function, own=True)
    eager = case.benchmark.eager
    if isinstance(eager, registry.Upstream):
        eager = _bound(eager)
    if eager is not None:
        found["eager"] = Contender(eager, own=False)
    if case.benchmark.torch is not None:
        found["torch"] = Contender(case.benchmark.torch, own=False)
    to_compile = eager or case.benchmark.torch
    if compile and case.benchmark.compiles and to_compile is not None:
        found["torch.compile"] = Contender(torch.compile(to_compile, dynamic=False), own=False)
    return found


def auto_choice(case: OpCase, device: torch.device) -> str:
    """The backend that `backend="auto"` takes for the case's dtypes."""
    dtypes = [tensor.dtype for tensor in tensors(case.sample(torch.device("meta"))) if tensor.is_floating_point()]
    return case.op.choose("auto", device, dtypes).backend


def _bound(upstream: registry.Upstream) -> Callable:
    module, _, attribute = upstream.name.rpartition(".")
    target, call = getattr(importlib.import_module(module), attribute), upstream.call
    return lambda *args, **kwargs: call(target, *args, **kwargs)


class Float64Reference:
    """The op's reference in float64, to which results are compared.

    Attributes:
        exact: its results.
        allowed: the largest error allowed: twice the error of the reference in the case's own dtype, and 4 units of
            rounding.
    """

    def __init__(self, case: OpCase, work: Work) -> None:
        self.exact = work.in_float64().results(case.op.reference)
        plain = self.error(work.results(case.op.reference))
        self.allowed = 2 * plain + 4 * torch.finfo(case.dtype).eps

    def error(self, results: Sequence[Tensor]) -> float:
        """The largest difference from `exact`, each relative to the largest value of its tensor."""
        return max(map(_relative_difference, results, self.exact), default=0.0)


def _relative_difference(result: Tensor, exact: Tensor) -> float:
    if result.shape != exact.shape:
        return math.inf
    # Equal entries, infinities among them, differ by 0; NaN differs by infinity.
    apart = torch.where(result == exact, 0.0, (result - exact).abs()).nan_to_num(nan=math.inf, posinf=math.inf).max()
    largest = torch.where(exact.isfinite(), exact.abs(), 0.0).max()
    return (apart / largest.clamp(min=1e-2)).item()
