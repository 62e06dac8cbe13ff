"""StepGraphs: decode steps and prompts captured as CUDA graphs, and the static tensors they use, pooled and bounded."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from fuseopt.generation.engine.late_copies import STEPS_PER_COPY
from fuseopt.generation.engine.state import DecodeState
from fuseopt.generation.families.step_interface import DecodeStep
from fuseopt.generation.select.selection import Selection
from fuseopt.runtime.cuda_graphs import Captures, State, Work, stream_on
from fuseopt.runtime.memory import is_out_of_memory
from fuseopt.runtime.references import weak_attribute

if TYPE_CHECKING:
    from fuseopt.generation.prompt.prefix_cache import PrefixCache

_PROMPTS_PER_STEP = 2
# Steps in one graph. Fewer if an EOS token may end the call early, since surplus steps run for nothing.
_STEPS_PER_GRAPH, _STEPS_PER_GRAPH_WITH_EOS = 8, STEPS_PER_COPY
# A capture costs what the graph of several steps saves in some tens of calls, so it waits for the second call that
# finds the single step captured.
_CALLS_BEFORE_MULTI_STEP = 2
# The states of captured work may have this part of the device's memory.
_KEPT_PART = 8
# Keys of work that has run and may be captured on its next use.
_MAX_SEEN = 64
_S = TypeVar("_S", bound=State)
_R = TypeVar("_R")


class StepWork(Work[DecodeState]):
    """One decode step: the forward, the selection if there is one, and the advance to the next slot.

    Attributes:
        selection: the one that runs; a graph reads its tensors at their addresses.
        calls: how many calls of generate() have found the step captured.
        multi_step: several such steps in one graph; None until captured.
        may_capture_multi_step: False once a capture of `multi_step` has been tried.
    """

    def __init__(self, forward: DecodeStep, state: DecodeState, selection: Selection | None) -> None:
        super().__init__(_key(state, selection), state)
        self.forward, self.selection = forward, selection
        self.calls = 0
        self.multi_step: MultiStepWork | None = None
        self.may_capture_multi_step = True

    def run(self) -> None:
        end = self.forward(self.state)
        if self.selection is None:
            self.state.logits.copy_(end.logits())
            self.state.counters += 1
        else:
            self.selection.end(self.state, end)


class MultiStepWork(Work[DecodeState]):
    """`count` steps as one graph, in which each step's first kernel starts before the previous step has ended.

    References its step weakly, since the step holds it.

    Attributes:
        scores, logits: copies of the state's after each step, [rows, vocab] float32, if the selection keeps them. The
            next run overwrites them.
    """

    step = weak_attribute("step")

    def __init__(self, step: StepWork) -> None:
        may_end = step.selection is not None and step.selection.may_end_early
        self.step, self.count = step, _STEPS_PER_GRAPH_WITH_EOS if may_end else _STEPS_PER_GRAPH
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []
        super().__init__((step.key, self.count), step.state)

    def run(self) -> None:
        state, selection = self.state, self.step.selection
        self.scores, self.logits = [], []
        for _ in range(self.count):
            self.step.run()
            if selection is not None and selection.keep_scores:
                self.scores.append(state.scores.clone())
            if selection is not None and selection.keep_logits:
                self.logits.append(state.logits.clone())


def _key(state: DecodeState, selection: Selection | None) -> Hashable:
    return state.sizes, None if selection is None else selection.key


def _counted(steps: Collection[Any], prompts: Collection[Any]) -> str:
    """ "2 steps and 1 prompt", without those that there are none of."""
    counts = (len(steps), "step"), (len(prompts), "prompt")
    return " and ".join(f"{count} {what}{'s' * (count != 1)}" for count, what in counts if count)


class PromptWork(Work[_S]):
    """`forward` on the prompts in a state, run as `length` tokens a row, the last of which may be padding.

    Args:
        forward: takes state, length and whether tokens of the prompts are masked.
    """

    def __init__(self, forward: Callable[[_S, int, bool], None], state: _S, length: int, masked: bool) -> None:
        # The slot of the first token; None if the graph reads it from the device.
        start = state.start if isinstance(state, DecodeState) and not state.start_varies else None
        super().__init__((forward.__name__, state.sizes, length, masked, start), state)
        self.forward, self.length, self.masked = forward, length, masked

    def run(self) -> None:
        self.forward(self.state, self.length, self.masked)


class StepGraphs(Captures):
    """The captured steps and prompts of one model, with the states that they run on.

    The least recently used is evicted first. With the last step that uses a state, the prompts in that state go too.

    Args:
        max_graphs: how many captured steps are kept, and twice as many prompts, since a call of an encoder-decoder
            uses two; 0 disables capture.

    Attributes:
        prefixes: the prefix cache; None without one.
    """

    def __init__(self, max_graphs: int) -> None:
        super().__init__()
        self.max_graphs = max_graphs
        self.prefixes: PrefixCache | None = None
        self._steps: OrderedDict[Hashable, StepWork] = OrderedDict()
        self._prompts: OrderedDict[Hashable, PromptWork[Any]] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._side_stream: torch.cuda.Stream | None = None

    @property
    def steps(self) -> int:
        return len(self._steps)

    @property
    def prompts(self) -> int:
        return len(self._prompts)

    @property
    def bytes(self) -> int:
        """Size of the states, without the graphs' workspace."""
        return sum(state.bytes for state in {id(work.state): work.state for work in self._works()}.values())

    @staticmethod
    def most_bytes(device: torch.device) -> int:
        """How many bytes the states of captured work may have together; a larger one is kept alone."""
        if device.type == "cuda":
            return torch.cuda.get_device_properties(device).total_memory // _KEPT_PART
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _KEPT_PART

    def report_lines(self) -> Iterator[str]:
        """What is kept from call to call, and for which sizes; nothing if nothing is."""
        if self.prefixes is not None:
            yield from self.prefixes.report_lines()
        states = list({id(work.state): work.state for work in self._works()}.values())
        if not states:
            return
        how = "captured as CUDA graphs" if states[0].device.type == "cuda" else "recorded"
        kept = _counted(self._steps.values(), self._prompts.values())
        yield f"{kept} {how}, {self.bytes / 2**20:.1f} MiB of static tensors"
        for state in states:
            if isinstance(state, DecodeState):
                works = (
                    [work for work in each.values() if work.state is state] for each in (self._steps, self._prompts)
                )
                yield f"a cache of {state.cache_size}, for {_counted(*works)}"

    def clear(self) -> None:
        """Waits for queued work and drops everything that is captured, and the prefix cache."""
        self.drain()
        for kept in (self._steps, self._prompts, self._seen, *(() if self.prefixes is None else (self.prefixes,))):
            kept.clear()

    def give_back(self) -> None:
        """`clear` after memory has run out; the next prompt does not use the prefix cache."""
        if self.prefixes is not None:
            self.drain()
            self.prefixes.give_back()
        self.clear()

    def state(self, sizes: Hashable, make: Callable[[], _S]) -> _S:
        """The state of these sizes that captured work uses, or a new one from `make`."""
        kept = (work.state for work in self._works() if work.state.sizes == sizes)
        return next(kept, None) or self.retried(make)

    def retried(self, function: Callable[[], _R]) -> _R:
        """Calls `function`; if memory runs out, drops everything that is captured and calls it again."""
        try:
            return function()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        self.give_back()
        return function()

    def step(self, forward: DecodeStep, state: DecodeState, selection: Selection | None) -> StepWork:
        """The captured step for this state and kind of selection, with the selection's values loaded; or a new step."""
        new = StepWork(forward, state, selection)
        step = self._steps.get(new.key, new)
        if step is not new:
            self._steps.move_to_end(step.key)
            if selection is not None and step.selection is not None:
                step.selection.load(selection)
        return step

    def holds(self, state: DecodeState, selection: Selection) -> bool:
        """Whether a captured step already has the values of this selection, so that `step` would load nothing."""
        step = self._steps.get(_key(state, selection))
        return step is not None and step.selection is not None and step.selection.holds(selection)

    def captured(self, key: Hashable) -> StepWork | None:
        """The captured step of this key; None if it has been evicted."""
        return self._steps.get(key)

    def capture(self, step: StepWork) -> str:
        """Captures a step and keeps it; returns why it could not be captured, empty if it was."""
        if step.selection is not None and step.graph is None:
            reason = step.selection.not_captured
            if reason and step.state.device.type == "cuda":
                return f"the step ran eagerly: {reason}"
            step.selection.own_tensors()
        return self._capture(step, self._steps, self.max_graphs, "the step")

    def capture_multi_step(self, step: StepWork, limit: int) -> str:
        """Captures several steps as one graph, from the second call on that finds `step` captured.

        Args:
            limit: steps that this call takes; fewer than one such graph has leave it uncaptured.

        Returns:
            why the capture failed, empty if it succeeded or was not tried.
        """
        step.calls += 1
        multi_step = MultiStepWork(step)
        too_soon = step.calls < _CALLS_BEFORE_MULTI_STEP or multi_step.count > limit
        if too_soon or not step.may_capture_multi_step or step.state.device.type != "cuda":
            return ""
        step.may_capture_multi_step = False
        note = self.record(multi_step, self._works(), "a graph of several steps")
        if not note:
            step.multi_step = multi_step
        return note

    def run_prompt(self, prompt: PromptWork[Any]) -> str:
        """Runs a prompt: replays its graph, or captures it first if such a prompt has run before.

        Returns:
            why it could not be captured, empty if it was or the capture was not tried.
        """
        note, key = "", prompt.key
        if key in self._prompts:
            self._prompts.move_to_end(key)
            prompt = self._prompts[key]
        elif self.has_seen(prompt):
            note = self._capture(prompt, self._prompts, _PROMPTS_PER_STEP * self.max_graphs, "the prompt")
        self.mark_seen(prompt)
        prompt()
        return note

    def has_seen(self, work: Work[Any]) -> bool:
        """Whether such work has run before."""
        return work.key in self._seen

    def mark_seen(self, work: Work[Any]) -> None:
        """Says that the work has run. It is captured on its second use, so that no first call pays for a capture."""
        self._seen[work.key] = None
        self._seen.move_to_end(work.key)
        if len(self._seen) > _MAX_SEEN:
            self._seen.popitem(last=False)

    def _works(self) -> Iterator[Work[Any]]:
        yield from self._steps.values()
        yield from self._prompts.values()

    def _capture(self, work: Any, kept: OrderedDict[Hashable, Any], limit: int, what: str) -> str:
        device = work.state.device
        if work.graph is not None or not limit or not self.can_capture(device):
            return ""
        if len(kept) >= limit:
            self.drain()
        while len(kept) >= limit:
            _, oldest = kept.popitem(last=False)
            if kept is self._steps:
                self._drop_prompts_in(oldest.state)
        self._bound_bytes(work.state)
        note = self.record(work, self._works(), what)
        if not note:
            kept[work.key] = work
        return note

    def _bound_bytes(self, state: State) -> None:
        """Drops the least recently used states until the kept ones and `state` together have few enough bytes."""
        # The last used first.
        others = {id(work.state): work.state for work in reversed([*self._works()]) if work.state is not state}
        while others and state.bytes + sum(other.bytes for other in others.values()) > self.most_bytes(state.device):
            self.drain()
            _, oldest = others.popitem()
            for works in (self._steps, self._prompts):
                for key in [key for key, work in works.items() if work.state is oldest]:
                    del works[key]

    def _drop_prompts_in(self, state: DecodeState) -> None:
        """Drops the prompts of a state that no step uses any more, since its cache may be large."""
        if not any(step.state is state for step in self._steps.values()):
            for key in [key for key, prompt in self._prompts.items() if prompt.state is state]:
                del self._prompts[key]

    @contextmanager
    def on_side_stream(self, device: torch.device) -> Iterator[None]:
        """Queues the block's work after all that is queued, on a stream of its own; `join` waits for it."""
        if device.type != "cuda":
            yield
            return
        side = self._side_stream = stream_on(device, self._side_stream)
        side.wait_stream(torch.cuda.current_stream(device.index))
        # `with side` takes the host less time than torch.cuda.stream(side).
        with side, self.in_order_on(side):
            yield
