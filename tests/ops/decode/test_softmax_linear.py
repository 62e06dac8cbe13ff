"""decode_softmax_linear against attention over vectors that were multiplied with its projections, and float64."""

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuseopt.bench.suites.kernels import launches_of
from fuseopt.errors import BackendError
from fuseopt.ops import decode_softmax_linear
from fuseopt.ops.decode.linear import FEW_ROWS, MAX_ROWS
from fuseopt.ops.decode.softmax_linear import GROUP, MOST_GROUPS, decode_softmax_linear_reference
from tests.ops.cases import error, examples, to_float64
from tests.ops.variations import poisoned_allocations

HALVES = (torch.bfloat16, torch.float16)
# Part of a kernel's name: the one for float32 is an instance of decode_linear_fma_kernel, for FmaInput::kSoftmax.
KERNELS = {torch.bfloat16: "decode_softmax_linear_kernel", torch.float32: "FmaInput)2"}


def test_is_attention_with_its_projections(each_device: torch.device) -> None:
    """q = x Q, out = softmax(q K^T) V O, with Q K^T and V O multiplied ahead of the call."""
    torch.manual_seed(0)
    rows, heads, slots, head_dim, width = 3, 4, 6, 5, 16
    x, query, output = (
        torch.randn(rows, width),
        torch.randn(heads, head_dim, width),
        torch.randn(heads, head_dim, width),
    )
    keys, values = torch.randn(2, heads, slots, head_dim)
    attended = F.scaled_dot_product_attention(torch.einsum("rw,hdw->hrd", x, query), keys, values, scale=1.0)
    expected = x + torch.einsum("hrd,hdw->rw", attended, output)
    scores = x @ (keys @ query).flatten(0, 1).T
    got = decode_softmax_linear(scores, (values @ output).flatten(0, 1).T, heads, residual=x)
    torch.testing.assert_close(got, expected)


def test_wrong_shapes_groups_and_too_many_rows_are_refused_by_name() -> None:
    scores, weight = torch.randn(2, 12), torch.randn(5, 12)
    for arguments, options, words in (
        ((scores, torch.randn(12), 2), {}, "weight must be [N, K]"),
        ((scores, torch.randn(5, 13), 2), {}, "scores"),
        ((scores, weight, 5), {}, "12 scores are no 5 groups of one size"),
        ((scores, weight, 0), {}, "12 scores are no 0 groups of one size"),
        ((scores, weight, 2), {"residual": torch.randn(2, 4)}, "residual"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            decode_softmax_linear(*arguments, **options)
    with pytest.raises(BackendError, match="256 rows at most, not 257"):
        decode_softmax_linear(torch.randn(MAX_ROWS + 1, 12), weight, 2, backend="cuda")
    assert decode_softmax_linear(torch.randn(MAX_ROWS + 1, 12), weight, 2).shape == (MAX_ROWS + 1, 5)


def test_a_gradient_takes_the_reference() -> None:
    scores, weight = torch.randn(2, 12, requires_grad=True), torch.randn(5, 12)
    output = decode_softmax_linear(scores, weight, 3)
    (gradient,) = torch.autograd.grad(output.sum(), scores)
    assert gradient.abs().max() > 0


def check(
    rows: int, groups: int, outputs: int, dtype: torch.dtype, residual: torch.dtype | None, scale: float = 4.0
) -> Tensor:
    """Against float64: the error is no larger than that of PyTorch's two operations."""
    device = torch.device("cuda")
    scores = scale * torch.randn(rows, groups * GROUP, device=device)
    weight = torch.randn(groups * GROUP, outputs, device=device).to(dtype)
    # As masks leave them, one group with a single score.
    lowest = torch.finfo(torch.float32).min
    scores.view(rows, groups, GROUP)[0, -1, 1:] = lowest
    scores.view(rows, groups, GROUP)[-1, 0, ::3] = float("-inf")
    added = None if residual is None else torch.randn(rows, outputs, device=device).to(residual)
    with poisoned_allocations():
        got = decode_softmax_linear(scores, weight.T, groups, residual=added, backend="cuda")
    exact = decode_softmax_linear_reference(
        *map(to_float64, (scores, weight.T)), groups, residual=None if added is None else added.double()
    )
    composed = decode_softmax_linear_reference(scores, weight.T, groups, residual=added)
    assert got.dtype is composed.dtype
    tiny = torch.finfo(got.dtype).eps
    assert error([got], [exact]) <= 1.5 * error([composed], [exact]) + tiny
    return got


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("residual", ["none", "same", "float32"])
@pytest.mark.parametrize(
    ("groups", "outputs"), [(1, 8), (3, 40), (6, 512), (8, 512), (12, 768), (16, 1024), (16, 1600)]
)
@pytest.mark.parametrize("rows", [1, 2, 4, 7, 8, 9, 16])
def test_kernel_against_float64(rows: int, groups: int, outputs: int, dtype: torch.dtype, residual: str) -> None:
    torch.manual_seed(rows)
    check(rows, groups, outputs, dtype, {"none": None, "same": dtype, "float32": torch.float32}[residual])


@pytest.mark.gpu
@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 16), st.integers(1, MOST_GROUPS), st.integers(1, 60), st.floats(0.01, 300), st.booleans())
def test_random_sizes_scales_and_residuals_against_float64(
    rows: int, groups: int, eighths: int, scale: float, has_residual: bool
) -> None:
    torch.manual_seed(eighths)
    check(rows, groups, 8 * eighths, torch.bfloat16, torch.bfloat16 if has_residual else None, scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KERNELS, ids=str)
