"""The timer: turns, warm-up, the seconds limit, and what is made of the samples."""

from __future__ import annotations

import time

import pytest
import torch

from fuseopt.bench.timer import Spread, Timing, time_in_turns

CPU = torch.device("cpu")


def test_calls_take_turns_after_warming_up():
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    timings = time_in_turns(calls, CPU, rounds=2, calls_per_sample=2, warm_up=1)
    assert "".join(order) == "ab" + "aabb" * 2
    assert [len(timing.samples) for timing in timings.values()] == [2, 2]


def test_a_sample_is_seconds_per_call():
    timings = time_in_turns({"sleep": lambda: time.sleep(0.01)}, CPU, rounds=3, calls_per_sample=2)
    assert 0.01 <= timings["sleep"].seconds.median < 0.1


def test_the_seconds_limit_leaves_three_rounds():
    timings = time_in_turns({"sleep": lambda: time.sleep(0.01)}, CPU, rounds=50, seconds=0.0)
    assert len(timings["sleep"].samples) == 3


def test_spread_and_paired_speed_up():
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(3.0, 2.0, 4.0)
    # The machine slowed down tenfold half-way; taken round by round the ratio is 2 throughout.
    baseline, fused = Timing((2.0, 2.0, 20.0, 20.0)), Timing((1.0, 1.0, 10.0, 10.0))
    assert fused.speed_up_over(baseline) == Spread(2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="shorter"):
        Timing((1.0,)).speed_up_over(baseline)


@pytest.mark.gpu
def test_cuda_samples_cover_the_work_on_the_device():
    device = torch.device("cuda")
    large, small = torch.randn(4096, 4096, device=device), torch.randn(64, 64, device=device)
    timings = time_in_turns({"large": lambda: large @ large, "small": lambda: small @ small}, device, rounds=5)
    assert timings["large"].seconds.median > 2 * timings["small"].seconds.median > 0
