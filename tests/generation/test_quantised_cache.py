"""generate() with keys and values in 8 bits: against transformers with a cache that rounds to 8 bits."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import fuseopt
from fuseopt.build import loader
from fuseopt.errors import ConfigError
from fuseopt.generation.engine.quantised_cache import (
    CACHE_DTYPES,
    QuantisedCache,
    append,
    fill,
    filled,
    no_8_bit_cache_reason,
)
from fuseopt.generation.engine.state import CacheShape, Sizes
from fuseopt.generation.families.llama import LlamaStep
from fuseopt.generation.tiers import Tier
from fuseopt.ops import backends, dequantize_heads, quantize_heads
from fuseopt.ops.decode.attention import UPDATE_RAW
from tests import tiny
from tests.generation.families.tiny_decoders import DECODERS, ENCODER_DECODERS, grouped, randomised
from tests.generation.same_calls import prompt

KINDS = sorted(CACHE_DTYPES)
MODELS = {name: (DECODERS | ENCODER_DECODERS)[name] for name in ("llama", "gpt2", "gemma2", "t5", "bart")}


class RoundingLayer(DynamicLayer):
    """A layer's cache that rounds keys and values to 8 bits; a prompt attends to its own before rounding."""

    stored: torch.dtype

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        stored = super().update(*(rounded(part, self.stored) for part in (keys, values)))
        if keys.shape[2] == 1:
            return stored
        past = stored[0].shape[2] - keys.shape[2]
        return tuple(torch.cat((old[:, :, :past], new), 2) for old, new in zip(stored, (keys, values), strict=True))


def rounded(vectors: Tensor, stored: torch.dtype) -> Tensor:
    return dequantize_heads(*quantize_heads(vectors, stored), vectors.dtype)


