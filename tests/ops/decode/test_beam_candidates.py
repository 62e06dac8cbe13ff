"""beam_candidates against torch.topk, ties included, on every backend."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseopt.errors import BackendError
from fuseopt.ops import beam_candidates, drawn_continuations
from tests.ops.cases import Case, RawCalls, cases

every_case = pytest.mark.parametrize("case", cases("beam_candidates"))


@every_case
@settings(max_examples=150, deadline=None)
@given(
    items=st.integers(1, 4),
    beams=st.integers(1, 6),
    vocabulary=st.one_of(st.integers(6, 70), st.sampled_from([1023, 8192, 8193, 32128, 50257])),
    each=st.integers(2, 5),
    levels=st.sampled_from([1, 2, 50, 10**6]),
    banned=st.floats(0.0, 1.0),
    strided=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_is_topk_of_the_sums(
    case: Case,
    items: int,
    beams: int,
    vocabulary: int,
    each: int,
    levels: int,
    banned: float,
    strided: bool,
    seed: int,
) -> None:
    """Few levels make ties: among the highest, at the lowest one taken, and between beams."""
    torch.manual_seed(seed)
    scores = -torch.randint(levels, (items * beams, vocabulary + strided)).to(case.device) / 8.0
    scores = scores.masked_fill(torch.rand_like(scores) < banned, -torch.inf)[:, int(strided) :]
    running = -torch.randint(levels, (items, beams)).to(case.device) / 8.0
    running[0, 1:] = -1e9
    count = min(each * beams, 32)
    values, places = case(scores, running, count)
    sums = (scores.view(items, beams, vocabulary) if not strided else scores.unflatten(0, (items, beams))) + running[
        :, :, None
    ]
    expected = torch.topk(sums.flatten(1), count)
    assert torch.equal(values, expected.values) and torch.equal(places, expected.indices)


@every_case
def test_nan_and_infinity_and_both_zeros(case: Case) -> None:
    scores = torch.zeros(4, 3000, device=case.device)
    scores[0, 5], scores[1, 7], scores[2, 9] = torch.nan, torch.inf, -torch.inf
    scores[:, ::2] = scores[:, ::2] * -1.0
    running = torch.zeros(2, 2, device=case.device)
    values, places = case(scores, running, 10)
    expected = torch.topk((scores.view(2, 2, 3000) + running[:, :, None]).flatten(1), 10)
    torch.testing.assert_close(values, expected.values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(places, expected.indices)


@every_case
def test_wrong_scores_and_counts_are_refused_by_name(case: Case) -> None:
    scores, running = torch.zeros(4, 5, device=case.device), torch.zeros(2, 2, device=case.device)
    with pytest.raises(ValueError, match="running_scores must be"):
        case(scores, running[:1], 2)
    with pytest.raises(ValueError, match="running_scores must be"):
        case(scores, running.flatten(), 2)
    for count in (0, 11):
        with pytest.raises(ValueError, match="between 1 and the 10 continuations"):
            case(scores, running, count)


def test_more_than_a_warp_sorts_is_for_the_reference() -> None:
    scores, running = torch.randn(2, 50), torch.zeros(1, 2)
    values, places = beam_candidates(scores, running, 33)
    assert torch.equal(values, torch.topk(scores.flatten(), 33).values[None]) and places.shape == (1, 33)


def test_a_gradient_is_not_for_kernels() -> None:
    with pytest.raises(BackendError, match="autograd"):
        beam_candidates(torch.zeros(2, 5, requires_grad=True), torch.zeros(1, 2), 2, backend="cuda")


@pytest.mark.gpu
def test_captured_in_a_graph() -> None:
    scores, running = torch.randn(6, 5000, device="cuda"), torch.zeros(2, 3, device="cuda")
    beam_candidates(scores, running, 6)
    graph = torch.cuda.CUDAGraph()
    with RawCalls() as raw, torch.cuda.graph(graph):
        values, places = beam_candidates(scores, running, 6, pdl=True)
    assert raw.names() == ["beam_candidates.default"]
    for _ in range(20):
        scores.normal_()
        graph.replay()
        expected = torch.topk(scores.view(2, -1), 6)
        assert torch.equal(values, expected.values) and torch.equal(places, expected.indices)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "reference"])
@pytest.mark.parametrize(
    ("items", "beams", "vocabulary", "kept"), [(1, 2, 11, 11), (3, 4, 50_257, 50), (2, 3, 9000, 2)]
)
def test_draws_what_multinomial_draws(backend: str, items: int, beams: int, vocabulary: int, kept: int) -> None:
    """Also fewer continuations of any probability than are drawn: those left are torch.topk's of zeros."""
    device, count = torch.device("cuda"), 2 * beams
    generator = torch.Generator(device).manual_seed(2**63 + 5)
    random = torch.tensor([5 - 2**63, 0, 0], device=device)
    running = torch.full((items, beams), -1e9, device=device)
    running[:, 0] = 0
    for step in range(4):
        scores = torch.randn(items * beams, vocabulary, device=device).log_softmax(dim=-1)
        scores = scores.masked_fill(scores < scores.topk(kept).values[:, -1:], -torch.inf)
        accumulated = (scores.unflatten(0, (items, beams)) + running[:, :, None]).flatten(1)
        expected = torch.multinomial(accumulated.softmax(dim=-1), count, generator=generator)
        values, places = drawn_continuations(scores, running, count, random, backend=backend)
        assert torch.equal(places, expected) and torch.equal(values, accumulated.gather(1, expected))
        assert random[2].item() == step + 1
        running = torch.randn_like(running)


def test_numbers_are_drawn_on_a_gpu_only() -> None:
    scores, running = torch.zeros(2, 5), torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"random must be \[3\] torch\.int64 on a GPU"):
        drawn_continuations(scores, running, 2, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="count must be between"):
        drawn_continuations(scores, running, 11, torch.zeros(3, dtype=torch.int64))
