"""An asynchronous exception at any point leaves a model stock or fused, never half of each; threads take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fuseopt
from fuseopt import api, apply
from fuseopt.modules import FusedGELU, FusedLayerNorm
from fuseopt.modules.base import fused_class
from tests import tiny
from tests.interrupts import interrupted, places

EVERYWHERE = ("apply.py", "api.py")
NORMS = {"kernel_fusion": {"custom_cuda_kernels": ["FusedLayerNorm", "FusedNoRepeatNGram"], "jit": False}}
GELU = {"kernel_fusion": {"custom_cuda_kernels": ["FusedGELU"], "jit": False, "backend": "reference"}}


class Model(nn.Module):
    """A model with two modules to replace, one of them with two names, and a method."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.inner = nn.Sequential(self.norm, nn.GELU())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.inner(input)

    def _get_logits_processor(self) -> None:
        """Makes FusedNoRepeatNGram set an attribute that the instance does not have."""


def fused(model: nn.Module) -> None:
    with fuseopt.fused(model, GELU):
        pass


INPUT = {"input": torch.randn(2, 4)}
CALLS: dict[str, tuple[object, Callable[[nn.Module], object]]] = {
    "initialize": (None, lambda model: fuseopt.initialize(model, NORMS)),
    "initialize again": (GELU, lambda model: fuseopt.initialize(model, NORMS)),
    "restore": (NORMS, fuseopt.restore),
    "plan": (NORMS, lambda model: fuseopt.plan(model, GELU)),
    "fused": (None, fused),
    "fused again": (NORMS, fused),
    "verify": (NORMS, lambda model: fuseopt.verify(model, GELU, INPUT)),
}
STAYS = ("plan", "fused", "fused again", "verify")


def assert_whole(model: nn.Module, stock: dict[str, object]) -> None:
    """Whether the model matches its record, and is the stock model without it."""
    applied = apply.applied_to(model)
    for change in applied.changes if applied else ():
        assert change.current() is change.after, change.path
    fuseopt.restore(model)
    assert tiny.snapshot(model) == stock


def assert_whole_wherever_interrupted(
    model: nn.Module,
    before: object,
    call: Callable[[nn.Module], object],
    *,
    stays: bool,
    everywhere: tuple[str, ...],
    sampled: int,
) -> None:
    def prepare() -> None:
        fuseopt.restore(model)
        if before is not None:
            fuseopt.initialize(model, before)

    stock = tiny.snapshot(model)
    prepare()
    call(model)  # imports, and loads libraries
    prepare()
    interruptions = 0
    for place in places(lambda: call(model), everywhere, sampled):
        prepare()
        start, record = tiny.snapshot(model), apply.applied_to(model)
        # An interruption between a guard of gradients and what it guards leaves its mode, as Python's signals cannot.
        with torch.enable_grad():
            interruptions += interrupted(lambda: call(model), place)
        if stays:
            assert tiny.snapshot(model) == start and apply.applied_to(model) is record, place
        assert_whole(model, stock)
    assert interruptions > 100


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.endswith("again")) for name in CALLS]
)
def test_interrupted_anywhere_a_model_is_wholly_stock_or_wholly_fused(name):
    # What verify computes takes long, and most of its bytecodes are in what it calls.
    everywhere, sampled = ((), 250) if name == "verify" else (EVERYWHERE, 50)
    model, (before, call) = Model().train(), CALLS[name]
    assert_whole_wherever_interrupted(model, before, call, stays=name in STAYS, everywhere=everywhere, sampled=sampled)


def test_interrupted_a_transformer_is_wholly_stock_or_wholly_fused():
    def call(model: nn.Module) -> None:
        fuseopt.initialize(model, "reference")
        fuseopt.initialize(model, NORMS)

    model = tiny.gpt2(n_layer=1)
    assert_whole_wherever_interrupted(model, GELU, call, stays=False, everywhere=(), sampled=110)


def test_of_two_threads_that_initialize_a_model_one_waits(monkeypatch):
    model, build_plan = Model(), api.build_plan
    inside, may_go_on = threading.Event(), threading.Event()
    planned = []

    def slow_plan(*arguments):
        planned.append(threading.current_thread().name)
        inside.set()
        assert may_go_on.wait(10)
        return build_plan(*arguments)

    monkeypatch.setattr(api, "build_plan", slow_plan)
    first = threading.Thread(target=fuseopt.initialize, args=(model, NORMS), name="first")
    second = threading.Thread(target=fuseopt.initialize, args=(model, GELU), name="second")
    first.start()
    assert inside.wait(10)
    second.start()
    second.join(0.2)
    assert second.is_alive() and planned == ["first"]
    may_go_on.set()
    for thread in (first, second):
        thread.join(10)
    assert type(model.norm) is nn.LayerNorm and fused_class(model.inner[1]) is FusedGELU
    assert fuseopt.report(model).config == fuseopt.Config.load(GELU)
    fuseopt.restore(model)
    assert type(model.inner[1]) is nn.GELU


def test_another_thread_can_initialize_a_model_after_an_interrupt(monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    model = Model()
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(api, "build_plan", interrupt)
        fuseopt.initialize(model, NORMS)
    thread = threading.Thread(target=fuseopt.initialize, args=(model, NORMS), daemon=True)
    thread.start()
    thread.join(10)
    assert isinstance(model.norm, FusedLayerNorm)
