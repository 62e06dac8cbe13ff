"""decode_select_ against the loop it stands for, on every backend."""

import copy
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseopt.errors import BackendError
from fuseopt.ops import LogitsEdits, decode_select_
from tests.ops.cases import DTYPES, Case, RawCalls, cases, examples
from tests.ops.decode.decode_states import state_of

every_case = pytest.mark.parametrize("case", cases("decode_select_"))


@every_case
@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.one_of(st.integers(1, 9), st.sampled_from([40])),
    vocabulary=st.one_of(st.integers(1, 70), st.sampled_from([4096, 4097, 50257])),
    dtype=st.sampled_from(DTYPES),
    levels=st.sampled_from([2, 1000]),
    eos=st.one_of(st.none(), st.lists(st.integers(0, 5), min_size=1, max_size=3)),
    flags=st.sampled_from([1, 3, 5, 9]),
    seed=st.integers(0, 2**31),
)
def test_is_what_sample_does(
    case: Case,
    rows: int,
    vocabulary: int,
    dtype: torch.dtype,
    levels: int,
    eos: list[int] | None,
    flags: int,
    seed: int,
) -> None:
    """Few levels make ties, of which the first wins."""
    torch.manual_seed(seed)
    scores = (torch.randint(levels, (rows, vocabulary)) / 8).to(case.device, dtype)
    state = state_of(rows, 4, torch.randint(rows, (rows // 2,)).tolist(), case.device)
    state["going"] = torch.rand(flags, device=case.device) < 0.5
    before = copy.deepcopy(state)
    counters = [torch.tensor([7], device=case.device), torch.arange(rows, device=case.device)]
    ends = None if eos is None else torch.tensor(eos, device=case.device)
    case(scores, *state.values(), ends, counters=counters)

    first = (scores == scores.amax(1, keepdim=True)).int().cpu().argmax(1).to(case.device)
    tokens = torch.where(before["unfinished"], first, 3)
    unfinished = before["unfinished"].clone()
    for end in eos or []:
        unfinished &= tokens != end
    assert torch.equal(state["tokens"], tokens)
    assert torch.equal(state["ids"][:, 4], tokens) and (state["ids"] == -1).sum() == 8 * rows
    assert torch.equal(state["unfinished"], unfinished)
    before["going"][min(4, flags - 1)] = unfinished.any()
    assert torch.equal(state["going"], before["going"])
    assert state["length"].item() == 5
    assert counters[0].item() == 8 and torch.equal(counters[1], torch.arange(rows, device=case.device) + 1)


@every_case
def test_nan_is_the_highest_and_all_banned_gives_the_first(case: Case) -> None:
    scores = torch.full((3, 300), -torch.inf, device=case.device)
    scores[1, 200], scores[1, 40] = torch.inf, 5.0
    scores[2, 200], scores[2, 250], scores[2, 7] = torch.nan, torch.nan, torch.inf
    state = state_of(3, 0, [], case.device)
    case(scores, *state.values())
    assert state["tokens"].tolist() == [0, 200, 200]


@every_case
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_first_of_equals_wins_and_zero_has_no_sign(case: Case, dtype: torch.dtype) -> None:
    scores = torch.full((3, 5000), -2.0, dtype=dtype, device=case.device)
    scores[0, [3, 4700]] = torch.tensor([-0.0, 0.0], dtype=dtype, device=case.device)
    scores[1, [4, 4800]] = torch.tensor([0.0, -0.0], dtype=dtype, device=case.device)
    scores[2, [9, 7, 4900]] = -1.5
    state = state_of(3, 0, [], case.device)
    case(scores, *state.values())
    assert state["tokens"].tolist() == [3, 4, 7]


@every_case
def test_wrong_scores_state_and_divisors_are_refused_by_name(case: Case) -> None:
    state = state_of(2, 0, [], case.device)
    scores = torch.zeros(2, 5, device=case.device)
    for changed, exception, message in (
        ({"tokens": state["tokens"][:1]}, ValueError, "tokens must have shape"),
        ({"tokens": state["tokens"].int()}, TypeError, "tokens must be int64"),
        ({"ids": state["ids"][:1]}, ValueError, "ids must be"),
        ({"unfinished": state["unfinished"].long()}, TypeError, "unfinished must be bool"),
        ({"length": torch.zeros(2, dtype=torch.int64, device=case.device)}, ValueError, "one element"),
    ):
        with pytest.raises(exception, match=message):
            case(scores, *(state | changed).values())
    with pytest.raises(ValueError, match="divisors must have shape"):
        case(scores, *state.values(), divisors=scores[:, :3])
    with pytest.raises(TypeError, match="scores and divisors must be"):
        case(scores, *state.values(), divisors=scores.double())
    edits = LogitsEdits(state["ids"], state["length"])
    with pytest.raises(ValueError, match="for probabilities"):
        case(scores, *state.values(), divisors=scores, edits=edits)
    with pytest.raises(ValueError, match="scores must be"):
        case(scores[:, :0], *state.values())


@every_case
@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.integers(1, 9),
    vocabulary=st.one_of(st.integers(1, 70), st.sampled_from([4096, 4097, 8191, 50257, 131_075])),
    banned=st.sampled_from([0.0, 0.5, 0.999]),
    offset=st.integers(0, 5),
    seed=st.integers(0, 2**31),
)
def test_draws_what_multinomial_draws(
    case: Case, rows: int, vocabulary: int, banned: float, offset: int, seed: int
) -> None:
    """And leaves torch's generator where that does. Rows lie at any alignment."""
    torch.manual_seed(seed)
    logits = 3 * torch.randn(rows, vocabulary + offset, device=case.device)
    logits = logits.masked_fill(torch.rand_like(logits) < banned, -torch.inf)[:, offset:]
    logits[:, 0] = 0.0
    probabilities = logits.softmax(-1)
    torch.manual_seed(seed)
    expected = torch.multinomial(probabilities, 1)[:, 0]
    after = torch.rand(5, device=case.device)
    torch.manual_seed(seed)
    state = state_of(rows, 0, [], case.device)
    divisors = torch.empty_like(probabilities).exponential_()
    wide = torch.zeros(rows, vocabulary + 7, device=case.device)
    view = wide[:, offset : offset + vocabulary].copy_(probabilities)
    case(view, *state.values(), divisors=divisors)
    assert torch.equal(state["tokens"], expected) and torch.equal(torch.rand(5, device=case.device), after)
    case(probabilities, *state.values(), divisors=divisors)
    assert torch.equal(state["ids"][:, 1], expected)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -1.0])
