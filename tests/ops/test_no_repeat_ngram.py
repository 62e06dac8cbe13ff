import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import EncoderNoRepeatNGramLogitsProcessor, NoRepeatNGramLogitsProcessor

from fuseopt.errors import BackendError
from fuseopt.ops import encoder_no_repeat_ngram, no_repeat_ngram
from tests.ops.cases import DTYPES, Case, cases

own_case = pytest.mark.parametrize("case", cases("no_repeat_ngram"))
encoder_case = pytest.mark.parametrize("case", cases("encoder_no_repeat_ngram"))
every_case = pytest.mark.parametrize("case", cases("no_repeat_ngram", "encoder_no_repeat_ngram"))


def upstream(input_ids: Tensor, scores: Tensor, ngram_size: int) -> Tensor:
    return NoRepeatNGramLogitsProcessor(ngram_size)(input_ids.long(), scores)


def encoder_upstream(encoder_input_ids: Tensor, input_ids: Tensor, scores: Tensor, ngram_size: int) -> Tensor:
    return EncoderNoRepeatNGramLogitsProcessor(ngram_size, encoder_input_ids)(input_ids, scores)


def arguments(case: Case, input_ids: Tensor, scores: Tensor, ngram_size: int) -> tuple:
    """Arguments with which either op bans the same tokens: the encoder's input is the row's own."""
    own = (input_ids, scores, ngram_size)
    return own if case.op.name == "no_repeat_ngram" else (input_ids, *own)


