"""Timing: competing calls take turns, so that a machine that slows down slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]


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


@dataclass(frozen=True)
class Timing:
    """Seconds per call, one sample a round."""

    samples: tuple[float, ...]

    @property
    def seconds(self) -> Spread:
        return Spread.of(list(self.samples))

    def speed_up_over(self, baseline: Timing) -> Spread:
        """How many times faster than `baseline`, which took its turns in the same rounds."""
        return Spread.of([slow / fast for slow, fast in zip(baseline.samples, self.samples, strict=True)])


def time_in_turns(
    calls: Mapping[str, Call],
    device: torch.device,
    *,
    rounds: int,
    calls_per_sample: int = 1,
    warm_up: int = 1,
    seconds: float = float("inf"),
) -> dict[str, Timing]:
    """Times several calls, one sample of each a round.

    On CUDA a sample is the time between two events on the current stream, so it is the device's time unless the host is
    slower; elsewhere it is `time.perf_counter`.

    Args:
        rounds: samples of each call.
        calls_per_sample: repetitions inside one sample, for calls too short to be timed one by one.
        warm_up: untimed calls of each before the first round.
        seconds: no round starts after this long, but for the first three.
    """
    for call in calls.values():
        for _ in range(warm_up):
            call()
    sample = _cuda_sample if device.type == "cuda" else _host_sample
    samples: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for done in range(rounds):
        if done >= 3 and time.perf_counter() - start > seconds:
            break
        for name, call in calls.items():
            samples[name].append(sample(call, calls_per_sample))
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def _host_sample(call: Call, repetitions: int) -> float:
    start = time.perf_counter()
    for _ in range(repetitions):
        call()
    return (time.perf_counter() - start) / repetitions


def _cuda_sample(call: Call, repetitions: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repetitions):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / repetitions
