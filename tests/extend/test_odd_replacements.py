"""`fuseopt.replaces`: classes that it refuses, predicates that fail, and what is unregistered while a model uses it."""

import pickle

import pytest
import torch
from torch import Tensor, nn

import fuseopt
from fuseopt.errors import OpError, PlanError
from fuseopt.extend.replaced import unreplace

X = torch.randn(3, 4)


class Stock(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))  # by which a report knows the device

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Fused(fuseopt.FusedModule):
    def forward(self, x):
        return x * 3


class WithoutForward(fuseopt.FusedModule):
    pass


class WithoutGradient(fuseopt.FusedModule):
    @torch.no_grad()
    def forward(self, x):
        return tripled_by_op(x, backend=self.backend)


class Inheriting(WithoutGradient):
    pass


class Callable_:
    def __call__(self, x):
        return x * 3


class OfAnObject(fuseopt.FusedModule):
    forward = Callable_()


@pytest.fixture
def put_in():
    """`put_in(cls, **options)`: registers a class for `Stock`, until the test ends."""
    names = []

    def put(cls, **options):
        fuseopt.replaces(Stock, **options)(cls)
        names.append(cls.__name__)

    yield put
    for name in names:
        unreplace(name)


@pytest.mark.parametrize("source", [3, None, int, Stock(), "Stock"], ids=range(5))
def test_what_is_no_class_of_modules_is_refused(source):
    with pytest.raises(OpError, match="takes a class of modules"):
        fuseopt.replaces(source)
    fuseopt.replaces(Stock)(Fused)  # nothing is left of it
    unreplace("Fused")


def test_a_class_without_forward_is_refused():
    with pytest.raises(OpError, match="defines no forward"):
        fuseopt.replaces(Stock)(WithoutForward)
    assert "WithoutForward" not in str(fuseopt.plan(nn.Sequential(Stock())))


@pytest.mark.parametrize("cls", [WithoutGradient, Inheriting])
def test_a_forward_that_is_decorated_or_inherited_names_its_op(cls, put_in):
    global tripled_by_op

    @fuseopt.op("mine::tripled")
    def tripled_by_op(a: Tensor) -> Tensor:
        return a * 3

    put_in(cls)
    model = nn.Sequential(Stock())
    named = {"kernel_fusion": {"custom_cuda_kernels": [cls.__name__], "backend": "reference"}}
    with fuseopt.fused(model, named):
        (row,) = fuseopt.report(model).replaced
        assert (row.op, row.backend) == ("mine::tripled", "reference")
        assert torch.equal(model(X), X * 3)


def test_a_forward_that_is_no_function(put_in):
    put_in(OfAnObject)
    model = nn.Sequential(Stock())
    with fuseopt.fused(model):
        assert torch.equal(model(X), X * 3)


@pytest.mark.parametrize(
    "config", [None, {"kernel_fusion": {"custom_cuda_kernels": ["Fused"]}}], ids=["preset", "named"]
)
@pytest.mark.filterwarnings("ignore:.*matches nothing in the model")
def test_a_predicate_that_raises_leaves_the_module_and_strict_raises(put_in, config):
    def when(module):
        if module.weight.numel() == 1:
            raise LookupError("no such thing")
        return True

    put_in(Fused, when=when)
    model = nn.Sequential(Stock(), Stock())
    model[1].weight = nn.Parameter(torch.ones(2))
    fuseopt.initialize(model, config)
    assert type(model[0]) is Stock and torch.equal(model(X), X * 6)
    assert "its `when` raised LookupError: no such thing" in fuseopt.report(model).to_json()
    pickle.loads(pickle.dumps(fuseopt.report(model)))
    fuseopt.restore(model)
    with pytest.raises(PlanError, match="strict: Sequential: 0: its `when` raised LookupError") as raised:
        fuseopt.initialize(model, config, strict=True)
    cause = raised.value.__cause__
    assert isinstance(cause, LookupError) and "fuseopt: raised by `when` of Fused" in getattr(
        cause, "__notes__", cause.args
    )
    assert torch.equal(model(X), X * 4)


@pytest.mark.parametrize(
    ("answer", "is_in"), [(1, True), ([0], True), (0, False), (None, False), ("no", False)], ids=str
)
def test_what_is_true_of_when_is_yes(answer, is_in, put_in):
    put_in(Fused, when=lambda module: answer)
    model = fuseopt.initialize(nn.Sequential(Stock()))
    assert torch.equal(model(X), X * (3 if is_in else 2))


def test_a_model_goes_on_when_its_op_and_its_class_are_unregistered():
    @fuseopt.op("mine::tripled")
    def tripled(a: Tensor) -> Tensor:
        return a * 3

    class Calling(fuseopt.FusedModule):
        def forward(self, x):
            return tripled(x, backend=self.backend)

    fuseopt.replaces(Stock, op=tripled)(Calling)
    model = fuseopt.initialize(nn.Sequential(Stock()))
    fuseopt.unregister("mine::tripled")
    assert (
        torch.equal(model(X), X * 3) and "mine::tripled is not registered any more" in fuseopt.report(model).to_json()
    )
    assert "not registered any more" in str(fuseopt.plan(nn.Sequential(Stock())))
    unreplace("Calling")
    with torch.profiler.profile():
        assert torch.equal(model(X), X * 3)
    fuseopt.restore(model)
    assert torch.equal(model(X), X * 2)


class TwoArguments(fuseopt.FusedModule):
    def forward(self, x, y):
        return x + y


class WithInit(fuseopt.FusedModule):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (TwoArguments, r"TwoArguments\.forward \(.*test_odd_replacements.py:\d+\) takes \(self, x, y\)"),
        (WithInit, r"WithInit\.__init__ \(.*test_odd_replacements.py:\d+\) would not be called"),
    ],
)
def test_what_could_not_be_called_is_refused_at_registration(cls, message):
    for source in (Stock, f"{Stock.__module__}.Stock"):
        with pytest.raises(OpError, match=message):
            fuseopt.replaces(source)(cls)
    assert cls.__name__ not in str(fuseopt.plan(nn.Sequential(Stock())))


def test_a_class_that_its_package_lacks_is_an_error_and_of_no_package_a_line(put_in):
    for path in ("torch.nn.Absent", "torch.nn.modules.linear.Absent.Inner", "torch.absent.Linear"):
        with pytest.raises(OpError, match=f"there is no class '{path}' to replace"):
            fuseopt.replaces(path)
    fuseopt.replaces("no.such.G")(Fused)
    try:
        planned = fuseopt.plan(nn.Sequential(Stock()), {"kernel_fusion": {"custom_cuda_kernels": ["Fused"]}})
        assert "not done: Fused (kernels) matches nothing in the model: no module of class no.such.G" in str(planned)
        assert "no module of class no.such.G" in str(fuseopt.plan(nn.Sequential(Stock())).skips)
    finally:
        fuseopt.unregister("Fused")


class Newer(fuseopt.FusedModule):
    def forward(self, x):
        return x * 5


def test_the_newest_of_a_class_is_asked_first_and_unregister_takes_it_back(put_in):
    put_in(Fused)
    with pytest.warns(UserWarning, match="Newer is tried before Fused for .*Stock; fuseopt.unregister"):
        fuseopt.replaces(Stock)(Newer)
    model = nn.Sequential(Stock())
    with fuseopt.fused(model):
        assert [row.target for row in fuseopt.report(model).replaced] == ["Newer"]
        assert torch.equal(model(X), X * 5)
    fuseopt.unregister("Newer")
    assert [r.target for r in fuseopt.plan(model).replacements] == ["Fused"]
    with pytest.raises(KeyError, match=r"no op 'Newer' and no replacement of that name; there are .*Fused"):
        fuseopt.unregister("Newer")
