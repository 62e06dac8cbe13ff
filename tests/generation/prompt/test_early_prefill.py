"""First steps are queued before transformers prepares a call like an earlier one, and discarded if it differs."""

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

import fuseopt
from fuseopt.generation import tiers
from fuseopt.generation.engine.decode_run import DecodeRun
from fuseopt.generation.engine.graphs import StepWork
from fuseopt.generation.hf.checked_step import CheckedStep
from fuseopt.generation.prompt import early_prefill
from fuseopt.generation.prompt.call_outcomes import _MAX_OUTCOMES
from fuseopt.generation.prompt.early_prefill import EarlyPrefill
from fuseopt.generation.select.selection import Selection
from fuseopt.generation.tiers import Tier
from tests import tiny
from tests.axes import covering, thinned
from tests.generation.same_calls import GENERATION, VOCAB, and_int8, prompt, sweep, with_weights

pytestmark = pytest.mark.usefixtures("each_device", "as_on_gpu")
FAMILIES = {"gpt2": lambda: tiny.gpt2(n_positions=150), "t5": tiny.t5}
QUEUED_STEPS = 4
SETTLED = {"max_new_tokens": 9, "min_new_tokens": 4, "no_repeat_ngram_size": 3}


class Negated(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return -scores


class Listener(BaseStreamer):
    def put(self, value):
        pass

    def end(self):
        pass


@pytest.fixture(params=and_int8(FAMILIES))
def model(request, each_device, as_on_gpu, monkeypatch):
    return with_weights(request.param, lambda family: FAMILIES[family](), monkeypatch)


@pytest.fixture
def queued(monkeypatch):
    """How many steps were queued early in each call; None if no outcome of an earlier call said which."""
    monkeypatch.setattr(early_prefill, "_MAX_QUEUED_STEPS", QUEUED_STEPS)
    counts = []
    queue = EarlyPrefill._queue_steps

    def counting(*args, **kwargs):
        run = queue(*args, **kwargs)
        counts.append(None if run is None else run.queued)
        return run

    monkeypatch.setattr(EarlyPrefill, "_queue_steps", counting)
    return counts


def stock(model, inputs, **kwargs):
    torch.manual_seed(11)
    return type(model).generate(model, **inputs, **{"pad_token_id": 0, **kwargs})


def check(model, seed=0, length=6, rows=2, padded=True, **kwargs):
    """A call with as many tokens as transformers' own gives, and the same."""
    inputs = prompt(model, rows, length, seed, padded)
    wanted = stock(model, inputs, **kwargs)
    torch.manual_seed(11)
    got = model.generate(**inputs, **{"pad_token_id": 0, **kwargs})
    assert torch.equal(got, wanted)
    return model.generate.calls[-1].tier


def test_calls_that_look_alike(model, queued):
    fuseopt.initialize(model, GENERATION)
    for seed, length in enumerate((6, 6, 4, 9, 6, 6)):
        assert check(model, seed, length, max_new_tokens=9, eos_token_id=[]) is Tier.DEVICE_LOOP
    assert queued == [None, None, *[QUEUED_STEPS] * 4]
    for seed in range(6):
        check(model, seed, max_new_tokens=9, eos_token_id=[5, 7, 40])
    assert all(queued[8:])


@covering(
    model=list(FAMILIES),
    mode={mode.__name__: mode for mode in (torch.no_grad, torch.inference_mode)},
    kwargs=[SETTLED, SETTLED | {"suppress_tokens": [3, 5], "forced_eos_token_id": 8}],
    with_config=[False, True],
    indirect=["model"],
)
def test_queued_steps_are_used(model, mode, with_config, kwargs, monkeypatch):
    """Whatever a call brings along of its own."""
    served = []
    matches = DecodeRun.matches

    def noting(*args):
        served.append(matches(*args))
        return served[-1]

    monkeypatch.setattr(DecodeRun, "matches", noting)
    fuseopt.initialize(model, GENERATION)
    config = GenerationConfig(**kwargs, eos_token_id=[7, 9], pad_token_id=0, decoder_start_token_id=0)
    given = {"generation_config": config} if with_config else kwargs
    with mode():
        for seed in range(5):
            check(model, seed, **given)
    assert all(served)
    # What transformers makes tensors of in every call is known by the tensor alone, as are tensors of inference mode.
    assert mode is torch.inference_mode or len(served) == (3 if kwargs is SETTLED else 0)


@pytest.mark.parametrize("steps", [1, 2, 4, 5])
def test_no_more_steps_than_the_call_takes(model, queued, steps):
    fuseopt.initialize(model, GENERATION)
    for seed in range(4):
        check(model, seed, max_new_tokens=steps, eos_token_id=[])
    # A step is captured at the third token or in the second call, if there is one at all; the next call finds it so.
    without_plan = {1: 4, 2: 3}.get(steps, 2)
    assert queued == [None] * without_plan + [min(steps, QUEUED_STEPS)] * (4 - without_plan)


def test_rows_that_end_within_them(model, queued):
    """The third token of a sequence whose tokens all differ ends it."""
    kwargs = {"max_new_tokens": 8, "no_repeat_ngram_size": 1}
    *_, third, _, _, _, _, _ = stock(model, prompt(model, 1, 6, 3, padded=False), eos_token_id=[], **kwargs)[0].tolist()
    fuseopt.initialize(model, GENERATION)
    for _ in range(4):
        for seed in (3, 4):
            check(model, seed, rows=1, padded=False, eos_token_id=third, **kwargs)
    assert all(queued[3:])


def test_as_many_as_the_call_before_came_to(model, queued):
    """Rows that end early do so in the next call too, for all that is known."""
    kwargs = {"max_new_tokens": 8, "no_repeat_ngram_size": 1, "rows": 1, "padded": False}
    inputs = prompt(model, 1, 6, 3, padded=False)
    third = int(stock(model, inputs, eos_token_id=[], max_new_tokens=8, no_repeat_ngram_size=1)[0, -6])
    fuseopt.initialize(model, GENERATION)
    for _ in range(4):
        check(model, 3, eos_token_id=third, **kwargs)
    assert queued[-1] == 3


def test_when_they_are_queued(model, noted, monkeypatch):
    """p: transformers prepares; t: the first token of a prompt; s: a step; c: a check of the model."""
    seen, note = noted
    note(type(model), "_prepare_generated_length", "p")
    note(Selection, "__call__", "t", lambda *args, advance=True: not advance)
    note(StepWork, "__call__", "s")
    note(CheckedStep, "check", "c")
    monkeypatch.setattr(early_prefill, "_MAX_QUEUED_STEPS", QUEUED_STEPS)
    fuseopt.initialize(model, GENERATION)
    inputs = prompt(model, 2, 6, 0)
    calls = []
    for _ in range(4):
        seen.clear()
        model.generate(**inputs, max_new_tokens=8, eos_token_id=[], pad_token_id=0)
        calls.append("".join(seen))
    assert calls == ["cptsssssss", "ptsscsssss", "tssspc" + "ssss", "tssspc" + "ssss"]


def test_they_come_before_anything_is_asked(model, noted, monkeypatch):
    """r: reasons are asked for; t: the first token of a prompt; s: a step."""
    seen, note = noted
    note(tiers, "argument_reasons", "r")
    note(Selection, "__call__", "t", lambda *args, advance=True: not advance)
    note(StepWork, "__call__", "s")
    monkeypatch.setattr(early_prefill, "_MAX_QUEUED_STEPS", QUEUED_STEPS)
    fuseopt.initialize(model, GENERATION)
    calls = []
    for seed in range(4):
        seen.clear()
        check(model, seed, padded=False, max_new_tokens=6, eos_token_id=[])
        calls.append("".join(seen))
    assert calls == ["rtsssss", "rtsssss", "tsssrss", "tsssrss"]


@pytest.mark.parametrize(
    ("kwargs", "tier"),
    [
        ({"max_new_tokens": 1}, Tier.DEVICE_LOOP),
        ({"do_sample": True}, Tier.DEVICE_LOOP),
        ({"suppress_tokens": [3, 5]}, Tier.DEVICE_LOOP),
        ({"logits_processor": [Negated()]}, Tier.FAST_FORWARD),
    ],
    ids=["one token", "sampled", "ids to suppress", "a processor"],
)
def test_a_prompt_comes_before_anything_is_asked(kwargs, tier, model, noted, queued):
    """Though no step can be queued behind it, nor would be the same for a call of its own making.

    p: a prompt is queued; r: reasons are asked for.
    """
    seen, note = noted
    note(EarlyPrefill, "_queue", "p")
    note(tiers, "argument_reasons", "r")
    fuseopt.initialize(model, GENERATION)
    calls = []
    for seed in range(4):
        seen.clear()
        made = {name: value() if isinstance(value, type) else value for name, value in kwargs.items()}
        inputs = prompt(model, 1, 6, seed, padded=False)
        wanted = stock(model, inputs, **{"max_new_tokens": 5, **made})
        torch.manual_seed(11)
        got = model.generate(**inputs, **{"pad_token_id": 0, "max_new_tokens": 5, **made})
        assert torch.equal(got, wanted) and model.generate.calls[-1].tier is tier
        calls.append("".join(seen))
    assert calls == ["rp", "pr", "pr", "pr"]
    assert queued == [None] * 4


@pytest.fixture
def starts(monkeypatch):
    """The masks of prompts that were queued, or None, in the order of that."""
    masks, queue = [], EarlyPrefill._queue

    def noting(early_prefill, request, keep):
        masks.append(keep)
        return queue(early_prefill, request, keep)

    monkeypatch.setattr(EarlyPrefill, "_queue", noting)
    return masks


def test_prompts_are_taken_to_be_masked_as_the_last_were(model, starts):
    fuseopt.initialize(model, GENERATION)
    counts = []
    for seed, padded in enumerate([False] * 3 + [True] * 3 + [False] * 3):
        inputs = prompt(model, 2, 6, seed, padded)
        assert bool(inputs["attention_mask"].all()) != padded
        starts.clear()
        wanted = stock(model, inputs, max_new_tokens=6)
        assert torch.equal(model.generate(**inputs, max_new_tokens=6, pad_token_id=0), wanted)
        assert (starts[-1] is not None) == padded
        counts.append(len(starts))
    assert counts == [1, 1, 1, 2, 1, 1, 1, 1, 1]


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_nothing_is_queued_under_a_dispatch_mode(model, starts):
    fuseopt.initialize(model, GENERATION)
    for seed in range(3):
        check(model, seed, max_new_tokens=6)
    starts.clear()
    with Watching():
        assert check(model, 3, max_new_tokens=6) is Tier.STOCK
    assert not starts and "mode" in model.generate.calls[-1].reason
    assert check(model, 4, max_new_tokens=6) is Tier.DEVICE_LOOP


def test_a_reason_that_no_argument_tells(model, starts):
    """It is found when the prompt has been queued already, which counts for nothing then."""
    fuseopt.initialize(model, GENERATION)
    for seed in range(3):
        check(model, seed, padded=False, max_new_tokens=6)
    starts.clear()
    model._update_model_kwargs_for_generation = model._update_model_kwargs_for_generation
    assert check(model, 3, padded=False, max_new_tokens=6) is Tier.STOCK
    assert starts == [None]
    del model._update_model_kwargs_for_generation
    assert check(model, 4, padded=False, max_new_tokens=6) is Tier.DEVICE_LOOP


class AtOnce(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)


def other_eos(model):
    model.generation_config.eos_token_id = 5


def other_number_of_eos(model):
    model.generation_config.eos_token_id = [3, 4, 5, 6, 7, 8, 9]


def a_penalty(model):
    model.generation_config.repetition_penalty = 3.0


def a_shortest_length(model):
    model.generation_config.min_new_tokens = 6


def sampling(model):
    model.generation_config.do_sample = True


def other_weights(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.9)


def moved_weights(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone().flip(-1)


def a_hook(model):
    model.lm_head.register_forward_hook(lambda module, args, output: -output)


def beams(model):
    model.generation_config.num_beams = 2


CHANGES = (
    other_eos,
    other_number_of_eos,
    a_penalty,
    a_shortest_length,
    sampling,
    other_weights,
    moved_weights,
    a_hook,
    beams,
)


@thinned(2, model=list(FAMILIES), change={change.__name__: change for change in CHANGES}, indirect=["model"])
def test_what_no_argument_tells(change, model, queued, monkeypatch):
    """A call that turns out to be another is what it is, and so are those after it."""
    penalties = []
    make = RepetitionPenaltyLogitsProcessor.__init__

    def noting(processor, /, *args, **kwargs):
        make(processor, *args, **kwargs)
        penalties.append(processor)

    monkeypatch.setattr(RepetitionPenaltyLogitsProcessor, "__init__", noting)
    fuseopt.initialize(model, GENERATION)
    for seed in range(3):
        check(model, seed, max_new_tokens=9)
    assert queued == [None, None, QUEUED_STEPS]
    change(model)
    for seed in range(4):
        check(model, seed, max_new_tokens=9)
    # Some versions of transformers make a penalty for what follows a prompt, with a tensor of each call's own.
    is_settled = not any(isinstance(penalty.prompt_ignore_length, torch.Tensor) for penalty in penalties)
    serves_again = change not in (sampling, a_hook, beams) and is_settled
    assert (change is a_penalty) == bool(penalties)
    assert len(queued) < 7 or (queued[6] is not None) == serves_again


def test_ids_that_no_argument_tells(model, queued):
    """They end and fill rows, or may not yet, within the steps that were queued for others."""
    inputs, kwargs = prompt(model, 2, 6, 3), {"max_new_tokens": 8, "no_repeat_ngram_size": 1}
    tokens = stock(model, inputs, eos_token_id=[], **kwargs)[0, -8:].tolist()
    unused = next(token for token in range(VOCAB) if token not in tokens)
    config = model.generation_config
    fuseopt.initialize(model, GENERATION)
    for ends, pad, least in (
        (unused, 0, 1),
        (tokens[1], 0, 1),
        (tokens[1], 0, 5),
        (tokens[1], 0, 3),
        (tokens[1], 9, 1),
        (tokens[2], 9, 1),
        (tokens[0], 8, 1),
    ):
        config.eos_token_id, config.pad_token_id, config.min_new_tokens = ends, pad, least
        for _ in range(3):
            wanted = type(model).generate(model, **inputs, **kwargs)
            assert torch.equal(model.generate(**inputs, **kwargs), wanted)
    # One call of each kind finds steps queued for the kind before, and the last one its own.
    assert [count is not None for count in queued] == [False, False, True] + [True, False, True] * 6


def test_calls_of_other_kinds_between_plain_ones_equal_transformers(model, queued):
    """Each kind of call in turns with a plain one, for which steps are queued all the same."""
    fuseopt.initialize(model, GENERATION)
    others = (
        {"logits_processor": [Negated()]},
        {"stopping_criteria": [AtOnce()]},
        {"repetition_penalty": 2.0},
        {"max_new_tokens": 5},
        {"do_sample": True},
        {"num_beams": 2},
        {"generation_config": GenerationConfig(max_new_tokens=9, suppress_tokens=[3, 4], pad_token_id=0)},
        {"bad_words_ids": [[7]]},
    )
    for seed in range(2):
        check(model, seed, max_new_tokens=9)
    for other in others:
        for seed in range(3):
            check(model, seed, **{"max_new_tokens": 9, **other})
            count = len(queued)
            check(model, seed, max_new_tokens=9)
            assert queued[count:] == [QUEUED_STEPS]


def test_a_streamer_after_calls_without(model, queued):
    fuseopt.initialize(model, GENERATION)
    for streamer in (None, None, Listener(), None):
        inputs = prompt(model, 1, 6, 0)
        wanted = stock(model, inputs, max_new_tokens=9)
        assert torch.equal(model.generate(**inputs, max_new_tokens=9, pad_token_id=0, streamer=streamer), wanted)


def test_an_error_of_the_preparation(model, queued):
    """After which calls go on as before."""
    fuseopt.initialize(model, GENERATION)
    for seed in range(3):
        check(model, seed, max_new_tokens=9)
    model.generation_config.temperature = -1.0
    model.generation_config.do_sample = True
    inputs = prompt(model, 2, 6, 0)
    with pytest.raises(ValueError) as wanted:
        stock(model, inputs, max_new_tokens=9)
    with pytest.raises(ValueError) as got:
        model.generate(**inputs, max_new_tokens=9, pad_token_id=0)
    assert str(got.value) == str(wanted.value)
    model.generation_config.temperature, model.generation_config.do_sample = None, None
    for seed in range(3):
        check(model, seed, max_new_tokens=9)
    assert queued[-1] == QUEUED_STEPS


KINDS = {
    "max_new_tokens": st.sampled_from([1, 2, 5, 9]),
    "eos_token_id": st.sampled_from([None, 7, [7], [5, 9], list(range(30, 50))]),
    "repetition_penalty": st.sampled_from([1.0, 1.7]),
    "no_repeat_ngram_size": st.sampled_from([0, 2]),
    "do_sample": st.sampled_from([False, False, True]),
    "num_beams": st.sampled_from([1, 1, 1, 2]),
    "suppress_tokens": st.sampled_from([None, [3, VOCAB - 1]]),
}


@sweep(16)
@given(st.data())
def test_calls_in_any_order(model, data):
    """Of a few kinds, each with its own prompt."""
    kinds = data.draw(st.lists(st.fixed_dictionaries({}, optional=KINDS), min_size=1, max_size=3))
    order = data.draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=7))
    if not hasattr(model.generate, "calls"):
        fuseopt.initialize(model, GENERATION)
    for kwargs in order:
        kwargs = {"max_new_tokens": 6, **kwargs}
        if kwargs.get("do_sample"):
            kwargs["num_beams"] = 1
        length, rows = data.draw(st.integers(2, 9)), data.draw(st.sampled_from([1, 2]))
        check(model, data.draw(st.integers(0, 9)), length, rows, data.draw(st.booleans()), **kwargs)


