"""Large 16-bit products of a compiled step on a GPU run by the algorithm that was measured; all others by torch."""

import copy

import pytest
import torch
from torch import fx, nn

import fuseopt
from fuseopt.ops.tuned_matmul import RAW
from fuseopt.training import partitioner
from fuseopt.training.passes import autotuned_gemm
from tests.training.graphs import traced

aten, TUNED = torch.ops.aten, RAW["cuda"]
LARGE = 2048


def graph_of(op, *shapes, device="cuda", dtype=torch.bfloat16, more=(), **kwargs) -> fx.Graph:
    """Of one call of `op`."""
    return traced(lambda call, *given: (call(op, *given, *more, **kwargs),), *shapes, device=device, dtype=dtype)


def exchanged(graph: fx.Graph) -> fx.Node:
    autotuned_gemm.run(graph)
    graph.lint()
    (node,) = (node for node in graph.nodes if node.op == "call_function")
    return node


SQUARE = (LARGE, LARGE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_products_are_exchanged(dtype):
    node = exchanged(graph_of(aten.mm.default, SQUARE, SQUARE, dtype=dtype))
    assert node.target is TUNED and node.args[2:] == (None, "", False, True)
    node = exchanged(graph_of(aten.mm.dtype, SQUARE, SQUARE, dtype=dtype, more=(torch.float32,)))
    assert node.target is TUNED and node.args[2:] == (None, "", True, True)
    node = exchanged(graph_of(aten.addmm.default, (LARGE,), SQUARE, SQUARE, dtype=dtype))
    assert node.target is TUNED
    assert [str(given) for given in node.args[:3]] == ["input_1", "input_2", "input_0"]


OTHERS = {
    "small": graph_of(aten.mm.default, (64, 64), (64, 64)),
    "on a CPU": graph_of(aten.mm.default, SQUARE, SQUARE, device="cpu"),
    "in float32": graph_of(aten.mm.default, SQUARE, SQUARE, dtype=torch.float32),
    "to the dtype that it has": graph_of(aten.mm.dtype, SQUARE, SQUARE, more=(torch.bfloat16,)),
    "with a matrix added": graph_of(aten.addmm.default, SQUARE, SQUARE, SQUARE),
    "with a scale": graph_of(aten.addmm.default, (LARGE,), SQUARE, SQUARE, alpha=2),
    "a batch": graph_of(aten.bmm.default, (2, *SQUARE), (2, *SQUARE)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_products_that_the_kernel_does_not_take_stay_as_traced(name):
    (before,) = (node.target for node in OTHERS[name].nodes if node.op == "call_function")
    assert exchanged(OTHERS[name]).target is before


def test_what_can_run_is_part_of_the_key_of_cached_code(monkeypatch):
    keys = []
    for available in (True, False):
        monkeypatch.setattr(autotuned_gemm, "is_available", lambda available=available: available)
        keys.append(partitioner.Partitioner(in_regions=True).uuid())
    assert keys[0] != keys[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it may be")
def test_is_not_available_without_a_gpu():
    assert not autotuned_gemm.is_available()


def step(model: nn.Module, x: torch.Tensor) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x).square().mean()
    loss.backward()


@pytest.mark.gpu
def test_a_step_calls_it_forward_and_backward_unless_it_has_to_be_deterministic(monkeypatch):
    torch._dynamo.reset()
    torch.manual_seed(0)
    stock = nn.Sequential(*(nn.Linear(LARGE, LARGE) for _ in range(4))).cuda().train()
    x = torch.randn(LARGE, LARGE, device="cuda")
    calls = {}
    for deterministic in (False, True):
        torch._dynamo.reset()
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(deterministic)
        try:
            fused = fuseopt.initialize(
                copy.deepcopy(stock), {"kernel_fusion": {"memory_efficient_fusion": True}}, strict=True
            )
            step(fused, x)
            fused.zero_grad()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                step(fused, x)
        finally:
            torch.use_deterministic_algorithms(False)
        calls[deterministic] = sum(e.count for e in profile.key_averages() if e.key == "fuseopt::tuned_matmul")
        step(stock, x)
        for gradient, expected in zip(fused.parameters(), stock.parameters(), strict=True):
            assert (gradient.grad - expected.grad).norm() <= 0.02 * expected.grad.norm()
        stock.zero_grad()
    # Four products forward, eleven backward.
    assert calls == {False: 11, True: 0}
