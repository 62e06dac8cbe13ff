from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from fuseopt.ops import rms_norm
from fuseopt.ops.rms_norm import rms_norm_reference
from tests.ops.cases import DTYPES, Case, cases, error
from tests.ops.variations import poisoned_allocations, shifted

UPSTREAM = {
    "t5": (T5LayerNorm, {"cast_order": "t5"}),
    "llama": (LlamaRMSNorm, {"cast_order": "llama"}),
    "gemma": (GemmaRMSNorm, {"cast_order": "input", "offset": 1.0}),
}
every_case = pytest.mark.parametrize("case", cases("rms_norm"))


def upstream(family: str, weight: Tensor, input: Tensor) -> Tensor:
    module = UPSTREAM[family][0](weight.shape[0], 1e-6)
    module.weight = torch.nn.Parameter(weight)
    return module.to(input.device)(input).detach()


@settings(max_examples=60, deadline=None)
@given(
    family=st.sampled_from(sorted(UPSTREAM)),
    input_dtype=st.sampled_from(DTYPES[:3]),
    weight_dtype=st.sampled_from(DTYPES[:3]),
    rows=st.integers(0, 9),
    hidden=st.integers(1, 300),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
    seed=st.integers(0, 2**31),
)
def test_reference_is_bit_for_bit_the_upstream_module(
    family: str,
    input_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    rows: int,
    hidden: int,
    scale: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    input = (torch.randn(rows, hidden) * scale).to(input_dtype)
    weight = torch.randn(hidden).to(weight_dtype)
    expected = upstream(family, weight, input)
    output = rms_norm_reference(input, weight, **UPSTREAM[family][1])
    assert output.dtype == expected.dtype
    assert torch.equal(output, expected)


def test_reference_against_the_formulas_written_out() -> None:
    x = torch.randn(64, 96).bfloat16()
    w = torch.randn(96).bfloat16()
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    written_out = {
        "t5": (w * normed.to(torch.bfloat16), {"cast_order": "t5"}),
        "llama": (w * normed.to(torch.bfloat16), {"cast_order": "llama"}),
        "gemma": ((normed * (1.0 + w.float())).to(torch.bfloat16), {"offset": 1.0}),
        "torch.nn.RMSNorm": ((normed * w.float()).to(torch.bfloat16), {}),
    }
    for expected, arguments in written_out.values():
        assert torch.equal(rms_norm_reference(x, w, **arguments), expected)
    assert not torch.equal(written_out["t5"][0], written_out["torch.nn.RMSNorm"][0])


@every_case
@pytest.mark.parametrize("family", sorted(UPSTREAM))
@pytest.mark.parametrize("input_dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES[:3], ids=str)
def test_casts_come_in_the_order_of_each_family(
    case: Case, family: str, input_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    """Elements may differ by a rounding where the mean square, summed in another order, does; with a wrong cast order
    about a quarter of them would."""
    if (case.backend, case.device.type) == ("triton", "cpu") and torch.bfloat16 in (input_dtype, weight_dtype):
        pytest.skip("Triton's interpreter truncates where it should round to bfloat16")
    torch.manual_seed(0)
    input = torch.randn(64, 96, device=case.device).to(input_dtype)
    weight = torch.randn(96, device=case.device).to(weight_dtype)
    expected = upstream(family, weight, input)
    output = case(input, weight, **UPSTREAM[family][1])
    assert output.dtype == expected.dtype
    if output.dtype == torch.float32 and input_dtype == weight_dtype == torch.float32:
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    else:
        differing = ~torch.isclose(output.double(), expected.double(), rtol=1e-6, atol=0)
        assert differing.double().mean() < 0.02


@every_case
def test_fp32_residual_beyond_float16(case: Case) -> None:
    """T5 in float16 keeps `wo` in float32: the norm sees a float32 residual that float16 could not hold."""
    input = torch.randn(4, 64, device=case.device) * 1e6
    weight = torch.ones(64, device=case.device, dtype=torch.float16)
    output = case(input, weight, cast_order="t5")
    assert output.dtype == torch.float16 and output.isfinite().all()
    torch.testing.assert_close(output, (input / input.pow(2).mean(-1, keepdim=True).sqrt()).half())


@every_case
def test_rows_of_zeros(case: Case) -> None:
    input = torch.zeros(3, 32, device=case.device, requires_grad=True)
    weight = torch.ones(32, device=case.device)
    output = case(input, weight)
    assert torch.equal(output, torch.zeros_like(output))
    output.backward(torch.ones_like(output))
    torch.testing.assert_close(input.grad, torch.full_like(input, 1e3))  # 1 / sqrt(eps)


@every_case
def test_many_columns_and_a_large_mean(case: Case) -> None:
    input = (torch.randn(3, 20011) + 1e3).to(case.device)
    weight = torch.randn(20011, device=case.device)
    exact = rms_norm_reference(input.double(), weight.double())
    assert error([case(input, weight)], [exact]) <= 1e-6


@pytest.mark.parametrize("case", [case for case in cases("rms_norm") if case.id.endswith("cuda-cuda")])
@pytest.mark.parametrize("rows", [8, 1000])
@pytest.mark.parametrize(
    "columns", [8, 56, 64, 72, 128, 256, 764, 767, 768, 1000, 1536, 3072, 4096, 4100, 6000, 8192, 12_288]
)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_every_shape_of_kernel_against_float64(case: Case, dtype: torch.dtype, columns: int, rows: int) -> None:
    """A block, a warp or part of one has a row, with few elements a thread or many: by width, dtype and rows."""
    torch.manual_seed(0)
    input = torch.randn(rows, columns, device=case.device).to(dtype).requires_grad_()
    weight = torch.randn(columns, device=case.device).to(dtype)
    exact_input = input.detach().double().requires_grad_()
    with poisoned_allocations():
        output = case(input, weight)
        alone = case(input.detach(), weight)
    exact, plain = rms_norm_reference(exact_input, weight.double()), rms_norm_reference(input, weight)
    eps = torch.finfo(dtype).eps
    assert error([output], [exact]) <= 1.5 * error([plain], [exact]) + eps
    assert torch.equal(output, alone)
    grad = torch.randn_like(output)
    (got,), (plainly,) = (torch.autograd.grad(result, input, grad) for result in (output, plain))
    expected = torch.autograd.grad(exact, exact_input, grad.double())
    assert error([got], expected) <= 1.5 * error([plainly], expected) + 4 * eps


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 9, 1000, 9001])
@pytest.mark.parametrize("columns", [257, 766, 1001, 1025, 1031])
@pytest.mark.parametrize("options", [{"cast_order": "t5"}, {"cast_order": "llama"}, {"offset": 1.0}, None], ids=str)
def test_rows_that_begin_anywhere(dtype: torch.dtype, rows: int, columns: int, options: dict | None) -> None:
    """Accesses of 16 bytes to rows whose length is no multiple of them; without a weight, and in rows' own kernel."""
    torch.manual_seed(0)
    input = torch.randn(rows, columns, device="cuda").to(dtype).requires_grad_()
    weight = None if options is None else torch.randn(columns, device="cuda").to(dtype).requires_grad_()
    arguments = tuple(tensor for tensor in (input, weight) if tensor is not None)
    exact_arguments = tuple(tensor.detach().double().requires_grad_() for tensor in arguments)
    grad = torch.randn_like(input)

    def outputs(function: Callable[..., Tensor], *tensors: Tensor, **others: str) -> list[Tensor]:
        output = function(*tensors, **(options or {}), **others)
        return [output.detach(), *torch.autograd.grad(output, tensors, grad.to(output.dtype))]

    with poisoned_allocations(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        found = outputs(rms_norm, *arguments, backend="cuda")
        torch.cuda.synchronize()
    ran = " ".join(event.name for event in profile.events())
    assert "norm_odd_rows_fwd_kernel" in ran and "rms_norm_odd_rows_bwd_kernel" in ran
    assert all(map(torch.equal, found, outputs(rms_norm, *arguments, backend="cuda")))
    assert torch.equal(found[0], rms_norm(*(t.detach() for t in arguments), **(options or {}), backend="cuda"))
    plain, exact = outputs(rms_norm_reference, *arguments), outputs(rms_norm_reference, *exact_arguments)
    eps = torch.finfo(dtype).eps
    for actual, plainly, expected in zip(found, plain, exact, strict=True):
        assert error([actual], [expected]) <= 1.5 * error([plainly], [expected]) + 4 * eps


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 9, 3001])
@pytest.mark.parametrize("columns", [9, 17, 768, 1001, 1023, 1025])
@pytest.mark.parametrize("off", ["input", "weight", "grad", "all"])
def test_tensors_that_begin_anywhere(dtype: torch.dtype, rows: int, columns: int, off: str) -> None:
    """One element past an aligned address, where a matrix has no vectors, but one with an aligned beginning has."""
    torch.manual_seed(0)
    values = {
        "input": torch.randn(rows, columns, device="cuda").to(dtype),
        "weight": torch.randn(columns, device="cuda").to(dtype),
        "grad": torch.randn(rows, columns, device="cuda").to(dtype),
    }
    *leaves, grad = (shifted(value) if off in (name, "all") else value for name, value in values.items())
    exact_leaves = [leaf.double().requires_grad_() for leaf in leaves]
    for leaf in leaves:
        leaf.requires_grad_()

    def outputs(function: Callable[..., Tensor], tensors: list[Tensor], **others: str) -> list[Tensor]:
        output = function(*tensors, **others)
        return [output.detach(), *torch.autograd.grad(output, tensors, grad.to(output.dtype))]

    with poisoned_allocations():
        found = outputs(rms_norm, leaves, backend="cuda")
    assert all(map(torch.equal, found, outputs(rms_norm, leaves, backend="cuda")))
    plain, exact = outputs(rms_norm_reference, leaves), outputs(rms_norm_reference, exact_leaves)
    eps = torch.finfo(dtype).eps
    for actual, plainly, expected in zip(found, plain, exact, strict=True):
        assert error([actual], [expected]) <= 1.5 * error([plainly], [expected]) + 4 * eps


@every_case
def test_unknown_cast_orders_and_wrong_weights_are_refused(case: Case) -> None:
    input = torch.randn(4, 8, device=case.device)
    with pytest.raises(ValueError, match="'input', 't5' or 'llama'"):
        case(input, cast_order="gemma")
    with pytest.raises(ValueError, match=r"weight must have shape \(8,\), not \(1,\)"):
        case(input, torch.ones(1, device=case.device))


def test_one_graph_for_every_number_of_rows() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(rms_norm, fullgraph=True, dynamic=True, backend=counter)
    for rows in (3, 5, 8):
        input, weight = torch.randn(rows, 16), torch.randn(16)
        torch.testing.assert_close(compiled(input, weight), rms_norm(input, weight))
    assert counter.frame_count == 1
