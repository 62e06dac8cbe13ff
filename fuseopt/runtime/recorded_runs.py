"""RecordedRun: on a CPU what a CUDA graph is on a GPU, the operations of a function, run again without Python."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from fuseopt.build import loader

# Runs that are recorded until two in a row were the same. A first run may also fill what later ones keep.
_MAX_RECORDED = 4


class RecordedRun:
    """Runs a method that works on static tensors, and records it (`csrc/python/tape.h`).

    Once two runs in a row were the same operations on the same tensors, `replay` runs them without Python. A method
    whose runs keep differing, or that reads a value on the host, runs as it is. Each `replay` is one run.

    Args:
        method: a bound method, which is referenced weakly: a CUDA graph does not refer to what it was captured from.

    Attributes:
        replays: how many runs were without Python.
        refused: why the method is not recorded any more; empty if it may be, or is.
    """

    def __init__(self, method: Callable[[], None]) -> None:
        self._method = weakref.WeakMethod(method)
        self._tape: Any = None
        self._is_repeated = False
        self._recorded = self.replays = 0
        self.refused = ""

    def replay(self) -> None:
        if self._is_repeated:
            self._tape.replay()
            self.replays += 1
        elif self.refused:
            self._run()
        else:
            self._run_recorded()

    def _run(self) -> None:
        method = self._method()
        assert method is not None, "its object calls replay"
        method()

    def _run_recorded(self) -> None:
        library = loader.python_library()
        assert library is not None, "Captures.can_capture"
        tape, before = library.record(self._run), self._tape
        self._recorded += 1
        self.refused, self._tape = tape.refused, tape
        difference = "its first run" if before is None else tape.difference(before)
        self._is_repeated = not (self.refused or difference)
        if difference and self._recorded == _MAX_RECORDED:
            self.refused = f"its runs differ from each other in {difference}"
        if self.refused:
            self._tape = None
