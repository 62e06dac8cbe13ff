"""generate() of models with unmerged LoRA adapters: transformers' tokens, in the device loop."""

import copy
import re

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import fuseopt
from fuseopt.generation.engine import layers
from fuseopt.generation.engine.graphs import StepGraphs
from fuseopt.generation.tiers import Tier
from tests import tiny
from tests.generation import same_calls
from tests.generation.families.tiny_decoders import DECODERS, ENCODER_DECODERS, randomised

peft = pytest.importorskip("peft")

GENERATION = {"generation": {"enable": True}}
PLAIN = ("gpt2", "llama", "phi3")
pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out")


def linear_names(model, of=()):
    """Paths to all linear layers but the head, or to those whose path contains one of `of`."""
    head = model.get_output_embeddings()
    modules = [(path, module) for path, module in model.named_modules() if module is not head]
    found = [path for path, module in modules if isinstance(module, (nn.Linear, Conv1D))]
    return [path for path in found if not of or any(part in path for part in of)]


def with_lora(model, name="default", rank=3, of=(), seed=0, **options):
    torch.manual_seed(seed)
    targets = options.pop("target_modules", None) or linear_names(model, of)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, init_lora_weights=False, **options)
    peft.inject_adapter_in_model(config, model, adapter_name=name)
    return model.eval()


def adapted(model, *names):
    """A peft model with adapters of these names, of ranks 3, 5, ..."""
    torch.manual_seed(0)
    targets = linear_names(model)
    for index, name in enumerate(names):
        options = {"r": 3 + 2 * index, "lora_alpha": 4 + index, "init_lora_weights": False}
        config = peft.LoraConfig(target_modules=targets, **options)
        model = peft.get_peft_model(model, config, name) if index == 0 else model
        if index:
            model.add_adapter(name, config)
    return model.eval()


def prompt(model, batch=2, length=6):
    return same_calls.prompt(model, batch, length, 3)


def tokens(model):
    return model.generate(**prompt(model), max_new_tokens=8, do_sample=False, pad_token_id=0)


def last_call(model):
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    return base.generate.calls[-1]


def assert_as_stock(model, tier=Tier.DEVICE_LOOP):
    """Tokens as a copy without fuseopt has them; returns them."""
    stock = copy.deepcopy(model)
    fuseopt.restore(stock)
    wanted, got = tokens(stock), tokens(model)
    assert torch.equal(got, wanted)
    assert last_call(model).tier is tier, last_call(model)
    return got


@pytest.mark.parametrize("family", [*DECODERS, *ENCODER_DECODERS])
def test_every_family_decodes_as_transformers_does(family, monkeypatch):
    model = with_lora(randomised({**DECODERS, **ENCODER_DECODERS}[family]()))
    run, seen = layers._by_kernel, []

    def recorded(input, layer, **options):
        seen.append(layer.low_rank)
        return run(input, layer, **options)

    monkeypatch.setattr(layers, "_by_kernel", recorded)
    same_calls.compare(model, prompt(model), Tier.DEVICE_LOOP, max_new_tokens=6)
    assert any(low_rank is not None for low_rank in seen)
    same_calls.compare(model, prompt(model, 1), Tier.DEVICE_LOOP, max_new_tokens=5, num_beams=3)


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_as_near_to_float64_as_transformers(family, dtype):
    """Over several prompts, since one's errors are a matter of chance."""
    model = with_lora(randomised(DECODERS[family]())).double()
    options = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}

    def logits(model):
        return torch.cat(
            [
                model.generate(**prompt(model, rows, length), **options, output_logits=True).logits[0]
                for rows, length in ((1, 5), (2, 6), (3, 7), (2, 9))
            ]
        )

    wanted, half = logits(model), copy.deepcopy(model).to(dtype)
    stock = logits(half)
    fuseopt.initialize(half, GENERATION)
    fused = logits(half)
    assert last_call(half).tier is Tier.DEVICE_LOOP
    assert (fused - wanted).norm() < 1.5 * (stock - wanted).norm()


