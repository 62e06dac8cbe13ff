"""Fused runs of processors in generate(): stock's tokens and scores bit for bit, and nobody's tensors written to."""

import copy
import math
import pickle
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationMixin, LogitsProcessorList
from transformers.generation import logits_process as stock_processors

import fuseopt
from fuseopt import ops
from fuseopt.generation.select.logits_processor_list import FusedLogitsProcessorList, ProcessorGroup
from tests import tiny
from tests.generation.same_calls import sweep

pytestmark = [
    pytest.mark.usefixtures("each_device"),
    # Lengths that do not go together are among those tried, and some calls leave the length open.
    pytest.mark.filterwarnings("ignore:Unfeasible length constraints", "ignore:Using the model-agnostic default"),
]

FUSED = {"kernel_fusion": {"custom_cuda_kernels": ["FusedNoRepeatNGram"], "jit": False}}
EVERY_EDIT = {
    "repetition_penalty": 1.4,
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 3,
    "min_length": 14,
    "min_new_tokens": 6,
    "suppress_tokens": [5, 9],
    "begin_suppress_tokens": [7, 11, 13],
}
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 30},
    "beams": {"num_beams": 3},
    "beam sampling": {"num_beams": 3, "do_sample": True, "temperature": 1.3, "num_return_sequences": 2},
}


@pytest.fixture(scope="module")
def models():
    """Stock and fused models of one family and device, made once."""
    made = {}

    def pair(family):
        key = (family, str(torch.get_default_device()))
        if key not in made:
            made[key] = (tiny.FAMILIES[family](), fuseopt.initialize(tiny.FAMILIES[family](), FUSED, strict=True))
        return made[key]

    return pair