def test_what_is_no_probability_is_not_drawn_from(wrong: float) -> None:
    """As torch.multinomial; on a GPU it would be a failed assertion, behind which nothing runs."""
    probabilities = torch.tensor([[0.5, 0.5], [0.5, wrong]])
    message = "probability tensor contains either `inf`, `nan` or element < 0"
    with pytest.raises(RuntimeError, match=message):
        torch.multinomial(probabilities, 1)
    state = state_of(2, 0, [], torch.device("cpu"))
    with pytest.raises(RuntimeError, match=message):
        decode_select_(probabilities, *state.values(), divisors=torch.ones(2, 2))


@pytest.mark.gpu
def test_what_is_no_probability_fails_an_assertion() -> None:
    program = (
        "import torch; from fuseopt.ops import decode_select_; one = torch.ones(1, dtype=torch.int64, device='cuda');"
        "scores = torch.tensor([[0.5, float('nan')]], device='cuda');"
        "decode_select_(scores, one.clone(), one[None].clone(), one.clone(), one.bool(), one.bool(), one,"
        " divisors=torch.ones(1, 2, device='cuda'), backend='cuda'); torch.cuda.synchronize()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode != 0 and "device-side assert" in ended.stderr


@pytest.mark.gpu
def test_a_graph_draws_as_eager_calls_do() -> None:
    probabilities = torch.randn(3, 5000, device="cuda").softmax(-1)
    state = state_of(3, 0, [], torch.device("cuda"))

    def draw() -> None:
        decode_select_(probabilities, *state.values(), divisors=torch.empty_like(probabilities).exponential_())

    draw()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draw()
    torch.manual_seed(5)
    expected = [torch.multinomial(probabilities, 1)[:, 0] for _ in range(9)]
    after = torch.rand(5, device="cuda")
    torch.manual_seed(5)
    for tokens in expected:
        graph.replay()
        assert torch.equal(state["tokens"], tokens)
    assert torch.equal(torch.rand(5, device="cuda"), after)


def test_a_gradient_is_not_for_kernels() -> None:
    state = state_of(1, 0, [], torch.device("cpu"))
    with pytest.raises(BackendError, match="autograd"):
        decode_select_(torch.zeros(1, 5, requires_grad=True), *state.values(), backend="cuda")


@pytest.mark.gpu
def test_a_graph_goes_on_from_token_to_token() -> None:
    """Captured once; what it reads and writes is on the device. Past the end of `ids` it writes nothing."""
    state = state_of(2, 0, [], torch.device("cuda"))
    scores = torch.zeros(2, 5000, device="cuda", dtype=torch.bfloat16)
    decode_select_(scores, *state.values())
    state["length"].zero_()
    graph = torch.cuda.CUDAGraph()
    with RawCalls() as raw, torch.cuda.graph(graph):
        decode_select_(scores, *state.values(), pdl=True)
    assert raw.names() == ["decode_select_.default"]
    expected = torch.randint(5000, (2, 12), device="cuda")
    for i in range(12):
        scores.zero_().scatter_(1, expected[:, i : i + 1], 1.0)
        graph.replay()
        assert torch.equal(state["tokens"], expected[:, i])
    assert torch.equal(state["ids"], expected[:, :9]) and state["length"].item() == 12
