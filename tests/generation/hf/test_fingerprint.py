"""fingerprint(): finds every change since an earlier one, by the quick comparison and by another walk."""

import pytest
import torch
from torch import nn

from fuseopt.generation.families.gpt2 import GPT2Step
from fuseopt.generation.hf.fingerprint import fingerprint
from tests import tiny


def fingerprint_of(model, before=None):
    return fingerprint(model, GPT2Step.roots(model), GPT2Step.children, before)


def move(model):
    parameter = model.transformer.h[1].mlp.c_fc.weight
    parameter.data = parameter.data.clone()


def narrow(model):
    model.transformer.wpe.weight.data = model.transformer.wpe.weight.data[:20]


def transpose(model):
    weight = model.transformer.h[0].attn.c_proj.weight
    assert weight.shape[0] == weight.shape[1]
    weight.data = weight.data.T


def halve(model):
    model.half()


def exchange_a_parameter(model):
    model.transformer.ln_f.weight = nn.Parameter(model.transformer.ln_f.weight.detach().clone())


def drop_a_parameter(model):
    model.transformer.h[0].ln_1.bias = None


def exchange_a_module(model):
    model.transformer.h[0].mlp = tiny.gpt2().transformer.h[0].mlp


def exchange_a_root(model):
    model.lm_head = nn.Linear(*reversed(model.lm_head.weight.shape), bias=False).eval()


def set_a_constant(model):
    model.transformer.h[0].ln_1.eps = 0.1


def remove_a_layer(model):
    del model.transformer.h[1]


@pytest.mark.parametrize(
    "change",
    [
        move,
        narrow,
        transpose,
        halve,
        exchange_a_parameter,
        drop_a_parameter,
        exchange_a_module,
        exchange_a_root,
        set_a_constant,
        remove_a_layer,
    ],
    ids=lambda change: change.__name__,
)
def test_a_changed_model_has_another_key(change):
    model = tiny.gpt2()
    before = fingerprint_of(model)
    assert before.reason is None and fingerprint_of(model, before) is before and before.is_in_place()
    change(model)
    assert not before.is_in_place() or change not in (move, narrow, halve)
    after = fingerprint_of(model, before)
    assert after.reason is None and after.key != before.key
    assert after.key == fingerprint_of(model).key and fingerprint_of(model, after) is after


def hook(model):
    model.transformer.h[1].ln_2.register_forward_pre_hook(lambda *args: None)


def replace_forward(model):
    model.transformer.h[1].forward = lambda *args, **kwargs: None


def train(model):
    model.transformer.drop.train()


def subclass(model):
    model.transformer.h[0].ln_1.__class__ = type("Mine", (nn.LayerNorm,), {})


def adapt(model):
    model.transformer.h[0].mlp.c_fc = nn.Identity()


@pytest.mark.parametrize("change", [hook, replace_forward, train, subclass, adapt], ids=lambda change: change.__name__)
def test_a_model_that_a_step_does_not_know_has_a_reason(change):
    model = tiny.gpt2()
    before = fingerprint_of(model)
    change(model)
    after = fingerprint_of(model, before)
    assert after.reason is not None and after == fingerprint_of(model)


def test_autocast_is_a_reason_while_it_is_on():
    model = tiny.gpt2()
    before = fingerprint_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert fingerprint_of(model, before).reason == "autocast is on"
    assert fingerprint_of(model, before) is before


def test_values_take_no_part():
    model = tiny.gpt2()
    before = fingerprint_of(model)
    with torch.no_grad():
        model.transformer.ln_f.weight.mul_(2)
    assert fingerprint_of(model, before) is before
