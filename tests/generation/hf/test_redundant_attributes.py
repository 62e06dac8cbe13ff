"""A number or flag of a module that is set by hand counts in generate() as it does in transformers."""

import copy

import pytest
import torch

import fuseopt
from fuseopt.generation.hf.redundant_attributes import _EXPECTED
from fuseopt.generation.tiers import Tier
from fuseopt.runtime.module_watch import CONSTANTS, REDUNDANT, ModuleWatch
from tests import tiny
from tests.generation.families.tiny_decoders import DECODERS, ENCODER_DECODERS
from tests.generation.same_calls import GENERATION

FAMILIES = {"gpt2": tiny.gpt2, "t5": tiny.t5}
OTHERS = {**DECODERS, **ENCODER_DECODERS}
# What must be found to matter, so that the test can fail.
MATTERS = {
    "gpt2": {"nf", "split_size", "head_dim", "layer_idx", "normalized_shape", "scaling", "eps"},
    "t5": {"key_value_proj_dim", "layer_idx", "is_decoder", "has_relative_attention_bias", "n_heads"},
    "llama": {"head_dim", "layer_idx", "scaling", "variance_epsilon", "attention_scaling"},
    "gemma3": {"head_dim", "sliding_attention_attention_scaling", "eps"},
    "gpt_neox": {"head_size", "use_parallel_residual", "attention_scaling"},
    "granite": {"residual_multiplier", "embedding_multiplier"},
}


def attributes(model):
    """(path, name, wrong value) for each plain attribute of each kind of module, once in encoder and decoder."""
    seen = set()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            kind = path.split(".")[0], type(module), "EncDec" in path, name
            if name.startswith("_") or name == "training" or kind in seen:
                continue
            if isinstance(value, (bool, int, float)):
                seen.add(kind)
                yield (
                    path,
                    name,
                    not value if isinstance(value, bool) else value + (1 if isinstance(value, int) else 0.3),
                )
            elif isinstance(value, tuple):
                seen.add(kind)
                yield path, name, (*value, 1)


def generated(model):
    """Logits of a greedy call, or the class of its error."""
    ids = tiny.inputs(model)["input_ids"]
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": []}
    settings |= {"output_logits": True, "return_dict_in_generate": True, "attention_mask": torch.ones_like(ids)}
    try:
        return torch.stack(model.generate(ids, **settings).logits)
    except Exception as error:
        return type(error)


@pytest.mark.parametrize(
    "family", [*MATTERS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS if name not in MATTERS)]
)
def test_an_attribute_set_by_hand_counts_as_in_transformers(family):
    stock = (OTHERS | FAMILIES)[family]()
    fused = fuseopt.initialize(copy.deepcopy(stock), GENERATION)
    right, changed = generated(stock), set()
    for path, name, value in attributes(stock):
        assert isinstance(generated(fused), torch.Tensor)
        assert fused.generate.calls[-1].tier is Tier.DEVICE_LOOP
        before = getattr(stock.get_submodule(path), name)
        for model in (stock, fused):
            setattr(model.get_submodule(path), name, value)
        wanted, got = generated(stock), generated(fused)
        if isinstance(wanted, torch.Tensor):
            torch.testing.assert_close(
                got, wanted, rtol=1e-4, atol=1e-4, msg=lambda m, at=f"{path}.{name}": f"{at}: {m}"
            )
        else:
            assert got is wanted, (path, name)
        if not isinstance(wanted, torch.Tensor) or wanted.shape != right.shape or not torch.allclose(wanted, right):
            changed.add(name)
        for model in (stock, fused):
            setattr(model.get_submodule(path), name, before)
    assert changed >= MATTERS.get(family, set())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_expected_is_watched(family):
    model = FAMILIES[family]()
    names = {name for module in model.modules() for name in _expected(module)}
    assert names and names | {"layer_idx"} <= {*REDUNDANT}
    watch = ModuleWatch(list(model.modules()), list(model.parameters()))
    assert watch.is_unchanged()
    for module in model.modules():
        for name in {*CONSTANTS, *REDUNDANT} & vars(module).keys():
            value = vars(module).pop(name)
            assert not watch.is_unchanged(), name
            vars(module)[name] = "another"
            assert not watch.is_unchanged(), name
            vars(module)[name] = value
            assert watch.is_unchanged(), name


def _expected(module):
    of = _EXPECTED.get(f"{type(module).__module__}.{type(module).__qualname__}")
    return {} if of is None else of(module)


def test_the_reason_names_the_attribute():
    model = fuseopt.initialize(tiny.gpt2(), GENERATION)
    model.transformer.h[1].attn.layer_idx = 0
    generated(model)
    assert "transformer.h.1.attn.layer_idx is 0, unlike its weights or config" in "\n".join(fuseopt.report(model).since)


def test_a_layer_norm_without_a_weight_is_left_to_transformers():
    stock, fused = tiny.gpt2(), fuseopt.initialize(tiny.gpt2(), GENERATION)
    for model in (stock, fused):
        model.transformer.ln_f = torch.nn.LayerNorm(24, elementwise_affine=False)
    assert torch.equal(generated(fused), generated(stock))
    assert fused.generate.calls[-1].tier is Tier.STOCK
