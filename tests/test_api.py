"""initialize, plan, report, restore and fused: what they promise to do, and to leave alone."""

import copy
import io
import json
import pickle

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

import fuseopt
from fuseopt import apply, model_index
from fuseopt.errors import ApplyError, ConfigError, NotAModelError, PlanError
from fuseopt.modules import FusedGELU, FusedLayerNorm, FusedMLP, FusedRMSNorm
from fuseopt.modules.base import fused_class
from tests import tiny
from tests.ops.cases import RawCalls

KERNELS = {"kernel_fusion": {"jit": False, "custom_cuda_kernels": ["FusedRMSNorm", "FusedLayerNorm", "FusedGELU"]}}
JIT = {"kernel_fusion": {"enable": True}}
CONFIGS = {
    "inference": "inference",
    "reference": "reference",
    "jit": JIT,
    "kernels and jit": {
        "kernel_fusion": {"custom_cuda_kernels": ["FusedLayerNorm", "FusedNoRepeatNGram"], "jit": True}
    },
}
pytestmark = [
    pytest.mark.usefixtures("each_device"),
    pytest.mark.filterwarnings("ignore:fuseopt. .* matches nothing in the model"),
]
families = pytest.mark.parametrize("family", ["gpt2", "t5", "t5_gated"])
configs = pytest.mark.parametrize("config", CONFIGS)


@families
@configs
def test_outputs_stay_and_restore_gives_every_object_back(family, config):
    model = tiny.FAMILIES[family](attn_implementation="eager")
    before, stock = tiny.snapshot(model), tiny.logits(model)
    assert fuseopt.initialize(model, CONFIGS[config]) is model
    assert fuseopt.report(model).replaced
    torch.testing.assert_close(tiny.logits(model), stock, rtol=1e-5, atol=1e-5)
    assert list(model.state_dict()) == list(before["storage"])
    assert tiny.snapshot(model)["storage"] == before["storage"]
    assert fuseopt.restore(model) is model
    assert tiny.snapshot(model) == before
    assert torch.equal(tiny.logits(model), stock)


@families
@configs
def test_plan_changes_nothing_and_says_the_same_of_the_stock_and_the_fused_model(family, config):
    model = tiny.FAMILIES[family](attn_implementation="eager")
    before = tiny.snapshot(model)
    planned = fuseopt.plan(model, CONFIGS[config])
    assert tiny.snapshot(model) == before
    fuseopt.initialize(model, CONFIGS[config])
    assert fuseopt.report(model).rows == planned.rows
    before, record = tiny.snapshot(model), apply.applied_to(model)
    again = fuseopt.plan(model, CONFIGS[config])
    assert tiny.snapshot(model) == before and apply.applied_to(model) is record
    assert again.to_json() == planned.to_json()
    assert fuseopt.plan(model, "reference").rows == fuseopt.plan(fuseopt.restore(model), "reference").rows


def test_plan_of_a_fused_model_leaves_what_the_user_set_since():
    model = fuseopt.initialize(tiny.gpt2(), KERNELS)
    mine = model.transformer.h[0].ln_1 = nn.LayerNorm(24)
    planned = fuseopt.plan(model, KERNELS)
    assert model.transformer.h[0].ln_1 is mine and len(planned.replacements) == 7
    with pytest.warns(UserWarning, match="left as it is"), pytest.raises(PlanError):
        fuseopt.initialize(model, {"kernel_fusion": {"custom_cuda_kernels": ["FusedRMSNorm"]}}, strict=True)
    assert model.transformer.h[0].ln_1 is mine and isinstance(model.transformer.h[0].ln_2, FusedLayerNorm)


def test_plan_works_on_the_meta_device():
    config = tiny.gpt2().config
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    planned = fuseopt.plan(model, KERNELS)
    assert {r.target for r in planned.replacements} == {"FusedLayerNorm", "FusedGELU"}
    assert all(parameter.is_meta for parameter in model.parameters())


