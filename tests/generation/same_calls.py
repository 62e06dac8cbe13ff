"""Random calls of generate(), and what must be the same for a fused and a stock model."""

import contextlib
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, TopPLogitsWarper, TypicalLogitsWarper
from transformers.pytorch_utils import Conv1D

import fuseopt
from fuseopt.generation.prompt.prefill import UNQUANTISED_PROMPT
from fuseopt.generation.tiers import Tier
from fuseopt.ops.low_bit import dequantize, quantize
from tests import tiny

GENERATION = {"generation": {"enable": True}}
VOCAB = tiny.VOCAB
# Ulps of a cumulative probability: those of stock and fused models were at most 10 apart in 530 calls.
AT_THE_CUT = 16 * 2**-24
CLOSE = {"rtol": 1e-4, "atol": 1e-4, "equal_nan": True}
# Not combined with suppressed tokens: forcing one of those leaves no token, a device-side assertion on a GPU.
suppressed, token = st.integers(3, VOCAB // 2), st.integers(VOCAB // 2 + 1, VOCAB - 1)

# Each of these has a processor that runs on the device.
ON_DEVICE = {
    "min_length": st.integers(1, 16),
    "min_new_tokens": st.integers(1, 6),
    "repetition_penalty": st.floats(0.5, 3.0),
    "no_repeat_ngram_size": st.integers(1, 4),
    "encoder_no_repeat_ngram_size": st.integers(1, 3),
    "forced_bos_token_id": token,
    "forced_eos_token_id": st.one_of(token, st.lists(token, min_size=1, max_size=2)),
    "suppress_tokens": st.lists(suppressed, min_size=1, max_size=4),
    "begin_suppress_tokens": st.lists(suppressed, min_size=1, max_size=4),
    "remove_invalid_values": st.just(True),
    "renormalize_logits": st.just(True),
}
SAMPLING = {
    "temperature": st.floats(0.3, 2.0),
    "top_k": st.integers(0, VOCAB + 5),
    "top_p": st.floats(0.2, 1.0),
    "min_p": st.floats(0.0, 0.2),
    "typical_p": st.floats(0.3, 0.95),
}
# Each of these has a processor that runs on the host.
ON_HOST = {
    "max_time": st.just(1e6),
    "bad_words_ids": st.lists(st.lists(suppressed, min_size=1, max_size=2), min_size=1, max_size=2),
    "sequence_bias": st.just([[[5], -2.0]]),
    "exponential_decay_length_penalty": st.just((3, 1.2)),
    "guidance_scale": st.just(1.5),
}
SHARED = {
    "max_new_tokens": st.integers(1, 12),
    "eos_token_id": st.one_of(token, st.lists(token, min_size=1, max_size=20, unique=True)),
    "num_return_sequences": st.integers(1, 3),
}
# If scores are returned, processors do not run inside the op that selects the token.
DETAILS = {"output_scores": st.booleans(), "output_logits": st.booleans()}


def sweep(examples):
    """How Hypothesis is to draw so many examples, or a third of them without a GPU, where each takes longer.

    One model serves all of them, as it serves a user's calls.
    """
    drawn = examples if torch.cuda.is_available() else examples // 3
    return settings(max_examples=drawn, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def calls(draw, others):
    """generate() arguments: some of the shared ones, some of `others`, and sampling or not."""
    kwargs = {name: draw(values) for name, values in (SHARED | DETAILS).items()}
    kwargs["do_sample"] = draw(st.booleans())
    if not kwargs["do_sample"]:
        del kwargs["num_return_sequences"]
    names = draw(st.lists(st.sampled_from(sorted(others)), unique=True, max_size=4))
    if kwargs["do_sample"]:
        names += draw(st.lists(st.sampled_from(sorted(SAMPLING)), unique=True))
    return kwargs | {name: draw((others | SAMPLING)[name]) for name in names}


def and_int8(families):
    """Parameters of a fixture: the families, and, as slow tests, the families with weights in 8 bits."""
    return [*families, *(pytest.param(f"{family} int8", marks=pytest.mark.slow) for family in families)]


def with_weights(param, make, monkeypatch):
    """The model that `make` returns for the family in a parameter of `and_int8`.

    With int8, `GENERATION` quantises the weights, which are such that this changes nothing: stock has to agree.
    """
    model = make(param.removesuffix(" int8"))
    if not param.endswith(" int8"):
        return model
    monkeypatch.setitem(GENERATION["generation"], "weights", "int8")
    return on_the_grid(model)


def on_the_grid(model):
    """Overwrites the weights of `model` with values that int8 represents exactly."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            weight = module.weight.T if isinstance(module, Conv1D) else module.weight
            with torch.no_grad():
                weight.copy_(dequantize(quantize(weight, bits=8)))
    return model


def prompt(model, batch, length, seed, padded=True):
    """input_ids and attention_mask with rows of different lengths, padded on the side that the model expects."""
    generator = torch.Generator("cpu").manual_seed(seed)
    ids = torch.randint(3, VOCAB, (batch, length), generator=generator, device="cpu")
    mask = torch.ones_like(ids)
    for row in range(batch if padded else 0):
        mask[row, : row % length] = 0
    ids = ids * mask
    if model.config.is_encoder_decoder:
        ids, mask = ids.flip(1), mask.flip(1)
    return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}


def used_cache(model, tokens):
    """The cache of a call that has read the first tokens, or the whole of an encoder's and one of the decoder's."""
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        prompt = {"input_ids": tokens, "decoder_input_ids": torch.zeros_like(tokens[:, :1])}
    else:
        cache, prompt = DynamicCache(), {"input_ids": tokens[:, :3]}
    with torch.no_grad():
        model(**prompt, past_key_values=cache, use_cache=True)
    return cache


def generate(model, inputs, **kwargs):
    """The output, and the next random numbers of torch's generator."""
    torch.manual_seed(11)
    details = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    output = model.generate(**inputs, **{"pad_token_id": 0, **details, **kwargs})
    return output, torch.rand(3, device=model.device)


def calls_of(model):
    return list(model.generate.calls)


def assert_same(got, wanted):
    (got, got_random), (wanted, wanted_random) = got, wanted
    assert type(got) is type(wanted) and got.keys() == wanted.keys()
    assert torch.equal(got.sequences, wanted.sequences) and got.sequences.dtype == wanted.sequences.dtype
    assert torch.equal(got_random, wanted_random)
    for part in {"sequences_scores"} & got.keys():
        torch.testing.assert_close(got[part], wanted[part], **CLOSE)
    for part in {"beam_indices"} & got.keys():
        assert torch.equal(got[part], wanted[part])
    for part in {"scores", "logits"} & got.keys():
        assert len(got[part]) == len(wanted[part])
        for ours, theirs in zip(got[part], wanted[part], strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE)
    assert_same_cache(got.past_key_values, wanted.past_key_values)


def assert_same_cache(got, wanted):
    assert type(got) is type(wanted)
    if isinstance(got, EncoderDecoderCache):
        assert_same_cache(got.cross_attention_cache, wanted.cross_attention_cache)
        got, wanted = got.self_attention_cache, wanted.self_attention_cache
    assert got.get_seq_length() == wanted.get_seq_length()
    for ours, theirs in zip(got.layers, wanted.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, **CLOSE)
        torch.testing.assert_close(ours.values, theirs.values, **CLOSE)


@contextlib.contextmanager
def nearest_to_a_cut():
    """A list that gets how near each cut of top-p or typical-p in a call is to a cumulative probability.

    typical-p also cuts between values near the entropy, which the logits' rounding moves further.
    """
    distances, run, run_typical = [], TopPLogitsWarper.__call__, TypicalLogitsWarper.__call__

    def noting(warper, input_ids, scores):
        cumulative = scores.sort(descending=False).values.softmax(-1).cumsum(-1)
        distances.append(float((cumulative - (1 - warper.top_p)).abs().min()))
        return run(warper, input_ids, scores)

    def noting_typical(warper, input_ids, scores):
        information = -scores.log_softmax(-1)
        entropy = (information * (-information).exp()).nansum(-1, keepdim=True)
        spread, order = (information - entropy).abs().sort()
        cumulative = scores.gather(-1, order).softmax(-1).cumsum(-1)
        distances.append(float((cumulative - warper.mass).abs().min()))
        last = (cumulative < warper.mass).sum(-1, keepdim=True).clamp(max=scores.shape[-1] - 2)
        gaps = spread.gather(1, last + 1) - spread.gather(1, last)
        distances.append(float(gaps.nan_to_num(posinf=16.0).min()) / 16)
        return run_typical(warper, input_ids, scores)

    with (
        mock.patch.object(TopPLogitsWarper, "__call__", noting),
        mock.patch.object(TypicalLogitsWarper, "__call__", noting_typical),
    ):
        yield distances


def compare(model, inputs, tier, **kwargs):
    """Hold a call of a fused model against the stock one, tokens and tier, or the error that both raise.

    If they differ, a cut of top-p or typical-p must have been where rounding decides.
    """
    try:
        with nearest_to_a_cut() as distances:
            wanted = generate(model, inputs, **kwargs)
    except (ValueError, RuntimeError, IndexError) as error:
        with fuseopt.fused(model, GENERATION), pytest.raises(type(error)) as raised:
            generate(model, inputs, **kwargs)
        assert str(raised.value) == str(error)
        return
    with fuseopt.fused(model, GENERATION):
        got = generate(model, inputs, **kwargs)
        try:
            assert_same(got, wanted)
        except AssertionError:
            if min(distances, default=1.0) > AT_THE_CUT:
                raise
        assert model.generate.quantised == (GENERATION["generation"].get("weights") or "") or model.device.type != "cpu"
        (call,) = calls_of(model)
        assert call.tier == tier
        expected_note = UNQUANTISED_PROMPT if call.unquantised_prompt else ""
        assert call.note == expected_note or ("32 candidates" in call.note and kwargs["num_beams"] > 1)


FAMILIES = ("gpt2", "t5", "t5_gated")


def teacher_forced_errors(family, dtype, rows, seeds):
    """Mean errors against float32 of stock's and fused logits, of the first step that the decode step computes.

    Of the same tokens, over models of as many seeds; the last one comes along.
    """
    force = {"max_new_tokens": 2, "begin_suppress_tokens": [t for t in range(VOCAB) if t != 7], "eos_token_id": []}
    errors = {"stock": 0.0, "fused": 0.0}
    for seed in range(seeds):
        model = tiny.FAMILIES[family](seed)
        inputs = prompt(model, rows, 6, seed)
        exact, _ = generate(model, inputs, **force)
        for name in errors:
            if name == "fused":
                fuseopt.initialize(model, GENERATION)
            output, _ = generate(model.to(dtype), inputs, **force)
            errors[name] += float((output.logits[1] - exact.logits[1]).abs().mean())
        assert calls_of(model)[-1].tier is Tier.DEVICE_LOOP
    return errors, model