@pytest.mark.parametrize("family", PLAIN)
def test_adapters_are_switched_without_a_new_capture(family, monkeypatch, as_on_gpu):
    cleared = []
    clear = StepGraphs.clear
    monkeypatch.setattr(StepGraphs, "clear", lambda graphs: (cleared.append(1), clear(graphs))[1])
    model = adapted(randomised(DECODERS[family]()), "first", "second")
    fuseopt.initialize(model, GENERATION)
    found = [assert_as_stock(model)]
    cleared.clear()
    model.set_adapter("second")
    found.append(assert_as_stock(model))
    with model.disable_adapter():
        found.append(assert_as_stock(model))
    model.set_adapter("first")
    assert torch.equal(assert_as_stock(model), found[0])
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("first", 3.0)
    found.append(assert_as_stock(model))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B.first" in name:
                parameter.data.mul_(-2)
    found.append(assert_as_stock(model))
    assert not cleared
    assert len({tuple(each.flatten().tolist()) for each in found}) >= 4


def test_two_adapters_at_once():
    model = adapted(randomised(DECODERS["llama"]()), "first", "second")
    fuseopt.initialize(model, GENERATION)
    one = assert_as_stock(model)
    model.base_model.set_adapter(["first", "second"])
    both = assert_as_stock(model)
    model.set_adapter("first")
    assert torch.equal(assert_as_stock(model), one) and not torch.equal(one, both)


def test_a_training_step_between_two_calls():
    model = adapted(randomised(DECODERS["llama"]()), "first")
    fuseopt.initialize(model, GENERATION)
    before = assert_as_stock(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=3.0)
    model.train()
    ids = torch.arange(12)[None] + 3
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    tokens(model)
    assert "is in training mode" in last_call(model).reason
    model.eval()
    assert not torch.equal(assert_as_stock(model), before)


def test_merging_and_unloading():
    model = adapted(randomised(DECODERS["llama"]()), "first")
    fuseopt.initialize(model, GENERATION)
    before = assert_as_stock(model)
    model.merge_adapter()
    assert torch.equal(assert_as_stock(model), before)
    with model.disable_adapter():
        tokens(model)
        assert "has disabled adapters, which its forward unmerges first" in last_call(model).reason
    assert torch.equal(assert_as_stock(model), before)
    base = model.merge_and_unload()
    assert torch.equal(tokens(base), before) and last_call(base).tier is Tier.DEVICE_LOOP


def test_initialised_before_the_adapters_come():
    model = randomised(DECODERS["gpt2"]())
    fuseopt.initialize(model, GENERATION)
    plain = assert_as_stock(model)
    wrapped = adapted(model, "first")
    assert not torch.equal(assert_as_stock(wrapped), plain)
    wrapped.add_adapter("second", peft.LoraConfig(r=9, target_modules=["c_proj"], init_lora_weights=False))
    wrapped.set_adapter("second")
    assert_as_stock(wrapped.eval())
    unloaded = wrapped.unload()
    assert torch.equal(assert_as_stock(unloaded), plain)


def test_the_last_adapter_is_deleted():
    model = randomised(DECODERS["llama"]())
    wanted = tokens(model)
    tuner = adapted(model, "first").base_model
    fuseopt.initialize(model, GENERATION)
    assert not torch.equal(assert_as_stock(model), wanted)
    tuner.delete_adapter("first")
    assert torch.equal(assert_as_stock(model), wanted)
    assert "LoRA of rank 0 on 14 linear layers, in the step" in str(fuseopt.report(model))


def test_adapters_swapped_in_place(tmp_path):
    """peft pads their factors beyond the rank that the layers say, and makes tensors of their scales."""
    hotswap = pytest.importorskip("peft.utils.hotswap")
    adapted(randomised(DECODERS["llama"]()), "first", "second").save_pretrained(tmp_path)
    model = peft.PeftModel.from_pretrained(randomised(DECODERS["llama"]()), tmp_path / "first").eval()
    fuseopt.initialize(model, GENERATION)
    first = assert_as_stock(model)
    hotswap.prepare_model_for_compiled_hotswap(model, target_rank=24, check_compiled="ignore")
    model.eval()
    assert torch.equal(assert_as_stock(model), first)
    hotswap.hotswap_adapter(model, str(tmp_path / "second"), adapter_name="default")
    assert not torch.equal(assert_as_stock(model), first)
    model.load_adapter(tmp_path / "first", "other")
    model.base_model.set_adapter(["default", "other"])
    assert_as_stock(model.eval())


