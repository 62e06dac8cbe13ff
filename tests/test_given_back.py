"""What is done to drop-ins while a model is fused counts after restore, and after another initialize, as in stock."""

import copy
import functools
import itertools
import types

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import fuseopt
from fuseopt.modules.base import FusedModule
from tests import tiny
from tests.axes import thinned
from tests.surgery import SURGERIES, Inapplicable

pytestmark = pytest.mark.filterwarnings("ignore:fuseopt")

KERNELS = {"kernel_fusion": {"jit": False, "custom_cuda_kernels": ["FusedRMSNorm", "FusedLayerNorm"]}}
JIT = {"kernel_fusion": {"enable": True}}
NORMS = {
    "gpt2": "transformer.h.0.ln_1",
    "t5_gated": "encoder.block.0.layer.0.layer_norm",
    "llama": "model.layers.0.input_layernorm",
}
MLPS = {
    "gpt2": "transformer.h.0.mlp",
    "t5_gated": "decoder.block.1.layer.2.DenseReluDense",
    "llama": "model.layers.1.mlp",
}


def gone_through(family, config, path, change):
    """(stock's logits, the fused model's after the change, restore, another initialize and restore)."""
    stock = tiny.FAMILIES[family]()
    fused = fuseopt.initialize(copy.deepcopy(stock), config)
    assert isinstance(fused.get_submodule(path), FusedModule)
    for model in (stock, fused):
        change(model, path)
    found = [tiny.logits(fused)]
    for then in (fuseopt.restore, functools.partial(fuseopt.initialize, config=KERNELS), fuseopt.restore):
        found.append(tiny.logits(then(fused)))
    return tiny.logits(stock), found


@pytest.mark.parametrize(("surgery", "family"), list(zip(SURGERIES, itertools.cycle(NORMS), strict=False)))
@pytest.mark.parametrize(("paths", "config"), [(NORMS, "inference"), (MLPS, JIT)], ids=["norm", "mlp"])
def test_changed_drop_ins_stay_changed(family, paths, config, surgery):
    path = paths[family]
    of = type(tiny.FAMILIES[family]().get_submodule(path))

    def change(model, path):
        SURGERIES[surgery](model, path, of)

    try:
        expected, found = gone_through(family, config, path, change)
    except Inapplicable:
        return
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def _class_set(model, path):
    module = model.get_submodule(path)
    of = type(module)
    module.__class__ = type("Changed", (of,), {"forward": lambda self, input: 2 * of.forward(self, input)})


def _method_bound(model, path):
    module = model.get_submodule(path)
    of = type(module)
    module.forward = types.MethodType(lambda self, input: 2 * of.forward(self, input), module)


def _weight_beside_parameters(model, path):
    module = model.get_submodule(path)
    weight = 2 * module.weight.detach()
    del module.weight
    module.weight = weight


def _pruned(model, path):
    prune.l1_unstructured(model.get_submodule(path), "weight", 0.5)


def _pruned_for_good(model, path):
    _pruned(model, path)
    prune.remove(model.get_submodule(path), "weight")


def _parametrized_for_a_while(model, path):
    parametrize.register_parametrization(model.get_submodule(path), "weight", nn.Tanh())
    parametrize.remove_parametrizations(model.get_submodule(path), "weight")


def _offloaded(model, path):
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(model.get_submodule(path), torch.device("cpu"))


def _offloaded_for_a_while(model, path):
    _offloaded(model, path)
    from accelerate.hooks import remove_hook_from_module

    remove_hook_from_module(model.get_submodule(path))


LEFT = (_class_set, _method_bound, _offloaded)
HANDED_BACK = (
    _weight_beside_parameters,
    _pruned,
    _pruned_for_good,
    _parametrized_for_a_while,
    _offloaded_for_a_while,
)