def test_table_is_aligned_and_json_is_json():
    model = fuseopt.initialize(tiny.t5(), KERNELS)
    text, data = str(fuseopt.report(model)), json.loads(fuseopt.report(model).to_json())
    header, *rows = text.splitlines()[2:]
    column = header.index("strategy")
    assert all(row[column - 2 : column] == "  " for row in rows if "->" in row)
    assert "T5LayerNorm -> FusedRMSNorm[" in text and "encoder.block.*.layer.*.layer_norm" in text
    assert data["model"].startswith("T5ForConditionalGeneration") and data["unmet"]
    assert {row["target"] for row in data["replaced"]} == {"FusedRMSNorm"}
    assert data["kept"]["Linear"] > 0


def test_the_same_config_twice_changes_nothing():
    model = fuseopt.initialize(tiny.gpt2(), KERNELS)
    once = tiny.snapshot(model)
    assert tiny.snapshot(fuseopt.initialize(model, json.loads(json.dumps(KERNELS)))) == once
    with pytest.raises(PlanError, match="FusedRMSNorm"):
        fuseopt.initialize(model, KERNELS, strict=True)
    assert tiny.snapshot(model) == once
    met = fuseopt.initialize(tiny.gpt2(), JIT)
    once = tiny.snapshot(met)
    assert tiny.snapshot(fuseopt.initialize(met, JIT, strict=True)) == once


def test_another_config_restores_and_applies_the_new_one():
    model = tiny.gpt2()
    before = tiny.snapshot(model)
    fuseopt.initialize(model, KERNELS)
    fuseopt.initialize(model, JIT)
    assert isinstance(model.transformer.h[0].mlp, FusedMLP)
    assert type(model.transformer.h[0].ln_1) is nn.LayerNorm
    fuseopt.restore(model)
    assert tiny.snapshot(model) == before


@pytest.mark.parametrize(
    ("config", "strict", "error"),
    [
        ({"kernel_fusion": {}}, False, ConfigError),
        ({"kernel_fusion": {"custom_cuda_kernels": ["FusedRMSNorm"]}}, True, PlanError),
    ],
)
def test_a_refused_config_leaves_an_earlier_one_in_place(config, strict, error):
    model = fuseopt.initialize(tiny.gpt2(), KERNELS)
    once = tiny.snapshot(model)
    with pytest.raises(error):
        fuseopt.initialize(model, config, strict=strict)
    assert tiny.snapshot(model) == once


@families
def test_failing_at_any_replacement_leaves_the_model_as_it_was(family, monkeypatch):
    model = tiny.FAMILIES[family]()
    before = tiny.snapshot(model)
    count = len(fuseopt.plan(model, KERNELS).replacements)
    assert count > 2
    for broken in range(count):
        plan = fuseopt.plan(model, KERNELS)
        object.__setattr__(plan.replacements[broken], "build", _raise)
        with pytest.raises(ApplyError, match="broken on purpose") as error:
            apply.apply_plan(model, plan)
        assert plan.replacements[broken].sites[0].path in str(error.value)
        assert tiny.snapshot(model) == before


def _raise():
    raise RuntimeError("broken on purpose")


def test_other_models_in_the_process_are_unaffected():
    older, model = tiny.gpt2(seed=1), tiny.gpt2()
    forward, before = GPT2MLP.forward, tiny.snapshot(older)
    stock = tiny.logits(older)
    fuseopt.initialize(model)
    younger = tiny.gpt2(seed=1)
    assert GPT2MLP.forward is forward and tiny.snapshot(older) == before
    assert torch.equal(tiny.logits(older), stock) and torch.equal(tiny.logits(younger), stock)
    assert not any(isinstance(m, fuseopt.modules.FusedModule) for m in (*older.modules(), *younger.modules()))


