"""generate() of every family with a DecoderSpec: tokens, scores and caches are transformers', in tier T0."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import Cache, DynamicCache

import fuseopt
from fuseopt import ops
from fuseopt.generation.engine import prompt_attention
from fuseopt.generation.tiers import Tier
from tests.axes import thinned
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


@thinned(2, family=list(FAMILIES), kind=list(CALLS))
def test_calls_give_what_transformers_does(family: str, kind: str, each_device: torch.device) -> None:
    model = FAMILIES[family]()
    tier = Tier.FAST_FORWARD if kind == "on_host" else Tier.DEVICE_LOOP
    compare(model, prompt(model, 3, 6, 0), tier, max_new_tokens=9, eos_token_id=60, **CALLS[kind])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "olmo2", "smollm3", "gptj", "cohere"])
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


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gemma3", "phi3", "gptj", "gpt_neox", "granite", "cohere", "olmo", "starcoder2", "opt_projected"),
        *("opt_350m", "bart", "mt5", "umt5"),
    ],
)
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


TIMES = {"return_timestamps": True, "language": "en"}
WHISPER_CALLS: dict[str, tuple[Tier, dict[str, object]]] = {
    "greedy": (Tier.DEVICE_LOOP, {"language": "en"}),
    "sampled": (Tier.DEVICE_LOOP, {"do_sample": True, "language": "en"}),
    "beams": (Tier.DEVICE_LOOP, {"num_beams": 3, "language": "en"}),
    "a language that it finds": (Tier.DEVICE_LOOP, {}),
    "languages": (Tier.DEVICE_LOOP, {"language": ["de", "en"], "task": "translate"}),
    "prompt": (Tier.DEVICE_LOOP, {"language": "en", "prompt_ids": [30, 9, 8, 7]}),
    "suppressed": (Tier.DEVICE_LOOP, {"suppress_tokens": [5, 6], "begin_suppress_tokens": [7], "language": "en"}),
    "timestamps": (Tier.FAST_FORWARD, TIMES),
    "timestamps, sampled": (Tier.FAST_FORWARD, {"do_sample": True, "temperature": 0.8, **TIMES}),
    "timestamps, beams": (Tier.FAST_FORWARD, {"num_beams": 3, **TIMES}),
    "long": (Tier.FAST_FORWARD, {"frames": 150, **TIMES}),
    "long, with what came before": (Tier.FAST_FORWARD, {"frames": 150, "condition_on_prev_tokens": True, **TIMES}),
    "fallback": (
        Tier.FAST_FORWARD,
        {"temperature": (0.0, 0.6), "logprob_threshold": -0.5, "compression_ratio_threshold": 1.1, **TIMES}
        | {"no_speech_threshold": 0.6},
    ),
}


def transcribed(model: nn.Module, frames: int = 60, masked: bool = True, **arguments: object) -> torch.Tensor:
    """Tokens of two rows of random audio, the second of which ends early."""
    torch.manual_seed(1)
    features = torch.randn(2, 8, frames, generator=torch.Generator().manual_seed(0), device="cpu").to(model.device)
    if masked:
        arguments["attention_mask"] = (torch.arange(frames) < torch.tensor([[frames], [frames - 21]])).to(model.device)
    if "prompt_ids" in arguments:
        arguments["prompt_ids"] = torch.tensor(arguments["prompt_ids"]).to(model.device)
    with torch.device("cpu"):  # transformers 5.17 mixes tensors of the default device with the model's
        return model.generate(features, max_new_tokens=8, **arguments)


@pytest.mark.parametrize("kind", WHISPER_CALLS)
def test_whisper(kind: str, each_device: torch.device) -> None:
    """Whose generate() is its own, around that of transformers; its decoder ignores the mask of the audio."""
    model, (tier, arguments) = whisper(), WHISPER_CALLS[kind]
    wanted = transcribed(model, **arguments)
    with fuseopt.fused(model, GENERATION):
        for _ in range(2):
            assert torch.equal(transcribed(model, **arguments), wanted)
            assert {call.tier for call in model.generate.calls} == {tier}, model.generate.calls[-1]


@pytest.mark.slow
def test_a_sweep_of_whisper(each_device: torch.device) -> None:
    model = whisper()
    options = {
        "language": st.sampled_from(["en", "de", ["de", "en"]]),
        "task": st.sampled_from(["transcribe", "translate"]),
        "return_timestamps": st.booleans(),
        "prompt_ids": st.lists(st.integers(3, 29), min_size=1, max_size=4).map(lambda ids: [30, *ids]),
        "suppress_tokens": st.lists(st.integers(3, 29), min_size=1, max_size=4),
        "begin_suppress_tokens": st.lists(st.integers(3, 29), min_size=1, max_size=4),
        "num_beams": st.integers(2, 4),
        "temperature": st.sampled_from([0.0, 0.7, (0.0, 0.5, 1.0)]),
        "logprob_threshold": st.floats(-5.0, -0.5),
        "no_repeat_ngram_size": st.integers(1, 3),
        "repetition_penalty": st.floats(0.5, 3.0),
        "masked": st.booleans(),
    }

    @sweep(60)
    @given(st.fixed_dictionaries({}, optional=options), st.booleans())
    def check(arguments: dict, is_long: bool) -> None:
        frames = {"frames": 150, "return_timestamps": True} if is_long else {}
        try:
            wanted = transcribed(model, **{**arguments, **frames})
        except (ValueError, RuntimeError, IndexError, TypeError) as error:  # TypeError: a threshold without another
            with fuseopt.fused(model, GENERATION), pytest.raises(type(error)):
                transcribed(model, **{**arguments, **frames})
            return
        with fuseopt.fused(model, GENERATION):
            assert torch.equal(transcribed(model, **{**arguments, **frames}), wanted)
            assert Tier.STOCK not in {call.tier for call in model.generate.calls}, model.generate.calls[-1]

    check()


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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_used_cache_goes_on(family: str, each_device: torch.device) -> None:
    """The caller's cache has every new token afterwards."""
    model = FAMILIES[family]()
    inputs = prompt(model, 2, 9, 0, padded=False)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.tensor([[0, 4, 5]] * 2).to(model.device)
    go_on_with(model, inputs, used_cache(model, inputs["input_ids"]), used_cache(model, inputs["input_ids"]))


