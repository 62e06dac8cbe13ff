"""Ops of odd signatures and results, and what is left of an op whose name another one has taken."""

import contextlib
import copy
import functools
import threading
from typing import Optional

import pytest
import torch
from torch import Tensor

import fuseopt
from fuseopt.build import loader
from fuseopt.errors import OpError

X = torch.linspace(-2, 2, 12).view(3, 4)


def doubled(a: Tensor) -> Tensor:
    return a * 2


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def gradient(function, x=X):
    given = x.clone().requires_grad_()
    function(given).sum().backward()
    return given.grad


def test_a_call_without_tensors_runs_in_every_way_that_one_with_tensors_does():
    @fuseopt.op("mine::counted")
    def counted(n: int) -> Tensor:
        return torch.arange(n)

    wanted = torch.arange(4)
    assert torch.equal(counted(4), wanted) and torch.equal(torch.ops.mine.counted(4), wanted)
    assert torch.equal(compiled(lambda n: counted(n) + 1)(4), wanted + 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(counted(4), wanted)
    with torch.profiler.profile():
        assert torch.equal(counted(4), wanted)
    assert torch.equal(torch.vmap(lambda row: row + counted(4))(X), X + wanted)
    counted.samples(lambda device, dtype: iter([(4,)]))
    assert fuseopt.check(counted).ok


def test_none_and_an_empty_list_in_the_place_of_the_only_tensor():
    @fuseopt.op("mine::of_one")
    def of_one(a: Tensor | None) -> Tensor:
        return torch.zeros(3) if a is None else a * 2

    @fuseopt.op("mine::of_list")
    def of_list(a: list[Tensor]) -> Tensor:
        return a[0] * 2 if a else torch.zeros(3)

    assert torch.equal(of_one(None), torch.zeros(3)) and torch.equal(of_one(X), X * 2)
    assert torch.equal(of_list([]), torch.zeros(3)) and torch.equal(of_list([X]), X * 2)


def test_a_kernel_whose_results_are_a_list_has_a_gradient():
    @fuseopt.op("mine::listed")
    def listed(a: Tensor) -> list[Tensor]:
        return [a * 2, a * 3]

    listed.kernel("cpu")(lambda a: [a * 2, a * 3])
    assert torch.equal(gradient(lambda a: sum(listed(a))), torch.full_like(X, 5))
    assert type(listed(X.clone().requires_grad_())) is list


def test_numbers_in_a_list_beside_a_gradient_under_torch_compile():
    @fuseopt.op("mine::scaled")
    def scaled(a: Tensor, scales: list[float]) -> Tensor:
        return a * scales[0]

    scaled.backward(lambda inputs, output, grad: grad * inputs[1][0])
    for run in (scaled, compiled(lambda a, scales: scaled(a, scales))):
        assert torch.equal(gradient(lambda a, run=run: run(a, [2.0, 3.0])), torch.full_like(X, 2))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "function", [lambda a: a, lambda a: a.view(-1), lambda a: a.detach(), lambda a: a.to(a.dtype)], ids=range(4)
)
def test_results_never_share_memory_with_arguments(function, backend):
    def same(a: Tensor) -> Tensor:
        return function(a)

    op = fuseopt.op("mine::same")(same)
    op.kernel("cpu")(function)
    with torch.no_grad():
        given = X.clone()
        op(given, backend=backend).zero_()
        assert torch.equal(given, X)
    with torch.inference_mode():
        given = X.clone()
        op(given, backend=backend).zero_()
        assert torch.equal(given, X)


@pytest.mark.parametrize("yes", [1, torch.tensor(True), [0]], ids=str)
def test_what_is_true_of_supports_is_yes_and_what_is_false_is_no(yes):
    op = fuseopt.op("mine::doubled")(doubled)
    op.kernel("cpu", supports=lambda a: yes)(lambda a: a * 5)
    op.supports(lambda a: a.dim() == 2)
    assert torch.equal(op(X), X * 5) and torch.equal(op(X[0]), X[0] * 2)
    op.kernel("cpu", supports=lambda a: 0)(lambda a: a * 5)
    assert torch.equal(op(X), X * 2) and "supports" in op.choose(X).refused["cpu"][0]
    op.kernel("cpu", supports=lambda a: None)(lambda a: a * 5)
    op.supports(lambda a: "no matrix")
    assert op.choose(X).refused["cpu"] == ["no matrix"]


