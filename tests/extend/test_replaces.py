"""A user's fused module and function: planned, reported, verified, restored, pickled and copied like a built-in."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

import fuseopt
import tests.extend.losses
from fuseopt.errors import OpError
from fuseopt.extend.replaced import unreplace
from fuseopt.kernel_table import kernels
from tests.extend import losses
from tests.extend.losses import squared_error


class MulAddReLU(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x * self.scale + self.shift)


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), MulAddReLU(), nn.Linear(8, 8), MulAddReLU())


replacing: fuseopt.Op
calls: list[str] = []


class FusedScaledReLU(fuseopt.FusedModule):
    def forward(self, x):
        return replacing(x, self.scale, self.shift, backend=self.backend)


@pytest.fixture(scope="module", autouse=True)
def registered_for_these_tests():
    """Registers the op and the module: at import other files' tests would see them."""
    global replacing

    @fuseopt.op("mine::replacing")
    def replacing(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.relu(a * b + c)

    @replacing.kernel("cpu")
    def _(a, b, c):
        calls.append("cpu")
        return torch.relu(a * b + c)

    fuseopt.replaces(MulAddReLU, when=lambda module: module.scale.numel() == 8 or "another width")(FusedScaledReLU)
    yield
    unreplace("FusedScaledReLU")
    fuseopt.unregister("mine::replacing")


def by_name(**block):
    return {"kernel_fusion": {"custom_cuda_kernels": ["FusedScaledReLU"], "jit": False, **block}}


@pytest.mark.parametrize("config", ["inference", by_name()], ids=["preset", "by name"])
def test_it_is_planned_applied_reported_and_restored(config):
    model, x = Model(), torch.randn(3, 8)
    wanted, originals = model(x), list(model)
    planned = fuseopt.plan(model, config)
    assert [r.sites[0].path for r in planned.replacements] == ["1", "3"]
    assert {(r.target, r.backend, r.op) for r in planned.replacements} == {
        ("FusedScaledReLU", "cpu", "mine::replacing")
    }
    calls.clear()
    fuseopt.initialize(model, config, strict=not isinstance(config, str))
    assert torch.equal(model(x), wanted) and calls == ["cpu", "cpu"]
    assert "FusedScaledReLU" in str(fuseopt.report(model))
    assert isinstance(model[1], MulAddReLU) and model[1].scale is originals[1].scale
    fuseopt.restore(model)
    assert all(now is before for now, before in zip(model, originals, strict=True))


def test_it_is_verified_copied_and_pickled():
    model, x = Model(), torch.randn(3, 8)
    assert fuseopt.verify(model, by_name(), {"input": x}).ok
    fuseopt.initialize(model, by_name())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        calls.clear()
        assert torch.equal(other(x), model(x)) and len(calls) == 4
        assert type(fuseopt.restore(other)[1]) is MulAddReLU


def test_gradients_reach_its_parameters_in_training():
    model, other, x = Model(), None, torch.randn(3, 8)
    other = copy.deepcopy(model)
    fuseopt.initialize(model, "training")
    for each in (model, other):
        each(x).square().sum().backward()
    for one, reference in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, reference.grad)


def test_the_configs_backend_reaches_the_op_and_when_gives_reasons():
    model = Model()
    fuseopt.initialize(model, by_name(backend="reference"))
    calls.clear()
    model(torch.randn(3, 8))
    assert not calls and {row.backend for row in fuseopt.report(model).replaced} == {"reference"}
    wide = nn.Sequential(MulAddReLU(5))
    assert [skip.reason for skip in fuseopt.plan(wide, by_name()).skips] == ["another width"]


def test_without_its_op_modules_are_left():
    @fuseopt.op("mine::gone")
    def gone(x: Tensor) -> Tensor:
        return x + 1

    @fuseopt.replaces(nn.Identity, op=gone)
    class FusedIdentity(fuseopt.FusedModule):
        def forward(self, x):
            return gone(x)

    try:
        fuseopt.unregister("mine::gone")
        planned = fuseopt.plan(nn.Sequential(nn.Identity()), "inference")
        assert "its op mine::gone is not registered any more" in str(planned)
    finally:
        unreplace("FusedIdentity")


def test_an_op_stands_in_for_modules_that_take_its_arguments():
    class Product(nn.Module):
        def forward(self, x, y):
            return x * y

    @fuseopt.op("mine::halved")
    def halved(x: Tensor) -> Tensor:
        return x / 2

    @halved.kernel("cpu")
    def _(x):
        calls.append("halved")
        return x * 0.5

    assert fuseopt.replaces(Halved)(halved) is halved
    try:
        with pytest.raises(OpError, match=r"halved.forward.* takes .*x.*must take the same; call the op in"):
            fuseopt.replaces(Product)(halved)
        model, x = nn.Sequential(nn.Linear(8, 8), Halved()), torch.randn(3, 8)
        expected = model(x)
        (row,) = fuseopt.plan(model, "inference").replacements
        assert (row.target, row.op, row.backend) == ("halved", "mine::halved", "cpu")
        fuseopt.initialize(model, "inference")
        for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            calls.clear()
            assert torch.equal(each(x), expected) and calls == ["halved"]
        fuseopt.restore(model)
        assert type(model[1]) is Halved
        fuseopt.initialize(model, {"kernel_fusion": {"custom_cuda_kernels": ["halved"], "backend": "reference"}})
        calls.clear()
        assert torch.equal(model(x), expected) and not calls
    finally:
        unreplace("halved")
        fuseopt.unregister("mine::halved")


