"""DecodeRun: the steps of one call, queued one after another without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from fuseopt.generation.engine.graphs import StepWork
from fuseopt.generation.engine.state import DecodeState
from fuseopt.generation.engine.stop_flags import StopFlags
from fuseopt.generation.select.selection import Selection


class DecodeRun:
    """Decodes up to `max_steps` tokens a row, starting from the logits in the step's state.

    Args:
        work: one step, with a selection.
        input_ids: [rows, length] int64.
        pad: id that finished rows are given, [] int64, or None.
        max_steps: bound on the tokens a row.
        pending: the state holds no logits yet; the first step has to compute them.
        has_ids: the state already holds `input_ids`.

    Attributes:
        queued: how many steps have been queued.
        without_forward: how many of the first steps only select from logits that the prefill left: 0 or 1.
    """

    def __init__(
        self,
        work: StepWork,
        input_ids: Tensor,
        pad: Tensor | None,
        max_steps: int,
        *,
        pending: bool = False,
        has_ids: bool = False,
    ) -> None:
        assert work.selection is not None
        self.work, self.selection, self.state = work, work.selection, work.state
        self.max_steps, self.queued = max_steps, 0
        self.without_forward = 0 if pending else 1
        # Before `begin`, as the first kernel may read the random state while its predecessor still runs.
        self._random_state = None
        if self.selection.do_sample and self.state.device.type == "cuda":
            self._random_state = _RandomState(self.state, self.selection.offset_of_draw(self.state))
        self.selection.begin(self.state, input_ids, pad, has_ids)
        # The first step is always taken, so a flag is needed from the second on.
        self.flags = None
        if self.selection.may_end_early and max_steps > 1:
            self.flags = StopFlags(self.state.going, input_ids.shape[1], max_steps)

    def matches(self, state: DecodeState, selection: Selection, pad: Tensor | None, max_steps: int) -> bool:
        """Whether a run made with these arguments would queue the same steps."""
        return (
            self.state is state
            and self.max_steps == max_steps
            and self.selection.holds(selection)
            and (pad is None or state.load_pad.holds(pad))
        )

    def queue_next(self, limit: int | None = None) -> None:
        """Queues the next step, or the graph of several steps if that has no more than `limit`."""
        multi_step, count = self.work.multi_step, 1
        left = self.max_steps - self.queued if limit is None else limit
        if self.queued < self.without_forward:
            self.selection(self.state, self.state.logits, advance=False)
        elif multi_step is not None and multi_step.count <= left:
            multi_step()
            count = multi_step.count
        else:
            self.work()
        if self.flags is not None:
            self.flags.push(count)
        self.queued += count
        if self._random_state is not None:
            self._random_state.advance(self.queued)

    @property
    def is_over(self) -> bool:
        """Whether no step is left to queue, as far as the host knows without waiting."""
        return self.queued == self.max_steps or (self.flags is not None and self.flags.is_over())

    @property
    def known_valid(self) -> int:
        """How many of the queued steps count, as far as the host knows without waiting."""
        if self.flags is None:
            return self.queued
        return max(self.flags.read, min(self.queued, 1))

    def count_valid(self) -> int:
        """How many of the queued steps count; waits for them.

        Steps queued after all rows had finished do not. The random numbers that they drew are given back.
        """
        valid = self.queued if self.flags is None else self.flags.count_valid()
        self.rewind(valid)
        return valid

    def rewind(self, valid: int) -> None:
        """Gives back the random numbers that queued steps after the first `valid` have drawn."""
        if self._random_state is not None and valid < self.queued:
            self._random_state.rewind(valid / self.queued)


class _RandomState:
    """Offset of the device's default generator before a run, to give back what surplus steps have drawn.

    Args:
        offset_of_step: by how much a step advances the offset if its kernels draw; 0 if torch draws.
    """

    def __init__(self, state: DecodeState, offset_of_step: int) -> None:
        self.generator = torch.cuda.default_generators[state.device.index]
        self.offset, self.offset_of_step = self.generator.get_offset(), offset_of_step
        self.drawn: int | None = None
        if offset_of_step:
            state.load_random(self.generator)

    def advance(self, steps: int) -> None:
        """Sets the generator to its offset after `steps` steps from the beginning, whose kernels draw."""
        if self.offset_of_step:
            self.generator.set_offset(self.offset + steps * self.offset_of_step)

    def rewind(self, kept: float) -> None:
        """Keeps this fraction of what was drawn up to the first call; every step draws the same amount."""
        if self.drawn is None:
            self.drawn = self.generator.get_offset() - self.offset
        self.generator.set_offset(self.offset + round(self.drawn * kept))
