"""`fuseopt.elementwise`: values and gradients of expressions, in Triton's interpreter and compiled for two GPUs."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F

import fuseopt
from fuseopt.errors import OpError
from fuseopt.extend.expression import FUNCTIONS
from fuseopt.ops.library import TRITON_INTERPRETED

compiled = pytest.mark.skipif(TRITON_INTERPRETED, reason="of processes in which Triton compiles")
ROAD = "relu(a + scale * b + bias)"
EVERYTHING = (
    "where(a > b, gelu(a) / (1 + abs(b)), min(a, b) ** 3) + silu(a) * b - tanh(c) + softplus(a * c) + max(b, c)"
    " + clamp(a, -1, 1) + erf(b) + gelu_tanh(a) + sqrt(abs(b) + 1) + log(exp(a) + 1) + sigmoid(b) + relu(c)"
)


def sampled(expression: str, *shapes: tuple[int, ...], **scalars: float) -> fuseopt.Op:
    op = fuseopt.elementwise("mine::expression", expression, scalars=tuple(scalars))

    @op.samples
    def _(device, dtype):
        yield (*(torch.randn(shape, device=device, dtype=dtype) for shape in shapes), *scalars.values())

    return op


@compiled
def test_values_are_those_of_torch_in_float32():
    op = fuseopt.elementwise("mine::scale_add_relu", ROAD, scalars=("scale",))
    a, b, bias = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((5, 7), (5, 7), (7,)))
    wanted = F.relu(a.float() + 2.5 * b.float() + bias.float()).bfloat16()
    assert torch.equal(op(a, b, bias, scale=2.5), wanted)
    assert op.choose(a, b, bias, scale=2.5).refused["triton"]
    assert op(a.float(), b, bias, scale=1.0).dtype == torch.float32


def test_every_function_is_in_an_expression_that_is_checked():
    assert all(name in EVERYTHING for name in FUNCTIONS)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("op", "shapes", "scalars"),
    [
        pytest.param(ROAD, ((4, 24), (4, 24), (24,)), {"scale": 1.5}, id="road"),
        pytest.param(EVERYTHING, ((3, 5, 24), (24,), (3, 5, 24)), {}, id="everything", marks=pytest.mark.slow),
        pytest.param("a * b + c", ((6, 1, 8), (5, 8), ()), {}, id="broadcast", marks=pytest.mark.slow),
    ],
)
def test_triton_passes_check_in_the_interpreter(op, shapes, scalars):
    report = fuseopt.check(sampled(op, *shapes, **scalars), device="cpu", dtypes=(torch.float32, torch.bfloat16))
    assert report.ok, str(report)
    passed = {row.check for row in report.rows if row.backend == "triton" and row.status == "ok"}
    assert {"as sampled, fp32", "non-contiguous, bf16", "broadcast, fp32", "gradient, bf16", "opcheck"} <= passed


@pytest.mark.interpreter
@pytest.mark.parametrize("reduce_grad", [True, False])
def test_many_rows_of_a_broadcast_gradient_are_summed(reduce_grad):
    op = fuseopt.elementwise("mine::summed", "silu(a * w + b)", reduce_grad=reduce_grad)
    shapes = (70, 33), (33,), (1, 33)
    inputs = [torch.randn(shape, dtype=torch.bfloat16).float().requires_grad_() for shape in shapes]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    cotangent = torch.randn(70, 33)
    assert op.choose(*inputs).backend == "triton"
    found = torch.autograd.grad(op(*inputs), inputs, cotangent)
    for one, exact in zip(found, torch.autograd.grad(op.function(*wide), wide, cotangent.double()), strict=True):
        torch.testing.assert_close(one, exact.float(), rtol=1e-5, atol=1e-5)
    again = torch.autograd.grad(op(*inputs), inputs, cotangent)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@compiled
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_a_gpu(capability):
    from fuseopt.extend.triton_expression import kernels_of
    from fuseopt.ops.triton.compile_only import compile_only

    kernels = kernels_of(EVERYTHING, ("a", "b", "c"), ())
    tensors = [torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in ((64, 768), (768,), (64, 768))]
    with compile_only(capability, 108) as compiled:
        output = kernels.forward(tensors, ())
        kernels.backward(tensors, (), output, True)
    assert [kernel.metadata.name for kernel in compiled] == ["forward_kernel", "backward_kernel", "column_sum_kernel"]
    assert all(kernel.metadata.target.arch == capability for kernel in compiled)


@pytest.mark.gpu
@pytest.mark.parametrize("expression", [ROAD, EVERYTHING])
def test_on_a_gpu_it_passes_check(expression):
    scalars = {"scale": 1.5} if expression == ROAD else {}
    report = fuseopt.check(sampled(expression, (32, 768), (32, 768), (768,), **scalars), device="cuda")
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("a + ", "is no Python: invalid syntax"),
        ("softmax(a)", r"unknown function 'softmax' \(there are where, min"),
        ("where(a, b)", "2 arguments for where, which takes 3"),
        ("a @ b", r"'a @ b', which is no \+ - \* / \*\*"),
        ("a.t() + b", "which is no"),
        ("clamp(a, b, 1)", "a clamp whose bounds are no numbers"),
        ("scale * 2", "has no tensor"),
        ("a + 1", "the scalar 'scale' is not in 'a . 1'"),
    ],
)
def test_errors_name_what_an_expression_has_besides(expression, message):
    scalars = ("scale",) if expression in ("scale * 2", "a + 1") else ()
    with pytest.raises(OpError, match=message):
        fuseopt.elementwise("mine::wrong", expression, scalars=scalars)


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_later_calls_of_the_same_shapes(device, monkeypatch):
    """Other scalars, other addresses and such as are no multiples of 16 bytes, in a launch that is kept."""
    from fuseopt.extend import triton_expression

    op = fuseopt.elementwise("mine::again", "scale * a * b + shift", scalars=("scale", "shift"))
    a, b = torch.randn(1, 33, device=device), torch.randn(33, 5, device=device).T
    memory = torch.randn(200, device=device)
    made = []
    places_of = triton_expression.places_of
    monkeypatch.setattr(triton_expression, "places_of", lambda tensors: made.append(1) or places_of(tensors))
    for offset, scale, shift in ((0, 1.0, 0.0), (4, 2.0, -1.0), (1, 0.5, 3.0), (0, 1.0, 1.0)):
        inputs = [memory[offset : offset + 33].view(1, 33).copy_(a).requires_grad_(), b.clone().requires_grad_()]
        wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
        output, exact = op(*inputs, scale=scale, shift=shift, backend="triton"), scale * wide[0] * wide[1] + shift
        torch.testing.assert_close(output, exact.float())
        cotangent = torch.randn_like(output)
        found = torch.autograd.grad(output, inputs, cotangent)
        for one, other in zip(found, torch.autograd.grad(exact, wide, cotangent.double()), strict=True):
            torch.testing.assert_close(one, other.float())
    assert len(made) == 2  # once for the forward, once for the backward
