"""Raises asynchronous exceptions, such as KeyboardInterrupt, at any bytecode that runs in fuseopt."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import fuseopt

_PACKAGE = str(Path(fuseopt.__file__).parent)
# Between the last call inside a `with` and the release of its lock Python delivers no exception, but a trace function
# can raise. This one has a lock that is not the model's.
_LEFT_OUT = fuseopt.build.loader.__file__


class Interrupted(BaseException):
    """The exception that is raised; not an Exception, so that no error handler catches it."""


def places(call: Callable[[], object], everywhere: Iterable[str], sampled: int) -> list[int]:
    """Where to interrupt `call`, which is run once: each place is the number of bytecodes run in fuseopt before it.

    Args:
        everywhere: files in which each bytecode is interrupted, the first and the last time that it runs.
        sampled: how many others.
    """
    met: dict[tuple[str, int, int], list[int]] = {}
    count = 0

    def note(frame: FrameType) -> None:
        nonlocal count
        code = frame.f_code
        met.setdefault((Path(code.co_filename).name, code.co_firstlineno, frame.f_lasti), []).append(count)
        count += 1

    _traced(call, note)
    chosen = {time for (file, *_), times in met.items() if file in everywhere for time in (times[0], times[-1])}
    others = sorted(set(range(count)) - chosen)
    return sorted(chosen.union(random.Random(0).sample(others, min(sampled, len(others)))))


def interrupted(call: Callable[[], object], place: int) -> bool:
    """Runs `call` and raises at that bytecode; returns whether the exception left the call."""
    count = 0

    def raise_in_time(frame: FrameType) -> None:
        nonlocal count
        count += 1
        if count == place + 1:
            raise Interrupted

    try:
        _traced(call, raise_in_time)
    except Interrupted:
        return True
    return False


def _traced(call: Callable[[], object], at_bytecode: Callable[[FrameType], None]) -> None:
    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE) or file == _LEFT_OUT:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            at_bytecode(frame)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
