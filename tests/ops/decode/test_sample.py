"""decode_sample_ against transformers' processors and torch.multinomial, on every backend."""

import copy
import functools
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process

from fuseopt.errors import BackendError
from fuseopt.ops import SamplingFilters, decode_sample_, decode_select_, edit_logits, filter_scores
from fuseopt.ops.decode.edit_logits import LogitsEdits, sample_edits
from fuseopt.ops.decode.torch_draw import offset_of_draw
from tests.ops.cases import DTYPES, Case, RawCalls, cases, examples, launched_kernels, needs_sm90
from tests.ops.decode.decode_states import state_of
from tests.ops.variations import poisoned_allocations

every_case = pytest.mark.parametrize("case", cases("decode_sample_"))
FILTERS = st.builds(
    SamplingFilters,
    top_k=st.one_of(st.just(0), st.integers(1, 60), st.sampled_from([2000, 200_000])),
    top_p=st.one_of(st.just(1.0), st.floats(0.0, 1.0), st.sampled_from([1e-7, 0.95, 1 - 1e-7])),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0), st.sampled_from([1e-5, 0.05, 1.0])),
    typical_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    min_tokens=st.just(1),
) | st.builds(
    SamplingFilters,
    top_k=st.one_of(st.just(0), st.integers(20, 60)),
    top_p=st.one_of(st.just(1.0), st.floats(0.0, 0.9)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    typical_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    min_tokens=st.integers(2, 20),
)
# Rounding moves sums of probabilities, differences from the entropy, and ratios by no more than these.
OF_SUMS, OF_DIFFERENCES, OF_RATIOS = 1e-5, 2e-5, 4e-6


def warpers(filters: SamplingFilters) -> list[logits_process.LogitsProcessor]:
    """Upstream's for `filters`, in the order of generate()."""
    made = {
        "top_k": logits_process.TopKLogitsWarper,
        "top_p": logits_process.TopPLogitsWarper,
        "min_p": logits_process.MinPLogitsWarper,
        "typical_p": logits_process.TypicalLogitsWarper,
    }
    absent, least = SamplingFilters(), {"min_tokens_to_keep": filters.min_tokens}
    return [
        made[name](getattr(filters, name), **least) for name in made if getattr(filters, name) != getattr(absent, name)
    ]


def rounding_decides(scores: Tensor, divisors: Tensor, filters: SamplingFilters) -> tuple[Tensor, Tensor]:
    """Which draws are between tokens that rounding decides about [rows], and which tokens are at a cut [rows, V].

    In a vocabulary of up to 32, upstream's top-p keeps any of equal scores.
    """
    likeliest, start = scores.amax(-1, keepdim=True).double(), scores.double()
    ratios = (scores.double() - likeliest).exp() / divisors.double()
    unclear = torch.zeros_like(scores, dtype=torch.bool)
    for warper in warpers(filters):
        probabilities, kept = scores.double().softmax(-1), warper(None, scores)
        if isinstance(warper, logits_process.TopPLogitsWarper):
            ascending, order = probabilities.sort(dim=-1, stable=True)
            near = (ascending.cumsum(-1) - (1 - warper.top_p)).abs() < OF_SUMS
            near[:, -warper.min_tokens_to_keep :] = False
            unclear |= torch.zeros_like(near).scatter(1, order, near)
            if scores.shape[1] <= 32:
                lowest = kept.masked_fill(kept == -torch.inf, torch.inf).amin(-1, keepdim=True)
                unclear |= (scores == lowest) & ((scores == lowest).sum(-1, keepdim=True) > 1)
        elif isinstance(warper, logits_process.MinPLogitsWarper):
            relative = probabilities / probabilities.amax(-1, keepdim=True)
            unclear |= ((relative / max(warper.min_p, 1e-30) - 1).abs() < OF_RATIOS) & (relative != 1)
            # Upstream fills up to the fewest tokens with any of equal probabilities. Many are 0, as of banned tokens.
            rounded = scores.softmax(-1)
            at_fewest = rounded == rounded.topk(min(warper.min_tokens_to_keep, scores.shape[1])).values[:, -1:]
            is_unlikely = rounded < warper.min_p * rounded.amax(-1, keepdim=True)
            unclear |= at_fewest & is_unlikely & (at_fewest.sum(-1, keepdim=True) > 1)
        elif isinstance(warper, logits_process.TypicalLogitsWarper):
            information = -probabilities.log()
            distances = (information - (probabilities * information).nansum(-1, keepdim=True)).abs()
            spread, order = distances.sort(-1)
            cumulative = probabilities.gather(-1, order).cumsum(-1)
            # What is unclear so far may be missing or not, which moves the entropy and the sums.
            missing = (
                (start - likeliest).exp() / (scores.double() - likeliest).exp().sum(-1, keepdim=True)
            ).masked_fill(~unclear, 0)
            of_sums = OF_SUMS + missing.sum(-1, keepdim=True)
            of_differences = OF_DIFFERENCES + (missing * (1 - missing.clamp(min=1e-300).log())).sum(-1, keepdim=True)
            fewest = min(warper.min_tokens_to_keep, scores.shape[-1]) - 1
            at_fewest = (distances - spread[:, fewest, None]).abs() < of_differences
            unclear |= at_fewest & (fewest > 0) & (at_fewest.sum(-1, keepdim=True) > 1)
            for mass in (warper.mass - of_sums, warper.mass + of_sums):
                last = (cumulative < mass).sum(-1, keepdim=True).clamp(min=fewest, max=scores.shape[-1] - 1)
                limit = spread.gather(1, last)
                unclear |= (kept > -torch.inf) != (distances <= limit)
                near = (distances - limit).abs() < of_differences
                differs = near & (scores != scores.gather(1, order.gather(1, last)))
                # If rounding puts another token before those at the limit, it decides about them, too.
                unclear |= near & differs.any(-1, keepdim=True)
        scores = kept
    certain = ratios.masked_fill((scores == -torch.inf) | unclear, -1.0)
    best = torch.nn.functional.pad(certain, (0, 1), value=-1.0).topk(2, dim=-1).values
    unclear_best = ratios.masked_fill(~unclear, -1.0).amax(-1)
    return torch.maximum(best[:, 1], unclear_best) > best[:, 0] * (1 - OF_RATIOS), unclear


def check_draws(case: Case, logits: Tensor, filters: SamplingFilters, edits: LogitsEdits | None = None) -> int:
    """Holds a call against upstream's filters and draw; returns how many rows could be compared."""
    rows = len(logits)
    scores = logits.float() if edits is None else edit_logits(logits, edits, backend="reference")
    divisors = torch.empty(scores.shape, device=case.device).exponential_()
    state = state_of(rows, 4, [], case.device)
    expected = copy.deepcopy(state)
    returned = torch.full_like(scores, torch.nan)
    case(logits, divisors, *state.values(), filters=filters, edits=edits, kept=returned)
    raced = copy.deepcopy(expected)  # by another kernel, as no scores are returned
    case(logits, divisors, *raced.values(), filters=filters, edits=edits)
    kept = scores
    for warper in warpers(filters):
        kept = warper(None, kept)
    decode_select_(kept.softmax(-1), *expected.values(), divisors=divisors, backend="reference")
    draw, unclear = rounding_decides(scores, divisors, filters)
    assert torch.equal(returned.masked_fill(unclear, 0), kept.masked_fill(unclear, 0))
    only_filtered, highest = filter_scores(logits, filters=filters, edits=edits, backend=case.backend)
    assert torch.equal(only_filtered, returned) and torch.equal(highest, returned.amax(-1))
    decided = ~draw
    assert torch.equal(state["tokens"][decided], expected["tokens"][decided])
    assert torch.equal(raced["tokens"][decided], expected["tokens"][decided])
    assert torch.equal(state["ids"][:, 4], state["tokens"]) and state["length"].item() == 5
    return int(decided.sum())


@every_case
@settings(max_examples=examples(80), deadline=None)
@given(
    filters=FILTERS,
    rows=st.one_of(st.integers(1, 5), st.sampled_from([70, 140])),
    vocabulary=st.one_of(st.integers(1, 70), st.sampled_from([4096, 8193, 50257])),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([0.01, 1.0, 6.0, 60.0]),
    banned=st.sampled_from([0.0, 0.5, 0.999]),
    is_edited=st.booleans(),
    offset=st.integers(0, 9),
    seed=st.integers(0, 2**31),
)
@example(  # two probabilities of the second row are above 0
    filters=SamplingFilters(min_p=1.0, min_tokens=3),
    rows=2,
    vocabulary=4096,
    dtype=torch.float32,
    spread=60.0,
    banned=0.999,
    is_edited=False,
    offset=0,
    seed=1,
)
def test_draws_what_transformers_draws(
    case: Case,
    filters: SamplingFilters,
    rows: int,
    vocabulary: int,
    dtype: torch.dtype,
    spread: float,
    banned: float,
    is_edited: bool,
    offset: int,
    seed: int,
) -> None:
    """Flat and steep distributions, in rows of any alignment; each row keeps a token that nothing bans."""
    rows = min(rows, 200_000 // vocabulary + 1)
    torch.manual_seed(seed)
    logits = spread * torch.randn(rows, vocabulary + offset)
    logits = logits.masked_fill(torch.rand_like(logits) < banned, -torch.inf).to(dtype)
    logits[:, offset] = 0
    logits = logits.to(case.device)[:, offset:]
    edits = None
    if is_edited:
        edits = sample_edits(case.device, rows, vocabulary)
        edits = edits._replace(no_repeat_ngram_size=0, encoder_no_repeat_ngram_size=0, token_rules=None)
    check_draws(case, logits, filters, edits)


@every_case
@pytest.mark.parametrize("levels", [1, 3, 40])
@pytest.mark.parametrize(
    "filters",
    [
        SamplingFilters(top_k=1),
        SamplingFilters(top_k=700),
        SamplingFilters(top_p=0.3),
        SamplingFilters(top_p=0.0),
        SamplingFilters(top_k=5000, top_p=0.6),
        SamplingFilters(min_p=1.0),
        SamplingFilters(typical_p=0.4),
    ],
    ids=str,
)
def test_ties(case: Case, levels: int, filters: SamplingFilters) -> None:
    """Equal scores at a cut: top-k and typical-p keep all, top-p the last ones."""
    torch.manual_seed(levels)
    compared = 0
    for vocabulary in (33, 9001, 30_011):
        logits = (torch.randint(levels, (8, vocabulary)) / 4).to(case.device, torch.bfloat16)
        compared += check_draws(case, logits, filters)
    # One level: every cumulative probability is a multiple, and top-p may meet one.
    assert compared >= (12 if levels > 1 else 0)


@every_case
@pytest.mark.parametrize("top_k", [1, 3, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_top_k_keeps_scores_too_low_to_be_drawn(case: Case, top_k: int, dtype: torch.dtype) -> None:
    """Fewer than k scores within 87 of the highest, below which probabilities are 0."""
    torch.manual_seed(top_k)
    for vocabulary in (12, 1000, 30_011):
        logits = (900 * torch.randn(3, vocabulary)).to(case.device, dtype)
        assert check_draws(case, logits, SamplingFilters(top_k=top_k)) == 3


@every_case
def test_one_token_is_left(case: Case) -> None:
    logits = torch.full((3, 20_000), -torch.inf, device=case.device)
    logits[0, 0], logits[1, 19_999], logits[2, 12_345] = 3.0, -1e30, 0.0
    for filters in (SamplingFilters(), SamplingFilters(5, 0.5, 0.5, 0.5)):
        state = state_of(3, 0, [], case.device)
        case(logits, torch.ones_like(logits), *state.values(), filters=filters)
        assert state["tokens"].tolist() == [0, 19_999, 12_345]


@every_case
def test_finished_rows_are_padded_and_eos_ends(case: Case) -> None:
    logits = torch.zeros(3, 9, device=case.device)
    logits[:, 7] = 50.0
    state = state_of(3, 4, [1], case.device)
    counter = torch.tensor([7], device=case.device)
    eos = torch.tensor([7], device=case.device)
    case(logits, torch.ones_like(logits), *state.values(), eos, counters=[counter])
    assert state["tokens"].tolist() == [7, 3, 7] and not state["unfinished"].any() and not state["going"].any()
    assert counter.item() == 8 and state["length"].item() == 5


@every_case
def test_wrong_arguments_are_refused_by_name(case: Case) -> None:
    state = state_of(2, 0, [], case.device)
    logits = torch.zeros(2, 5, device=case.device)
    for filters, message in (
        (SamplingFilters(top_k=-1), "top_k must be positive"),
        (SamplingFilters(top_p=1.5), r"top_p must be in \[0, 1\]"),
        (SamplingFilters(typical_p=torch.nan), "typical_p must be"),
        (SamplingFilters(min_tokens=0), "min_tokens must be between 1 and 128"),
        (SamplingFilters(min_tokens=129), "min_tokens must be between 1 and 128"),
    ):
        with pytest.raises(ValueError, match=message):
            case(logits, logits, *state.values(), filters=filters)
    with pytest.raises(ValueError, match="give either divisors or random"):
        case(logits, None, *state.values())
    with pytest.raises(ValueError, match=r"random must be \[3\] torch\.int64 on a GPU"):
        case(logits, None, *state.values(), random=torch.zeros(3, device=case.device))
    with pytest.raises(ValueError, match="divisors must have shape"):
        case(logits, logits[:, :3], *state.values())
    with pytest.raises(TypeError, match=r"divisors must be torch\.float32"):
        case(logits, logits.double(), *state.values())
    with pytest.raises(TypeError, match=r"kept must be torch\.float32"):
        case(logits, logits, *state.values(), kept=logits.double())
    with pytest.raises(ValueError, match="logits must be"):
        case(logits[:, :0], logits[:, :0], *state.values())
    with pytest.raises(ValueError, match="ids must be"):
        case(logits, logits, *(state | {"ids": state["ids"][:1]}).values())


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_has_no_probability_is_not_drawn_from(wrong: float) -> None:
    state = state_of(2, 0, [], torch.device("cpu"))
    for row in (torch.tensor([0.5, wrong]), torch.tensor([-torch.inf, -torch.inf])):
        with pytest.raises(RuntimeError, match="probability tensor contains either"):
            decode_sample_(torch.stack([torch.zeros(2), row]), torch.ones(2, 2), *state.values())


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["[0.5, float('nan')]", "[float('inf'), 0.5]", "[-float('inf'), -float('inf')]"])
def test_what_has_no_probability_fails_an_assertion(row: str) -> None:
    program = (
        "import torch; from fuseopt.ops import decode_sample_; one = torch.ones(1, dtype=torch.int64, device='cuda');"
        f"logits = torch.tensor([{row}], device='cuda');"
        "decode_sample_(logits, torch.ones(1, 2, device='cuda'), one.clone(), one[None].clone(), one.clone(),"
        " one.bool(), one.bool(), one, backend='cuda'); torch.cuda.synchronize()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode != 0 and "device-side assert" in ended.stderr


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 131_075), (3, 400_003), (140, 50_257)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_large_vocabularies(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    """Several chunks a block; scores of many tokens or rows do not fit into shared memory."""
    torch.manual_seed(rows)
    (case,) = (each.values[0] for each in cases("decode_sample_") if each.id == "decode_sample_-cuda-cuda")
    logits = (2 * torch.randn(rows, vocabulary, device="cuda")).to(dtype)
    compared = sum(
        check_draws(case, logits, filters)
        for filters in (SamplingFilters(top_k=50), SamplingFilters(top_p=0.9), SamplingFilters(typical_p=0.9))
    )
    assert compared > 2 * rows


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8, 70])
@pytest.mark.parametrize("vocabulary", [7, 300, 50_257])
@pytest.mark.parametrize("filters", [SamplingFilters(), SamplingFilters(top_k=50), SamplingFilters(top_p=0.9)], ids=str)
@pytest.mark.parametrize("backend", ["cuda", "reference"])
def test_draws_the_generators_numbers(rows: int, vocabulary: int, filters: SamplingFilters, backend: str) -> None:
    """`random` instead of torch's own draw: the same tokens from the same generator, one step after another."""
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(2**63 + 12345)
    generator.set_offset(2**34 + 16)
    logits = torch.randn(rows, vocabulary, device=device)
    random = torch.tensor([12345 - 2**63, 2**34 + 16, 0], device=device)
    state, expected = state_of(rows, 0, [], device), state_of(rows, 0, [], device)
    for step in range(3):
        before = generator.get_offset()
        divisors = torch.empty(logits.shape, device=device).exponential_(generator=generator)
        assert generator.get_offset() - before == offset_of_draw(logits.numel(), device)
        decode_sample_(logits, divisors, *expected.values(), filters=filters, backend="cuda")
        decode_sample_(logits, None, *state.values(), filters=filters, random=random, backend=backend)
        assert torch.equal(state["ids"], expected["ids"]) and random[2].item() == step + 1


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [SamplingFilters(), SamplingFilters(top_p=0.999)], ids=str)
def test_smallest_numbers_are_those_of_torch(filters: SamplingFilters) -> None:
    """Among a million equal logits the smallest number decides: torch's fast logarithm is far from the exact one."""
    device = torch.device("cuda")
    generator, logits = torch.Generator(device).manual_seed(7), torch.zeros(8, 1_000_003, device=device)
    random = torch.tensor([7, 0, 0], device=device)
    state, expected = state_of(8, 0, [], device), state_of(8, 0, [], device)
    for _ in range(8):
        divisors = torch.empty(logits.shape, device=device).exponential_(generator=generator)
        decode_sample_(logits, divisors, *expected.values(), filters=filters, backend="cuda")
        decode_sample_(logits, None, *state.values(), filters=filters, random=random, backend="cuda")
    assert torch.equal(state["ids"], expected["ids"])


@needs_sm90
@pytest.mark.gpu
@pytest.mark.parametrize(
    "filters",
    [
        SamplingFilters(min_p=0.05),
        SamplingFilters(top_k=2000, min_p=0.05),
        SamplingFilters(top_p=0.02),
        SamplingFilters(top_p=0.9, min_p=0.05),
        SamplingFilters(typical_p=0.05),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 8, 70])
def test_a_race_draws_from_what_one_filter_keeps(filters: SamplingFilters, rows: int) -> None:
    """Flat and steep; of the flat ones several tokens are not kept before one is drawn."""
    (case,) = (each.values[0] for each in cases("decode_sample_") if each.id == "decode_sample_-cuda-cuda")
    for spread in (0.01, 0.6, 8.0):
        logits = (spread * torch.randn(rows, 50_257, device="cuda")).bfloat16()
        check_draws(case, logits, filters)
        state, divisors = state_of(rows, 0, [], case.device), torch.ones_like(logits, dtype=torch.float32)
        launched = launched_kernels(functools.partial(case, logits, divisors, *state.values(), filters=filters))
        assert "decode_sample_race" in launched[0]


@pytest.mark.gpu
def test_two_kernels_in_a_graph_draw_as_eager_calls_do() -> None:
    logits = torch.randn(3, 5000, device="cuda", dtype=torch.bfloat16)
    filters = SamplingFilters(top_k=500, top_p=0.9)
    state = state_of(3, 0, [], torch.device("cuda"))

    def draw() -> None:
        divisors = torch.empty(logits.shape, device="cuda").exponential_()
        decode_sample_(logits, divisors, *state.values(), filters=filters, pdl=True)

    assert len(launched_kernels(draw)) == 2
    graph = torch.cuda.CUDAGraph()
    with RawCalls() as raw, torch.cuda.graph(graph):
        draw()
    assert "decode_sample_.default" in raw.names()
    torch.manual_seed(5)
    expected = []
    for _ in range(9):
        draw()
        expected.append(state["tokens"].clone())
    after = torch.rand(5, device="cuda")
    torch.manual_seed(5)
    for tokens in expected:
        graph.replay()
        assert torch.equal(state["tokens"], tokens)
    assert torch.equal(torch.rand(5, device="cuda"), after)


def test_a_gradient_is_not_for_kernels() -> None:
    state = state_of(1, 0, [], torch.device("cpu"))
    with pytest.raises(BackendError, match="autograd"):
        decode_sample_(torch.zeros(1, 5, requires_grad=True), torch.ones(1, 5), *state.values(), backend="cuda")


@pytest.mark.gpu
def test_filters_take_a_row_without_a_finite_score() -> None:
    """As of a beam whose tokens are all banned."""
    scores = torch.randn(3, 9001, device="cuda")
    scores[1] = -torch.inf
    for filters in (SamplingFilters(top_k=5, min_tokens=2), SamplingFilters(top_p=0.5, min_p=0.1)):
        kept, highest = filter_scores(scores, filters=filters, backend="cuda")
        expected, _ = filter_scores(scores[::2].contiguous(), filters=filters, backend="cuda")
        assert torch.equal(kept[::2], expected) and (kept[1] == -torch.inf).all()
        assert torch.equal(highest, scores.amax(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 140])
def test_filters_leave_the_same_from_run_to_run(rows: int) -> None:
    """Blocks gather scores in any order."""
    torch.manual_seed(rows)
    scores = torch.randn(rows, 50_257, device="cuda").bfloat16()
    for filters in (SamplingFilters(top_k=50, top_p=0.9), SamplingFilters(top_p=0.9), SamplingFilters(typical_p=0.9)):
        first, _ = filter_scores(scores, filters=filters, backend="cuda")
        for _ in range(20):
            with poisoned_allocations():
                assert torch.equal(filter_scores(scores, filters=filters, backend="cuda")[0], first)
