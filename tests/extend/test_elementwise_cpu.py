"""The C++ kernels of `fuseopt.elementwise`: values and gradients in odd shapes, strides and dtypes."""

import itertools

import pytest
import torch
from torch import Tensor

import fuseopt
from fuseopt.build import toolchain
from fuseopt.extend import cpu_expression

EXPRESSION = "silu(a * w + b) + scale * b"
FUNCTIONS = (
    "where(a > b, gelu(a) / (1 + abs(b)), min(a, b) ** 3) + silu(a) * b - tanh(c) + softplus(a * c) + max(b, c)"
    " + clamp(a, -1, 1) + erf(b) + gelu_tanh(a) + sqrt(abs(b) + 1) + log(exp(a) + 1) + sigmoid(b) + relu(c)"
    " + (abs(a) + 0.1) ** 1.7 + c ** -2"
)


@pytest.fixture(autouse=True)
def needs_a_compiler() -> None:
    try:
        toolchain.cpu_recipe()
    except toolchain.ToolchainError as error:
        pytest.skip(str(error))


def made(expression: str = EXPRESSION, **options) -> fuseopt.Op:
    scalars = ("scale",) if "scale" in expression else ()
    return fuseopt.elementwise("mine::expression", expression, scalars=scalars, **options)


def compare(op: fuseopt.Op, tensors: list[Tensor], *scalars: float, rounding: float = 2e-5) -> None:
    """Values and gradients on the C++ kernel beside the function in float64."""
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    output, exact = op(*inputs, *scalars, backend="cpu"), op.function(*wide, *scalars)
    assert output.shape == exact.shape and output.is_contiguous()

    def check(found: Tensor, wanted: Tensor) -> None:
        eps = max(rounding, torch.finfo(found.dtype).eps)
        if found.dtype == torch.float64:
            eps = 1e-9
        torch.testing.assert_close(
            found.double(), wanted, rtol=eps, atol=eps * max(1, wanted.numel() and wanted.abs().max())
        )

    check(output.detach(), exact.detach())
    cotangent = torch.randn(exact.shape).to(output.dtype)
    found = torch.autograd.grad(output, inputs, cotangent)
    for one, other, tensor in zip(found, torch.autograd.grad(exact, wide, cotangent.double()), tensors, strict=True):
        assert (one.shape, one.dtype) == (tensor.shape, tensor.dtype)
        check(one, other)


SHAPES = [
    ((70, 33), (33,), (1, 33)),
    ((7, 5, 3), (3,), (7, 1, 1)),
    ((3, 2000), (2000,), (3, 1)),
    ((5, 1, 8), (6, 8), ()),
    ((4, 1, 3, 1), (1, 5, 1, 7), (4, 5, 3, 7)),
    ((3000,), (3000,), (1,)),
    ((600, 2), (2,), (600, 1)),
    ((), (), ()),
    ((0, 4), (4,), (1, 4)),
    ((2, 1500, 3), (3,), (2, 1, 3)),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("reduce_grad", [True, False])
def test_broadcast_shapes(shapes, reduce_grad):
    compare(made(reduce_grad=reduce_grad), [torch.randn(shape) for shape in shapes], 1.5)


def test_sizes_that_do_not_broadcast_are_named():
    with pytest.raises(RuntimeError, match=r"tensor 2 of the expression has size 5 in dimension -1, .* has 768"):
        made()(torch.randn(8, 768), torch.randn(5), torch.randn(768), 1.5, backend="cpu")


@pytest.mark.parametrize(
    "dtypes", [*itertools.combinations((torch.float32, torch.bfloat16, torch.float16, torch.float64), 2)]
)
def test_dtypes_promote_as_in_torch(dtypes):
    a, b = dtypes
    op = made()
    tensors = [torch.randn(9, 21).to(a), torch.randn(21).to(b), torch.randn(9, 1).to(b)]
    assert op(*tensors, 0.5, backend="cpu").dtype == torch.promote_types(a, b)
    compare(op, tensors, 0.5)


def test_strides():
    op = made()
    square = torch.randn(40, 40)
    cases = [
        (square.t(), torch.randn(80)[::2], torch.randn(40, 1)),
        (square[:, ::2], torch.randn(1, 20).expand(40, 20), torch.randn(40, 20)),
        (torch.randn(4, 6, 5).permute(2, 0, 1), torch.randn(6), torch.randn(1).expand(5, 4, 6)),
        (torch.randn(3, 1).expand(3, 2048), torch.randn(2048), torch.randn(3, 4096)[:, 2048:]),
    ]
    for tensors in cases:
        compare(op, list(tensors), 1.5)
    cotangent = torch.randn(()).expand(40, 40)
    inputs = [square.clone().requires_grad_(), torch.randn(40), torch.randn(40, 40, requires_grad=True)]
    found = torch.autograd.grad(op(*inputs, 1.0, backend="cpu"), (inputs[0], inputs[2]), cotangent)
    wanted = torch.autograd.grad(op.function(*inputs, 1.0), (inputs[0], inputs[2]), cotangent)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_function(dtype):
    a, b = torch.randn(2, 300, 7, dtype=torch.float64)
    c = torch.randn(7, dtype=torch.float64).abs() + 0.5
    compare(made(FUNCTIONS), [tensor.to(dtype) for tensor in (a, b, c)])


@pytest.mark.slow
def test_special_values_are_those_of_torch():
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([0.0, -0.0, 1, -1, 2.5, -3, 1e-40, -1e-40, 1e-20, 88.5, -88.5, 1e30, -1e30, inf, -inf, nan])
    text = [
        "exp(a)",
        "log(a)",
        "sqrt(a)",
        "tanh(a)",
        "erf(a)",
        "gelu(a)",
        "silu(a)",
        "softplus(a)",
        "sigmoid(a)",
        "relu(a)",
    ]
    text += ["clamp(a, -1, 2)", "abs(a)", "a ** 3"]
    joined = " + ".join(f"where(k == {place}, {each}, 0)" for place, each in enumerate(text))
    op = fuseopt.elementwise("mine::special", f"{joined} + where(k == 50, a ** b, 0) + where(k == 51, min(a, b), 0)")
    zeros = torch.zeros_like(values)
    for place, each in enumerate(text):
        found = op(torch.full_like(values, place), values, zeros, backend="cpu")
        alone = fuseopt.elementwise("mine::alone", each)
        torch.testing.assert_close(
            found, alone.function(values.double()).float(), rtol=2e-6, atol=1e-36, equal_nan=True, msg=each
        )
        fuseopt.unregister("mine::alone")
    pairs = [t.flatten() for t in torch.meshgrid(values, values, indexing="ij")]
    for place, wanted in ((50, (pairs[0].double() ** pairs[1].double()).float()), (51, torch.minimum(*pairs))):
        found = op(torch.full_like(pairs[0], place), *pairs, backend="cpu")
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-36, equal_nan=True)


