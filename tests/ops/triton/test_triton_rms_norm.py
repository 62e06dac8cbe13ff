import itertools

import pytest
import torch

from fuseopt.ops.rms_norm import CAST_ORDERS
from fuseopt.ops.triton import rms_norm, rms_norm_bwd, rms_norm_fwd

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# One column; narrow rows, several to a program; odd widths; more tiles than programs; one dimension.
SHAPES = [(7, 1), (300, 3), (2, 3, 129), (70, 768), (9,)]
# Wider than the registers of the backward, with several rows to a program; and than the registers of the forward.
WIDE_CASES = [
    *((torch.float32, (5, columns)) for columns in (1537, 1600, 4096, 4099)),
    (torch.bfloat16, (6, 8200)),
    (torch.float64, (6, 4099)),
    (torch.float64, (2, 8195)),
]


def reference(input, weight, eps, offset):
    """RMSNorm in float64, with its rstd."""
    x = input.double()
    rstd = torch.rsqrt(x.square().mean(-1) + eps)
    y = x * rstd[..., None]
    return (y if weight is None else y * (weight.double() + offset)), rstd


def reference_gradients(grad_output, input, weight, eps, offset):
    x = input.detach().double().clone().requires_grad_()
    w = weight.detach().double().clone().requires_grad_()
    return torch.autograd.grad(reference(x, w, eps, offset)[0], (x, w), grad_output.double())


def forward(input, weight, eps=0.1, offset=0.0):
    """Without a rounding before the weight."""
    return rms_norm_fwd(input, weight, eps, CAST_ORDERS["input"], offset)


def backward(grad_output, input, weight, eps=0.1, offset=0.0):
    rstd = reference(input, None, eps, 0.0)[1].to(torch.float64 if input.dtype == torch.float64 else torch.float32)
    return rms_norm_bwd(grad_output, input, weight, rstd, offset, True)


@pytest.mark.parametrize(("dtype", "shape"), [*itertools.product(DTYPES, SHAPES), *WIDE_CASES], ids=str)
def test_forward_and_backward(device, assert_matches, dtype, shape):
    torch.manual_seed(0)
    input, grad_output = torch.randn(2, *shape, dtype=dtype, device=device)
    weight = torch.randn(shape[-1], dtype=dtype, device=device)
    output, rstd = forward(input, weight, offset=0.3)
    expected, expected_rstd = reference(input, weight, 0.1, 0.3)
    assert output.dtype == dtype
    assert_matches(output, expected)
    assert rstd.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_matches(rstd, expected_rstd)

    grad_input, grad_weight = backward(grad_output, input, weight, offset=0.3)
    expected_input, expected_weight = reference_gradients(grad_output, input, weight, 0.1, 0.3)
    assert (grad_input.dtype, grad_weight.dtype) == (dtype, dtype)
    assert_matches(grad_input, expected_input)
    assert_matches(grad_weight, expected_weight)


@pytest.mark.parametrize(
    ("input_dtype", "weight_dtype"),
    [(torch.float32, torch.float16), (torch.bfloat16, torch.float32), (torch.float32, torch.float64)],
    ids=str,
)
def test_outputs_and_gradients_of_mixed_dtypes_have_each_their_own(device, assert_matches, input_dtype, weight_dtype):
    torch.manual_seed(0)
    input = torch.randn(50, 129, dtype=input_dtype, device=device)
    grad_output = torch.randn(50, 129, dtype=weight_dtype, device=device)
    weight = torch.randn(129, dtype=weight_dtype, device=device)
    output, rstd = rms_norm_fwd(input, weight, 1e-6, CAST_ORDERS["t5"])
    assert (output.dtype, rstd.dtype) == (weight_dtype, torch.float32)
    assert_matches(output, reference(input, weight, 1e-6, 0.0)[0])

    grad_input, grad_weight = rms_norm_bwd(grad_output, input, weight, rstd, 0.0, True)
    expected_input, expected_weight = reference_gradients(grad_output, input, weight, 1e-6, 0.0)
    assert (grad_input.dtype, grad_weight.dtype) == (input_dtype, weight_dtype)
    assert_matches(grad_input, expected_input)
    assert_matches(grad_weight, expected_weight, torch.float32 if weight_dtype == torch.float64 else None)


def test_rounds_to_norm_dtype_before_the_weight(device):
    torch.manual_seed(0)
    input = torch.randn(20, 96, dtype=torch.float16, device=device)
    weight = torch.full((96,), 3.0, device=device)
    rounded, _ = rms_norm_fwd(input, weight, 1e-6, CAST_ORDERS["llama"])
    assert rounded.dtype == torch.float32
    xhat = reference(input, None, 1e-6, 0.0)[0]
    error = (rounded.double() / 3 - xhat.half().double()).abs()
    # A value next to the middle of two halves may round the other way, since rstd itself is rounded.
    assert (error > 1e-6).float().mean() < 0.01
    assert ((rounded.double() / 3 - xhat).abs() > 1e-5).float().mean() > 0.5


