import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuseopt import ops
from fuseopt.ops.gated_activation import ACTIVATIONS, gated_activation_reference
from tests.ops.cases import DTYPES, Case, RawCalls, cases, error

every_case = pytest.mark.parametrize("case", cases("gated_activation"))
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def is_exact(case: Case, activation: str) -> bool:
    """Whether the backend's activation has torch's own bits."""
    return activation == "relu" or case.backend == "reference" or (case.backend, activation) == ("cuda", "silu")


def assert_as_two_operations(actual: Tensor, expected: Tensor, exact: bool) -> None:
    """Equal; or, where the activation may be the neighbouring value, within that and the product's own rounding.

    The absolute part is torch's: its erf form cancels for negative arguments.
    """
    assert actual.dtype == expected.dtype
    if exact:
        assert torch.equal(actual, expected)
    else:
        eps = torch.finfo(actual.dtype).eps
        torch.testing.assert_close(actual, expected, rtol=max(2 * eps, 4e-6), atol=1e-5)


@every_case
@every_activation
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_the_rounding_is_that_of_two_operations(case: Case, dtype: torch.dtype, activation: str) -> None:
    torch.manual_seed(0)
    gate, up = ((3 * torch.randn(40, 264, device=case.device)).to(dtype).requires_grad_() for _ in range(2))
    output, expected = case(gate, up, activation), ACTIVATIONS[activation](gate) * up
    assert_as_two_operations(output, expected, is_exact(case, activation))
    grad_output = torch.randn_like(output)
    gradients = torch.autograd.grad(output, (gate, up), grad_output)
    expected_gradients = torch.autograd.grad(expected, (gate, up), grad_output)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        if is_exact(case, activation):
            assert torch.equal(gradient, expected_gradient)
        else:
            assert error([gradient], [expected_gradient]) <= max(2 * torch.finfo(dtype).eps, 4e-6)


@every_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_activation_is_rounded_before_the_product(case: Case, dtype: torch.dtype) -> None:
    gate = torch.linspace(0.5, 4, 999, device=case.device).to(dtype)
    up = torch.full_like(gate, 3.0)
    rounded, unrounded = (F.gelu(gate.to(d)) * up.float() for d in (dtype, torch.float32))
    assert not torch.equal(rounded.to(dtype), unrounded.to(dtype))
    assert (case(gate, up, "gelu") != rounded.to(dtype)).float().mean() < 0.02
    wide = case(gate, up, "gelu", activation_dtype=torch.float32)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide, unrounded, rtol=2e-6, atol=0)


@every_case
@every_activation
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_large_values_and_nan_with_their_gradients_equal_the_reference(
    case: Case, dtype: torch.dtype, activation: str
) -> None:
    values = [0.0, -0.0, 1e-7, -1e-7, 3.0, -3.0, 30.0, -30.0, 89.0, -89.0, 1e4, -1e4, math.nan]
    gate = torch.tensor(values * 3, device=case.device, dtype=dtype)
    up = torch.linspace(-2, 2, len(gate), device=case.device).to(dtype)
    expected = gated_activation_reference(gate, up, activation)
    torch.testing.assert_close(case(gate, up, activation), expected, equal_nan=True)
    finite, factor = (tensor[gate.isfinite()].requires_grad_() for tensor in (gate, up))
    gradients = torch.autograd.grad(case(finite, factor, activation).sum(), (finite, factor))
    plain = gated_activation_reference(finite, factor, activation)
    for gradient, expected in zip(gradients, torch.autograd.grad(plain.sum(), (finite, factor)), strict=True):
        torch.testing.assert_close(gradient, expected)


