"""StopFlags: the host learns that all rows are finished a few steps late, and so never waits inside the loop."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

# Behind a copy the device rests: a step of GPT-2 with a copy of its own takes a twelfth longer.
STEPS_A_COPY = 4
# How many steps the host is ahead of a copy that it reads, so that the device has something to do meanwhile.
_STEPS_AHEAD = 3


class StopFlags:
    """Flags of steps, copied to pinned memory a few at a time.

    Args:
        going: [any] bool on the device. A step that makes sequences of length n sets element n - 1: False from the step
            on that leaves no row.
        length: of the sequences before the first step.
        steps: how many there will be at most.
    """

    def __init__(self, going: Tensor, length: int, steps: int) -> None:
        is_on_gpu = going.device.type == "cuda"
        self.going, self.pushed, self.read = going[length : length + steps], 0, 0
        self.ahead, self.together = (_STEPS_AHEAD, STEPS_A_COPY) if is_on_gpu else (0, 1)
        self.flags = torch.ones(steps, dtype=torch.bool, device="cpu", pin_memory=is_on_gpu)
        self._copied = self._arrived = 0
        self._copies: deque[tuple[int, torch.cuda.Event | None]] = deque()

    def push(self, count: int = 1) -> None:
        """Takes the flags of the `count` steps queued last."""
        before, self.pushed = self.pushed, self.pushed + count
        if self.pushed // self.together > before // self.together:
            self._copy()

    def is_over(self) -> bool:
        """Whether a flag old enough to be read says that no row is left."""
        return self._read_up_to(self.pushed - self.ahead)

    def steps(self) -> int:
        """How many of the steps pushed count: up to the first that left no row. Waits for all of them."""
        self._copy()
        self._read_up_to(self.pushed)
        return self.read

    def _copy(self) -> None:
        begin, end = self._copied, self.pushed
        if begin == end:
            return
        self.flags[begin:end].copy_(self.going[begin:end], non_blocking=True)
        is_on_gpu = self.going.device.type == "cuda"
        self._copies.append((end, torch.cuda.current_stream().record_event() if is_on_gpu else None))
        self._copied = end

    def _read_up_to(self, end: int) -> bool:
        """Reads flags in copies of none behind `end`; waits for them."""
        if self.read and not self.flags[self.read - 1]:
            return True
        while self.read < self._arrived or (self._copies and self._copies[0][0] <= end):
            if self.read == self._arrived:
                self._arrived, event = self._copies.popleft()
                if event is not None:
                    event.synchronize()
            self.read += 1
            if not self.flags[self.read - 1]:
                return True
        return False
