"""All blocks of a stack as one CUDA graph, replayed while the stack's own forward calls them one by one."""

from __future__ import annotations

import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fuseopt.modules.cuda_graphs import Captures, Work
from fuseopt.modules.structure import Watch, modules_below
from fuseopt.ops.library import is_unobserved

DEVICE_TYPES = ("cuda",)
"""Where it takes the host long to launch kernels one by one."""

# Of more tokens the GPU takes longer than the host does to launch kernels.
_MOST_TOKENS = 16384
_MOST_GRAPHS = 8
# A size is captured when it comes for the third time, and in place of one that has not come in so many calls.
_MET_BEFORE = 2
_SIZES_MET = 256
_CALLS_KEPT = 64


class ChainedForward(Protocol):
    """The forward of a block that a chain can run."""

    chain: BlockChain | None

    def can_chain(self, hidden_states: Tensor) -> bool:
        """Whether `run` computes what a call of the block does, and can be captured."""

    def settings(self) -> Hashable:
        """What `run` depends on beside modules and their weights."""

    def run(
        self, hidden_states: Tensor, added: Tensor | None, past_key_values: Any, attention_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What a call does with the sum of the first two, as two addends."""


class ChainState:
    """The static tensors of one size.

    Attributes:
        hidden: [batch, length, hidden], what goes into the first block.
        mask: what the attentions add to scores, or None.
        output: [batch, length, hidden], what comes out of the last.
        keys_values: of each block, where a cache asks for them: keys and values [batch, heads, length, head_dim], and
            where in a cache they belong.
    """

    def __init__(self, sizes: Hashable, hidden: Tensor, mask: Tensor | None, caches: bool) -> None:
        self.sizes, self.device = sizes, hidden.device
        # A tensor made in inference mode could not be written to outside it later.
        with torch.inference_mode(False):
            self.hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
            self.mask = None if mask is None else torch.empty(mask.shape, dtype=hidden.dtype, device=mask.device)
        self.output = self.hidden
        self.keys_values: list[tuple[Tensor, Tensor, int]] | None = [] if caches else None

    @property
    def bytes(self) -> int:
        return self.hidden.nbytes + (0 if self.mask is None else self.mask.nbytes)

    def load(self, hidden: Tensor, mask: Tensor | None) -> None:
        self.hidden.copy_(hidden)
        if self.mask is None or mask is None:
            return
        if mask.dtype is torch.bool:
            # As numbers, since PyTorch would turn it into numbers in every layer.
            self.mask.zero_().masked_fill_(~mask, -torch.inf)
        else:
            self.mask.copy_(mask)

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Passes for an empty cache of transformers'."""
        assert self.keys_values is not None
        self.keys_values.append((keys, values, layer))
        return keys, values


class ChainWork(Work[ChainState]):
    """All blocks, one after the other, on the tensors of a state."""

    def __init__(self, key: Hashable, state: ChainState, forwards: Sequence[ChainedForward]) -> None:
        super().__init__(key, state)
        self.forwards, self.last_call = forwards, 0

    def run(self) -> None:
        state = self.state
        hidden, added, cache = state.hidden, None, None
        if state.keys_values is not None:
            state.keys_values, cache = [], state
        for forward in self.forwards:
            hidden, added = forward.run(hidden, added, cache, state.mask)
        state.output = hidden if added is None else hidden + added


class _Call(threading.local):
    """Of a stack's own forward that runs in this thread: whether its first block has come, and what the chain gave."""

    depth = 0
    begun = False
    output: Tensor | None = None


class BlockChain:
    """Runs the blocks of a stack when the first one is called by the stack; the others hand on what came out.

    A size, which is shape, dtype, mask and whether there is a cache to fill, is captured as a CUDA graph when it comes
    for the third time; at most 8 are kept. Weights are read where they are. They, the modules and their hooks are
    looked at in every call; all graphs are dropped when anything is another.

    Copies and pickles hold no graphs.

    Args:
        stack: a module that calls the blocks in its forward.
        blocks: the name of its ModuleList that they are in.
    """

    def __init__(self, stack: nn.Module, blocks: str) -> None:
        self.__setstate__({"stack": stack, "blocks": blocks})

    def __getstate__(self) -> dict[str, Any]:
        return {"stack": self.stack, "blocks": self.blocks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.stack: nn.Module = state["stack"]
        self.blocks: str = state["blocks"]
        self.note = ""
        self._call = _Call()
        self._lock = threading.Lock()
        self._captures = Captures()
        self._works: OrderedDict[Hashable, ChainWork] = OrderedDict()
        self._met: Counter[Hashable] = Counter()
        self._calls = 0
        self._watch: Watch | None = None
        self._forwards: list[ChainedForward] = []

    @contextmanager
    def in_stack(self) -> Iterator[None]:
        """The stack's own forward, which calls every block on what the one before has returned."""
        call = self._call
        outer = call.depth, call.begun, call.output
        call.depth, call.begun, call.output = call.depth + 1, False, None
        try:
            yield
        finally:
            call.depth, call.begun, call.output = outer

    def __call__(
        self, forward: ChainedForward, hidden_states: Tensor, past_key_values: Any, attention_mask: Tensor | None
    ) -> Tensor | None:
        """What a call of this block by the stack is to return, or None where the block has to run.

        Args:
            forward: of one of the blocks, which are called with the same arguments but for the first.
        """
        call = self._call
        if not call.depth or call.begun:
            return hidden_states if hidden_states is call.output else None
        call.begun = True
        if type(hidden_states) is not Tensor or hidden_states.device.type not in DEVICE_TYPES:
            return None
        if hidden_states.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        if not is_unobserved() or nn.modules.module._has_any_global_hook() or not _is_empty_cache(past_key_values):
            return None
        if not self._lock.acquire(blocking=False):
            return None
        try:
            call.output = self._run(forward, hidden_states, past_key_values, attention_mask)
        finally:
            self._lock.release()
        return call.output

    def at_once(self, hidden_states: Tensor, past_key_values: Any, attention_mask: Tensor | None) -> Tensor | None:
        """What the last block returns for what goes into the first, or None where the blocks have to be called."""
        with self.in_stack():
            return self(self._forwards[0], hidden_states, past_key_values, attention_mask)

    def has_captured(self, batch: int, length: int) -> bool:
        """Whether there is a graph for so many tokens, of whatever kind."""
        return any(work.state.hidden.shape[:-1] == (batch, length) for work in tuple(self._works.values()))

    def report_lines(self) -> tuple[str, ...]:
        size = sum(work.state.bytes for work in self._works.values()) / 2**20
        kept = f"{len(self._works)} captured sizes, {size:.1f} MiB of static tensors"
        return (f"blocks: {kept}" + (f"; {self.note}" if self.note else ""),)

    def _run(self, forward: ChainedForward, hidden: Tensor, past_key_values: Any, mask: Tensor | None) -> Tensor | None:
        self._calls += 1
        key = (
            hidden.shape,
            hidden.dtype,
            None if mask is None else (mask.shape, mask.dtype),
            past_key_values is not None,
            forward.settings(),
            _settings(),
        )
        watch, work = self._watch, self._works.get(key)
        # With weights where they were a graph can run, and the closer look is taken while it does.
        in_place = work is not None and watch is not None and watch.is_in_place()
        if not in_place:
            if not forward.can_chain(hidden):
                return None
            if watch is None or not watch.is_unchanged():
                self._look_anew(forward, hidden)
            if self._watch is None or _tokens(hidden) > _MOST_TOKENS:
                return None
            work = self._works.get(key) or self._captured(key, hidden, mask, past_key_values is not None)
        if work is None or forward is not work.forwards[0]:
            return None
        work.last_call = self._calls
        self._works.move_to_end(key)
        state = work.state
        with self._captures.in_stream_order(hidden.device):
            state.load(hidden, mask)
            work()
            if in_place and watch is not None and not watch.is_unchanged():
                self._look_anew(forward, hidden)
                self._met[key] += 1
                return None
            for keys_values in state.keys_values or ():
                # Which copies them.
                past_key_values.update(*keys_values)
            return state.output.clone()

    def _captured(self, key: Hashable, hidden: Tensor, mask: Tensor | None, caches: bool) -> ChainWork | None:
        """The work of a size that has come often enough, unless it cannot be captured."""
        if len(self._met) >= _SIZES_MET:
            self._met.clear()
        self._met[key] += 1
        if self._met[key] <= _MET_BEFORE:
            return None
        if len(self._works) >= _MOST_GRAPHS:
            oldest, work = next(iter(self._works.items()))
            if self._calls - work.last_call < _CALLS_KEPT:
                self.note = f"more than {_MOST_GRAPHS} sizes take turns, and those beyond run block by block"
                return None
            del self._works[oldest]
        work = ChainWork(key, ChainState(key, hidden, mask, caches), self._forwards)
        if hidden.is_cuda:
            with torch.inference_mode(False), torch.no_grad():
                self.note = self._captures.record(work, self._works.values(), "the blocks")
        if work.graph is None and hidden.is_cuda:
            # Not tried again for a while.
            self._met[key] = -_CALLS_KEPT
            return None
        self._works[key] = work
        return work

    def _look_anew(self, forward: ChainedForward, hidden: Tensor) -> None:
        """Takes note of how the blocks are, and drops the graphs of how they were."""
        # What is dropped may be in use on another stream.
        self._captures.join(hidden.device)
        self._works.clear()
        self._met.clear()
        self._watch = self._look(forward, hidden)

    def _look(self, forward: ChainedForward, hidden: Tensor) -> Watch | None:
        container = getattr(self.stack, self.blocks)
        forwards: list[Any] = [vars(block).get("forward") for block in container.children()]
        parameters = list(container.parameters())
        # What has been wrapped around one of ours may have its attributes.
        if any(type(other) is not type(forward) or other.chain is not self for other in forwards):
            return None
        if not all(other.can_chain(hidden) for other in forwards):
            return None
        if any(parameter.device != hidden.device for parameter in parameters):
            return None
        watch = Watch([self.stack, *modules_below(container)], parameters)
        self._forwards = forwards
        return watch if watch.is_unchanged() else None


def _is_empty_cache(cache: Any) -> bool:
    """Whether it is none, or transformers' plain cache without a token, which copies what it is given."""
    if cache is None:
        return True
    caches = sys.modules["transformers.cache_utils"]
    return (
        type(cache) is caches.DynamicCache
        and not cache.offloading
        and all(type(layer) is caches.DynamicLayer for layer in cache.layers)
        and cache.get_seq_length() == 0
    )


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
