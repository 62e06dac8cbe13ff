"""Formulas for a gradient under torch.compile and from torch.ops: of one backend, of lists, of several results."""

import warnings

import pytest
import torch
import torch.compiler.config as settings
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

import fuseopt


def drawn(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def give_formula(op, backend, formula):
    """For one backend, or for all if that is None."""
    op.backward(formula) if backend is None else op.backward(backend)(formula)


def differentiated(way, op, function, inputs):
    """Gradients of the squares' sum of `function(op, *inputs)`; `way`: a backend of torch.compile, or torch.ops."""
    if way == "torch.ops":
        results = function(op.overload(), *inputs)
    else:
        torch._dynamo.reset()
        results = torch.compile(lambda *given: function(op, *given), backend=way, fullgraph=True)(*inputs)
    return torch.autograd.grad(sum((result * result).sum() for result in results), inputs)


def check(way, op, function, inputs):
    found = differentiated(way, op, function, inputs)
    wanted = torch.autograd.grad(sum((r * r).sum() for r in function(op.function, *inputs)), inputs)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("way", ("inductor", "torch.ops"))
@pytest.mark.parametrize("backend", ["cpu", None], ids=str)
def test_chained_layers_whose_formula_reads_the_result(way, backend):
    @fuseopt.op("mine::layer")
    def layer(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.relu(F.linear(x, weight, bias))

    layer.kernel("cpu")(lambda x, weight, bias: F.relu(F.linear(x, weight, bias)))
    read = []

    def formula(inputs, output, grad_output, needed):
        x, weight, bias = inputs
        read.append(output.shape)
        grad = grad_output * (output > 0)
        return (
            grad @ weight if needed[0] else None,
            grad.T @ x if needed[1] else None,
            *([grad.sum(0)] if bias is not None else []),
        )

    give_formula(layer, backend, formula)
    check(
        way,
        layer,
        lambda op, x, first, bias, second: [op(op(x, first, bias), second, None)],
        drawn((5, 3), (7, 3), (7,), (4, 7)),
    )
    assert read == [(5, 4), (5, 7)]


@pytest.mark.parametrize("way", ("aot_eager", "torch.ops"))
@pytest.mark.parametrize("backend", ["cpu", None], ids=str)
def test_lists_optional_tensors_and_several_results(way, backend):
    @fuseopt.op("mine::mixed")
    def mixed(parts: list[Tensor], scale: float, shift: Tensor | None = None, times: int = 2) -> tuple[Tensor, Tensor]:
        total = torch.stack(parts).prod(0) * scale
        return torch.exp(total if shift is None else total + shift), total * times

    mixed.kernel("cpu")(mixed.function)
    read = []

    def formula(inputs, outputs, grads, needed):
        parts, scale, shift, times = inputs
        read.append(len(outputs))
        grad = grads[0] * outputs[0] + grads[1] * times
        of_parts = [
            grad * scale * torch.stack(parts[:i] + parts[i + 1 :]).prod(0) if needed[i] else None
            for i in range(len(parts))
        ]
        # The shift is not in the second result.
        return [*of_parts, *([grads[0] * outputs[0]] if shift is not None else [])]

    give_formula(mixed, backend, formula)

    def twice(op, a, b, c):
        first, second = op([a, b], 0.5, c)
        return [*op([first, second, a], -0.25), second]

    check(way, mixed, twice, drawn((3, 4), (3, 4), (3, 4)))
    assert read == [2, 2]


def test_torch_compile_takes_nothing_from_its_caches_for_an_op_that_has_changed():
    (x,) = drawn((3,))

    def gradient(factor: float, formula=None):
        def scaled(x: Tensor) -> Tensor:
            return x * factor

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is registered again
            op = fuseopt.op("mine::scaled")(scaled)
        op.kernel("cpu")(lambda x: x * factor)
        if formula is not None:
            op.backward("cpu")(formula)
        torch._dynamo.reset()
        before = counters["aot_autograd"]["autograd_cache_hit"]
        found = torch.autograd.grad(torch.compile(lambda x: op(x))(x).sum(), x)[0]
        return found[0].item(), counters["aot_autograd"]["autograd_cache_hit"] - before

    with fresh_cache(), settings.patch(cache_key_tag="tag-of-the-user"):
        assert gradient(2.0) == (2, 0)
        assert gradient(2.0) == (2, 1)
        assert gradient(3.0) == (3, 0)
        assert gradient(3.0, lambda inputs, output, grad: grad * 5) == (5, 0)
        assert gradient(3.0, lambda inputs, output, grad: grad * 7) == (7, 0)
        assert settings.cache_key_tag.split()[0] == "tag-of-the-user" and len(settings.cache_key_tag.split()) == 2