@own_case
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 5),
    length=st.integers(1, 40),
    vocab_size=st.integers(1, 9),
    ngram_size=st.integers(1, 6),
    dtype=st.sampled_from(DTYPES),
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**31),
)
def test_random_tokens_are_banned_as_in_transformers(
    case: Case,
    rows: int,
    length: int,
    vocab_size: int,
    ngram_size: int,
    dtype: torch.dtype,
    id_dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    input_ids = torch.randint(vocab_size, (rows, length), device=case.device, dtype=id_dtype)
    scores = torch.randn(rows, vocab_size).to(case.device, dtype)
    expected = upstream(input_ids, scores, ngram_size)
    assert torch.equal(case(input_ids, scores, ngram_size), expected)
    assert case(input_ids, scores, ngram_size, inplace=True) is scores and torch.equal(scores, expected)


@encoder_case
@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3),
    beams=st.integers(1, 3),
    encoder_length=st.integers(1, 30),
    length=st.integers(1, 12),
    vocab_size=st.integers(1, 6),
    ngram_size=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_encoder_variant_equals_transformers(
    case: Case,
    batch: int,
    beams: int,
    encoder_length: int,
    length: int,
    vocab_size: int,
    ngram_size: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    encoder_input_ids = torch.randint(vocab_size, (batch, encoder_length), device=case.device)
    input_ids = torch.randint(vocab_size, (batch * beams, length), device=case.device)
    scores = torch.randn(batch * beams, vocab_size, device=case.device)
    expected = encoder_upstream(encoder_input_ids, input_ids, scores, ngram_size)
    assert torch.equal(case(encoder_input_ids, input_ids, scores, ngram_size), expected)


@own_case
@pytest.mark.parametrize("length", [1023, 1024, 1025, 1030, 4096])
def test_long_sequences_are_banned_as_in_transformers(case: Case, length: int) -> None:
    torch.manual_seed(0)
    input_ids = torch.randint(15, (3, length), device=case.device)
    scores = torch.randn(3, 15, device=case.device)
    output = case(input_ids, scores, 3)
    assert torch.equal(output, upstream(input_ids, scores, 3)) and output.isneginf().any()


@own_case
@pytest.mark.parametrize("inplace", [False, True])
def test_fewer_tokens_than_n_returns_the_scores_themselves(case: Case, inplace: bool) -> None:
    scores = torch.randn(2, 5, device=case.device)
    expected, input_ids = scores.clone(), torch.ones(2, 2, dtype=torch.int64, device=case.device)
    assert case(input_ids, scores, 3, inplace=inplace) is scores and torch.equal(scores, expected)
    with pytest.raises(ValueError, match="rows"):
        case(input_ids[:1], scores, 3, inplace=inplace)


@encoder_case
@pytest.mark.parametrize(("encoder_length", "length", "ngram_size"), [(2, 8, 3), (8, 1, 3), (4, 2, 5), (8, 3, 5)])
def test_encoder_variant_with_too_few_tokens_copies(
    case: Case, encoder_length: int, length: int, ngram_size: int
) -> None:
    scores = torch.randn(2, 5, device=case.device)
    ids = torch.ones(2, 8, dtype=torch.int64, device=case.device)
    output = case(ids[:, :encoder_length], ids[:, :length], scores, ngram_size)
    assert torch.equal(output, scores) and output.data_ptr() != scores.data_ptr()


@every_case
def test_ngram_of_one_bans_every_token_seen(case: Case) -> None:
    input_ids = torch.tensor([[0, 3, 3], [1, 1, 1]], device=case.device)
    output = case(*arguments(case, input_ids, torch.zeros(2, 5, device=case.device), 1))
    assert output.isneginf().tolist() == [[True, False, False, True, False], [False, True, False, False, False]]


@every_case
def test_all_tokens_may_be_banned(case: Case) -> None:
    input_ids = torch.tensor([[0, 1, 2, 0, 0, 2, 0, 1, 0]], device=case.device)
    output = case(*arguments(case, input_ids, torch.zeros(1, 3, device=case.device), 2))
    assert output.isneginf().all()


@every_case
def test_padding_counts_as_tokens(case: Case) -> None:
    input_ids = torch.tensor([[0, 0, 0, 4], [0, 0, 0, 0]], device=case.device)
    output = case(*arguments(case, input_ids, torch.zeros(2, 5, device=case.device), 2))
    assert output.isneginf().nonzero().tolist() == [[1, 0]]


@every_case
@pytest.mark.parametrize("layout", ["every_second", "transposed", "expanded"])
def test_strided_ids_and_scores_are_read_right(case: Case, layout: str) -> None:
    torch.manual_seed(0)
    input_ids = torch.randint(4, (6, 20), device=case.device)
    scores = torch.randn(6, 4, device=case.device)
    if layout == "every_second":
        input_ids, scores = input_ids.repeat_interleave(2, 1)[:, ::2], scores.repeat_interleave(3, 0)[::3]
    elif layout == "transposed":
        input_ids, scores = input_ids.mT.contiguous().mT, scores.mT.contiguous().mT
    else:
        input_ids, scores = input_ids[:1].expand(6, -1), scores[:, :1].expand(-1, 4)
    expected = upstream(input_ids, scores, 2)
    assert torch.equal(case(*arguments(case, input_ids, scores, 2)), expected) and expected.isneginf().any()


@every_case
@pytest.mark.parametrize("token", [5, 6, 50256, 2**31 - 1, 2**40])
def test_ids_past_the_vocabulary_are_not_written(case: Case, token: int) -> None:
    input_ids = torch.tensor([[1, token, 2, 1], [1, 3, 2, 1]], device=case.device)
    output = case(*arguments(case, input_ids, torch.zeros(2, 5, device=case.device), 2))
    assert output.isneginf().nonzero().tolist() == [[1, 3]]


@every_case
def test_negative_ids_are_never_written_to(case: Case) -> None:
    """An error on CPU, where it can be told at no cost; on CUDA never written."""
    scores = torch.zeros(1, 5, device=case.device)
    banned = torch.tensor([[1, -100, 2, 1]], device=case.device)
    if case.device.type == "cpu":
        with pytest.raises(RuntimeError, match="-100"):
            case(*arguments(case, banned, scores, 2))
    else:
        assert torch.equal(case(*arguments(case, banned, scores, 2)), scores)
    harmless = torch.tensor([[-100, 1, 2, 3]], device=case.device)
    assert torch.equal(case(*arguments(case, harmless, scores, 2)), scores)


@encoder_case
def test_rows_that_are_no_multiple_of_the_encoder_batch(case: Case) -> None:
    ids = torch.ones(5, 4, dtype=torch.int64, device=case.device)
    scores = torch.zeros(5, 3, device=case.device)
    with pytest.raises(IndexError):
        encoder_upstream(ids[:2], ids, scores, 2)
    for batch in (0, 2, 6):
        encoder_input_ids = torch.ones(batch, 4, dtype=torch.int64, device=case.device)
        with pytest.raises(ValueError, match="no multiple"):
            case(encoder_input_ids, ids, scores, 2)


@every_case
def test_wrong_sizes_and_rows_are_refused(case: Case) -> None:
    ids, scores = torch.ones(2, 4, dtype=torch.int64, device=case.device), torch.zeros(2, 3, device=case.device)
    with pytest.raises(ValueError, match="positive"):
        case(*arguments(case, ids, scores, 0))
    with pytest.raises(ValueError, match="rows"):
        case(*arguments(case, ids[:1], scores, 2))


def test_scores_that_require_a_gradient() -> None:
    input_ids = torch.tensor([[1, 2, 1]])
    scores = torch.zeros(1, 4, requires_grad=True)
    for function, args in (
        (no_repeat_ngram, (input_ids, scores, 2)),
        (encoder_no_repeat_ngram, (input_ids, input_ids, scores, 2)),
    ):
        (gradient,) = torch.autograd.grad(function(*args), scores, torch.ones(1, 4))
        assert gradient.tolist() == [[1, 1, 0, 1]]
        with pytest.raises(BackendError, match="autograd"):
            function(*args, backend="cpu")
