"""Ops of the user's own: schema, fake, gradient, choice of a kernel, and what torch's transforms make of them."""

import inspect
import pickle

import numpy
import pytest
import torch
from torch import Tensor

import fuseopt
from fuseopt.errors import BackendError, OpError
from fuseopt.extend import backends, inlined_ops
from fuseopt.ops import registry


def mul_add_relu(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.relu(a * b + c)


def make_op() -> fuseopt.Op:
    return fuseopt.op("mine::mul_add_relu")(mul_add_relu)


def kernel_counting(op: fuseopt.Op, calls: list[str]) -> None:
    @op.kernel("cpu")
    def _(a, b, c):
        calls.append("cpu")
        return torch.addcmul(c, a, b).clamp_min_(0)


def formula_counting(op: fuseopt.Op, calls: list[str]) -> None:
    @op.backward
    def _(inputs, output, grad_output):
        calls.append("backward")
        a, b, _ = inputs
        grad = torch.where(output > 0, grad_output, 0)
        return grad * b, grad * a, grad


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]


def gradients_of(function, inputs):
    output = function(*inputs)
    return torch.autograd.grad(output, inputs, torch.ones_like(output).cumsum(-1))


@pytest.mark.parametrize("given", [(), ("cpu",), ("cpu", "backward"), ("backward",)])
def test_values_and_gradients_are_the_functions(given):
    op, calls, inputs = make_op(), [], drawn(3, 5)
    if "cpu" in given:
        kernel_counting(op, calls)
    if "backward" in given:
        formula_counting(op, calls)
    torch.testing.assert_close(op(*inputs), mul_add_relu(*inputs))
    for function in (op, torch.ops.mine.mul_add_relu):
        calls.clear()
        for found, wanted in zip(gradients_of(function, inputs), gradients_of(mul_add_relu, inputs), strict=True):
            torch.testing.assert_close(found, wanted)
        assert calls == list(given)


def test_a_second_derivative_is_the_references():
    op, inputs = make_op(), drawn(2, 3, dtype=torch.float64)
    formula_counting(op, [])
    assert torch.autograd.gradcheck(op, inputs)
    assert torch.autograd.gradgradcheck(op, inputs)


