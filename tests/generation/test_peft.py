"""`generation` for a peft model: its `generate` calls that of the base model, on which the decode loop is put."""

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import fuseopt

peft = pytest.importorskip("peft")

GENERATION = {"generation": {"enable": True}}
IDS = torch.tensor([[5, 17, 3, 42, 8]])


def gpt2():
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=None, pad_token_id=0)).eval()


def with_lora():
    options = {"target_modules": ["c_attn"], "init_lora_weights": False, "fan_in_fan_out": True}
    return peft.get_peft_model(gpt2(), peft.LoraConfig(task_type="CAUSAL_LM", r=2, **options)).eval()


def tokens(model):
    return model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, do_sample=False)


def tiers(fused):
    return [f"{call['tier']}: {call['reason']}" for call in fuseopt.report(fused).to_dict()["generate_calls"]]


def test_an_unmerged_model_and_a_merged_one_decode_fast():
    model = with_lora()
    wanted = tokens(model)
    (replacement,) = fuseopt.plan(model, GENERATION).replacements
    assert replacement.sites[0].path == "base_model.model.generate"
    fuseopt.initialize(model, GENERATION, strict=True)
    for each in (model, copy.deepcopy(model)):
        assert torch.equal(tokens(each), wanted)
        assert "T0" in tiers(each)[-1]
    merged = model.merge_and_unload()
    assert torch.equal(tokens(merged), wanted) and "T0" in tiers(model)[-1]
    fuseopt.restore(model)
    assert "generate" not in vars(model.get_base_model())


def test_a_preset_bans_ngrams_in_an_unmerged_model():
    model = with_lora()
    banned = {"max_new_tokens": 12, "do_sample": False, "no_repeat_ngram_size": 2}
    wanted = model.generate(input_ids=IDS, **banned)
    plan = fuseopt.plan(model, "inference")
    (bans,) = (r for r in plan.replacements if r.target == "FusedNoRepeatNGram")
    assert bans.sites[0].path == "base_model.model._get_logits_processor"
    fuseopt.initialize(model, {"preset": "inference", "generation": {"enable": False}})
    assert type(vars(model.get_base_model())["_get_logits_processor"]).__name__ == "FusedLogitsProcessors"
    assert torch.equal(model.generate(input_ids=IDS, **banned), wanted)
    names = ["FusedLayerNorm", "FusedNoRepeatNGram"]
    kernels = {"kernel_fusion": {"custom_cuda_kernels": names, "jit": False}}
    norms = sum(isinstance(module, torch.nn.LayerNorm) for module in model.modules())
    assert fuseopt.plan(model, kernels | GENERATION).summary.startswith(f"{norms} of ")


def test_virtual_tokens_are_left_to_transformers():
    model = peft.get_peft_model(gpt2(), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    wanted = tokens(model)
    fuseopt.initialize(model, GENERATION)
    assert torch.equal(tokens(model), wanted)
    assert "prepare_inputs_for_generation has been replaced" in tiers(model)[-1]


class Wrapper(torch.nn.Module):
    """Of the shape of a peft model of another package."""

    def __init__(self, model):
        super().__init__()
        self.wrapped, self.config = model, model.config

    def get_base_model(self):
        return self.wrapped

    def generate(self, **arguments):
        return self.wrapped.generate(**arguments)


def test_a_wrapper_that_names_its_base_model():
    model = Wrapper(gpt2())
    wanted = tokens(model)
    fuseopt.initialize(model, GENERATION)
    assert torch.equal(tokens(model), wanted) and "T0" in tiers(model)[-1]
