"""process_logits bit for bit against the chain of transformers' processors that it stands for; and in place."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
)

from fuseopt.errors import BackendError
from fuseopt.ops import encoder_no_repeat_ngram, no_repeat_ngram, process_logits
from tests.ops.cases import DTYPES, Case, RawCalls, cases

fused_case = pytest.mark.parametrize("case", cases("process_logits"))
ngram_case = pytest.mark.parametrize("case", cases("no_repeat_ngram", "encoder_no_repeat_ngram"))

OPTIONS: dict[str, Any] = {
    "repetition_penalty": 1.7,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "suppress_tokens": [3, 1],
    "temperature": 0.6,
}


def chain(input_ids: Tensor, scores: Tensor, **options: Any) -> Tensor:
    processors = LogitsProcessorList()
    if options.get("repetition_penalty", 1.0) != 1:
        ignored = options.get("prompt_ignore_length")
        if ignored is not None:  # transformers before 5.2x has no such argument: what it ignores is out of vocabulary
            return _chain_of_rows(input_ids, scores, ignored, **options)
        processors.append(RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    if options.get("no_repeat_ngram_size"):
        processors.append(NoRepeatNGramLogitsProcessor(options["no_repeat_ngram_size"]))
    if options.get("encoder_no_repeat_ngram_size"):
        size, ids = options["encoder_no_repeat_ngram_size"], options["encoder_input_ids"]
        processors.append(EncoderNoRepeatNGramLogitsProcessor(size, ids))
    if options.get("suppress_tokens") is not None:
        processors.append(SuppressTokensLogitsProcessor(options["suppress_tokens"].tolist(), scores.device))
    if options.get("temperature", 1.0) != 1:
        processors.append(TemperatureLogitsWarper(options["temperature"]))
    return processors(input_ids.long(), scores)


def _chain_of_rows(input_ids: Tensor, scores: Tensor, ignored: Tensor, **options: Any) -> Tensor:
    """The chain with the penalty row by row, on the ids of the row that are not ignored."""
    rows = []
    for row, count in enumerate(ignored.tolist()):
        penalty = RepetitionPenaltyLogitsProcessor(options["repetition_penalty"])
        rows.append(penalty(input_ids[row : row + 1, count:].long(), scores[row : row + 1]))
    rest = options | {"repetition_penalty": 1.0, "prompt_ignore_length": None}
    return chain(input_ids, torch.cat(rows) if rows else scores, **rest)


def on_device(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    tensors = {
        name: torch.tensor(value, device=case.device) if isinstance(value, list) else value
        for name, value in options.items()
    }
    return {name: value.to(case.device) if isinstance(value, Tensor) else value for name, value in tensors.items()}


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)


@st.composite
def calls(draw: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Ids, scores and options on the CPU; every option present or absent."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    batch, beams = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rows, length = batch * beams, draw(st.integers(1, 40))
    vocab_size = draw(st.sampled_from([1, 2, 5, 9, 16, 31, 33, 257, 4099, 9001]))
    most_used = draw(st.integers(1, vocab_size))

    def ids(*shape: int) -> Tensor:
        return torch.randint(most_used, shape, generator=generator)

    scores = 4 * torch.randn(rows, vocab_size, generator=generator, dtype=torch.float64)
    scores[torch.rand(scores.shape, generator=generator) < 0.05] = -math.inf
    options = {
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3, 0.7, 3.1])),
        "prompt_ignore_length": draw(st.sampled_from([None, torch.randint(length, (rows,), generator=generator)])),
        "no_repeat_ngram_size": draw(st.integers(0, 4)),
        "encoder_input_ids": ids(batch, draw(st.integers(1, 30))),
        "encoder_no_repeat_ngram_size": draw(st.integers(0, 3)),
        "suppress_tokens": draw(st.sampled_from([None, ids(4), torch.tensor([0, vocab_size, -1, 2**40])])),
        "temperature": draw(st.sampled_from([1.0, 0.3, 1.7])),
    }
    dtype = draw(st.sampled_from(DTYPES))
    return ids(rows, length).to(draw(st.sampled_from([torch.int32, torch.int64]))), scores.to(dtype), options


@fused_case
@settings(max_examples=150, deadline=None)
@given(call=calls(), inplace=st.booleans(), offset=st.integers(0, 9))
def test_equals_the_chain_of_processors(case: Case, call: Any, inplace: bool, offset: int) -> None:
    input_ids, scores, options = call
    input_ids, options = input_ids.to(case.device), on_device(case, options)
    rows, vocab_size = scores.shape
    wide = torch.full((rows, vocab_size + offset + 3), math.nan, dtype=scores.dtype, device=case.device)
    view = wide[:, offset : offset + vocab_size]  # rows of another stride, at any alignment
    view.copy_(scores)
    expected = chain(input_ids, view.clone(), **options)
    output = case(input_ids, view, inplace=inplace, **options)
    assert_same_bits(output, expected)
    assert (output is view) == inplace
    assert_same_bits(view, expected if inplace else scores.to(case.device))
    assert wide[:, :offset].isnan().all() and wide[:, offset + vocab_size :].isnan().all()


@fused_case
@pytest.mark.parametrize("name", [*OPTIONS, "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_each_option_alone_and_all_together_equal_transformers_bit_for_bit(
    case: Case, name: str, dtype: torch.dtype, inplace: bool
) -> None:
    torch.manual_seed(0)
    options = on_device(case, OPTIONS if name == "all" else {name: OPTIONS[name]})
    options["encoder_input_ids"] = torch.randint(1000, (3, 300), device=case.device) % 7
    input_ids = torch.randint(20, (6, 1025), device=case.device)
    scores = 3 * torch.randn(6, 50257, device=case.device).to(dtype)
    expected = chain(input_ids, scores, **options)
    assert not torch.equal(expected, scores)
    assert_same_bits(case(input_ids, scores.clone(), inplace=inplace, **options), expected)


@fused_case
@pytest.mark.parametrize("inplace", [False, True])
def test_more_tokens_than_bits_in_shared_memory(case: Case, inplace: bool) -> None:
    torch.manual_seed(0)
    input_ids = torch.randint(900_000, (2, 700), device=case.device)
    input_ids[:, 350:] = input_ids[:, :350]
    scores = torch.randn(2, 900_000, device=case.device)
    options = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 1}
    assert_same_bits(case(input_ids, scores.clone(), inplace=inplace, **options), chain(input_ids, scores, **options))
    options = {"repetition_penalty": 1.5}
    assert_same_bits(case(input_ids, scores.clone(), inplace=inplace, **options), chain(input_ids, scores, **options))


@fused_case
@pytest.mark.parametrize("inplace", [False, True])
def test_nan_infinities_zeros_and_denormals_equal_transformers(case: Case, inplace: bool) -> None:
    values = [math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, -3e38, 1e-45, -1e-45]
    scores = torch.tensor([values, values], device=case.device)
    input_ids = torch.arange(9, device=case.device).repeat(2, 1)
    for options in ({"repetition_penalty": 1.5}, {"temperature": 0.5}, {"repetition_penalty": 0.5, "temperature": 2.0}):
        expected = chain(input_ids, scores, **options)
        output = case(input_ids, scores.clone(), inplace=inplace, **options)
        assert torch.equal(output.isnan(), expected.isnan())
        assert torch.equal(output.nan_to_num(), expected.nan_to_num())
        assert torch.equal(output.signbit()[:, 1:], expected.signbit()[:, 1:])


@fused_case
def test_a_score_that_nothing_applies_to_keeps_its_bits(case: Case) -> None:
    scores = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=case.device).to(torch.int16)
    scores = scores.view(torch.bfloat16).view(4, -1)
    input_ids = torch.zeros(4, 3, dtype=torch.int64, device=case.device)
    output = case(input_ids, scores, no_repeat_ngram_size=1)
    if case.backend != "reference":
        assert torch.equal(output.view(torch.int16)[:, 1:], scores.view(torch.int16)[:, 1:])


@fused_case
@pytest.mark.parametrize("layout", ["transposed", "every_second"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_in_place_of_scores_whose_columns_are_apart(case: Case, layout: str, temperature: float) -> None:
    torch.manual_seed(0)
    input_ids = torch.randint(9, (6, 20), device=case.device)
    scores = torch.randn(6, 9, device=case.device)
    apart = scores.mT.contiguous().mT if layout == "transposed" else scores.repeat_interleave(2, 1)[:, ::2]
    options = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "temperature": temperature}
    assert case(input_ids, apart, inplace=True, **options) is apart
    assert_same_bits(apart, chain(input_ids, scores, **options))


@fused_case
def test_negative_ids_change_nothing(case: Case) -> None:
    """An error on CPU before anything is written, as upstream's; on CUDA never written."""
    scores = torch.randn(2, 5, device=case.device)
    before = scores.clone()
    ids = torch.tensor([[1, 2, 3], [4, -7, 4]], device=case.device)
    for options in ({"repetition_penalty": 2.0}, {"no_repeat_ngram_size": 1}):
        if case.device.type == "cpu":
            with pytest.raises(RuntimeError, match="-7"):
                case(ids, scores, inplace=True, **options)
            assert torch.equal(scores, before)
        else:
            expected = chain(ids.clamp(min=4)[1:], before[1:], **options)
            assert torch.equal(case(ids, before.clone(), inplace=True, **options)[1:], expected)


