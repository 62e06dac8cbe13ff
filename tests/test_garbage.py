"""Garbage is left alone while anybody asks for that, and collected afterwards as before."""

import contextlib
import gc
import threading

import pytest
import torch
from torch import nn

from fuseopt import garbage
from fuseopt.errors import CompileError
from fuseopt.generation import graphs
from fuseopt.modules import partitioner
from fuseopt.modules.training_forward import TrainingForward


@pytest.fixture(autouse=True)
def as_before():
    yield
    gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_last_to_leave_lets_it_go_on(enabled):
    gc.enable() if enabled else gc.disable()
    inside, leave, seen = threading.Event(), threading.Event(), []

    def other():
        with garbage.not_collected():
            inside.set()
            leave.wait(10)
            seen.append(gc.isenabled())

    with garbage.not_collected():
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(10)
        with contextlib.suppress(KeyError), garbage.not_collected():
            raise KeyError
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert seen == [False] and gc.isenabled() == enabled


@pytest.mark.parametrize("fails", [True, False])
def test_not_while_a_step_compiles(monkeypatch, fails):
    seen = []

    @torch.compiler.assume_constant_result
    def run_by_dynamo():
        seen.append(gc.isenabled())
        return 2

    class Model(nn.Module):
        def forward(self, x):
            return run_by_dynamo() * x

    def backend(graph, inputs, **_):
        seen.append(gc.isenabled())
        if fails:
            raise RuntimeError("not today")
        return graph.forward

    monkeypatch.setattr(partitioner, "compile_graph", backend)
    with pytest.raises(CompileError) if fails else contextlib.nullcontext():
        TrainingForward(Model())(torch.ones(1))
    # Where it fails the model's own forward runs after it.
    assert seen == [False, False, *([True] if fails else [])] and gc.isenabled()


@pytest.mark.gpu
def test_not_while_a_step_is_captured():
    seen, value = [], torch.zeros(1, device="cuda")

    class Watching(graphs.Work):
        def run(self):
            seen.append(gc.isenabled())
            value.add_(1)

    work = Watching("", None)
    work()
    work.capture(torch.cuda.graph_pool_handle(), torch.cuda.Stream())
    work()
    assert seen == [True, False] and gc.isenabled() and value.item() == 2
