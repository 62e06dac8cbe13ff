"""RecordedRun and csrc/python/tape.h: what is replayed, and what is left to Python."""

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fuseopt import ops
from fuseopt.build import loader
from fuseopt.runtime.recorded_runs import RecordedRun


@pytest.fixture(autouse=True)
def needs_the_library() -> None:
    if loader.python_library() is None:
        pytest.skip("the library for Python is not loaded")


class Counted:
    """A function of static tensors; counts how often Python ran it."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function, self.count = function, 0

    def run(self) -> None:
        self.count += 1
        self.function()


def rerun(function: Callable[[], None], times: int = 7) -> tuple[RecordedRun, Counted]:
    counted = Counted(function)
    recorded = RecordedRun(counted.run)
    with torch.no_grad():
        for _ in range(times):
            recorded.replay()
    return recorded, counted


def compare(make: Callable[[], tuple[Callable[[], None], tuple[Tensor, ...]]], times: int = 7) -> RecordedRun:
    """Runs a function recorded and as it is, from the same random state; its tensors must be equal afterwards."""
    results = []
    for is_recorded in (False, True):
        torch.manual_seed(5)
        function, tensors = make()
        if is_recorded:
            recorded, counted = rerun(function, times)
        else:
            with torch.no_grad():
                for _ in range(times):
                    function()
        results.append((*tensors, torch.rand(3)))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    assert counted.count + recorded.replays == times
    return recorded


def steps() -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    """Views, lists, numbers, results that share memory, in-place results, `out`, and a position that grows."""
    weight, cache, slot = torch.randn(6, 6), torch.zeros(2, 20, 6), torch.zeros(1, dtype=torch.int64)
    x, kept = torch.randn(2, 6), torch.zeros(2, 12)

    def step() -> None:
        inner = F.gelu(x @ weight.T)
        left, right = inner.split(3, dim=1)
        joined = torch.cat([right, left, x[:, :6]], 1)
        cache.index_copy_(1, slot, joined[:, :6].unsqueeze(1))
        attended = F.scaled_dot_product_attention(joined[:, None, :6], cache, cache, (torch.arange(20) <= slot)[None])
        kept.copy_(torch.cat((attended.flatten(1), joined[:, 6:]), 1))
        torch.tanh(attended[:, 0] * 0.5 + inner, out=x)
        x.mul_(2.0)[0] += 1
        slot.add_(1)

    return step, (cache, slot, x, kept)


def test_replays_do_what_the_function_does() -> None:
    recorded = compare(steps)
    assert recorded.replays == 5 and not recorded.refused


def test_random_numbers_are_drawn_as_before() -> None:
    def make() -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        x = torch.zeros(5, 7)

        def draw() -> None:
            x.add_(torch.empty(5, 7).exponential_()).div_(torch.rand(7))

        return draw, (x,)

    assert compare(make).replays == 5


def test_ops_of_the_stable_abi_get_their_lists_again() -> None:
    """They take the tensors out of the lists that they are given."""

    def make() -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        x, weights, biases = (
            torch.randn(2, 8),
            [torch.randn(8, 8) for _ in range(2)],
            [torch.randn(8) for _ in range(2)],
        )

        def layer() -> None:
            y = ops.decode_linear(x, weights, biases, activation="silu", gated=True)
            x.copy_(ops.decode_linear(y, [y.T.contiguous() @ y, weights[1]])[:, 8:] * 0.1)

        return layer, (x,)

    assert compare(make).replays == 5


def test_what_runs_once_is_not_replayed() -> None:
    def make() -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        x, kept = torch.ones(3), {}

        def run() -> None:
            if "y" not in kept:
                kept["y"] = torch.full((3,), 2.0)
            x.mul_(kept["y"])

        return run, (x,)

    assert compare(make).replays == 4


def number_of_python() -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    x, count = torch.zeros(3), [0]

    def run() -> None:
        count[0] += 1
        x.add_(count[0])

    return run, (x,)


def value_on_the_host() -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    x = torch.zeros(3)

    def run() -> None:
        x.add_(1 if x[0].item() > 2 else 2)

    return run, (x,)


def tensor_of_numbers() -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    x = torch.zeros(3)

    def run() -> None:
        x.add_(torch.tensor([1.0, 2.0, 3.0]))

    return run, (x,)


def memory_of_other_code() -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    x, kept = torch.zeros(3), []

    def run() -> None:
        kept.append(np.full(3, len(kept), dtype=np.float32))
        x.add_(torch.from_numpy(kept[-1]))

    return run, (x,)


def memory_that_is_not_seen() -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    """The factory that compiled code calls."""
    x, kept = torch.zeros(3), []

    def run() -> None:
        made = torch._C._dynamo.guards._empty_strided_cpu((3,), (1,), torch.float32)
        made.numpy()[:] = len(kept)
        kept.append(made)
        x.add_(made)

    return run, (x,)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (number_of_python, "its runs differ from each other in aten::add_"),
        (value_on_the_host, "reads a value on the host"),
        (tensor_of_numbers, "it makes a tensor of what is no tensor"),
        (memory_of_other_code, "it makes a tensor of what is no tensor"),
        (memory_that_is_not_seen, "its runs differ from each other in aten::add_"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_what_a_replay_could_not_do_runs_in_python(make: Callable, reason: str) -> None:
    recorded = compare(make)
    assert recorded.replays == 0 and reason in recorded.refused


def test_errors_are_those_of_the_function() -> None:
    cache, slot = torch.zeros(1, 5), torch.zeros(1, dtype=torch.int64)

    def run() -> None:
        cache.index_copy_(1, slot, torch.ones(1, 1))
        slot.add_(1)

    recorded, counted = rerun(run, 5)
    assert recorded.replays == 3
    with pytest.raises(IndexError) as raised:
        recorded.replay()
    with pytest.raises(IndexError) as wanted:
        run()
    assert str(raised.value) == str(wanted.value) and counted.count == 2
    slot.zero_()
    cache.zero_()
    recorded.replay()
    assert cache.tolist() == [[1, 0, 0, 0, 0]] and slot.item() == 1


def test_an_error_while_it_is_recorded_leaves_nothing_behind() -> None:
    x, fails = torch.zeros(1), [True]

    def run() -> None:
        x.add_(1)
        if fails:
            raise ZeroDivisionError

    counted = Counted(run)
    recorded = RecordedRun(counted.run)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            recorded.replay()
    fails.clear()
    for _ in range(4):
        recorded.replay()
    assert x.item() == 7 and recorded.replays == 2


def test_versions_of_written_tensors_count_up() -> None:
    x = torch.zeros(3)

    def run() -> None:
        x.add_(1)

    recorded, _ = rerun(run)
    before = x._version
    recorded.replay()
    assert x._version > before


def test_weights_that_are_written_in_place_are_read_anew() -> None:
    weight, x = torch.ones(3), torch.zeros(3)

    def run() -> None:
        x.copy_(weight * 2)

    recorded, _ = rerun(run)
    weight.fill_(5)
    recorded.replay()
    assert recorded.replays == 6 and x.tolist() == [10, 10, 10]


def test_a_recorded_run_keeps_no_object_alive() -> None:
    class Work:
        def __init__(self) -> None:
            self.x, self.graph = torch.zeros(1000), RecordedRun(self.run)

        def run(self) -> None:
            self.x += 1

    gc.disable()
    try:
        work = Work()
        for _ in range(4):
            work.graph.replay()
        memory, of_work = weakref.ref(work.x), weakref.ref(work)
        del work
        assert of_work() is None and memory() is None
    finally:
        gc.enable()


def test_recording_inside_a_recording_is_an_error() -> None:
    library = loader.python_library()
    assert library is not None
    with pytest.raises(RuntimeError, match="recording already"):
        library.record(lambda: library.record(lambda: None))
    assert len(library.record(lambda: torch.zeros(2).add_(1))) == 2
