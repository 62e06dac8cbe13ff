"""StepGraphs: decode steps and prompts captured as CUDA graphs, and the static tensors they use, pooled and bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from fuseopt.generation.engine.state import DecodeState
from fuseopt.generation.engine.stop_flags import STEPS_A_COPY
from fuseopt.generation.families.step_interface import DecodeStep
from fuseopt.generation.select.selection import Selection
from fuseopt.runtime.cuda_graphs import Captures, State, Work, stream_on
from fuseopt.runtime.references import weak_attribute

_PROMPTS_A_STEP = 2
# As one; fewer where a call may end early, since all that are queued then run in vain.
_STEPS_TOGETHER, _STEPS_THAT_MAY_END = 8, STEPS_A_COPY
# A capture takes what it gains in some tens of calls, so the first to find a captured step leaves it at that.
_CALLS_BEFORE_SEVERAL = 2
# Of how many steps and prompts it is known that they have run.
_MET = 64
_S = TypeVar("_S", bound=State)


class Step(Work[DecodeState]):
    """One decode step, which is the forward, the selection if there is one, and the move to the next slot.

    `selection` is the one that runs: its tensors are at the addresses that a graph reads. `calls`: that found it
    captured. `several`: a few such steps, where that has been captured; `may_be_several` until it has been tried.
    """

    def __init__(self, forward: DecodeStep, state: DecodeState, selection: Selection | None) -> None:
        super().__init__(_key(state, selection), state)
        self.forward, self.selection = forward, selection
        self.calls = 0
        self.several: Several | None = None
        self.may_be_several = True

    def run(self) -> None:
        end = self.forward(self.state)
        if self.selection is None:
            self.state.logits.copy_(end.logits())
            self.state.counters += 1
        else:
            self.selection.end(self.state, end)


class Several(Work[DecodeState]):
    """`count` steps, of which all but the first start before the previous one has ended.

    Refers weakly to its step, which holds it.
    """

    step = weak_attribute("step")

    def __init__(self, step: Step) -> None:
        may_end = step.selection is not None and step.selection.may_end_early
        self.step, self.count = step, _STEPS_THAT_MAY_END if may_end else _STEPS_TOGETHER
        super().__init__((step.key, self.count), step.state)

    def run(self) -> None:
        try:
            for i in range(self.count):
                self.state.steps_overlap = i > 0
                self.step.run()
        finally:
            self.state.steps_overlap = False


def _key(state: DecodeState, selection: Selection | None) -> Hashable:
    return state.sizes, None if selection is None else selection.key


class Prompt(Work[_S]):
    """What `forward` does with the prompts in a state, taken as `length` tokens a row, of which some may be padding."""

    def __init__(self, forward: Callable[[_S, int, bool], None], state: _S, length: int, masked: bool) -> None:
        super().__init__((forward.__name__, state.sizes, length, masked), state)
        self.forward, self.length, self.masked = forward, length, masked

    def run(self) -> None:
        self.forward(self.state, self.length, self.masked)


class StepGraphs(Captures):
    """A model's captured steps and prompts, and their states: what was used longest ago goes first, and with the last
    step that uses a state the prompts that do.

    Args:
        max_graphs: how many captured steps are kept, and twice as many prompts, since an encoder's takes two; 0 for
            none.
    """

    def __init__(self, max_graphs: int) -> None:
        super().__init__()
        self.max_graphs = max_graphs
        self._steps: OrderedDict[Hashable, Step] = OrderedDict()
        self._prompts: OrderedDict[Hashable, Prompt[Any]] = OrderedDict()
        self._met: OrderedDict[Hashable, None] = OrderedDict()
        self._side_stream: torch.cuda.Stream | None = None

    @property
    def steps(self) -> int:
        return len(self._steps)

    @property
    def prompts(self) -> int:
        return len(self._prompts)

    @property
    def bytes(self) -> int:
        """What the states take; the graphs' own workspace comes on top."""
        return sum(state.bytes for state in {id(work.state): work.state for work in self._works()}.values())

    def clear(self) -> None:
        self.drain()
        for kept in (self._steps, self._prompts, self._met):
            kept.clear()

    def state(self, sizes: Hashable, make: Callable[[], _S]) -> _S:
        """The state of these sizes that something captured has, or a new one."""
        kept = (work.state for work in self._works() if work.state.sizes == sizes)
        return next(kept, None) or make()

    def step(self, forward: DecodeStep, state: DecodeState, selection: Selection | None) -> Step:
        """The captured step that does this, with the selection's values loaded into it, or a new one."""
        new = Step(forward, state, selection)
        step = self._steps.get(new.key, new)
        if step is not new:
            self._steps.move_to_end(step.key)
            if selection is not None and step.selection is not None:
                step.selection.load(selection)
        return step

    def holds(self, state: DecodeState, selection: Selection) -> bool:
        """Whether a step is captured that `step` would have nothing to load into."""
        step = self._steps.get(_key(state, selection))
        return step is not None and step.selection is not None and step.selection.holds(selection)

    def captured(self, key: Hashable) -> Step | None:
        """The step of this key, if it is captured and has not gone since."""
        return self._steps.get(key)

    def capture(self, step: Step) -> str:
        """Captures a step on a GPU and keeps it; returns why it could not be done, or nothing."""
        if step.selection is not None and step.graph is None:
            reason = step.selection.not_captured
            if reason and step.state.device.type == "cuda":
                return f"the step ran eagerly: {reason}"
            step.selection.own_tensors()
        return self._capture(step, self._steps, self.max_graphs, "the step")

    def capture_several(self, step: Step, most: int) -> str:
        """Captures a few steps as one, if these are at most `most`, of a captured step that calls keep finding.

        Returns:
            why that could not be done, and they run one by one, or nothing.
        """
        step.calls += 1
        several = Several(step)
        too_soon = step.calls < _CALLS_BEFORE_SEVERAL or several.count > most
        if too_soon or not step.may_be_several or step.state.device.type != "cuda":
            return ""
        step.may_be_several = False
        note = self.record(several, self._works(), "a graph of several steps")
        if not note:
            step.several = several
        return note

    def run_prompt(self, prompt: Prompt[Any]) -> str:
        """Runs what is captured of it, captures it first if it has run before.

        Returns:
            why it could not be captured, or nothing.
        """
        note, key = "", prompt.key
        if key in self._prompts:
            self._prompts.move_to_end(key)
            prompt = self._prompts[key]
        elif self.has_met(prompt):
            note = self._capture(prompt, self._prompts, _PROMPTS_A_STEP * self.max_graphs, "the prompt")
        self.meet(prompt)
        prompt()
        return note

    def has_met(self, work: Work[Any]) -> bool:
        return work.key in self._met

    def meet(self, work: Work[Any]) -> None:
        """Lets it be captured the next time, so that no first call takes longer."""
        self._met[work.key] = None
        self._met.move_to_end(work.key)
        if len(self._met) > _MET:
            self._met.popitem(last=False)

    def _works(self) -> Iterator[Work[Any]]:
        yield from self._steps.values()
        yield from self._prompts.values()

    def _capture(self, work: Any, kept: OrderedDict[Hashable, Any], most: int, what: str) -> str:
        device = work.state.device
        if work.graph is not None or device.type != "cuda" or not most:
            return ""
        if len(kept) >= most:
            self.drain()
        while len(kept) >= most:
            _, oldest = kept.popitem(last=False)
            if kept is self._steps:
                self._forget_prompts_in(oldest.state)
        note = self.record(work, self._works(), what)
        if not note:
            kept[work.key] = work
        return note

    def _forget_prompts_in(self, state: DecodeState) -> None:
        """Of a state that no step uses any more: its cache, which may be large, would be kept for them alone."""
        if not any(step.state is state for step in self._steps.values()):
            for key in [key for key, prompt in self._prompts.items() if prompt.state is state]:
                del self._prompts[key]

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        """Queues what happens inside behind all that has been queued, but on a stream that others need not wait for."""
        if device.type != "cuda":
            yield
            return
        side = self._side_stream = stream_on(device, self._side_stream)
        side.wait_stream(torch.cuda.current_stream(device.index))
        # Of the ways to make it the current stream the one that takes least time.
        with side, self.in_order_on(side):
            yield
