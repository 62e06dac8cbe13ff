"""decode_select_ against the loop it stands for, on every backend."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuseopt.errors import BackendError
from fuseopt.ops import decode_select_
from tests.ops.cases import DTYPES, Case, RawCalls, cases

every_case = pytest.mark.parametrize("case", cases("decode_select_"))


def state_of(rows: int, length: int, finished: list[int], device: torch.device) -> dict[str, Tensor]:
    unfinished = torch.ones(rows, dtype=torch.bool, device=device)
    unfinished[finished] = False
    return {
        "tokens": torch.full((rows,), -1, device=device),
        "ids": torch.full((rows, 9), -1, device=device),
        "length": torch.tensor([length], device=device),
        "unfinished": unfinished,
        "going": torch.ones((), dtype=torch.bool, device=device),
        "pad": torch.tensor(3, device=device),
    }


@every_case
@settings(max_examples=60, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 9), st.sampled_from([40])),
    vocabulary=st.one_of(st.integers(1, 70), st.sampled_from([4096, 4097, 50257])),
    dtype=st.sampled_from(DTYPES),
    levels=st.sampled_from([2, 1000]),
    eos=st.one_of(st.none(), st.lists(st.integers(0, 5), min_size=1, max_size=3)),
    seed=st.integers(0, 2**31),
)
def test_is_what_sample_does(
    case: Case, rows: int, vocabulary: int, dtype: torch.dtype, levels: int, eos: list[int] | None, seed: int
) -> None:
    """Few levels make ties, of which the first wins."""
    torch.manual_seed(seed)
    scores = (torch.randint(levels, (rows, vocabulary)) / 8).to(case.device, dtype)
    state = state_of(rows, 4, torch.randint(rows, (rows // 2,)).tolist(), case.device)
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
    assert torch.equal(state["unfinished"], unfinished) and bool(state["going"]) == bool(unfinished.any())
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
def test_wrong_arguments(case: Case) -> None:
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
    with pytest.raises(ValueError, match="scores must be"):
        case(scores[:, :0], *state.values())


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
        decode_select_(scores, *state.values(), overlap=True)
    assert raw.names() == ["decode_select_.default"]
    expected = torch.randint(5000, (2, 12), device="cuda")
    for i in range(12):
        scores.zero_().scatter_(1, expected[:, i : i + 1], 1.0)
        graph.replay()
        assert torch.equal(state["tokens"], expected[:, i])
    assert torch.equal(state["ids"], expected[:, :9]) and state["length"].item() == 12