@fused_case
def test_ids_past_the_vocabulary_are_not_touched(case: Case) -> None:
    ids = torch.tensor([[1, 5, 2, 1], [1, 2**40, 2, 1]], device=case.device)
    for temperature in (1.0, 2.0):
        scores = torch.ones(2, 5, device=case.device)
        case(ids, scores, repetition_penalty=2.0, no_repeat_ngram_size=2, temperature=temperature, inplace=True)
        assert (scores * temperature).tolist() == [[1, 0.5, 0.5, 1, 1], [1, 0.5, 0.5, 1, 1]]


@ngram_case
@settings(max_examples=60, deadline=None)
@given(call=calls())
@example(call=(torch.tensor([[0, 1, 0, 1, 0]]), torch.zeros(1, 2), {}))
def test_ngram_bans_in_place(case: Case, call: Any) -> None:
    input_ids, scores, _ = call
    input_ids, scores = input_ids.to(case.device), scores.to(case.device)
    args = (input_ids,) if case.op.name.startswith("encoder") else ()
    for ngram_size in (1, 2, 3):
        expected = case(*args, input_ids, scores, ngram_size)
        edited = scores.clone()
        assert case(*args, input_ids, edited, ngram_size, inplace=True) is edited
        assert_same_bits(edited, expected)


