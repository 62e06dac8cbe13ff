"""Triton kernels of a step compiled while Inductor works, not one after the other when the step first runs.

Triton compiles a kernel for the strides and constants that it is launched with, so each op is called with tensors laid
out as its inputs will be: first without data in a process of their own, which leaves what it compiles in Triton's cache
on disk and takes no time from Inductor, then on zeros in a thread, which loads it from there.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

# More of them would take Python's lock from Inductor more often than they gain.
_THREADS = 2
_POOL: ContextVar[Executor] = ContextVar("early_kernels")


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def without_data(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")

    def zeros(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device).zero_()


class _Call(NamedTuple):
    """Of an op, with Layouts for tensors."""

    op: OpOverload
    arguments: tuple[Any, ...]

    def given(self, make: Callable[[_Layout], Tensor]) -> tuple[Any, ...]:
        return tuple(make(argument) if isinstance(argument, _Layout) else argument for argument in self.arguments)


@contextlib.contextmanager
def pool() -> Iterator[None]:
    """Where `begin` may be called; waits for what it has begun."""
    with ThreadPoolExecutor(_THREADS, "fuseopt-kernels") as threads:
        token = _POOL.set(threads)
        try:
            yield
        finally:
            _POOL.reset(token)


def begin(graph: fx.Graph) -> None:
    """Compiles the kernels of a graph's Triton ops on a GPU, once for each layout of their inputs.

    What fails here is for the step to say, which calls the same ops.
    """
    calls: dict[str, _Call] = {}
    for node in graph.nodes:
        if _is_triton(node) and all(_is_on_gpu(given.meta.get("val")) for given in node.all_input_nodes):
            arguments = fx.node.map_arg(node.args, lambda given: _layout(given.meta["val"]))
            calls.setdefault(f"{node.target}{arguments}", _Call(node.target, arguments))
    if calls:
        # In a thread as well, where tensors are not those of the trace.
        compiler = _POOL.get().submit(_compile_elsewhere, list(calls.values()))
        for call in calls.values():
            _POOL.get().submit(_run, call, compiler)


def _is_triton(node: fx.Node) -> bool:
    op = node.target
    return isinstance(op, OpOverload) and op.namespace == "fuseopt" and op._overloadname == "triton"


def _is_on_gpu(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_cuda and not value._has_symbolic_sizes_strides


def _layout(value: Tensor) -> _Layout:
    return _Layout(tuple(value.shape), value.stride(), value.dtype, value.device)


def _compile_elsewhere(calls: Sequence[_Call]) -> subprocess.Popen[bytes] | None:
    """A process that compiles what the calls launch; None where there is no Python to start one, or on an AMD GPU."""
    if torch.version.hip is not None or not sys.executable:
        return None
    (device, *_) = (argument.device for argument in calls[0].arguments if isinstance(argument, _Layout))
    properties = torch.cuda.get_device_properties(device)
    gpu = (10 * properties.major + properties.minor, properties.multi_processor_count)
    named = [(call.op._schema.name.split("::")[1], call.given(_Layout.without_data)) for call in calls]
    compiler = subprocess.Popen(
        [sys.executable, "-m", "fuseopt.ops.triton"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert compiler.stdin is not None
    with contextlib.suppress(BrokenPipeError), compiler.stdin as stdin:
        pickle.dump((gpu, named), stdin)
    return compiler


def _run(call: _Call, compiler: Future[subprocess.Popen[bytes] | None]) -> None:
    process = compiler.result()
    if process is not None:
        process.wait()
    call.op(*call.given(_Layout.zeros))
