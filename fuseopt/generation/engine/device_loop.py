"""The device loop: processors, selection and stop flags inside the step; the host queues steps and reads flags late."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fuseopt.generation.engine.decode_run import DecodeRun
from fuseopt.generation.engine.graphs import StepGraphs

# Which keep the device busy while the host does something else.
_STEPS_BEFORE_CONFIRMING = 2


def finish(
    graphs: StepGraphs,
    run: DecodeRun,
    scores: list[Tensor] | None,
    logits: list[Tensor] | None,
    confirm: Callable[[], None],
) -> tuple[int, str]:
    """Takes the steps of a run that are left.

    Args:
        scores, logits: are given a tensor [rows, vocab] float32 a step, unless None.
        confirm: called once steps are queued, and before any is captured; raises if what they make is void.

    Returns:
        How many steps count; and why the step could not be captured, or nothing.
    """
    step, state = run.step, run.state
    # A step that an earlier call ran is captured at once: such calls may all be short.
    note, captured_at = "", run.begins if graphs.has_met(step) else 2
    confirmed_at = captured_at if step.graph is None else run.begins + _STEPS_BEFORE_CONFIRMING
    is_confirmed, was_captured = False, step.graph is not None
    most = None if scores is None and logits is None else 1
    while not run.is_over:
        if run.taken >= confirmed_at and not is_confirmed:
            confirm()
            is_confirmed = True
            if was_captured and most is None:
                note = graphs.capture_several(step, run.steps - run.begins)
        if run.taken == captured_at:
            note = graphs.capture(step) or note
        run.take(most)
        if scores is not None:
            scores.append(state.scores.clone())
        if logits is not None:
            logits.append(state.logits.clone())
    confirm()
    if run.taken > run.begins:
        graphs.meet(step)
    counted = run.count()
    for record in (scores, logits):
        if record is not None:
            del record[counted:]
    return counted, note