@families
def test_state_follows_the_model_through_and_after(family):
    model = tiny.FAMILIES[family]().train()
    fuseopt.initialize(model)
    model.eval().to(torch.bfloat16)
    fuseopt.restore(model)
    assert not any(module.training for module in model.modules())
    assert all(parameter.dtype is torch.bfloat16 for parameter in model.parameters())


def test_weights_assigned_while_fused_are_there_after_restore():
    model, other = tiny.t5(), tiny.t5(seed=3)
    fuseopt.initialize(model, KERNELS)
    model.load_state_dict(other.state_dict(), assign=True)
    torch.testing.assert_close(tiny.logits(model), tiny.logits(other), rtol=1e-5, atol=1e-5)
    fuseopt.restore(model)
    assert torch.equal(tiny.logits(model), tiny.logits(other))


def test_tied_weights_stay_tied():
    model = fuseopt.initialize(tiny.gpt2())
    assert model.lm_head.weight is model.transformer.wte.weight
    assert fuseopt.restore(model).lm_head.weight is model.transformer.wte.weight


def test_a_module_known_by_two_names_is_one_replacement_at_both():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.LayerNorm(8)
            self.second = self.first

    model = Twice()
    original = model.first
    fuseopt.initialize(model, {"kernel_fusion": {"custom_cuda_kernels": ["FusedLayerNorm"], "jit": False}})
    assert isinstance(model.first, FusedLayerNorm) and model.first is model.second
    assert fuseopt.report(model).replaced[0].paths == ("first", "second")
    fuseopt.restore(model)
    assert model.first is original and model.second is original


@families
def test_save_pretrained_of_a_fused_model_loads_as_stock(family, tmp_path):
    model = tiny.FAMILIES[family]()
    stock = tiny.logits(model)
    fuseopt.initialize(model).save_pretrained(tmp_path)
    auto = AutoModelForSeq2SeqLM if model.config.is_encoder_decoder else AutoModelForCausalLM
    loaded = auto.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(tiny.logits(loaded.eval()), stock)


def _torch_saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@families
@configs
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), _torch_saved])
def test_copies_are_fused_models_of_their_own(family, config, duplicate):
    model = tiny.FAMILIES[family](attn_implementation="eager")
    stock = tiny.logits(model)
    fuseopt.initialize(model, CONFIGS[config])
    fused, before = tiny.logits(model), tiny.snapshot(model)
    other = duplicate(model)
    assert torch.equal(tiny.logits(other), fused)
    assert [row.paths for row in fuseopt.report(other).replaced] == [
        row.paths for row in fuseopt.report(model).replaced
    ]
    fuseopt.restore(other)
    assert torch.equal(tiny.logits(other), stock)
    assert not any(isinstance(module, fuseopt.modules.FusedModule) for module in other.modules())
    assert tiny.snapshot(model) == before


def test_hooks_fire_and_survive_restore():
    model = fuseopt.initialize(tiny.gpt2(), KERNELS)
    norm, fc = model.transformer.h[0].ln_1, model.transformer.h[1].mlp.c_fc
    seen = []
    handles = [module.register_forward_hook(lambda m, args, out: seen.append(fused_class(m))) for module in (norm, fc)]
    tiny.logits(model)
    assert seen == [FusedLayerNorm, type(fc)]
    fuseopt.restore(model)
    tiny.logits(model)
    assert seen[2:] == [nn.LayerNorm, type(fc)]
    for handle in handles:
        handle.remove()
    tiny.logits(model)
    assert len(seen) == 4


def test_modules_with_hooks_stay_and_the_hooks_fire():
    model = tiny.gpt2()
    seen = []
    model.transformer.h[0].ln_1.register_forward_hook(lambda m, args, out: seen.append(fused_class(m)))
    fuseopt.initialize(model, KERNELS)
    (skipped,) = fuseopt.report(model).skipped
    assert skipped.paths == ("transformer.h.0.ln_1",) and "hooks" in skipped.reason
    tiny.logits(model)
    assert seen == [nn.LayerNorm]


