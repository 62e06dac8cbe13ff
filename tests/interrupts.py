"""Raises asynchronous exceptions, such as KeyboardInterrupt, at any bytecode that runs in fuseopt."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import fuseopt
from fuseopt.build import loader

_PACKAGE = str(Path(fuseopt.__file__).parent)
# Between the last call inside a `with` and the release of its lock Python delivers no exception, but a trace function
# can raise. This one has a lock that is not the model's.
_LEFT_OUT = loader.__file__


class Interrupted(BaseException):
    """The exception that is raised; not an Exception, so that no error handler catches it."""


class Place(NamedTuple):
    """A bytecode of a function in fuseopt, and how often it has run before."""

    function: CodeType
    bytecode: int
    before: int


def places(call: Callable[[], object], everywhere: Iterable[str], sampled: int) -> list[Place]:
    """Where to interrupt `call`, which is run once.

    Args:
        everywhere: names of files in which each bytecode is interrupted, the first and the last time that it runs.
        sampled: how many others.
    """
    ran: list[Place] = []
    times: Counter[tuple[CodeType, int]] = Counter()

    def note(frame: FrameType) -> None:
        bytecode = frame.f_code, frame.f_lasti
        ran.append(Place(*bytecode, times[bytecode]))
        times[bytecode] += 1

    _traced(call, note)
    chosen, others = [], []
    for order, (function, bytecode, before) in enumerate(ran):
        is_end = before in (0, times[function, bytecode] - 1)
        (chosen if is_end and Path(function.co_filename).name in everywhere else others).append(order)
    return [ran[order] for order in sorted(chosen + random.Random(0).sample(others, min(sampled, len(others))))]


def interrupted(call: Callable[[], object], place: Place) -> bool:
    """Runs `call` and raises at that place; returns whether the exception left the call."""
    times = 0

    def raise_in_time(frame: FrameType) -> None:
        nonlocal times
        if frame.f_lasti == place.bytecode:
            times += 1
            if times == place.before + 1:
                raise Interrupted

    try:
        _traced(call, raise_in_time, place.function)
    except Interrupted:
        return True
    return False


def _traced(
    call: Callable[[], object], at_bytecode: Callable[[FrameType], None], function: CodeType | None = None
) -> None:
    """Runs `call`, and `at_bytecode` before each bytecode in fuseopt, or in one function alone, which is faster."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE) or file == _LEFT_OUT or function not in (None, frame.f_code):
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
