"""Compiles fuseopt's own Triton kernels of a step while Inductor compiles the rest, not at their first launch.

Triton specialises a kernel by strides and constants, so each op is called on tensors with the layout of its inputs.
Half of the time is Python code, which would block Inductor in this process. So Inductor's worker processes do it,
without data or a GPU (`ops/triton/compile_only.py`), and leave the kernels in Triton's disk cache; threads of this
process then run each op on zeros, which loads them. If the workers have not started yet, the threads compile.

A worker's cache entry is found only under the same cache key as in this process. So a job carries the device's
properties (some kernel constants depend on the number of multiprocessors) and Triton's settings, such as the version of
ptxas.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._inductor.async_compile import AsyncCompile, maybe_warm_pool
from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key
from torch._ops import OpOverload

from fuseopt.ops.layout import Layout
from fuseopt.ops.library import triton_function
from fuseopt.training import dynamic_shapes

_WORKER_MODULE = "fuseopt.ops.triton.compile_only"
# More threads would slow Inductor down through the interpreter lock.
_THREADS = 2
# Triton specialises kernels for sizes that are a multiple of 16, and fuseopt's for multiples of a tile. For each of
# these numbers a size is compiled that is an odd multiple of it, and so no multiple of the next.
_MULTIPLES = (16, 64, 128)
_POOL: ContextVar[Executor] = ContextVar("early_kernels")


def start() -> None:
    """Starts, in parallel to the trace, what Inductor would start when called: worker processes and a hash of Triton.

    Starting the workers takes seconds, hashing Triton's files most of a second.
    """
    maybe_warm_pool()
    if HAS_TRITON:
        threading.Thread(target=triton_key, name="fuseopt-triton-key", daemon=True).start()


@contextlib.contextmanager
def pool() -> Iterator[None]:
    """Context in which `begin` may be called. On exit waits for all compilations."""
    with ThreadPoolExecutor(_THREADS, "fuseopt-kernels") as threads:
        token = _POOL.set(threads)
        try:
            yield
        finally:
            _POOL.reset(token)


def begin(graph: fx.Graph) -> None:
    """Starts compiling the Triton ops of a graph, once for each op and layout of its inputs.

    Ops with dynamic sizes run with the sizes of the traced call. Worker processes also compile them for sizes of other
    divisibility, for later batches. Errors are ignored: the step calls the same ops and raises them.
    """
    calls: dict[str, tuple[OpOverload, tuple[Any, ...]]] = {}
    others: dict[str, tuple[OpOverload, tuple[Any, ...]]] = {}
    traced = dynamic_shapes.hints(graph)
    for node in graph.nodes:
        given = node.all_input_nodes
        if not _is_triton(node) or not all(_is_given_on_gpu(value) for value in given):
            continue
        changing = dynamic_shapes.symbols_of(given)
        if changing <= traced.keys():
            _add(calls, node, traced)
            for multiple in _MULTIPLES if changing else ():
                _add(others, node, {symbol: (size // multiple | 1) * multiple for symbol, size in traced.items()})
    # All jobs are submitted before a thread waits for the first.
    begun = [(_compile_in_worker(*call), *call) for call in calls.values()]
    for key in others.keys() - calls.keys():
        _compile_in_worker(*others[key])
    for compiled, op, arguments in begun:
        _POOL.get().submit(_run_when, compiled, op, arguments)


def _add(calls: dict[str, Any], node: fx.Node, sizes: Mapping[sympy.Symbol, int]) -> None:
    def given(input: fx.Node) -> Layout | int:
        value = input.meta["val"]
        return _layout(value, sizes) if isinstance(value, Tensor) else dynamic_shapes.at(value, sizes)

    arguments = fx.node.map_arg(node.args, given)
    calls.setdefault(f"{node.target}{arguments}", (node.target, arguments))


def _layout(value: Tensor, sizes: Mapping[sympy.Symbol, int]) -> Layout:
    shape, strides = ([dynamic_shapes.at(size, sizes) for size in given] for given in (value.shape, value.stride()))
    return Layout(tuple(shape), tuple(strides), value.dtype, value.device)


def _is_triton(node: fx.Node) -> bool:
    op = node.target
    return isinstance(op, OpOverload) and op.namespace == "fuseopt" and op._overloadname == "triton"


def _is_given_on_gpu(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return value.is_cuda if isinstance(value, Tensor) else isinstance(value, (torch.SymInt, int))


def _compile_in_worker(op: OpOverload, arguments: tuple[Any, ...]) -> Future[Any] | None:
    """A future that is done when a worker has put the call's kernels into Triton's cache; None without workers."""
    if torch.version.cuda is None or not AsyncCompile.use_process_pool():
        return None
    device = next(argument.device for argument in arguments if isinstance(argument, Layout))
    work = importlib.import_module(_WORKER_MODULE)
    call = triton_function(op), arguments, work.Target.of(device)
    job: Future[Any] = AsyncCompile.process_pool().submit(work.compile_call, *call)
    return job


def _run_when(compiled: Future[Any] | None, op: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if compiled is not None:
        concurrent.futures.wait([compiled])
    _run(op, arguments)


def _run(op: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    op(*(argument.empty().zero_() if isinstance(argument, Layout) else argument for argument in arguments))
