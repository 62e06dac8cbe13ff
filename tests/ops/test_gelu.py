import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.activations import NewGELUActivation

from fuseopt.ops import gelu
from tests.ops.cases import DTYPES, Case, RawCalls, cases

every_case = pytest.mark.parametrize("case", cases("gelu"))


@every_case
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_zeros_large_values_and_nan_with_their_gradients_equal_torch(
    case: Case, dtype: torch.dtype, approximate: str
) -> None:
    values = [0.0, -0.0, 1e-7, -1e-7, 3.0, -3.0, 8.0, -8.0, 30.0, -30.0, 1e4, -1e4, math.nan]
    input = torch.tensor(values, device=case.device, dtype=dtype, requires_grad=True)
    output = case(input, approximate=approximate)
    expected = F.gelu(input, approximate=approximate)
    torch.testing.assert_close(output, expected, equal_nan=True)
    finite = input.detach()[:12].requires_grad_()
    (gradient,) = torch.autograd.grad(case(finite, approximate=approximate).sum(), finite)
    (expected_gradient,) = torch.autograd.grad(F.gelu(finite, approximate=approximate).sum(), finite)
    torch.testing.assert_close(gradient, expected_gradient)


@every_case
def test_erf_and_tanh_are_told_apart(case: Case) -> None:
    input = torch.linspace(-4, 4, 101, device=case.device)
    assert (case(input) - case(input, approximate="tanh")).abs().max() > 1e-4
    torch.testing.assert_close(case(input), input * 0.5 * (1 + torch.erf(input / math.sqrt(2))))
    torch.testing.assert_close(case(input, approximate="tanh"), NewGELUActivation()(input))


@every_case
@settings(max_examples=15, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES[:3]),
    bias_dtype=st.sampled_from(DTYPES[:3]),
    output_dtype=st.sampled_from([None, *DTYPES[:3]]),
    rows=st.integers(0, 5),
    columns=st.integers(1, 70),
    seed=st.integers(0, 2**31),
)
def test_bias_is_added_before_any_rounding(
    case: Case,
    dtype: torch.dtype,
    bias_dtype: torch.dtype,
    output_dtype: torch.dtype | None,
    rows: int,
    columns: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    input = torch.randn(rows, columns).to(case.device, dtype)
    bias = torch.randn(columns).to(case.device, bias_dtype)
    output = case(input, bias, output_dtype=output_dtype)
    expected = F.gelu(input.double() + bias.double()).to(output_dtype or dtype)
    eps = torch.finfo(output.dtype).eps  # at most the neighbouring value
    torch.testing.assert_close(output, expected, rtol=max(eps, 1e-5), atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, bias_dtype", [(d, b) for d in DTYPES for b in DTYPES[:3]], ids=str)
@pytest.mark.parametrize(
    "rows, columns", [(8, 3072), (64, 24), (65, 3072), (1000, 768), (3000, 8), (70, 33), (0, 16), (5000, 1024)]
)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_bias_gradient_in_one_pass(
    dtype: torch.dtype, bias_dtype: torch.dtype, rows: int, columns: int, approximate: str
) -> None:
    generator = torch.Generator("cuda").manual_seed(rows + columns)
    input, bias, grad = (
        torch.randn(shape, device="cuda", dtype=torch.float64, generator=generator).to(kind)
        for shape, kind in (((rows, columns), dtype), ((columns,), bias_dtype), ((rows, columns), dtype))
    )
    input.requires_grad_()
    bias.requires_grad_()
    with RawCalls() as calls:
        got = torch.autograd.grad(gelu(input, bias, approximate=approximate, backend="cuda"), (input, bias), grad)
    assert calls.names() == ["gelu_fwd.default", "gelu_bias_bwd.default"]
    wide = [tensor.detach().double().requires_grad_() for tensor in (input, bias)]
    exact = torch.autograd.grad(F.gelu(wide[0] + wide[1], approximate=approximate), wide, grad.double())
    # A sum over rows is as exact as its terms are large, however small it is itself.
    summed = exact[0].abs().sum(0).max().item() if rows else 0
    for actual, expected, tensor in zip(got, exact, (input, bias), strict=True):
        assert actual.dtype == tensor.dtype and actual.shape == tensor.shape
        step = max(torch.finfo(tensor.dtype).eps, torch.finfo(torch.float32).eps if dtype != torch.float64 else 0)
        size = expected.abs().max().item() if expected.numel() else 0
        tolerance = 8 * step * max(size, 1e-3)
        if tensor is bias:
            tolerance += torch.finfo(torch.float32 if dtype != torch.float64 else dtype).eps * summed
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)


@every_case
def test_unknown_approximations_and_wrong_biases_are_refused(case: Case) -> None:
    input = torch.randn(3, 8, device=case.device)
    with pytest.raises(ValueError, match="'none' or 'tanh'"):
        case(input, approximate="erf")
    with pytest.raises(ValueError, match="bias must have shape"):
        case(input, torch.zeros(1, device=case.device))