def test_subclasses_and_replaced_forwards_stay():
    class MyNorm(nn.LayerNorm):
        pass

    model = tiny.gpt2()
    model.transformer.h[0].ln_1 = MyNorm(24)
    forward = model.transformer.h[0].ln_2.forward
    model.transformer.h[0].ln_2.forward = lambda hidden_states: forward(hidden_states)
    fuseopt.initialize(model, KERNELS)
    reasons = {row.paths[0]: row.reason for row in fuseopt.report(model).skipped}
    assert "subclass of LayerNorm" in reasons["transformer.h.0.ln_1"]
    assert "forward has been replaced" in reasons["transformer.h.0.ln_2"]


def test_gradient_checkpointing_still_trains_the_same():
    stock, model = (
        tiny.gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        tiny.gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    )
    for each in (stock, model):
        each.train().gradient_checkpointing_enable()
    fuseopt.initialize(model, KERNELS)
    assert model.is_gradient_checkpointing
    for each in (stock, model):
        ids = tiny.inputs(each)["input_ids"]
        each(input_ids=ids, labels=ids).loss.backward()
    for (name, wanted), (_, got) in zip(stock.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_fused_restores_at_the_end_also_after_an_error():
    model = tiny.gpt2()
    before = tiny.snapshot(model)
    with fuseopt.fused(model, KERNELS) as fused:
        assert fused is model and isinstance(model.transformer.ln_f, FusedLayerNorm)
    assert tiny.snapshot(model) == before
    with pytest.raises(ZeroDivisionError), fuseopt.fused(model, KERNELS):
        raise ZeroDivisionError
    assert tiny.snapshot(model) == before


def test_fused_gives_an_earlier_config_back():
    model = fuseopt.initialize(tiny.gpt2(), KERNELS)
    once = tiny.snapshot(model)
    with fuseopt.fused(model, JIT):
        assert type(model.transformer.ln_f) is nn.LayerNorm
    assert tiny.snapshot(model) == once
    with fuseopt.fused(model, KERNELS):
        pass
    assert tiny.snapshot(model) == once


def test_modes_set_inside_fused_stay_when_an_earlier_config_comes_back():
    model = fuseopt.initialize(tiny.gpt2().train(), KERNELS)
    with fuseopt.fused(model, JIT):
        model.eval()
    assert isinstance(model.transformer.ln_f, FusedLayerNorm)
    assert not any(module.training for module in model.modules())


def test_what_the_user_set_since_is_left_and_said():
    model = fuseopt.initialize(tiny.gpt2(), KERNELS)
    mine = nn.LayerNorm(24)
    model.transformer.h[0].ln_1 = mine
    with pytest.warns(UserWarning, match=r"transformer\.h\.0\.ln_1 is left as it is, a LayerNorm"):
        fuseopt.restore(model)
    assert model.transformer.h[0].ln_1 is mine and type(model.transformer.h[0].ln_2) is nn.LayerNorm


def test_the_earlier_strategy_wins_and_the_loser_names_it():
    model = tiny.gpt2()
    fuseopt.initialize(model, {"kernel_fusion": {"custom_cuda_kernels": ["FusedGELU"], "jit": True}})
    assert isinstance(model.transformer.h[0].mlp.act, FusedGELU) and type(model.transformer.h[0].mlp) is GPT2MLP
    reasons = {row.reason for row in fuseopt.report(model).skipped}
    assert "FusedGELU by strategy kernels has its act already" in reasons


def test_a_fusion_that_lands_nowhere_warns_and_raises_under_strict():
    config = {"kernel_fusion": {"custom_cuda_kernels": ["FusedRMSNorm", "FusedLayerNorm"], "jit": False}}
    with pytest.warns(UserWarning, match=r"FusedRMSNorm .* matches nothing in the model"):
        model = fuseopt.initialize(tiny.gpt2(), config)
    assert isinstance(model.transformer.ln_f, FusedLayerNorm)
    fresh = tiny.gpt2()
    before = tiny.snapshot(fresh)
    with pytest.raises(PlanError, match=r"FusedRMSNorm .* matches nothing in the model"):
        fuseopt.initialize(fresh, config, strict=True)
    assert tiny.snapshot(fresh) == before


def test_softmax_inside_sdpa_is_said_to_be_there():
    with pytest.warns(UserWarning, match=r"'sdpa', whose softmax cannot be replaced"):
        fuseopt.initialize(
            tiny.gpt2(attn_implementation="sdpa"),
            {"kernel_fusion": {"custom_cuda_kernels": ["FusedSoftmax"], "jit": False}},
        )


def test_a_backend_that_cannot_run_falls_back_with_its_reason_or_raises():
    model = tiny.gpt2()
    device = model.device.type
    backend = {"cpu": "cuda", "cuda": "cpu"}[device]
    config = {"kernel_fusion": {"custom_cuda_kernels": ["FusedLayerNorm"], "jit": False, "backend": backend}}
    row = fuseopt.report(fuseopt.initialize(model, config)).replaced[0]
    assert row.backend == device and f"runs on {backend} tensors, not on {device}" in row.reason
    with pytest.raises(PlanError, match="FusedLayerNorm: would run on"):
        fuseopt.initialize(tiny.gpt2(), config, strict=True)


GELU_ALONE = {"kernel_fusion": {"custom_cuda_kernels": ["FusedGELU"], "jit": False}}


def test_a_model_without_tensors_runs_wherever_its_input_is():
    model = nn.Sequential(nn.GELU("tanh"))
    planned = fuseopt.plan(model, GELU_ALONE)
    libraries, backend = (("cpu", "cuda"), "auto") if torch.cuda.is_available() else (("cpu",), "cpu")
    assert planned.native_libraries == libraries
    assert [replacement.backend for replacement in planned.replacements] == [backend]
    input = torch.randn(3, 8)
    stock = model(input)
    fuseopt.initialize(model, GELU_ALONE, strict=True)
    with RawCalls() as raw:
        torch.testing.assert_close(model(input), stock)
    assert raw.names() == ["gelu_fwd.default"]


def test_a_model_without_tensors_names_no_backend_where_devices_differ(monkeypatch):
    monkeypatch.setattr(
        model_index,
        "_devices_of_machine",
        lambda: (torch.device("cpu"), torch.device("xpu")),
    )
    (replacement,) = fuseopt.plan(nn.Sequential(nn.GELU("tanh")), GELU_ALONE).replacements
    assert (replacement.backend, replacement.libraries) == ("auto", ("cpu",))
    assert replacement.refused.startswith("on xpu: no xpu kernel; cuda: runs on cuda tensors, not on xpu; cpu: ")


def test_a_model_with_buffers_alone_is_planned_for_their_device(monkeypatch):
    monkeypatch.setattr(model_index, "_devices_of_machine", pytest.fail)
    model = nn.Sequential(nn.GELU("tanh"))
    model.register_buffer("positions", torch.arange(3))
    (replacement,) = fuseopt.plan(model, GELU_ALONE).replacements
    assert replacement.backend == model.positions.device.type


def test_enable_false_does_nothing():
    model = tiny.gpt2()
    fuseopt.initialize(
        model, {"kernel_fusion": {"enable": False, "custom_cuda_kernels": ["FusedRMSNorm"]}}, strict=True
    )
    assert not fuseopt.report(model).rows and "nothing replaced" in str(fuseopt.report(model))


def test_any_module_gets_what_applies_and_hears_what_does_not():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU("tanh"), nn.LayerNorm(8), nn.RMSNorm(8, eps=1e-6), nn.Softmax(-1))
    input = torch.randn(3, 8)
    stock = model(input)
    with pytest.warns(
        UserWarning, match="FusedNoRepeatNGram .* matches nothing in the model: Sequential has no generate"
    ):
        fuseopt.initialize(
            model,
            {
                "kernel_fusion": {
                    "custom_cuda_kernels": [
                        "FusedRMSNorm",
                        "FusedLayerNorm",
                        "FusedGELU",
                        "FusedSoftmax",
                        "FusedNoRepeatNGram",
                    ],
                    "jit": False,
                }
            },
        )
    assert [fused_class(module).__name__ for module in model] == [
        "Linear",
        "FusedGELU",
        "FusedLayerNorm",
        "FusedRMSNorm",
        "FusedSoftmax",
    ]
    torch.testing.assert_close(model(input), stock, rtol=1e-5, atol=1e-6)
    assert fuseopt.report(model).kept == {"Linear": 1}


