"""Garbage is left alone while anybody asks for that, and collected afterwards as before."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from fuseopt.errors import CompileError
from fuseopt.generation.engine import graphs
from fuseopt.runtime import gc_pause
from fuseopt.training import partitioner
from fuseopt.training.forward import TrainingForward


@pytest.fixture(autouse=True)
def as_before():
    frozen, thresholds = gc.get_freeze_count(), gc.get_threshold()
    gc_pause._keeps_frozen = False
    gc.set_threshold(700)  # so that a search that is due comes at once
    yield
    gc.set_threshold(*thresholds)
    gc.enable()
    if frozen and not gc.get_freeze_count():
        gc.freeze()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_last_to_leave_lets_it_go_on(enabled):
    gc.enable() if enabled else gc.disable()
    inside, leave, seen = threading.Event(), threading.Event(), []

    def other():
        with gc_pause.paused():
            inside.set()
            leave.wait(10)
            seen.append(gc.isenabled())

    with gc_pause.paused():
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(10)
        with contextlib.suppress(KeyError), gc_pause.paused():
            raise KeyError
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert seen == [False] and gc.isenabled() == enabled


class Node:
    def __init__(self):
        self.itself = self


@pytest.mark.parametrize("frozen", ["nothing", pytest.param("a few by Python", marks=pytest.mark.slow), "all"])
def test_what_was_made_meanwhile_is_searched_with_the_oldest(monkeypatch, frozen):
    gc.unfreeze()
    gc.collect()
    gc.enable()
    kept = [Node()]
    if frozen == "all":
        gc.freeze()
    if frozen == "a few by Python":
        monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    are_others_frozen = frozen == "all"
    with gc_pause.paused():
        node = Node()
        found = weakref.ref(node)
        del node
        gc.collect(1)
        assert found() is None
        node = Node()
        found, made = weakref.ref(node), [Node() for _ in range(5000)]
        del node
    # Of those some may have been freed meanwhile.
    assert (gc.get_freeze_count() > 10_000) == are_others_frozen
    gc.collect(1)
    assert (found() is None) == are_others_frozen
    gc.collect()
    assert found() is None and kept and made


def test_where_no_search_is_due_what_is_frozen_is_not_counted(monkeypatch):
    """Which takes as long as there is much of it: tens of milliseconds a step."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("counted"))
    gc.collect()
    gc.enable()
    kept = Node()
    with gc_pause.paused():
        found = weakref.ref(Node())
    gc.collect(0)
    assert found() is None and kept


def test_what_is_frozen_is_counted_until_it_is_much(monkeypatch):
    gc.unfreeze()
    gc.enable()
    counts = [375, 10_000]
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.pop(0))
    kept = []
    for _ in range(4):
        with gc_pause.paused():
            kept += [Node() for _ in range(5000)]
    assert counts == []


def test_no_search_behind_a_compilation(monkeypatch):
    searched = []
    monkeypatch.setattr(gc, "callbacks", [lambda phase, info: searched.append(info["generation"])])
    gc.unfreeze()
    model = nn.Linear(4, 4)
    step = TrainingForward(model, backend="aot_eager")
    with gc_pause.paused():
        step(torch.ones(2, 4)).sum().backward()
    assert searched == []


def test_what_a_first_step_returned_goes_without_a_search():
    """Dynamo's exceptions, as of an attribute that is not there, have the frames of the step in their tracebacks."""

    class Config:
        def __getattribute__(self, name):
            return super().__getattribute__(name)

    class Model(nn.Linear):
        config = Config()

        def forward(self, x):
            return super().forward(x) * getattr(self.config, "scale", 2)

    model = Model(4, 4)
    step = TrainingForward(model, backend="aot_eager")
    returned = []

    def first_step():
        output = step(torch.ones(2, 4))
        output.sum().backward()
        returned.append(weakref.ref(output))

    with gc_pause.paused():
        first_step()
        assert returned[0]() is None


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
    model = Model()
    with pytest.raises(CompileError) if fails else contextlib.nullcontext():
        TrainingForward(model, strict=True)(torch.ones(1))
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
