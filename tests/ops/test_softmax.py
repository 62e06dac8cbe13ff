import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseopt.ops.softmax import softmax_reference
from tests.axes import covering
from tests.ops.cases import DTYPES, Case, cases, error
from tests.ops.variations import poisoned_allocations

# Of float32 and of 16 bits: all that clusters of 8 and of 16 hold in registers, and one more.
CLUSTER_EDGES = [131_075, 131_076, 262_144, 262_147, 262_148, 262_151, 262_152, 524_295, 524_296]

every_case = pytest.mark.parametrize("case", cases("softmax"))


@every_case
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_columns_are_exactly_zero(case: Case, dtype: torch.dtype) -> None:
    input = torch.randn(2, 3, 4, 9, device=case.device, dtype=dtype)
    mask = torch.zeros(2, 1, 1, 9, device=case.device, dtype=dtype)
    mask[..., 5:] = -math.inf
    output = case(input, mask)
    assert (output[..., 5:] == 0).all()
    torch.testing.assert_close(output[..., :5], torch.softmax(input[..., :5].double(), -1).to(dtype))


@every_case
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_minus_infinity_is_nan_and_alone(case: Case, dtype: torch.dtype) -> None:
    input = torch.randn(3, 7, device=case.device, dtype=dtype)
    mask = torch.zeros(3, 7, device=case.device, dtype=dtype)
    mask[1] = -math.inf
    output = case(input, mask)
    assert output[1].isnan().all()
    torch.testing.assert_close(output[[0, 2]], torch.softmax(input[[0, 2]].double(), -1).to(dtype))


