"""Beam search of an initialised model against transformers' own: sequences, scores, beam indices, caches, tier."""

from unittest import mock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import DynamicCache, EncoderDecoderCache

import fuseopt
from fuseopt.generation.engine.graphs import StepWork
from fuseopt.generation.engine.state import DecodeState
from fuseopt.generation.engine.stop_flags import StopFlags
from fuseopt.generation.tiers import Tier
from fuseopt.ops.decode import linear
from tests import tiny
from tests.axes import covering
from tests.generation.same_calls import (
    DETAILS,
    FAMILIES,
    GENERATION,
    ON_DEVICE,
    SAMPLING,
    VOCAB,
    and_int8,
    assert_same,
    calls_of,
    compare,
    generate,
    prompt,
    sweep,
    token,
    with_weights,
)

# Of random lengths some do not go together.
pytestmark = pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
BEAMS = {
    "length_penalty": st.one_of(st.floats(-2.0, 3.0), st.integers(-2, 3)),
    "early_stopping": st.sampled_from([True, False, "never"]),
}


@pytest.fixture(params=and_int8(FAMILIES))
def model(request, each_device, monkeypatch):
    return with_weights(request.param, varied, monkeypatch)


def varied(family):
    model = tiny.FAMILIES[family]()
    if family == "gpt2":
        # As it is initialised, it says the same token again and again, and beams hardly branch.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(20 if parameter.dim() > 1 else 1)
    return model


@st.composite
def beam_calls(draw):
    kwargs = {name: draw(values) for name, values in (BEAMS | DETAILS).items()}
    kwargs["num_beams"] = draw(st.integers(1, 6))
    kwargs["num_return_sequences"] = draw(st.integers(1, kwargs["num_beams"]))
    kwargs["max_new_tokens"] = draw(st.integers(1, 12))
    kwargs["eos_token_id"] = draw(st.one_of(token, st.lists(token, max_size=20, unique=True)))
    kwargs["do_sample"] = draw(st.booleans())
    names = draw(st.lists(st.sampled_from(sorted(ON_DEVICE)), unique=True, max_size=3))
    if kwargs["do_sample"]:
        # Where there are fewer tokens than are drawn, transformers draws some that are impossible.
        names = [name for name in names if not name.startswith("forced")]
        names += draw(st.lists(st.sampled_from(sorted(SAMPLING)), unique=True))
    return kwargs | {name: draw((ON_DEVICE | SAMPLING)[name]) for name in names}


def topk_of_clear_choices(scores, k, *args, topk=torch.topk, **kwargs):
    """torch.topk; rejects an example where a beam search has candidates so near, yet not equal, that rounding orders
    them, in transformers' own search too."""
    if scores.shape[-1] != VOCAB:  # as wide are only those of `top_k`, whose order is no matter
        best = topk(scores, min(k + 1, scores.shape[-1])).values
        gaps, is_candidate = best[..., :-1] - best[..., 1:], best[..., 1:] > -1e8  # what is none is marked by -1e9
        assume(not (is_candidate & (gaps > 0) & (gaps <= 1e-5 * best[..., 1:].abs().clamp(min=1))).any())
    return topk(scores, k, *args, **kwargs)


only_clear_choices = mock.patch.object(torch, "topk", topk_of_clear_choices)


@sweep(40)
@given(st.data())
def test_random_beam_searches(model, data):
    kwargs = data.draw(beam_calls())
    inputs = prompt(model, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9)), data.draw(st.integers(0, 99)))
    with only_clear_choices:
        compare(model, inputs, Tier.DEVICE_LOOP, **kwargs)


@sweep(10)
@given(st.data())
def test_beams_kept_by_transformers_on_the_fast_forward(model, data):
    kwargs = data.draw(beam_calls()) | {"max_time": 1e6}
    inputs = prompt(model, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9)), data.draw(st.integers(0, 99)))
    with only_clear_choices:
        compare(model, inputs, Tier.FAST_FORWARD, **kwargs)


@sweep(12)
@given(st.data())
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_ties_fall_as_in_transformers(model, share, data):
    """Tokens without an embedding have the same logits, to the bit."""
    kwargs = data.draw(beam_calls())
    weight = model.get_output_embeddings().weight
    with torch.no_grad():
        weight[: int(share * len(weight))] = 0.0
    inputs = prompt(model, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9)), data.draw(st.integers(0, 99)))
    with only_clear_choices:
        compare(model, inputs, Tier.DEVICE_LOOP, **kwargs)


@covering(model=list(FAMILIES), early_stopping=[True, False, "never"], lag=[0, 3], indirect=["model"])
def test_items_that_end_at_different_times(model, early_stopping, lag, monkeypatch):
    """Whatever surplus steps run after the last one that counts."""
    if model.device.type == "cpu":
        monkeypatch.setattr(StopFlags, "is_over", lambda flags: flags._read_up_to(flags.pushed - lag))
    kwargs = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 40, "early_stopping": early_stopping}
    kwargs |= {"eos_token_id": list(range(3, 60, 4)), "no_repeat_ngram_size": 2}
    for seed in range(20):
        inputs = prompt(model, 2, 6, seed, padded=False)
        stock, _ = generate(model, inputs, **kwargs)
        generated = (stock.beam_indices >= 0).sum(1).view(2, 3).amax(1)
        if abs(int(generated[0] - generated[1])) > 4:
            break
    else:
        pytest.fail("no prompt makes them end at different times")
    compare(model, inputs, Tier.DEVICE_LOOP, **kwargs)


def test_the_search_ends_in_time(model):
    inputs = prompt(model, 2, 6, 0, padded=False)
    kwargs = {"num_beams": 3, "max_new_tokens": 40, "eos_token_id": list(range(30)), "no_repeat_ngram_size": 2}
    stock, _ = generate(model, inputs, **kwargs)
    fuseopt.initialize(model, GENERATION)
    with mock.patch.object(StepWork, "__call__", autospec=True, side_effect=StepWork.__call__) as steps:
        generate(model, inputs, **kwargs)
    assert steps.call_count <= len(stock.scores) + (5 if model.device.type == "cuda" else 0) < 20


def test_everything_is_banned(model):
    """No beam can get better than what is out of the running, which ends the search."""
    inputs = prompt(model, 2, 5, 0)
    every = list(range(tiny.VOCAB))
    for kwargs in ({"suppress_tokens": every}, {"begin_suppress_tokens": every}, {"no_repeat_ngram_size": 1}):
        compare(model, inputs, Tier.DEVICE_LOOP, num_beams=3, max_new_tokens=15, **kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"eos_token_id": list(range(tiny.VOCAB))},
        {"eos_token_id": list(range(tiny.VOCAB)), "do_sample": True},
        {"length_penalty": 1e6},
        {"low_memory": True},
        {"num_return_sequences": 3},
        {"early_stopping": "sometimes"},
    ],
    ids=str,
)
def test_refused_in_transformers_own_words(each_device, kwargs):
    model, inputs = tiny.gpt2(), prompt(tiny.gpt2(), 2, 5, 0)
    kwargs = {"num_beams": 2, "max_new_tokens": 5, **kwargs}
    errors = (ValueError, RuntimeError, OverflowError)
    with pytest.raises(errors) as stock:
        generate(model, inputs, **kwargs)
    with fuseopt.fused(model, GENERATION), pytest.raises(errors) as ours:
        generate(model, inputs, **kwargs)
    assert type(ours.value) is type(stock.value) and str(ours.value) == str(stock.value)


def test_tokens_alone_are_returned_as_a_tensor(model):
    inputs = prompt(model, 3, 5, 0)
    kwargs = {"return_dict_in_generate": False, "output_scores": False, "output_logits": False, "max_new_tokens": 9}
    wanted, _ = generate(model, inputs, num_beams=3, **kwargs)
    with fuseopt.fused(model, GENERATION):
        got, _ = generate(model, inputs, num_beams=3, **kwargs)
    assert type(got) is torch.Tensor and torch.equal(got, wanted)


@pytest.mark.parametrize("details", [(), ("output_scores",), ("output_logits",)], ids=str)
def test_parts_that_were_not_asked_for(model, details):
    inputs = prompt(model, 2, 5, 0)
    kwargs = {"num_beams": 2, "max_new_tokens": 5, "output_scores": False, "output_logits": False}
    kwargs |= dict.fromkeys(details, True)
    wanted, _ = generate(model, inputs, **kwargs)
    with fuseopt.fused(model, GENERATION):
        got, _ = generate(model, inputs, **kwargs)
    assert type(got) is type(wanted) and got.keys() == wanted.keys()
    assert torch.equal(got.sequences, wanted.sequences) and torch.equal(got.beam_indices, wanted.beam_indices)
    assert got.beam_indices.dtype == wanted.beam_indices.dtype


@pytest.mark.parametrize("kwargs", [{}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 3}], ids=str)
def test_what_is_returned_is_none_of_the_static_tensors(model, kwargs, monkeypatch):
    """Which a later call writes to."""
    states, make = [], DecodeState.__init__
    monkeypatch.setattr(DecodeState, "__init__", lambda state, *args: states.append(state) or make(state, *args))
    inputs = prompt(model, 1, 5, 0)
    with fuseopt.fused(model, GENERATION), torch.inference_mode():
        got, _ = generate(model, inputs, max_new_tokens=5, **kwargs)
    kept = [vars(state) if state.beams is None else vars(state) | vars(state.beams) for state in states]
    kept = {value.untyped_storage().data_ptr() for held in kept for value in held.values() if torch.is_tensor(value)}
    cache = got.past_key_values
    if model.config.is_encoder_decoder:
        cache = cache.self_attention_cache
    returned = [got.sequences, *got.scores, *got.logits, cache.layers[0].keys, cache.layers[1].values]
    returned += [got[name] for name in ("sequences_scores", "beam_indices") if name in got]
    assert kept and not kept & {value.untyped_storage().data_ptr() for value in returned}
    assert all(value.is_inference() for value in returned)


@covering(model=list(FAMILIES), pad=[0, 5, None], eos=[None, 3, [7, 3]], indirect=["model"])
def test_what_stands_behind_shorter_sequences(model, pad, eos):
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    ends = [] if eos is None else eos
    inputs = prompt(model, 3, 5, 0)
    compare(model, inputs, Tier.DEVICE_LOOP, num_beams=3, max_new_tokens=25, pad_token_id=pad, eos_token_id=ends)


def test_prompts_of_other_kinds(each_device):
    kwargs = {"num_beams": 3, "max_new_tokens": 8, "num_return_sequences": 2}
    gpt2, t5 = tiny.gpt2(), tiny.t5()
    embeds = gpt2.transformer.wte(prompt(gpt2, 2, 6, 0)["input_ids"]).detach()
    compare(gpt2, {"inputs_embeds": embeds}, Tier.DEVICE_LOOP, **kwargs)
    inputs, decoder = prompt(t5, 2, 6, 0), prompt(gpt2, 2, 4, 1)
    inputs |= {"decoder_input_ids": decoder["input_ids"], "decoder_attention_mask": decoder["attention_mask"]}
    compare(t5, inputs, Tier.DEVICE_LOOP, **kwargs)
    gpt2.set_attn_implementation("eager")
    compare(gpt2, prompt(gpt2, 2, 6, 0), Tier.DEVICE_LOOP, **kwargs)


def test_a_cache_of_the_caller_s_is_read_and_filled(model):
    first, second = prompt(model, 2, 6, 0, padded=False), prompt(model, 4, 4, 1, padded=False)
    encodes = model.config.is_encoder_decoder

    def twice():
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache()) if encodes else DynamicCache()
        kwargs = {"max_new_tokens": 5, "eos_token_id": [], "pad_token_id": 5, "past_key_values": cache}
        output, _ = generate(model, first, num_beams=2, num_return_sequences=2, **kwargs)
        assert output.past_key_values is cache
        longer = torch.cat([output.sequences, second["input_ids"]], dim=1)
        if encodes:
            repeated = {name: value.repeat_interleave(2, 0) for name, value in first.items()}
            return generate(model, repeated, decoder_input_ids=longer, **kwargs)
        return generate(model, {"input_ids": longer}, **kwargs)

    wanted = twice()
    fuseopt.initialize(model, GENERATION)
    assert_same(twice(), wanted)
    assert [call.tier for call in calls_of(model)] == [Tier.DEVICE_LOOP, Tier.DEVICE_LOOP]


