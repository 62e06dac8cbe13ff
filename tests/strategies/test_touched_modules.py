"""Adapters, subclasses, quantised leaves, parametrisations and hooks on modules work as in the stock model."""

import copy
import functools
import itertools
import re
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.pytorch_utils import Conv1D

import fuseopt
from fuseopt.blocks import stack_runner
from fuseopt.kernel_table import CUSTOM, TRITON, listed
from fuseopt.modules import FusedMLP
from fuseopt.modules.base import fused_class
from tests import tiny
from tests.axes import thinned
from tests.surgery import SURGERIES, Inapplicable, changed

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("each_device")]

# A dropout rate that drops next to nothing, but keeps the dropout to be fused.
P = 1e-9
GPT2 = {"resid_pdrop": P, "embd_pdrop": P, "attn_pdrop": P}
FAMILIES = {
    "gpt2": lambda **options: tiny.gpt2(**GPT2, **options),
    "gpt2_crossing": lambda **options: tiny.gpt2(add_cross_attention=True, **GPT2, **options),
    "t5": lambda **options: tiny.t5(dropout_rate=P, **options),
    "t5_gated": lambda **options: tiny.t5_gated(dropout_rate=P, **options),
    "mt5": lambda **options: tiny.mt5(dropout_rate=P, **options),
    "umt5": lambda **options: tiny.umt5(dropout_rate=P, **options),
    "longt5": lambda **options: tiny.longt5(dropout_rate=P, **options),
    "llama": tiny.llama,
    "gemma": tiny.gemma,
    "phi3": tiny.phi3,
    "qwen3": tiny.qwen3,
}
KERNELS = [{"name": name, **dict.fromkeys(kernel.lists[CUSTOM], True)} for name, kernel in listed(CUSTOM).items()]
# Of two names for one kernel the custom one has it.
TRITON_ONLY = [name for name in listed(TRITON) if name not in listed(CUSTOM)]
CONFIGS = {
    "inference": "inference",
    "jit": {"kernel_fusion": {"enable": True}},
    "kernels": {"kernel_fusion": {"custom_cuda_kernels": KERNELS, "jit": False}},
    "reference": "reference",
    "training_kernels": {"kernel_fusion": {"triton_kernels": TRITON_ONLY, "jit": False}},
    "all_kernels": {"kernel_fusion": {"custom_cuda_kernels": KERNELS, "triton_kernels": TRITON_ONLY, "jit": True}},
    "generation": {"generation": {"enable": True}},
}
ATTENTIONS = {"kernels": "eager", "all_kernels": "eager"}


@pytest.fixture(autouse=True)
def chains_on_a_cpu(monkeypatch):
    monkeypatch.setattr(stack_runner, "DEVICE_TYPES", ("cpu", "cuda"))


def modules_of(model):
    """A path for each module that is not in the same place of another layer."""
    paths = {re.sub(r"\b(h|block|layers)\.\d+", r"\1", path): path for path, _ in model.named_modules() if path}
    return [path for path in paths.values() if not isinstance(model.get_submodule(path), nn.ModuleList)]


def arguments(model, family):
    batch = tiny.inputs(model)
    if family == "gpt2_crossing":
        torch.manual_seed(3)
        batch["encoder_hidden_states"] = torch.randn(2, 5, model.config.n_embd)
    return batch


def evaluated(model, family):
    with torch.no_grad():
        # Twice, as the first call may cache what it has checked.
        return [model.eval()(**arguments(model, family)).logits for _ in range(2)]