@pytest.mark.parametrize(
    ("change", "takes"),
    [
        ("nothing", True),
        ("weight [N, K]", False),
        ("scores of another dtype", False),
        ("groups of another size", False),
        ("too many groups", False),
        ("too many rows", False),
        ("columns of no whole vectors", False),
        ("a weight that is not aligned", False),
        ("a float64 weight", False),
    ],
)
def test_which_calls_are_one_launch(change: str, takes: bool, dtype: torch.dtype) -> None:
    rows, groups, slots, outputs = 2, 3, GROUP, 48
    kernel = KERNELS[dtype]
    takes = takes or (change == "too many groups" and dtype is torch.float32)
    if change == "groups of another size":
        slots = 96
    if change == "too many groups":
        groups = MOST_GROUPS + 1
    if change == "too many rows":
        rows = FEW_ROWS + 1
    if change == "columns of no whole vectors":
        outputs = 44 if dtype is torch.bfloat16 else 46
    if change == "a float64 weight":
        dtype = torch.float64
    scores = torch.randn(rows, groups * slots, device="cuda")
    weight = torch.randn(groups * slots, outputs, device="cuda").to(dtype).T
    if change == "weight [N, K]":
        weight = weight.contiguous()
    if change == "scores of another dtype":
        scores = scores.half()
    if change == "a weight that is not aligned":
        weight = torch.cat([weight.new_zeros(1), weight.T.flatten()])[1:].view(groups * slots, outputs).T
    results = []
    launches = launches_of(lambda: results.append(decode_softmax_linear(scores, weight, groups, backend="cuda")))
    assert sum(kernel in launch.name for launch in launches) == takes
    assert takes == (len([launch for launch in launches if "Memcpy" not in launch.name]) == 1)
    exact = decode_softmax_linear_reference(*map(to_float64, (scores, weight)), groups)
    assert error(results, [exact]) <= 8 * max(torch.finfo(each).eps for each in (dtype, scores.dtype))


@pytest.mark.gpu
def test_is_the_same_from_run_to_run_and_in_a_graph() -> None:
    scores = torch.randn(5, 12 * GROUP, device="cuda")
    weight = torch.randn(12 * GROUP, 768, device="cuda").bfloat16().T
    first = decode_softmax_linear(scores, weight, 12, pdl=True)
    assert all(torch.equal(decode_softmax_linear(scores, weight, 12, pdl=True), first) for _ in range(20))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chained = decode_softmax_linear(scores, weight, 12, pdl=True, prefetch=[weight])
    graph.replay()
    assert torch.equal(chained, first)


@pytest.mark.gpu
def test_nan_stays_in_its_row() -> None:
    scores = torch.randn(3, 2 * GROUP, device="cuda")
    scores[1, 7] = float("nan")
    weight = torch.randn(2 * GROUP, 16, device="cuda").bfloat16().T
    output = decode_softmax_linear(scores, weight, 2)
    assert output.isnan().all(dim=1).tolist() == [False, True, False]
