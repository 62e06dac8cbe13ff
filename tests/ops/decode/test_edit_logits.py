"""edit_logits bit for bit against transformers' processors one after the other, and inside the ops that select."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from transformers.generation import logits_process

from fuseopt.errors import BackendError
from fuseopt.ops import LogitsEdits, beam_candidates, decode_select_, edit_logits
from fuseopt.ops.decode.edit_logits import sample_edits
from tests.ops.cases import DTYPES, Case, RawCalls, cases
from tests.ops.decode.decode_states import state_of

every_case = pytest.mark.parametrize("case", cases("edit_logits"))
SELECTING = pytest.mark.parametrize("case", cases("decode_select_", "beam_candidates"))
# In vectors and beside them; in one chunk of either kernel and in several.
VOCABULARIES = st.one_of(st.integers(1, 70), st.sampled_from([4096, 4097, 8189, 8200, 32128]))


def chain(logits: Tensor, edits: LogitsEdits) -> Tensor:
    """By upstream's classes, on the host's knowledge of the length."""
    scores, length = logits.to(torch.float32, copy=True), min(int(edits.length), edits.ids.shape[1])
    ids, vocab = edits.ids[:, :length], logits.shape[1]
    if edits.repetition_penalty != 1:
        rows = []
        ignored = edits.prompt_ignore_length
        for row, count in enumerate([0] * len(ids) if ignored is None else ignored.tolist()):
            penalty = logits_process.RepetitionPenaltyLogitsProcessor(edits.repetition_penalty)
            rows.append(penalty(ids[row : row + 1, count:], scores[row : row + 1]))
        scores = torch.cat(rows)
    if edits.no_repeat_ngram_size:
        scores = logits_process.NoRepeatNGramLogitsProcessor(edits.no_repeat_ngram_size)(ids, scores)
    if edits.encoder_no_repeat_ngram_size:
        size = edits.encoder_no_repeat_ngram_size
        scores = logits_process.EncoderNoRepeatNGramLogitsProcessor(size, edits.encoder_ids)(ids, scores)
    for rule, (first, end) in enumerate([] if edits.rule_bounds is None else edits.rule_bounds.tolist()):
        if first <= length < end:
            is_chosen = (edits.token_rules >> rule & 1).bool()
            if edits.forcing_rules >> rule & 1:
                scores = torch.where(is_chosen, 0.0, -torch.inf).expand(len(scores), vocab)
            else:
                scores = scores.masked_fill(is_chosen, -torch.inf)
    if edits.temperature != 1:
        scores = logits_process.TemperatureLogitsWarper(edits.temperature)(ids, scores)
    return scores


@st.composite
def calls(draw: Any) -> tuple[Tensor, LogitsEdits]:
    """Logits as a view of a wider tensor, and edits, on the CPU."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    items, beams, vocab = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(VOCABULARIES)
    rows, capacity, few = items * beams, draw(st.integers(1, 40)), draw(st.integers(1, min(vocab, 5)))

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    logits = 4 * torch.randn(rows, vocab + 9, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < 0.05] = -torch.inf
    offset, dtype = draw(st.integers(0, 9)), draw(st.sampled_from(DTYPES))
    edits = LogitsEdits(integers(few, rows, capacity), torch.tensor([draw(st.integers(1, capacity))]))
    if draw(st.booleans()):
        penalty = draw(st.sampled_from([1.3, 0.7, 3.1]))
        ignored = draw(st.sampled_from([None, integers(int(edits.length), rows)]))
        edits = edits._replace(repetition_penalty=penalty, prompt_ignore_length=ignored)
    if draw(st.booleans()):
        edits = edits._replace(no_repeat_ngram_size=draw(st.integers(1, 4)))
    if draw(st.booleans()):
        encoder_ids = integers(few, items, draw(st.integers(1, 30)))
        edits = edits._replace(encoder_ids=encoder_ids, encoder_no_repeat_ngram_size=draw(st.integers(1, 3)))
    if draw(st.booleans()):
        bounds = integers(capacity + 1, draw(st.integers(1, 8)), 2).sort(dim=1).values + torch.tensor([0, 1])
        forcing = draw(st.sampled_from([0, 0, 1, 6, 255])) & (1 << len(bounds)) - 1
        rules = integers(256, vocab) & integers(256, vocab)
        edits = edits._replace(token_rules=rules.to(torch.uint8), rule_bounds=bounds, forcing_rules=forcing)
    if draw(st.booleans()):
        edits = edits._replace(temperature=draw(st.sampled_from([0.3, 1.7])))
    return logits.to(dtype)[:, offset : offset + vocab], edits