def laid_out(shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random values of a shape: "half" and "offset" leave 16-byte aligned rows apart, and rows that are not aligned."""
    *lead, columns = shape
    if layout == "half":
        return torch.randn(*lead, 2 * columns, device=device).to(dtype).chunk(2, -1)[1]
    if layout == "offset":
        return torch.randn(*lead, columns + 3, device=device).to(dtype)[..., 1 : 1 + columns]
    if layout == "transposed":
        return torch.randn(*reversed(shape), device=device).to(dtype).permute(*reversed(range(len(shape))))
    if layout == "expanded":
        return torch.randn(*([1] * len(lead)), columns, device=device).to(dtype).expand(shape)
    return torch.randn(shape, device=device).to(dtype)


LAYOUTS = st.sampled_from(["contiguous", "half", "offset", "transposed", "expanded"])


@every_case
@settings(max_examples=60, deadline=None)
@given(
    dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 2),
    activation_dtype=st.sampled_from([None, torch.float32]),
    layouts=st.tuples(*[LAYOUTS] * 3),
    activation=st.sampled_from(list(ACTIVATIONS)),
    lead=st.lists(st.integers(0, 5), max_size=2),
    columns=st.one_of(st.integers(1, 70), st.sampled_from([64, 256, 1032])),
    seed=st.integers(0, 2**31),
)
def test_any_dtypes_and_strides(
    case: Case,
    dtypes: tuple[torch.dtype, ...],
    activation_dtype: torch.dtype | None,
    layouts: tuple[str, ...],
    activation: str,
    lead: list[int],
    columns: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    shape = (*lead, columns)
    gate, up = (laid_out(shape, *pair, case.device) for pair in zip(layouts[:2], dtypes, strict=True))
    options = {"activation": activation, "activation_dtype": activation_dtype}
    gate.requires_grad_(), up.requires_grad_()
    output = case(gate, up, **options)
    plain = gated_activation_reference(gate, up, **options)
    grad_output = laid_out(shape, layouts[2], output.dtype, case.device)
    actual = [output, *torch.autograd.grad(output, (gate, up), grad_output)]
    expected = [plain, *torch.autograd.grad(plain, (gate, up), grad_output)]
    wide = [tensor.detach().double().requires_grad_() for tensor in (gate, up)]
    exact = gated_activation_reference(*wide, activation=activation)
    judges = [exact, *torch.autograd.grad(exact, wide, grad_output.double())]
    assert case.backend == "reference" or output.is_contiguous()
    for tensor, wanted, judge in zip(actual, expected, judges, strict=True):
        assert (tensor.shape, tensor.dtype) == (wanted.shape, wanted.dtype)
        # A product of two rounded factors, each perhaps its neighbour.
        roundings = [*dtypes, activation_dtype or dtypes[0], torch.float32]
        if activation_dtype is None and dtypes == (torch.float64,) * 2:
            roundings = [torch.float64]
        unit = max(torch.finfo(dtype).eps for dtype in roundings)
        assert error([tensor], [judge]) <= 2 * error([wanted], [judge]) + 8 * unit


def test_only_gate_and_up_are_kept_for_the_backward() -> None:
    kept: list[Tensor] = []
    gate, up = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor), tensor)[1], lambda t: t):
        ops.gated_activation(gate, up, backend="cpu")
    assert [tensor.data_ptr() for tensor in kept] == [gate.data_ptr(), up.data_ptr()]


@every_case
def test_one_raw_op_each_way_gives_both_gradients(case: Case) -> None:
    gate, up = (torch.randn(4, 8, device=case.device, requires_grad=True) for _ in range(2))
    with RawCalls() as raw:
        case(gate, up, "gelu").sum().backward()
    overload = "triton" if case.backend == "triton" else "default"
    expected = [f"gated_activation_fwd.{overload}", f"gated_activation_bwd.{overload}"]
    assert raw.names() == ([] if case.backend == "reference" else expected)
    assert gate.grad is not None and up.grad is not None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_halves_of_one_projection_are_not_copied(dtype: torch.dtype) -> None:
    projection = torch.randn(64, 2 * 4096, device="cuda", dtype=dtype)
    gate, up = projection.chunk(2, -1)
    expected = F.silu(gate) * up
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = ops.gated_activation(gate, up, backend="cuda")
    assert torch.cuda.max_memory_allocated() - before == output.numel() * output.element_size()
    assert torch.equal(output, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [2**31 + 24, 2**30 + 12])
def test_more_than_two_to_the_31_elements(columns: int) -> None:
    shape = (2**31 + 24) // columns, columns
    gate, up = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    output = ops.gated_activation(gate, up, backend="cuda")
    for part in (slice(0, 4096), slice(-4096, None)):
        assert torch.equal(output[-1, part], F.silu(gate[-1, part]) * up[-1, part])


@every_case
def test_unknown_activations_and_wrong_shapes_are_refused(case: Case) -> None:
    gate = torch.randn(3, 8, device=case.device)
    with pytest.raises(ValueError, match="'gelu', 'gelu_tanh', 'silu', 'relu', not 'tanh'"):
        case(gate, gate, "tanh")
    with pytest.raises(ValueError, match=r"up must have shape \(3, 8\), not \(8,\)"):
        case(gate, gate[0])
