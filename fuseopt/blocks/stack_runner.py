"""StackRunner: runs all blocks of a stack when the first one is called, eagerly or as one CUDA graph.

transformers' forward of a stack is kept: embeddings, masks, caches, recorded outputs. It calls the blocks one by one;
the first call runs them all, and each later call returns its input, which is the result already.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fuseopt.blocks.recording_cache import is_empty_cache
from fuseopt.blocks.stack_work import BlockInputs, RunnableBlock, StackState, StackWork, run_blocks
from fuseopt.ops.library import is_unobserved
from fuseopt.runtime.cuda_graphs import Captures
from fuseopt.runtime.module_watch import ModuleWatch, has_other_weights, modules_below
from fuseopt.runtime.references import weak_attribute
from fuseopt.tuning import tuned

DEVICE_TYPES = ("cuda",)
"""Devices where launching kernels one by one costs the host more time than a graph replay."""

_MOST_GRAPHS = 8
# A size is captured at its third call. It may replace the graph of a size not seen in the last `_CALLS_KEPT` calls.
_UNCAPTURED_CALLS = 2
_MOST_SIZES_COUNTED = 256
_CALLS_KEPT = 64


class _Call(threading.local):
    """State of the stack's forward in this thread.

    Attributes:
        begun: whether its first block has been called; True outside of the stack's forward.
        output: what the runner returned for the first block, or None.
    """

    begun = True
    output: Tensor | None = None


class StackRunner:
    """Runs all blocks of a stack when the stack calls the first one.

    A size is the shapes and dtypes of all inputs and whether there is a cache to fill. It is captured as a CUDA graph
    at its third call; at most 8 graphs are kept, and other sizes run eagerly. Graphs read the weights in place. Every
    call checks that modules, hooks and weight addresses are unchanged; a change drops all graphs.

    Copies and pickles hold no graphs.

    Args:
        stack: a module whose forward calls the blocks.
        blocks: name of the ModuleList of `stack` that holds them.
        cuda_graphs: False to run every size eagerly.
    """

    stack = weak_attribute("stack")

    def __init__(self, stack: nn.Module, blocks: str, cuda_graphs: bool = True) -> None:
        self.__setstate__({"stack": stack, "blocks": blocks, "cuda_graphs": cuda_graphs})

    def __getstate__(self) -> dict[str, Any]:
        return {"stack": self.stack, "blocks": self.blocks, "cuda_graphs": self.cuda_graphs}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.stack = state["stack"]
        self.blocks: str = state["blocks"]
        self.cuda_graphs: bool = state["cuda_graphs"]
        self.note = ""
        self._call = _Call()
        self._lock = threading.Lock()
        self._captures = Captures()
        self._works: OrderedDict[Hashable, StackWork] = OrderedDict()
        self._times_seen: Counter[Hashable] = Counter()
        self._calls = 0
        self._watch: ModuleWatch | None = None
        self._forwards: list[RunnableBlock] = []
        self._constants: Any = None

    @contextmanager
    def in_stack(self) -> Iterator[None]:
        """Marks the stack's own forward, which calls each block on the output of the previous one."""
        call = self._call
        outer = call.begun, call.output
        call.begun, call.output = False, None
        try:
            yield
        finally:
            call.begun, call.output = outer

    def __call__(
        self, forward: RunnableBlock, hidden_states: Tensor, past_key_values: Any, inputs: BlockInputs
    ) -> Tensor | None:
        """The value that the called block returns to the stack, or None if the block has to run by itself.

        Args:
            forward: the forward of the called block. Apart from `hidden_states` all blocks get the same arguments.
        """
        call = self._call
        if call.begun:
            return hidden_states if hidden_states is call.output else None
        call.begun = True
        if type(hidden_states) is not Tensor or hidden_states.device.type not in DEVICE_TYPES:
            return None
        if any(
            type(tensor) is not Tensor or tensor.device != hidden_states.device
            for tensor in inputs
            if tensor is not None
        ):
            return None
        if hidden_states.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        if not is_unobserved() or nn.modules.module._has_any_global_hook() or not is_empty_cache(past_key_values):
            return None
        if not self._lock.acquire(blocking=False):
            return None
        try:
            call.output = self._run(forward, hidden_states, past_key_values, inputs)
        finally:
            self._lock.release()
        return call.output

    def at_once(self, hidden_states: Tensor, past_key_values: Any, inputs: BlockInputs) -> Tensor | None:
        """Output of the last block for this input of the first, or None if the stack has to call the blocks."""
        with self.in_stack():
            return self(self._forwards[0], hidden_states, past_key_values, inputs)

    def has_captured(self, batch: int, length: int) -> bool:
        """Whether there is a graph for this batch size and length, with or without a cache."""
        return any(work.state.hidden.shape[:-1] == (batch, length) for work in tuple(self._works.values()))

    def report_lines(self, what: str = "blocks") -> tuple[str, ...]:
        size = sum(work.state.bytes for work in self._works.values()) / 2**20
        kept = f"{len(self._works)} captured sizes, {size:.1f} MiB of static tensors"
        return (f"{what}: {kept}" + (f"; {self.note}" if self.note else ""),)

    def _run(self, forward: RunnableBlock, hidden: Tensor, past_key_values: Any, inputs: BlockInputs) -> Tensor | None:
        self._calls += 1
        shapes = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in (hidden, *inputs))
        key = (shapes, past_key_values is not None, forward.settings(), _settings())
        watch, work = self._watch, self._works.get(key)
        # Unchanged addresses make the graph safe to launch. The full check runs on the host while the GPU replays it.
        if work is not None and watch is not None and forward is work.forwards[0] and watch.is_in_place():
            output = self._replayed(work, hidden, past_key_values, inputs, watch)
            if output is not None:
                return output
            self._refresh(forward, hidden, inputs)
        elif not forward.can_run(hidden, inputs):
            return None
        elif watch is None or not watch.is_unchanged():
            self._refresh(forward, hidden, inputs)
        if self._watch is None or forward is not self._forwards[0]:
            return None
        work = self._captured(key, hidden, inputs, past_key_values is not None)
        if work is None:
            with self._captures.in_stream_order(hidden.device):
                return run_blocks(self._forwards, hidden, past_key_values, inputs, self._constants)
        return self._replayed(work, hidden, past_key_values, inputs)

    def _replayed(
        self,
        work: StackWork,
        hidden: Tensor,
        past_key_values: Any,
        inputs: BlockInputs,
        watch: ModuleWatch | None = None,
    ) -> Tensor | None:
        """Output of `work`; None if `watch` finds, while the work runs, that the modules have changed."""
        work.last_call, state = self._calls, work.state
        self._works.move_to_end(work.key)
        with self._captures.in_stream_order(hidden.device):
            state.load(hidden, inputs)
            work()
            if watch is not None and not watch.is_unchanged():
                return None
            if state.cache is not None:
                state.cache.fill(past_key_values)
            return state.output.clone()

    def _captured(self, key: Hashable, hidden: Tensor, inputs: BlockInputs, caches: bool) -> StackWork | None:
        """The captured work for a size, or None if the size is new, too large or cannot be captured."""
        # With more tokens the GPU is slower than the host launches kernels, so a graph gains nothing.
        if not self.cuda_graphs or _tokens(hidden) > tuned("stack_graph_max_tokens", hidden.device):
            return None
        if len(self._times_seen) >= _MOST_SIZES_COUNTED:
            self._times_seen.clear()
        self._times_seen[key] += 1
        if self._times_seen[key] <= _UNCAPTURED_CALLS:
            return None
        if len(self._works) >= _MOST_GRAPHS:
            oldest, work = next(iter(self._works.items()))
            if self._calls - work.last_call < _CALLS_KEPT:
                self.note = f"more than {_MOST_GRAPHS} sizes are in use; the others run without a CUDA graph"
                return None
            del self._works[oldest]
        work = StackWork(key, StackState(key, hidden, inputs, caches), self._forwards, self._constants)
        if hidden.is_cuda:
            with torch.inference_mode(False), torch.no_grad():
                self.note = self._captures.record(work, self._works.values(), "the blocks")
        if work.graph is None and hidden.is_cuda:
            # Tried again after this many calls.
            self._times_seen[key] = -_CALLS_KEPT
            return None
        self._works[key] = work
        return work

    def _refresh(self, forward: RunnableBlock, hidden: Tensor, inputs: BlockInputs) -> None:
        """Drops all graphs and records the current modules and weights."""
        # Another stream may still be replaying one of them.
        self._captures.join(hidden.device)
        self._works.clear()
        self._times_seen.clear()
        self._watch = self._watch_if_runnable(forward, hidden, inputs)

    def _watch_if_runnable(self, forward: RunnableBlock, hidden: Tensor, inputs: BlockInputs) -> ModuleWatch | None:
        """A watch over the stack, or None if some block cannot be run here. Sets `_forwards` and `_constants`."""
        container = getattr(self.stack, self.blocks)
        forwards: list[Any] = [vars(block).get("forward") for block in container.children()]
        parameters = list(container.parameters())
        # A wrapper around one of our forwards may copy its attributes, so types are compared too.
        if any(type(other) is not type(forward) or other.runner is not self for other in forwards):
            return None
        if not all(other.can_run(hidden, inputs) for other in forwards):
            return None
        if any(parameter.device != hidden.device for parameter in parameters):
            return None
        modules = modules_below(container)
        watch = ModuleWatch([self.stack, *modules], parameters, forward.read)
        # `watch` compares Parameters only and would miss a change of weights held elsewhere.
        if not watch.is_unchanged() or any(map(has_other_weights, modules)):
            return None
        self._forwards = forwards
        with self._captures.in_stream_order(hidden.device), torch.inference_mode(False), torch.no_grad():
            self._constants = forwards[0].constants(hidden)
        return watch


def _tokens(hidden: Tensor) -> int:
    return hidden.numel() // max(hidden.shape[-1], 1)


def _settings() -> Hashable:
    """Global settings of PyTorch that decide which kernels it launches."""
    cuda = torch.backends.cuda
    return (
        torch.get_float32_matmul_precision(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )
