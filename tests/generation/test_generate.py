"""generate() of an initialised model against transformers' own: tokens, scores, caches, types, random state, tier."""

from collections import Counter
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, EncoderDecoderCache, StoppingCriteria

import fuseopt
from fuseopt import ops
from fuseopt.generation import call
from fuseopt.generation.engine import attention, layers
from fuseopt.generation.engine.graphs import StepGraphs, StepWork
from fuseopt.generation.families.gpt2 import GPT2Step
from fuseopt.generation.families.t5 import T5Step
from fuseopt.generation.tiers import Tier
from fuseopt.ops.decode.linear import MOST_ROWS_ON_CPU
from tests import tiny
from tests.generation import same_calls
from tests.generation.same_calls import (
    FAMILIES,
    GENERATION,
    ON_DEVICE,
    ON_HOST,
    SAMPLING,
    VOCAB,
    and_int8,
    assert_same,
    assert_same_cache,
    calls,
    calls_of,
    compare,
    generate,
    prompt,
    sweep,
    teacher_forced_errors,
    with_weights,
)

# Of random lengths some do not go together.
pytestmark = pytest.mark.filterwarnings("ignore:Unfeasible length constraints")


@pytest.fixture(params=and_int8(FAMILIES))
def model(request, each_device, monkeypatch):
    """Its weights are drawn on the CPU: with those that a GPU draws, two beams are 3e-6 apart and either may win."""
    with torch.device("cpu"):
        drawn = with_weights(request.param, lambda family: tiny.FAMILIES[family](), monkeypatch)
    return drawn.to(each_device)


@sweep(40)
@given(st.data())
def test_random_calls_that_the_device_can_decode(model, data):
    kwargs = data.draw(calls(ON_DEVICE))
    inputs = prompt(model, data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9)), data.draw(st.integers(0, 99)))
    compare(model, inputs, Tier.DEVICE_LOOP, **kwargs)