def test_an_argument_may_be_called_self():
    @fuseopt.op("mine::times")
    def times(a: Tensor, self: Tensor) -> Tensor:
        return a * self

    assert torch.equal(times(a=X, self=X), X * X) and times.choose(a=X, self=X).backend == "reference"


def of_optional(a: list[Optional[Tensor]]) -> Tensor:  # noqa: UP045
    return a[0]


def of_greek(α: Tensor) -> Tensor:
    return α


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (torch.relu, "Python function"),
        (functools.partial(doubled), "Python function"),
        (torch.nn.ReLU(), "Python function"),
        (of_optional, "list of optional tensors"),
        (of_greek, "in ASCII"),
    ],
    ids=range(5),
)
def test_what_no_op_is_made_of_is_refused(function, says):
    with pytest.raises(OpError, match=says):
        fuseopt.op("mine::refused")(function)


def test_a_name_that_another_op_s_backend_needs():
    fuseopt.op("mine::a__cpu")(doubled)
    op = fuseopt.op("mine::a")(doubled)
    with pytest.raises(OpError, match="mine::a__cpu is taken"):
        op.kernel("cpu")(lambda a: a * 3)
    assert torch.equal(op(X), X * 2) and torch.equal(torch.ops.mine.a__cpu(X), X * 2)
    fuseopt.op("mine::b__backward")(doubled)
    with pytest.raises(OpError, match="mine::b__backward is taken"):
        fuseopt.op("mine::b")(doubled)
    fuseopt.unregister("mine::b__backward")
    assert torch.equal(fuseopt.op("mine::b")(doubled)(X), X * 2)
    with pytest.raises(OpError, match="no name of an op"):
        fuseopt.op("mine::class")


def test_an_op_that_was_replaced_goes_on_computing_its_own_function():
    old = fuseopt.op("mine::again")(doubled)
    old.kernel("cpu")(lambda a: a * 2)
    run = compiled(lambda a: old(a) + 1)
    assert torch.equal(run(X), X * 2 + 1)

    def added(a: Tensor, b: Tensor) -> Tensor:
        return a + b

    with pytest.warns(UserWarning, match="registered again"):
        new = fuseopt.op("mine::again")(added)
    with torch.profiler.profile():
        assert torch.equal(old(X), X * 2) and torch.equal(new(X, X), X + X)
    assert torch.equal(gradient(old), torch.full_like(X, 2))
    assert torch.equal(compiled(lambda a: old(a) + 1)(X), X * 2 + 1)
    with pytest.raises(OpError, match="not registered any more"):
        old.kernel("cpu")(lambda a: a * 7)
    assert torch.equal(torch.ops.mine.again(X, X), X + X)


@pytest.mark.filterwarnings("ignore:.*registered again")
def test_threads_that_register_one_name():
    errors = []

    def register():
        try:
            assert torch.equal(fuseopt.op("mine::thread")(doubled)(X), X * 2)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=register) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and torch.equal(torch.ops.mine.thread(X), X * 2)


@pytest.mark.parametrize(
    "name",
    ["", "::", "mine", "mine::", "::a", "a b::c", "mine::'", 'mine::"', "mine::ü", "mine::a.b", "a::b::c", "mine::a\n"],
)
def test_what_is_no_name_is_refused(name):
    with pytest.raises(OpError, match="is no name of an op; give one with a namespace of your own"):
        fuseopt.op(name)


@pytest.mark.parametrize("namespace", ["aten", "prims", "torch", "fuseopt", "higher_order", "c10d", "load_library"])
def test_namespaces_of_torch_and_fuseopt_are_refused(namespace):
    with pytest.raises(OpError, match=f"the namespace '{namespace}' is taken"):
        fuseopt.op(f"{namespace}::doubled")
    with pytest.raises(OpError, match="is an attribute of every namespace"):
        fuseopt.op("mine::name")


def test_what_is_no_function_is_refused():
    op = fuseopt.op("mine::doubled")(doubled)
    for put in (
        op.samples,
        op.fake,
        op.backward,
        op.supports,
        op.kernel("cpu"),
        lambda f: op.kernel("cpu", f)(doubled),
    ):
        with pytest.raises(OpError, match=r"mine::doubled: its .* must be a function, not 3"):
            put(3)
    with pytest.raises(OpError, match="has no kernel yet"):
        op.supports(lambda a: True)
    with pytest.raises(OpError, match="has no backend 'gpu'"):
        op.backward("gpu")
    assert torch.equal(op(X), X * 2)