def test_outcomes_are_bounded(model):
    fuseopt.initialize(model, {"generation": {"enable": True, "max_graphs": 2}})
    for steps in range(3, 3 + _MAX_OUTCOMES + 4):
        check(model, steps, max_new_tokens=steps, eos_token_id=[])
    assert len(model.generate.early_prefill.outcomes) == _MAX_OUTCOMES


@pytest.mark.gpu
@pytest.mark.parametrize("each_device", ["cuda"], indirect=True)
def test_a_step_that_has_gone_is_not_queued(model, queued):
    fuseopt.initialize(model, {"generation": {"enable": True, "max_graphs": 1}})
    for _ in range(3):
        check(model, 0, max_new_tokens=9)
    check(model, 0, rows=3, max_new_tokens=9)
    count = len(queued)
    check(model, 0, max_new_tokens=9)
    assert queued[count:] == [None]


def test_what_was_captured_goes_all_the_same(model, queued):
    """Outcomes reference neither graphs and states nor the caller's arguments."""
    fuseopt.initialize(model, GENERATION)
    for seed in range(3):
        check(model, seed, max_new_tokens=9)
    generate = model.generate
    (step,) = generate.graphs._steps.values()
    gone = weakref.ref(step), weakref.ref(step.state)
    del step
    generate.graphs.clear()
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    check(model, 0, max_new_tokens=9)
    assert queued == [None, None, QUEUED_STEPS, None]