def moved(edits: LogitsEdits, device: torch.device) -> LogitsEdits:
    return LogitsEdits(*(value.to(device) if isinstance(value, Tensor) else value for value in edits))


def on_device(call: tuple[Tensor, LogitsEdits], device: torch.device) -> tuple[Tensor, LogitsEdits]:
    """With the strides and the alignment of the logits kept."""
    logits, edits = call
    base = logits._base.to(device)
    return base.as_strided(logits.shape, logits.stride(), logits.storage_offset()), moved(edits, device)


@every_case
@settings(max_examples=150, deadline=None)
@given(call=calls())
def test_equals_the_chain_of_processors(case: Case, call: tuple[Tensor, LogitsEdits]) -> None:
    logits, edits = on_device(call, case.device)
    before = logits.clone()
    expected = chain(logits, edits)
    got = case(logits, edits)
    assert got.dtype == torch.float32 and got.is_contiguous() and torch.equal(got, expected)
    assert torch.equal(logits, before)


@SELECTING
@settings(max_examples=100, deadline=None)
@given(call=calls(), log_softmax=st.booleans())
def test_selecting_with_edits_is_selecting_after_them(
    case: Case, call: tuple[Tensor, LogitsEdits], log_softmax: bool
) -> None:
    logits, edits = on_device(call, case.device)
    rows = len(logits)
    if case.op.name == "decode_select_":
        state = state_of(rows, 4, [], case.device)
        expected = copy.deepcopy(state)
        case(logits, *state.values(), edits=edits)
        decode_select_(chain(logits, edits), *expected.values(), backend="reference")
        assert torch.equal(state["tokens"], expected["tokens"]) and torch.equal(state["ids"], expected["ids"])
        return
    running = torch.linspace(0, -3, rows, device=case.device)[None]
    count = min(4, logits.numel())
    values, places = case(logits, running, count, log_softmax=log_softmax, edits=edits)
    scores = F.log_softmax(logits, -1, dtype=torch.float32) if log_softmax else logits
    sums = chain(scores, edits) + running.T
    if not log_softmax:
        assert torch.equal(values, torch.topk(sums.flatten(), count).values[None])
    # A row with nothing but banned tokens has NaN for log-probabilities.
    close = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True}
    torch.testing.assert_close(sums.flatten()[places], values, **close)
    torch.testing.assert_close(values, torch.topk(sums.flatten(), count).values[None], **close)