@ngram_case
@pytest.mark.parametrize("ngram_size", [1, 2, 3])
@pytest.mark.parametrize("length", [1023, 1027, 4099])
def test_ngram_bans_in_place_of_more_rows_than_a_gpu_has_blocks_for(case: Case, length: int, ngram_size: int) -> None:
    torch.manual_seed(0)
    input_ids = torch.randint(500 if ngram_size == 1 else 60, (150, length), device=case.device)
    scores = torch.randn(150, 1000, device=case.device)
    args = (input_ids,) if case.op.name.startswith("encoder") else ()
    expected = case(*args, input_ids, scores, ngram_size)
    assert expected.isneginf().any()
    assert_same_bits(case(*args, input_ids, scores, ngram_size, inplace=True), expected)


@fused_case
def test_in_place_is_seen_by_autograd_and_passes_opcheck(case: Case) -> None:
    for sample in case.samples(torch.float32):
        with RawCalls() as raw:
            scores = sample.args[1].clone()
            version = scores._version
            case(sample.args[0], scores, inplace=True, **sample.kwargs)
        assert scores._version > version
        if case.backend != "reference":
            ((op, args),) = raw.calls
            assert str(op) == "fuseopt.process_logits_.default"
            torch.library.opcheck(op, args)


@fused_case
def test_in_place_in_inference_mode_and_under_compile(case: Case) -> None:
    sample = case.samples(torch.float32)[0]
    input_ids, scores = sample.args
    expected = case(input_ids, scores, **sample.kwargs)
    with torch.inference_mode():
        edited = scores.clone()
        case(input_ids, edited, inplace=True, **sample.kwargs)
    assert torch.equal(edited, expected)
    torch._dynamo.reset()
    compiled = torch.compile(case, fullgraph=True, backend="aot_eager")
    edited = scores.clone()
    compiled(input_ids, edited, inplace=True, **sample.kwargs)
    assert torch.equal(edited, expected)


