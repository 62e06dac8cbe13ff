"""DecodeRun: the steps of one call, queued one after the other without a wait for any of them."""

from __future__ import annotations

import torch
from torch import Tensor

from fuseopt.generation.engine.graphs import Step
from fuseopt.generation.engine.state import DecodeState
from fuseopt.generation.engine.stop_flags import StopFlags
from fuseopt.generation.select.selection import Selection


class DecodeRun:
    """Decodes up to `steps` tokens a row, from the logits in the step's state on.

    Args:
        step: with a selection.
        input_ids: [rows, length] int64.
        pad: the id that finished rows are given, [] int64, or None.
        steps: how many there are at most.
        pending: the state has no logits yet, but is ready for a step that makes them.
        has_ids: the state has `input_ids`.
    """

    def __init__(
        self,
        step: Step,
        input_ids: Tensor,
        pad: Tensor | None,
        steps: int,
        *,
        pending: bool = False,
        has_ids: bool = False,
    ) -> None:
        assert step.selection is not None
        self.step, self.selection, self.state = step, step.selection, step.state
        self.steps, self.taken = steps, 0
        self.begins = 0 if pending else 1
        self.selection.begin(self.state, input_ids, pad, has_ids)
        # There is a first step in any case.
        self.flags = None
        if self.selection.may_end_early and steps > 1:
            self.flags = StopFlags(self.state.going, input_ids.shape[1], steps)
        self._random_state = _RandomState(self.state.ids.device) if self.selection.do_sample else None

    def serves(self, state: DecodeState, selection: Selection, pad: Tensor | None, steps: int) -> bool:
        """Whether a run with all this would be the same."""
        return (
            self.state is state
            and self.steps == steps
            and self.selection.holds(selection)
            and (pad is None or state.load_pad.holds(pad))
        )

    def take(self, most: int | None = None) -> None:
        """Queues the next step, or the next few as one, up to `most`."""
        several, count = self.step.several, 1
        left = self.steps - self.taken if most is None else most
        if self.taken < self.begins:
            self.selection(self.state, self.state.logits, advance=False)
        elif several is not None and several.count <= left:
            several()
            count = several.count
        else:
            self.step()
        if self.flags is not None:
            self.flags.push(count)
        self.taken += count

    @property
    def is_over(self) -> bool:
        """Whether no step is left, as far as can be told without a wait."""
        return self.taken == self.steps or (self.flags is not None and self.flags.is_over())

    def count(self) -> int:
        """How many of the steps taken count; waits for them. What the others have drawn is given back."""
        counted = self.taken if self.flags is None else self.flags.steps()
        if self._random_state is not None and counted < self.taken:
            self._random_state.rewind(counted / self.taken)
        return counted


class _RandomState:
    """The default generator's state, to be put where it would be had the steps in vain not drawn."""

    def __init__(self, device: torch.device) -> None:
        self.generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else None
        self.offset = 0 if self.generator is None else self.generator.get_offset()

    def rewind(self, share: float) -> None:
        """Takes back all but `share` of what has been drawn since; all steps draw the same amount."""
        if self.generator is not None:
            drawn = self.generator.get_offset() - self.offset
            self.generator.set_offset(self.offset + round(drawn * share))