@pytest.mark.parametrize("change", [*LEFT, *HANDED_BACK], ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_classes_methods_and_weights_set_on_a_norm_count(family, change):
    expected, found = gone_through(family, "inference", NORMS[family], change)
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", [*LEFT, *HANDED_BACK], ids=lambda change: change.__name__.strip("_"))
def test_a_norm_is_left_with_a_warning_where_its_source_is_another_thing(change, recwarn):
    model = fuseopt.initialize(tiny.gpt2(), KERNELS)
    norm = model.transformer.h[0].ln_1
    change(model, "transformer.h.0.ln_1")
    recwarn.clear()
    fuseopt.restore(model)
    left = [str(warning.message) for warning in recwarn if "is left as it is" in str(warning.message)]
    assert len(left) == (change in LEFT) and (model.transformer.h[0].ln_1 is norm) == (change in LEFT)
    assert all("transformer.h.0.ln_1" in message for message in left)


def test_a_source_changed_inside_fused_is_not_exchanged_for_the_earlier_drop_in():
    stock = tiny.gpt2()
    fused = fuseopt.initialize(copy.deepcopy(stock), KERNELS)
    with fuseopt.fused(fused, {"kernel_fusion": {"enable": False}}):
        for model in (stock, fused):
            parametrize.register_parametrization(model.transformer.h[0].ln_1, "weight", nn.Tanh())
    assert isinstance(fused.transformer.h[0].ln_2, FusedModule)
    torch.testing.assert_close(tiny.logits(fused), tiny.logits(stock), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tiny.logits(fuseopt.restore(fused)), tiny.logits(stock), rtol=0, atol=0)


def test_attributes_set_and_deleted_inside_fused_are_so_on_the_earlier_drop_in():
    stock = tiny.gpt2()
    fused = fuseopt.initialize(copy.deepcopy(stock), KERNELS)
    fused.transformer.h[0].ln_1.tag = 1
    with fuseopt.fused(fused, "reference"):
        del fused.transformer.h[0].ln_1.tag
        for model in (stock, fused):
            _pruned(model, "transformer.h.0.ln_1")
    for then in (lambda model: model, fuseopt.restore):
        torch.testing.assert_close(tiny.logits(then(fused)), tiny.logits(stock), rtol=1e-4, atol=1e-4)
        assert not hasattr(fused.transformer.h[0].ln_1, "tag")


def test_a_model_all_of_whose_sites_were_set_since_is_planned():
    model = fuseopt.initialize(tiny.gpt2(), {"generation": {"enable": True}})
    model.generate = types.MethodType(type(model).generate, model)
    assert not fuseopt.plan(model, {"generation": {"enable": True}}).replacements


PARTS = {
    "gpt2": ("transformer", "transformer.h.0", "transformer.h.1.mlp", "transformer.ln_f", "lm_head"),
    "t5_gated": ("encoder", "decoder.block.1", "encoder.block.0.layer.1.DenseReluDense", "lm_head"),
    "llama": ("model", "model.layers.0", "model.layers.1.mlp", "model.norm", "model.layers.0.mlp.act_fn"),
}


@thinned(3, family=list(PARTS), first=["inference", "training", JIT], second=["inference", "training", JIT])
def test_a_model_and_a_part_of_it_are_restored_in_any_order(family, first, second):
    stock = tiny.FAMILIES[family]()
    for path in PARTS[family]:
        for paths in itertools.permutations(("", path)):
            for last_first in (False, True):
                model = copy.deepcopy(stock)
                before = tiny.snapshot(model)
                fused = [
                    fuseopt.initialize(model.get_submodule(at), config)
                    for at, config in zip(paths, (first, second), strict=True)
                ]
                assert any(fuseopt.report(module).replaced for module in fused)
                for module in reversed(fused) if last_first else fused:
                    fuseopt.restore(module)
                assert tiny.snapshot(model) == before, (paths, last_first)


def test_a_part_of_a_drop_in_is_skipped_with_the_reason():
    model = fuseopt.initialize(tiny.llama(), JIT)
    reasons = [row.reason for row in fuseopt.plan(model.model, JIT).rows if row.paths[0] == "layers.0.mlp.act_fn"]
    assert reasons == ["it is part of a FusedGatedMLP that another call of initialize put there"]
