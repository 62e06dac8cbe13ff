"""Triton kernels of a step compiled while Inductor works, not one after the other when the step first runs.

Triton compiles a kernel for the strides and constants that it is launched with, so each op is run on zeros laid out as
its inputs will be. More than half of the time goes to passes and ptxas, which leave Python's lock to Inductor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

# More of them would take the lock from Inductor more often than they gain.
_THREADS = 2
_POOL: ContextVar[Executor] = ContextVar("early_kernels")


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device).zero_()


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
    """Runs the Triton ops of a graph on a GPU in other threads, once for each layout of their inputs.

    What fails there is for the step to say, which calls the same ops.
    """
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    for node in graph.nodes:
        if _is_triton(node) and all(_is_on_gpu(given.meta.get("val")) for given in node.all_input_nodes):
            arguments = fx.node.map_arg(node.args, lambda given: _layout(given.meta["val"]))
            calls.setdefault(f"{node.target}{arguments}", (node.target, arguments))
    for op, arguments in calls.values():
        _POOL.get().submit(_run, op, arguments)


def _is_triton(node: fx.Node) -> bool:
    op = node.target
    return isinstance(op, OpOverload) and op.namespace == "fuseopt" and op._overloadname == "triton"


def _is_on_gpu(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_cuda and not value._has_symbolic_sizes_strides


def _layout(value: Tensor) -> _Layout:
    return _Layout(tuple(value.shape), value.stride(), value.dtype, value.device)


def _run(op: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    given = [argument.zeros() if isinstance(argument, _Layout) else argument for argument in arguments]
    op(*given)
