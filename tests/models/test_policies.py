"""The policies' data: the classes they name exist, and each rule's fused module computes what the class does."""

import dataclasses
import importlib
import importlib.util
import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import fuseopt
from fuseopt import modules, ops
from fuseopt.blocks.inference_blocks import InferenceForward, StackForward
from fuseopt.blocks.residual import ResidualForward
from fuseopt.blocks.rotary_embedding import RotaryAttentionForward
from fuseopt.kernel_table import CUSTOM, Kernel, register_kernel, unregister_kernel
from fuseopt.models import (
    COMMON,
    ModelPolicy,
    Rule,
    extend_policy,
    policy_for,
    register_policy,
    registration,
    unknown_names,
)
from fuseopt.models.gpt2 import GPT2
from fuseopt.models.t5 import T5
from fuseopt.modules import FusedGatedMLP, FusedLinearCrossEntropy, FusedRMSNorm
from fuseopt.modules.lazy_logits import LazyLogits
from tests import tiny

RULES = {rule.source: rule for policy in (GPT2, T5, COMMON) for rule in (*policy.kernels, *policy.regions)}
NORMS = [rule for rule in RULES.values() if rule.target_name == "FusedRMSNorm"]


GATED_MLPS = [rule for rule in RULES.values() if rule.target_name == "FusedGatedMLP"]


def named(source: str) -> type:
    module, _, name = source.rpartition(".")
    if importlib.util.find_spec(module.rpartition(".")[0]) is None:
        pytest.skip(f"transformers {transformers.__version__} is older than this model")
    return getattr(importlib.import_module(module), name)


RESIDUAL = {rule.source: rule for policy in (GPT2, T5) for rule in policy.residual_blocks}
DROPOUT_ADD = [rule.source for policy in (GPT2, T5) for rule in policy.dropout_add_blocks]
ROTARY = {rule.source: rule for rule in COMMON.rotary_attentions}
BLOCKS = {rule.source: rule for policy in (GPT2, T5) for rule in policy.inference_blocks}
STACKS = {rule.source: rule for policy in (GPT2, T5) for rule in policy.stacks}
IN_BLOCKS = dict.fromkeys(
    name
    for rule in BLOCKS.values()
    for source, places in rule.options["children"].items()
    for name in (source, *(name for names in places.values() for name in names))
    if not name.endswith(".")
)
HEADS = {rule.source: rule for policy in (GPT2, T5, COMMON) for rule in policy.heads}


@pytest.mark.parametrize(
    "source",
    [
        *RULES,
        *RESIDUAL,
        *DROPOUT_ADD,
        *BLOCKS,
        *STACKS,
        *IN_BLOCKS,
        *HEADS,
        *ROTARY,
        *GPT2.eager_attention,
        *T5.eager_attention,
    ],
)
def test_the_class_exists_under_that_very_name(source):
    cls = named(source)
    assert f"{cls.__module__}.{cls.__qualname__}" == source
    if source in RULES:
        assert issubclass(RULES[source].target_class, modules.FusedModule)
    if source in RESIDUAL:
        assert issubclass(RESIDUAL[source].target_class, ResidualForward)
    if source in BLOCKS:
        assert issubclass(BLOCKS[source].target_class, InferenceForward)
    if source in STACKS:
        assert issubclass(STACKS[source].target_class, StackForward)
    if source in HEADS:
        assert issubclass(HEADS[source].target_class, modules.FusedModule)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch.nn.RMSNorm's own
@pytest.mark.parametrize("rule", NORMS, ids=[rule.source.rpartition(".")[2] for rule in NORMS])
def test_rms_norms_are_the_class_s_own_bit_for_bit(rule):
    torch.manual_seed(0)
    source = named(rule.source)(72, eps=1e-4)
    with torch.no_grad():
        source.weight.normal_()
    hidden_states = 3 * torch.randn(5, 7, 72)
    for weight_dtype, input_dtype in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        fused = FusedRMSNorm.from_module(source.to(weight_dtype), backend="reference", **rule.options)
        wanted, got = (norm(hidden_states.to(input_dtype)) for norm in (source, fused))
        if rule.source.startswith("torch."):
            torch.testing.assert_close(got, wanted)
        else:
            assert got.dtype == wanted.dtype and torch.equal(got, wanted)


