"""generate() with keys and values in 8 bits on a GPU, in bfloat16: tokens are among the best of a float64 reference."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuseopt
from fuseopt.generation.engine.quantised_cache import CACHE_DTYPES
from fuseopt.generation.engine.state import Sizes
from fuseopt.generation.families.reference_step import KeyValueCache, ReferenceDecoder
from fuseopt.generation.tiers import Tier
from fuseopt.ops.decode.attention import RAW, UPDATE_RAW
from tests import tiny
from tests.generation.families.tiny_decoders import grouped, randomised, step_of
from tests.generation.same_calls import prompt

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
KINDS = sorted(CACHE_DTYPES)
NEW = 12
# With heads of 16 dimensions, which the kernel takes.
_GEMMA2 = {"attn_logit_softcapping": 2.0, "sliding_window": 4, "query_pre_attn_scalar": 16}
MODELS = {
    "llama": partial(grouped, "llama", head_dim=16, max_position_embeddings=512),
    "gpt2": partial(tiny.gpt2, n_embd=48),
    "gemma2": partial(grouped, "gemma2", head_dim=16, layer_types=["sliding_attention", "full_attention"], **_GEMMA2),
    "t5": partial(tiny.t5, d_kv=16),
}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "padded": {},
    "long": {},
    "sampled": {"do_sample": True, "top_k": 8},
    "T1": {"bad_words_ids": [[5]]},
}


@pytest.fixture(autouse=True)
def _small_caches_are_quantised(set_tuned: Callable[[str, int], None]) -> None:
    set_tuned("decode_attention_8_bit_bytes", 0)


def model_of(family: str) -> nn.Module:
    return randomised(MODELS[family]()).to(DEVICE, torch.bfloat16)


@torch.no_grad()
def exact_logits(model: nn.Module, ids: Tensor, tokens: Tensor, kind: str) -> Tensor:
    """[steps, vocab] float64 for the tokens [steps] that follow a prompt [length], with a cache that rounds."""
    exact = copy.deepcopy(model).double()
    decoder, cache = ReferenceDecoder(step_of(exact).spec_of(exact)), KeyValueCache(stored_dtype=CACHE_DTYPES[kind])
    ids, steps = ids[None], tokens[None, :-1]
    if exact.config.is_encoder_decoder:
        decoder.encode(cache, exact.get_encoder()(ids)[0])
        ids = ids.new_full((1, 1), exact.config.decoder_start_token_id)
    first = decoder(cache, ids)[0, -1:]
    return torch.cat([first, *(decoder(cache, steps[:, i : i + 1])[0] for i in range(steps.shape[1]))])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("family", "name"),
    [*(("llama", name) for name in CALLS), ("gpt2", "padded"), ("gemma2", "padded"), ("t5", "padded")],
)
def test_tokens_are_among_the_best_of_float64(family: str, name: str, kind: str) -> None:
    model = model_of(family)
    length = 150 if name == "long" else 7
    inputs = prompt(model, 3, length, seed=3, padded=name == "padded")
    length = 1 if model.config.is_encoder_decoder else length
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0, **CALLS[name]}
    fused, found = fuseopt.initialize(copy.deepcopy(model), {"generation": {"cache_dtype": kind}}), []
    for _ in range(4):
        torch.manual_seed(1)
        found.append(fused.generate(**inputs, **options))
    call = fused.generate.calls[-1]
    assert call.tier is (Tier.FAST_FORWARD if name == "T1" else Tier.DEVICE_LOOP) and call.steps == "graph"
    stored = str(CACHE_DTYPES[kind]).removeprefix("torch.")
    assert stored in call.cache and stored in str(fuseopt.report(fused))
    assert all(torch.equal(tokens, found[0]) for tokens in found)
    for row, tokens in enumerate(found[0][:, length:]):
        ids = inputs["input_ids"][row][inputs["attention_mask"][row].bool()]
        logits = exact_logits(model, ids, tokens, kind)
        logits[:, [model.config.eos_token_id, *([5] if name == "T1" else [])]] = -torch.inf
        least = logits.topk(8 if name == "sampled" else 1).values[:, -1]
        chosen = logits.gather(1, tokens[:, None])[:, 0]
        assert (chosen >= least - 0.15 * logits[:, 6:].std()).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "t5"])
def test_scores_of_beams_are_those_of_float64(family: str, kind: str) -> None:
    model = model_of(family)
    inputs = prompt(model, 2, 7, seed=3, padded=False)
    length = 1 if model.config.is_encoder_decoder else 7
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0, "num_beams": 3}
    details = {"num_return_sequences": 2, "return_dict_in_generate": True, "output_scores": True}
    fused = fuseopt.initialize(copy.deepcopy(model), {"generation": {"cache_dtype": kind}})
    for _ in range(3):
        found = fused.generate(**inputs, **options, **details)
    assert fused.generate.calls[-1].steps == "graph"
    for row, sequence in enumerate(found.sequences):
        tokens = sequence[length : length + NEW]
        logits = exact_logits(model, inputs["input_ids"][row // 2], tokens, kind)
        score = logits.log_softmax(-1).gather(1, tokens[:, None]).mean()
        assert abs(found.sequences_scores[row].item() - score.item()) < 0.03


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", MODELS)
def test_the_kernels_read_all_caches(family: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of an encoder's output; and they take the bytes that the shape says."""
    seen: list[torch.dtype] = []

    def watched(kernel: Callable[..., Tensor], key_cache: int) -> Callable[..., Tensor]:
        return lambda *arguments: seen.append(arguments[key_cache].dtype) or kernel(*arguments)

    for raw, key_cache in ((RAW, 1), (UPDATE_RAW, 3)):
        monkeypatch.setitem(raw, DEVICE, watched(raw[DEVICE], key_cache))
    fused = fuseopt.initialize(model_of(family), {"generation": {"cache_dtype": kind, "max_graphs": 0}})
    fused.generate(**prompt(fused, 2, 5, seed=0, padded=False), max_new_tokens=4, min_new_tokens=4)
    assert len(seen) >= 6 and set(seen) == {torch.uint8 if kind == "fp8" else torch.int8}
    shape = fused.generate.checked.step.shape
    state = fused.generate.checked.step.new_state(Sizes(2, 128))
    assert shape.bytes_per_slot == 2 * shape.layers * shape.heads * (shape.head_dim + 4)
    assert state.cache.nbytes + state.scales.nbytes == 2 * 128 * shape.bytes_per_slot


