import itertools

import pytest
import torch
from torch.nn import functional as F

from fuseopt.ops.triton import layer_norm, layer_norm_bwd, layer_norm_fwd

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# Narrow rows, several to a program; odd widths; more tiles than programs; one dimension.
SHAPES = [(7, 2), (300, 3), (2, 3, 129), (70, 768), (9,)]
# Rows that a forward in float32 walks along; wider than the registers of the backward, with several to a program; and
# than those of the forward.
WIDE_CASES = [
    *((torch.float32, (5, columns)) for columns in (1537, 1600, 4096, 4099)),
    (torch.bfloat16, (6, 8200)),
    (torch.float64, (6, 4099)),
    (torch.float64, (2, 8195)),
]


def reference(input, weight, bias, eps=0.1):
    """LayerNorm in float64, with mean and rstd."""
    x = input.double()
    weight, bias = (None if parameter is None else parameter.double() for parameter in (weight, bias))
    rstd = torch.rsqrt(x.var(-1, correction=0) + eps)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps), x.mean(-1), rstd


def statistics(input, eps=0.1):
    """Mean and rstd as the forward returns them."""
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    return [statistic.to(dtype) for statistic in reference(input, None, None, eps)[1:]]


def reference_gradients(grad_output, input, weight, eps=0.1):
    x, w = (tensor.detach().double().clone().requires_grad_() for tensor in (input, weight))
    b = torch.zeros_like(w, requires_grad=True)
    return torch.autograd.grad(reference(x, w, b, eps)[0], (x, w, b), grad_output.double())


@pytest.mark.parametrize(("dtype", "shape"), [*itertools.product(DTYPES, SHAPES), *WIDE_CASES], ids=str)
def test_forward_and_backward(device, assert_matches, dtype, shape):
    torch.manual_seed(0)
    input, grad_output = torch.randn(2, *shape, dtype=dtype, device=device)
    weight, bias = torch.randn(2, shape[-1], dtype=dtype, device=device)
    output, mean, rstd = layer_norm_fwd(input, weight, bias, 0.1)
    assert output.dtype == dtype
    assert mean.dtype == rstd.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for actual, expected in zip((output, mean, rstd), reference(input, weight, bias), strict=True):
        assert_matches(actual, expected)

    gradients = layer_norm_bwd(grad_output, input, weight, *statistics(input), True, True)
    for actual, expected in zip(gradients, reference_gradients(grad_output, input, weight), strict=True):
        assert actual.dtype == dtype
        assert_matches(actual, expected)


@pytest.mark.parametrize(
    ("dtype", "columns"), [(torch.float32, 768), (torch.float32, 4099), (torch.float64, 8195)], ids=str
)
def test_a_mean_far_from_zero(device, dtype, columns):
    """The variance is not lost in it; nor where a row begins with what lies far from the rest."""
    torch.manual_seed(0)
    input = torch.randn(6, columns, dtype=dtype, device=device)
    input[:3] += 4096
    input[3:, 0] = 1e4
    _, mean, rstd = layer_norm_fwd(input, None, None, 1e-5)
    _, expected_mean, expected_rstd = reference(input, None, None, 1e-5)
    epsilon = torch.finfo(dtype).eps
    # The interpreter adds a row up one by one, behind its first, large element.
    assert ((mean - expected_mean).abs() / input.abs().mean(1)).max() < 32 * epsilon
    # Each deviation has the rounding of a mean of some thousands; a difference of squares would have its square.
    assert (rstd / expected_rstd - 1).abs().max() < 4096 * epsilon


@pytest.mark.parametrize(
    ("input_dtype", "weight_dtype", "output_dtype"),
    [
        (torch.float32, torch.float16, torch.float16),
        (torch.bfloat16, torch.float32, None),
        (torch.float32, torch.float64, torch.float32),
    ],
    ids=str,
)
def test_outputs_and_gradients_of_mixed_dtypes_have_each_their_own(
    device, assert_matches, input_dtype, weight_dtype, output_dtype
):
    torch.manual_seed(0)
    input = torch.randn(50, 129, dtype=input_dtype, device=device)
    weight, bias = torch.randn(2, 129, dtype=weight_dtype, device=device)
    output, mean, rstd = layer_norm_fwd(input, weight, bias, 1e-6, output_dtype)
    assert (output.dtype, rstd.dtype) == (output_dtype or input_dtype, torch.float32)
    assert_matches(output, reference(input, weight, bias, 1e-6)[0])

    grad_output = torch.randn(50, 129, dtype=output.dtype, device=device)
    gradients = layer_norm_bwd(grad_output, input, weight, mean, rstd, True, True)
    assert [gradient.dtype for gradient in gradients] == [input_dtype, weight_dtype, weight_dtype]
    for actual, expected in zip(gradients, reference_gradients(grad_output, input, weight, 1e-6), strict=True):
        assert_matches(actual, expected, torch.float32 if actual.dtype == torch.float64 else None)


@pytest.mark.parametrize("columns", [40, 4099, 8195])
def test_without_statistics_the_output_is_the_same(device, columns):
    torch.manual_seed(0)
    input, weight = torch.randn(3, columns, dtype=torch.float64, device=device), torch.randn(columns, device=device)
    for parameters in ((weight, None), (None, weight), (weight, weight)):
        expected, _, _ = layer_norm_fwd(input, *parameters, 1e-6)
        assert torch.equal(layer_norm(input, *parameters, 1e-6), expected)