def trained(model, family):
    model.train().zero_grad()
    batch = arguments(model, family)
    torch.manual_seed(0)
    loss = model(**batch, labels=batch.get("decoder_input_ids", batch["input_ids"]), use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def generated(model, family):
    options = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    ids = tiny.inputs(model.eval())["input_ids"]
    outputs = [model.generate(ids, attention_mask=torch.ones_like(ids), **options) for _ in range(2)]
    return [torch.stack(output.logits) for output in outputs]


def result_of(run, model, family):
    try:
        return run(model, family)
    except Exception as error:
        return error


def assert_as_stock(stock, fused, family, config):
    for run in (generated if config == "generation" else evaluated, trained):
        expected, found = (result_of(run, model, family) for model in (stock, fused))
        if isinstance(expected, Exception) or isinstance(found, Exception):
            if type(found) is not type(expected):
                pytest.fail(f"{repr(found)[:150]} where stock has {repr(expected)[:150]}")
        elif run is trained:
            torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
            assert found[1].keys() == expected[1].keys()
            if expected[1]:
                tiny.assert_same_gradients(found[1], expected[1])
        else:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def check(family, path, surgery, config, late):
    attention = "eager" if family == "longt5" else ATTENTIONS.get(config, "sdpa")
    stock = FAMILIES[family](attn_implementation=attention)
    fused, of = copy.deepcopy(stock), type(stock.get_submodule(path))
    try:
        SURGERIES[surgery](stock, path, of)
    except Inapplicable:
        return
    if late:
        fuseopt.initialize(fused, CONFIGS[config])
        result_of(evaluated, fused, family)
    SURGERIES[surgery](fused, path, of)
    if not late:
        fuseopt.initialize(fused, CONFIGS[config])
    assert_as_stock(stock, fused, family, config)


def cases(family, surgery, every, count):
    """One in `every` modules of the family, each with `count` configs and times, so that in the end all meet all."""
    times = list(itertools.product(CONFIGS, (False, True)))
    first = list(SURGERIES).index(surgery) + list(FAMILIES).index(family)
    for place, path in enumerate(modules_of(FAMILIES[family]())):
        if (place + first) % every == 0:
            for turn in range(count):
                yield path, *times[(5 * first + 3 * place + turn) % len(times)]


def failures(family, surgery, every, count):
    for path, config, late in cases(family, surgery, every, count):
        try:
            check(family, path, surgery, config, late)
        except (Exception, pytest.fail.Exception) as error:
            when = "after" if late else "before"
            yield f"{path}, {config}, {when}: {type(error).__name__}: {str(error)[:300]}"


# Modules are many in T5, most of them of the same classes. Families of T5's and Llama's modules take turns.
EVERY = {"gpt2": 4, "gpt2_crossing": 12, "t5": 24, "llama": 8, "gemma": 16, "phi3": 16, "qwen3": 16}


@thinned(3, family=list(FAMILIES), surgery=list(SURGERIES))
def test_whatever_is_done_to_a_module_counts_as_in_stock(family, surgery):
    assert not list(failures(family, surgery, EVERY.get(family, 48), 1))


@pytest.mark.slow
@pytest.mark.parametrize("surgery", SURGERIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_is_done_to_any_module_counts_as_in_stock(family, surgery):
    assert not list(failures(family, surgery, 1, 1))


C_FC = "transformer.h.1.mlp.c_fc"


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("config", ["jit", "kernels", "inference"])
@pytest.mark.parametrize("surgery", ["lora", "dora", "ia3"])
def test_an_adapter_on_c_fc_counts_and_is_trained(surgery, config, late):
    pytest.importorskip("peft")
    check("gpt2", C_FC, surgery, config, late)
    fused = FAMILIES["gpt2"]()
    SURGERIES[surgery](fused, C_FC, Conv1D)
    fuseopt.initialize(fused, CONFIGS[config])
    _, gradients = trained(fused, "gpt2")
    adapters = [gradient for name, gradient in gradients.items() if C_FC in name]
    assert adapters and all(gradient.abs().max() > 0 for gradient in adapters)


@pytest.mark.parametrize(
    ("family", "path", "surgery", "late"),
    [
        ("gpt2", C_FC, "lora", False),
        ("gpt2", C_FC, "ia3", True),
        pytest.param("t5", "decoder.block.1.layer.1", "subclass", False, marks=pytest.mark.slow),
    ],
)
def test_compiled_training_steps_count_what_is_done_to_a_module(family, path, surgery, late, monkeypatch):
    torch._dynamo.reset()
    blocks = {"custom_cuda_kernels": KERNELS, "triton_kernels": ["FusedLinearCrossEntropy"], "jit": True}
    config = {"kernel_fusion": {**blocks, "memory_efficient_fusion": {"backend": "aot_eager"}}}
    monkeypatch.setitem(CONFIGS, "compiled", config)
    check(family, path, surgery, "compiled", late)


@pytest.mark.parametrize("config", ["jit", "kernels"])
def test_the_plan_says_that_an_adapted_c_fc_is_called_and_only_that(config):
    pytest.importorskip("peft")
    model = FAMILIES["gpt2"]()
    SURGERIES["lora"](model, C_FC, Conv1D)
    plan = fuseopt.plan(model, CONFIGS[config])
    reasons = {row.paths[0]: row.reason for row in plan.rows if row.target == "FusedMLP"}
    assert "c_fc is called as the source class calls it: it is a peft.tuners.lora" in reasons["transformer.h.1.mlp"]
    assert reasons["transformer.h.0.mlp"] == "exact class match"


@pytest.mark.parametrize("surgery", [None, "lora", "subclass", "misplaced", "hook", "tensor_subclass", "parametrised"])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_the_bias_is_folded_for_a_plain_conv1d_alone(surgery, late):
    if surgery == "lora":
        pytest.importorskip("peft")
    model = FAMILIES["gpt2"]()
    for initialize in (late, not late):
        if initialize:
            fuseopt.initialize(model, CONFIGS["jit"])
        elif surgery is not None:
            SURGERIES[surgery](model, C_FC, Conv1D)
    mlp = model.transformer.h[1].mlp
    with mock.patch.object(mlp, "bias_activation", wraps=mlp.bias_activation) as folded:
        evaluated(model, "gpt2")
    assert folded.call_count == (2 if surgery is None else 0)


def test_a_gelu_of_torch_s_is_the_one_that_it_is_by_now():
    """Its kind is an attribute, which the fused feed-forward takes when it is made."""
    stock = FAMILIES["gpt2"]()
    for block in stock.transformer.h:
        block.mlp.act = nn.GELU("tanh")
        with torch.no_grad():
            block.mlp.c_fc.weight.mul_(20)
    fused = fuseopt.initialize(copy.deepcopy(stock), CONFIGS["kernels"])
    assert fused_class(fused.transformer.h[0].mlp) is FusedMLP
    assert_as_stock(stock, fused, "gpt2", "kernels")
    for model in (stock, fused):
        model.transformer.h[0].mlp.act.approximate = "none"
    assert_as_stock(stock, fused, "gpt2", "kernels")


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("family", "path", "surgery", "config"),
    [
        ("t5", "encoder.block.1.layer.1", "subclass", "kernels"),
        ("t5", "decoder.block.1.layer.0", "another_class", "training_kernels"),
        ("t5", "encoder.block.1.layer.0.SelfAttention", "subclass", "training_kernels"),
        ("t5", "encoder.block.1", "another_class", "training_kernels"),
        ("t5", "decoder.block.0.layer.0.SelfAttention.q", "misplaced", "generation"),
        ("gpt2", "transformer.h.1.attn", "hook", "training_kernels"),
        ("gpt2", "transformer.h.1.attn", "another_class", "training_kernels"),
        ("gpt2", "transformer.h.1.attn", "subclass", "training_kernels"),
        ("gpt2", "transformer.h.0.mlp.dropout", "misplaced", "inference"),
        ("gpt2", "transformer.h.0.mlp.dropout", "misplaced", "generation"),
        ("gpt2", "transformer.h.1.attn.c_proj", "misplaced", "generation"),
        ("gpt2", "lm_head", "tensor_subclass", "training_kernels"),
    ],
)
def test_modules_whose_forward_is_passed_by_are_of_their_class(family, path, surgery, config, late):
    check(family, path, surgery, config, late)


@pytest.mark.parametrize("config", ["inference", "training_kernels", "kernels"])
@pytest.mark.parametrize(
    ("family", "path"),
    [
        ("gpt2", "transformer.h.1"),
        ("gpt2", "transformer"),
        ("t5", "encoder.block.1"),
        ("llama", "model.layers.1.self_attn"),
    ],
)
def test_a_class_that_is_set_later_has_its_own_forward(family, path, config):
    """On modules that stay, with a fused forward on the instance."""
    stock = FAMILIES[family](attn_implementation=ATTENTIONS.get(config, "sdpa"))
    fused = fuseopt.initialize(copy.deepcopy(stock), CONFIGS[config])
    for _ in range(4):
        evaluated(fused, family)
    of = type(stock.get_submodule(path))
    for model in (stock, fused):
        module = model.get_submodule(path)

        def forward(self, *args, **kwargs):
            return changed(of.forward(self, *args, **kwargs))

        module.__class__ = type("Changed", (of,), {"forward": forward})
    assert_as_stock(stock, fused, family, config)


class ShortLayer(LlamaDecoderLayer):
    """Takes what LlamaModel passes, and nothing else."""

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=False,
        position_embeddings=None,
    ):
        rest = {"position_ids": position_ids, "past_key_values": past_key_values, "use_cache": use_cache}
        return super().forward(hidden_states, attention_mask, position_embeddings=position_embeddings, **rest)