@pytest.mark.parametrize("kind", KINDS)
def test_a_returned_cache_is_taken_back(kind: str) -> None:
    """In bfloat16 it is not quantised to the same values again, so tokens are compared with the reference's."""
    model = model_of("llama")
    fused = fuseopt.initialize(copy.deepcopy(model), {"generation": {"cache_dtype": kind}})
    ids = prompt(model, 2, 6, seed=0, padded=False)["input_ids"]
    fixed: dict[str, Any] = {"return_dict_in_generate": True, "pad_token_id": 0}
    first = fused.generate(ids, max_new_tokens=4, min_new_tokens=4, **fixed)
    assert first.past_key_values.layers[0].keys.dtype == torch.bfloat16
    mask = torch.ones(2, 10, dtype=torch.int64, device=DEVICE)
    again = {"max_new_tokens": 5, "min_new_tokens": 5, "attention_mask": mask, **fixed}
    found = fused.generate(first.sequences, past_key_values=first.past_key_values, **again)
    assert fused.generate.calls[-1].tier is Tier.DEVICE_LOOP
    for row, tokens in enumerate(found.sequences[:, 6:]):
        logits = exact_logits(model, ids[row], tokens, kind)
        logits[:, model.config.eos_token_id] = -torch.inf
        chosen = logits.gather(1, tokens[:, None])[:, 0]
        assert (chosen >= logits.amax(1) - 0.15 * logits[:, 6:].std()).all()


@pytest.mark.parametrize("kind", KINDS)
def test_verify(kind: str) -> None:
    model = model_of("llama")
    found = fuseopt.verify(model, {"generation": {"cache_dtype": kind}}, prompt(model, 2, 5, seed=3))
    assert found.ok and found.cache == kind and not found.tokens_count
