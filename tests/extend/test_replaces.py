"""A user's fused module and function: planned, reported, verified, restored, pickled and copied like a built-in."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import fuseopt
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


def fast_error(x, y):
    calls.append("fast")
    return squared_error(x, y)


def test_a_function_is_replaced_in_the_instances_calls_alone():
    fuseopt.replaces_function("tests.extend.losses.squared_error")(fast_error)
    config = {"kernel_fusion": {"custom_cuda_kernels": ["fast_error"], "jit": False}}
    try:
        model, other, x, y = nn.ModuleList([ByName(), ByModule()]), ByName(), torch.randn(3), torch.randn(3)
        planned = fuseopt.plan(model, config)
        assert [r.sites[0].path for r in planned.replacements] == ["0.forward"]
        assert "import squared_error by name" in planned.skips[0].reason
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