def test_sums_have_the_same_bits_on_any_number_of_threads():
    inputs = [torch.randn(shape).requires_grad_() for shape in ((5000, 37), (37,), (5000, 1))]
    op, cotangent, threads = made(), torch.randn(5000, 37), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(torch.autograd.grad(op(*inputs, 1.5), inputs, cotangent))
    finally:
        torch.set_num_threads(threads)
    assert op.choose(*inputs, 1.5).backend == "cpu"
    assert all(torch.equal(one, other) for each in found[1:] for one, other in zip(found[0], each, strict=True))


def test_large_eager_calls_and_named_ones_compile(monkeypatch):
    op = made()
    asked = []

    def recorded(*description, may_build=True):
        asked.extend([description] * may_build)
        return "its C++ is not built: no compiler"

    monkeypatch.setattr(cpu_expression, "kernels_of", recorded)
    small, large = torch.randn(128, 127), torch.randn(128, 128)
    choice = op.choose(small, small, small, 1.0)
    assert choice.backend == "reference" and choice.refused["cpu"] == [
        "below 16384 elements it runs if already compiled and without gradient, or if it is named"
    ]
    assert not asked
    choice = op.choose(large, large, large, 1.0)
    assert choice.backend == "reference" and choice.refused["cpu"] == ["its C++ is not built: no compiler"]
    assert torch.equal(op(large, large, large, 1.0), op.function(large, large, large, 1.0)) and len(asked) == 1
    with pytest.raises(fuseopt.errors.BackendError, match="no compiler"):
        op(small, small, small, 1.0, backend="cpu")


def test_small_calls_take_what_is_compiled():
    made()(*[torch.ones(2)] * 3, 1.0, backend="cpu")
    op = made()  # which finds it in the cache
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((2, 3), (3,), ())]
    assert op.choose(*inputs, 1.5).backend == "reference"
    with torch.no_grad():
        assert op.choose(*inputs, 1.5).backend == "cpu"
        assert op.choose(inputs[0].int(), *inputs[1:], 1.5).backend == "reference"
        torch.testing.assert_close(op(*inputs, scale=1.5), op.function(*inputs, 1.5))
    for scale in (1.5, 2):
        found, wanted = op(*inputs, scale=scale, backend="cpu"), op.function(*inputs, scale)
        torch.testing.assert_close(found, wanted)
        for one, other in zip(*(torch.autograd.grad(y.sum(), inputs) for y in (found, wanted)), strict=True):
            torch.testing.assert_close(one, other)


def test_torch_compile_sees_the_expression():
    op = made()
    seen = []

    def backend(module, inputs):
        seen.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    large = torch.randn(128, 128)
    compiled = torch.compile(lambda a: op(a, a, a, 1.0), fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(large), op.function(large, large, large, 1.0))
    assert seen and not any("mine" in target for target in seen)


def test_building_is_forbidden_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FUSEOPT_NO_BUILD", "1")
    op = fuseopt.elementwise("mine::forbidden", "a * 0.123456 + b")
    large = torch.randn(128, 128)
    (reason,) = op.choose(large, large).refused["cpu"]
    assert reason == "its C++ is not built: it is not in the cache, and FUSEOPT_NO_BUILD forbids building"


def test_it_passes_check():
    op = made(FUNCTIONS)

    @op.samples
    def _(device, dtype):
        a, b, c = (torch.randn(shape, device=device, dtype=dtype) for shape in ((3, 5, 24), (24,), (3, 5, 24)))
        yield a, b, c.abs() + 0.5

    report = fuseopt.check(op, device="cpu", dtypes=(torch.float32, torch.bfloat16))
    assert report.ok, str(report)
    passed = {row.check for row in report.rows if row.backend == "cpu" and row.status == "ok"}
    assert {"as sampled, fp32", "non-contiguous, bf16", "broadcast, fp32", "gradient, bf16", "gradcheck"} <= passed
