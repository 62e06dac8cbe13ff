"""Measures cases one after the other: prepares the calls, compares their results, times them, makes records."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from fuseopt.bench.harness import progress
from fuseopt.bench.harness.records import STOCK, Record
from fuseopt.bench.harness.remembering import remember
from fuseopt.bench.harness.workloads import Case, difference, failed
from fuseopt.errors import CompileError, ConfigError
from fuseopt.runtime.timer import Call, time_in_turns, work_seconds

# A case ends after this long, once each of its calls has been timed three times.
SECONDS_PER_CASE = 12.0
WHOLE_CASE = "every variant"


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_Work = TypeVar("_Work", bound=_Named)


def measure(
    cases: Sequence[_Work], records_of: Callable[[_Work], Iterable[Record]], *, is_more: bool = False
) -> list[Record]:
    """The records of every case, with progress on stderr. After KeyboardInterrupt: those of finished cases.

    If a case raises an exception, its record names it, and the next case begins.

    Raises:
        KeyboardInterrupt, ConfigError: before the first record, unless `is_more`: other records exist already.
    """
    records: list[Record] = []
    for case in progress.each(cases, lambda case: case.name):
        _forget_sizes()
        try:
            records += records_of(case)
        except KeyboardInterrupt:
            if not records and not is_more:
                raise
            progress.say(f"interrupted: {case.name} and what comes after it is left out")
            break
        except Exception as error:
            if isinstance(error, ConfigError) and not records and not is_more:
                raise
            records.append(Record(case.name, WHOLE_CASE, note=failed(error)))
    return records


def _forget_sizes() -> None:
    """Resets Dynamo, so that the next case is compiled for its own sizes and not for dynamic ones."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def against_stock(case: Case, device: torch.device) -> list[Record]:
    """Runs every call of a case once for its result and once for its peak memory, then times all in turns.

    A call that cannot be compiled, or that raises, becomes a row with the reason, stock included. Results are compared
    with those of the first call that runs.
    """
    offered = dict(case.calls())
    calls: dict[str, Call] = {}
    differences: dict[str, str] = {}
    peaks: dict[str, float | None] = {}
    expected: Any = None
    for name, call in offered.items():
        if isinstance(call, str):
            continue
        try:
            for _ in range(case.warm_up):
                call()
            result = call()
            if calls:
                differences[name] = difference(result, expected)
            else:
                expected = result
        except Exception as error:
            offered[name] = _note(error)
            continue
        calls[name] = call
    result = expected = None
    for name, call in list(calls.items()):
        try:
            peaks[name] = peak_mib(call, device)
        except Exception as error:
            offered[name] = _note(error)
            del calls[name]
    timings = time_in_turns(
        calls,
        functools.partial(work_seconds, device=device, repetitions=case.calls_per_sample),
        rounds=case.rounds,
        warm_up=0,
        seconds=SECONDS_PER_CASE,
        on_error=lambda name, error: offered.update({name: _note(error)}),
    )
    timings = {name: timing.per(case.steps) for name, timing in timings.items()}
    remember(case, timings, device)
    return [
        Record(case.name, name, note=call)
        if isinstance(call, str)
        else Record.of(
            case.name,
            name,
            timings[name],
            None if name == STOCK else timings.get(STOCK),
            difference=differences.get(name),
            peak_mib=peaks[name],
        )
        for name, call in offered.items()
    ]


def _note(error: Exception) -> str:
    """Why a call was not timed; the traceback goes to stderr unless the call could not be compiled."""
    if isinstance(error, CompileError):
        return str(error)
    return not_compiled(error) if isinstance(error, _failures_to_compile()) else failed(error)


def _failures_to_compile() -> tuple[type[Exception], ...]:
    """torch.compile's own exceptions; none before torch._dynamo has been imported."""
    compiler = sys.modules.get("torch._dynamo.exc")
    return () if compiler is None else (compiler.TorchDynamoException,)


def not_compiled(failure: Exception) -> str:
    """The first line of torch.compile's message."""
    return f"cannot be compiled: {str(failure).splitlines()[0]}"


def peak_mib(call: Call, device: torch.device, above: int | None = None) -> float | None:
    """Peak GPU memory of a call in MiB, above `above` bytes or, by default, above what is allocated before it."""
    if device.type != "cuda":
        return None
    # Garbage freed during the call would be subtracted from it. The capture of a CUDA graph collects garbage first,
    # including memory pools of other graphs.
    gc.collect()
    torch.cuda.empty_cache()
    before = taken_bytes(device) if above is None else above
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return (torch.cuda.max_memory_allocated(device) + _idle_bytes(device) - before) / 2**20


def taken_bytes(device: torch.device) -> int:
    """GPU memory in bytes that is allocated, or held in the memory pools of CUDA graphs."""
    return torch.cuda.memory_allocated(device) + _idle_bytes(device)


def _idle_bytes(device: torch.device) -> int:
    """Bytes in memory pools of CUDA graphs that are not allocated now, and that nothing else can use."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != (0, 0)
    )