@pytest.mark.parametrize("family", WINDOWED)
def test_a_used_cache_of_windows_goes_on(family: str, each_device: torch.device) -> None:
    """Some layers have dropped keys already."""
    model = DECODERS[family]()
    inputs = prompt(model, 2, 9, 0, padded=False)

    def cache() -> DynamicCache:
        filled = DynamicCache(config=model.config)
        with torch.no_grad():
            model(inputs["input_ids"][:, :6], past_key_values=filled, use_cache=True)
        return filled

    go_on_with(model, inputs, cache(), cache())


def go_on_with(model: nn.Module, inputs: dict[str, torch.Tensor], ours: Cache, theirs: Cache) -> None:
    """Holds a greedy call with a used cache against transformers', and what the model computes with it afterwards."""
    arguments = {"max_new_tokens": 5, "eos_token_id": 60}
    wanted = generate(model, inputs, past_key_values=theirs, **arguments)
    with fuseopt.fused(model, GENERATION):
        got = generate(model, inputs, past_key_values=ours, **arguments)
        assert model.generate.calls[-1].tier is Tier.DEVICE_LOOP, model.generate.calls[-1]
    assert_same(got, wanted)
    assert_same_cache(ours, theirs)
    if not model.config.is_encoder_decoder:
        with torch.no_grad():
            last = (model(inputs["input_ids"][:, -1:], past_key_values=cache).logits for cache in (ours, theirs))
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