def gated_mlp(rule, activation):
    """The source class itself around the children that the rule names; its forward must need no others."""
    source = nn.Module()
    source.__class__ = named(rule.source)
    names = rule.options
    for name in {"gate", "up"} & set(names):
        setattr(source, names[name], nn.Linear(24, 40 if "up" in names else 80))
    setattr(source, names["down"], nn.Linear(40, 24))
    setattr(source, names["act"], ACT2FN[activation])
    if "dropout" in names:
        setattr(source, names["dropout"], nn.Dropout(0.5))
    return source


@pytest.mark.parametrize("rule", GATED_MLPS, ids=[rule.source.rpartition(".")[2] for rule in GATED_MLPS])
def test_gated_mlps_are_the_class_s_own_bit_for_bit(rule):
    torch.manual_seed(0)
    hidden_states = torch.randn(5, 7, 24)
    for activation, name in {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}.items():
        source = gated_mlp(rule, activation)
        call = partial(ops.gated_activation, activation=name, backend="reference")
        fused = FusedGatedMLP.from_module(source, gated_activation=call, **rule.options)
        for dtype in (torch.float32, torch.bfloat16):
            source.to(dtype)
            torch.manual_seed(1)
            wanted = source(hidden_states.to(dtype))
            torch.manual_seed(1)
            assert torch.equal(fused(hidden_states.to(dtype)), wanted)


def decoder_of(source, vocabulary):
    """The source class itself around a stand-in for its layers, which takes whatever the class hands them."""
    model = nn.Module()
    model.__class__ = named(source)
    model.config = LlamaConfig(vocab_size=vocabulary, output_router_logits=False)
    model.loss_type, model.vocab_size = "ForCausalLM", vocabulary
    outputs = BaseModelOutputWithPast(last_hidden_state=torch.randn(2, 5, 24))
    outputs.router_logits = None
    model.model = nn.Module()
    model.model.forward = lambda **_: outputs
    model.lm_head = nn.Linear(24, vocabulary, bias=False)
    return model.train()


# Those that are not to be had small by sizes that others know; their forward is Llama's.
STOOD_IN = {
    "BailingHybridForCausalLM",
    "Dots1ForCausalLM",
    "KimiLinearForCausalLM",
    "Lfm2MoeForCausalLM",
    "LongcatFlashForCausalLM",
    "MiMoV2FlashForCausalLM",
    "Mistral4ForCausalLM",
}


def loss_and_gradients(model, batch):
    torch.manual_seed(0)  # of a router's jitter
    output = model(**batch)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(output.loss, trained, allow_unused=True)
    return output, [output.loss.detach(), *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rule", COMMON.heads, ids=lambda rule: rule.source.rpartition(".")[2])
def test_heads_hand_their_logits_to_the_loss_alone(rule):
    source = named(rule.source)
    if source.__name__ in STOOD_IN:
        torch.manual_seed(0)
        model = decoder_of(rule.source, 40)
        batch = dict.fromkeys(("input_ids", "labels"), torch.randint(40, (2, 5)))
    else:
        model = tiny.of_class(source).train()
        batch = tiny.labelled(model)
    options = dict(rule.options)
    path = options.pop("head")
    _, expected = loss_and_gradients(model, batch)
    parent, _, name = path.rpartition(".")
    head = FusedLinearCrossEntropy.from_module(model.get_submodule(path), backend="reference", **options)
    setattr(model.get_submodule(parent), name, head)
    output, found = loss_and_gradients(model, batch)
    logits = output["logits" if "logits" in output else "prediction_logits"]
    assert isinstance(logits, LazyLogits) and logits.output.computed is None
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def rotary_attention(rule, implementation):
    """The source class itself around what its forward needs, with two queries a key where eager attention can."""
    source = nn.Module()
    source.__class__ = named(rule.source)
    groups = 1 if implementation == "eager" else 2
    heads = 4 // groups
    source.config = SimpleNamespace(_attn_implementation=implementation, num_attention_heads=4, sliding_window=3)
    source.layer_idx, source.head_dim, source.num_key_value_heads, source.num_key_value_groups = 0, 8, heads, groups
    source.scaling, source.attention_dropout, source.is_causal = 0.3, 0.25, True
    source.sliding_window, source.attn_logit_softcapping = 3, 5.0
    if rule.options.get("packed"):
        source.qkv_proj = nn.Linear(24, 32 + 2 * 8 * heads)
    else:
        source.q_proj, source.k_proj, source.v_proj = (nn.Linear(24, 8 * size) for size in (4, heads, heads))
    if rule.options.get("norms"):
        source.q_norm, source.k_norm = nn.LayerNorm(8), nn.LayerNorm(8)
    source.o_proj = nn.Linear(32, 24)
    return source


@pytest.mark.parametrize("rule", ROTARY.values(), ids=[source.rpartition(".")[2] for source in ROTARY])
@pytest.mark.parametrize("implementation", ["eager", "recorded"])
def test_rotary_attentions_are_the_class_s_own_bit_for_bit(rule, implementation, monkeypatch):
    """Also what they give the attention function, and what they leave in the cache."""
    torch.manual_seed(0)
    source = rotary_attention(rule, implementation)
    fused = RotaryAttentionForward(source, backend="reference", **rule.options)
    given = []

    def recorded(module, query, key, value, mask, **kwargs):
        given.append((module, query, key, value, mask, kwargs))
        return query.transpose(1, 2), key

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "recorded", recorded)
    hidden_states, *angles = torch.randn(2, 5, 24), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    mask = torch.zeros(2, 1, 1, 1)
    for dtype, training in ((torch.float32, True), (torch.bfloat16, False)):
        source.to(dtype).train(training)
        results = []
        for forward in (type(source).forward.__get__(source), fused):
            given.clear()
            cache = DynamicCache()
            torch.manual_seed(1)
            outputs = [
                forward(
                    hidden_states=hidden_states[:, part].to(dtype),
                    position_embeddings=tuple(angle[:, part].to(dtype) for angle in angles),
                    attention_mask=mask.to(dtype),
                    past_key_values=cache,
                    more="given on",
                )
                for part in (slice(0, 4), slice(4, 5))
            ]
            results.append((outputs, cache.layers[0].keys, cache.layers[0].values, list(given)))
        for got, wanted in zip(*map(tree_leaves, results), strict=True):
            assert torch.equal(got, wanted) if isinstance(wanted, torch.Tensor) else got == wanted
        assert len(given) == (0 if implementation == "eager" else 2)


def test_every_model_type_finds_its_policy():
    assert policy_for(tiny.gpt2()) is GPT2
    for family in ("t5", "t5_gated", "mt5", "umt5", "longt5"):
        assert policy_for(tiny.FAMILIES[family]()) is T5
    assert policy_for(torch.nn.Linear(2, 2)) is COMMON


@pytest.fixture
def registrations_are_undone(monkeypatch):
    monkeypatch.setattr(registration, "_policies", dict(registration._policies))
    monkeypatch.setattr(registration, "_extensions", list(registration._extensions))


def of_type(model_type):
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(model_type=model_type)
    return model


@pytest.mark.usefixtures("registrations_are_undone")
def test_a_policy_of_one_s_own_can_be_registered():
    mine = ModelPolicy("mine", ("my-model",), (Rule("my.Norm", "FusedLayerNorm"),), ())
    register_policy(mine)
    assert policy_for(of_type("my-model")) is mine
    register_policy(mine)
    with pytest.raises(ValueError, match="covered by policy 'gpt2'"):
        register_policy(ModelPolicy("other", ("gpt2",), (), ()))
    with pytest.raises(ValueError, match="names no model type"):
        register_policy(ModelPolicy("nobody's", (), (), ()))


def _without(options, **replaced):
    """Policies as they were registered from outside before rules named the classes of children."""
    return {
        field: tuple(
            dataclasses.replace(rule, reads={}, options={k: v for k, v in rule.options.items() if k not in options})
            for rule in rules
        )
        for field, rules in replaced.items()
    }


def test_a_policy_without_classes_of_children_is_planned_with_reasons(monkeypatch):
    old = _without({"children"}, regions=GPT2.regions, inference_blocks=GPT2.inference_blocks)
    old_t5 = _without({"children"}, relative_attention=T5.relative_attention)
    policies = {"gpt2": dataclasses.replace(GPT2, **old), "t5": dataclasses.replace(T5, **old_t5)}
    monkeypatch.setattr(registration, "_policies", registration._policies | policies)
    model = tiny.gpt2()
    expected = tiny.logits(model)
    config = {"kernel_fusion": {"custom_cuda_kernels": [{"name": "FusedGELU", "fold_bias": True}, "FusedBlock"]}}
    with pytest.warns(UserWarning, match="FusedBlock .*the policy does not name the classes of"):
        fuseopt.initialize(model, config)
    assert model.transformer.h[0].mlp._folds_bias(torch.zeros(1, 24))
    torch.testing.assert_close(tiny.logits(model), expected)
    skips = fuseopt.plan(tiny.t5(), {"kernel_fusion": {"triton_kernels": ["FusedRelativeAttention"]}}).skips
    assert "its policy does not name the classes of its children" in {skip.reason for skip in skips}


