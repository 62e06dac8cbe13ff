"""Timing of competing calls in turns, so that a machine that slows down slows all of them alike."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]

SETTLING_SECONDS = 1.5


@dataclass(frozen=True)
class Spread:
    """The median of some samples and their quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: list[float]) -> Spread:
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)

    def scaled(self, factor: float) -> tuple[float, float, float]:
        """[lower quartile, median, upper quartile], each times `factor`."""
        return self.low * factor, self.median * factor, self.high * factor


@dataclass(frozen=True)
class Timing:
    """Seconds per call, one sample a round."""

    samples: tuple[float, ...]

    @property
    def seconds(self) -> Spread:
        return Spread.of(list(self.samples))

    def per(self, count: int) -> Timing:
        """The time of one unit of work, if a call does `count` of them."""
        return Timing(tuple(sample / count for sample in self.samples))

    def speed_up_over(self, baseline: Timing) -> Spread:
        """Speed-up over `baseline`, which was sampled in the same rounds."""
        return Spread.of([slow / fast for slow, fast in zip(baseline.samples, self.samples, strict=True)])


def time_in_turns(
    calls: Mapping[str, Call],
    sample: Callable[[Call], float],
    *,
    rounds: int,
    warm_up: int = 1,
    seconds: float = float("inf"),
    on_error: Callable[[str, Exception], None] | None = None,
) -> dict[str, Timing]:
    """Times several calls: each round takes one sample of each.

    Args:
        sample: measures the seconds of a call; one of the functions below.
        rounds: samples per call.
        warm_up: untimed calls of each before the first round.
        seconds: after this long no further round starts, except for the first three.
        on_error: called with the name of a call that raises and its exception; that call is left out of the result.
            By default the exception is raised.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}

    def attempt(name: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            if on_error is None:
                raise
            del samples[name]
            on_error(name, error)
            return None

    for name, call in calls.items():
        for _ in range(warm_up):
            if name in samples:
                attempt(name, call)
    start = time.perf_counter()
    for done in range(rounds):
        if done >= 3 and time.perf_counter() - start > seconds:
            break
        for name in list(samples):
            taken = attempt(name, functools.partial(sample, calls[name]))
            if taken is not None:
                samples[name].append(taken)
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def work_seconds(call: Call, device: torch.device, repetitions: int = 1) -> float:
    """Seconds per call: between CUDA events on a GPU, host time included if that is longer; wall time elsewhere."""
    return device_seconds(call, repetitions) if device.type == "cuda" else host_seconds(call, repetitions)


def sustained_seconds(call: Call, device: torch.device, repetitions: int = 1) -> float:
    """`work_seconds`, measured on CUDA after the call has kept the device busy for `SETTLING_SECONDS`.

    A GPU averages its power limit over about a second, so before that its clock depends on what ran earlier.
    """
    start = time.perf_counter()
    while device.type == "cuda" and time.perf_counter() - start < SETTLING_SECONDS:
        call()
        torch.cuda.synchronize()
    return work_seconds(call, device, repetitions)


def device_seconds(call: Call, repetitions: int = 1, *, ahead: int = 0) -> float:
    """Seconds per call between two events on the current CUDA stream.

    Args:
        ahead: untimed calls before the first event; they keep the device busy while the timed calls are queued.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    for _ in range(ahead):
        call()
    start.record()
    for _ in range(repetitions):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / repetitions


def host_seconds(call: Call, repetitions: int = 1) -> float:
    """Seconds per call until it returns to the host; on CUDA that is when the work is queued, on an idle device."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repetitions):
        call()
    return (time.perf_counter() - start) / repetitions


def wall_seconds(call: Call, repetitions: int = 1) -> float:
    """Seconds from the start of a call on an idle CUDA device until its result is ready. One untimed call precedes it.

    Synchronizing the stream costs the host less than 1 us, `torch.cuda.synchronize` several.
    """
    stream = torch.cuda.current_stream()
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repetitions):
        call()
        stream.synchronize()
    return (time.perf_counter() - start) / repetitions