@pytest.mark.parametrize("case", cases("beam_candidates"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [5, 8191, 50257])
def test_log_softmax_against_float64(case: Case, dtype: torch.dtype, vocab: int) -> None:
    torch.manual_seed(0)
    logits = (6 * torch.randn(6, vocab, device=case.device)).to(dtype)
    logits[1, ::2], logits[2] = -torch.inf, 3.0
    running = torch.zeros(6, 1, device=case.device)
    values, places = case(logits, running, 2, log_softmax=True)
    exact = F.log_softmax(logits.double(), dim=-1).gather(1, places)
    plain = F.log_softmax(logits, dim=-1, dtype=torch.float32).gather(1, places)
    assert (values - exact).abs().max() <= 2 * (plain - exact).abs().max() + 2e-6


@pytest.mark.parametrize("case", cases("beam_candidates"))
def test_log_softmax_of_what_has_none(case: Case) -> None:
    logits = torch.zeros(4, 9000, device=case.device)
    logits[0], logits[1, 8999], logits[2, 5], logits[3, :8998] = -torch.inf, torch.nan, torch.inf, -torch.inf
    values, _ = case(logits, torch.zeros(4, 1, device=case.device), 2, log_softmax=True)
    assert values[:2].isnan().all() and values[2, 0].isnan()
    torch.testing.assert_close(values[3], torch.full((2,), 0.5, device=case.device).log())


@every_case
def test_ids_outside_the_vocabulary_and_no_sequence(case: Case) -> None:
    logits = torch.randn(2, 5, device=case.device)
    ids = torch.tensor([[7, 5, 2**40, 7], [-1, 6, -9, 6]], device=case.device)
    options = {"repetition_penalty": 2.0, "no_repeat_ngram_size": 1, "encoder_no_repeat_ngram_size": 1}
    for length in (0, 4):
        edits = LogitsEdits(ids, torch.tensor([length], device=case.device), encoder_ids=ids, **options)
        assert torch.equal(case(logits, edits), logits)


@every_case
@pytest.mark.parametrize(
    ("changed", "exception", "message"),
    [
        ({"ids": torch.zeros(3, 4, dtype=torch.int64)}, ValueError, "edits.ids must be"),
        ({"ids": torch.zeros(2, 4, dtype=torch.int32)}, TypeError, "edits.ids must be torch.int64"),
        ({"length": torch.zeros(2, dtype=torch.int64)}, ValueError, "one element"),
        ({"repetition_penalty": 0.0}, ValueError, "positive"),
        ({"temperature": -1.0}, ValueError, "positive"),
        ({"no_repeat_ngram_size": -1}, ValueError, "positive"),
        ({"encoder_no_repeat_ngram_size": 2}, ValueError, "encoder_ids"),
        ({"token_rules": torch.zeros(4, dtype=torch.uint8)}, ValueError, "token_rules must have shape"),
        ({"token_rules": torch.zeros(5, dtype=torch.uint8)}, ValueError, "rule_bounds must be"),
        ({"prompt_ignore_length": torch.zeros(3, dtype=torch.int64)}, ValueError, "prompt_ignore_length"),
    ],
)
def test_wrong_edits_are_refused_by_name(
    case: Case, changed: dict[str, Any], exception: type[Exception], message: str
) -> None:
    edits = LogitsEdits(torch.zeros(2, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))._replace(**changed)
    with pytest.raises(exception, match=message):
        case(torch.zeros(2, 5, device=case.device), moved(edits, case.device))


def test_a_gradient_is_not_for_kernels() -> None:
    edits = sample_edits(torch.device("cpu"), 1, 5)
    with pytest.raises(BackendError, match="autograd"):
        edit_logits(torch.zeros(1, 5, requires_grad=True), edits, backend="cuda")


@pytest.mark.gpu
def test_a_captured_step_serves_every_length() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda")
    logits = torch.randn(4, 5000, device=device, dtype=torch.bfloat16)
    edits = sample_edits(device, 4, 5000)
    state, running = state_of(4, 0, [], device), torch.zeros(2, 2, device=device)
    graph = torch.cuda.CUDAGraph()

    def select() -> tuple[Tensor, Tensor, Tensor]:
        decode_select_(logits, *state.values(), edits=edits, pdl=True)
        best = beam_candidates(logits, running, 4, edits=edits, pdl=True)
        return (*best, edit_logits(logits, edits, pdl=True))

    select()
    with RawCalls() as raw, torch.cuda.graph(graph):
        values, places, scores = select()
    assert raw.names() == [f"{name}.default" for name in ("decode_select_", "beam_candidates", "edit_logits")]
    for length in range(13):
        logits.normal_()
        edits.length.fill_(length)
        graph.replay()
        expected = chain(logits, edits)
        assert torch.equal(scores, expected) and torch.equal(state["tokens"], expected.argmax(1))
        best_values, best_places = torch.topk(expected.view(2, -1), 4)
        assert torch.equal(values, best_values) and torch.equal(places, best_places)
