"""Calls as CUDA graphs: how many, over how much data, and which cannot be recorded."""

from __future__ import annotations

import functools

import pytest
import torch

from fuseopt.bench.harness import cuda_graph
from fuseopt.bench.harness.cuda_graph import calls_per_graph, graph_of, set_count, stay_in_cache
from fuseopt.runtime.timer import device_seconds

DEVICE = torch.device("cuda")
MIB = 2**20


@pytest.fixture
def cache_of_50_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "_cache_bytes", lambda device: 50 * MIB)


@pytest.mark.usefixtures("cache_of_50_mib")
@pytest.mark.parametrize(
    ("bytes_per_call", "sets", "in_cache"),
    [(200 * MIB, 2, False), (12 * MIB, 17, False), (2 * MIB, 32, False), (MIB, 32, True), (0, 32, True)],
)
def test_sets_exceed_the_cache_unless_calls_are_tiny(bytes_per_call, sets, in_cache):
    assert set_count(bytes_per_call, DEVICE) == sets
    assert stay_in_cache(bytes_per_call, DEVICE) is in_cache


def test_a_graph_takes_every_set_as_often():
    assert calls_per_graph(800 * MIB, 2) == 2
    assert calls_per_graph(12 * MIB, 17) == 17 * 7
    assert calls_per_graph(0, 32) == 256


@pytest.mark.gpu
def test_a_graph_replays_calls_on_their_own_data():
    tensors = [torch.zeros(4, device=DEVICE) for _ in range(3)]
    with torch.cuda.stream(torch.cuda.Stream()):
        calls = [functools.partial(tensor.add_, 1) for tensor in tensors]
        graph = graph_of(calls, 6)
        before = [tensor.tolist() for tensor in tensors]  # the first was called once, to see whether it waits
        graph.replay()
        torch.cuda.synchronize()
    assert [tensor[0].item() - value[0] for tensor, value in zip(tensors, before, strict=True)] == [2, 2, 2]


@pytest.mark.gpu
def test_a_call_that_waits_for_the_device_has_no_graph():
    tensor = torch.ones(4, device=DEVICE)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert graph_of([lambda: tensor.sum().item()], 2) is None
        assert graph_of([lambda: tensor.sum()], 2) is not None
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.gpu
def test_a_graph_of_a_backward_computes_it():
    with torch.cuda.stream(torch.cuda.Stream()):
        weight = torch.ones(4, device=DEVICE, requires_grad=True)
        output = (weight * 3).sum()
        results = []

        def call():
            results[:] = torch.autograd.grad(output, weight, retain_graph=True)

        graph = graph_of([call], 2)
        results[0].zero_()
        graph.replay()
        torch.cuda.synchronize()
    assert results[0].tolist() == [3.0] * 4


@pytest.mark.gpu
def test_device_time_leaves_out_what_was_called_ahead():
    large = torch.randn(4096, 4096, device=DEVICE)
    once = device_seconds(lambda: large @ large, 4)
    assert device_seconds(lambda: large @ large, 4, ahead=8) < 2 * once
