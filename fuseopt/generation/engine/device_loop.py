"""DeviceLoop: tier T0. Processors, selection and stop flags run inside the step; the host only queues steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fuseopt.generation.engine.decode_run import DecodeRun
from fuseopt.generation.engine.graphs import StepGraphs
from fuseopt.generation.engine.token_stream import TokenStream

# Captured steps that `start` queues: enough to keep the device busy during the host's check of the model.
_STEPS_BEFORE_CHECK = 2
# Scores of one step up to which calls that return them use graphs of several steps; such a graph keeps up to 16 copies.
_MAX_BYTES_OF_RECORDS = 4 * 2**20


class DeviceLoop:
    """Runs a DecodeRun to its end: `start` queues its first steps, `finish` all others.

    Between the two, the host may do slow work. Nothing is captured before `finish`, since a capture could be
    observed from outside.

    Args:
        scores, logits: lists to append a tensor [rows, vocab] float32 to for each step, or None.
        stream: takes the tokens of each step, or None.
    """

    def __init__(
        self,
        graphs: StepGraphs,
        run: DecodeRun,
        scores: list[Tensor] | None,
        logits: list[Tensor] | None,
        stream: TokenStream | None,
    ) -> None:
        self.graphs, self.run, self.scores, self.logits, self.stream = graphs, run, scores, logits, stream
        self._was_captured = run.work.graph is not None
        self._records = scores is not None or logits is not None
        # A graph of several steps keeps memory for the records of each.
        self._limit = 1 if self._records and run.state.scores.nbytes > _MAX_BYTES_OF_RECORDS else None
        # A step that an earlier call ran is captured at once, as all such calls may be short.
        self._capture_at = run.without_forward if graphs.has_seen(run.work) else 2

    def start(self) -> None:
        """Queues steps that need no capture: two captured ones, or those before the capture."""
        run, queue_next = self.run, self._queue_next
        if self.stream is not None and not self.stream.lag:
            return  # on a CPU a streamer sees each token before the next step
        first = run.without_forward + _STEPS_BEFORE_CHECK if self._was_captured else self._capture_at
        while run.queued < first and not run.is_over:
            queue_next()

    def finish(self) -> tuple[int, str]:
        """Queues the remaining steps, captures the step if it is not captured yet, and waits for the last step.

        Returns:
            how many steps count; and why the step could not be captured, empty if it could.
        """
        run, work, graphs, queue_next, note = self.run, self.run.work, self.graphs, self._queue_next, ""
        if self._was_captured and self._limit is None and not run.is_over:
            note = graphs.capture_multi_step(work, run.max_steps - run.without_forward)
        while not run.is_over:
            if run.queued == self._capture_at:
                note = graphs.capture(work) or note
            queue_next()
            self._put_tokens(run.known_valid)
        if run.queued > run.without_forward:
            graphs.mark_seen(work)
        valid = run.count_valid()
        self._put_tokens(valid, is_end=True)
        for record in (self.scores, self.logits):
            if record is not None:
                del record[valid:]
        return valid, note

    def _put_tokens(self, valid: int, *, is_end: bool = False) -> None:
        """Gives the stream the tokens of up to `valid` steps. Steps after an error that it raises do not count."""
        if self.stream is None:
            return
        try:
            self.stream.put(self.run.queued, valid)
            if is_end:
                self.stream.end(valid)
        except BaseException:
            self.run.rewind(self.stream.read)
            raise

    @property
    def _queue_next(self) -> Callable[[], None]:
        return self._queue_and_record if self._records else self.run.queue_next

    def _queue_and_record(self) -> None:
        run, before = self.run, self.run.queued
        run.queue_next(self._limit)
        several = run.work.multi_step if run.queued > before + 1 else None
        if self.scores is not None:
            self.scores += [run.state.scores.clone()] if several is None else torch.stack(several.scores).unbind()
        if self.logits is not None:
            self.logits += [run.state.logits.clone()] if several is None else torch.stack(several.logits).unbind()