def test_only_a_token_at_the_cut_of_top_p_may_differ(model, monkeypatch):
    """A cut put on a cumulative probability of the first step: rounding decides, and calls that differ are let pass."""
    inputs, others = prompt(model, 4, 4, 45), []
    kwargs = {"do_sample": True, "temperature": 1.78, "top_k": 0, "max_new_tokens": 2}
    logits = generate(model, inputs, **kwargs)[0].logits[0]
    cumulative = (logits / 1.78).sort().values.softmax(-1).cumsum(-1).double()
    for place in range(VOCAB // 2, VOCAB - 1):
        compare(model, inputs, Tier.DEVICE_LOOP, top_p=float(1 - cumulative[place % 4, place]), **kwargs)

    def differing(got, wanted):
        others.append(got)
        raise AssertionError("they differ")

    monkeypatch.setattr(same_calls, "assert_same", differing)
    compare(model, inputs, Tier.DEVICE_LOOP, top_p=float(1 - cumulative[0, -9]), **kwargs)
    middle = float(1 - (cumulative[:, -3:-1].max() + 1) / 2)  # after the last token but one of every row
    for far in ({"top_p": middle, "max_new_tokens": 1}, {}):
        with pytest.raises(AssertionError, match="they differ"):
            compare(model, inputs, Tier.DEVICE_LOOP, **{**kwargs, **far})
    assert len(others) == 3


@sweep(20)
@given(st.data())
def test_random_calls_with_something_for_the_host(model, data):
    name = data.draw(st.sampled_from(sorted(ON_HOST)))
    kwargs = data.draw(calls(ON_DEVICE)) | {name: data.draw(ON_HOST[name])}
    if name == "exponential_decay_length_penalty":
        # It makes NaN of an EOS that is banned, and sampling from that is fatal to a GPU.
        kwargs = {
            name: value for name, value in kwargs.items() if name not in SAMPLING and name != "num_return_sequences"
        }
        kwargs["do_sample"] = False
    inputs = prompt(model, data.draw(st.integers(1, 3)), data.draw(st.integers(2, 9)), data.draw(st.integers(0, 99)))
    if name == "guidance_scale" and model.config.is_encoder_decoder:
        return
    compare(model, inputs, Tier.FAST_FORWARD, **kwargs)


@pytest.mark.parametrize("kwargs", [{}, {"do_sample": True, "repetition_penalty": 1.3}, {"num_beams": 2}], ids=str)
def test_the_decoding_ops_are_given_what_they_need(model, kwargs, monkeypatch, pretend_kernels):
    """On a CPU their references run, which a decode step would not otherwise take."""
    pretend_kernels()
    counts = {}
    for name in ("decode_linear", "decode_low_bit_linear", "decode_attention", "decode_attention_", "decode_embedding"):
        op = getattr(ops, name)

        def counting(*args, op=op, name=name, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return op(*args, **kwargs)

        monkeypatch.setattr(ops, name, counting)
    step_class = T5Step if model.config.is_encoder_decoder else GPT2Step
    call_step, run_forward, replays, forwards = StepWork.__call__, step_class.__call__, 0, 0

    def counting_call(step):
        nonlocal replays
        replays += step.graph is not None
        call_step(step)

    def counting_forward(step, state):
        nonlocal forwards
        forwards += 1
        return run_forward(step, state)

    monkeypatch.setattr(StepWork, "__call__", counting_call)
    monkeypatch.setattr(step_class, "__call__", counting_forward)
    compare(model, prompt(model, 3, 9, 5), Tier.DEVICE_LOOP, max_new_tokens=12, **kwargs)
    assert forwards + replays >= 11 and replays > 0
    depth, encodes = model.config.num_hidden_layers, model.config.is_encoder_decoder
    linear = "decode_low_bit_linear" if GENERATION["generation"].get("weights") else "decode_linear"
    assert counts[linear] >= (6 if encodes else 4) * depth * forwards
    assert counts["decode_attention_"] == depth * forwards
    assert counts.get("decode_attention", 0) == (depth * forwards if encodes else 0)
    assert counts["decode_embedding"] >= forwards


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, {"decode_select_": "edits"}),
        ({"output_scores": True}, {"edit_logits": "edits", "decode_select_": ""}),
        ({"remove_invalid_values": True}, {"edit_logits": "edits", "decode_select_": "edits"}),
        ({"do_sample": True, "top_k": 5}, {"decode_sample_": "edits top_k"}),
        (
            {"do_sample": True, "top_k": 5, "temperature": 0.7, "typical_p": 0.9},
            {"decode_sample_": "edits top_k typical_p"},
        ),
        ({"do_sample": True, "top_k": 0, "renormalize_logits": True}, {"decode_sample_": "edits"}),
        (
            {"do_sample": True, "top_k": 0, "top_p": 0.9, "output_scores": True},
            {"decode_sample_": "edits kept top_p"},
        ),
        (
            {"do_sample": True, "top_k": 5, "output_scores": True, "renormalize_logits": True},
            {"edit_logits": "edits", "decode_sample_": "kept"},
        ),
        ({"num_beams": 2}, {"beam_candidates": "edits log_softmax"}),
        ({"num_beams": 2, "output_scores": True}, {"edit_logits": "edits", "beam_candidates": ""}),
        ({"num_beams": 2, "remove_invalid_values": True}, {"edit_logits": "edits", "beam_candidates": "edits"}),
        (
            {"num_beams": 2, "do_sample": True, "top_k": 5, "typical_p": 0.9},
            {"filter_scores": "edits top_k typical_p min_tokens"},
        ),
    ],
    ids=str,
)
def test_where_processors_run(model, kwargs, expected, monkeypatch):
    """Each op that runs, and what it does beside its own work."""
    seen = {}
    for name in ("edit_logits", "decode_select_", "decode_sample_", "beam_candidates", "filter_scores"):
        op = getattr(ops, name)

        def watched(*args, op=op, name=name, **kwargs):
            given = ["edits"] if name == "edit_logits" else []
            given += [what for what in ("edits", "kept") if kwargs.get(what) is not None]
            filters = kwargs.get("filters", ops.SamplingFilters())
            given += [of for of, value in filters._asdict().items() if value != getattr(ops.SamplingFilters(), of)]
            seen[name] = " ".join(given + ["log_softmax"] * kwargs.get("log_softmax", False))
            return op(*args, **kwargs)

        monkeypatch.setattr(ops, name, watched)
    # In the order of generate(), InfNanRemove comes between the n-grams and the suppressed tokens.
    kwargs = {"output_scores": False, "no_repeat_ngram_size": 2, "suppress_tokens": [3, 5], **kwargs}
    compare(model, prompt(model, 2, 7, 5), Tier.DEVICE_LOOP, max_new_tokens=6, **kwargs)
    assert seen == expected


