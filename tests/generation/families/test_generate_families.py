"""generate() of every family with a DecoderSpec: tokens, scores and caches are transformers', in tier T0."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

import fuseopt
from fuseopt import ops
from fuseopt.generation.engine import prompt_attention
from fuseopt.generation.tiers import Tier
from tests.generation.families.tiny_decoders import DECODERS, ENCODER_DECODERS, grouped, whisper
from tests.generation.same_calls import (
    GENERATION,
    ON_DEVICE,
    ON_HOST,
    assert_same,
    assert_same_cache,
    calls,
    compare,
    generate,
    prompt,
    sweep,
    used_cache,
)

CALLS = {
    "greedy": {"num_beams": 1},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "on_host": {"do_sample": True, "bad_words_ids": [[5]]},
}
FAMILIES = DECODERS | ENCODER_DECODERS
WINDOWED = ("mistral", "gemma3")


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_calls_give_what_transformers_does(family: str, kind: str, each_device: torch.device) -> None:
    model = FAMILIES[family]()
    tier = Tier.FAST_FORWARD if kind == "on_host" else Tier.DEVICE_LOOP
    compare(model, prompt(model, 3, 6, 0), tier, max_new_tokens=9, eos_token_id=60, **CALLS[kind])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "olmo2", "smollm3", "gptj"])
def test_prompts_whose_keys_one_op_stores(family: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; the op's reference stands in for its kernel."""
    stored, run = [], ops.decode_rotary_store_
    monkeypatch.setattr(prompt_attention, "has_cuda_kernel", lambda op, like: True)
    monkeypatch.setattr(ops, "decode_rotary_store_", lambda *a, **k: stored.append(a) or run(*a, **k))
    model = DECODERS[family]()
    compare(model, prompt(model, 3, 6, 0, padded), Tier.DEVICE_LOOP, max_new_tokens=5, eos_token_id=60)
    # The norms of OLMo 2 are of all heads together. GPT-J runs masked prompts by its own forward.
    count = 0 if family == "olmo2" or (family == "gptj" and padded) else 2
    assert len(stored) == count


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "gptj", "gpt_neox", "granite", "bart", "mt5", "umt5"])
@pytest.mark.usefixtures("as_on_gpu")
def test_calls_that_are_repeated_as_on_a_gpu(family: str) -> None:
    """By ops and early prompts; the step is captured, as far as a CPU can, and replayed."""
    stock, fused = FAMILIES[family](), fuseopt.initialize(FAMILIES[family](), GENERATION)
    for padded in (False, True):
        for length in (6, 6, 6, 4):
            inputs = prompt(stock, 2, length, length, padded)
            given = {**inputs, "max_new_tokens": 9, "pad_token_id": 0, "eos_token_id": 60}
            assert torch.equal(fused.generate(**given), stock.generate(**given))
            assert fused.generate.calls[-1].tier is Tier.DEVICE_LOOP, fused.generate.calls[-1]


@pytest.mark.parametrize("kind", ["greedy", "sampled", "beams"])
def test_whisper(kind: str, each_device: torch.device) -> None:
    """Whose generate() is its own, around that of transformers."""
    model, features = whisper(), torch.randn(2, 8, 60, generator=torch.Generator().manual_seed(0), device="cpu")
    arguments = {"max_new_tokens": 8, **CALLS[kind], "num_return_sequences": 1}

    def tokens() -> torch.Tensor:
        torch.manual_seed(1)
        return model.generate(features.to(model.device), **arguments)

    wanted = tokens()
    with fuseopt.fused(model, GENERATION):
        for _ in range(2):
            assert torch.equal(tokens(), wanted)
            assert model.generate.calls[-1].tier is Tier.DEVICE_LOOP


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sweep_of_arguments(family: str, each_device: torch.device) -> None:
    model = FAMILIES[family]()

    @sweep(60)
    @given(st.integers(1, 4), st.integers(1, 9), st.booleans(), calls(ON_DEVICE), st.sampled_from((1, 1, 1, 2, 4)))
    def check(batch: int, length: int, padded: bool, kwargs: dict, beams: int) -> None:
        if beams > 1 and kwargs.get("num_return_sequences", 1) > beams:
            kwargs["num_return_sequences"] = beams
        compare(model, prompt(model, batch, length, batch, padded), Tier.DEVICE_LOOP, num_beams=beams, **kwargs)

    @sweep(20)
    @given(st.integers(1, 3), calls(ON_HOST), st.sampled_from(sorted(ON_HOST)))
    def check_on_host(batch: int, kwargs: dict, name: str) -> None:
        kwargs |= {"bad_words_ids": [[4]]}
        compare(model, prompt(model, batch, 5, batch), Tier.FAST_FORWARD, **kwargs)

    check()
    check_on_host()


@pytest.mark.parametrize("make_cache", ["own", "without windows"])
@pytest.mark.parametrize("family", WINDOWED)
def test_a_used_cache_goes_on(family: str, make_cache: str, each_device: torch.device) -> None:
    """With layers that have dropped keys already; the caller's cache has every new token afterwards."""
    model = DECODERS[family]()
    ids = prompt(model, 2, 9, 0, padded=False)["input_ids"]

    def cache() -> DynamicCache:
        if make_cache == "without windows":
            return used_cache(model, ids)
        filled = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :6], past_key_values=filled, use_cache=True)
        return filled

    caches = cache(), cache()
    wanted = generate(model, {"input_ids": ids}, past_key_values=caches[0], max_new_tokens=5, eos_token_id=60)
    with fuseopt.fused(model, GENERATION):
        got = generate(model, {"input_ids": ids}, past_key_values=caches[1], max_new_tokens=5, eos_token_id=60)
        assert model.generate.calls[-1].tier is Tier.DEVICE_LOOP
    assert_same(got, wanted)
    assert_same_cache(*caches)
    with torch.no_grad():
        last = (model(ids[:, -1:], past_key_values=one).logits for one in caches)
        torch.testing.assert_close(*last)


def test_a_cache_with_another_window_is_left_to_transformers() -> None:
    model = fuseopt.initialize(DECODERS["mistral"](), GENERATION)
    other = DynamicCache(config=grouped("mistral", sliding_window=3).config)
    ids = prompt(model, 1, 5, 0)["input_ids"]
    model.generate(ids, past_key_values=other, max_new_tokens=3)
    record = model.generate.calls[-1]
    assert record.reason == "a layer of the cache keeps 3 slots, attention sees 4" and record.tier is Tier.STOCK


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "phi3"])
def test_with_the_drop_ins_of_the_inference_preset(family: str, each_device: torch.device) -> None:
    """Drop-ins of norms and feed-forwards, and forwards of attentions, do not keep the step from running."""
    model = DECODERS[family]()
    inputs = prompt(model, 2, 6, 0)
    wanted = generate(model, inputs, max_new_tokens=6, eos_token_id=60)
    with fuseopt.fused(model, {"preset": "inference", "generation": {"enable": True}}):
        got = generate(model, inputs, max_new_tokens=6, eos_token_id=60)
        record = model.generate.calls[-1]
    assert_same(got, wanted)
    assert record.tier is Tier.DEVICE_LOOP, record.reason


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_positions_beyond_the_cache_are_left_to_transformers(family: str) -> None:
    model = DECODERS[family]()
    ids = prompt(model, 1, 5, 0)["input_ids"]
    far = torch.arange(5)[None] + 125
    wanted = generate(model, {"input_ids": ids, "position_ids": far}, max_new_tokens=6, eos_token_id=60)
    with fuseopt.fused(model, GENERATION):
        got = generate(model, {"input_ids": ids, "position_ids": far}, max_new_tokens=6, eos_token_id=60)
        assert "positions" in model.generate.calls[-1].reason
        near = generate(model, {"input_ids": ids, "position_ids": far - 100}, max_new_tokens=6, eos_token_id=60)
        assert model.generate.calls[-1].tier is Tier.DEVICE_LOOP
    assert_same(got, wanted)
    assert_same(near, generate(model, {"input_ids": ids, "position_ids": far - 100}, max_new_tokens=6, eos_token_id=60))
