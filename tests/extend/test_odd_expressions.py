"""`fuseopt.elementwise`: comparisons as numbers, numbers alone, NaN and infinities, odd names."""

import math

import pytest
import torch
from torch.autograd import gradcheck

import fuseopt
from fuseopt.errors import OpError
from fuseopt.extend.expression import computed, derivatives, parse
from fuseopt.ops.library import TRITON_INTERPRETED

BACKENDS = ["reference", pytest.param("triton", marks=pytest.mark.interpreter)]
INF, NAN = math.inf, math.nan
ODD = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.5, -3.0])


@pytest.fixture(autouse=True)
def process(request):
    if TRITON_INTERPRETED and request.node.get_closest_marker("interpreter") is None:
        pytest.skip("of processes in which Triton compiles")


def with_gradient(function, x, **scalars):
    given = x.clone().requires_grad_()
    output = function(given, **scalars)
    (grad,) = torch.autograd.grad(output.sum(), given)
    return output.detach(), grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("+a", lambda a: a),
        ("a * -(a > 0)", lambda a: a * -(a > 0).float()),
        ("a * ((a > 0) - (a < 0))", lambda a: a * ((a > 0).float() - (a < 0).float())),
        ("a + (a > 0) + (a > 0)", lambda a: a + 2 * (a > 0).float()),
        ("a + exp(a > 0)", lambda a: a + torch.exp((a > 0).float())),
        ("where((a > 0) - 1, a, 2 * a)", lambda a: torch.where(a > 0, 2 * a, a)),
        ("where(a, a, 3)", lambda a: torch.where(a != 0, a, 3)),
        ("min(1, 2) * a + sqrt(4) + 2 ** 3", lambda a: a + 10),
        ("a ** 2 ** 2", lambda a: a**4),
        ("a / 0", lambda a: a / 0),
        ("min(a, 1e400)", lambda a: torch.minimum(a, torch.tensor(INF))),
        ("a ** 0", lambda a: a**0),
        ("a ** 1", lambda a: a**1),
        ("clamp(a, 1, -1)", lambda a: torch.clamp(a, 1, -1)),
        ("clamp(a, 1 - 2, 1)", lambda a: torch.clamp(a, -1, 1)),
        ("min(a, 1)", lambda a: torch.minimum(a, torch.tensor(1.0))),
        ("max(a, a)", lambda a: torch.maximum(a, a)),
    ],
)
def test_values_and_gradients_are_torch_s(expression, wanted, backend):
    op = fuseopt.elementwise("mine::odd", expression)
    found = with_gradient(lambda a: op(a, backend=backend), ODD)
    torch.testing.assert_close(found, with_gradient(wanted, ODD), equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("where(s > t, a, -a)", lambda a, s, t: a if s > t else -a),
        ("max(s, t) * a", lambda a, s, t: max(s, t) * a),
        ("exp(s) * a + abs(t)", lambda a, s, t: math.exp(s) * a + abs(t)),
        ("where(a > 0, s, t) + a", lambda a, s, t: torch.where(a > 0, torch.tensor(s), torch.tensor(t)) + a),
    ],
)
def test_scalars_without_a_tensor(expression, wanted, backend):
    op = fuseopt.elementwise("mine::odd", expression, scalars=("s", "t"))
    for s, t in ((0.1, -0.7), (-0.7, 0.1)):
        found = with_gradient(lambda a, s=s, t=t: op(a, s=s, t=t, backend=backend), ODD[3:])
        torch.testing.assert_close(found, with_gradient(lambda a, s=s, t=t: wanted(a, s, t), ODD[3:]))


def test_numbers_keep_float64_in_float64():
    op = fuseopt.elementwise("mine::odd", "where(a > 0, s, 0.2)", scalars="s")
    assert op(torch.tensor([1.0, -1.0], dtype=torch.float64), s=0.1).tolist() == [0.1, 0.2]


@pytest.mark.parametrize(
    ("x", "n"), [(0.0, 0.0), (0.0, 2.0), (0.0, 1.0), (NAN, 0.0), (2.0, -1.0), (-2.0, 2.0), (2.0, 0.0)]
)
def test_the_derivatives_of_a_power_are_torch_s(x, n):
    """By torch, as Triton's interpreter has no pow."""
    values = {name: torch.tensor(value, requires_grad=True) for name, value in (("x", x), ("n", n))}
    wanted = torch.autograd.grad(values["x"] ** values["n"], list(values.values()))
    slopes = derivatives(parse("x ** n"), ["x", "n"])
    found = tuple(computed(slopes[name], values, values["x"].dtype, values["x"].device).detach() for name in ("x", "n"))
    torch.testing.assert_close(found, wanted, equal_nan=True)


@pytest.mark.interpreter
def test_a_power_that_the_interpreter_has_not_runs_in_torch():
    op = fuseopt.elementwise("mine::odd", "a ** 9 + b")
    assert op.choose(ODD, ODD).backend == "reference" and "interpreter" in op.choose(ODD, ODD).refused["triton"][0]
    torch.testing.assert_close(op(ODD, ODD), ODD**9 + ODD, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_names_that_mean_something_elsewhere(backend):
    op = fuseopt.elementwise("mine::compute", "Tensor * compute + op * output_ptr", scalars=("op",))
    a, b, c = torch.randn(3, 5)
    torch.testing.assert_close(op(a, b, c, op=2.0, backend=backend), a * b + 2 * c)
    assert op.__name__ == "compute"


@pytest.mark.parametrize("expression", ["a + é", "where(1 > 0, a, b)", "clamp(a, b, 1)", "a * " + "9" * 400])
def test_what_cannot_be_computed_is_refused(expression):
    with pytest.raises(OpError):
        fuseopt.elementwise("mine::odd", expression)


def test_the_second_derivative_of_an_expression_with_comparisons():
    op = fuseopt.elementwise("mine::odd", "where(a > b, a * a * b, silu(a)) * (a > 0)")
    inputs = [torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert gradcheck(op, inputs) and torch.autograd.gradgradcheck(op, inputs)
