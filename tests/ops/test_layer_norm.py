import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseopt.ops import layer_norm
from fuseopt.ops.layer_norm import layer_norm_reference
from tests.ops.cases import DTYPES, Case, cases, error, results
from tests.ops.variations import poisoned_allocations

every_case = pytest.mark.parametrize("case", cases("layer_norm"))


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    lead=st.lists(st.integers(0, 4), max_size=2),
    normalized_shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    affine=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_reference_is_bit_for_bit_torch(
    dtype: torch.dtype, lead: list[int], normalized_shape: list[int], affine: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    input = torch.randn(*lead, *normalized_shape).to(dtype)
    parameters = [torch.randn(normalized_shape).to(dtype) if affine else None for _ in range(2)]
    expected = F.layer_norm(input, normalized_shape, *parameters)
    assert torch.equal(layer_norm_reference(input, normalized_shape, *parameters), expected)


@every_case
@pytest.mark.parametrize("offset", [0.0, 1e3, -1e4])
def test_a_large_mean_cancels(case: Case, offset: float) -> None:
    """E[x^2] - E[x]^2 in float32 would lose every digit here."""
    torch.manual_seed(0)
    input = (torch.randn(8, 515) + offset).to(case.device)
    weight, bias = torch.randn(515, device=case.device), torch.randn(515, device=case.device)
    exact = layer_norm_reference(input.double(), (515,), weight.double(), bias.double())
    plain = F.layer_norm(input, (515,), weight, bias)
    assert error([case(input, (515,), weight, bias)], [exact]) <= 2 * error([plain], [exact]) + 1e-6


@every_case
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("columns", [1600, 1603, 4096, 16_384])
def test_rows_with_elements_that_stand_out(case: Case, columns: int, dtype: torch.dtype) -> None:
    """Distances from one of those cancel, and what is left of them is to be exact all the same."""
    torch.manual_seed(0)
    rows = torch.randn(24, columns, device=case.device)
    rows[0] = rows[1] = rows[2] = 7.0
    rows[0, 0] = rows[1, :8] = rows[2, -1] = 1000.0
    rows[4:8, 0] *= 1000.0
    rows[8:12, :8] = 300.0
    rows[12:16] += 100.0
    input = rows.to(dtype)
    exact = F.layer_norm(input.double(), (columns,))
    output = case(input, (columns,)).double()
    rounding = torch.finfo(dtype).eps / 2
    assert ((output - exact).abs() <= (rounding + 2e-4) * exact.abs() + 2e-4).all()


@pytest.mark.parametrize("case", [case for case in cases("layer_norm") if case.id.endswith("cuda-cuda")])
@pytest.mark.parametrize("rows", [8, 1000])
@pytest.mark.parametrize("columns", [8, 56, 64, 72, 128, 256, 764, 767, 768, 1000, 1536, 1600, 4096, 4100, 12_288])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_every_shape_of_kernel_against_float64(case: Case, dtype: torch.dtype, columns: int, rows: int) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(shape, device=case.device).to(dtype) for shape in ((rows, columns), (columns,), (columns,))]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    with poisoned_allocations():
        output = case(leaves[0], (columns,), *leaves[1:])
        with torch.no_grad():
            alone = case(leaves[0], (columns,), *leaves[1:])
    exact, plain = (F.layer_norm(given[0], (columns,), *given[1:]) for given in (exact_leaves, leaves))
    eps = torch.finfo(dtype).eps
    assert error([output], [exact]) <= 1.5 * error([plain], [exact]) + eps
    assert torch.equal(output, alone)
    grad = torch.randn_like(output)
    got, plainly = (torch.autograd.grad(result, leaves, grad) for result in (output, plain))
    expected = torch.autograd.grad(exact, exact_leaves, grad.double())
    for gradient, of_plain, right in zip(got, plainly, expected, strict=True):
        assert error([gradient], [right]) <= 1.5 * error([of_plain], [right]) + 4 * eps


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 9, 1000, 9001])
@pytest.mark.parametrize("columns", [257, 766, 1001, 1025, 1031])
@pytest.mark.parametrize(("scaled", "shifted"), [(True, True), (True, False), (False, True), (False, False)])
@torch.no_grad()
def test_rows_that_begin_anywhere(dtype: torch.dtype, rows: int, columns: int, scaled: bool, shifted: bool) -> None:
    """Accesses of 16 bytes to rows whose length is no multiple of them, in a kernel of their own."""
    torch.manual_seed(0)
    input = torch.randn(rows, columns, device="cuda").to(dtype)
    input[-1] += 100  # a deviation is a few rounding steps of that
    input[0] = 3
    weight, bias = (torch.randn(columns, device="cuda").to(dtype) if there else None for there in (scaled, shifted))
    with poisoned_allocations(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        output = layer_norm(input, (columns,), weight, bias, backend="cuda")
        torch.cuda.synchronize()
    assert any("norm_odd_rows_fwd_kernel" in event.name for event in profile.events())
    arguments = [None if tensor is None else tensor.double() for tensor in (weight, bias)]
    exact = layer_norm_reference(input.double(), (columns,), *arguments)
    plain = F.layer_norm(input, (columns,), weight, bias)
    assert error([output], [exact]) <= 1.5 * error([plain], [exact]) + 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(output[0], torch.zeros_like(output[0]) if bias is None else bias, rtol=0, atol=0)


@every_case
@pytest.mark.parametrize("input_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_parameters_of_half_precision_inputs_keep_their_precision(case: Case, input_dtype: torch.dtype) -> None:
    input = torch.randn(4, 33, device=case.device, dtype=input_dtype)
    weight, bias = torch.randn(33, device=case.device), torch.randn(33, device=case.device)
    output = case(input, (33,), weight, bias)
    torch.testing.assert_close(output, F.layer_norm(input.float(), (33,), weight, bias).to(input_dtype))


@every_case
def test_constant_rows_give_the_bias(case: Case) -> None:
    bias = torch.randn(16, device=case.device)
    output = case(torch.full((3, 16), 7.0, device=case.device), (16,), torch.randn(16, device=case.device), bias)
    torch.testing.assert_close(output, bias.expand(3, 16))


@every_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_output_dtype_under_autocast_is_torchs(case: Case, dtype: torch.dtype) -> None:
    input, weight, bias = (torch.randn(shape, device=case.device, dtype=dtype) for shape in ((4, 8), 8, 8))
    with torch.autocast(case.device.type, dtype):
        output, expected = case(input, (8,), weight, bias), F.layer_norm(input, (8,), weight, bias)
    assert output.dtype == expected.dtype
    torch.testing.assert_close(output, expected)


@every_case
def test_a_weight_in_the_place_of_normalized_shape(case: Case) -> None:
    with pytest.raises(TypeError, match="normalized_shape must be a sequence of int"):
        case(torch.randn(3, 8, device=case.device), torch.ones(8, device=case.device))


@every_case
@pytest.mark.parametrize("normalized_shape", [(4,), (), (2, 8)])
def test_normalized_shape_must_end_the_inputs(case: Case, normalized_shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="normalized_shape"):
        case(torch.randn(3, 8, device=case.device), normalized_shape)


@every_case
def test_parameters_of_another_shape(case: Case) -> None:
    input, parameter = torch.randn(3, 8, device=case.device), torch.ones(1, device=case.device)
    with pytest.raises(ValueError, match="weight must have shape"):
        case(input, (8,), parameter)
    with pytest.raises(ValueError, match="bias must have shape"):
        case(input, (8,), None, parameter)


@pytest.mark.parametrize("case", cases("layer_norm", "add_layer_norm"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_a_bias_is_rounded_to_its_own_dtype_alone(case: Case, dtype: torch.dtype) -> None:
    """The gradient of bias is not rounded to the weight's dtype first."""
    torch.manual_seed(0)
    shape = () if case.op.name == "add_layer_norm" else ((24,),)
    tensors = [torch.randn(40, 24, device=case.device) for _ in range(1 if shape else 2)]
    weight = torch.randn(24, device=case.device).to(dtype)
    bias = torch.randn(24, device=case.device, requires_grad=True)
    output, *_ = results(case(*tensors, *shape, weight, bias))
    grad = torch.randn_like(output)
    (grad_bias,) = torch.autograd.grad(output, bias, grad)
    assert grad_bias.dtype == torch.float32
    torch.testing.assert_close(grad_bias.double(), grad.double().sum(0), rtol=1e-6, atol=1e-5)
