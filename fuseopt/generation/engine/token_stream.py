"""TokenStream: gives a streamer the tokens of the device loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fuseopt.generation.engine.late_copies import LateCopies


class TokenStream(LateCopies):
    """Calls a streamer's `put` with the tokens of each step in order, a few steps late on a GPU.

    The first token is copied alone, later ones `STEPS_PER_COPY` at a time.

    Args:
        streamer: `put` takes tokens [rows] int64 on the CPU; `end` takes nothing.
        ids: [rows, any] int64 on the device, the sequences. A step writes the next column.
        length: of the sequences before the first step.
        max_steps: bound on the number of steps.

    Attributes:
        given: how many tokens a row the streamer has got.
        has_ended, has_raised: whether its `end` was called, and whether it raised an error.
    """

    def __init__(self, streamer: Any, ids: Tensor, length: int, max_steps: int) -> None:
        super().__init__(ids.T[length : length + max_steps])
        self.streamer = streamer
        self.given, self.has_ended, self.has_raised = 0, False, False

    def put(self, queued: int, valid: int) -> None:
        """Puts the tokens of up to `valid` steps, out of `queued`, that are old enough to be read."""
        is_first = not self.pushed
        self.push(queued - self.pushed)
        if is_first:
            self.copy()
        self._put(valid, self.pushed - self.lag)

    def end(self, valid: int) -> None:
        """Puts the tokens of all `valid` steps that are left, and ends the streamer."""
        self.copy()
        self._put(valid, self.pushed)
        self.has_ended = True
        self._call(self.streamer.end)

    def _put(self, valid: int, end: int) -> None:
        while self.read < valid and (tokens := self.next_before(end)) is not None:
            own = tokens.clone()
            self.given += 1
            self._call(self.streamer.put, own)

    def _call(self, method: Callable[..., Any], *tokens: Tensor) -> None:
        self.has_raised = True
        method(*tokens)
        self.has_raised = False


class RemainingStream:
    """A streamer that passes on to another what a TokenStream has not given to it."""

    def __init__(self, stream: TokenStream) -> None:
        self.streamer, self._given, self._has_ended = stream.streamer, stream.given, stream.has_ended

    def put(self, tokens: Tensor) -> None:
        if self._given:
            self._given -= 1
        else:
            self.streamer.put(tokens)

    def end(self) -> None:
        if not self._has_ended:
            self.streamer.end()
