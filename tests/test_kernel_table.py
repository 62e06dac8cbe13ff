"""The kernel table: its entries hold, and an entry added at run time is known to configs, presets and plans."""

import dataclasses

import pytest
from torch import nn

import fuseopt
from fuseopt import kernel_table
from fuseopt.config import Config, KernelFusion, KernelRequest
from fuseopt.errors import ConfigError
from fuseopt.kernel_table import (
    CUSTOM,
    PRESETS,
    TRITON,
    Kernel,
    find_kernel,
    kernels,
    listed,
    preset_block,
    register_kernel,
    unregister_kernel,
)
from fuseopt.modules.regions import REGIONS
from fuseopt.ops import registry
from fuseopt.strategies.context import ProposalContext

MINE = Kernel(
    "FusedMine",
    "fuseopt.strategies.drop_ins.propose",
    None,
    {CUSTOM: {"fast": bool, "size": int, "scale": float, "mode": str}},
    {"inference": {"size": 3}, "training": {}},
)


@pytest.fixture(autouse=True)
def registered_kernels_are_removed(monkeypatch):
    monkeypatch.setattr(kernel_table, "_kernels", dict(kernel_table._kernels))


def load(*entries, key=CUSTOM):
    return Config.load({"kernel_fusion": {key: list(entries), "jit": False}})


@pytest.mark.parametrize("kernel", kernels().values(), ids=list(kernels()))
def test_an_entry_names_an_op_and_a_proposer_that_exist(kernel):
    assert callable(kernel.proposer)
    if kernel.op is not None:
        assert registry.get(kernel.op).name == kernel.op
    assert all(activation in REGIONS for activation in kernel.activations)


@pytest.mark.parametrize("kernel", kernels().values(), ids=list(kernels()))
def test_the_options_of_an_entry_are_those_that_a_config_accepts(kernel):
    for key, options in kernel.lists.items():
        entry = {"name": kernel.name, **dict.fromkeys(options, True)}
        (request,) = getattr(load(entry, key=key).kernel_fusion, key)
        assert request.options == dict.fromkeys(options, True)
        with pytest.raises(ConfigError):
            load({**entry, "other": True}, key=key)
    for key in {CUSTOM, TRITON} - set(kernel.lists):
        with pytest.raises(ConfigError, match="not built yet for this list"):
            load(kernel.name, key=key)


def test_presets_ask_for_what_they_asked_for_before_the_table():
    """Written out, so that an entry cannot leave or join a preset unnoticed."""
    custom = [
        "FusedRMSNorm",
        "FusedLayerNorm",
        "FusedGatedGELU",
        "FusedSwiGLU",
        "FusedGELU",
        "FusedSoftmax",
        "FusedBlock",
        "FusedNoRepeatNGram",
        "FusedLMHead",
    ]
    attention = [{"name": f"Fused{name}", "where_it_pays": True} for name in ("Attention", "RelativeAttention")]
    assert preset_block("inference") == {"jit": True, CUSTOM: custom}
    assert preset_block("reference") == {"jit": False, "backend": "reference", CUSTOM: custom}
    assert preset_block("training") == {
        "memory_efficient_fusion": True,
        TRITON: [*attention, "FusedLinearCrossEntropy"],
    }


def test_a_registered_kernel_is_known_to_configs_and_presets_until_it_is_unregistered():
    before = {preset: preset_block(preset) for preset in PRESETS}
    register_kernel(MINE)
    options = {"fast": True, "size": 2, "scale": 1, "mode": "a"}
    assert load({"name": "FusedMine", **options}).kernel_fusion.custom_cuda_kernels[0].options == options
    assert preset_block("inference")[CUSTOM][-1] == {"name": "FusedMine", "size": 3}
    assert preset_block("training") == {**before["training"], CUSTOM: ["FusedMine"]}
    assert preset_block("reference") == before["reference"]
    assert "FusedMine" not in listed(TRITON)
    with pytest.raises(ConfigError, match=r"did you mean 'FusedMine'\? .*known: .*FusedMine"):
        load("FusedMin")
    unregister_kernel("FusedMine")
    assert {preset: preset_block(preset) for preset in PRESETS} == before
    with pytest.raises(ConfigError, match="unknown kernel 'FusedMine'"):
        load("FusedMine")


