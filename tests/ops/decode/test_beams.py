"""decode_beams_ against transformers' own beam search, from the candidates on, on every backend."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.utils import GenerationMixin

from fuseopt.errors import BackendError
from fuseopt.ops import decode_beams_
from tests.ops.cases import Case, cases, examples

every_case = pytest.mark.parametrize("case", cases("decode_beams_"))
VOCABULARY, CAPACITY, PROMPT, FILL = 13, 40, 3, 12


def state_of(items: int, beams: int, steps: int, device: torch.device) -> dict[str, Any]:
    rows = items * beams

    def integers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    ids = torch.full((2, rows, CAPACITY + 1), FILL, device=device)
    ids[:, :, :PROMPT] = torch.arange(rows, device=device)[:, None] % VOCABULARY
    running_scores = torch.zeros(items, beams, device=device)
    running_scores[:, 1:] = -1e9
    return {
        "running_scores": running_scores,
        "scores": torch.full((items, beams), -1e9, device=device),
        "is_finished": torch.zeros(items, beams, dtype=torch.bool, device=device),
        "lengths": torch.zeros(items, beams, dtype=torch.int64, device=device),
        "improvable": torch.ones(items, dtype=torch.bool, device=device),
        "ids": ids,
        "ancestry": torch.arange(rows, dtype=torch.int32, device=device)[None, :, None].repeat(2, 1, CAPACITY),
        "tokens": torch.zeros(rows, dtype=torch.int64, device=device),
        "going": torch.ones((), dtype=torch.bool, device=device),
        "length": integers(PROMPT),
        "generated": integers(0),
        "counters": integers(PROMPT, *range(rows)),
        "arrived": torch.zeros(2, dtype=torch.int32, device=device),
        "limit": integers(PROMPT + steps),
    }


class Upstream(GenerationMixin):
    """The tensors of `_beam_search`, and what it does with candidates."""

    def __init__(self, state: dict[str, Any], steps: int, eos: list[int], early_stopping: Any, penalty: float) -> None:
        self.items, self.beams = state["scores"].shape
        self.steps, self.eos, self.early_stopping, self.length_penalty = steps, eos, early_stopping, penalty
        self.running_scores, self.scores = state["running_scores"].clone(), state["scores"].clone()
        self.is_finished, self.length = state["is_finished"].clone(), PROMPT
        self.unsatisfied = torch.ones(self.items, 1, dtype=torch.bool, device=self.scores.device)
        shape = (self.items, self.beams, PROMPT + steps)
        self.running = state["ids"][0, :, : PROMPT + steps].view(shape).clone()
        self.sequences = self.running.clone()
        self.running_indices = torch.full((*shape[:2], steps), -1, dtype=torch.int32, device=self.scores.device)
        self.indices = self.running_indices.clone()

    def step(self, values: Tensor, places: Tensor) -> bool:
        parents, tokens = places // VOCABULARY, places % VOCABULARY
        sequences = self._gather_beams(self.running, parents)
        indices = self._gather_beams(self.running_indices, parents)
        sequences[:, :, self.length] = tokens
        first_rows = torch.arange(self.items, device=places.device).view(-1, 1) * self.beams
        indices[:, :, self.length - PROMPT] = parents + first_rows
        ends = torch.isin(tokens, torch.tensor(self.eos, device=tokens.device))
        ends |= self.length + 1 >= PROMPT + self.steps
        self.running, self.running_scores, self.running_indices = self._get_running_beams_for_next_iteration(
            values, sequences, indices, ends, self.beams
        )
        self.sequences, self.scores, self.indices, self.is_finished = self._update_finished_beams(
            self.sequences,
            sequences,
            self.scores,
            values,
            self.indices,
            indices,
            self.unsatisfied,
            self.is_finished,
            ends,
            torch.arange(values.shape[1], device=values.device) < self.beams,
            self.beams,
            self.length,
            PROMPT,
            self.length_penalty,
            self.early_stopping,
        )
        self.length += 1
        self.unsatisfied = self._check_early_stop_heuristic(
            self.unsatisfied,
            self.running_scores,
            self.scores,
            self.is_finished,
            self.length,
            PROMPT + self.steps,
            PROMPT,
            self.early_stopping,
            self.length_penalty,
        )
        return bool(
            self._beam_search_has_unfinished_sequences(self.unsatisfied, self.is_finished, ends, self.early_stopping)
        )


def candidates_of(running_scores: Tensor, count: int, levels: int, banned: float) -> tuple[Tensor, Tensor]:
    """Sums as of a decoding step, with ties where there are few levels."""
    items, beams = running_scores.shape
    scores = -torch.randint(levels, (items, beams, VOCABULARY)).to(running_scores.device) / 4.0
    scores = scores.masked_fill(torch.rand_like(scores) < banned, -torch.inf)
    return torch.topk((scores + running_scores[:, :, None]).flatten(1), count)


@every_case
@settings(max_examples=examples(150), deadline=None)
@given(
    items=st.integers(1, 5),
    beams=st.integers(1, 8),
    eos=st.lists(st.integers(0, VOCABULARY - 1), max_size=3, unique=True),
    early_stopping=st.sampled_from([True, False, "never"]),
    penalty=st.floats(-1.0, 2.0),
    steps=st.integers(1, 12),
    levels=st.sampled_from([1, 3, 30, 10**6]),
    banned=st.sampled_from([0.0, 0.2, 0.97]),
    flags=st.sampled_from([1, PROMPT + 3, CAPACITY + 1]),
    seed=st.integers(0, 2**31),
)
@example(
    items=1,
    beams=8,
    eos=[2],
    early_stopping=True,
    penalty=2.0**-24,
    steps=3,
    levels=30,
    banned=0.0,
    flags=1,
    seed=1387044,
).via("a tie or none, as a quotient is rounded")
def test_is_what_beam_search_does(
    case: Case,
    items: int,
    beams: int,
    eos: list[int],
    early_stopping: Any,
    penalty: float,
    steps: int,
    levels: int,
    banned: float,
    flags: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    state = state_of(items, beams, steps, case.device)
    state["going"] = torch.ones(flags, dtype=torch.bool, device=case.device)
    upstream = Upstream(state, steps, eos, early_stopping, penalty)
    best = [float(steps) if early_stopping == "never" and penalty > 0 else float(max(1, i)) for i in range(steps + 6)]
    own = [float(max(1, i)) for i in range(steps + 6)]
    of_bases = [[base**penalty for base in bases] for bases in (own, best)]
    penalties = torch.tensor(of_bases, dtype=torch.float64, device=case.device)
    count = min(max(2, 1 + len(eos)), 32 // beams) * beams
    options = {"vocabulary": VOCABULARY, "stops_when_full": early_stopping is True}
    ends = torch.tensor(eos, dtype=torch.int64, device=case.device) if eos else None
    length = in_vain = 0
    for taken in range(steps + 3):
        values, places = candidates_of(state["running_scores"], count, levels, banned)
        went_on = bool(state["going"][min(PROMPT + taken - 1, flags - 1)])
        before = {name: value.clone() for name, value in state.items()}
        case(values, places, *state.values(), penalties, ends, advance=taken > 0, **options)
        assert state["length"].item() == PROMPT + taken + 1 and state["generated"].item() == taken + 1
        assert torch.equal(state["counters"], before["counters"] + (taken > 0))
        assert not state["arrived"].any()
        goes_on = bool(state["going"][min(PROMPT + taken, flags - 1)])
        if not went_on:
            assert not goes_on
            for name in ("scores", "lengths"):
                assert torch.equal(state[name], before[name])
            assert torch.equal(state["ids"][1, :, :length], before["ids"][1, :, :length])
            slots = before["counters"][0] - in_vain  # those that were filled when the search ended
            assert torch.equal(state["ancestry"][:, :, :slots], before["ancestry"][:, :, :slots])
            in_vain += 1
            continue
        assert upstream.step(values, places) == goes_on
        length = PROMPT + taken + 1
        assert torch.equal(state["running_scores"], upstream.running_scores)
        assert torch.equal(state["scores"], upstream.scores)
        assert torch.equal(state["is_finished"], upstream.is_finished)
        assert torch.equal(state["improvable"], upstream.unsatisfied[:, 0])
        assert torch.equal(state["ids"][0, :, :length], upstream.running.flatten(0, 1)[:, :length])
        assert torch.equal(state["tokens"], upstream.running.flatten(0, 1)[:, length - 1])
        assert torch.equal(state["lengths"], (upstream.indices >= 0).sum(2))
        generated = state["lengths"].flatten()[:, None] > torch.arange(steps, device=case.device)
        sequences = state["ids"][1, :, PROMPT : PROMPT + steps].masked_fill(~generated, FILL)
        assert torch.equal(sequences, upstream.sequences.flatten(0, 1)[:, PROMPT:])
        first = slice(PROMPT - 1, PROMPT - 1 + steps)
        running = state["ancestry"][0, :, first].masked_fill(torch.arange(steps, device=case.device) > taken, -1)
        assert torch.equal(running, upstream.running_indices.flatten(0, 1))
        assert torch.equal(state["ancestry"][1, :, first].masked_fill(~generated, -1), upstream.indices.flatten(0, 1))


@every_case
def test_wrong_state_candidates_and_penalties_are_refused_by_name(case: Case) -> None:
    state = state_of(2, 3, 4, case.device)
    values, places = candidates_of(state["running_scores"], 6, 5, 0.0)
    penalties = torch.ones(2, 9, dtype=torch.float64, device=case.device)
    for changed, exception, message in (
        ({"scores": state["scores"][:1]}, ValueError, "scores must have shape"),
        ({"lengths": state["lengths"].int()}, TypeError, "lengths must be torch.int64"),
        ({"ids": state["ids"][:1]}, ValueError, "ids must be"),
        ({"ancestry": state["ancestry"].long()}, TypeError, "ancestry must be torch.int32"),
        ({"ancestry": state["ancestry"].mT.contiguous().mT}, ValueError, "ancestry must be"),
        ({"counters": state["counters"][1:]}, ValueError, "counters must have shape"),
    ):
        with pytest.raises(exception, match=message):
            case(values, places, *(state | changed).values(), penalties, vocabulary=VOCABULARY)
    with pytest.raises(ValueError, match="values must be"):
        case(values[:, :2], places, *state.values(), penalties, vocabulary=VOCABULARY)
    with pytest.raises(ValueError, match="penalties must be"):
        case(values, places, *state.values(), penalties[0], vocabulary=VOCABULARY)


def test_a_gradient_is_not_for_kernels() -> None:
    state = state_of(1, 2, 4, torch.device("cpu"))
    values, places = candidates_of(state["running_scores"], 4, 5, 0.0)
    with pytest.raises(BackendError, match="autograd"):
        decode_beams_(
            values.requires_grad_(),
            places,
            *state.values(),
            torch.ones(2, 9, dtype=torch.float64),
            vocabulary=VOCABULARY,
            backend="cuda",
        )
