"""The model is checked while the device works, if nobody can tell; what had begun on another model is discarded."""

from unittest import mock

import pytest
import torch
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList

import fuseopt
from fuseopt.generation.engine.graphs import StepGraphs, StepWork
from fuseopt.generation.hf.checked_step import CheckedStep
from fuseopt.generation.select.selection import Selection
from fuseopt.generation.tiers import Tier
from tests import tiny
from tests.generation.same_calls import GENERATION, and_int8, assert_same, generate, prompt, with_weights

pytestmark = pytest.mark.usefixtures("each_device", "as_on_gpu")
FAMILIES = {"gpt2": tiny.gpt2, "t5": tiny.t5}


@pytest.fixture(params=and_int8(FAMILIES))
def model(request, each_device, as_on_gpu, monkeypatch):
    return with_weights(request.param, lambda family: FAMILIES[family](), monkeypatch)


@pytest.fixture
def events(noted, model):
    """Letters for what happens in a call: check (k), prepare (p), token of the prompt (t), capture (c), step (s)."""
    seen, note = noted
    note(CheckedStep, "check", "k")
    note(type(model), "_prepare_generated_length", "p")
    note(Selection, "__call__", "t", lambda *args, advance=True: not advance)
    note(StepGraphs, "capture", "c", lambda graphs, step: step.graph is None)
    note(StepWork, "__call__", "s")
    return seen


def test_when_the_model_is_checked(model, events):
    """Before there is a step; then once two steps are queued, before one is captured, and before the call ends."""
    fuseopt.initialize(model, GENERATION)

    def call(**kwargs):
        events.clear()
        generate(model, prompt(model, 2, 6, 0), eos_token_id=[], **kwargs)
        return "".join(events)

    assert call(max_new_tokens=6) == "kptscssss"
    assert call(max_new_tokens=6) == "ptssksss"
    assert [call(max_new_tokens=new) for new in (1, 2, 3, 4)] == ["ptk", "ptsk", "ptssk", "ptssks"]
    assert call(max_new_tokens=2, suppress_tokens=[3]) == "ptsk"
    assert call(max_new_tokens=2, suppress_tokens=[3]) == "ptkcs"
    assert call(max_new_tokens=3, do_sample=True) == "pkts" + "cs"
    assert call(max_new_tokens=3, max_time=1e6) == "pks" + "cs"
    assert call(max_new_tokens=3, output_hidden_states=True) == "pk"
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert call(max_new_tokens=3) == "kptscs"


def train(model):
    model.train()


def hook(model):
    model.lm_head.register_forward_hook(lambda module, args, output: -output)


def hook_the_encoder(model):
    part = model.encoder if model.config.is_encoder_decoder else model.transformer
    part.register_forward_hook(lambda module, args, output: type(output)(output[0].flip(-1)))


def other_eps(model):
    for module in model.modules():
        for name in {"eps", "variance_epsilon"} & vars(module).keys():
            setattr(module, name, 0.5)


def other_scale(model):
    """Which no module tells."""
    model.config.scale_decoder_outputs = not getattr(model.config, "scale_decoder_outputs", True)


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def wrap(model):
    name = "decoder" if model.config.is_encoder_decoder else "transformer"
    setattr(model, name, Wrapped(getattr(model, name)))


CHANGES = [(change, {}) for change in (train, hook, hook_the_encoder, other_eps, other_scale, wrap)]
CALLS = [
    {"do_sample": True},
    {"num_beams": 2},
    {"max_time": 1e6},
    {"output_hidden_states": True},
    {"max_new_tokens": 1},
]
CHANGES += [(change, kwargs) for change in (train, other_eps) for kwargs in CALLS]


