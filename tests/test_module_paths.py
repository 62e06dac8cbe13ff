"""`only` and `exclude`: which modules a config leaves to be replaced, and what depends on those that it leaves out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fuseopt
from fuseopt.errors import PlanError
from fuseopt.module_paths import ModulePaths
from tests import tiny

NORMS = {"custom_cuda_kernels": ["FusedRMSNorm"], "jit": False}
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


def replaced(model, fusion, **others):
    """First path -> target of what would be replaced."""
    decided = fuseopt.plan(model, {"kernel_fusion": fusion, **others})
    return {row.paths[0]: row.target for row in decided.rows if row.replaced}


@pytest.mark.parametrize(
    ("only", "exclude", "path", "may"),
    [
        (("*",), (), "", True),
        (("encoder",), (), "encoder", True),
        (("encoder",), (), "encoder.block.0", True),
        (("encoder",), (), "encoder2", False),
        (("encoder.*",), (), "encoder", False),
        (("encoder.*",), (), "encoder.block.0.layer", True),
        (("encoder.*",), (), "", False),
        (("*.0",), (), "h.10", False),
        (("*.0.*",), (), "h.0.mlp.act", True),
        (("h.[01]",), (), "h.1.mlp", True),
        (("h.[01]",), (), "h.2.mlp", False),
        (("*",), ("h.1",), "h.1.mlp", False),
        (("*",), ("h.1",), "h.11.mlp", True),
        (("h.*",), ("*.mlp",), "h.3.mlp.act", False),
        (("*",), ("H.1",), "h.1", True),
    ],
)
def test_a_pattern_names_a_module_and_those_inside_it(only, exclude, path, may):
    assert (ModulePaths(only, exclude).left_out_reason([path]) is None) == may


def test_a_shared_module_is_left_out_under_each_of_its_names():
    shared = nn.LayerNorm(4)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared), "c": nn.LayerNorm(4)})
    norms = {"custom_cuda_kernels": ["FusedLayerNorm"], "jit": False}
    assert set(replaced(model, {**norms, "exclude": ["b.*"]})) == {"c"}
    assert set(replaced(model, {**norms, "only": ["b.*"]})) == {"a.0"}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"only": ["encoder.*"]}, lambda path: path.startswith("encoder.")),
        ({"exclude": ["encoder"]}, lambda path: path.startswith("decoder.")),
        ({"only": ["*.layer.0"], "exclude": ["decoder.*"]}, lambda path: "encoder" in path and ".layer.0." in path),
    ],
)
def test_drop_ins_are_put_where_the_paths_say(given, kept):
    model = tiny.t5()
    every = replaced(model, NORMS)
    assert len(every) == 12
    assert replaced(model, {**NORMS, **given}) == {path: target for path, target in every.items() if kept(path)}
    stock = tiny.logits(model)
    fuseopt.initialize(model, {"kernel_fusion": {**NORMS, **given}})
    assert {row.paths[0] for row in fuseopt.report(model).replaced} == {path for path in every if kept(path)}
    torch.testing.assert_close(tiny.logits(model), stock, rtol=1e-5, atol=1e-5)


def test_the_reason_is_in_the_plan():
    rows = fuseopt.plan(tiny.t5(), {"kernel_fusion": {**NORMS, "exclude": ["encoder.*"]}}).rows
    assert {row.reason for row in rows if not row.replaced} == {"`exclude` names it: 'encoder.*'"}
    rows = fuseopt.plan(tiny.t5(), {"kernel_fusion": {**NORMS, "only": ["decoder.*"]}}).rows
    assert {row.reason for row in rows if not row.replaced} == {"`only` does not name it"}


@pytest.mark.parametrize("exclude", ["encoder.block.1.layer.0.SelfAttention", "encoder.block.1"])
def test_attentions_that_pass_a_bias_on_are_left_out_together(exclude):
    """The others would pass a vector to the one that is left out, which expects a matrix."""
    model = tiny.t5()
    stock = tiny.logits(model)
    config = {"kernel_fusion": {"triton_kernels": ["FusedRelativeAttention"], "jit": False, "exclude": [exclude]}}
    fuseopt.initialize(model, config)
    targets = {row.paths[0]: row.target for row in fuseopt.report(model).replaced}
    assert not [path for path in targets if path.startswith("encoder.")]
    assert [path for path in targets if path.endswith("SelfAttention")] and "decoder.forward" in targets
    torch.testing.assert_close(tiny.logits(model), stock, rtol=1e-5, atol=1e-5)


def test_a_block_that_computes_an_excluded_module_itself_is_left_out():
    fusion = {"custom_cuda_kernels": ["FusedBlock"], "jit": False}
    model = tiny.gpt2()
    assert set(replaced(model, fusion)) == {"transformer.h.0.forward", "transformer.h.1.forward"}
    assert set(replaced(model, {**fusion, "exclude": ["*.1.mlp.c_fc"]})) == {"transformer.h.0.forward"}
    (skip,) = fuseopt.plan(model, {"kernel_fusion": {**fusion, "exclude": ["*.1.mlp.c_fc"]}}).skips
    assert skip.reason == "its transformer.h.1.mlp.c_fc: `exclude` names it: '*.1.mlp.c_fc'"


def test_what_acts_on_the_whole_model_is_at_the_empty_path():
    fusion = {"custom_cuda_kernels": ["FusedNoRepeatNGram"], "memory_efficient_fusion": True, "jit": False}
    whole = {"FusedNoRepeatNGram", "TrainingForward", "FusedGenerate"}
    generation = {"generation": {"enable": True}}
    model = tiny.gpt2()
    assert set(replaced(model, {**fusion, "exclude": ["transformer"]}, **generation).values()) >= whole
    assert set(replaced(model, {**fusion, "only": ["transformer.*"]}, **generation).values()) == {"FusedGenerate"}


def test_a_pattern_of_weights_that_names_nothing_is_not_done_and_an_error_under_strict():
    model = tiny.decoder("llama")
    config = {"generation": {"weights": {"bits": 8, "exclude": ["lm_haed"]}}}
    message = "generation.weights.exclude: 'lm_haed' matches no module of the model; did you mean 'lm_head'?"
    assert fuseopt.plan(model, config).unmet == (message,)
    with pytest.raises(PlanError, match="'lm_haed'"):
        fuseopt.initialize(model, config, strict=True)
    with pytest.warns(UserWarning, match="'lm_haed' matches no module"):
        fuseopt.initialize(model, config)
    assert not fuseopt.plan(model, {"generation": {"weights": {"bits": 8, "exclude": ["lm_head"]}}}).unmet


def test_a_pattern_that_names_nothing_is_not_done_and_an_error_under_strict():
    model = tiny.t5()
    config = {"preset": "inference", "kernel_fusion": {"exclude": ["encodr.*", "decoder.*"]}}
    message = "kernel_fusion.exclude: 'encodr.*' matches no module of the model; did you mean 'encoder"
    (unmet,) = fuseopt.plan(model, config).unmet
    assert unmet.startswith(message)
    assert f"not done: {message}" in " ".join(str(fuseopt.plan(model, config)).split())
    with pytest.raises(PlanError, match="'encodr"):
        fuseopt.initialize(model, config, strict=True)
    assert not fuseopt.report(model).rows
    with pytest.warns(UserWarning, match="matches no module"):
        fuseopt.initialize(model, config)


def test_what_a_preset_asks_for_too_is_silent_and_what_the_dict_adds_is_not():
    model = nn.Sequential(nn.LayerNorm(8))
    same = {"preset": "inference", "generation": {"max_batch": 4}, "kernel_fusion": {"jit": False}}
    assert fuseopt.plan(model, same).unmet == ()
    same = fuseopt.Config.load("inference").to_json()
    assert fuseopt.plan(model, same).unmet == ()
    more = {"preset": "inference", "kernel_fusion": {"triton_kernels": ["FusedRMSNorm"]}}
    (unmet,) = fuseopt.plan(model, more).unmet
    assert unmet.startswith("FusedRMSNorm (triton) matches nothing in the model")


def test_a_backend_beside_a_preset_is_strict():
    model = nn.Sequential(nn.LayerNorm(8))
    config = {"preset": "inference", "kernel_fusion": {"backend": "triton"}}
    with pytest.raises(PlanError, match="FusedLayerNorm: would run on"):
        fuseopt.initialize(model, config, strict=True)
    fuseopt.initialize(model, "inference", strict=True)
