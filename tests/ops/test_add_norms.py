"""add_rms_norm and add_layer_norm beyond the contract: the sum is torch's own to the bit, the norm two steps' own."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseopt import ops
from fuseopt.ops import registry
from tests.axes import thinned
from tests.ops.cases import DTYPES, Case, RawCalls, cases, error

every_case = pytest.mark.parametrize("case", cases("add_rms_norm", "add_layer_norm"))
dtypes = st.sampled_from(DTYPES)


def in_two_steps(case: Case, input: torch.Tensor, residual: torch.Tensor, *parameters: torch.Tensor | None, **kwargs):
    """What the op without the add gives on the same backend, and the sum."""
    sum = input + residual
    if case.op.name == "add_rms_norm":
        return ops.rms_norm(sum, *parameters, **kwargs, backend=case.backend), sum
    return ops.layer_norm(sum, sum.shape[-1:], *parameters, **kwargs, backend=case.backend), sum


def parameters_of(case: Case, hidden: int, dtype: torch.dtype) -> list[torch.Tensor]:
    count = 1 if case.op.name == "add_rms_norm" else 2
    return [torch.randn(hidden, device=case.device).to(dtype) for _ in range(count)]


@every_case
@settings(max_examples=60, deadline=None)
@given(
    dtypes=st.tuples(dtypes, dtypes, dtypes),
    rows=st.integers(0, 9),
    hidden=st.sampled_from([1, 3, 8, 24, 64, 100, 256, 257, 520, 768, 1001, 1600, 4096, 4100, 5001]),
    large_mean=st.booleans(),
    transposed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_sum_and_norm_are_those_of_two_steps(
    case: Case, dtypes: tuple[torch.dtype, ...], rows: int, hidden: int, large_mean: bool, transposed: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    input, residual = (torch.randn(rows, hidden, device=case.device).to(dtype) for dtype in dtypes[:2])
    if large_mean:
        residual = (residual.float() + 100).to(residual.dtype)
    if transposed:
        input = input.mT.contiguous().mT
    parameters = parameters_of(case, hidden, dtypes[2])
    norm, sum = case(input, residual, *parameters)
    expected_norm, expected_sum = in_two_steps(case, input, residual, *parameters)
    assert sum.dtype == expected_sum.dtype and torch.equal(sum, expected_sum)
    assert norm.dtype == expected_norm.dtype
    if case.device.type == "cpu":
        assert torch.equal(norm, expected_norm)
    else:  # where mixed dtypes may take a kernel that adds up in another order
        assert error([norm], [expected_norm]) <= max(1e-5, 4 * torch.finfo(norm.dtype).eps)


@every_case
@thinned(2, hidden=[768, 1001, 1600, 4096], stream_dtype=[torch.float32, torch.bfloat16])
def test_gradient_is_the_sum_of_both_outputs_gradients(case: Case, hidden: int, stream_dtype: torch.dtype) -> None:
    """No worse than two steps, which round the gradient once more."""
    torch.manual_seed(0)
    input = torch.randn(300, hidden, device=case.device).bfloat16().requires_grad_()
    residual = torch.randn(300, hidden, device=case.device).to(stream_dtype).requires_grad_()
    parameters = [parameter.requires_grad_() for parameter in parameters_of(case, hidden, stream_dtype)]
    leaves = [input, residual, *parameters]
    grads = [torch.randn_like(tensor) for tensor in case(*leaves)]

    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = torch.autograd.grad(case.op.reference(*exact_leaves), exact_leaves, [grad.double() for grad in grads])
    fused = torch.autograd.grad(case(*leaves), leaves, grads)
    two_steps = torch.autograd.grad(in_two_steps(case, *leaves), leaves, grads)
    for leaf, grad, stepwise, expected in zip(leaves, fused, two_steps, exact, strict=True):
        assert grad.dtype == leaf.dtype
        assert error([grad], [expected]) <= 1.05 * error([stepwise], [expected]) + 1e-6
    again = torch.autograd.grad(case(*leaves), leaves, grads)
    assert all(map(torch.equal, again, fused))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [9, 9001])
def test_gradient_over_rows_that_begin_anywhere(dtype: torch.dtype, rows: int) -> None:
    """A warp walks along several of the many, and adds the other output's gradient to each."""
    torch.manual_seed(0)
    leaves = [torch.randn(*shape, device="cuda").to(dtype) for shape in ((rows, 1001), (rows, 1001), (1001,))]
    exact_leaves = [leaf.double().requires_grad_() for leaf in leaves]
    for leaf in leaves:
        leaf.requires_grad_()
    outputs = ops.add_rms_norm(*leaves, backend="cuda")
    grads = [torch.randn_like(output) for output in outputs]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        got = torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
        torch.cuda.synchronize()
    assert any("rms_norm_odd_rows_bwd_kernel" in event.name for event in profile.events())
    assert all(map(torch.equal, got, torch.autograd.grad(outputs, leaves, grads)))
    reference = registry.get("add_rms_norm").reference
    plain = torch.autograd.grad(reference(*leaves), leaves, grads)
    exact = torch.autograd.grad(reference(*exact_leaves), exact_leaves, [grad.double() for grad in grads])
    for grad, plainly, expected in zip(got, plain, exact, strict=True):
        assert error([grad], [expected]) <= 1.5 * error([plainly], [expected]) + 4 * torch.finfo(dtype).eps