def rounding_generate(model: nn.Module, kind: str, **options: Any) -> Any:
    """transformers' generate() of a decoder-only model, with RoundingLayer."""
    layer = type("Layer", (RoundingLayer,), {"stored": CACHE_DTYPES[kind]})
    cache = DynamicCache()
    cache.layer_class_to_replicate = layer
    return type(model).generate(model, past_key_values=cache, **options)


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "padded": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled": {"do_sample": True, "top_k": 20},
    "T1": {"bad_words_ids": [[5]]},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("family", "name"), [*(("llama", name) for name in CALLS), ("gpt2", "padded"), ("gemma2", "beams")]
)
def test_tokens_are_those_of_a_cache_that_rounds(family: str, name: str, kind: str) -> None:
    model = randomised(MODELS[family]())
    inputs = prompt(model, 2, 7, seed=3, padded=name == "padded")
    options = {"max_new_tokens": 12, "pad_token_id": 0, **CALLS[name]}
    torch.manual_seed(1)
    wanted = rounding_generate(model, kind, **inputs, **options)
    fused = fuseopt.initialize(model, {"generation": {"cache_dtype": kind}})
    for _ in range(3):
        torch.manual_seed(1)
        assert torch.equal(fused.generate(**inputs, **options), wanted)
    call = fused.generate.calls[-1]
    assert call.tier is (Tier.FAST_FORWARD if name == "T1" else Tier.DEVICE_LOOP)
    assert call.cache.endswith(f"MiB of keys and values in {kind}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_steps_are_recorded(family: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In later calls Python does not call the kernel: steps are recorded."""
    if loader.python_library() is None or loader.state("cpu").status != "loaded":
        pytest.skip("the libraries for the CPU and for Python are not loaded")
    model, seen = randomised(MODELS[family]()), []
    kernel = UPDATE_RAW["cpu"]
    monkeypatch.setitem(UPDATE_RAW, "cpu", lambda *arguments: seen.append(1) or kernel(*arguments))
    fused, counts, tokens = fuseopt.initialize(model, {"generation": {"cache_dtype": kind}}), [], []
    for _ in range(3):
        tokens.append(fused.generate(**prompt(model, 2, 6, seed=1), max_new_tokens=8, min_new_tokens=8))
        counts.append(len(seen))
        seen.clear()
    assert fused.generate.calls[-1].steps == "recorded"
    assert torch.equal(tokens[0], tokens[2]) and counts[0] > counts[2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", MODELS)
def test_returned_caches_are_dequantised_and_taken_back(family: str, kind: str) -> None:
    model = fuseopt.initialize(randomised(MODELS[family]()), {"generation": {"cache_dtype": kind}})
    ids = torch.randint(3, tiny.VOCAB, (2, 6), generator=torch.Generator().manual_seed(0))
    encodes = model.config.is_encoder_decoder
    first = model.generate(ids, max_new_tokens=4, min_new_tokens=4, return_dict_in_generate=True)
    cache = first.past_key_values.self_attention_cache if encodes else first.past_key_values
    for layer in cache.layers:
        for part in (layer.keys, layer.values):
            assert part.dtype == torch.float32
            torch.testing.assert_close(rounded(part, CACHE_DTYPES[kind]), part, rtol=1e-5, atol=1e-6)
    if encodes:
        return
    again = {"max_new_tokens": 5, "min_new_tokens": 5, "attention_mask": torch.ones(2, 10, dtype=torch.int64)}
    whole = model.generate(ids, max_new_tokens=9, min_new_tokens=9)
    assert torch.equal(model.generate(first.sequences, past_key_values=cache, **again), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_takes_the_bytes_that_the_shape_says(kind: str) -> None:
    model = randomised(MODELS["llama"]())
    fused = fuseopt.initialize(model, {"generation": {"cache_dtype": kind}})
    fused.generate(torch.ones(2, 5, dtype=torch.int64), max_new_tokens=3)
    shape = fused.generate.checked.step.shape
    elements = 2 * shape.layers * shape.heads
    assert shape.bytes_per_slot == elements * (shape.head_dim + 4)
    state = fused.generate.checked.step.new_state(Sizes(2, 128))
    assert state.cache.nbytes + state.scales.nbytes == 2 * 128 * shape.bytes_per_slot
    assert state.cache_size.endswith(f"MiB of keys and values in {kind}")


def test_small_caches_on_a_gpu_keep_the_models_dtype() -> None:
    shape = CacheShape(2, 8, 64, torch.bfloat16, torch.device("cuda"), stored_dtype=torch.int8)  # 2 KB a slot and layer
    assert shape.stored_in(Sizes(1, 7168)) is None and shape.stored_in(Sizes(1, 8192)) == torch.int8
    assert shape.stored_in(Sizes(8, 512, 512)) == torch.int8  # with the keys and values of an encoder's output
    assert shape.bytes_of(Sizes(1, 1024)) == 1024 * 2 * 2048
    assert shape.bytes_of(Sizes(1, 8192)) == 8192 * 2 * 2 * 8 * (64 + 4)
    assert replace(shape, device=torch.device("cpu")).stored_in(Sizes(1, 128)) == torch.int8


@pytest.mark.parametrize("stored", CACHE_DTYPES.values())
def test_slots_are_filled_and_appended(stored: torch.dtype) -> None:
    torch.manual_seed(0)
    shape = 2, 3, 2, 9, 16
    cache = QuantisedCache(torch.zeros(shape, dtype=stored), torch.zeros(shape[:-1]))
    vectors, key, value = torch.randn(2, 3, 2, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    fill(cache, 2, vectors)
    append(cache, torch.tensor([6]), key, value)
    plain = filled(cache, 8, torch.float32)
    assert (plain[:, :, :, [0, 1, 7]] == 0).all()
    assert torch.equal(plain[:, :, :, 2:6], rounded(vectors, stored))
    assert torch.equal(plain[:, :, :, 6], rounded(torch.stack((key, value)), stored))


def test_the_plan_says_what_is_kept_in_8_bits() -> None:
    model = randomised(MODELS["llama"]())
    config = {"generation": {"cache_dtype": "int8"}}
    (replacement,) = fuseopt.plan(model, config).replacements
    assert replacement.reason.endswith("; keys and values in int8")
    (replacement,) = fuseopt.plan(model.double(), config).replacements
    assert "in PyTorch, which is slow: does not take torch.float64" in replacement.reason
    with mock.patch.object(LlamaStep, "takes_quantised_cache", False):
        (replacement,) = fuseopt.plan(model, config).replacements
    assert "keys and values stay in the model's dtype: LlamaStep does not support 8-bit caches" in replacement.reason
    with backends.assume_gpu((9, 0)):
        (replacement,) = fuseopt.plan(model.half(), config).replacements
        assert f"the kernel does not support heads of {model.config.head_dim} dimensions" in replacement.reason
        of_16 = grouped("llama", head_dim=16).half()
        reason = fuseopt.plan(of_16, config).replacements[0].reason
        assert reason.endswith("; keys and values in int8 if a layer has 16 MB of them or more")
        (replacement,) = fuseopt.plan(model.float(), config).replacements
    assert "stay in the model's dtype: the kernel does not take torch.float32" in replacement.reason
    with pytest.raises(ConfigError, match="'int4' is not one of int8, fp8"):
        fuseopt.plan(model, {"generation": {"cache_dtype": "int4"}})


@pytest.mark.parametrize("kind", ["cpu", "meta", "mps", "xpu"])
def test_devices_without_kernels_keep_the_models_dtype(kind: str) -> None:
    reason = no_8_bit_cache_reason(torch.device(kind), torch.bfloat16, 64)
    assert reason is None if kind in ("cpu", "meta") else "cuda" in str(reason)


def test_verify_does_not_require_the_tokens_of_the_unquantised_cache() -> None:
    model = tiny.gpt2()
    found = fuseopt.verify(model, {"generation": {"cache_dtype": "fp8"}}, prompt(model, 2, 5, seed=3))
    assert found.ok and found.cache == "fp8" and not found.tokens_count and found.tokens_agree is not None
    assert "not required, as generate() decodes with keys and values in fp8" in str(found)
    assert fuseopt.verify(model, {"generation": {"enable": True}}, prompt(model, 2, 5, seed=3)).tokens_count
    both = fuseopt.verify(
        model, {"generation": {"cache_dtype": "int8", "weights": "int8"}}, prompt(model, 2, 5, seed=3)
    )
    assert both.ok and both.low_bit is None and not both.tokens_count
    assert "not run: logits with weights in int8: keys and values are in int8" in str(both)