@pytest.mark.parametrize("call", [fuseopt.initialize, fuseopt.plan, fuseopt.report, fuseopt.restore])
@pytest.mark.parametrize("value", ["gpt2", None, {"a": 1}, GPT2MLP])
def test_what_is_no_module_is_refused(call, value):
    with pytest.raises(NotAModelError, match=r"expected a torch\.nn\.Module"):
        call(value)


def test_report_and_restore_of_a_model_that_is_not_fused():
    model = tiny.gpt2()
    before = tiny.snapshot(model)
    assert not fuseopt.report(model).rows
    assert tiny.snapshot(fuseopt.restore(model)) == before


def test_rms_norm_follows_t5_and_its_relatives():
    for family in ("t5", "mt5", "umt5", "longt5"):
        model = fuseopt.initialize(
            tiny.FAMILIES[family](), {"kernel_fusion": {"custom_cuda_kernels": ["FusedRMSNorm"], "jit": False}}
        )
        assert isinstance(model.encoder.final_layer_norm, FusedRMSNorm), family


NORMS = {"kernel_fusion": {"custom_cuda_kernels": ["FusedLayerNorm"], "jit": False}}


def assert_fused_and_restored(model: nn.Module, norms: int) -> None:
    before = [id(module) for module in model.modules()]
    assert len(fuseopt.plan(model, NORMS).replacements) == norms
    fuseopt.initialize(model, NORMS)
    assert sum(isinstance(module, FusedLayerNorm) for module in model.modules()) == norms
    assert len(fuseopt.plan(model, NORMS).replacements) == norms
    fuseopt.restore(model)
    assert [id(module) for module in model.modules()] == before


