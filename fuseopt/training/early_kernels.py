"""Triton kernels of a step compiled while Inductor works, not one after the other when the step first runs.

Triton compiles a kernel for the strides and constants that it is launched with, so each op is called on tensors laid
out as its inputs will be. Half of that is Python, which would hold up Inductor in this process: the processes do it
that Inductor has for its own kernels, without data or a GPU, and leave it in Triton's cache. Where they are not there
yet, threads do it here, in which passes and ptxas at least go on beside Inductor.
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
from fuseopt.training import changing_sizes

_ELSEWHERE = "fuseopt.ops.triton.compile_only"
# More of them would take the lock from Inductor more often than they gain.
_THREADS = 2
# Triton compiles another kernel for sizes that are a multiple of 16 (alignment), and of a kernel's tile. For each of
# these numbers a size is compiled that is an odd multiple of it, and so no multiple of the next number.
_MULTIPLES = (16, 64, 128)
_POOL: ContextVar[Executor] = ContextVar("early_kernels")


def start() -> None:
    """Has begin beside the trace what Inductor would else begin when it is called: its processes, which take seconds to
    be there, and a hash of Triton's files, which takes most of one.
    """
    maybe_warm_pool()
    if HAS_TRITON:
        threading.Thread(target=triton_key, name="fuseopt-triton-key", daemon=True).start()


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
    """Compiles the Triton ops of a graph on a GPU beside this thread, and runs each once a layout of its inputs.

    Ops of changing sizes run with the sizes of the traced call. Inductor's processes, if there are any, also compile
    them for sizes of other divisibility, so that later batches find their kernels. Errors are ignored here: the step
    calls the same ops and raises them.
    """
    calls: dict[str, tuple[OpOverload, tuple[Any, ...]]] = {}
    others: dict[str, tuple[OpOverload, tuple[Any, ...]]] = {}
    traced = changing_sizes.hints(graph)
    for node in graph.nodes:
        given = node.all_input_nodes
        if not _is_triton(node) or not all(_is_given_on_gpu(value) for value in given):
            continue
        changing = changing_sizes.symbols_of(given)
        if changing <= traced.keys():
            _add(calls, node, traced)
            for multiple in _MULTIPLES if changing else ():
                _add(others, node, {symbol: (size // multiple | 1) * multiple for symbol, size in traced.items()})
    # All processes have something to do before a thread here waits for one.
    begun = [(_compiled_elsewhere(*call), *call) for call in calls.values()]
    for key in others.keys() - calls.keys():
        _compiled_elsewhere(*others[key])
    for compiled, op, arguments in begun:
        _POOL.get().submit(_run_when, compiled, op, arguments)


def _add(calls: dict[str, Any], node: fx.Node, sizes: Mapping[sympy.Symbol, int]) -> None:
    def given(input: fx.Node) -> Layout | int:
        value = input.meta["val"]
        return _layout(value, sizes) if isinstance(value, Tensor) else changing_sizes.at(value, sizes)

    arguments = fx.node.map_arg(node.args, given)
    calls.setdefault(f"{node.target}{arguments}", (node.target, arguments))


def _layout(value: Tensor, sizes: Mapping[sympy.Symbol, int]) -> Layout:
    shape, strides = ([changing_sizes.at(size, sizes) for size in given] for given in (value.shape, value.stride()))
    return Layout(tuple(shape), tuple(strides), value.dtype, value.device)


def _is_triton(node: fx.Node) -> bool:
    op = node.target
    return isinstance(op, OpOverload) and op.namespace == "fuseopt" and op._overloadname == "triton"


def _is_given_on_gpu(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return value.is_cuda if isinstance(value, Tensor) else isinstance(value, (torch.SymInt, int))


def _compiled_elsewhere(op: OpOverload, arguments: tuple[Any, ...]) -> Future[Any] | None:
    """Done when Inductor's processes have left the kernels of a call in Triton's cache; None where there are none."""
    if torch.version.cuda is None or not AsyncCompile.use_process_pool():
        return None
    device = next(argument.device for argument in arguments if isinstance(argument, Layout))
    work = importlib.import_module(_ELSEWHERE)
    call = triton_function(op), arguments, work.Target.of(device)
    job: Future[Any] = AsyncCompile.process_pool().submit(work.compile_call, *call)
    return job


def _run_when(compiled: Future[Any] | None, op: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if compiled is not None:
        concurrent.futures.wait([compiled])
    _run(op, arguments)


def _run(op: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    op(*(argument.empty().zero_() if isinstance(argument, Layout) else argument for argument in arguments))
