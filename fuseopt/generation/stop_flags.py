"""StopFlags: the host learns that all rows are finished a few steps late, and so never waits inside the loop."""

from __future__ import annotations

import torch
from torch import Tensor

# How many steps the host may be ahead of the flag it reads; at most as many are run in vain.
_STEPS_AHEAD = 4


class StopFlags:
    """One flag a step, copied to pinned memory behind the step.

    Args:
        going: [] bool on the device, set to False by a step from which on no row is left.
        steps: how many there will be at most.
    """

    def __init__(self, going: Tensor, steps: int) -> None:
        self.going, self.pushed, self.read = going, 0, 0
        self.ahead = _STEPS_AHEAD if going.device.type == "cuda" else 0
        self.flags = torch.ones(steps, dtype=torch.bool, device="cpu", pin_memory=self.ahead > 0)
        self.copied: list[torch.cuda.Event] = []

    def push(self) -> None:
        """Takes the flag of the step queued last."""
        self.flags[self.pushed].copy_(self.going, non_blocking=True)
        if self.ahead:
            self.copied.append(torch.cuda.current_stream().record_event())
        self.pushed += 1

    def is_over(self) -> bool:
        """Whether a flag old enough to be read says that no row is left."""
        return self._read_up_to(self.pushed - self.ahead)

    def steps(self) -> int:
        """How many of the steps pushed count: up to the first that left no row. Waits for all of them."""
        self._read_up_to(self.pushed)
        return self.read

    def _read_up_to(self, end: int) -> bool:
        if self.read and not self.flags[self.read - 1]:
            return True
        while self.read < end:
            if self.ahead:
                self.copied[self.read].synchronize()
            self.read += 1
            if not self.flags[self.read - 1]:
                return True
        return False