def test_warnings_point_at_the_line_that_registers_again():
    fuseopt.op("mine::doubled")(doubled)
    with pytest.warns(UserWarning, match="registered again") as caught:
        fuseopt.op("mine::doubled")(doubled)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="registered again") as caught:
        fuseopt.elementwise("mine::doubled", "a * 2")
    assert caught[0].filename == __file__


VIEWS = {
    "itself": lambda a: a,
    "view": lambda a: a.view(-1),
    "no cast": lambda a: a.to(a.dtype),
    "transposed": lambda a: a.t(),
    "part": lambda a: a[1:],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("how", ["eager", "compiled", "vmap", "observed"])
def test_a_write_into_a_result_changes_no_argument_and_no_other_result(how, view):
    @fuseopt.op("mine::two")
    def two(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        doubled = a * 2
        return VIEWS[view](a), doubled, VIEWS[view](doubled)

    def written(a: Tensor) -> tuple[Tensor, ...]:
        results = two(a)
        for place, result in enumerate(results):
            result.add_(place + 1.0)
        return results

    run = {"compiled": compiled(written), "vmap": torch.vmap(written)}.get(how, written)
    given = X.clone()
    with torch.profiler.profile() if how == "observed" else contextlib.nullcontext():
        results = run(given[None] if how == "vmap" else given)
    assert torch.equal(given, X)
    wanted = VIEWS[view](X) + 1, X * 2 + 2, VIEWS[view](X * 2) + 3
    assert all(torch.equal(r.reshape(w.shape), w) for r, w in zip(results, wanted, strict=True))


def test_a_copy_of_what_holds_an_op_computes_the_same_after_the_name_is_registered_again():
    @fuseopt.op("mine::held")
    def held(a: Tensor) -> Tensor:
        return a + 1

    module = torch.nn.Module()
    module.held = held
    with pytest.warns(UserWarning, match="registered again"):

        @fuseopt.op("mine::held")
        def other(a: Tensor) -> Tensor:
            return a + 2

    assert copy.deepcopy(module).held(X).equal(X + 1)
    fuseopt.unregister("mine::held")
    assert copy.deepcopy(module).held(X).equal(X + 1) and copy.copy(held) is held


@pytest.mark.parametrize("library", [True, False])
def test_a_kernel_and_a_formula_get_the_values_of_lazy_tensors(library, monkeypatch):
    """The memory of `z.conj().imag` holds the values before the change of sign."""
    seen = []

    @fuseopt.op("mine::lazy_twice")
    def twice(x: Tensor) -> Tensor:
        return x * 2

    @twice.kernel("cpu")
    def kernel(x):
        seen.append(x.is_neg())
        return x * 2

    @twice.backward("cpu")
    def formula(inputs, output, grad):
        seen.extend((inputs[0].is_neg(), grad.is_neg()))
        return grad * 2

    if not library:
        monkeypatch.setattr(loader, "python_library", lambda: None)
    negative = torch.complex(torch.ones(3), torch.arange(3.0)).conj().imag
    assert negative.is_neg()
    for _ in range(2):
        assert twice(negative).tolist() == [0, -2, -4]
        x = torch.ones(3, requires_grad=True)
        twice(x).backward(torch._neg_view(torch.ones(3)))
        assert x.grad.tolist() == [-2, -2, -2]
        y = torch.ones(3, requires_grad=True)
        twice(torch._neg_view(y)).sum().backward()
        assert y.grad.tolist() == [-2, -2, -2]
    assert len(seen) == 14 and not any(seen)


@pytest.mark.parametrize("library", [True, False])
def test_a_batch_of_gradients_is_that_of_the_function(library, monkeypatch):
    """Its tensors have no memory, which a formula's kernel reads."""

    @fuseopt.op("mine::squared")
    def squared(x: Tensor) -> Tensor:
        return x * x

    squared.kernel("cpu")(lambda x: x * x)
    squared.backward("cpu")(lambda inputs, output, grad: torch.from_numpy(2 * inputs[0].numpy() * grad.numpy()))
    if not library:
        monkeypatch.setattr(loader, "python_library", lambda: None)
    for _ in range(2):
        x = X.clone().requires_grad_()
        grads = torch.randn(5, *X.shape)
        (found,) = torch.autograd.grad(squared(x), (x,), grads, is_grads_batched=True)
        torch.testing.assert_close(found, 2 * X * grads)
        assert torch.equal(gradient(squared), 2 * X)
        jacobian = torch.autograd.functional.jacobian(squared, X, vectorize=True)
        torch.testing.assert_close(jacobian.reshape(12, 12), torch.diag(2 * X.flatten()))