@pytest.mark.parametrize(("option", "value"), [("fast", 1), ("size", True), ("size", 1.0), ("scale", "1"), ("mode", 1)])
def test_an_option_of_another_type_is_refused(option, value):
    register_kernel(MINE)
    with pytest.raises(ConfigError, match=rf"custom_cuda_kernels\[0\]\.{option}: expected "):
        load({"name": "FusedMine", option: value})


def test_the_proposer_gets_model_options_and_backend_and_its_proposals_are_planned():
    seen = []

    def propose(context):
        seen.append(context)
        (candidate,) = context.index.of_class("torch.nn.modules.linear.Linear")
        yield context.replacement(candidate.sites, "Linear", "Mine", "because", lambda: nn.Linear(3, 2))

    register_kernel(dataclasses.replace(MINE, propose=propose, op="rms_norm"))
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    config = {"kernel_fusion": {CUSTOM: [{"name": "FusedMine", "size": 5}], "jit": False, "backend": "reference"}}
    (row,) = fuseopt.plan(model, config).rows
    assert (row.target, row.reason, row.backend, row.op) == ("Mine", "because", "reference", "rms_norm")
    (context,) = seen
    assert isinstance(context, ProposalContext) and context.options == {"size": 5}
    assert (context.request, context.strategy, context.wanted) == ("FusedMine", "kernels", "reference")
    fuseopt.initialize(model, config)
    assert fuseopt.report(model).replaced[0].target == "Mine"


def test_a_lower_order_claims_a_module_first():
    def propose(context):
        for candidate in context.index.of_class("torch.nn.modules.normalization.LayerNorm"):
            yield context.replacement(candidate.sites, "LayerNorm", context.request, "", nn.Identity)

    register_kernel(dataclasses.replace(MINE, name="Later", propose=propose))
    model = nn.Sequential(nn.LayerNorm(8))
    assert [row.target for row in fuseopt.plan(model, "inference").rows if row.replaced] == ["FusedLayerNorm"]
    register_kernel(dataclasses.replace(MINE, name="First", propose=propose, order=-1))
    assert [row.target for row in fuseopt.plan(model, "inference").rows if row.replaced] == ["First"]
    first, *_, last = kernels()
    assert (first, last) == ("First", "Later")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "the name must be a string"),
        ({"name": "FusedGELU"}, "the name is taken"),
        ({"lists": {}}, "it is in no list"),
        ({"lists": {"cuda_kernels": {}}}, "unknown list 'cuda_kernels'; known are custom_cuda_kernels, triton_kernels"),
        ({"lists": {CUSTOM: {"sizes": list}}}, "option 'sizes' cannot have the type"),
        ({"lists": {CUSTOM: {"name": str}}}, "option 'name' cannot"),
        ({"gpu_options": ("speed",)}, "gpu_options names 'speed', which no list accepts"),
        ({"presets": {"inferense": {}}}, "unknown preset 'inferense'"),
        ({"presets": {"inference": {"speed": 1}}}, "preset 'inference' passes the option 'speed'"),
        ({"propose": "fuseopt.strategies.nothing.propose"}, "cannot be imported: No module named"),
        ({"propose": "fuseopt.strategies.drop_ins.nothing"}, "cannot be imported: .*has no attribute 'nothing'"),
        ({"propose": "propose"}, "cannot be imported: 'propose' is not a dotted path"),
        ({"propose": "fuseopt.strategies.drop_ins"}, "which is not a function"),
    ],
)
def test_a_wrong_entry_is_refused_when_it_is_registered(changes, message):
    with pytest.raises(ValueError, match=message):
        register_kernel(dataclasses.replace(MINE, **changes))
    assert "FusedMine" not in kernels()


def test_the_package_s_kernels_and_unknown_ones_cannot_be_unregistered():
    register_kernel(MINE)
    for name in ("FusedGELU", "FusedYours"):
        with pytest.raises(ValueError, match=f"kernel '{name}' was not registered; registered: FusedMine"):
            unregister_kernel(name)


def test_a_kernel_that_no_entry_names_is_an_error_in_a_config_built_by_hand_too():
    with pytest.raises(ConfigError, match="unknown kernel 'FusedMine'; known: FusedRMSNorm"):
        find_kernel("FusedMine")
    config = Config(KernelFusion(custom_cuda_kernels=(KernelRequest("FusedMine"),)))
    with pytest.raises(ConfigError, match="unknown kernel 'FusedMine'"):
        fuseopt.plan(nn.Linear(2, 2), config)
