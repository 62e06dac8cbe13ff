"""DecodeStep: steps from outside the package, and what registration refuses."""

import logging

import pytest
import torch
from transformers import GPT2LMHeadModel

import fuseopt
from fuseopt.generation.families import step_interface
from fuseopt.generation.families.gpt2 import GPT2Step
from fuseopt.generation.families.step_interface import (
    DecodeStep,
    decode_step_class,
    register_decode_step,
    registered_step,
    unknown_step,
)
from fuseopt.generation.families.t5 import T5Step
from fuseopt.generation.tiers import Tier
from fuseopt.models import COMMON, GPT2, T5
from fuseopt.modules.base import full_name
from tests import tiny
from tests.generation.same_calls import GENERATION, assert_same, generate, prompt

GPT2_PATH = "fuseopt.generation.families.gpt2.GPT2Step"


class MyGPT2(GPT2LMHeadModel):
    """Of a class that no policy knows."""


class MyStep(GPT2Step):
    model_class = full_name(MyGPT2)
    children = {**GPT2Step.children, full_name(MyGPT2): GPT2Step.children[GPT2Step.model_class]}
    ran: list[str] = []

    def __call__(self, state):
        self.ran.append("step")
        return super().__call__(state)


class HalfStep(DecodeStep):
    """Without its own `prefill` and `__call__`."""

    model_class = "my.Model"
    children = {}

    @staticmethod
    def roots(model):
        return ()


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(step_interface, "_REGISTERED", {})


def my_model() -> MyGPT2:
    model = MyGPT2(tiny.gpt2().config).eval()
    model.generation_config.pad_token_id = 0
    return model


@pytest.mark.parametrize("step", [MyStep, f"{MyStep.__module__}.MyStep"], ids=["class", "path"])
def test_a_registered_step_runs_a_class_of_the_users(step):
    model, inputs = my_model(), prompt(tiny.gpt2(), 2, 5, 3)
    wanted = generate(model, inputs, max_new_tokens=6)
    planned = str(fuseopt.plan(model, GENERATION))
    assert "no decode step is written for MyGPT2" in planned
    register_decode_step(MyStep.model_class, step)
    MyStep.ran.clear()
    with fuseopt.fused(model, {"generation": {"max_graphs": 0}}):  # each step in Python
        assert_same(generate(model, inputs, max_new_tokens=6), wanted)
        assert model.generate.calls[-1].tier is Tier.DEVICE_LOOP
    assert len(MyStep.ran) == 5


def test_a_registered_step_goes_before_a_policys():
    class Counting(GPT2Step):
        made = 0

        def __init__(self, model):
            super().__init__(model)
            type(self).made += 1

    register_decode_step(GPT2Step.model_class, Counting)
    model = tiny.gpt2()
    with fuseopt.fused(model, GENERATION):
        generate(model, prompt(model, 1, 4, 0), max_new_tokens=3)
    assert Counting.made == 1


@pytest.mark.parametrize(
    ("model_class", "step", "message"),
    [
        ("my.Model", "GPT2Step", "'GPT2Step' for my.Model does not exist: 'GPT2Step' is not a dotted path"),
        ("my.Model", "no_such_package.Step", "does not exist: No module named 'no_such_package'"),
        ("my.Model", "fuseopt.generation.families.gpt2.GPT3Step", "does not exist: module .* has no attribute 'GPT3"),
        ("my.Model", "fuseopt.generation.families.gpt2.spec_of", "is not a class"),
        ("my.Model", GPT2_PATH, "is written for transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel"),
        ("my.Model", HalfStep, "lacks prefill, __call__ of DecodeStep"),
        ("my.Model", torch.nn.Module, "lacks model_class, roots, prefill of DecodeStep"),
    ],
)
def test_what_is_no_step_is_refused_when_it_is_registered(model_class, step, message):
    with pytest.raises(ValueError, match=message):
        register_decode_step(model_class, step)
    assert registered_step(model_class) is None


def test_registering_again_replaces_and_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        register_decode_step(GPT2Step.model_class, GPT2_PATH)
        register_decode_step(GPT2Step.model_class, GPT2_PATH)
        assert not caplog.records
        register_decode_step(GPT2Step.model_class, GPT2Step)
    assert "is now" in caplog.text and registered_step(GPT2Step.model_class) is GPT2Step


def test_steps_of_the_package_are_found_by_their_paths():
    steps = {**GPT2.decode_steps, **T5.decode_steps, **COMMON.decode_steps}
    assert {GPT2Step, T5Step} < set(map(decode_step_class, steps.values()))
    assert [unknown_step(model_class, path) for model_class, path in steps.items()] == [None] * len(steps)
