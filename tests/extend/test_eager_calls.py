"""Eager calls of users' ops: which of them run in C++ by csrc/python, and that all others reach torch."""

import contextlib
import gc
import sys
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fuseopt
from fuseopt.build import loader
from fuseopt.errors import BackendError, OpError
from fuseopt.extend.eager_calls import EagerCalls


def product(a: Tensor, b: Tensor) -> Tensor:
    return a * b


X, Y = torch.linspace(-2, 2, 12).view(3, 4), torch.linspace(1, 3, 12).view(3, 4)


@pytest.fixture(autouse=True)
def library():
    loader.load("cpu")
    assert loader.python_library() is not None, loader.state("python").reason


@pytest.fixture
def in_python(monkeypatch) -> list[str]:
    """The backends of the calls that were not run by C++."""
    seen, call = [], EagerCalls.call

    def counting(self, backend, arguments):
        seen.append(backend)
        return call(self, backend, arguments)

    monkeypatch.setattr(EagerCalls, "call", counting)
    return seen


@pytest.fixture
def op() -> fuseopt.Op:
    @fuseopt.op("mine::weighted")
    def weighted(a: Tensor, b: Tensor, scale: float = 2.0) -> Tensor:
        return a * b * scale

    @weighted.kernel("cpu")
    def _(a, b, scale):
        return a * b * scale

    weighted(X, Y)  # the first call settles the order of the kernels
    return weighted


def test_plain_calls_run_in_cpp(op, in_python):
    for given in (X, nn.Parameter(X), X.t().contiguous().t(), X[:, ::2]):
        other = Y[:, ::2] if given.shape == (3, 2) else Y
        assert torch.equal(op(given, other), given * other * 2) and op(given, other).is_contiguous()
    assert torch.equal(op(X, scale=3.0, b=Y), X * Y * 3) and torch.equal(op(X, Y, 1), X * Y)
    with torch.no_grad():
        assert not op(nn.Parameter(X), Y).requires_grad
    with torch.inference_mode():
        assert op(X, Y).is_inference()
    assert op(X[:0], Y[:0]).shape == (0, 4) and not in_python


def test_a_call_with_gradient_runs_in_cpp_too(op, in_python):
    a, b = X.clone().requires_grad_(), Y.clone().requires_grad_()
    found = torch.autograd.grad(op(a, b, 3.0).sum(), (a, b), create_graph=True)
    assert torch.equal(found[0], b * 3) and torch.equal(found[1], a * 3) and not in_python
    assert torch.equal(torch.autograd.grad(found[0].sum(), b)[0], torch.full_like(b, 3))


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_modes_subclasses_and_profilers_see_the_op(op, in_python):
    with Seen() as seen:
        op(X, Y)
    assert seen.ops == ["mine.weighted.default"]
    with torch.profiler.profile() as profile:
        op(X, Y)
    assert "mine::weighted" in {event.name for event in profile.events()}
    with FakeTensorMode() as mode:
        assert op(mode.from_tensor(X), mode.from_tensor(Y)).shape == X.shape
    assert torch.equal(torch.vmap(op)(X, Y), X * Y * 2)
    assert "mine.weighted" in torch.fx.experimental.proxy_tensor.make_fx(lambda a: op(a, Y))(X).code
    assert type(op(X.as_subclass(Subclass), Y)) is Subclass
    with Functions():
        assert torch.equal(op(X, Y), X * Y * 2)
    assert op(X.to("meta"), Y.to("meta")).is_meta
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        assert torch.equal(forward_ad.unpack_dual(op(dual, Y)).tangent, Y * 2)
    assert len(in_python) == 9


def test_without_the_library_all_calls_run_in_python(in_python, monkeypatch):
    monkeypatch.setattr(loader, "python_library", lambda: None)
    op = fuseopt.op("mine::in_python")(product)
    op.kernel("cpu", supports=lambda a, b: a.dim() == 2)(lambda a, b: (a.t() * b.t()).t())
    a = X.clone().requires_grad_()
    for _ in range(2):
        assert torch.equal(op(X, Y), X * Y) and op(X, Y).is_contiguous() and torch.equal(op(X[0], Y[0]), X[0] * Y[0])
        assert torch.equal(torch.autograd.grad(op(a, Y).sum(), a)[0], Y)
    assert len(in_python) == 8


def test_autocast_changes_no_dtype(op, in_python):
    with torch.autocast("cpu", torch.bfloat16):
        assert op(X, Y).dtype == torch.float32
    assert in_python == ["auto"]


def test_each_backend_is_settled_by_itself_and_again_when_kernels_change(op, in_python):
    for _ in range(2):
        assert torch.equal(op(X, Y, backend="reference"), X * Y * 2)
    assert in_python == ["reference"]
    op.kernel("cpu")(lambda a, b, scale: a - b)
    assert torch.equal(op(X, Y), X - Y) and torch.equal(op(X, Y), X - Y) and in_python == ["reference", "auto"]
    op.supports(lambda a, b, scale: a.dim() == 2 or "takes matrices")
    for _ in range(2):
        assert torch.equal(op(X, Y), X - Y) and torch.equal(op(X[0], Y[0]), X[0] * Y[0] * 2)
        with pytest.raises(BackendError, match="takes matrices"):
            op(X[0], Y[0], backend="cpu")
    with pytest.raises(BackendError, match="has no backend 'other'"):
        op(X, Y, backend="other")


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (lambda a, b, scale: (a, b), "gave 2 results"),
        (lambda a, b, scale: None, "gave a NoneType"),
        (lambda a, b, scale: 3, "gave a int"),
        (lambda a, b, scale: [a], "gave 1 results"),
    ],
    ids=range(4),
)
def test_results_that_the_signature_does_not_promise(op, kernel, says):
    op.kernel("cpu")(kernel)
    for given in (X, X, X.clone().requires_grad_()):
        with pytest.raises(OpError, match=f"mine::weighted: its cpu kernel {says}; the signature says 1 tensor"):
            op(given, Y)