@every_case
def test_either_output_alone_may_be_used(case: Case) -> None:
    input, residual = (torch.randn(4, 24, device=case.device, requires_grad=True) for _ in range(2))
    parameters = parameters_of(case, 24, torch.float32)
    with RawCalls() as raw:
        _, sum = case(input, residual, *parameters)
        grads = torch.autograd.grad(sum.sum(), (input, residual))
    assert all(torch.equal(grad, torch.ones_like(grad)) for grad in grads)
    assert not any("bwd" in name for name in raw.names())
    norm, _ = case(input, residual, *parameters)
    expected, _ = in_two_steps(case, input, residual, *parameters)
    weights = torch.randn_like(norm)
    torch.testing.assert_close(
        torch.autograd.grad(norm, (input, residual), weights), torch.autograd.grad(expected, (input, residual), weights)
    )


@every_case
def test_a_sum_beyond_its_dtype_is_infinite_as_torchs(case: Case) -> None:
    input = torch.full((2, 16), 6e4, device=case.device, dtype=torch.float16)
    _, sum = case(input, input, *parameters_of(case, 16, torch.float16))
    assert sum.isinf().all()
    norm, sum = case(input, input.float(), *parameters_of(case, 16, torch.float16))
    assert sum.dtype == torch.float32 and torch.equal(sum, torch.full_like(sum, 2 * input[0, 0].item()))
    assert norm.isfinite().all()


@every_case
def test_a_residual_or_weight_of_another_shape_is_refused(case: Case) -> None:
    input = torch.randn(4, 8, device=case.device)
    with pytest.raises(ValueError, match=r"residual must have shape \(4, 8\), not \(1, 8\)"):
        case(input, input[:1])
    with pytest.raises(ValueError, match=r"weight must have shape \(8,\)"):
        case(input, input, input[0, :1])


@pytest.mark.parametrize(
    "case", [case for case in cases("add_rms_norm", "add_layer_norm") if case.id.endswith("cuda-cuda")]
)
@pytest.mark.parametrize("misaligned", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        *itertools.product([33], [7, 64, 768, 1001, 1600, 2048, 4096, 4099, 16384, 20000]),
        *itertools.product([1000], [7, 48, 64, 128, 256, 512, 768, 1001, 1600]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_shape_of_kernel_against_float64(
    case: Case, dtype: torch.dtype, rows: int, columns: int, misaligned: bool
) -> None:
    def make(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, device=case.device).to(dtype).flatten()
        if misaligned:
            values = torch.cat([values[:1], values])[1:]
        return values.view(shape).requires_grad_()

    leaves = [make(rows, columns), make(rows, columns), *(make(columns) for _ in parameters_of(case, 1, dtype))]
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    outputs, exact = case(*leaves), case.op.reference(*exact_leaves)
    plain = case.op.reference(*leaves)
    grads = [torch.randn_like(output) for output in outputs]
    eps = torch.finfo(dtype).eps
    for output, of_plain, expected in zip(outputs, plain, exact, strict=True):
        assert error([output], [expected]) <= 1.5 * error([of_plain], [expected]) + eps
    got = torch.autograd.grad(outputs, leaves, grads)
    wanted = torch.autograd.grad(exact, exact_leaves, [grad.double() for grad in grads])
    of_plain = torch.autograd.grad(plain, leaves, grads)
    for leaf, grad, plainly, expected in zip(leaves, got, of_plain, wanted, strict=True):
        assert grad.dtype == leaf.dtype
        assert error([grad], [expected]) <= 1.5 * error([plainly], [expected]) + 4 * eps