def test_policies_of_the_package_name_known_targets_and_steps():
    for policy in (COMMON, GPT2, T5):
        assert not list(unknown_names(policy))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"decode_steps": {"my.Model": "GPT3Step"}},
            "decode_steps names the decode step 'GPT3Step' for my.Model does not exist",
        ),
        (
            {"kernels": (Rule("my.Norm", "FusedNorm"),)},
            "kernels names the target 'FusedNorm' for my.Norm; give a class",
        ),
        (
            {"kernels": (Rule("my.Norm", "norms"),)},
            "kernels names the target 'norms' for my.Norm, which is not a class",
        ),
        (
            {"kernels": (Rule("my.Norm", nn.LayerNorm),)},
            "kernels names the target .* for my.Norm, which is not a fuseopt.modules.FusedModule",
        ),
        (
            {"kernels": (Rule("my.MLP", "FusedGatedMLP"),)},
            "kernels names the target 'FusedGatedMLP' for my.MLP, but no kernel has that name",
        ),
        ({"kernels": (Rule("Norm", "FusedLayerNorm"),)}, "kernels names the source 'Norm'; give the full name"),
        ({"kernels": ("my.Norm",)}, "kernels has 'my.Norm', which is not a Rule"),
        (
            {"regions": (Rule("my.Act", "FusedActivation", {"region": "mish"}),)},
            "regions has a rule for my.Act with the option region='mish'; known are 'relu'",
        ),
        (
            {"regions": (Rule("my.Act", "FusedActivation"),)},
            "regions has a rule for my.Act without the option 'region'",
        ),
        (
            {"kernels": (Rule("my.Act", "FusedGELU", {"approximate": "tan"}),)},
            "kernels has a rule for my.Act with the option approximate='tan'; known are 'none', 'tanh'",
        ),
        (
            {"kernels": (Rule("my.Norm", "FusedRMSNorm", {"cast_order": "gemma", "eps": "eps"}),)},
            "kernels has a rule for my.Norm with the option cast_order='gemma'; known are 'input'",
        ),
        (
            {"kernels": (Rule("my.Norm", "FusedRMSNorm", {"cast_ordr": "t5"}),)},
            "kernels has a rule for my.Norm whose options FusedRMSNorm does not take: .*'cast_ordr'",
        ),
        (
            {
                "rotary_attentions": (
                    Rule("my.Part", "fuseopt.blocks.rotary_embedding.RotaryAttentionForward", {"norms": "head"}),
                )
            },
            "rotary_attentions has a rule for my.Part with the option norms='head'; known are None, 'heads'",
        ),
        ({"heads": (Rule("my.Model", "FusedLMHead"),)}, "heads has a rule for my.Model without the option 'head'"),
        ({"regions": (Rule("my.MLP", "FusedLayerNorm"),)}, "regions names the target 'FusedLayerNorm' for my.MLP"),
        *(
            ({field: (Rule("my.Part", "Nothing"),)}, f"{field} names the target 'Nothing' for my.Part")
            for field in (
                "causal_attention",
                "residual_blocks",
                "dropout_add_blocks",
                "inference_blocks",
                "stacks",
                "heads",
                "relative_attention",
                "rotary_attentions",
            )
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else None,
)
@pytest.mark.usefixtures("registrations_are_undone")
def test_a_policy_or_extension_with_an_unknown_name_is_refused_when_registered(parts, message):
    """Registration refuses it; otherwise a user's `initialize` would fail."""
    policy = ModelPolicy("mine", ("my-model",), **{"kernels": (), "regions": (), **parts})
    with pytest.raises(ValueError, match=f"policy 'mine': {message}"):
        register_policy(policy)
    for model_types in ("all", "gpt2"):
        with pytest.raises(ValueError, match=f"extend_policy: {message}"):
            extend_policy(model_types, **parts)
    assert "my-model" not in registration._policies and not registration._extensions


class MyNorm(nn.LayerNorm):
    """A class that no policy names."""


class FusedMine(modules.FusedModule):
    def _configure(self, *, scale=1):
        self.scale = scale

    def forward(self, input):
        return self._source_forward(input)


MY_NORM = f"{__name__}.MyNorm"


@pytest.fixture
def my_kernel(registrations_are_undone):
    register_kernel(Kernel("FusedMine", "fuseopt.strategies.drop_ins.propose", None, {CUSTOM: {}}, {"inference": {}}))
    yield
    unregister_kernel("FusedMine")