@pytest.mark.parametrize("given", ["nothing", "kernel", "kernel and backward"])
def test_under_torch_compile_it_is_one_graph(given):
    op, calls, inputs = make_op(), [], drawn(3, 5)
    if given != "nothing":
        kernel_counting(op, calls)
    if given == "kernel and backward":
        formula_counting(op, calls)
    compiled = torch.compile(lambda *tensors: op(*tensors) * 2, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(gradients_of(compiled, inputs), gradients_of(mul_add_relu, inputs), strict=True):
        torch.testing.assert_close(found, 2 * wanted)
    assert "cpu" in calls if given != "nothing" else not calls


def test_dynamo_is_asked_to_pass_nothing_but_strings(monkeypatch):
    """Dynamo of torch 2.11 passes no objects to a function whose result it takes for a constant."""
    given, ask = [], inlined_ops.is_inlined

    def asked(*arguments):
        given.append(arguments)
        return ask(*arguments)

    asked._dynamo_marked_constant = True
    monkeypatch.setattr(inlined_ops, "is_inlined", asked)
    op, inputs = make_op(), drawn(3, 5)
    torch.compile(lambda *tensors: op(*tensors), fullgraph=True, backend="eager")(*inputs)
    assert given and all(isinstance(argument, str) for arguments in given for argument in arguments)


def test_torch_finds_nothing_wrong():
    op = make_op()
    kernel_counting(op, [])
    formula_counting(op, [])
    assert set(torch.library.opcheck(op.overload(), drawn(3, 5)).values()) == {"SUCCESS"}


def test_transforms_and_forward_mode_are_those_of_the_function():
    op, (a, b, c) = make_op(), drawn(4, 5)
    kernel_counting(op, [])
    torch.testing.assert_close(torch.vmap(op)(a, b, c), mul_add_relu(a, b, c))
    found = torch.func.grad(lambda a: op(a, b, c).sum())(a)
    torch.testing.assert_close(found, torch.autograd.grad(mul_add_relu(a, b, c).sum(), a)[0])
    _, tangent = torch.func.jvp(lambda a: op(a, b, c), (a,), (torch.ones_like(a),))
    torch.testing.assert_close(tangent, torch.where(a * b + c > 0, b, 0))


def test_every_kind_of_argument_and_several_results():
    @fuseopt.op("mine::everything")
    def everything(
        x: Tensor,
        others: list[Tensor],
        bias: Tensor | None = None,
        scale: float = 2.0,
        power: int = 1,
        negate: bool = False,
        how: str = "a, b=c",
    ) -> tuple[Tensor, Tensor]:
        total = (x + sum(others)) * scale**power
        total = total if bias is None else total + bias
        return -total if negate else total, total.argmax(-1)

    calls = []

    @everything.kernel("cpu")
    def _(x, others, bias, scale, power, negate, how):
        calls.append(how)
        return everything.function(x, others, bias, scale, power, negate)

    x, y, z, bias = (torch.randn(3, 4, requires_grad=True) for _ in range(4))
    total, places = everything(x, [y, z], negate=True, bias=bias, power=2)
    torch.testing.assert_close(total, -((x + y + z) * 4 + bias))
    assert places.dtype == torch.int64 and not places.requires_grad and calls == ["a, b=c"]
    for found, wanted in zip(torch.autograd.grad(total.sum(), (x, y, bias)), (-4.0, -4.0, -1.0), strict=True):
        assert (found == wanted).all()

    @everything.backward
    def _(inputs, output, grads):
        calls.append("backward")
        scaled = -grads[0] * 4
        return scaled, [scaled, scaled], -grads[0], None, None, None, None

    total, _ = everything(x, [y, z], bias, 2.0, 2, True)
    assert (torch.autograd.grad(total.sum(), z)[0] == -4).all() and calls[-1] == "backward"


def test_results_are_contiguous_and_share_no_memory_with_arguments():
    @fuseopt.op("mine::turned")
    def turned(x: Tensor) -> Tensor:
        return x.t()

    x = torch.randn(3, 4)
    assert turned(x).is_contiguous() and torch.equal(turned(x), x.t())
    same = torch.randn(1, 4)  # whose transpose is contiguous as it stands
    assert torch.ops.mine.turned(same).data_ptr() != same.data_ptr()


def test_the_fake_is_derived_or_given():
    op = make_op()
    inputs = [torch.empty(3, 5, device="meta", dtype=torch.bfloat16) for _ in range(3)]
    assert op(*inputs).shape == (3, 5) and op(*inputs).dtype == torch.bfloat16

    @op.fake
    def _(a, b, c):
        return a.new_empty(7)

    assert op(*inputs).shape == (7,)


def test_choice_falls_through_with_reasons(monkeypatch):
    op, inputs = make_op(), [t.detach() for t in drawn(3, 5)]
    op.kernel("cuda")(lambda a, b, c: a)
    op.kernel("cpu", supports=lambda a, b, c: a.shape[-1] % 2 == 0 or "takes even widths")(lambda a, b, c: a)
    choice = op.choose(*inputs)
    assert choice.backend == "reference"
    assert choice.refused["cpu"] == ["takes even widths"]
    assert choice.refused["cuda"] == ["runs on cuda tensors, not on cpu"]
    torch.testing.assert_close(op(*inputs), mul_add_relu(*inputs))
    even = [torch.randn(2, 4) for _ in range(3)]
    assert op.choose(*even).backend == "cpu" and torch.equal(op(*even), even[0])
    assert torch.equal(op(*even, backend="reference"), mul_add_relu(*even))
    op.supports(lambda a, b, c: a.dtype == torch.float64, "cpu")
    assert op.choose(*even).refused["cpu"] == ["its `supports` says no to these arguments"]
    with pytest.raises(BackendError, match="takes even widths"):
        op(*inputs, backend="cpu")
    with pytest.raises(BackendError, match="has no backend 'mps'; it has auto"):
        op(*inputs, backend="mps")


def test_a_formula_may_be_one_backends_alone():
    op, calls, inputs = make_op(), [], drawn(3, 5)
    op.backward("triton")(lambda *_: calls.append("triton"))
    assert len(gradients_of(op, inputs)) == 3 and not calls


@pytest.mark.parametrize("compiled", [False, True])
def test_a_formula_may_ask_which_gradients_are_needed(compiled):
    asked = []

    @fuseopt.op("mine::product")
    def product(a: Tensor, b: Tensor) -> Tensor:
        return a * b

    @product.backward
    def _(inputs, output, grad, needed):
        asked.append(needed)
        return [grad * other if needs else None for other, needs in zip(reversed(inputs), needed, strict=True)]

    a, b = torch.randn(3), torch.randn(3, requires_grad=True)
    call = torch.compile(product, backend="aot_eager") if compiled else product
    call(a, b).sum().backward()
    assert torch.equal(b.grad, a) and asked == [(False, True)]


def test_autocast_has_no_say():
    @fuseopt.op("mine::matmul")
    def matmul(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    a, b = torch.randn(3, 4), torch.randn(4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ b).dtype == torch.bfloat16
        for function in (matmul, torch.ops.mine.matmul):
            assert function(a, b).dtype == torch.float32


def test_registering_again_replaces_with_a_notice_and_unregister_removes():
    op = make_op()
    kernel_counting(op, [])
    with pytest.warns(UserWarning, match="mine::mul_add_relu is registered again"):

        @fuseopt.op("mine::mul_add_relu")
        def mul_add_relu(a: Tensor) -> Tensor:
            return a + 1

    assert torch.equal(torch.ops.mine.mul_add_relu(torch.zeros(2)), torch.ones(2))
    assert registry.get("mine::mul_add_relu").function is mul_add_relu
    assert pickle.loads(pickle.dumps(mul_add_relu)) is mul_add_relu
    fuseopt.unregister("mine::mul_add_relu")
    assert not hasattr(torch.ops.mine, "mul_add_relu") and "mine::mul_add_relu" not in registry.names()
    with pytest.raises(KeyError, match="no op 'mine::mul_add_relu'"):
        fuseopt.unregister("mine::mul_add_relu")


def test_errors_name_what_is_wrong_and_the_fix():
    def without(a, b: Tensor) -> Tensor:
        return a

    def without_result(a: Tensor):
        return a

    def of_dict(a: Tensor, b: dict) -> Tensor:
        return a

    def pinned(a: Tensor, backend: str) -> Tensor:
        return a

    def keyword_only(a: Tensor, *, b: int = 1) -> Tensor:
        return a

    def of_number(a: Tensor) -> int:
        return 1

    for function, message in (
        (without, r"test_op.py:\d+\): the argument 'a' has no annotation; give Tensor"),
        (without_result, "the result has no annotation; give -> Tensor"),
        (of_dict, "Parameter b has unsupported type <class 'dict'>; an op takes Tensor"),
        (keyword_only, "leave out the *"),
        (of_number, "must return a Tensor"),
        (pinned, "an argument cannot be called 'backend'"),
    ):
        with pytest.raises(OpError, match=message):
            fuseopt.op("mine::wrong")(function)
    for name, message in (
        ("scale", "no name of an op"),
        ("aten::scale", "'aten' is taken"),
        (make_op, "takes the op's"),
    ):
        with pytest.raises(OpError, match=message):
            fuseopt.op(name)
    other = torch.library.Library("theirs", "DEF")
    other.define("scale(Tensor x) -> Tensor")
    with pytest.raises(OpError, match=r"theirs::scale is taken: there is theirs::scale\(Tensor x\)"):
        fuseopt.op("theirs::scale")(mul_add_relu)
    other._destroy()
    op = make_op()
    with pytest.raises(OpError, match="a kernel can be given for cuda, cpu, triton, compile, not for 'rocm'"):
        op.kernel("rocm")
    with pytest.raises(OpError, match=r"has no samples to be called with(.|\n)*@mul_add_relu.samples"):
        next(op.sample_arguments(torch.device("cpu"), torch.float32))
    with pytest.raises(TypeError, match="lacks the argument 'c'; it takes a, b, c"):
        op(torch.ones(1), torch.ones(1))
    with pytest.raises(TypeError, match="the argument 'd' is unknown"):
        op(torch.ones(1), torch.ones(1), torch.ones(1), d=1)
    op.kernel("cpu")(lambda a, b, c: (a, b))
    with pytest.raises(OpError, match="its cpu kernel gave 2 results; the signature says 1 tensor"):
        op(*drawn(2, 3))
    op.kernel("cpu")(mul_add_relu)
    op.backward(lambda inputs, output, grad: (grad, grad))
    with pytest.raises(OpError, match="its backward gave 2 gradients; it has 3 arguments"):
        gradients_of(op, drawn(2, 3))


@pytest.mark.parametrize("has_file", [True, False])
def test_the_compile_backend_stays_compiled_for_more_kinds_of_calls_than_dynamo_compiles_a_function_for(has_file):
    runs = []

    def counting(graph, _):
        return lambda *tensors: runs.append(1) or graph(*tensors)

    op, kinds = make_op(), 0
    if not has_file:
        namespace = {"torch": torch, "Tensor": Tensor, "__name__": "no_module"}
        exec(compile(inspect.getsource(mul_add_relu), "<no file>", "exec"), namespace)
        op = fuseopt.op("mine::mul_add_relu")(namespace["mul_add_relu"])
    with backends.compiling_with(counting):
        for shape in ((4, 6), (5, 7), (1, 6), (4, 1), (0, 6), (6,), (1,), (2, 3, 4), (1, 3, 4), ()):
            for dtype in (torch.float32, torch.float64):
                for inputs in (drawn(*shape, dtype=dtype), [torch.randn(shape, dtype=dtype) for _ in range(3)]):
                    assert op.choose(*inputs, backend="compile").backend == "compile"
                    torch.testing.assert_close(op(*inputs, backend="compile"), mul_add_relu(*inputs))
                    kinds += 1
                    assert len(runs) == kinds, f"{inputs[0].shape} ran without being compiled"
    assert kinds > 3 * torch._dynamo.config.recompile_limit
    # torch before 2.13 compiles all functions without one 8 times together.
    assert inspect.getsourcefile(op.function) is not None


def test_the_compile_backend_takes_functions_with_closures_and_defaults():
    runs, offset = [], torch.ones(3)

    @fuseopt.op("mine::shifted")
    def shifted(x: Tensor, scale: float = 2.0) -> Tensor:
        return x * scale + offset

    def counting(graph, _):
        return lambda *tensors: runs.append(1) or graph(*tensors)

    with backends.compiling_with(counting):
        for x in (torch.randn(3), torch.randn(2, 3)):
            assert torch.equal(shifted(x, backend="compile"), x * 2 + 1)
    assert len(runs) == 2


@pytest.mark.parametrize(
    ("give", "what"),
    [
        (lambda op, function: op.kernel("cpu")(function), r"cpu kernel \(.*test_op.py:\d+\) takes \(a\)"),
        (lambda op, function: op.kernel("cpu", supports=function)(mul_add_relu), "`supports`"),
        (lambda op, function: op.backward(function), "backward"),
        (lambda op, function: op.fake(function), "fake"),
        (lambda op, function: op.samples(function), "samples"),
        (lambda op, function: op.flops(function), "flops"),
        (lambda op, function: fuseopt.op("mine::other", flops=function)(mul_add_relu), "flops"),
    ],
)
def test_functions_with_other_arguments_are_refused_when_they_are_given(give, what):
    op, given = make_op(), drawn(2, 3)
    with pytest.raises(OpError, match=rf"mine::\w+: its {what}(.|\n)* but is called with [23] arguments: "):
        give(op, lambda a: a)
    assert torch.equal(op(*given), mul_add_relu(*given))


def test_scalars_of_another_type_are_refused_by_name():
    @fuseopt.op("mine::scalars")
    def scalars(a: Tensor, times: int, scale: float, is_on: bool, how: str, or_none: float | None = None) -> Tensor:
        return a * times * scale

    try:
        right, a = (2, 0.5, True, "up"), torch.ones(2)
        for given in (right, (True, 1, False, ""), (*right, 3.0), (2, numpy.float32(0.5), True, "")):
            for _ in range(2):  # the second is run directly, where that library is there
                assert torch.equal(scalars(a, *given), a * given[0] * given[1])
        wrong = ((2.5, 0.5, True, ""), (2, "x", True, ""), (2, 0.5, 1, ""), (2, 0.5, True, None), (*right, "x"))
        kinds = (("times", "int"), ("scale", "float"), ("is_on", "bool"), ("how", "str"), ("or_none", "float or None"))
        for given, (name, kind) in zip(wrong, kinds, strict=True):
            with pytest.raises(TypeError, match=f"mine::scalars: the argument '{name}' must be {kind}, not"):
                scalars(a, *given)
    finally:
        fuseopt.unregister("mine::scalars")


def test_an_annotation_that_no_op_takes_prints_only_what_an_op_takes():
    def of_tuple(a: Tensor, b: tuple[int, int]) -> Tensor:
        return a

    with pytest.raises(OpError, match=r"type tuple\[int, int\]; an op takes [\w\[\], |]+$"):
        fuseopt.op("mine::wrong")(of_tuple)


def test_a_backward_of_the_compile_backend_can_run_twice(monkeypatch):
    """Inductor's own overwrites what it has read, if it may, and then refuses `retain_graph=True`."""
    from torch._functorch._aot_autograd import graph_compile

    asked = []
    monkeypatch.setattr(graph_compile, "collect_bw_donated_buffer_idxs", lambda *_, **__: asked.append(1) or [])

    @fuseopt.op("mine::attend")
    def attend(a: Tensor, b: Tensor) -> Tensor:
        return torch.softmax((a @ a.T).exp(), -1) @ b

    a, b = torch.rand(8, 5, requires_grad=True), torch.rand(8, 3, requires_grad=True)
    output = attend(a, b, backend="compile")
    assert type(output.grad_fn).__name__ == "CompiledFunctionBackward"
    first, second = (torch.autograd.grad(output.sum(), (a, b), retain_graph=True) for _ in range(2))
    assert not asked
    for once, again, wanted in zip(
        first, second, torch.autograd.grad(attend.function(a, b).sum(), (a, b)), strict=True
    ):
        assert torch.equal(once, again)
        torch.testing.assert_close(once, wanted)