@pytest.mark.parametrize("columns", [40, 4099])
def test_gradients_that_are_not_needed(device, columns):
    torch.manual_seed(0)
    input, grad_output = torch.randn(2, 5, columns, dtype=torch.float64, device=device)
    arguments = grad_output, input, input[0], *statistics(input)
    everything = layer_norm_bwd(*arguments, True, True)
    for needed in ((True, False), (False, True), (False, False)):
        gradients = layer_norm_bwd(*arguments, *needed)
        for gradient, expected, is_needed in zip(gradients, everything, (True, *needed), strict=True):
            assert torch.equal(gradient, expected if is_needed else expected[:0])


@pytest.mark.parametrize("view", [lambda t: t[:, :1], lambda t: t[:, :1].expand(-1, 64)], ids=["one column", "equal"])
def test_rows_without_deviations(device, view):
    torch.manual_seed(0)
    input, grad_output = map(view, torch.randn(2, 7, 4, device=device))
    weight, bias = torch.randn(2, input.shape[-1], device=device)
    output, mean, rstd = layer_norm_fwd(input, weight, bias, 0.1)
    torch.testing.assert_close(output, bias.expand_as(output))
    torch.testing.assert_close(mean, input[:, 0])
    grad_input, grad_weight, grad_bias = layer_norm_bwd(grad_output, input, weight, mean, rstd, True, True)
    gradient = grad_output * weight
    torch.testing.assert_close(grad_input, (gradient - gradient.mean(-1, keepdim=True)) * rstd[:, None])
    torch.testing.assert_close(grad_weight, torch.zeros_like(weight))
    torch.testing.assert_close(grad_bias, grad_output.sum(0))


def test_no_parameters_count_as_ones_and_zeros(device, assert_matches):
    torch.manual_seed(0)
    input, grad_output = torch.randn(2, 5, 40, device=device)
    output, mean, rstd = layer_norm_fwd(input, None, None, 0.1)
    assert_matches(output, reference(input, None, None)[0])
    grad_input, grad_weight, grad_bias = layer_norm_bwd(grad_output, input, None, mean, rstd, False, True)
    expected = reference_gradients(grad_output, input, torch.ones(40, device=device))
    assert_matches(grad_input, expected[0])
    assert_matches(grad_bias, expected[2])
    assert grad_weight.shape == (0,)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:, :, 5:45],
        lambda t: t[..., ::2],
        lambda t: t.transpose(0, 1),
        lambda t: t[:1, :1].expand(4, 6, -1),
    ],
    ids=["slice", "column step", "rows transposed", "rows expanded"],
)
def test_strided_inputs_gradients_and_parameters_are_read_right(device, assert_matches, view):
    torch.manual_seed(0)
    storage = torch.randn(2, 4, 6, 64, device=device)
    input, grad_output = view(storage[0]), view(storage[1])
    weight, bias = torch.randn(2, 2 * input.shape[-1], device=device)[:, ::2]
    assert_matches(layer_norm_fwd(input, weight, bias, 0.1)[0], reference(input, weight, bias)[0])
    gradients = layer_norm_bwd(grad_output, input, weight, *statistics(input), True, True)
    for actual, expected in zip(gradients, reference_gradients(grad_output, input, weight), strict=True):
        assert_matches(actual, expected)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0), (0,)], ids=str)
def test_empty_inputs_give_empty_outputs_and_zero_gradients(device, shape):
    input, weight = torch.empty(shape, device=device), torch.ones(shape[-1], device=device)
    output, mean, rstd = layer_norm_fwd(input, weight, weight, 0.1)
    assert (output.shape, mean.shape, rstd.shape) == (shape, shape[:-1], shape[:-1])
    assert mean.isnan().all() and rstd.isnan().all()
    grad_input, *parameters = layer_norm_bwd(output, input, weight, mean, rstd, True, True)
    assert grad_input.shape == shape
    assert all(torch.equal(gradient, torch.zeros(shape[-1], device=device)) for gradient in parameters)


def test_parameters_of_another_shape_are_refused(device):
    input = torch.ones(3, 8, device=device)
    with pytest.raises(RuntimeError, match="weight must have shape \\(8,\\), not \\(1,\\)"):
        layer_norm(input, input[0, :1], None, 0.1)
    with pytest.raises(RuntimeError, match="bias must have shape \\(8,\\), not \\(3, 8\\)"):
        layer_norm(input, None, input, 0.1)


@pytest.mark.parametrize(("dtype", "columns"), [(torch.float32, 768), (torch.float64, 4099)], ids=str)
def test_backward_gives_the_same_bits(device, dtype, columns):
    torch.manual_seed(0)
    input, grad_output = torch.randn(2, 20, columns, dtype=dtype, device=device)
    arguments = grad_output, input, input[0], *statistics(input), True, True
    assert all(torch.equal(a, b) for a, b in zip(layer_norm_bwd(*arguments), layer_norm_bwd(*arguments), strict=True))


@pytest.mark.gpu
def test_more_than_2_to_31_elements(assert_matches):
    rows = 2**31 // 4096 + 5
    input = torch.randn(rows, 4096, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(4096, dtype=torch.bfloat16, device="cuda")
    output, mean, rstd = layer_norm_fwd(input, weight, weight, 0.1)
    assert_matches(output[-3:], reference(input[-3:], weight, weight)[0])
    grad_input, _, _ = layer_norm_bwd(input, input, weight, mean, rstd, True, True)
    assert_matches(grad_input[-3:], reference_gradients(input[-3:], input[-3:], weight)[0])