def with_my_norm(model_type):
    model = nn.Sequential(MyNorm(8), nn.LayerNorm(8))
    if model_type is not None:
        model.config = SimpleNamespace(model_type=model_type)
    return model


def my_targets(model):
    return [row.target for row in fuseopt.plan(model, "inference").rows if row.replaced and row.paths[0] == "0"]


@pytest.mark.usefixtures("my_kernel")
@pytest.mark.parametrize(
    ("model_types", "covered"),
    [
        ("all", {None, "gpt2", "llama", "unheard-of"}),
        ("gpt2", {"gpt2"}),
        (["llama", "gpt2"], {"llama", "gpt2"}),
        (["unheard-of"], {"unheard-of"}),
    ],
)
def test_an_extension_is_planned_for_its_models_until_it_is_removed(model_types, covered):
    every = {None, "gpt2", "llama", "unheard-of"}
    extension = extend_policy(model_types, kernels=[Rule(MY_NORM, FusedMine)])
    assert {model_type for model_type in every if my_targets(with_my_norm(model_type)) == ["FusedMine"]} == covered
    model = with_my_norm(next(iter(covered)))
    stock, expected = model[0], model(torch.arange(8.0))
    assert isinstance(fuseopt.initialize(model, "inference")[0], FusedMine)
    assert torch.equal(model(torch.arange(8.0)), expected)
    extension.remove()
    extension.remove()
    assert isinstance(model[0], FusedMine) and fuseopt.restore(model)[0] is stock
    assert not any(my_targets(with_my_norm(model_type)) for model_type in every)
    assert policy_for(tiny.gpt2()) is GPT2


@pytest.mark.usefixtures("my_kernel")
def test_a_rule_replaces_that_for_the_same_class_and_the_later_extension_counts():
    first = extend_policy("gpt2", kernels=[Rule(MY_NORM, FusedMine)], eager_attention=["my.Attention"])
    again = extend_policy("gpt2", kernels=[Rule(MY_NORM, FusedMine, {"scale": 1})])
    policy = policy_for(of_type("gpt2"))
    (rule,) = (rule for rule in policy.kernels if rule.source == MY_NORM)
    assert rule.options == {"scale": 1}
    assert policy.kernels[1:] == GPT2.kernels and policy.eager_attention == ("my.Attention", *GPT2.eager_attention)
    again.remove()
    (rule,) = (rule for rule in policy_for(of_type("gpt2")).kernels if rule.source == MY_NORM)
    assert rule.options == {}
    first.remove()
    # For another kernel, both rules for torch's LayerNorm stay; a head has one rule.
    layer_norm, head = GPT2.kernels[0].source, GPT2.heads[0].source
    extend_policy("gpt2", kernels=[Rule(layer_norm, FusedMine)], heads=[Rule(head, "FusedLMHead", {"head": "other"})])
    policy = policy_for(of_type("gpt2"))
    assert [rule.target_name for rule in policy.kernels if rule.source == layer_norm] == ["FusedMine", "FusedLayerNorm"]
    assert [rule.options["head"] for rule in policy.heads] == ["other"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernel": []}, "ModelPolicy has no rules 'kernel'; known are kernels, regions"),
        ({"name": "mine"}, "ModelPolicy has no rules 'name'"),
        ({}, "give at least one model type and one rule"),
        ({"kernels": []}, "give at least one model type and one rule"),
        ({"model_types": [], "kernels": [Rule(MY_NORM, "FusedLayerNorm")]}, "give at least one model type"),
        ({"kernels": Rule(MY_NORM, "FusedLayerNorm")}, "kernels takes a list, got Rule"),
        ({"eager_attention": "my.Attention"}, "eager_attention takes a list, got 'my.Attention'"),
        ({"decode_steps": ["my.Step"]}, "decode_steps takes a dict, got"),
    ],
)
@pytest.mark.usefixtures("registrations_are_undone")
def test_an_extension_of_nothing_or_of_unknown_fields_is_refused(arguments, message):
    with pytest.raises(ValueError, match=f"extend_policy: {message}"):
        extend_policy(**{"model_types": "all", **arguments})
    assert not registration._extensions


def test_the_old_name_of_what_a_rule_claims_is_accepted_with_a_warning():
    with pytest.warns(DeprecationWarning, match="claims") as caught:
        rule = Rule("my.MLP", "FusedMLP", absorbs=("act",))
    assert caught[0].filename == __file__
    assert rule == Rule("my.MLP", "FusedMLP", claims=("act",)) == dataclasses.replace(rule)
    assert rule.claims == ("act",)
