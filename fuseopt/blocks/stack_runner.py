"""All blocks of a stack at once, while the stack's own forward calls them one by one: eagerly, or as one CUDA graph."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fuseopt.blocks.kept_cache import is_empty_cache
from fuseopt.blocks.stack_work import ChainedForward, ChainState, ChainWork, Inputs, passed
from fuseopt.ops.library import is_unobserved
from fuseopt.runtime.cuda_graphs import Captures
from fuseopt.runtime.module_watch import CONSTANTS, Watch, is_without_parameters, modules_below
from fuseopt.runtime.references import weak_attribute

DEVICE_TYPES = ("cuda",)
"""Where it takes the host long to launch kernels one by one."""

# Of more tokens the GPU takes longer than the host does to launch kernels.
_MOST_TOKENS = 16384
_MOST_GRAPHS = 8
# A size is captured when it comes for the third time, and in place of one that has not come in so many calls.
_MET_BEFORE = 2
_SIZES_MET = 256
_CALLS_KEPT = 64


class _Call(threading.local):
    """Of a stack's own forward that runs in this thread: whether its first block has come, and what the chain gave."""

    begun = True
    output: Tensor | None = None


class BlockChain:
    """Runs the blocks of a stack when the first one is called by the stack; the others hand on what came out.

    A size, which is the shapes and dtypes of all that goes in and whether there is a cache to fill, is captured as a
    CUDA graph when it comes for the third time; at most 8 are kept. Others run as they are. Weights are read where they
    are. They, the modules and their hooks are looked at in every call; all graphs are dropped when anything is another.

    Copies and pickles hold no graphs.

    Args:
        stack: a module that calls the blocks in its forward.
        blocks: the name of its ModuleList that they are in.
        cuda_graphs: whether anything is captured.
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
        self._works: OrderedDict[Hashable, ChainWork] = OrderedDict()
        self._met: Counter[Hashable] = Counter()
        self._calls = 0
        self._watch: Watch | None = None
        self._forwards: list[ChainedForward] = []
        self._constants: Any = None

    @contextmanager
    def in_stack(self) -> Iterator[None]:
        """The stack's own forward, which calls every block on what the one before has returned."""
        call = self._call
        outer = call.begun, call.output
        call.begun, call.output = False, None
        try:
            yield
        finally:
            call.begun, call.output = outer

    def __call__(
        self, forward: ChainedForward, hidden_states: Tensor, past_key_values: Any, inputs: Inputs
    ) -> Tensor | None:
        """What a call of this block by the stack is to return, or None where the block has to run.

        Args:
            forward: of one of the blocks, which are called with the same arguments but for the first.
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

    def at_once(self, hidden_states: Tensor, past_key_values: Any, inputs: Inputs) -> Tensor | None:
        """What the last block returns for what goes into the first, or None where the blocks have to be called."""
        with self.in_stack():
            return self(self._forwards[0], hidden_states, past_key_values, inputs)

    def has_captured(self, batch: int, length: int) -> bool:
        """Whether there is a graph for so many tokens, of whatever kind."""
        return any(work.state.hidden.shape[:-1] == (batch, length) for work in tuple(self._works.values()))

    def report_lines(self, what: str = "blocks") -> tuple[str, ...]:
        size = sum(work.state.bytes for work in self._works.values()) / 2**20
        kept = f"{len(self._works)} captured sizes, {size:.1f} MiB of static tensors"
        return (f"{what}: {kept}" + (f"; {self.note}" if self.note else ""),)

    def _run(self, forward: ChainedForward, hidden: Tensor, past_key_values: Any, inputs: Inputs) -> Tensor | None:
        self._calls += 1
        shapes = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in (hidden, *inputs))
        key = (shapes, past_key_values is not None, forward.settings(), _settings())
        watch, work = self._watch, self._works.get(key)
        # With weights where they were a graph can run, and the closer look is taken while it does.
        if work is not None and watch is not None and forward is work.forwards[0] and watch.is_in_place():
            output = self._replayed(work, hidden, past_key_values, inputs, watch)
            if output is not None:
                return output
            self._look_anew(forward, hidden, inputs)
        elif not forward.can_chain(hidden, inputs):
            return None
        elif watch is None or not watch.is_unchanged():
            self._look_anew(forward, hidden, inputs)
        if self._watch is None or forward is not self._forwards[0]:
            return None
        work = self._captured(key, hidden, inputs, past_key_values is not None)
        if work is None:
            with self._captures.in_stream_order(hidden.device):
                return passed(self._forwards, hidden, past_key_values, inputs, self._constants)
        return self._replayed(work, hidden, past_key_values, inputs)

    def _replayed(
        self, work: ChainWork, hidden: Tensor, past_key_values: Any, inputs: Inputs, watch: Watch | None = None
    ) -> Tensor | None:
        """What a work gives, or None where a look at `watch` meanwhile finds that it is void."""
        work.last_call, state = self._calls, work.state
        self._works.move_to_end(work.key)
        with self._captures.in_stream_order(hidden.device):
            state.load(hidden, inputs)
            work()
            if watch is not None and not watch.is_unchanged():
                return None
            if state.kept is not None:
                state.kept.fill(past_key_values)
            return state.output.clone()

    def _captured(self, key: Hashable, hidden: Tensor, inputs: Inputs, caches: bool) -> ChainWork | None:
        """The work of a size that has come often enough, unless it cannot be captured."""
        if not self.cuda_graphs or _tokens(hidden) > _MOST_TOKENS:
            return None
        if len(self._met) >= _SIZES_MET:
            self._met.clear()
        self._met[key] += 1
        if self._met[key] <= _MET_BEFORE:
            return None
        if len(self._works) >= _MOST_GRAPHS:
            oldest, work = next(iter(self._works.items()))
            if self._calls - work.last_call < _CALLS_KEPT:
                self.note = f"more than {_MOST_GRAPHS} sizes take turns, and those beyond are not captured"
                return None
            del self._works[oldest]
        work = ChainWork(key, ChainState(key, hidden, inputs, caches), self._forwards, self._constants)
        if hidden.is_cuda:
            with torch.inference_mode(False), torch.no_grad():
                self.note = self._captures.record(work, self._works.values(), "the blocks")
        if work.graph is None and hidden.is_cuda:
            # Not tried again for a while.
            self._met[key] = -_CALLS_KEPT
            return None
        self._works[key] = work
        return work

    def _look_anew(self, forward: ChainedForward, hidden: Tensor, inputs: Inputs) -> None:
        """Takes note of how the blocks are, and drops the graphs of how they were."""
        # What is dropped may be in use on another stream.
        self._captures.join(hidden.device)
        self._works.clear()
        self._met.clear()
        self._watch = self._look(forward, hidden, inputs)

    def _look(self, forward: ChainedForward, hidden: Tensor, inputs: Inputs) -> Watch | None:
        container = getattr(self.stack, self.blocks)
        forwards: list[Any] = [vars(block).get("forward") for block in container.children()]
        parameters = list(container.parameters())
        # What has been wrapped around one of ours may have its attributes.
        if any(type(other) is not type(forward) or other.chain is not self for other in forwards):
            return None
        if not all(other.can_chain(hidden, inputs) for other in forwards):
            return None
        if any(parameter.device != hidden.device for parameter in parameters):
            return None
        modules = modules_below(container)
        watch = Watch([self.stack, *modules], parameters, (*CONSTANTS, *forward.read))
        # `watch` compares parameters only, so it would miss a change of other weights.
        if not watch.is_unchanged() or any(map(is_without_parameters, modules)):
            return None
        self._forwards = forwards
        with self._captures.in_stream_order(hidden.device), torch.inference_mode(False), torch.no_grad():
            self._constants = forwards[0].constants(hidden)
        return watch


def _tokens(hidden: Tensor) -> int:
    return hidden.numel() // max(hidden.shape[-1], 1)


def _settings() -> Hashable:
    """What decides, beside the tensors, which kernels PyTorch launches."""
    cuda = torch.backends.cuda
    return (
        torch.get_float32_matmul_precision(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )
