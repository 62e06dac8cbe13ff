"""T5's cross-attention to a single item, with keys and values multiplied with the projections: as two linear layers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fuseopt
from fuseopt.generation.engine.layers import Linear
from fuseopt.generation.engine.state import DecodeState, Sizes
from fuseopt.generation.families.t5 import T5Step
from fuseopt.generation.tiers import Tier
from tests import tiny
from tests.generation import same_calls
from tests.generation.same_calls import (
    GENERATION,
    ON_DEVICE,
    calls,
    compare,
    generate,
    prompt,
    sweep,
    teacher_forced_errors,
)

SLOTS = 128


@pytest.fixture
def absorbing(monkeypatch):
    """Absorbs cross-attention in models of any dtype, on any device; counts the layers that did."""
    count = []
    plus_absorbed = T5Step._plus_absorbed

    def counting(*args):
        count.append(1)
        return plus_absorbed(*args)

    monkeypatch.setattr(T5Step, "_absorbed_slots", lambda step: SLOTS)
    monkeypatch.setattr(T5Step, "_plus_absorbed", counting)
    return count


@pytest.fixture(params=["t5", "t5_gated"])
def model(request, each_device):
    return tiny.FAMILIES[request.param]()


@sweep(20)
@given(st.data())
def test_random_calls_with_absorbed_cross_attention_equal_transformers(model, absorbing, data):
    kwargs = data.draw(calls(ON_DEVICE))
    inputs = prompt(model, 1, data.draw(st.integers(1, 9)), data.draw(st.integers(0, 99)))
    mask = inputs["attention_mask"]
    mask[:, data.draw(st.integers(1, mask.shape[1])) :] = 0
    absorbing.clear()
    compare(model, inputs, Tier.DEVICE_LOOP, **kwargs)
    assert absorbing


@pytest.mark.parametrize("beams", [2, 3])
@pytest.mark.parametrize("length", [1, 5])
def test_beam_search_with_absorbed_cross_attention_equals_transformers(model, absorbing, length, beams):
    compare(model, prompt(model, 1, length, 3), Tier.DEVICE_LOOP, max_new_tokens=8, num_beams=beams, eos_token_id=31)
    assert absorbing


@pytest.mark.parametrize("kwargs", [{}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 3}], ids=str)
def test_with_transformers_own_processors(model, absorbing, kwargs):
    compare(model, prompt(model, 1, 7, 3), Tier.FAST_FORWARD, max_new_tokens=6, max_time=1e6, **kwargs)
    assert absorbing


def test_an_item_after_a_longer_one(model, absorbing):
    """Of which nothing is left where the mask ends, whatever it was."""
    longer, shorter = (prompt(model, 1, length, 3, padded=False) for length in (11, 5))
    wanted = [generate(model, inputs, max_new_tokens=6) for inputs in (longer, shorter)]
    fuseopt.initialize(model, GENERATION)
    for _ in range(3):
        for inputs, other in zip((longer, shorter), wanted, strict=True):
            same_calls.assert_same(generate(model, inputs, max_new_tokens=6), other)
    assert absorbing


def test_what_is_masked_may_be_anything(absorbing, each_device):
    model = tiny.t5()
    step = T5Step(model)
    state = DecodeState(Sizes(1, 8, SLOTS), step.shape, step.vocab)
    state.cross_cache.normal_()
    state.cross_cache[..., 3:, :] = float("nan")
    state.load_cross(5, torch.tensor([[1, 1, 1, 0, 0]]))
    state.begin(0)
    with torch.no_grad():
        step.begin()
        step.cross_cache_filled(state)
        logits = step(state).logits()
    assert absorbing and logits.isfinite().all()


@pytest.mark.parametrize("kwargs", [{}, {"num_beams": 2}], ids=str)
def test_keys_and_values_of_the_caller_s(model, absorbing, kwargs):
    inputs = prompt(model, 1, 6, 0)
    inputs["decoder_input_ids"] = prompt(tiny.gpt2(), 1, 4, 1)["input_ids"]
    compare(model, inputs, Tier.DEVICE_LOOP, max_new_tokens=8, **kwargs)
    assert absorbing


def test_weights_that_are_edited_show(model, absorbing):
    inputs = prompt(model, 1, 6, 0)
    with fuseopt.fused(model, GENERATION):
        before, _ = generate(model, inputs, max_new_tokens=6, eos_token_id=[])
        with torch.no_grad():
            model.decoder.block[0].layer[1].EncDecAttention.q.weight.mul_(-3)
            model.decoder.block[1].layer[1].EncDecAttention.o.weight.mul_(-3)
        after = generate(model, inputs, max_new_tokens=6, eos_token_id=[])
    assert absorbing
    same_calls.assert_same(after, generate(model, inputs, max_new_tokens=6, eos_token_id=[]))
    assert not torch.equal(before.logits[-1], after[0].logits[-1])


@pytest.mark.parametrize("rows", [1, 2])
def test_what_is_absorbed(rows, each_device):
    """Single items in bfloat16 or float32, of no more slots than the kernel is made for, where there are kernels."""
    on_gpu = each_device.type == "cuda"
    for dtype, slots, absorbs in (
        (torch.bfloat16, SLOTS, on_gpu and rows == 1),
        (torch.bfloat16, SLOTS + 1, False),
        (torch.float16, SLOTS, False),
        (torch.float32, SLOTS, on_gpu and rows == 1),
    ):
        step = T5Step(tiny.t5().to(dtype))
        state = DecodeState(Sizes(rows, 8, slots), step.shape, step.vocab)
        assert (state.absorbed is not None) == absorbs
        assert step.shape.absorbed_slots == (SLOTS if on_gpu and dtype is not torch.float16 else 0)
    beams = DecodeState(Sizes(4, 8, SLOTS, queries_per_kv=4, beams=4), step.shape, step.vocab)
    assert (beams.absorbed is not None) == on_gpu  # of one item


def test_absorbed_weights_are_prefetched_like_others(absorbing):
    step = T5Step(tiny.t5())
    state = DecodeState(Sizes(1, 8, SLOTS), step.shape, step.vocab)
    layers = step._absorbed_layers(state.absorbed)
    ran = [part for layer in layers for part in layer.linears]
    assert all(isinstance(part, Linear) for part in ran)
    for layer, later in zip(ran, ran[2:], strict=False):
        assert layer.prefetch is later.weights
    assert ran[2].weights[0].data_ptr() == state.absorbed.keys[0].data_ptr()
    assert ran[3].weights[0].data_ptr() == state.absorbed.values[0].data_ptr()
    stock = [part for layer in step.layers for part in layer.linears]
    for layer, later in zip(stock, stock[2:], strict=False):
        assert layer.prefetch is later.weights


def test_size_is_reported(absorbing):
    step = T5Step(tiny.t5())
    state = DecodeState(Sizes(1, 8, SLOTS), step.shape, step.vocab)
    layers, heads, width = 2, 3, 24
    size = 2 * layers * heads * SLOTS * width * 4 + heads * SLOTS * 4
    assert state.absorbed.bytes == size
    state.absorbed, whole = None, state.bytes
    assert whole - state.bytes == size


@pytest.mark.parametrize("family", ["t5", "t5_gated", "mt5", "umt5"])
def test_bfloat16_is_as_close_to_float32_as_transformers(family, absorbing, each_device):
    errors, _ = teacher_forced_errors(family, torch.bfloat16, 1, 24 if each_device.type == "cuda" else 8)
    assert absorbing
    assert 0 < errors["fused"] <= 1.15 * errors["stock"]