def test_results_are_made_contiguous_and_never_an_argument():
    @fuseopt.op("mine::pair")
    def pair(a: Tensor, more: list[Tensor]) -> tuple[Tensor, Tensor]:
        return a.t(), more[0] * 1

    pair.kernel("cpu")(lambda a, more: (a.t(), more[0]))
    for _ in range(3):
        first, second = pair(X, [Y])
        assert first.is_contiguous() and torch.equal(first, X.t()) and torch.equal(second, Y)
        assert second.data_ptr() != Y.data_ptr()
    first, second = pair(X.clone().requires_grad_(), [Y])
    assert first.requires_grad and torch.equal(first, X.t())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes are of Python 3.11")
@pytest.mark.parametrize("context", [contextlib.nullcontext, Seen, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_what_a_users_function_raises_says_where_it_is_from(op, context):
    def fails(*arguments):
        raise LookupError("no such thing")

    op.kernel("cpu")(fails)
    for given in (X, X, X.clone().requires_grad_()):
        with pytest.raises(LookupError, match="no such thing") as raised, context():
            op(given, Y)
        assert "fuseopt: raised by the cpu kernel of mine::weighted" in raised.value.__notes__
    op.supports(fails, "cpu")
    for _ in range(2):
        with pytest.raises(LookupError) as raised, context():
            op(X, Y)
        assert "fuseopt: raised by `supports` of the cpu kernel of mine::weighted" in raised.value.__notes__
    op.samples(fails)
    with pytest.raises(LookupError) as raised:
        list(op.sample_arguments(torch.device("cpu"), torch.float32))
    assert "fuseopt: raised by the samples of mine::weighted" in raised.value.__notes__


def test_an_answer_of_supports_without_truth(op):
    op.supports(lambda a, b, scale: a > 0, "cpu")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Boolean value of Tensor"):
            op(X, Y)


def test_an_op_that_is_gone_is_freed_with_its_kernels():
    class Kernel:
        def __call__(self, a):
            return a * 2

    def doubled(a: Tensor) -> Tensor:
        return a * 2

    op, kernel = fuseopt.op("mine::gone")(doubled), Kernel()
    op.kernel("cpu")(kernel)
    for _ in range(3):
        op(X), op(X.clone().requires_grad_())
    freed = weakref.ref(kernel)
    op.kernel("cpu")(doubled)
    del kernel
    gc.collect()
    assert freed() is None


def test_the_host_does_little_for_a_call(op):
    """Python calls and C calls beyond those of the kernel: a figure that does not depend on the machine's load."""

    def counted(*arguments):
        count = 0

        def profile(frame, event, argument):
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(profile)
        try:
            op(*arguments)
        finally:
            sys.setprofile(None)
        return count

    result, a = Y.clone(), X.clone().requires_grad_()
    op.kernel("cpu")(lambda a, b, scale: result)
    op(X, Y), op(a, Y)
    assert counted(X, Y, 2.0) <= 3 and counted(a, Y, 2.0) <= 3  # the kernel, the end of the count, and one of a change


def test_calls_by_name_run_in_cpp_too_and_wrong_ones_say_what_is_wrong(op, in_python):
    op(X, Y, backend="cpu")
    for given, named in (((X, Y), {"scale": 3.0}), ((X,), {"scale": 3.0, "b": Y}), ((), {"b": Y, "a": X, "scale": 3})):
        assert torch.equal(op(*given, **named, backend="cpu"), X * Y * 3)
    wrong = {
        "takes 3 arguments, got 4": ((X, Y, 2.0, 3.0), {}),
        "lacks the argument 'b'": ((X,), {"scale": 2.0}),
        "the argument 'b' was given twice": ((X, Y), {"b": Y}),
        "the argument 'c' is unknown": ((X, Y), {"c": Y}),
        "the argument 'scale' must be float": ((X, Y), {"scale": "2"}),
    }
    for says, (given, named) in wrong.items():
        with pytest.raises(TypeError, match=says):
            op(*given, **named)
    assert in_python == ["cpu"]  # the call that settles it


def test_a_class_of_ops_with_a_call_of_its_own():
    class Counting(fuseopt.Op):
        def __call__(self, *args, **kwargs):
            self.count = getattr(self, "count", 0) + 1
            return super().__call__(*args, **kwargs)

    counting = Counting("mine::counting", product)
    for count in (1, 2, 3):
        assert torch.equal(counting(X, Y), X * Y) and counting.count == count
    plain = type("Plain", (fuseopt.Op,), {})("mine::plain", product)
    for _ in range(2):
        assert torch.equal(plain(X, Y), X * Y) and torch.equal(plain(X, Y, backend="reference"), X * Y)
    assert torch.equal(torch.compile(lambda a: plain(a, Y) + 1, backend="eager", fullgraph=True)(X), X * Y + 1)
