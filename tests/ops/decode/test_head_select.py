"""decode_head_select_ against the two ops that it stands for, on every backend."""

import copy

import pytest
import torch
from torch import Tensor

from fuseopt.errors import BackendError
from fuseopt.ops import LogitsEdits, decode_head_select_, decode_linear, decode_select_, registry
from tests.ops.cases import DTYPES, Case, cases
from tests.ops.decode.decode_states import state_of as decode_state_of

every_case = pytest.mark.parametrize("case", cases("decode_head_select_"))
NORMS = ("layer_norm", "rms_norm", None)


def as_wide(vocabulary: int, device: torch.device) -> int:
    """A vocabulary of many blocks of a GPU; a CPU, which has no blocks, takes a part of it."""
    return vocabulary if device.type == "cuda" else min(vocabulary, 2_001)


def state_of(rows: int, device: torch.device) -> dict[str, Tensor]:
    return decode_state_of(rows, 4, [1] if rows > 1 else [], device)


def norm_of(kind: str | None, columns: int, like: Tensor) -> dict[str, object]:
    if kind is None:
        return {}
    norm = {"norm": kind, "norm_weight": torch.randn(columns).to(like), "eps": 1e-6}
    return norm | ({"norm_bias": torch.randn(columns).to(like)} if kind == "layer_norm" else {})


def check(
    case: Case,
    input: Tensor,
    weight: Tensor,
    norm: dict[str, object],
    edits: dict[str, object] | None = None,
    addends: Tensor | None = None,
) -> None:
    rows = len(input)
    sum = input if addends is None else (addends[0] + addends[1] + input.float()).to(input.dtype)
    scores = decode_linear(sum, weight, **norm, backend=case.backend)
    ends = scores.argmax(-1)[:1].clone()
    got, wanted = state_of(rows, case.device), state_of(rows, case.device)
    for state in (got, wanted):
        state["ids"][:, :4] = scores.topk(4).indices
    got_counters, counters = ([torch.arange(rows, device=case.device)] for _ in range(2))

    def edits_of(state: dict[str, Tensor]) -> dict[str, LogitsEdits]:
        return {} if edits is None else {"edits": LogitsEdits(state["ids"], state["length"], **edits)}

    case(input, weight, *got.values(), ends, split_k_partials=addends, **norm, counters=got_counters, **edits_of(got))
    decode_select_(scores, *wanted.values(), ends, counters=counters, **edits_of(wanted), backend=case.backend)
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name
    assert torch.equal(got_counters[0], counters[0])


@every_case
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("rows", "vocabulary", "columns"), [(1, 7, 33), (3, 300, 48), (9, 1000, 64), (16, 40, 8), (17, 40, 8)]
)
def test_small_heads_select_what_the_product_has_largest(
    case: Case, dtype: torch.dtype, norm: str | None, rows: int, vocabulary: int, columns: int
) -> None:
    input = torch.randn(rows, columns).to(case.device, dtype)
    weight = torch.randn(vocabulary, columns).to(case.device, dtype)
    check(case, input, weight, norm_of(norm, columns, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 16])