@pytest.mark.parametrize("new_tokens", [1, 2, 3])
def test_a_prompt_that_fills_a_capacity_class(new_tokens, each_device):
    model = tiny.gpt2(n_positions=150)
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        inputs = prompt(model, 2, 128, 0)
        compare(model, inputs, Tier.DEVICE_LOOP, max_new_tokens=new_tokens)


def test_tokens_alone_are_returned_as_a_tensor(model):
    inputs = prompt(model, 3, 5, 0)
    kwargs = {"return_dict_in_generate": False, "output_scores": False, "output_logits": False, "max_new_tokens": 9}
    wanted, _ = generate(model, inputs, **kwargs)
    fuseopt.initialize(model, GENERATION)
    got, _ = generate(model, inputs, **kwargs)
    assert type(got) is torch.Tensor and torch.equal(got, wanted)


@pytest.mark.parametrize("use_default_pad", [True, False])
def test_rows_that_end_early_are_padded(model, use_default_pad):
    inputs = prompt(model, 3, 6, 0)
    stock, _ = generate(model, inputs, max_new_tokens=12)
    ends = [int(row[-1 - 3 * index]) for index, row in enumerate(stock.sequences)]
    kwargs = {"max_new_tokens": 40, "eos_token_id": ends}
    if not use_default_pad:
        kwargs["pad_token_id"] = 5
    compare(model, inputs, Tier.DEVICE_LOOP, **kwargs)


def test_a_cache_of_the_caller_s_is_read_and_filled(model):
    first, second = prompt(model, 2, 6, 0, padded=False), prompt(model, 2, 4, 1, padded=False)

    def twice():
        cache = DynamicCache()
        if model.config.is_encoder_decoder:
            cache = EncoderDecoderCache(cache, DynamicCache())
        first_output, _ = generate(model, first, max_new_tokens=5, eos_token_id=[], past_key_values=cache)
        assert first_output.past_key_values is cache
        longer = torch.cat([first_output.sequences, second["input_ids"]], dim=1)
        if model.config.is_encoder_decoder:
            return generate(model, first, decoder_input_ids=longer, max_new_tokens=5, past_key_values=cache)
        return generate(model, {"input_ids": longer}, max_new_tokens=5, past_key_values=cache)

    wanted = twice()
    fuseopt.initialize(model, GENERATION)
    assert_same(twice(), wanted)
    assert [call.tier for call in calls_of(model)] == [Tier.DEVICE_LOOP, Tier.DEVICE_LOOP]


class Cancelled(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] >= 9:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@pytest.mark.parametrize("kwargs", [{}, {"num_beams": 2}], ids=str)
def test_a_cache_of_the_caller_s_after_a_call_that_was_cancelled(model, kwargs):
    """It holds what has been decoded, to go on from."""
    caches, inputs = [], prompt(model, 2, 6, 0, padded=False)
    for _ in range(2):
        caches.append(DynamicCache())
        if model.config.is_encoder_decoder:
            caches[-1] = EncoderDecoderCache(caches[-1], DynamicCache())
        with pytest.raises(KeyboardInterrupt):
            generate(
                model, inputs, max_new_tokens=20, stopping_criteria=[Cancelled()], past_key_values=caches[-1], **kwargs
            )
        fuseopt.initialize(model, GENERATION)
    assert_same_cache(caches[1], caches[0])
    assert caches[0].get_seq_length() == 8 and calls_of(model)[-1].tier is Tier.FAST_FORWARD