def test_model_types_subclasses_and_errors():
    class Inner(MulAddReLU):
        pass

    (skip,) = fuseopt.plan(nn.Sequential(Inner()), by_name()).skips
    assert "it is a subclass of" in skip.reason

    @fuseopt.replaces(nn.Linear, model_types=["gpt2"])
    class FusedLinear(fuseopt.FusedModule):
        def forward(self, x):
            return nn.functional.linear(x, self.weight, self.bias)

    try:
        assert not [r for r in fuseopt.plan(Model(), "inference").replacements if r.target == "FusedLinear"]
        with pytest.warns(UserWarning, match="FusedLinear is registered again"):
            fuseopt.replaces(nn.Linear)(FusedLinear)
        assert [r for r in fuseopt.plan(Model(), "inference").replacements if r.target == "FusedLinear"]
        reference = fuseopt.plan(Model(), "reference")
        assert any("pass backend=self.backend in its forward" in skip.reason for skip in reference.skips)
    finally:
        unreplace("FusedLinear")
    assert "FusedLinear" not in kernels()
    with pytest.raises(OpError, match="must be a subclass of"):
        fuseopt.replaces(nn.Linear)(nn.Linear)
    with pytest.raises(OpError, match="the name is taken"):
        fuseopt.replaces(nn.Linear)(type("FusedRMSNorm", (fuseopt.FusedModule,), {"forward": torch.relu}))


class ByName(nn.Module):
    def forward(self, x, y, *, scale=2.0):
        return scale * squared_error(x, y)


class ByModule(nn.Module):
    def forward(self, x, y):
        return losses.squared_error(x, y)


class ByPackage(nn.Module):
    def forward(self, x, y):
        return tests.extend.losses.squared_error(x, y)


class ByDefault(nn.Module):
    def forward(self, x, y, loss=squared_error, *, other=squared_error):
        return (loss(x, y) + other(x, y)) / 2


class InComprehension(nn.Module):
    def forward(self, x, y):
        return sum([squared_error(x, y) for _ in range(2)]) / 2


def by_closure(function=squared_error):
    class ByClosure(nn.Module):
        def forward(self, x, y):
            return function(x, y)

    return ByClosure()


class Decorated(nn.Module):
    @torch.no_grad()
    def forward(self, x, y):
        return losses.squared_error(x, y)


class InMethod(nn.Module):
    def loss(self, x, y):
        return squared_error(x, y)

    def forward(self, x, y):
        return self.loss(x, y)


class OfClass(nn.Module):
    loss = staticmethod(squared_error)

    def forward(self, x, y):
        return self.loss(x, y)


class OfInstance(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss = squared_error

    def forward(self, x, y):
        return self.loss(x, y)


class Importing(nn.Module):
    def forward(self, x, y):
        from tests.extend.losses import squared_error

        return squared_error(x, y)


class Assigning(nn.Module):
    def forward(self, x, y):
        global last
        last = squared_error(x, y)
        return last


class Unrelated(nn.Module):
    def forward(self, x, y):
        return self.squared_error + losses.other


def fast_error(x, y):
    calls.append("fast")
    return squared_error(x, y)


@pytest.fixture
def fast_errors():
    fuseopt.replaces_function("tests.extend.losses.squared_error")(fast_error)
    yield {"kernel_fusion": {"custom_cuda_kernels": ["fast_error"], "jit": False}}
    unreplace("fast_error")


@pytest.mark.parametrize(
    ("make", "times"),
    [(ByName, 1), (ByModule, 1), (ByPackage, 1), (ByDefault, 2), (InComprehension, 2), (Decorated, 1), (by_closure, 1)],
)
def test_ways_in_which_a_forward_reads_the_function(make, times, fast_errors):
    model, other, x, y = nn.ModuleList([make()]), make(), torch.randn(3), torch.randn(3)
    wanted = other(x, y)
    with fuseopt.fused(model, fast_errors):
        calls.clear()
        assert torch.equal(model[0](x, y), wanted) and len(calls) == times
        assert torch.equal(other(x, y), wanted) and torch.equal(losses.squared_error(x, y), squared_error(x, y))
        assert len(calls) == times  # every other caller has the function itself
        compiled = torch.compile(model[0], backend="eager")
        assert torch.equal(compiled(x, y), wanted)
    assert torch.equal(model[0](x, y), wanted) and len(calls) == 2 * times


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (InMethod, "it is called in loss, not in forward"),
        (OfClass, "it is the attribute loss of its class"),
        (OfInstance, "it is the module's attribute loss; set that to fast_error"),
        (Importing, "it imports squared_error inside forward"),
        (Assigning, "its forward assigns to the global last"),
        (Unrelated, None),
    ],
)
def test_ways_that_are_refused_with_the_reason(make, reason, fast_errors):
    planned = fuseopt.plan(nn.ModuleList([make()]), fast_errors)
    assert not planned.replacements and [skip.reason[: len(reason or "")] for skip in planned.skips] == [reason] * bool(
        reason
    )