class ShortAttention(T5Attention):
    def forward(self, hidden_states, mask=None, key_value_states=None, position_bias=None, past_key_values=None):
        return super().forward(hidden_states, mask, key_value_states, position_bias, past_key_values)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("family", "path", "cls"),
    [
        ("llama", "model.layers.1", ShortLayer),
        ("t5", "encoder.block.1.layer.0.SelfAttention", ShortAttention),
    ],
)
def test_modules_that_take_no_further_arguments_are_given_none(family, path, cls, late):
    stock = FAMILIES[family]()
    fused = copy.deepcopy(stock)
    if late:
        fuseopt.initialize(fused, CONFIGS["training_kernels"])
    for model in (stock, fused):
        child = model.get_submodule(path)
        made = cls(model.config, layer_idx=1)
        made.load_state_dict(child.state_dict())
        model.set_submodule(path, made.train(child.training))
    if not late:
        fuseopt.initialize(fused, CONFIGS["training_kernels"])
    masks = {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])}
    losses = []
    for model in (stock, fused):
        batch = tiny.inputs(model)
        labels = batch.get("decoder_input_ids", batch["input_ids"])
        losses.append(model.train()(**batch, **masks, labels=labels, use_cache=False).loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)


def _raised(output):
    return (output[0] + 1000, *output[1:])