def test_float32_input_above_the_range_of_float16(device, assert_matches):
    torch.manual_seed(0)
    input = 1e6 * torch.randn(4, 512, device=device)
    weight = torch.randn(512, dtype=torch.float16, device=device)
    output, _ = rms_norm_fwd(input, weight, 1e-6, CAST_ORDERS["t5"])
    assert_matches(output, reference(input, weight, 1e-6, 0.0)[0])


@pytest.mark.parametrize("columns", [40, 4099, 8195])
def test_without_statistics_the_output_is_the_same(device, columns):
    torch.manual_seed(0)
    input, weight = torch.randn(3, columns, dtype=torch.float64, device=device), torch.randn(columns, device=device)
    for cast_order in CAST_ORDERS.values():
        expected, _ = rms_norm_fwd(input, weight, 1e-6, cast_order, 1.0)
        assert torch.equal(rms_norm(input, weight, 1e-6, cast_order, 1.0), expected)


def test_no_weight_counts_as_ones(device, assert_matches):
    torch.manual_seed(0)
    input, grad_output = torch.randn(2, 5, 40, device=device)
    output, rstd = forward(input, None, offset=1.0)
    assert_matches(output, reference(input, None, 0.1, 0.0)[0])
    grad_input, grad_weight = rms_norm_bwd(grad_output, input, None, rstd, 1.0, True)
    ones = torch.ones(40, device=device)
    assert_matches(grad_input, reference_gradients(grad_output, input, ones, 0.1, 0.0)[0])
    assert grad_weight.shape == (0,)


@pytest.mark.parametrize("columns", [40, 4099])
def test_a_frozen_weight_gets_no_gradient_and_the_input_the_same(device, columns):
    torch.manual_seed(0)
    input, grad_output = torch.randn(2, 5, columns, dtype=torch.float64, device=device)
    weight, rstd = input[0], torch.rand(5, dtype=torch.float64, device=device)
    grad_input, grad_weight = rms_norm_bwd(grad_output, input, weight, rstd, 0.0, False)
    assert torch.equal(grad_input, rms_norm_bwd(grad_output, input, weight, rstd, 0.0, True)[0])
    assert grad_weight.shape == (0,)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:, :, 5:45],
        lambda t: t[:, ::2, :40],
        lambda t: t[..., ::2],
        lambda t: t.transpose(0, 1),
        lambda t: t.transpose(1, 2),
        lambda t: t[:1, :1].expand(4, 6, -1),
        lambda t: t[..., :1].expand(-1, -1, 64),
    ],
    ids=["slice", "step", "column step", "rows transposed", "columns transposed", "rows expanded", "columns expanded"],
)
def test_strided_inputs_are_read_right_and_not_written_to(device, assert_matches, view):
    torch.manual_seed(0)
    storage = torch.randn(2, 4, 6, 64, device=device)
    before = storage.clone()
    input, grad_output = view(storage[0]), view(storage[1])
    weight = torch.randn(2 * input.shape[-1], device=device)[::2]
    assert_matches(forward(input, weight)[0], reference(input, weight, 0.1, 0.0)[0])
    gradients = backward(grad_output, input, weight)
    for actual, expected in zip(gradients, reference_gradients(grad_output, input, weight, 0.1, 0.0), strict=True):
        assert_matches(actual, expected)
    assert torch.equal(storage, before)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0), (0,)], ids=str)
def test_empty_inputs_give_empty_outputs_and_zero_gradients(device, shape):
    input, weight = torch.empty(shape, device=device), torch.ones(shape[-1], device=device)
    output, rstd = forward(input, weight)
    assert (output.shape, rstd.shape) == (shape, shape[:-1])
    assert rstd.isnan().all()
    grad_input, grad_weight = rms_norm_bwd(output, input, weight, rstd, 0.0, True)
    assert grad_input.shape == shape
    assert torch.equal(grad_weight, torch.zeros(shape[-1], device=device))


@pytest.mark.parametrize(("dtype", "columns"), [(torch.float32, 768), (torch.float64, 4099)], ids=str)
def test_backward_gives_the_same_bits(device, dtype, columns):
    torch.manual_seed(0)
    input, grad_output = torch.randn(2, 20, columns, dtype=dtype, device=device)
    weight, rstd = input[0], torch.rand(20, dtype=dtype, device=device)
    first = rms_norm_bwd(grad_output, input, weight, rstd, 0.0, True)
    second = rms_norm_bwd(grad_output, input, weight, rstd, 0.0, True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
def test_more_than_2_to_31_elements(assert_matches):
    rows = 2**31 // 4096 + 5
    input = torch.randn(rows, 4096, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(4096, dtype=torch.bfloat16, device="cuda")
    output, rstd = forward(input, weight)
    assert_matches(output[-3:], reference(input[-3:], weight, 0.1, 0.0)[0])
    grad_input, _ = rms_norm_bwd(input, input, weight, rstd, 0.0, True)
    assert_matches(grad_input[-3:], reference_gradients(input[-3:], input[-3:], weight, 0.1, 0.0)[0])
