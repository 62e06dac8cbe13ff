"""StopFlags: tells the host, a few steps late and without a wait inside the loop, that all rows have finished."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

# Flags per copy. Each copy interrupts the chain of kernels: with one copy per step, GPT-2 takes 8% longer on a GPU.
STEPS_PER_COPY = 4
# The host reads a copy this many steps after the last step in it, so that the device has work while the host reads.
_LAG = 3


class StopFlags:
    """Flags of steps, copied to pinned memory a few at a time.

    Args:
        going: [any] bool on the device. The step that extends sequences to length n sets element n - 1; it is False
            once no row continues.
        length: of the sequences before the first step.
        max_steps: bound on the number of steps.
    """

    def __init__(self, going: Tensor, length: int, max_steps: int) -> None:
        is_on_gpu = going.device.type == "cuda"
        self.going, self.pushed, self.read = going[length : length + max_steps], 0, 0
        self.lag, self.steps_per_copy = (_LAG, STEPS_PER_COPY) if is_on_gpu else (0, 1)
        self.flags = torch.ones(max_steps, dtype=torch.bool, device="cpu", pin_memory=is_on_gpu)
        self._copied = self._arrived = 0
        self._copies: deque[tuple[int, torch.cuda.Event | None]] = deque()

    def push(self, count: int = 1) -> None:
        """Says that `count` more steps were queued; starts a copy if enough flags are due."""
        before, self.pushed = self.pushed, self.pushed + count
        if self.pushed // self.steps_per_copy > before // self.steps_per_copy:
            self._copy()

    def is_over(self) -> bool:
        """Whether a flag that is old enough to be read says that no row continues."""
        return self._read_up_to(self.pushed - self.lag)

    def count_valid(self) -> int:
        """Number of pushed steps up to the first after which no row continues. Waits for all pushed steps."""
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
        """Reads the flags of all copies that end at or before step `end`, waiting for them; True once one is False."""
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
