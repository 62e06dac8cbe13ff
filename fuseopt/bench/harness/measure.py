"""From cases to records: prepare, compare, time, one case after the other."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from tqdm import tqdm

from fuseopt.bench.harness.records import STOCK, Record
from fuseopt.bench.harness.timer import Call, time_in_turns, work_seconds
from fuseopt.bench.harness.workloads import Case, difference, failed
from fuseopt.errors import CompileError, ConfigError

# No case is timed for longer, once each of its calls has been timed three times.
SECONDS_PER_CASE = 12.0
WHOLE_CASE = "every variant"


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_Work = TypeVar("_Work", bound=_Named)


def measure(
    cases: Sequence[_Work], records_of: Callable[[_Work], Iterable[Record]], *, is_more: bool = False
) -> list[Record]:
    """The records of every case, with a progress bar on stderr; after KeyboardInterrupt, of the cases that were done.

    If a case raises, its record names the exception, and the next case begins.

    Raises:
        KeyboardInterrupt, ConfigError: before the first record, unless `is_more`: other records exist already.
    """
    records: list[Record] = []
    with tqdm(cases, unit="case", dynamic_ncols=True) as progress:
        for case in progress:
            progress.set_postfix_str(case.name)
            _forget_sizes()
            try:
                records += records_of(case)
            except KeyboardInterrupt:
                if not records and not is_more:
                    raise
                progress.write(f"interrupted: {case.name} and what comes after it is left out", file=sys.stderr)
                break
            except Exception as error:
                if isinstance(error, ConfigError) and not records and not is_more:
                    raise
                records.append(Record(case.name, WHOLE_CASE, note=failed(error)))
    return records


def _forget_sizes() -> None:
    """Lets the next case be compiled for its own sizes, not for sizes that change, as they do from case to case."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def against_stock(case: Case, device: torch.device) -> list[Record]:
    """Runs every call of a case once for its result and once for its memory, then times them in turns.

    A call that cannot be compiled, or raises, becomes a row with the reason.

    Raises:
        Exception: what the stock model raises.
    """
    offered = dict(case.calls())
    calls: dict[str, Call] = {}
    differences: dict[str, str] = {}
    stock: Any = None
    for name, call in offered.items():
        if isinstance(call, str):
            continue
        try:
            for _ in range(case.warm_up):
                call()
            result = call()
        except CompileError as error:
            offered[name] = str(error)
            continue
        except _failures_to_compile() as failure:
            offered[name] = not_compiled(failure)
            continue
        except Exception as error:
            if name == STOCK:
                raise
            offered[name] = failed(error)
            continue
        calls[name] = call
        if name == STOCK:
            stock = result
        else:
            differences[name] = difference(result, stock)
    del stock, result
    peaks = {name: peak_mib(call, device) for name, call in calls.items()}
    timings = time_in_turns(
        calls,
        functools.partial(work_seconds, device=device, repetitions=case.calls_per_sample),
        rounds=case.rounds,
        warm_up=0,
        seconds=SECONDS_PER_CASE,
    )
    timings = {name: timing.per(case.steps) for name, timing in timings.items()}
    return [
        Record(case.name, name, note=call)
        if isinstance(call, str)
        else Record.of(
            case.name,
            name,
            timings[name],
            None if name == STOCK else timings[STOCK],
            difference=differences.get(name),
            peak_mib=peaks[name],
        )
        for name, call in offered.items()
    ]


def _failures_to_compile() -> tuple[type[Exception], ...]:
    """torch.compile's own exceptions, which are not there before something has been compiled."""
    compiler = sys.modules.get("torch._dynamo.exc")
    return () if compiler is None else (compiler.TorchDynamoException,)


def not_compiled(failure: Exception) -> str:
    """What torch.compile says, in a line."""
    return f"cannot be compiled: {str(failure).splitlines()[0]}"


def peak_mib(call: Call, device: torch.device, above: int | None = None) -> float | None:
    """Most memory allocated on the GPU during a call, over `above` bytes, by default what is there before it."""
    if device.type != "cuda":
        return None
    # What goes during the call would count as less than nothing, and the capture of a graph begins by letting go of
    # what nobody has any more, and of the pools of graphs among it.
    gc.collect()
    torch.cuda.empty_cache()
    before = taken_bytes(device) if above is None else above
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return (torch.cuda.max_memory_allocated(device) + _idle_bytes(device) - before) / 2**20


def taken_bytes(device: torch.device) -> int:
    """What is allocated on the GPU, and what CUDA graphs hold on to for when they are launched."""
    return torch.cuda.memory_allocated(device) + _idle_bytes(device)


def _idle_bytes(device: torch.device) -> int:
    """Of the memory pools of CUDA graphs, what is not allocated now; nobody else can have it."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != (0, 0)
    )