def test_decoder_prompts_and_masks(each_device):
    model = tiny.t5()
    inputs = prompt(model, 2, 6, 0)
    decoder = prompt(tiny.gpt2(), 2, 4, 1)
    inputs |= {"decoder_input_ids": decoder["input_ids"], "decoder_attention_mask": decoder["attention_mask"]}
    compare(model, inputs, Tier.DEVICE_LOOP, max_new_tokens=8)


def test_more_rows_than_the_decoding_kernels_take_equal_transformers(model):
    """More than the decoding kernels take."""
    compare(model, prompt(model, 17, 5, 0), Tier.DEVICE_LOOP, max_new_tokens=6)
    compare(model, prompt(model, 24, 5, 0), Tier.DEVICE_LOOP, max_new_tokens=12, eos_token_id=list(range(0, 61, 4)))


def test_positions_of_the_caller_s(each_device):
    model = tiny.gpt2()
    inputs = prompt(model, 2, 6, 0)
    for positions in (torch.arange(5, 11), torch.arange(0, 12, 2), torch.arange(9)):
        inputs["position_ids"] = positions.repeat(2, 1)
        compare(model, inputs, Tier.DEVICE_LOOP, max_new_tokens=8)


@pytest.mark.parametrize("length", [4, 9])
def test_masks_of_another_length(model, length):
    inputs = prompt(model, 2, 6, 0)
    inputs["attention_mask"] = torch.ones(2, length, dtype=torch.long)
    inputs["attention_mask"][0, 1] = 0
    compare(model, inputs, Tier.DEVICE_LOOP, max_new_tokens=8)


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_masks_that_leave_nothing_of_a_prompt_or_are_not_of_its_length(as_on_a_gpu, each_device, pretend_kernels):
    """transformers lets a decoder attend evenly to a prompt that is masked as a whole, and drops a mask of ones."""
    if as_on_a_gpu:
        pretend_kernels()
    inputs, stock, model = (
        prompt(tiny.t5(), 2, 6, 0, padded=False),
        tiny.t5(),
        fuseopt.initialize(tiny.t5(), GENERATION),
    )
    for mask in ([[0] * 6, [1] * 6], [[1] * 4] * 2, [[1] * 9] * 2):
        for kwargs in ({}, {"num_beams": 2}):
            inputs["attention_mask"] = torch.tensor(mask)
            wanted = generate(stock, inputs, max_new_tokens=4, **kwargs)
            assert_same(generate(model, inputs, max_new_tokens=4, **kwargs), wanted)
            assert "mask" in calls_of(model)[-1].reason