def _raised_by(forward, *args, **kwargs):
    return _raised(forward(*args, **kwargs))


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("surgery", ["hook", "own_forward"])
def test_what_is_added_to_an_attention_is_not_dropped(surgery, late):
    """GPT-2's attentions end in a dropout that the fused block defers."""
    model = tiny.gpt2(resid_pdrop=0.5).train()
    attention = model.transformer.h[0].attn
    for initialize in (late, not late):
        if initialize:
            fuseopt.initialize(model, {"kernel_fusion": {"triton_kernels": ["FusedDropoutAdd"], "jit": False}})
        elif surgery == "hook":
            attention.register_forward_hook(lambda module, args, output: _raised(output))
        else:
            attention.forward = functools.partial(_raised_by, attention.forward)
    outputs = []
    model.transformer.h[0].register_forward_hook(lambda module, args, output: outputs.append(output))
    model(**tiny.inputs(model))
    assert outputs[0].min() > 500


def test_a_hook_on_every_module_is_called_for_the_same_modules_as_in_stock():
    counts = []
    for config in (None, "jit", "kernels", "training_kernels"):
        model = tiny.gpt2(attn_implementation="eager", **GPT2).train()
        if config is not None:
            fuseopt.initialize(model, CONFIGS[config])
        names, seen = {module: path for path, module in model.named_modules()}, Counter()
        hook = functools.partial(lambda seen, names, module, *_: seen.update([names[module]]), seen, names)
        handle = nn.modules.module.register_module_forward_hook(hook)
        try:
            model(**tiny.inputs(model))
        finally:
            handle.remove()
        counts.append(seen)
    assert all(count == counts[0] for count in counts[1:])


@pytest.mark.parametrize("place", ["buffer", "attribute"])
def test_a_decode_step_follows_weights_that_are_no_parameters(place):
    stock = FAMILIES["gpt2"]()
    fused = fuseopt.initialize(copy.deepcopy(stock), CONFIGS["generation"])
    generated(fused, "gpt2")
    for model in (stock, fused):
        norm = model.transformer.h[0].ln_1
        weight = norm.weight.detach().clone()
        del norm.weight
        if place == "buffer":
            norm.register_buffer("weight", weight)
        else:
            norm.weight = weight
    torch.testing.assert_close(generated(fused, "gpt2"), generated(stock, "gpt2"), rtol=1e-4, atol=1e-4)
    for model in (stock, fused):
        model.transformer.h[0].ln_1.weight = 2 * model.transformer.h[0].ln_1.weight
    torch.testing.assert_close(generated(fused, "gpt2"), generated(stock, "gpt2"), rtol=1e-4, atol=1e-4)


def test_a_decode_step_leaves_embeddings_that_are_renormalised():
    stock = FAMILIES["gpt2"]()
    fused = fuseopt.initialize(copy.deepcopy(stock), CONFIGS["generation"])
    generated(fused, "gpt2")
    for model in (stock, fused):
        model.transformer.wpe.max_norm = 0.05
    torch.testing.assert_close(generated(fused, "gpt2"), generated(stock, "gpt2"), rtol=1e-4, atol=1e-4)
