"""The timer: turns, warm-up, the seconds limit, and what is made of the samples."""

from __future__ import annotations

import functools
import time

import pytest
import torch

from fuseopt.runtime.timer import (
    Spread,
    Timing,
    device_seconds,
    host_seconds,
    time_in_turns,
    wall_seconds,
    work_seconds,
)


def test_calls_take_turns_after_warming_up():
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    timings = time_in_turns(calls, functools.partial(host_seconds, repetitions=2), rounds=2, warm_up=1)
    assert "".join(order) == "ab" + "aabb" * 2
    assert [len(timing.samples) for timing in timings.values()] == [2, 2]


def test_a_sample_is_seconds_per_call():
    assert 0.01 <= host_seconds(lambda: time.sleep(0.01), 2) < 0.1
    assert 0.01 <= work_seconds(lambda: time.sleep(0.01), torch.device("cpu"), 2) < 0.1


def test_the_seconds_limit_leaves_three_rounds():
    timings = time_in_turns({"sleep": lambda: time.sleep(0.01)}, host_seconds, rounds=50, seconds=0.0)
    assert len(timings["sleep"].samples) == 3


def test_spread_and_paired_speed_up():
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(3.0, 2.0, 4.0)
    # The machine slowed down tenfold half-way; taken round by round the ratio is 2 throughout.
    baseline, fused = Timing((2.0, 2.0, 20.0, 20.0)), Timing((1.0, 1.0, 10.0, 10.0))
    assert fused.speed_up_over(baseline) == Spread(2.0, 2.0, 2.0)
    assert fused.per(2).seconds == Spread(2.75, 0.5, 5.0)
    assert fused.per(2).seconds.scaled(10) == (5.0, 27.5, 50.0)
    with pytest.raises(ValueError, match="shorter"):
        Timing((1.0,)).speed_up_over(baseline)


@pytest.mark.gpu
def test_cuda_samples_cover_the_work_on_the_device():
    device = torch.device("cuda")
    large, small = torch.randn(4096, 4096, device=device), torch.randn(64, 64, device=device)
    work, enqueue, wall = (
        time_in_turns({"large": lambda: large @ large, "small": lambda: small @ small}, sample, rounds=5)
        for sample in (device_seconds, host_seconds, wall_seconds)
    )
    assert work["large"].seconds.median > 2 * work["small"].seconds.median > 0
    assert wall["large"].seconds.median > 0.9 * work["large"].seconds.median
    assert wall["large"].seconds.median > enqueue["large"].seconds.median
    assert enqueue["large"].seconds.median < work["large"].seconds.median