@pytest.mark.parametrize("family", ["gpt2", "t5"])
@pytest.mark.parametrize(
    ("by_the_head", "kwargs"),
    [
        (True, {}),
        (True, {"min_new_tokens": 4}),
        (True, {"min_length": 9, "suppress_tokens": [5, 7], "forced_eos_token_id": 8}),
        (True, {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}),  # all that the op does
        (False, {"renormalize_logits": True}),
        (False, {"output_logits": True}),
    ],
)
def test_greedy_steps_end_with_the_head(family, by_the_head, kwargs, each_device, monkeypatch, pretend_kernels):
    pretend_kernels()
    inputs = prompt(tiny.FAMILIES[family](0), 2, 6, 0, padded=False)
    plain = {"return_dict_in_generate": True, "output_scores": False, "output_logits": False}
    asked = {**plain, "max_new_tokens": 8, "eos_token_id": [9, 11], **kwargs}
    wanted = generate(tiny.FAMILIES[family](0), inputs, **asked)
    head = mock.Mock(wraps=ops.decode_head_select_)
    monkeypatch.setattr(ops, "decode_head_select_", head)
    model = fuseopt.initialize(tiny.FAMILIES[family](0), GENERATION)
    got = generate(model, inputs, **asked)
    assert torch.equal(got[0].sequences, wanted[0].sequences) and torch.equal(got[1], wanted[1])
    assert calls_of(model)[-1].tier is Tier.DEVICE_LOOP
    assert bool(head.call_count) == by_the_head


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty` with `inputs_embeds`")
def test_embeddings_in_place_of_tokens(each_device):
    model = tiny.gpt2()
    embeds = model.transformer.wte(prompt(model, 2, 6, 0)["input_ids"]).detach()
    compare(model, {"inputs_embeds": embeds}, Tier.DEVICE_LOOP, max_new_tokens=8)
    compare(model, {"inputs_embeds": embeds}, Tier.DEVICE_LOOP, max_new_tokens=8, repetition_penalty=1.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", [*FAMILIES, "mt5", "umt5"])
def test_half_precision_is_as_close_to_float32_as_transformers(family, dtype, each_device):
    errors, _ = teacher_forced_errors(family, dtype, 3, 8)
    assert 0 < errors["fused"] <= 1.15 * errors["stock"]


@pytest.mark.parametrize("each_device", ["cpu"], indirect=True)
@pytest.mark.parametrize(
    "rows", sorted({1, *(most + over for most in MOST_ROWS_ON_CPU[torch.float32] for over in (0, 1))})
)
@pytest.mark.parametrize("family", FAMILIES)
def test_few_rows_on_a_cpu_run_on_its_kernels(family, rows, each_device, monkeypatch):
    """More rows leave linear layers to the BLAS library: sooner for weights of a Linear than for those of a Conv1D."""
    monkeypatch.setattr(StepGraphs, "can_capture", staticmethod(lambda device: False))
    model, counts = tiny.FAMILIES[family](), Counter()
    for name in ("decode_linear", "decode_attention", "decode_attention_"):
        op = getattr(ops, name)

        def counting(*args, op=op, name=name, **kwargs):
            counts[name] += 1
            return op(*args, **kwargs, backend="cpu")

        monkeypatch.setattr(ops, name, counting)
    compare(model, prompt(model, rows, 9, 5, padded=False), Tier.DEVICE_LOOP, max_new_tokens=5, eos_token_id=None)
    encodes, depth = model.config.is_encoder_decoder, model.config.num_hidden_layers
    steps, (most, most_of_conv1d) = 5 if encodes else 4, MOST_ROWS_ON_CPU[torch.float32]
    assert counts["decode_attention_"] == steps * depth
    assert counts["decode_attention"] == (steps * depth if encodes else 0)
    # Prompts have 9 tokens a row; in the last layer of GPT-2 all but queries, keys and values has one, as its head.
    if encodes:
        linears = (rows <= most) * steps * (6 * depth + 1) + (9 * rows <= most) * depth
    else:
        of_steps = (rows <= most_of_conv1d) * (4 * steps * depth + 3) + (rows <= most) * (steps + 1)
        linears = of_steps + (9 * rows <= most_of_conv1d) * (4 * depth - 3)
    assert counts["decode_linear"] == linears


@pytest.mark.parametrize("each_device", ["cpu"], indirect=True)
@pytest.mark.parametrize("kwargs", [{}, {"num_beams": 3}, {"max_time": 1e6}], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_without_the_cpu_library_attention_reads_caches_as_far_as_they_are_filled(
    family, kwargs, each_device, monkeypatch
):
    """A short call fills few of its slots; reading all of them made beams slower than in transformers."""
    for module in (attention, layers, call):
        monkeypatch.setattr(module, "has_kernel", lambda *_: False)
    model, lengths, attend = tiny.FAMILIES[family](), set(), torch.nn.functional.scaled_dot_product_attention

    def noting(query, key, *args, **kwargs):
        lengths.add(key.shape[2])
        return attend(query, key, *args, **kwargs)

    inputs = prompt(model, 2, 7, 0)
    wanted = generate(model, inputs, max_new_tokens=5, eos_token_id=-1, **kwargs)
    fuseopt.initialize(model, GENERATION)
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", noting)
    assert_same(generate(model, inputs, max_new_tokens=5, eos_token_id=-1, **kwargs), wanted)
    assert lengths >= ({1, 2, 3, 4, 5, 7} if family == "t5" else {8, 9, 10, 11}) and max(lengths) <= 11
