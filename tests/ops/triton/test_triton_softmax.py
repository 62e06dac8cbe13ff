import pytest
import torch

from fuseopt.ops.triton import softmax_bwd, softmax_fwd
from tests.ops.variations import every_view_of_rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# One column; narrow rows, several to a program; odd widths; one dimension; wider than the registers of the backward,
# and of the forward, with rows that start at every offset from a 16-byte boundary.
SHAPES = [(7, 1), (300, 3), (2, 3, 129), (70, 768), (9,), (3, 16500), (9, 33003), (2, 40000)]


def reference(input, mask=None, scale=1.0):
    logits = input.double() * scale
    return (logits if mask is None else logits + mask.double()).softmax(-1)


def reference_gradient(grad_output, output, scale):
    g, y = grad_output.double(), output.double()
    return scale * y * (g - (g * y).sum(-1, keepdim=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_backward(device, assert_matches, dtype, shape):
    torch.manual_seed(0)
    # Widely spread, so that a few elements of a wide row carry it: else all of them are subnormal in float16.
    input = 4 * torch.randn(shape, dtype=dtype, device=device)
    grad_output = torch.randn(shape, dtype=dtype, device=device)
    output = softmax_fwd(input, None, 0.7, dtype)
    assert output.dtype == dtype
    assert_matches(output, reference(input, scale=0.7))
    if shape[-1] > 1:  # the gradient of one column is exactly 0
        assert_matches(softmax_bwd(grad_output, output, 0.7, dtype), reference_gradient(grad_output, output, 0.7))


@pytest.mark.parametrize("columns", [100, 33003])
def test_output_dtype_and_negative_scale(device, assert_matches, columns):
    torch.manual_seed(0)
    input = torch.randn(3, columns, dtype=torch.float16, device=device)
    output = softmax_fwd(input, None, -2.5, torch.float32)
    assert output.dtype == torch.float32
    assert_matches(output, reference(input, scale=-2.5))
    grad_output = torch.randn(3, columns, dtype=torch.float32, device=device)
    grad_input = softmax_bwd(grad_output, output, -2.5, torch.float16)
    assert grad_input.dtype == torch.float16
    assert_matches(grad_input, reference_gradient(grad_output, output, -2.5))


MASK_SHAPES = [
    (2, 1, 5, -1),
    (2, 1, 1, -1),
    (2, 3, 5, 1),
    (1, 3, 1, -1),
    (1, 3, 5, -1),
    (5, -1),
    (-1,),
    (1, 1, 1, 1),
    (),
]


@pytest.mark.parametrize(
    ("columns", "mask_shape"),
    [(50, shape) for shape in MASK_SHAPES] + [(32771, shape) for shape in MASK_SHAPES[:3:2]],
    ids=str,
)
def test_mask_is_broadcast(device, assert_matches, mask_shape, columns):
    torch.manual_seed(0)
    input = torch.randn(2, 3, 5, columns, dtype=torch.float16, device=device)
    mask = torch.randn([columns if size == -1 else size for size in mask_shape], device=device)
    assert_matches(softmax_fwd(input, mask, 0.5, torch.float32), reference(input, mask, 0.5))


@pytest.mark.parametrize("mask_dtype", [torch.bfloat16, torch.float64], ids=str)
def test_mask_of_any_dtype_and_strides(device, assert_matches, mask_dtype):
    torch.manual_seed(0)
    input = torch.randn(2, 3, 4, 50, device=device)
    mask = torch.randn(50, 4, 3, 2, dtype=mask_dtype, device=device).permute(3, 2, 1, 0)
    assert_matches(softmax_fwd(input, mask, 1.0, torch.float32), reference(input, mask))


def test_mask_broadcast_along_every_second_dimension(device, assert_matches):
    torch.manual_seed(0)
    input = torch.randn(2, 3, 2, 3, 2, 20, device=device)
    mask = torch.randn(2, 1, 2, 1, 2, 20, device=device)
    assert_matches(softmax_fwd(input, mask, 1.0, torch.float32), reference(input, mask))


@pytest.mark.parametrize("columns", [50, 33003])
def test_rows_masked_in_part_or_throughout_equal_the_formula(device, assert_matches, columns):
    torch.manual_seed(0)
    input = torch.randn(3, columns, device=device)
    lowest = torch.finfo(torch.float32).min
    mask = torch.zeros(3, columns, device=device)
    mask[0, : columns - 2] = -torch.inf
    mask[1] = lowest
    mask[2, 1:] = lowest
    output = softmax_fwd(input, mask, 1.0, torch.float32)
    assert_matches(output[:1], reference(input[:1], mask[:1]))
    assert_matches(output[1:], (input + mask)[1:].double().softmax(-1))


@pytest.mark.parametrize("columns", [50, 33003])
def test_values_that_are_not_finite(device, columns):
    input = torch.zeros(4, columns, device=device)
    input[0] = -torch.inf
    input[1, 7] = torch.inf
    input[2, 7] = torch.nan
    output = softmax_fwd(input, None, 1.0, torch.float32)
    assert output[:3].isnan().all()
    torch.testing.assert_close(output[3], input[3].softmax(-1))


@pytest.mark.parametrize("columns", [50, 33003])
def test_large_logits_do_not_overflow(device, assert_matches, columns):
    torch.manual_seed(0)
    input = 1e4 + 3e4 * torch.rand(3, columns, device=device)
    assert_matches(softmax_fwd(input, None, 1.0, torch.float32), reference(input))


@pytest.mark.parametrize("columns", [40, 33003])
@every_view_of_rows
@pytest.mark.parametrize("padding", [8, 21])
def test_strided_inputs_are_read_right_and_not_written_to(device, assert_matches, view, columns, padding):
    torch.manual_seed(0)
    storage = torch.randn(2, 3, columns + padding, device=device)
    before = storage.clone()
    input = view(storage, columns)
    output = softmax_fwd(input, None, 1.0, torch.float32)
    assert_matches(output, reference(input))
    other = torch.randn(input.shape, device=device)
    assert_matches(softmax_bwd(input, other, 1.0, torch.float32), reference_gradient(input, other, 1.0))
    assert_matches(softmax_bwd(other, input, 1.0, torch.float32), reference_gradient(other, input, 1.0))
    assert torch.equal(storage, before)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0), (0,)], ids=str)
def test_empty_inputs_give_empty_outputs_and_gradients(device, shape):
    input = torch.empty(shape, device=device)
    output = softmax_fwd(input, torch.zeros(shape[-1], device=device), 1.0, torch.float16)
    assert (output.shape, output.dtype) == (shape, torch.float16)
    assert softmax_bwd(input, output, 1.0, torch.float32).shape == shape


def test_rows_of_262144_columns_equal_the_reference(device, assert_matches):
    torch.manual_seed(0)
    input = 4 * torch.randn(2, 262_144, dtype=torch.bfloat16, device=device)
    output = softmax_fwd(input, None, 1.0, torch.float32)
    assert_matches(output, reference(input))
    assert_matches(softmax_bwd(input, output, 1.0, torch.float32), reference_gradient(input, output, 1.0))


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1, 4096, 50257])
def test_more_than_2_to_31_elements(assert_matches, columns):
    rows = 2**31 // columns + 5
    input = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")
    mask = torch.zeros(rows, 1, device="cuda")
    output = softmax_fwd(input, mask, 1.0, torch.bfloat16)
    assert_matches(output[-3:], reference(input[-3:]))
    if columns > 1:
        grad_input = softmax_bwd(input, output, 1.0, torch.bfloat16)
        assert_matches(grad_input[-3:], reference_gradient(input[-3:], output[-3:], 1.0))
