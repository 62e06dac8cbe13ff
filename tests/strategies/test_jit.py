"""The `jit` strategy: regions compiled by TorchScript or Inductor, or run eagerly where neither can."""

import copy
import warnings

import pytest
import torch

import fuseopt
from fuseopt.errors import PlanError
from fuseopt.modules import FusedActivation, FusedGatedMLP, FusedMLP, regions
from fuseopt.modules.base import fused_class
from fuseopt.modules.regions import REGIONS, Region
from tests import tiny

pytestmark = pytest.mark.usefixtures("each_device")

JIT = {"kernel_fusion": {"jit": True}}


@pytest.mark.parametrize(
    ("family", "path", "target"),
    [
        ("gpt2", "transformer.h.1.mlp", FusedMLP),
        ("t5", "encoder.block.0.layer.1.DenseReluDense.act", FusedActivation),
        ("t5_gated", "decoder.block.1.layer.2.DenseReluDense", FusedGatedMLP),
    ],
)
def test_the_scripted_region_is_what_runs(family, path, target, monkeypatch):
    model = tiny.FAMILIES[family]()
    stock = tiny.logits(model)
    fuseopt.initialize(model, JIT, strict=True)
    assert fused_class(model.get_submodule(path)) is target
    assert {row.backend for row in fuseopt.report(model).replaced} == {"torchscript"}
    ran = []
    call = Region.__call__
    monkeypatch.setattr(Region, "__call__", lambda region, *inputs: (ran.append(region), call(region, *inputs))[1])
    torch.testing.assert_close(tiny.logits(model), stock, rtol=1e-5, atol=1e-5)
    assert len(ran) == (2 if family == "gpt2" else 4) and {region.backend for region in ran} == {"torchscript"}
    assert isinstance(regions._compiled(ran[0].name, "torchscript"), torch.jit.ScriptFunction)


@pytest.mark.parametrize("name", REGIONS)
def test_every_region_scripts_without_a_warning_and_differentiates(name):
    count = 2 if name.startswith(("bias_", "gated_")) else 1
    inputs = [torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(count)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        regions._compiled.cache_clear()
        region = Region(name, "torchscript")
        assert torch.equal(region(*inputs), REGIONS[name](*inputs))
    # TorchScript runs op by op until it has seen the shapes, then fused: on a GPU the last bits differ between the two.
    assert torch.autograd.gradcheck(region, inputs, nondet_tol=1e-12)


def test_inductor_runs_the_same_regions():
    model = tiny.gpt2()
    stock = tiny.logits(model)
    fuseopt.initialize(model, {"kernel_fusion": {"jit": {"backend": "inductor"}}}, strict=True)
    torch.testing.assert_close(tiny.logits(model), stock, rtol=1e-5, atol=1e-5)
    assert {row.backend for row in fuseopt.report(model).replaced} == {"inductor"}


def test_without_torchscript_it_runs_eagerly_and_says_why(monkeypatch):
    monkeypatch.delattr(torch.jit, "script")
    regions._compiled.cache_clear()
    model = tiny.gpt2()
    stock = tiny.logits(model)
    fuseopt.initialize(model, JIT)
    row = fuseopt.report(model).replaced[0]
    assert row.backend == "eager" and "cannot script it" in row.reason
    torch.testing.assert_close(tiny.logits(model), stock, rtol=1e-5, atol=1e-5)
    with pytest.raises(PlanError, match="torchscript is not available"):
        fuseopt.initialize(tiny.gpt2(), JIT, strict=True)


def test_without_a_compiler_inductor_runs_eagerly_and_says_why(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fuseopt.initialize(model := tiny.gpt2(), {"kernel_fusion": {"jit": {"backend": "inductor"}}})
    assert "'no-such-compiler' is not on PATH" in fuseopt.report(model).replaced[0].reason


def test_a_fused_model_compiles_whole():
    model = fuseopt.initialize(tiny.gpt2(), JIT)
    eager = tiny.logits(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**tiny.inputs(model)).logits, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "t5", "t5_gated"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_stock(family, dtype):
    model = tiny.FAMILIES[family]()
    exact = tiny.logits(copy.deepcopy(model).double())
    stock = tiny.logits(model.to(dtype))
    fused = tiny.logits(fuseopt.initialize(model, JIT))
    assert fused.dtype == stock.dtype
    allowed = (stock.double() - exact).norm()
    assert (fused.double() - exact).norm() <= 1.15 * allowed + torch.finfo(dtype).eps * exact.norm()


def test_dropout_takes_the_same_random_numbers():
    for family in ("gpt2", "t5_gated"):
        model = tiny.FAMILIES[family]().train()
        batch = tiny.inputs(model)
        torch.manual_seed(3)
        stock = model(**batch).logits
        fuseopt.initialize(model, JIT)
        torch.manual_seed(3)
        torch.testing.assert_close(model(**batch).logits, stock, rtol=1e-5, atol=1e-5)


def test_a_block_whose_activation_has_no_region_stays():
    model = tiny.gpt2(activation_function="tanh")
    with pytest.warns(UserWarning, match="has no region"):
        fuseopt.initialize(model, JIT)