def generate(model, *, padding=4, batch=3, period=9, **kwargs):
    torch.manual_seed(3)
    ids = torch.randint(3, tiny.VOCAB, (batch, period)).repeat(1, 9 // period)
    attention_mask = torch.ones_like(ids)
    ids[0, :padding], attention_mask[0, :padding] = 0, 0
    kwargs = {"max_new_tokens": 12, "return_dict_in_generate": True, "output_scores": True, **kwargs}
    return model.generate(ids, attention_mask=attention_mask, pad_token_id=0, eos_token_id=[2, 17], **kwargs)


class NoTokenLeft(Exception):
    pass


def multinomial(probs, *args, draw=torch.multinomial, **kwargs):
    """Raises for a row of which nothing can be drawn, which on a GPU is an assertion that ends the process's CUDA."""
    if not probs.isfinite().all():
        raise NoTokenLeft
    return draw(probs, *args, **kwargs)


def outcome(model, **kwargs):
    try:
        return generate(model, **kwargs)
    except NoTokenLeft:
        return None


def assert_same(fused, stock):
    assert type(fused) is type(stock)
    assert torch.equal(fused.sequences, stock.sequences)
    for part in ("scores", "logits"):
        assert (getattr(fused, part) is None) == (getattr(stock, part) is None)
        for got, wanted in zip(getattr(fused, part) or (), getattr(stock, part) or (), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
@sweep(50)
@given(
    edits=st.fixed_dictionaries(
        {},
        optional={
            "repetition_penalty": st.sampled_from([1.2, 0.8, 2.5]),
            "no_repeat_ngram_size": st.integers(1, 4),
            "encoder_no_repeat_ngram_size": st.integers(1, 3),
            "min_length": st.integers(1, 20),
            "min_new_tokens": st.integers(1, 12),
            # From 3 on: transformers refuses to suppress a token that it is told to force.
            "suppress_tokens": st.lists(st.integers(3, tiny.VOCAB + 3), max_size=4),
            "begin_suppress_tokens": st.lists(st.integers(0, tiny.VOCAB - 1), max_size=4),
            "bad_words_ids": st.just([[8], [4, 6]]),
            "sequence_bias": st.just([[[10], 1.5], [[3, 12], -2.0]]),
            "encoder_repetition_penalty": st.just(1.3),
            "forced_eos_token_id": st.just(2),
            "remove_invalid_values": st.just(True),
            "renormalize_logits": st.just(True),
        },
    ),
    mode=st.sampled_from(sorted(MODES)),
    output_logits=st.booleans(),
    padding=st.integers(0, 6),
)
def test_generate_equals_transformers(models, family, edits, mode, output_logits, padding):
    stock_model, fused_model = models(family)
    arguments = {**edits, **MODES[mode], "output_logits": output_logits, "padding": padding}
    with mock.patch.object(torch, "multinomial", multinomial):
        stock, fused = outcome(stock_model, **arguments), outcome(fused_model, **arguments)
    assert (fused is None) == (stock is None)
    if stock is not None:
        assert_same(fused, stock)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("output_logits", [False, True])
def test_all_edits_are_one_op_a_step_and_in_place_unless_logits_are_kept(models, family, mode, output_logits):
    stock_model, fused_model = models(family)
    arguments = EVERY_EDIT | MODES[mode] | {"output_logits": output_logits}
    with mock.patch.object(ops, "process_logits", wraps=ops.process_logits) as called:
        fused = generate(fused_model, **arguments)
    assert called.call_count == len(fused.scores)
    is_kept = output_logits and "num_beams" not in arguments
    assert {call.kwargs["inplace"] for call in called.call_args_list} == {not is_kept}
    assert {call.kwargs.get("temperature") for call in called.call_args_list} == {MODES[mode].get("temperature")}
    assert_same(fused, generate(stock_model, **arguments))


@pytest.mark.parametrize("returned", [{"return_dict_in_generate": False}, {"output_scores": False}])
def test_tokens_equal_transformers_whatever_is_returned_beside_them(models, returned):
    stock_model, fused_model = models("gpt2")
    fused, stock = (generate(model, **EVERY_EDIT, **returned) for model in (fused_model, stock_model))
    tokens = [output if isinstance(output, torch.Tensor) else output.sequences for output in (fused, stock)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("mode", MODES)
def test_logits_that_a_forward_hook_keeps_are_not_written(models, mode):
    _, model = models("gpt2")
    kept, copies = [], []

    def keep(module, args, output):
        kept.append(output.logits)
        copies.append(output.logits.clone())

    hook = model.register_forward_hook(keep)
    try:
        generate(model, **EVERY_EDIT, **MODES[mode])
    finally:
        hook.remove()
    assert kept and all(map(torch.equal, kept, copies))


class Keeper(stock_processors.LogitsProcessor):
    """A user's processor that keeps what it is given and what it returns."""

    def __init__(self, change):
        self.change, self.kept, self.copies = change, [], []

    def __call__(self, input_ids, scores):
        result = scores + 0.25 if self.change else scores
        for tensor in (scores, result):
            self.kept.append(tensor)
            self.copies.append(tensor.clone())
        return result


@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("edits", [EVERY_EDIT, {}], ids=["after a run", "first"])
def test_what_a_user_s_processor_keeps_is_not_written(models, change, mode, edits):
    outputs = []
    for model in models("gpt2"):
        keeper = Keeper(change)
        outputs.append(generate(model, logits_processor=LogitsProcessorList([keeper]), **edits, **MODES[mode]))
        assert keeper.kept and all(map(torch.equal, keeper.kept, keeper.copies))
    assert_same(*outputs)


@pytest.mark.parametrize("between", [{"bad_words_ids": [[8]]}, {"forced_eos_token_id": 2}])
def test_a_run_after_a_processor_that_keeps_nothing_is_in_place_again(models, between):
    _, model = models("gpt2")
    arguments = {"repetition_penalty": 1.5, **between, "suppress_tokens": [5], "output_logits": True}
    with mock.patch.object(ops, "process_logits", wraps=ops.process_logits) as called:
        fused = generate(model, **arguments)
    assert [call.kwargs["inplace"] for call in called.call_args_list] == [False, True] * len(fused.scores)


def processors_of(model, *passed, **options):
    """The list as `generate()` gives it to a custom loop."""
    seen = []

    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        seen.append(logits_processor)
        return input_ids

    ids = torch.randint(3, tiny.VOCAB, (2, 6))
    model.generate(
        ids, attention_mask=torch.ones_like(ids), logits_processor=LogitsProcessorList(passed), custom_generate=loop,
        pad_token_id=0, eos_token_id=2, **options,
    )  # fmt: skip
    return seen[0]


def test_a_loop_that_is_not_transformers_own_finds_its_scores_unchanged(models):
    stock_model, fused_model = models("gpt2")
    stock, fused = (processors_of(model, **EVERY_EDIT) for model in (stock_model, fused_model))
    ids, scores = torch.randint(3, tiny.VOCAB, (2, 8)), torch.randn(2, tiny.VOCAB)
    before = scores.clone()
    with mock.patch.object(ops, "process_logits", wraps=ops.process_logits) as called:
        assert torch.equal(fused(ids, scores), stock(ids, scores))
    assert called.call_count == 1 and torch.equal(scores, before)


def test_the_elements_stay_transformers_own(models):
    stock_model, fused_model = models("t5")
    arguments = EVERY_EDIT | MODES["beam sampling"]
    stock, fused = (processors_of(model, **arguments) for model in (stock_model, fused_model))
    assert type(stock) is LogitsProcessorList and isinstance(fused, FusedLogitsProcessorList)
    assert [type(processor) for processor in fused] == [type(processor) for processor in stock]


def steps(processors):
    """How a list is run: the classes of each fused run, or the processor that is called as it is."""
    return [
        [type(processor) for processor in step.processors] if isinstance(step, ProcessorGroup) else step
        for step in processors._group()
    ]


def test_what_a_user_passes_is_never_merged(models):
    class Mine(stock_processors.NoRepeatNGramLogitsProcessor):
        pass

    _, model = models("gpt2")
    mine, theirs = Mine(2), stock_processors.SuppressTokensLogitsProcessor([4])
    run = [stock_processors.RepetitionPenaltyLogitsProcessor, stock_processors.NoRepeatNGramLogitsProcessor]
    arguments = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "do_sample": True, "temperature": 0.5}
    warper = stock_processors.TemperatureLogitsWarper
    assert steps(processors_of(model, mine, theirs, top_k=0, **arguments)) == [run, mine, theirs, [warper]]
    # One that takes the place of transformers' own stays as it is, and parts the run.
    own = stock_processors.NoRepeatNGramLogitsProcessor(3)
    assert steps(processors_of(model, own, **arguments, suppress_tokens=[1], top_k=0)) == [
        run[:1],
        own,
        [stock_processors.SuppressTokensLogitsProcessor, warper],
    ]


def test_a_list_that_is_changed_later_runs_as_it_stands(models):
    _, model = models("gpt2")
    processors = processors_of(model, **EVERY_EDIT)
    ids, scores = torch.randint(3, tiny.VOCAB, (2, 8)), torch.randn(2, tiny.VOCAB)
    processors(ids, scores)
    removed = processors.pop(0)
    assert isinstance(removed, stock_processors.RepetitionPenaltyLogitsProcessor)
    processors.append(stock_processors.TemperatureLogitsWarper(2.0))
    assert torch.equal(processors(ids, scores), LogitsProcessorList(list(processors))(ids, scores))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_of_the_list_works(models, duplicate):
    processors = processors_of(models("gpt2")[1], **EVERY_EDIT)
    ids, scores = torch.randint(3, tiny.VOCAB, (2, 8)), torch.randn(2, tiny.VOCAB)
    assert torch.equal(duplicate(processors)(ids, scores), processors(ids, scores))


def test_what_the_op_does_not_take_goes_to_the_processors(models):
    processors = processors_of(models("gpt2")[1], repetition_penalty=1.5)
    ids, scores = torch.randint(3, tiny.VOCAB, (2, 8)), torch.randn(2, 1, tiny.VOCAB)
    expected = LogitsProcessorList(list(processors))(ids, scores.clone())
    with mock.patch.object(ops, "process_logits", wraps=ops.process_logits) as called:
        assert torch.equal(processors(ids, scores.clone()), expected)
    assert called.call_count == 0


def test_an_idle_run_returns_what_transformers_returns(models):
    """A new tensor, or the scores themselves: who changes one of them must not change the other."""
    ids, scores = torch.randint(3, tiny.VOCAB, (2, 30)), torch.randn(2, tiny.VOCAB)
    for options in ({"min_length": 5}, {"begin_suppress_tokens": [3]}, {"no_repeat_ngram_size": 31}):
        stock, fused = (processors_of(model, **options)(ids, scores) for model in models("gpt2"))
        assert (fused is scores) == (stock is scores)
        assert torch.equal(fused, scores) and math.prod(fused.shape) > 0


@pytest.mark.parametrize("mode", ["greedy", "sampling"])
@pytest.mark.parametrize("how", ["prompt lookup", "assistant"])
@pytest.mark.parametrize("output_logits", [False, True])
def test_assisted_decoding_equals_transformers_and_edits_no_scores_in_place(models, mode, how, output_logits):
    """Candidates are tried with scores that are used again, and the assistant is given this list's processors."""
    arguments = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3, "suppress_tokens": [5], "min_new_tokens": 4}
    outputs = []
    for model, assistant in zip(models("gpt2"), (tiny.gpt2(1), fuseopt.initialize(tiny.gpt2(1), FUSED)), strict=True):
        given = {"prompt_lookup_num_tokens": 3} if how == "prompt lookup" else {"assistant_model": assistant}
        given |= {"batch": 1, "padding": 0, "period": 3, "output_logits": output_logits}
        with mock.patch.object(ops, "process_logits", wraps=ops.process_logits) as called:
            outputs.append(generate(model, **arguments, **MODES[mode], **given))
    assert called.call_count > 0
    if how == "prompt lookup":
        assert not any(call.kwargs["inplace"] for call in called.call_args_list)
    assert_same(*outputs)


def test_in_place_only_when_called_from_transformers_own_loops(models):
    """A model's own `_sample`, or a function that stands in for it, may use its scores again."""

    class OwnLoop(type(models("gpt2")[1])):
        def _sample(self, input_ids, logits_processor, **kwargs):
            scores = torch.zeros(input_ids.shape[0], tiny.VOCAB)
            logits_processor(input_ids, scores)
            assert not scores.any()
            return input_ids

    model = tiny.gpt2()
    model.__class__ = OwnLoop
    with mock.patch.object(ops, "process_logits", wraps=ops.process_logits) as called:
        generate(fuseopt.initialize(model, FUSED), **EVERY_EDIT)
    assert [call.kwargs["inplace"] for call in called.call_args_list] == [False]
    assert GenerationMixin._sample is not OwnLoop._sample


@pytest.mark.parametrize("method", ["_sample", "_beam_search"])
def test_scores_that_are_part_of_another_tensor_are_not_written_to(method, monkeypatch):
    """The owner of the larger tensor may read it again, so a view of it is not edited in place."""
    config = tiny.gpt2().generation_config
    processors = FusedLogitsProcessorList([stock_processors.NoRepeatNGramLogitsProcessor(1)], [], config, None, "auto")

    def decode(input_ids, scores):
        return processors(input_ids, scores)

    monkeypatch.setattr(GenerationMixin, method, decode)
    input_ids = torch.tensor([[3, 4], [5, 6]])
    whole = torch.randn(2, 3, 8)
    before, last = whole.clone(), whole[:, -1]
    processed = decode(input_ids, last)
    assert torch.equal(whole, before) and processed.isneginf().sum() == 4
    own = before[:, -1].clone()
    assert decode(input_ids, own) is own and torch.equal(own, processed)