@every_case
@covering(dtype=DTYPES, columns=[16_389, 50_257, 130_003], masked=[False, True])
def test_wide_rows_of_which_little_is_seen(case: Case, columns: int, dtype: torch.dtype, masked: bool) -> None:
    """Most threads see nothing finite, and what the others see has no exponential but from its own maximum."""
    torch.manual_seed(0)
    rows = 300 if case.device.type == "cuda" else 2
    input = (torch.randn(rows, columns, device=case.device) - 200).to(dtype)
    hidden = torch.ones_like(input, dtype=torch.bool).scatter_(
        1, torch.randint(columns, (rows, 3), device=case.device), False
    )
    exact = torch.softmax(input.double().masked_fill(hidden, -math.inf), -1)
    mask = torch.zeros(rows, columns, device=case.device, dtype=dtype).masked_fill(hidden, -math.inf)
    arguments = (input, mask) if masked else (input + mask,)
    arguments[0].requires_grad_()
    output = case(*arguments)
    assert (output[hidden] == 0).all()
    torch.testing.assert_close(output, exact.to(dtype))
    grad = torch.randn_like(output)
    expected = exact * (grad.double() - (grad.double() * exact).sum(-1, keepdim=True))
    (found,) = torch.autograd.grad(output, arguments[:1], grad)
    torch.testing.assert_close(
        found, expected.to(dtype), atol=4 * torch.finfo(dtype).eps, rtol=4 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("case", [case for case in cases("softmax") if case.id.endswith("cuda-cuda")])
@pytest.mark.parametrize("rows", [8, 120])
@pytest.mark.parametrize("columns", [*range(65_543, 262_144, 30_011), *CLUSTER_EDGES])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_rows_that_a_cluster_shares(case: Case, dtype: torch.dtype, columns: int, rows: int, masked: bool) -> None:
    """Without a mask threads hold rows of some sizes whole, at most 262147 columns of float32 or 524295 of 16 bits."""
    torch.manual_seed(0)
    input = torch.randn(rows, columns, device=case.device)
    input[:, [0, -1]] += 20
    input[1] = -math.inf
    input[2, columns // 3] = math.nan
    input[3, columns // 2 :] = -math.inf
    input = input.to(dtype)
    mask = torch.randn(rows, columns, device=case.device).to(dtype) if masked else None
    exact = torch.softmax(input.double() * 0.5 + (0.0 if mask is None else mask.double()), -1)
    with poisoned_allocations():
        output = case(input, mask, scale=0.5)
    assert output[1:3].isnan().all()
    assert (output[3, columns // 2 :] == 0).all()
    # Relative: an element is a millionth, and float16 has a few digits of that.
    least = torch.finfo(dtype).smallest_normal
    tolerance = 64 * torch.finfo(dtype).eps if dtype == torch.float32 else torch.finfo(dtype).eps
    rest = [0, *range(3, rows)]
    assert ((output[rest] - exact[rest]).abs() <= tolerance * exact[rest].clamp(min=least)).all()


@pytest.mark.parametrize("case", [case for case in cases("softmax") if case.id.endswith("cuda-cuda")])
@pytest.mark.parametrize("rows", [3, 1000])
@pytest.mark.parametrize("columns", [48, 768, 2048, 2052, 2056, 2057, 3000, 4095, 4096, 4100, 4104])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_gradient_over_rows_of_whole_vectors_and_others(
    case: Case, dtype: torch.dtype, columns: int, rows: int
) -> None:
    torch.manual_seed(0)
    input = (4 * torch.randn(rows, columns, device=case.device)).to(dtype).requires_grad_()
    with poisoned_allocations():
        output = case(input, scale=0.5)
    exact_output = output.detach().double()
    grad = torch.randn_like(output)
    with poisoned_allocations():
        (got,) = torch.autograd.grad(output, input, grad)
    projected = grad.double() - (grad.double() * exact_output).sum(-1, keepdim=True)
    assert error([got], [0.5 * exact_output * projected]) <= 4 * torch.finfo(dtype).eps


@every_case
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_lowest_number_as_mask(case: Case, dtype: torch.dtype) -> None:
    """transformers masks with finfo.min: a row masked throughout is then spread evenly, not NaN."""
    input = torch.randn(2, 8, device=case.device, dtype=dtype)
    mask = torch.full((2, 8), torch.finfo(dtype).min, device=case.device, dtype=dtype)
    mask[0, :4] = 0
    output = case(input, mask)
    assert (output[0, 4:] == 0).all() and output.isfinite().all()
    torch.testing.assert_close(output, softmax_reference(input, mask))


@every_case
@settings(max_examples=20, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES[:3]),
    shape=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    kept=st.integers(0, 31),
    scale=st.sampled_from([1.0, 0.125, -2.0, 0.0]),
    spread=st.sampled_from([1.0, 100.0]),
    seed=st.integers(0, 2**31),
)
def test_output_and_gradient_with_a_mask_of_any_broadcastable_shape_at_any_scale(
    case: Case, dtype: torch.dtype, shape: list[int], kept: int, scale: float, spread: float, seed: int
) -> None:
    torch.manual_seed(seed)
    input = (torch.randn(shape) * spread).to(case.device, dtype).requires_grad_()
    mask_shape = [size if kept >> i & 1 else 1 for i, size in enumerate(shape)]
    mask = (torch.randn(mask_shape[seed % len(shape) :]) * spread).to(case.device, dtype)
    exact_input = input.detach().double().requires_grad_()
    exact = softmax_reference(exact_input, mask.double(), scale=scale)
    output = case(input, mask, scale=scale)
    assert error([output], [exact]) <= max(torch.finfo(dtype).eps, 1e-4)
    if dtype == torch.float32:  # in half precision the backward starts from a rounded output
        grad_output = torch.randn_like(output)
        (grad,) = torch.autograd.grad(output, input, grad_output)
        (exact_grad,) = torch.autograd.grad(exact, exact_input, grad_output.double())
        assert error([grad], [exact_grad]) <= 1e-3


@every_case
def test_gradient_of_a_position_bias(case: Case) -> None:
    """T5's bias [1, heads, queries, keys] is learned and shared by the batch."""
    input = torch.randn(3, 2, 4, 5, device=case.device, requires_grad=True)
    bias = torch.randn(1, 2, 4, 5, device=case.device, requires_grad=True)
    weights = torch.randn(3, 2, 4, 5, device=case.device)
    actual = torch.autograd.grad((case(input, bias, scale=0.5) * weights).sum(), (input, bias))
    expected = torch.autograd.grad(((input * 0.5 + bias).softmax(-1) * weights).sum(), (input, bias))
    torch.testing.assert_close(actual, expected)


@every_case
@pytest.mark.parametrize("dim", [0, 1, -2, 2, -1])
def test_softmax_over_any_dimension_equals_torch(case: Case, dim: int) -> None:
    input = torch.randn(3, 4, 5, device=case.device)
    mask = torch.randn(4, 1, device=case.device)
    torch.testing.assert_close(case(input, mask, dim=dim), torch.softmax(input + mask, dim))


@every_case
def test_logits_that_overflow_in_float16(case: Case) -> None:
    input = torch.tensor([[6e4, 6e4, -6e4], [-6e4, -6e4, -6e4]], device=case.device, dtype=torch.float16)
    expected = torch.tensor([[0.5, 0.5, 0.0], [1 / 3] * 3], device=case.device, dtype=torch.float16)
    torch.testing.assert_close(case(input, scale=4.0), expected)


@pytest.mark.parametrize("case", [case for case in cases("softmax") if "reference" not in case.id])
@covering(
    scale=[-0.3, 0.7, 0.0],
    dtype=DTYPES,
    columns=[7, 255, 256, 1000, 3001, 16_384, 32_768, 50_257, 131_072, 262_143, 262_144],
)
def test_only_differences_between_logits_are_scaled(case: Case, scale: float, dtype: torch.dtype, columns: int) -> None:
    """Rounded products lose digits of large logits, and differ from a fused `x * scale - max` by 1e31 for finfo.min."""
    torch.manual_seed(0)
    for rows in (9, max(2**25 // columns, 300)) if case.device.type == "cuda" else (4,):
        input = (3e4 + 10 * torch.randn(rows, columns, device=case.device)).to(dtype)
        input[0], input[1] = torch.finfo(dtype).min, torch.finfo(dtype).max
        input[2, columns // 2 :], input[2, : columns // 2] = torch.finfo(dtype).min, torch.finfo(dtype).max
        exact = torch.softmax(input.double() * scale, -1)
        relative = {torch.float32: 3e-5, torch.float64: 1e-10}.get(dtype, torch.finfo(dtype).eps)
        least = max(torch.finfo(dtype).smallest_normal, 1e-30)  # smaller ones may be flushed to zero
        error = (case(input, scale=scale).double() - exact).abs() / exact.clamp_min(least)
        assert (error <= relative).all()


@every_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_output_dtype_under_autocast_is_torchs(case: Case, dtype: torch.dtype) -> None:
    input = torch.randn(4, 8, device=case.device, dtype=dtype)
    with torch.autocast(case.device.type, dtype):
        output, expected = case(input), torch.softmax(input, -1)
    assert output.dtype == expected.dtype
    torch.testing.assert_close(output, expected)


@every_case
def test_masks_of_a_wrong_dtype_or_shape_are_refused(case: Case) -> None:
    input = torch.randn(3, 4, device=case.device)
    with pytest.raises(TypeError, match="floating point"):
        case(input, torch.ones(3, 4, device=case.device, dtype=torch.bool))
    for shape in ((3, 3), (2, 3, 4)):
        with pytest.raises(RuntimeError):
            case(input, torch.zeros(shape, device=case.device))
