"""CheckedStep: a step per state of the model; work queued before a deferred check is valid only if nothing changed."""

import pytest
import torch

from fuseopt.generation.engine.graphs import StepGraphs
from fuseopt.generation.families.gpt2 import GPT2Step
from fuseopt.generation.families.t5 import T5Step
from fuseopt.generation.hf.checked_step import CheckedStep, ModelChanged
from tests import tiny

STEPS = {"gpt2": GPT2Step, "t5": T5Step}


@pytest.fixture(params=STEPS)
def family(request):
    return request.param


def made(family):
    model, graphs = tiny.FAMILIES[family]().eval(), StepGraphs(2)
    return model, CheckedStep(model, STEPS[family], graphs)


def move(module):
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def test_it_is_built_by_the_first_check_and_kept_while_nothing_changes(family):
    model, checked = made(family)
    assert not checked.is_built and not checked.is_in_place()
    first = checked.check()
    assert first == (None, False) and isinstance(checked.step, STEPS[family])
    step = checked.step
    with torch.no_grad():
        next(model.parameters()).mul_(2.0)
    assert checked.is_in_place() and checked.check() == (None, True) and checked.step is step


def test_moved_weights_rebuild_the_step(family):
    model, checked = made(family)
    checked.check()
    step = checked.step
    move(model)
    assert not checked.is_in_place()
    assert checked.check() == (None, False) and checked.step is not step and checked.is_in_place()


def test_a_deferred_check_is_made_once(family):
    model, checked = made(family)
    checked.check()
    checked.defer()
    checked.confirm()
    model.train()
    checked.confirm()
    checked.defer()
    with pytest.raises(ModelChanged) as raised:
        checked.confirm()
    assert "training mode" in raised.value.reason
    checked.confirm()


def test_a_change_without_a_reason_against_the_step(family):
    model, checked = made(family)
    checked.check()
    step = checked.step
    for module in model.modules():
        for name in {"eps", "variance_epsilon"} & vars(module).keys():
            setattr(module, name, 0.5)
    assert checked.is_in_place()
    checked.defer()
    with pytest.raises(ModelChanged) as raised:
        checked.confirm()
    assert raised.value.reason is None and checked.step is not step


def hook(model):
    model.encoder.register_forward_hook(lambda module, args, output: None)


def test_an_encoder_is_checked_only_in_calls_that_use_it():
    model, checked = made("t5")
    checked.check()
    assert checked.use_encoder(check_now=True) is None and checked.is_encoder_in_place()
    encoder = checked.encoder
    checked.defer()
    assert checked.use_encoder(check_now=False) is None
    hook(model)
    with pytest.raises(ModelChanged) as raised:
        checked.confirm()
    # The decoder's step is as it was; it is the encoder's output that is invalid.
    assert raised.value.reason is None
    checked.defer()
    checked.confirm()
    assert "carries hooks" in checked.use_encoder(check_now=True) and checked.encoder is encoder


def test_an_encoder_that_moved_is_checked_at_once():
    model, checked = made("t5")
    checked.check()
    checked.use_encoder(check_now=True)
    encoder = checked.encoder
    move(model.encoder)
    assert not checked.is_encoder_in_place()
    assert checked.use_encoder(check_now=False) is None and checked.encoder is not encoder
