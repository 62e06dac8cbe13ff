"""Prompts in classes of length, padded on the right, by the step's own prefill and encoder, and as CUDA graphs."""

import copy
import traceback
import warnings
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, GenerationConfig, MaxLengthCriteria, StoppingCriteriaList

import fuseopt
from fuseopt import ops
from fuseopt.generation.engine import prompt_attention, residual_stream
from fuseopt.generation.engine.graphs import StepGraphs, StepWork
from fuseopt.generation.engine.state import DecodeState, Sizes, prompt_length_for
from fuseopt.generation.families.gpt2 import GPT2Step
from fuseopt.generation.families.t5 import T5Step
from fuseopt.generation.families.t5_encoder import T5Encoder
from fuseopt.generation.prompt import early_prefill, prompts
from fuseopt.generation.prompt.early_prefill import EarlyPrefill
from fuseopt.generation.tiers import Tier
from fuseopt.ops import registry
from fuseopt.ops.decode.prompt_attention import prompt_attention_reference
from tests import tiny
from tests.generation.same_calls import GENERATION, and_int8, assert_same, generate, prompt, with_weights

pytestmark = pytest.mark.usefixtures("each_device")
on_a_gpu = pytest.mark.parametrize("each_device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


FAMILIES = {
    "gpt2": lambda: tiny.gpt2(n_positions=150),
    "t5": tiny.t5,
    "gated t5": lambda: tiny.t5(feed_forward_proj="gated-gelu"),
}


@pytest.fixture(params=and_int8(FAMILIES))
def model(request, each_device, monkeypatch):
    return with_weights(request.param, lambda family: FAMILIES[family](), monkeypatch)


@pytest.fixture
def ran(monkeypatch, pretend_kernels):
    """Lets a CPU take the paths of a GPU; the prompts that ran, as (length, masked)."""
    pretend_kernels()
    counted = []
    run_prompt = StepGraphs.run_prompt

    def counting(graphs, prompt):
        counted.append((type(prompt.forward.__self__), prompt.length, prompt.masked))
        return run_prompt(graphs, prompt)

    monkeypatch.setattr(StepGraphs, "run_prompt", counting)
    return counted


def test_prompt_lengths_are_rounded_up_to_a_few_sizes():
    def padded(rows, *lengths):
        return [prompt_length_for(rows, length, torch.device("cpu")) for length in lengths]

    assert padded(1, 1, 2, 3, 17, 64, 65, 128, 1000, 1024) == [1, 2, 4, 32, 64, 128, 128, 1024, 1024]
    assert padded(1, 1025, 2048, 2049) == [1088, 2048, None] and padded(64, 129) == [None]
    assert padded(64, 20, 64, 65, 100, 128) == [32, 64, 80, 112, 128]
    assert padded(8, 500, 512, 513, 1000) == [512, 512, 528, 1008]


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_padded_prompts_give_what_transformers_does(model, ran, data):
    length = data.draw(st.sampled_from([2, 3, 5, 8, 9, 33, 70]))
    inputs = prompt(
        model, data.draw(st.integers(1, 3)), length, data.draw(st.integers(0, 99)), data.draw(st.booleans())
    )
    kwargs = {"max_new_tokens": data.draw(st.integers(1, 6))}
    kwargs |= data.draw(
        st.sampled_from([{}, {"do_sample": True, "num_return_sequences": 2}, {"num_beams": 3}, {"max_time": 1e6}])
    )
    wanted = generate(model, inputs, **kwargs)
    fuseopt.initialize(model, GENERATION)
    ran.clear()
    try:
        assert_same(generate(model, inputs, **kwargs), wanted)
        call = model.generate.calls[-1]
    finally:
        fuseopt.restore(model)
    masked = bool((inputs["attention_mask"] == 0).any())
    padded = prompt_length_for(1, length, model.device)
    assert call.tier is not Tier.STOCK and not call.note
    if model.config.is_encoder_decoder:
        assert ran == [(T5Encoder, padded, masked), (T5Step, padded, False)]
    else:
        assert ran == [(GPT2Step, padded, masked)]


@pytest.mark.parametrize(
    ("length", "head_dim", "padded", "takes"),
    [
        pytest.param(9, 16, False, True, id="short"),
        pytest.param(256, 16, False, True, id="longest"),
        pytest.param(257, 16, False, False, id="too long"),
        pytest.param(9, 8, False, False, id="head_dim"),
        pytest.param(9, 16, True, False, id="masked"),
    ],
)
def test_one_op_for_attention_and_cache_of_short_prompts(
    ran, length, head_dim, padded, takes, each_device, monkeypatch
):
    """Where nothing is masked and the kernel takes the heads; else a copy and torch's attention."""
    pick, asked = registry.pick, ("prompt_attention_", "auto")
    monkeypatch.setattr(registry, "pick", lambda *call: "cuda" if call[:2] == asked else pick(*call))
    model = tiny.gpt2(n_embd=3 * head_dim, n_positions=300)
    inputs = prompt(model, 3, length, 0, padded=padded)
    wanted = generate(model, inputs, max_new_tokens=5)
    fuseopt.initialize(model, GENERATION)
    with (
        mock.patch.object(ops, "prompt_attention_", wraps=prompt_attention_reference) as op,
        mock.patch.object(prompt_attention, "store", wraps=prompt_attention.store) as store,
        mock.patch.object(prompt_attention, "F", wraps=prompt_attention.F) as functional,
    ):
        assert_same(generate(model, inputs, max_new_tokens=5), wanted)
    counts = [function.call_count for function in (op, store, functional.scaled_dot_product_attention)]
    # Keys and values; on a GPU one op writes both, and before it zeros are stored over what is padding.
    stores = 2 if each_device.type == "cpu" else 1
    assert counts == [model.config.n_layer * count for count in ((1, 0, 0) if takes else (0, stores, 1))]


@pytest.mark.parametrize("padded", [True, False])
def test_a_mask_that_transformers_infers(ran, padded, each_device):
    """The prompt that was queued without one counts only if there is nothing to mask."""
    model = tiny.gpt2()
    inputs = prompt(model, 3, 9, 0, padded=padded)
    del inputs["attention_mask"]
    wanted = generate(model, inputs, max_new_tokens=5, eos_token_id=[])
    fuseopt.initialize(model, GENERATION)
    assert_same(generate(model, inputs, max_new_tokens=5, eos_token_id=[]), wanted)
    assert ran == [(GPT2Step, 16, False), (GPT2Step, 16, True)][: 1 + padded]


@pytest.mark.parametrize(
    "mask", [[[1, 1, 1, 1, 0, 0], [1] * 6], [[1, 1, 0, 0, 1, 1], [1] * 6]], ids=["right", "middle"]
)
def test_padding_that_is_not_on_the_left(ran, mask, each_device):
    """All that is masked has position 0."""
    model = tiny.gpt2()
    inputs = prompt(model, 2, 6, 0, padded=False) | {"attention_mask": torch.tensor(mask)}
    wanted = generate(model, inputs, max_new_tokens=4)
    fuseopt.initialize(model, GENERATION)
    assert_same(generate(model, inputs, max_new_tokens=4), wanted)
    assert ran == [(GPT2Step, 8, True)]


@pytest.mark.parametrize("name", ["position_ids", "past_key_values", "inputs_embeds", "prefill_chunk_size"])
def test_what_keeps_a_prompt_from_being_queued_early(ran, name, each_device):
    model = tiny.gpt2()
    inputs = prompt(model, 2, 6, 0)
    value = {
        "position_ids": torch.arange(3, 9).repeat(2, 1),
        "past_key_values": DynamicCache(),
        "inputs_embeds": model.transformer.wte(inputs["input_ids"]).detach(),
        "prefill_chunk_size": 3,
    }[name]
    wanted = generate(model, inputs, max_new_tokens=5, **{name: copy.deepcopy(value)})
    fuseopt.initialize(model, GENERATION)
    with mock.patch.object(EarlyPrefill, "_queue_prompt") as started:
        assert_same(generate(model, inputs, max_new_tokens=5, **{name: value}), wanted)
    assert not started.called and model.generate.calls[-1].tier is Tier.DEVICE_LOOP


@pytest.mark.parametrize("room", [31, 32])
def test_a_large_prompt_is_not_kept_twice(ran, room, monkeypatch, each_device):
    model = tiny.gpt2()
    inputs = prompt(model, 2, 9, 0)
    wanted = generate(model, inputs, max_new_tokens=5)
    fuseopt.initialize(model, GENERATION)
    monkeypatch.setattr(EarlyPrefill, "_expected_sizes", lambda *args: None)
    shape, started = GPT2Step(model).shape, []
    assert shape.bytes_per_slot == DecodeState(Sizes(1, 128), shape, 1).cache.nbytes / 128
    monkeypatch.setattr(early_prefill, "_MAX_PROMPT_BYTES", room * shape.bytes_per_slot)
    run = EarlyPrefill._queue_prompt
    monkeypatch.setattr(EarlyPrefill, "_queue_prompt", lambda *args: started.append(run(*args)) or started[-1])
    assert_same(generate(model, inputs, max_new_tokens=5), wanted)
    assert ran == [(GPT2Step, 16, True)] and [result is not None for result in started] == [room == 32]


def test_nothing_is_padded_where_nothing_is_captured(ran, model):
    inputs = prompt(model, 2, 9, 0)
    wanted = generate(model, inputs, max_new_tokens=5)
    fuseopt.initialize(model, {"generation": {"max_graphs": 0}})
    assert_same(generate(model, inputs, max_new_tokens=5), wanted)
    assert not ran and model.generate.calls[-1].tier is Tier.DEVICE_LOOP


def test_what_lies_behind_a_prompt_changes_nothing(each_device):
    """Ids that no vocabulary has, positions that no model has, and keys and values of a prompt before it."""
    model = tiny.gpt2()
    step = GPT2Step(model)
    ids = prompt(model, 2, 5, 0, padded=False)["input_ids"]
    logits = []
    with torch.no_grad():
        for behind in (0, 10**6):
            state = DecodeState(Sizes(2, 128), step.shape, step.vocab)
            state.ids.fill_(behind)
            state.prompt_positions.fill_(behind)
            state.cache.fill_(float(behind))
            state.begin(5, None, None)
            state.ids[:, :5] = ids
            state.prompt_positions[:, :5] = torch.arange(5)
            step.prefill(state, 8, False)
            logits.append(state.logits.clone())
    assert torch.equal(*logits)
    torch.testing.assert_close(logits[0], model(ids).logits[:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("each_device", ["cpu"], indirect=True)
@pytest.mark.parametrize("padded", [True, False])
def test_padding_that_overflows_harms_no_prompt(model, ran, padded):
    """The token id that pads a prompt may have an embedding that is NaN or leads to infinities."""
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 1
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = torch.nan
    inputs = prompt(model, 3, 7, 0, padded=False)
    inputs["attention_mask"][1, :2] = 0 if padded else 1
    wanted = generate(model, inputs, max_new_tokens=4)
    assert wanted[0].logits[0][:, 1:].isfinite().all()
    fuseopt.initialize(model, GENERATION)
    assert_same(generate(model, inputs, max_new_tokens=4), wanted)
    assert ran and model.generate.calls[-1].tier is Tier.DEVICE_LOOP


def test_a_mask_of_an_encoder_s_output_ends_with_its_call(each_device):
    """Calls of one length share a state, with and without a mask in turns."""
    step = T5Step(tiny.t5())
    state = DecodeState(Sizes(2, 128, 128), step.shape, step.vocab)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    for keep in (None, mask, None, mask.flip(0), mask, None, None):
        state.load_cross(5, keep)
        seen = torch.zeros(2, 128, dtype=torch.bool)
        seen[:, :5] = True if keep is None else keep.bool()
        assert torch.equal(state.cross_keep, seen) and state.cross_length.item() == 5
    state.load_cross(6, None)
    assert state.cross_keep.sum() == 12 and state.cross_length.item() == 6


@pytest.mark.parametrize("seed", [0, 6, 9])
def test_float16_that_overflows_in_some_prompts_is_finite_in_the_others(seed, ran, each_device):
    """T5 v1.1 loaded in float16 keeps `wo` in float32; an infinity there becomes NaN."""
    with torch.device("cpu"):
        model = tiny.t5_gated(seed, d_model=64, d_ff=128, d_kv=16, num_heads=4)
    model.to(each_device, torch.float16)
    for name, module in model.named_modules():
        if name.endswith((".wi_0", ".wi_1", ".wo")):
            module.weight.data *= 100
        if name.endswith(".wo"):
            module.float()
    inputs = prompt(model, 12, 5, seed, padded=False)
    wanted = generate(model, inputs, max_new_tokens=1)[0].logits[0]
    fuseopt.initialize(model, GENERATION)
    got = generate(model, inputs, max_new_tokens=1)[0].logits[0]
    assert ran and model.generate.calls[-1].tier is Tier.DEVICE_LOOP
    is_finite = wanted.isfinite().all(1)
    assert 0 < is_finite.sum() < len(is_finite)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0.1, equal_nan=True)


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("mask", ["none", "rows", "all of a row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_encoder_outputs_are_as_exact_as_the_modules(dtype, mask, length, each_device):
    """Against the module, and its float64 copy as judge."""
    if mask == "all of a row" and each_device.type == "cuda":
        pytest.skip("PyTorch's kernels make of such a row what each likes")
    model = tiny.t5().to(dtype)
    inputs = prompt(model, 3, length, 1, padded=mask == "rows" and length > 1)
    keep = None if mask == "none" else inputs["attention_mask"]
    if mask == "all of a row":
        keep[1] = 0
    graphs, encoder = StepGraphs(8), T5Encoder(model)
    with torch.no_grad():
        wanted = model.encoder(inputs["input_ids"], attention_mask=keep)[0]
        for _ in range(3):
            state = encoder.state_for(graphs, *inputs["input_ids"].shape)
            got, note = encoder(graphs, state, inputs["input_ids"], keep)
            assert not note and got.dtype is dtype
        exact = model.double().encoder(inputs["input_ids"], attention_mask=keep)[0]
    if dtype is torch.float32:
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    ours, theirs = ((encoded.double() - exact).abs().mean() for encoded in (got, wanted))
    assert ours <= 1.2 * theirs + 1e-6


def hooked(model):
    model.encoder.block[0].register_forward_hook(lambda *args: None)
    return {}, "carries hooks"


def hidden_states(model):
    return {"generation_config": GenerationConfig(output_hidden_states=True)}, "output_hidden_states is set"


def replaced(model):
    model.get_encoder = lambda: model.encoder
    return {}, "get_encoder has been replaced"


def eager(model):
    model.set_attn_implementation("eager")
    return {}, "attn_implementation is 'eager'"


@pytest.mark.parametrize("case", [hooked, replaced, eager], ids=lambda case: case.__name__)
def test_where_transformers_has_to_run_the_encoder(case, ran, each_device):
    model = tiny.t5()
    kwargs, reason = case(model)
    inputs = prompt(model, 2, 6, 0)
    wanted = generate(model, inputs, max_new_tokens=5, **kwargs)
    fuseopt.initialize(model, GENERATION)
    assert_same(generate(model, inputs, max_new_tokens=5, **kwargs), wanted)
    call = model.generate.calls[-1]
    assert call.tier is Tier.DEVICE_LOOP and reason in call.note
    assert [kind for kind, *_ in ran] == [T5Step]


def test_hidden_states_of_the_encoder_are_transformers_own(ran, each_device):
    model = tiny.t5()
    inputs = prompt(model, 2, 6, 0)
    kwargs = {"output_hidden_states": True, "max_new_tokens": 4}
    wanted, _ = generate(model, inputs, **kwargs)
    fuseopt.initialize(model, GENERATION)
    got, _ = generate(model, inputs, **kwargs)
    assert not ran and torch.equal(got.encoder_hidden_states[-1], wanted.encoder_hidden_states[-1])


def first_given(model):
    return {"decoder_start_token_id": 7}, [7]


def first_in_a_config(model):
    return {"generation_config": GenerationConfig(decoder_start_token_id=7)}, [7]


def first_of_each_row(model):
    return {"decoder_start_token_id": [5, 6]}, []


def first_in_some_row(model):
    return {"decoder_input_ids": torch.tensor([[0], [6]], device=model.device)}, []


def first_of_bos(model):
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None
    return {"bos_token_id": 9}, []


def first_by_a_method(model):
    ids = torch.tensor([[5], [6]], device=model.device)
    model._prepare_decoder_input_ids_for_generation = lambda *args, model_kwargs, **kwargs: (ids, model_kwargs)
    return {}, []


@pytest.mark.parametrize(
    "case",
    [first_given, first_in_a_config, first_of_each_row, first_in_some_row, first_of_bos, first_by_a_method],
    ids=lambda case: case.__name__,
)
@pytest.mark.parametrize("others", [{}, {"num_beams": 2}, {"max_time": 1e6}], ids=str)
def test_what_a_decoder_begins_with(case, others, ran, each_device, monkeypatch):
    """The decoder begins early if that is known, and in any case once."""
    model, firsts = tiny.t5(), []
    run = early_prefill.run_encoded
    monkeypatch.setattr(early_prefill, "run_encoded", lambda *args: firsts.append(args[-1]) or run(*args))
    kwargs, known = case(model)
    kwargs |= {"max_new_tokens": 5, **others}
    inputs = prompt(model, 2, 6, 0)
    wanted = generate(model, inputs, **kwargs)
    fuseopt.initialize(model, GENERATION)
    for _ in range(3):
        ran.clear(), firsts.clear()
        assert_same(generate(model, inputs, **kwargs), wanted)
        assert model.generate.calls[-1].tier is not Tier.STOCK and firsts == known
        assert [kind for kind, *_ in ran if kind is T5Step] == [T5Step]


def test_more_sequences_than_beams_are_refused_in_transformers_own_words(ran, each_device):
    model = fuseopt.initialize(tiny.t5(), GENERATION)
    with pytest.raises(ValueError, match=r"`num_return_sequences` .* `num_beams`"):
        generate(model, prompt(model, 1, 3, 0), num_beams=2, num_return_sequences=3, max_new_tokens=2)


def test_errors_are_transformers_own(ran, each_device):
    model = fuseopt.initialize(tiny.t5(), GENERATION)
    inputs = prompt(model, 2, 6, 0)
    for kwargs in ({"no_such_argument": 1}, {"max_new_tokens": -1}, {"inputs_embeds": torch.rand(2, 6, 8)}):
        with pytest.raises(Exception) as wanted:
            type(model).generate(model, **inputs, **kwargs)
        with pytest.raises(type(wanted.value)) as got:
            model.generate(**inputs, **kwargs)
        assert str(got.value) == str(wanted.value)


def test_weights_of_the_encoder_that_move_are_found(ran, each_device):
    model = fuseopt.initialize(tiny.t5(), GENERATION)
    inputs = prompt(model, 2, 6, 0)
    generate(model, inputs, max_new_tokens=4)
    for parameter in model.encoder.parameters():
        parameter.data = parameter.data * 1.5
    wanted = type(model).generate(model, **inputs, max_new_tokens=4)
    assert torch.equal(model.generate(**inputs, max_new_tokens=4), wanted)
    assert (T5Encoder, 8, True) in ran


@on_a_gpu
def test_a_length_class_is_captured_the_second_time(model):
    inputs = prompt(model, 2, 9, 0)
    wanted = [generate(model, prompt(model, 2, length, 0), max_new_tokens=5) for length in (9, 12, 15)]
    fuseopt.initialize(model, GENERATION)
    captured = []
    for length, expected in zip((9, 12, 15), wanted, strict=True):
        assert_same(generate(model, prompt(model, 2, length, 0), max_new_tokens=5), expected)
        captured.append(model.generate.graphs.prompts)
    each = 2 if model.config.is_encoder_decoder else 1
    assert captured == [0, each, each]
    generate(model, inputs, max_new_tokens=5)
    assert any(f" and {each} prompt" in line for line in fuseopt.report(model).since if "captured as" in line)


@pytest.mark.parametrize("new_tokens", [1, 2, 3])
def test_a_step_is_captured_at_the_third_token_or_in_the_second_call(new_tokens, model, monkeypatch):
    """The first token comes of the prompt, without a step."""
    inputs = prompt(model, 2, 9, 0)
    wanted = generate(model, inputs, max_new_tokens=new_tokens)
    fuseopt.initialize(model, GENERATION)
    events, run, capture = [], StepWork.__call__, StepGraphs.capture
    monkeypatch.setattr(StepWork, "__call__", lambda step: events.append("step") or run(step))
    monkeypatch.setattr(StepGraphs, "capture", lambda *pair: events.append("capture") or capture(*pair))
    steps = ["step"] * (new_tokens - 1)
    at_third = [*steps[:-1], "capture", "step"] if new_tokens == 3 else steps
    at_once = steps and ["capture", *steps]
    is_captured = False
    for expected in (at_third, at_once, at_once):
        events.clear()
        assert_same(generate(model, inputs, max_new_tokens=new_tokens), wanted)
        assert events == (steps if is_captured else expected)
        # Where nothing can be captured it is tried in every call.
        is_captured = StepGraphs.can_capture(model.device) and (is_captured or "capture" in events)


@on_a_gpu
def test_captured_prompts_are_bounded(model):
    lengths = [3, 5, 9, 17, 33, 65]
    prompts = [prompt(model, 2, length, 0) for length in lengths for _ in range(2)]
    wanted = [generate(model, inputs, max_new_tokens=4) for inputs in prompts]
    fuseopt.initialize(model, {"generation": {"max_graphs": 1}})
    for inputs, expected in zip(prompts, wanted, strict=True):
        assert_same(generate(model, inputs, max_new_tokens=4), expected)
    assert (model.generate.graphs.prompts, model.generate.graphs.steps) == (2, 1)


@on_a_gpu
def test_captured_prompts_go_with_the_state_that_they_run_in(each_device):
    model = fuseopt.initialize(tiny.gpt2(), {"generation": {"max_graphs": 2}})
    for rows in (1, 2, 3, 4):
        for _ in range(2):
            generate(model, prompt(model, rows, 9, 0), max_new_tokens=4)
    graphs = model.generate.graphs
    assert (graphs.prompts, graphs.steps) == (2, 2)
    assert {prompt.state for prompt in graphs._prompts.values()} == {step.state for step in graphs._steps.values()}


def test_a_prompt_runs_where_the_call_decodes(ran, model, monkeypatch):
    """In the first call, of which nothing has been kept, there is one state, which the encoder's output is in too."""
    made, make = [], DecodeState.__init__
    monkeypatch.setattr(DecodeState, "__init__", lambda state, *args: made.append(args[0]) or make(state, *args))
    inputs = prompt(model, 2, 9, 0)
    for kwargs in ({"max_new_tokens": 130}, {"max_length": 40}, {"max_new_tokens": 5, "num_beams": 3}):
        wanted = generate(model, inputs, **kwargs)
        with fuseopt.fused(model, GENERATION):
            made.clear()
            assert_same(generate(model, inputs, **kwargs), wanted)
            assert model.generate.calls[-1].tier is Tier.DEVICE_LOOP
            assert len(made) == 1, made
            ran.clear()


def test_a_length_that_no_argument_tells(ran, model):
    """A criterion ends the call before it comes to the capacity that the prompt was given."""
    inputs = prompt(model, 2, 9, 0)
    kwargs = {"max_new_tokens": 135, "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(12)])}
    wanted = generate(model, inputs, **kwargs)
    fuseopt.initialize(model, GENERATION)
    assert_same(generate(model, inputs, **kwargs), wanted)
    kinds = [kind for kind, *_ in ran]
    assert kinds == ([T5Encoder, T5Step, T5Step] if model.config.is_encoder_decoder else [GPT2Step])
    assert model.generate.calls[-1].tier is Tier.DEVICE_LOOP


def test_a_prompt_that_is_too_large_to_be_captured_runs_ahead_all_the_same(ran, monkeypatch, set_tuned, each_device):
    set_tuned("prompt_graph_max_tokens", 16)
    model = tiny.gpt2()
    inputs = prompt(model, 2, 9, 0)
    wanted = generate(model, inputs, max_new_tokens=5)
    fuseopt.initialize(model, GENERATION)
    started, run = [], EarlyPrefill._queue_prompt
    monkeypatch.setattr(EarlyPrefill, "_queue_prompt", lambda *args: started.append(run(*args)) or started[-1])
    with mock.patch.object(GPT2Step, "prefill", autospec=True, side_effect=GPT2Step.prefill) as prefilled:
        assert_same(generate(model, inputs, max_new_tokens=5), wanted)
    assert not ran and started[0] is not None
    assert [call.args[2:] for call in prefilled.call_args_list] == [(9, True)]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_has_been_queued_is_waited_for_whatever_happens(ran, model, error, monkeypatch):
    inputs = prompt(model, 2, 9, 0)
    fuseopt.initialize(model, GENERATION)
    events, join = [], StepGraphs.join
    monkeypatch.setattr(StepGraphs, "join", lambda graphs, device: events.append("joined") or join(graphs, device))

    def fail(*args, **kwargs):
        events.append("raised")
        raise error

    with mock.patch.object(type(model), "_prepare_special_tokens", fail), pytest.raises(error):
        generate(model, inputs, max_new_tokens=5)
    assert ran and events[-2:] == ["raised", "joined"]
    assert_same(generate(model, inputs, max_new_tokens=5), generate(fuseopt.restore(model), inputs, max_new_tokens=5))


@on_a_gpu
def test_nothing_waits_for_the_side_stream(each_device):
    graphs, value = StepGraphs(1), torch.zeros(1)
    beside, before_it = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    with graphs.on_side_stream(value.device):
        torch.cuda._sleep(10**9)
        value += 1
        beside.record()
    before = value.clone()
    before_it.record()
    graphs.join(value.device)
    after = value.clone()
    assert (before.item(), after.item()) == (0, 1)
    assert before_it.elapsed_time(beside) > 0


@on_a_gpu
@pytest.mark.parametrize("kwargs", [{}, {"min_new_tokens": 3, "no_repeat_ngram_size": 2}, {"num_beams": 3}], ids=str)
def test_a_call_waits_for_the_device_where_it_has_to(model, kwargs, monkeypatch):
    """For the mask before the prompt, and if the shape of the output depends on values."""
    inputs = prompt(model, 2, 9, 0)
    fuseopt.initialize(model, GENERATION)

    def call():
        model.generate(**inputs, max_new_tokens=6, eos_token_id=2, pad_token_id=0, **kwargs)

    for _ in range(4):
        call()
    waits = []

    def note(message, *_):
        if "synchronizing" in str(message):
            files = [frame.filename for frame in traceback.extract_stack()]
            passed_through = ("site-packages/torch/", "/warnings.py", __file__)
            waits.append(next(file for file in reversed(files) if not any(part in file for part in passed_through)))

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            monkeypatch.setattr(warnings, "showwarning", note)
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ours = [name.rpartition("/")[2] for name in waits if "/generation/" in name and "transformers" not in name]
    begins = model.config.is_encoder_decoder or "num_beams" not in kwargs
    assert [name for name in ours if name == "early_prefill.py"] == ["early_prefill.py"] * begins
    assert {*ours} - {"early_prefill.py"} <= (
        {"beam_state.py", "prefill.py"} if kwargs.keys() & {"num_beams"} else set()
    ), ours
    assert "caching_proxy.py" not in ours and len(waits) - len(ours) <= 1, waits


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_store_copies_any_projection_and_nothing_beside_it(data, each_device):
    """Into a part of a cache from a part of a projection, aligned or not, and in the elements that this allows."""
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]))
    rows, length, heads, offset = (data.draw(st.integers(1, 4)) for _ in range(4))
    width = data.draw(st.sampled_from([1, 3, 4, 8, 12, 64]))
    projected = torch.randn(rows * length * heads * width * 2 + offset)[offset - 1 : -1].to(dtype)
    vectors = projected.view(rows, length, 2, heads, width).permute(2, 0, 3, 1, 4)
    cache = torch.zeros(2, rows, heads, length + 3, width, dtype=dtype)
    copied, copy_ = [], torch.Tensor.copy_
    with mock.patch.object(torch.Tensor, "copy_", lambda *pair: copied.append(pair[0].dtype) or copy_(*pair)):
        prompts.store(cache[:, :, :, :length], vectors)
    assert torch.equal(cache[:, :, :, :length], vectors) and not cache[:, :, :, length:].any()
    wide = width * dtype.itemsize % 16 == 0 and vectors.storage_offset() * dtype.itemsize % 16 == 0
    assert set(copied) == {torch.complex128 if wide else dtype}


def test_an_encoder_s_output_of_none(ran, each_device):
    """Which some versions of transformers refuse."""
    inputs, outcomes = prompt(tiny.t5(), 2, 5, 0), []
    for model in (tiny.t5(), fuseopt.initialize(tiny.t5(), GENERATION)):
        try:
            outcomes.append(model.generate(**inputs, encoder_outputs=None, max_new_tokens=3).tolist())
        except ValueError as error:
            outcomes.append(str(error))
    assert outcomes[1] == outcomes[0] and T5Encoder not in [kind for kind, *_ in ran]


def test_nothing_begins_under_autocast(ran, model):
    """There PyTorch's products of many rows are in another dtype than the cache."""
    inputs = prompt(model, 40, 5, 0)
    fuseopt.initialize(model, GENERATION)
    model.generate(**inputs, max_new_tokens=3)
    ran.clear()
    with torch.autocast(model.device.type, torch.bfloat16):
        wanted = type(model).generate(model, **inputs, max_new_tokens=3)
        assert torch.equal(model.generate(**inputs, max_new_tokens=3), wanted)
    assert not ran and model.generate.calls[-1].reason == "autocast is on"


def nothing(module):
    pass


def other_eps(module):
    for part in module.modules():
        for name in {"eps", "variance_epsilon"} & vars(part).keys():
            setattr(part, name, 0.5)


def other_weights(module):
    for parameter in module.parameters():
        parameter.data = parameter.data * 1.5


def train(module):
    module.train()


def hook(module):
    module.register_forward_hook(lambda *args: None)


@pytest.mark.parametrize(
    ("change", "begun", "is_known"),
    [
        (nothing, 1, True),
        (other_eps, 2, True),
        (other_weights, 1, True),
        (train, 1, False),
        (hook, 1, False),
    ],
    ids=["nothing", "eps", "weights", "train", "hook"],
)
@pytest.mark.parametrize("part", ["decoder", "encoder"])
def test_what_begins_before_the_check_counts_only_if_nothing_has_changed(
    ran, part, change, begun, is_known, each_device
):
    encodes = part == "encoder"
    model = tiny.t5(dropout_rate=0.0) if encodes else tiny.gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    arguments = prompt(model, 2, 6, 0, padded=False)
    arguments |= {"max_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True}
    fuseopt.initialize(model, GENERATION)
    for _ in range(2):
        model.generate(**arguments)
    ran.clear()
    change(model.encoder if encodes else model.transformer)
    got, wanted = model.generate(**arguments), type(model).generate(model, **arguments)
    assert torch.equal(got.sequences, wanted.sequences)
    torch.testing.assert_close(got.logits, wanted.logits, rtol=1e-4, atol=1e-4)
    # What transformers has prepared stays, so it is its own encoder that runs in the place of another one.
    assert [kind for kind, *_ in ran].count(T5Encoder if encodes else GPT2Step) == (1 if encodes else begun)
    call = model.generate.calls[-1]
    assert call.tier is (Tier.DEVICE_LOOP if is_known or encodes else Tier.STOCK)
    assert bool(call.note) == (encodes and change not in (nothing, other_weights)), call


def test_of_the_last_layer_only_the_last_tokens_go_on(each_device, monkeypatch):
    """Of the others it has keys and values."""
    model, linear, rows = tiny.gpt2(n_positions=150), residual_stream.linear, {}

    def recorded(input, layer, **options):
        rows.setdefault(layer.weights[0].data_ptr(), len(input))
        return linear(input, layer, **options)

    monkeypatch.setattr(residual_stream, "linear", recorded)
    fuseopt.initialize(model, GENERATION)
    model.generate(**prompt(model, 3, 11, 0), max_new_tokens=1, pad_token_id=0)
    tokens = 3 * (prompt_length_for(3, 11, each_device) if each_device.type == "cuda" else 11)
    for ahead_of_last, block in enumerate(reversed(model.transformer.h)):
        layers_of_block = (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj)
        expected = [tokens, *[tokens if ahead_of_last else 3] * 3]
        assert [rows[layer.weight.data_ptr()] for layer in layers_of_block] == expected
    assert rows[model.lm_head.weight.data_ptr()] == 3


@on_a_gpu
@pytest.mark.parametrize("length", [1500, 2048, 2100])
def test_long_prompts(length, each_device):
    """Captured up to 2048 tokens; a longer one runs without padding. Both write the cache that steps read."""
    model = tiny.decoder("llama")
    inputs = prompt(model, 1, length, 2, padded=False)
    wanted = generate(model, inputs, max_new_tokens=5)
    fuseopt.initialize(model, GENERATION)
    for _ in range(3):
        assert_same(generate(model, inputs, max_new_tokens=5), wanted)
        assert model.generate.calls[-1].tier is Tier.DEVICE_LOOP and not model.generate.calls[-1].note
    assert model.generate.graphs.prompts == (length <= 2048)