@pytest.mark.parametrize(("change", "kwargs"), CHANGES, ids=lambda case: getattr(case, "__name__", str(case)))
def test_a_model_that_has_changed(model, change, kwargs, caplog):
    """Tokens, scores, random numbers and warnings are those of the model as it is, in this call and the next."""
    kwargs = {"max_new_tokens": 7, "eos_token_id": 2, "pad_token_id": None, **kwargs}
    inputs = {"input_ids": prompt(model, 2, 6, 0, padded=False)["input_ids"]}
    fuseopt.initialize(model, GENERATION)
    for _ in range(2):
        generate(model, inputs, **kwargs)
    change(model)
    caplog.clear()
    with mock.patch.object(model, "generate", lambda **kwargs: type(model).generate(model, **kwargs)):
        wanted = generate(model, inputs, **kwargs)
    messages = caplog.messages[:]
    for _ in range(2):
        caplog.clear()
        assert_same(generate(model, inputs, **kwargs), wanted)
        assert messages and caplog.messages == messages
    is_known = change in (other_eps, other_scale) or (change is hook_the_encoder and model.config.is_encoder_decoder)
    for call in list(model.generate.calls)[-2:]:
        assert (call.tier is Tier.STOCK) == (not is_known or "output_hidden_states" in kwargs), call
        assert ("carries hooks" in str(call)) >= (change is hook)


def test_hooks_are_called_as_often_as_in_transformers(model):
    """Where the model's own forward takes the prompt, too."""
    inputs, parts, calls = prompt(model, 2, 6, 0), [model.base_model], []
    if model.config.is_encoder_decoder:
        parts = [model.encoder, model.decoder]
        inputs["decoder_attention_mask"] = torch.ones(2, 1, dtype=torch.int64)
    fuseopt.initialize(model, GENERATION)
    for _ in range(2):
        generate(model, inputs, max_new_tokens=5)
    for part in parts:
        part.register_forward_hook(lambda module, args, output: calls.append(module))
    generate(model, inputs, max_new_tokens=5)
    got = calls[:]
    calls.clear()
    type(model).generate(model, **inputs, max_new_tokens=5)
    assert got and got == calls


def test_code_of_the_caller_s_runs_on_the_model_as_it_is(model):
    """And once for each token, since it is called after the check."""
    inputs, lengths = prompt(model, 2, 6, 0), []

    class Sees(LogitsProcessor):
        def __call__(self, input_ids, scores):
            lengths.append(input_ids.shape[1])
            return scores

    processors = LogitsProcessorList([Sees()])
    fuseopt.initialize(model, GENERATION)
    for change in (lambda model: None, other_eps, train):
        change(model)
        lengths.clear()
        generate(model, inputs, max_new_tokens=4, logits_processor=processors)
        assert len(lengths) == len(set(lengths)) == 4


def test_an_error_of_the_preparation_leaves_the_check_undone(model):
    inputs = prompt(model, 2, 6, 0, padded=False)
    fuseopt.initialize(model, GENERATION)
    generate(model, inputs, max_new_tokens=5)
    train(model)
    for kwargs in ({"max_length": 0}, {"no_such_argument": 1}):
        with pytest.raises(ValueError) as wanted:
            type(model).generate(model, **inputs, **kwargs)
        with pytest.raises(ValueError) as got:
            model.generate(**inputs, **kwargs)
        assert str(got.value) == str(wanted.value) and got.value.__context__ is None
    wanted = generate(fuseopt.restore(model), inputs, max_new_tokens=5)
    fuseopt.initialize(model, GENERATION)
    assert_same(generate(model, inputs, max_new_tokens=5), wanted)


def test_an_error_of_a_hook_comes_by_itself(model):
    """Without the context of the check that found the hook."""
    inputs = prompt(model, 2, 6, 0)
    fuseopt.initialize(model, GENERATION)
    generate(model, inputs, max_new_tokens=5)

    def fail(*args):
        raise ArithmeticError("mine")

    for part in ("encoder", "decoder") if model.config.is_encoder_decoder else ("transformer",):
        handle = getattr(model, part).register_forward_hook(fail)
        with pytest.raises(ArithmeticError, match="mine") as raised:
            generate(model, inputs, max_new_tokens=5)
        assert raised.value.__context__ is None
        handle.remove()
        generate(model, inputs, max_new_tokens=5)
        assert model.generate.calls[-1].tier is Tier.DEVICE_LOOP


def test_a_call_under_autocast_is_transformers_own(model):
    inputs = prompt(model, 2, 6, 0)
    fuseopt.initialize(model, GENERATION)
    generate(model, inputs, max_new_tokens=5)
    with torch.autocast(model.device.type, torch.bfloat16):
        got = generate(model, inputs, max_new_tokens=5)
        assert model.generate.calls[-1].reason == "autocast is on"
        assert_same(got, generate(fuseopt.restore(model), inputs, max_new_tokens=5))
