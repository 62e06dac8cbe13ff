"""The node of autograd that csrc/python gives eager calls does all that one of torch.autograd.Function does."""

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd

import fuseopt
from fuseopt.build import loader
from fuseopt.extend import gradients


@pytest.fixture(autouse=True)
def library():
    loader.load("cpu")
    assert loader.python_library() is not None, loader.state("python").reason


def drawn(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def sorted_op(with_formula, seen=None):
    """Three results, one of them of integers, and an argument that is no tensor between tensors."""

    @fuseopt.op("mine::sorted")
    def ordered(a: Tensor, scale: float, b: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        values, places = (a * scale if b is None else a * scale + b).sort()
        return values, places, values.exp()

    ordered.kernel("cpu")(ordered.function)
    if with_formula:

        @ordered.backward
        def _(inputs, outputs, grads, needed):
            (_, scale, b), (_, places, powers) = inputs, outputs
            if seen is not None:
                seen.append((grads, needed))
            grad = torch.zeros_like(grads[0]).scatter(-1, places, grads[0] + grads[2] * powers)
            return grad * scale, *([grad.sum_to_size(b.shape)] if b is not None else [])

    ordered(*drawn((2, 3)), 1.0, None)  # settles the kernels
    return ordered


@pytest.mark.parametrize("with_formula", [False, True])
def test_several_results_of_which_one_cannot_vary(with_formula):
    seen = []
    op, (a, b) = sorted_op(with_formula, seen), drawn((4, 5), (5,))
    values, places, powers = op(a, -0.5, b)
    assert places.dtype == torch.int64 and not places.requires_grad and places.grad_fn is None
    assert type(values.grad_fn).__name__ == "CppFunction" and values.grad_fn.name() == "CallBackward"
    assert torch.autograd.gradcheck(lambda *given: op(given[0], -0.5, given[1])[::2], (a, b))
    assert torch.autograd.gradgradcheck(lambda *given: op(given[0], -0.5, given[1])[::2], (a, b))
    assert torch.autograd.gradcheck(lambda a: op(a, 2.0, None)[2], (a,))
    # What does not reach the loss has a gradient of zeros.
    seen.clear()
    found = torch.autograd.grad(powers.sum(), (a,))[0]
    torch.testing.assert_close(found, -0.5 * (a * -0.5 + b).exp())
    if with_formula:
        ((grads, needed),) = seen
        assert [not grad.any() for grad in grads] == [True, True, False] and needed == (True, True)
        seen.clear()
        op(a.detach(), -0.5, b)[2].sum().backward()
        assert [needed for _, needed in seen] == [(False, True)]


@pytest.mark.parametrize("with_formula", [False, True])
def test_saved_tensors_are_checked_and_released(with_formula):
    op, (a,) = sorted_op(with_formula), drawn((3, 4))
    changed = a * 1
    result = op(changed, 1.0, None)[2]
    changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
    result = op(a, 1.0, None)[2]
    first, second = (torch.autograd.grad(result.sum(), a, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    result.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        result.sum().backward()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or len(packed) - 1, packed.__getitem__):
        result = op(a, 1.0, None)[2]
    assert len(packed) == (4 if with_formula else 1)
    assert torch.equal(torch.autograd.grad(result.sum(), a)[0], first)


def test_nothing_is_left_of_a_graph_that_is_dropped():
    op, (a,) = sorted_op(True), drawn((3, 4))
    gc.disable()
    try:
        inner = a * 1
        result = op(inner, 1.0, None)
        watched = [weakref.ref(tensor) for tensor in (inner, *result)]
        del inner, result
        assert not any(watch() is not None for watch in watched)
    finally:
        gc.enable()


def test_errors_of_a_formula_reach_backward():
    op, (a,) = sorted_op(False), drawn((3, 4))

    @op.backward
    def _(inputs, output, grad_output):
        raise LookupError("no such thing")

    op(a, 1.0, None)
    with pytest.raises(LookupError, match="no such thing"):
        op(a, 1.0, None)[0].sum().backward()
    op.backward(lambda inputs, output, grad_output: [torch.ones(7, dtype=torch.float64)])
    op(a, 1.0, None)
    with pytest.raises(RuntimeError, match=r"\[7\]"):
        op(a, 1.0, None)[0].sum().backward()


@pytest.mark.parametrize("with_formula", [False, True])
def test_compiled_autograd_gets_a_node_that_it_can_trace(with_formula, monkeypatch):
    made, as_python_node = [], gradients.as_python_node

    def counting(*arguments):
        made.append(arguments)
        return as_python_node(*arguments)

    monkeypatch.setattr(gradients, "as_python_node", counting)
    op, (a, b) = sorted_op(with_formula), drawn((4, 5), (5,))
    op(a, 3.0, b)
    result = op(a * 2, 3.0, b)
    wanted = torch.autograd.grad(result[0].sum() + result[2].sum(), (a, b), retain_graph=True)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        (result[0].sum() + result[2].sum()).backward()
    assert len(made) == 1
    torch.testing.assert_close([a.grad, b.grad], list(wanted))