def test_a_function_is_replaced_in_the_instances_calls_alone():
    fuseopt.replaces_function("tests.extend.losses.squared_error")(fast_error)
    config = {"kernel_fusion": {"custom_cuda_kernels": ["fast_error"], "jit": False}}
    try:
        model, other, x, y = nn.ModuleList([ByName(), ByModule()]), ByName(), torch.randn(3), torch.randn(3)
        planned = fuseopt.plan(model, config)
        assert [r.sites[0].path for r in planned.replacements] == ["0.forward", "1.forward"] and not planned.skips
        fuseopt.initialize(model, config)
        calls.clear()
        assert torch.equal(model[0](x, y), other(x, y)) and calls == ["fast"]
        assert torch.equal(copy.deepcopy(model)[0](x, y), other(x, y)) and calls == ["fast", "fast"]
        fuseopt.restore(model)
        model[0](x, y), model[1](x, y)
        assert calls == ["fast", "fast"] and "forward" not in model[0].__dict__
    finally:
        unreplace("fast_error")
    with pytest.raises(OpError, match=r"no function 'tests.extend.losses.absent'"):
        fuseopt.replaces_function("tests.extend.losses.absent")


def helper(x, y):
    return squared_error(x, y)


def helper_of_helper(x, y):
    return helper(x, y)


class ByHelpers(nn.Module):
    def forward(self, x, y):
        return helper_of_helper(x, y)


def test_a_call_by_a_helper_of_the_file_is_a_row_with_the_reason(fast_errors):
    planned = fuseopt.plan(nn.ModuleList([ByHelpers()]), fast_errors)
    assert not planned.replacements
    assert [s.reason for s in planned.skips] == ["it is called in helper(), which forward calls; call it in forward"]


def test_verify_counts_a_forward_that_calls_another_function_as_run(fast_errors):
    class Using(nn.Module):
        def __init__(self, runs: bool) -> None:
            super().__init__()
            self.used, self.idle, self.weight = ByName(), ByName(), nn.Parameter(torch.ones(3))
            self.runs = runs

        def forward(self, x):
            return self.used(x, self.weight) if self.runs else x * self.weight

    inputs = {"x": torch.randn(2, 3)}
    found = fuseopt.verify(Using(True), fast_errors, inputs)
    assert [line for line in found.not_run if "called" in line] == ["fast_error x 1, such as idle.forward: not called"]
    found = fuseopt.verify(Using(False), fast_errors, inputs)
    assert [line for line in found.not_run if "called" in line] == ["fast_error x 2, such as used.forward: not called"]


def test_a_function_that_takes_other_arguments_is_refused():
    with pytest.raises(OpError, match=r"three \(.*test_replaces.py:\d+\) takes \(x, y, z\); tests.extend.losses"):

        @fuseopt.replaces_function("tests.extend.losses.squared_error")
        def three(x, y, z):
            return x


def test_the_plan_says_why_each_backend_before_the_chosen_one_is_passed_over():
    @fuseopt.op("mine::passed_over")
    def passed_over(a: Tensor) -> Tensor:
        return a + 1

    passed_over.kernel("triton")(lambda a: a + 1)
    passed_over.kernel("cuda")(lambda a: a + 1)

    @fuseopt.replaces(nn.Tanh, op=passed_over)
    class PassedOver(fuseopt.FusedModule):
        def forward(self, x):
            return passed_over(x)

    try:
        (planned,) = fuseopt.plan(nn.Sequential(nn.Linear(2, 2), nn.Tanh())).replacements
        assert planned.backend == "reference"
        assert planned.refused.startswith("no C++ kernel; cuda: runs on cuda tensors, not on cpu; triton: ")
        passed_over.kernel("cpu")(lambda a: a + 1)
        (planned,) = fuseopt.plan(nn.Sequential(nn.Linear(2, 2), nn.Tanh())).replacements
        assert planned.backend == "cpu" and planned.refused is None
    finally:
        fuseopt.unregister("PassedOver")
        fuseopt.unregister("mine::passed_over")


def test_the_packages_names_are_listed():
    assert set(fuseopt.__all__) <= set(dir(fuseopt))