def test_nested_shared_modules_are_planned_in_linear_time():
    model = nn.LayerNorm(8)
    for _ in range(60):
        shared, model = model, nn.Module()
        model.first, model.second = nn.Sequential(shared), nn.Sequential(shared)
    assert_fused_and_restored(model, norms=1)


def test_a_module_that_contains_itself_is_planned():
    model = nn.Module()
    model.norm, model.inner = nn.LayerNorm(8), nn.Module()
    model.inner.outer, model.itself, model.inner.norm = model, model, nn.LayerNorm(8)
    assert_fused_and_restored(model, norms=2)


@pytest.mark.parametrize("error", [RuntimeError, AttributeError])
def test_a_config_that_raises_is_no_config(error):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

        @property
        def config(self):
            raise error("not configured")

        def forward(self, input):
            return self.norm(input)

    model = Model()
    assert_fused_and_restored(model, norms=1)
    input = torch.randn(3, 8)
    expected = model(input)
    fuseopt.initialize(model, {"kernel_fusion": {"memory_efficient_fusion": {"backend": "aot_eager"}}})
    torch.testing.assert_close(model.train()(input), expected)


def test_what_is_kept_counts_leaves_that_stay_and_no_containers():
    assert fuseopt.plan(tiny.gpt2(), NORMS).kept == {
        "Conv1D": 8,
        "Dropout": 7,
        "Embedding": 2,
        "NewGELUActivation": 2,
        "Linear": 1,
    }