@pytest.mark.parametrize(("vocabulary", "columns"), [(50257, 768), (32128, 512), (50001, 1600)])
def test_ties_in_vocabularies_of_models_go_to_the_first_token(
    dtype: torch.dtype, norm: str | None, rows: int, vocabulary: int, columns: int
) -> None:
    """Few values make many ties, of which the first wins, wherever blocks begin."""
    case = Case(registry.get("decode_head_select_"), "cuda", torch.device("cuda"))
    input = torch.randn(rows, columns).to(case.device, dtype)
    weight = torch.randint(-1, 2, (vocabulary, columns)).to(case.device, dtype)
    weight[vocabulary // 2 :] = weight[: vocabulary - vocabulary // 2].clone()
    check(case, input, weight, norm_of(norm, columns, weight))


def rules_for(scores: Tensor, bounds: list[list[int]], forcing: int) -> dict[str, object]:
    """Rule 0 about a tenth of the tokens and the best of the first row, rule 1 about every third."""
    vocabulary = scores.shape[1]
    of_first = torch.rand(vocabulary, device=scores.device) < 0.1
    of_first[scores[0].argmax()] = True
    of_second = torch.arange(vocabulary, device=scores.device) % 3 == 1
    table = of_first.to(torch.uint8) + 2 * of_second.to(torch.uint8)
    return {
        "token_rules": table,
        "rule_bounds": torch.tensor(bounds, device=scores.device),
        "forcing_rules": forcing,
    }


@every_case
@pytest.mark.parametrize("rows", [1, 3, 8, 9])
@pytest.mark.parametrize(
    ("bounds", "forcing"),
    [
        ([[0, 9], [0, 9]], 0),
        ([[0, 4], [4, 5]], 0),  # sequences have 4 ids
        ([[0, 4], [5, 9]], 0),
        ([[0, 9], [4, 5]], 2),
        ([[4, 9], [0, 9]], 1),
    ],
)
@pytest.mark.parametrize(("vocabulary", "columns"), [(300, 48), (32128, 512)])
def test_rules_for_tokens(
    case: Case, rows: int, bounds: list[list[int]], forcing: int, vocabulary: int, columns: int
) -> None:
    torch.manual_seed(0)
    input = torch.randn(rows, columns).to(case.device, torch.bfloat16)
    weight = torch.randn(as_wide(vocabulary, case.device), columns).to(case.device, torch.bfloat16)
    norm = norm_of("layer_norm", columns, weight)
    scores = decode_linear(input, weight, **norm, backend=case.backend)
    check(case, input, weight, norm, rules_for(scores, bounds, forcing))


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", NORMS[:2])
@pytest.mark.parametrize(("rows", "columns"), [(1, 512), (3, 512), (8, 512), (9, 512), (17, 512), (1, 768), (8, 768)])
def test_inputs_in_addends_select_what_their_sum_selects(
    case: Case, dtype: torch.dtype, norm: str, rows: int, columns: int
) -> None:
    torch.manual_seed(0)
    input = torch.randn(rows, columns).to(case.device, dtype)
    addends = torch.randn(2, rows, columns, device=case.device)
    weight = torch.randint(-1, 2, (as_wide(24_001, case.device), columns)).to(case.device, dtype)
    check(case, input, weight, norm_of(norm, columns, weight), addends=addends)


@every_case
@pytest.mark.parametrize("rows", [1, 8])
def test_addends_for_a_head_that_lies_in_lines(case: Case, rows: int) -> None:
    torch.manual_seed(0)
    input = torch.randn(rows, 768).to(case.device, torch.bfloat16)
    addends = torch.randn(2, rows, 768, device=case.device).mT.contiguous().mT
    weight = torch.randn(768, 2304).to(case.device, torch.bfloat16).T
    check(case, input, weight, norm_of("layer_norm", 768, weight), addends=addends)


@every_case
def test_addends_and_rules(case: Case) -> None:
    torch.manual_seed(0)
    input, weight = (torch.randn(n, 512).to(case.device, torch.bfloat16) for n in (2, 32128))
    addends, norm = torch.zeros(2, 2, 512, device=case.device), norm_of("layer_norm", 512, weight)
    rules = rules_for(decode_linear(input, weight, **norm, backend=case.backend), [[0, 9], [4, 5]], 2)
    check(case, input, weight, norm, rules, addends)


@every_case
def test_edits_beside_token_rules_are_applied_too(case: Case) -> None:
    torch.manual_seed(0)
    input, weight = (torch.randn(n, 512).to(case.device, torch.bfloat16) for n in (2, 32128))
    norm = norm_of("layer_norm", 512, weight)
    rules = rules_for(decode_linear(input, weight, **norm, backend=case.backend), [[0, 9], [0, 9]], 0)
    for others in ({"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 1}, {"temperature": 0.5}):
        check(case, input, weight, norm, rules | others)


@every_case
def test_a_residual_stream_in_float32(case: Case) -> None:
    input = torch.randn(2, 512).to(case.device)
    weight = torch.randn(32128, 512).to(case.device, torch.float16)
    check(case, input, weight, norm_of("rms_norm", 512, weight))


@every_case
def test_nan_is_the_highest(case: Case) -> None:
    input = torch.randn(3, 64).to(case.device, torch.bfloat16)
    weight = torch.randn(40_000, 64).to(case.device, torch.bfloat16)
    weight[[39_000, 31_111]] = torch.nan
    state = state_of(3, case.device)
    case(input, weight, *state.values(), norm="rms_norm")
    assert state["tokens"].tolist() == [31_111, 3, 31_111]


@pytest.mark.gpu
@pytest.mark.parametrize("are_sums", [False, True])
@pytest.mark.parametrize(
    ("rows", "dtype", "kernels"),
    [
        (1, torch.bfloat16, 2),
        (8, torch.bfloat16, 2),
        (9, torch.bfloat16, 3),
        (1, torch.float32, 2),
        (16, torch.float32, 2),
    ],
)
def test_no_launch_looks_for_what_blocks_have_found(
    rows: int, dtype: torch.dtype, kernels: int, are_sums: bool
) -> None:
    input = torch.randn(rows, 768, device="cuda", dtype=dtype)
    weight = torch.randn(50257, 768, device="cuda", dtype=dtype)
    state, norm = state_of(rows, input.device), norm_of("layer_norm", 768, weight)
    if are_sums and rows <= 8 and dtype is torch.bfloat16:  # in float32 no layer leaves sums
        norm["split_k_partials"] = torch.randn(2, rows, 768, device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        decode_head_select_(input, weight, *state.values(), **norm, backend="cuda")
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(names) == kernels and sum("chunk_kernel" in name for name in names) == kernels - 2


@every_case
def test_wrong_arguments_change_nothing(case: Case) -> None:
    state = state_of(2, case.device)
    before = copy.deepcopy(state)
    input, weight = torch.zeros(2, 8, device=case.device), torch.zeros(5, 8, device=case.device)
    for arguments, exception, message in (
        ((input[0], weight, *state.values()), ValueError, "input must be"),
        ((input, weight[:0], *state.values()), ValueError, "V > 0"),
        ((input, weight[:, :4], *state.values()), ValueError, "weight must have shape"),
        ((input, weight, *(state | {"tokens": state["tokens"][:1]}).values()), ValueError, "tokens must have shape"),
        ((input, weight, *(state | {"ids": state["ids"].int()}).values()), TypeError, "ids must be int64"),
    ):
        with pytest.raises(exception, match=message):
            case(*arguments)
    for options, message in (
        ({"norm": "batch_norm"}, "norm must be"),
        ({"norm_weight": weight[0]}, "need a norm"),
        ({"norm": "layer_norm", "norm_weight": weight[:, 0]}, "norm_weight must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            case(input, weight, *state.values(), **options)
    edits = LogitsEdits(state["ids"], state["length"], token_rules=torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"edits.token_rules must have shape"):
        case(input, weight, *state.values(), edits=edits)
    with pytest.raises(BackendError, match="autograd"):
        decode_head_select_(input.requires_grad_(), weight, *state.values(), backend="cuda")
    assert all(torch.equal(state[name], before[name]) for name in state)