@pytest.mark.parametrize("of", [("q_proj", "v_proj"), ("o_proj",), ("gate_up_proj",), ("down_proj",), ("qkv_proj",)])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_adapters_on_some_layers(family, of):
    model = randomised(DECODERS[family]())
    if not linear_names(model, of):
        pytest.skip("it has no such layers")
    same_calls.compare(with_lora(model, of=of), prompt(model), Tier.DEVICE_LOOP, max_new_tokens=6)


def test_the_head_may_have_one():
    model = with_lora(randomised(DECODERS["mistral"]()), target_modules=["lm_head", "up_proj"])
    same_calls.compare(model, prompt(model), Tier.DEVICE_LOOP, max_new_tokens=6)


def test_plan_and_report_say_it():
    model = adapted(randomised(DECODERS["llama"]()), "first", "second")
    (replacement,) = fuseopt.plan(model, GENERATION).replacements
    assert "LoRA of ranks 3 to 5 on 14 linear layers, in the step" in replacement.reason
    fuseopt.initialize(model, GENERATION)
    tokens(model)
    assert "generate(): LoRA of ranks 3 to 5 on 14 linear layers, in the step" in str(fuseopt.report(model))


def changed_lora(model, change):
    for layer in with_lora(model, of=("up_proj",)).modules():
        if hasattr(layer, "lora_A"):
            change(layer)


def set_bias(factors):
    factors["default"].bias = nn.Parameter(torch.ones(factors["default"].out_features))


def inject(config, model):
    peft.inject_adapter_in_model(config, model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: with_lora(model, use_dora=True), "has the adapter 'default' of another kind, DoraLinear"),
        (lambda model: with_lora(model, lora_bias=True), "has the adapter 'default' with a bias of its own"),
        (
            lambda model: changed_lora(model, lambda layer: set_bias(layer.lora_A)),
            "has the adapter 'default' with a bias of its own",
        ),
        (
            lambda model: changed_lora(model, lambda layer: layer.lora_dropout.update({"default": nn.GELU()})),
            "has the adapter 'default', whose dropout is a GELU",
        ),
        (lambda model: with_lora(model, rank=300), "has adapters of rank 300, more than 256"),
        (
            lambda model: with_lora(model, target_modules=["embed_tokens"]),
            r"embed_tokens is a LoRA layer of peft around no plain linear layer \(Embedding\)",
        ),
        (
            lambda model: inject(
                peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], init_ia3_weights=False), model
            ),
            "k_proj is a layer of peft's ia3, which the decode step does not apply",
        ),
        (
            lambda model: inject(peft.LoHaConfig(target_modules=["q_proj"], init_weights=False), model),
            "q_proj is a layer of peft's loha, which the decode step does not apply",
        ),
    ],
)
def test_other_adapters_are_left_to_transformers(change, reason):
    model = randomised(DECODERS["llama"]())
    change(model)
    model.eval()
    wanted = tokens(model)
    fuseopt.initialize(model, GENERATION)
    assert torch.equal(tokens(model), wanted)
    assert last_call(model).tier is Tier.STOCK
    assert re.search(reason, last_call(model).reason), last_call(model).reason


def test_a_batch_of_several_adapters_is_left_to_transformers():
    model = adapted(randomised(DECODERS["llama"]()), "first", "second")
    options = {"adapter_names": ["first", "second"], "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(**prompt(model), **options)
    fuseopt.initialize(model, GENERATION)
    assert torch.equal(model.generate(**prompt(model), **options), wanted)
    assert "carries hooks, such as peft's for adapter_names" in last_call(model).reason
    assert_as_stock(model)


def test_a_layer_that_the_step_does_not_read_is_found(monkeypatch):
    model = with_lora(tiny.gpt2(), of=("c_fc",))
    monkeypatch.setattr(layers.LowRank, "of", lambda *_: None)
    fuseopt.initialize(model, GENERATION)
    tokens(model)
    assert "mlp.c_fc is a LoRA layer where the decode step reads none" in last_call(model).reason
