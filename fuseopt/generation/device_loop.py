"""The device loop: processors, selection and stop flags inside the step; the host queues steps and reads flags late."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fuseopt.generation.graphs import Step, StepGraphs
from fuseopt.generation.prefill import Prefilled
from fuseopt.generation.stop_flags import StopFlags

# Which keep the device busy while the host does something else.
_STEPS_BEFORE_CONFIRMING = 2


def run(
    graphs: StepGraphs,
    step: Step,
    input_ids: Tensor,
    pad: Tensor | None,
    steps: int,
    prefilled: Prefilled,
    scores: list[Tensor] | None,
    logits: list[Tensor] | None,
    confirm: Callable[[], None],
) -> tuple[int, str]:
    """Decodes up to `steps` tokens a row, from the logits in the step's state on.

    Args:
        step: with a selection.
        input_ids: [rows, length] int64.
        pad: the id that finished rows are given, [] int64.
        prefilled: what the step's state holds.
        scores, logits: are given a tensor [rows, vocab] float32 a step, unless None.
        confirm: called once steps are queued, and before any is captured; raises if what they make is void.

    Returns:
        How many steps count; and why the step could not be captured, or nothing.
    """
    state, selection = step.state, step.selection
    assert selection is not None
    selection.begin(state, input_ids, pad, prefilled.has_ids)
    # There is a first step in any case.
    flags = StopFlags(state.going, steps) if selection.may_end_early and steps > 1 else None
    random_state = _RandomState(state.ids.device) if selection.do_sample else None
    # A step that an earlier call ran is captured at once: such calls may all be short.
    note, begins = "", 0 if prefilled.pending else 1
    captured_at = begins if graphs.has_met(step) else 2
    confirmed_at = captured_at if step.graph is None else begins + _STEPS_BEFORE_CONFIRMING
    for taken in range(steps):
        if taken == confirmed_at:
            confirm()
        if taken < begins:
            selection(state, state.logits, advance=False)
        else:
            if taken == captured_at:
                note = graphs.capture(step)
            step()
        if scores is not None:
            scores.append(state.scores.clone())
        if logits is not None:
            logits.append(state.logits.clone())
        if flags is not None:
            flags.push()
            if flags.is_over():
                break
    confirm()
    if taken >= begins:
        graphs.meet(step)
    taken += 1
    counted = taken if flags is None else flags.steps()
    if random_state is not None and counted < taken:
        random_state.rewind(counted / taken)
    for record in (scores, logits):
        if record is not None:
            del record[counted:]
    return counted, note


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
