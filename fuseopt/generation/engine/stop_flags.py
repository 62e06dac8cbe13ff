"""StopFlags: tells the host, a few steps late and without a wait inside the loop, that all rows have finished."""

from __future__ import annotations

from torch import Tensor

from fuseopt.generation.engine.late_copies import LateCopies


class StopFlags(LateCopies):
    """Flags of steps.

    Args:
        going: [any] bool on the device. The step that extends sequences to length n sets element n - 1; it is False
            once no row continues.
        length: of the sequences before the first step.
        max_steps: bound on the number of steps.
    """

    def __init__(self, going: Tensor, length: int, max_steps: int) -> None:
        super().__init__(going[length : length + max_steps])

    def is_over(self) -> bool:
        """Whether a flag that is old enough to be read says that no row continues."""
        return self._read_up_to(self.pushed - self.lag)

    def count_valid(self) -> int:
        """Number of pushed steps up to the first after which no row continues. Waits for all pushed steps."""
        self.copy()
        self._read_up_to(self.pushed)
        return self.read

    def _read_up_to(self, end: int) -> bool:
        """Reads the flags of all copies that end at or before step `end`, waiting for them; True once one is False."""
        if self.read and not self.values[self.read - 1]:
            return True
        while (flag := self.next_before(end)) is not None:
            if not flag:
                return True
        return False