def test_beams_and_samples_take_turns(model):
    """Of as many rows each, on caches that the other has used."""
    inputs = prompt(model, 2, 6, 0)
    others = [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}, {"num_beams": 3, "do_sample": True}]
    # Else beams that say the same token again and again come as close to a tie as float32 can tell.
    others = [{"max_new_tokens": 8, "no_repeat_ngram_size": 1, **kwargs} for kwargs in others]
    wanted = [generate(model, inputs, **kwargs) for kwargs in others]
    fuseopt.initialize(model, GENERATION)
    for _ in range(2):
        for kwargs, output in zip(others, wanted, strict=True):
            assert_same(generate(model, inputs, **kwargs), output)
    assert {call.tier for call in calls_of(model)} == {Tier.DEVICE_LOOP}


def test_settings_that_happen_to_be_the_same_number(model):
    """A captured step has a place for each of them."""
    fuseopt.initialize(model, GENERATION)
    inputs = prompt(model, 2, 6, 0)
    for eos, limit in ((12, 12), (12, 12), (12, 10), (9, 12), (9, 9)):
        kwargs = {"num_beams": 3, "max_length": limit, "min_length": 8, "eos_token_id": eos, "do_sample": False}
        assert_same(generate(model, inputs, **kwargs), _stock(model, inputs, **kwargs))


@pytest.mark.gpu
@pytest.mark.parametrize("each_device", ["cuda"], indirect=True)
def test_a_step_captured_once_serves_other_prompts_and_settings(model):
    fuseopt.initialize(model, GENERATION)
    captures, capture = [], StepWork.capture
    with mock.patch.object(StepWork, "capture", lambda step, *where: captures.append(step) or capture(step, *where)):
        for length, kwargs in (
            (3, {}),
            (7, {"length_penalty": 2.0, "eos_token_id": 9}),
            (5, {"early_stopping": "never"}),
            (9, {"max_new_tokens": 20, "min_new_tokens": 7}),
        ):
            kwargs = {"num_beams": 4, "max_new_tokens": 9, "min_new_tokens": 2, "eos_token_id": 4} | kwargs
            inputs = prompt(model, 2, length, length)
            output = generate(model, inputs, **kwargs)
            assert_same(output, _stock(model, inputs, **kwargs))
    assert len(captures) == 1 and calls_of(model)[-1].steps == "graph"


def _stock(model, inputs, **kwargs):
    with mock.patch.dict(model.__dict__):
        del model.__dict__["generate"]
        return generate(model, inputs, **kwargs)


# On a GPU an invalid probability fails a device-side assertion, after which the process cannot use the GPU.
@pytest.mark.parametrize("each_device", ["cpu"], indirect=True)
@covering(
    model=list(FAMILIES),
    value=[1e38, -1e38, 3e38, torch.inf, torch.nan],
    kwargs=[
        {},
        {"do_sample": True},
        {"num_beams": 2},
        {"num_beams": 2, "do_sample": True},
        {"num_beams": 3, "num_return_sequences": 2, "no_repeat_ngram_size": 2},
    ],
    indirect=["model"],
)
def test_logits_that_overflow_give_what_they_do_in_transformers(model, kwargs, value, monkeypatch):
    """With the products of transformers on a CPU: which partial sum overflows depends on the order of addition."""
    monkeypatch.setattr(linear, "MOST_ROWS_ON_CPU", {})
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = value
    compare(model, prompt(model, 2, 7, 0, padded=False), Tier.DEVICE_LOOP, max_new_tokens=6, **kwargs)