@fused_case
def test_expanded_scores_are_not_written(case: Case) -> None:
    ids = torch.ones(3, 4, dtype=torch.int64, device=case.device)
    for scores in (
        torch.zeros(1, 5, device=case.device).expand(3, 5),
        torch.zeros(3, 1, device=case.device).expand(3, 5),
    ):
        with pytest.raises(ValueError, match="expanded"):
            case(ids, scores, no_repeat_ngram_size=1, inplace=True)


@fused_case
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": 0.0}, "positive"),
        ({"temperature": -1.0}, "positive"),
        ({"temperature": math.nan}, "positive"),
        ({"no_repeat_ngram_size": -1}, "positive"),
        ({"encoder_no_repeat_ngram_size": 2}, "encoder_input_ids"),
        ({"encoder_no_repeat_ngram_size": 2, "encoder_input_ids": torch.ones(2, 4, dtype=torch.int64)}, "no multiple"),
        ({"prompt_ignore_length": torch.zeros(2, dtype=torch.int64)}, "prompt_ignore_length"),
        ({"suppress_tokens": torch.zeros(1, 2, dtype=torch.int64)}, "suppress_tokens"),
    ],
)
def test_wrong_options_are_refused_by_name(case: Case, options: dict[str, Any], message: str) -> None:
    ids = torch.ones(3, 4, dtype=torch.int64, device=case.device)
    with pytest.raises(ValueError, match=message):
        case(ids, torch.zeros(3, 5, device=case.device), inplace=True, **on_device(case, options))


def test_scores_that_require_a_gradient() -> None:
    scores = torch.tensor([[2.0, -2.0, 2.0, -2.0]], requires_grad=True)
    input_ids = torch.tensor([[0, 1]])
    options = {"repetition_penalty": 4.0, "suppress_tokens": torch.tensor([3]), "temperature": 0.5}
    (gradient,) = torch.autograd.grad(process_logits(input_ids, scores, **options), scores, torch.ones(1, 4))
    assert gradient.tolist() == [[0.5, 8, 2, 0]]
    with pytest.raises(BackendError, match="autograd"):
        process_logits(input_ids, scores, backend="cpu", **options)
    edited = scores * 1
    (gradient,) = torch.autograd.grad(
        process_logits(input_ids, edited, inplace=True, **options), scores, torch.ones(1, 4)
    )
    assert gradient.tolist() == [[0.5, 8, 2, 0]]


def test_functions_are_functional_unless_told() -> None:
    ids, scores = torch.tensor([[0, 1, 0]]), torch.zeros(1, 3)
    for output in (
        no_repeat_ngram(ids, scores, 2),
        encoder_no_repeat_ngram(ids, ids, scores, 2),
        process_logits(ids, scores, no_repeat_ngram_size=2),
        process_logits(ids, scores),
    ):
        assert output.data_ptr() != scores.data_ptr() and not scores.any() and scores._version == 0
