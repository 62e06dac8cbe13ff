"""generate() with weights in 8 or 4 bits: the tokens of a stock model whose weights are the dequantised ones."""

import copy
import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

import fuseopt
from fuseopt.errors import ConfigError
from fuseopt.generation.families.reference_step import KeyValueCache, ReferenceDecoder
from fuseopt.generation.tiers import Tier
from fuseopt.ops.backends import assume_gpu
from fuseopt.ops.low_bit import dequantize, quantize
from tests import tiny
from tests.generation.families.tiny_decoders import DECODERS, ENCODER_DECODERS
from tests.generation.same_calls import (
    ON_DEVICE,
    assert_same,
    calls,
    calls_of,
    compare,
    generate,
    prompt,
    sweep,
    with_weights,
)

GROUP = 32
WEIGHTS = {
    "int8": {"bits": 8},
    "int4": {"bits": 4, "group": GROUP},
    "zero points": {"bits": 4, "group": GROUP, "symmetric": False},
}
CALLS = {
    "greedy": {"max_new_tokens": 7, "min_new_tokens": 7},
    "beams": {"num_beams": 3, "max_new_tokens": 6},
    "sampling": {"do_sample": True, "top_k": 20, "max_new_tokens": 7},
}
_WIDE = {"hidden_size": 96, "intermediate_size": 64}
SWEPT = {
    "gpt2": partial(tiny.gpt2, n_embd=32, n_head=2),
    "llama": partial(DECODERS["llama"], **_WIDE),
    "qwen2": partial(DECODERS["qwen2"], **_WIDE),
    "gemma2": partial(DECODERS["gemma2"], **_WIDE),
    "t5": partial(tiny.t5, d_model=64, d_ff=96),
    "t5_gated": partial(tiny.t5_gated, d_model=64, d_ff=96),
}
"""Models of which most layers have a multiple of `GROUP` inputs."""
CASES = [
    *itertools.product(SWEPT, WEIGHTS),
    *((family, "int8") for family in ("gpt_neox", "phi3", "opt_projected", "cohere", "bart", "mbart")),
]
OF_PROMPTS = re.compile(r"(^|\.)encoder\.|EncDecAttention\.[kv]$|encoder_attn\.[kv]_proj$")


def quantised_layers(model: nn.Module, group: int = 1, **_: object) -> Iterator[tuple[str, nn.Module]]:
    """What ought to be quantised, found without the decode step."""
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, Conv1D)) or OF_PROMPTS.search(name):
            continue
        if module.weight.shape[0 if isinstance(module, Conv1D) else 1] % group == 0:
            yield name, module


def of_linear(module: nn.Module, **options: object) -> nn.Parameter:
    """The dequantised weight, of a tensor of its own."""
    stored_by_input = isinstance(module, Conv1D)
    weight = module.weight.T if stored_by_input else module.weight
    result = dequantize(quantize(weight, **options), weight.dtype)
    return nn.Parameter(result.T.contiguous() if stored_by_input else result)


def dequantised(model: nn.Module, **options: object) -> nn.Module:
    """A stock copy whose linear layers have the dequantised weights; embeddings stay."""
    stock = copy.deepcopy(model)
    for _, module in quantised_layers(stock, **options):
        module.weight = of_linear(module, **options)
    return stock


def fused(model: nn.Module, weights: object) -> nn.Module:
    return fuseopt.initialize(model, {"generation": {"weights": weights}})


@pytest.mark.parametrize("family, weights", CASES)
def test_tokens_of_the_dequantised_model(family: str, weights: str) -> None:
    model = {**DECODERS, **ENCODER_DECODERS, **SWEPT}[family]()
    stock, ours = dequantised(model, **WEIGHTS[weights]), fused(model, WEIGHTS[weights])
    # With eager attention and padding the model's own forward runs the prompt, with the unquantised weights.
    inputs = prompt(model, 2, 5, seed=3, padded=model.config._attn_implementation == "sdpa")
    for arguments in CALLS.values():
        assert_same(generate(ours, inputs, **arguments), generate(stock, inputs, **arguments))
        assert calls_of(ours)[-1].tier.value == "T0", calls_of(ours)[-1]
    quantised = len(dict(quantised_layers(model, **WEIGHTS[weights])))
    assert quantised > 3 and f"{quantised} of" in str(fuseopt.report(ours)), fuseopt.report(ours)


@pytest.fixture(params=["gpt2", "t5"])
def exact(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model whose weights 8 bits hold exactly; `compare` quantises it."""
    return with_weights(f"{request.param} int8", lambda family: tiny.FAMILIES[family](), monkeypatch)


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@sweep(24)
@given(st.data())
def test_random_calls(exact: nn.Module, data: st.DataObject) -> None:
    """A few; slow tests make the calls of other files with int8 weights."""
    inputs = prompt(exact, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9)), data.draw(st.integers(0, 99)))
    arguments = data.draw(calls(ON_DEVICE)) | data.draw(st.sampled_from([{}, {"bad_words_ids": [[9], [4, 5]]}]))
    compare(exact, inputs, Tier.FAST_FORWARD if "bad_words_ids" in arguments else Tier.DEVICE_LOOP, **arguments)


def test_the_reference_decoder_multiplies_with_the_dequantised_weights() -> None:
    model = tiny.gpt2()
    stock, ours = dequantised(model, bits=8), fused(model, "int8")
    ids = prompt(model, 2, 6, seed=1, padded=False)["input_ids"]
    ours.generate(ids, max_new_tokens=2)
    logits = ReferenceDecoder(ours.generate.checked.step.spec)(KeyValueCache(), ids)
    torch.testing.assert_close(logits, stock(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_written_to_is_quantised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    import fuseopt.generation.engine.low_bit as engine

    monkeypatch.setattr(engine, "quantize", lambda *args: counted.append(1) or quantize(*args))
    model = tiny.gpt2()
    inputs = prompt(model, 1, 5, seed=3)
    fused(model, "int8")
    first = generate(model, inputs, **CALLS["greedy"])
    total, _ = len(counted), counted.clear()
    generate(model, inputs, **CALLS["greedy"])
    assert total == len(dict(quantised_layers(model))) and not counted
    edits: list[Callable[[], object]] = [
        lambda: model.transformer.h[0].mlp.c_fc.weight.mul_(-3),
        lambda: model.load_state_dict({"transformer.h.1.attn.c_proj.weight": torch.randn(24, 24)}, strict=False),
        lambda: setattr(model.transformer.h[1].mlp.c_proj, "weight", nn.Parameter(torch.randn(96, 24))),
    ]
    for edit in edits:
        counted.clear()
        with torch.no_grad():
            edit()
        stock = dequantised(fuseopt.restore(copy.deepcopy(model)), bits=8)
        assert_same(generate(model, inputs, **CALLS["greedy"]), generate(stock, inputs, **CALLS["greedy"]))
        assert len(counted) == 1
    assert not torch.equal(first[0].logits[0], generate(model, inputs, **CALLS["greedy"])[0].logits[0])


def train_by_fused_adam(model: nn.Module, inputs: dict) -> None:
    model.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True).step()
    model.eval()


def merge_an_adapter(model: nn.Module, inputs: dict) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], init_lora_weights=False, fan_in_fan_out=True)
    assert peft.get_peft_model(model, config).merge_and_unload() is model


def exchange_data(model: nn.Module, inputs: dict) -> None:
    for parameter in model.parameters():
        parameter.data = -2 * parameter.data


@pytest.mark.parametrize("write", [train_by_fused_adam, merge_an_adapter, exchange_data])
def test_a_write_that_changes_no_version_is_seen(write: Callable) -> None:
    model = tiny.gpt2()
    inputs = prompt(model, 1, 5, seed=3, padded=False)
    fused(model, "int8")
    before = generate(model, inputs, **CALLS["greedy"])
    versions = [parameter._version for parameter in model.parameters()]
    write(model, inputs)
    assert [parameter._version for parameter in model.parameters()] == versions
    after = generate(model, inputs, **CALLS["greedy"])
    stock = dequantised(fuseopt.restore(copy.deepcopy(model)), bits=8)
    assert_same(after, generate(stock, inputs, **CALLS["greedy"]))
    assert not torch.equal(before[0].logits[0], after[0].logits[0])


def test_weights_of_inference_mode_are_quantised_again_too() -> None:
    with torch.inference_mode():
        model = tiny.gpt2()
        inputs = prompt(model, 1, 5, seed=3)
        fused(model, "int8")
        generate(model, inputs, **CALLS["greedy"])
        model.lm_head.weight.mul_(-1)
        stock = dequantised(fuseopt.restore(copy.deepcopy(model)), bits=8)
        assert_same(generate(model, inputs, **CALLS["greedy"]), generate(stock, inputs, **CALLS["greedy"]))


def test_parameters_and_forwards_are_those_of_the_unquantised_model() -> None:
    model = tiny.t5()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = {**prompt(model, 2, 5, seed=3), "labels": torch.randint(3, tiny.VOCAB, (2, 4))}
    wanted = model(**inputs).logits
    fused(model, "int4")
    model.generate(inputs["input_ids"], max_new_tokens=3)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(model(**inputs).logits, wanted)
    fuseopt.restore(model)
    stock = model.generate(inputs["input_ids"], max_new_tokens=3)
    assert torch.equal(stock, tiny.t5().generate(inputs["input_ids"], max_new_tokens=3))


def test_the_plan_says_what_stays_and_why() -> None:
    def reason(model: nn.Module, weights: object) -> str:
        plan = fuseopt.plan(model, {"generation": {"weights": weights}})
        return next(r.reason for r in plan.replacements if r.sites[0].path == "generate")

    gpt2 = reason(tiny.gpt2(), {"bits": 4, "group": 32, "exclude": ["lm_head", "transformer.h.1"]})
    assert "weights in int4, groups of 32: 1 of 9 linear layers" in gpt2  # a GPT-2 of width 24 whose MLP has 96
    assert "`exclude` names it: 'lm_head'" in gpt2
    assert "24 inputs are no multiple of the group of 32" in gpt2
    assert "it runs only once per prompt" in reason(tiny.t5(), "int8")
    assert "int8: 9 of 9 linear layers" in reason(tiny.gpt2(), "int8")
    printed = str(fuseopt.plan(tiny.gpt2(), {"generation": {"weights": "int8", "cache_dtype": "int8"}}))
    assert "  generate(): weights in int8: 9 of 9 linear layers\n  generate(): keys and values in int8" in printed
    assert "torch.float64" in reason(tiny.gpt2().double(), "int8")
    with assume_gpu((9, 0)):
        assert "the CUDA kernel does not take torch.float32" in reason(tiny.gpt2(), "int8")
        halves = reason(tiny.gpt2().half(), "int8")
    assert "1 of 9 linear layers; " in halves
    assert "2, such as transformer.h.0.attn.c_attn, unchanged: one kernel computes" in halves
    with assume_gpu((7, 5)):
        assert "the CUDA kernel needs a GPU of compute capability 8.0, not 7.5" in reason(tiny.t5().half(), "int8")
    kept = reason(tiny.gpt2(), {"bits": 8, "keep": "cpu"})
    assert (
        "int8: 9 of 9 linear layers" in kept
        and "`keep: 'cpu'` has no effect, since the weights are not on a GPU" in kept
    )


def test_excluded_layers_stay() -> None:
    model = tiny.gpt2()
    inputs = prompt(model, 1, 5, seed=3)
    stock = copy.deepcopy(model)
    for name, module in quantised_layers(stock):
        if name == "lm_head" or ".mlp." not in name:
            continue
        module.weight = of_linear(module, bits=8)
    ours = fused(model, {"bits": 8, "exclude": ["*.attn", "lm_head"]})
    assert_same(generate(ours, inputs, **CALLS["greedy"]), generate(stock, inputs, **CALLS["greedy"]))


@pytest.mark.parametrize(
    "weights, message",
    [
        ("int3", r"generation.weights: 'int3' is not one of int8, int4"),
        (4, r"expected false, 'int8', 'int4' or a dict such as .*, got int"),
        ({"group": 64}, r"generation.weights: the dict has no 'bits'"),
        ({"bits": 5}, r"generation.weights.bits: 5 is not one of 8, 4"),
        ({"bits": 4, "group": 48}, r"generation.weights.group: 48 is not one of 32, 64, 128"),
        ({"bits": 8, "symmetric": False}, r"8 bits have no zero points"),
        ({"bits": 8, "group": 64}, r"generation.weights.group: 8 bits have one scale for each output"),
        ({"bits": 4, "exclude": "lm_head"}, r"generation.weights.exclude: expected a list of module paths"),
        ({"bits": 4, "groups": 64}, r"did you mean 'group'"),
        ({"bits": 4, "keep": "disk"}, r"generation.weights.keep: 'disk' is not one of device, cpu"),
    ],
)
def test_configs_that_are_refused(weights: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fuseopt.Config.load({"generation": {"weights": weights}})


def test_a_config_survives_json() -> None:
    for weights in ("int4", "int8", {"bits": 8, "exclude": ["lm_head"], "keep": "cpu"}, None):
        config = fuseopt.Config.load({"generation": {"weights": weights}})
        assert fuseopt.Config.load(config.to_json()) == config


def test_verify_does_not_require_the_tokens_of_the_unquantised_model() -> None:
    model = tiny.gpt2()
    inputs = prompt(model, 2, 5, seed=3)
    quantised = fuseopt.verify(model, {"generation": {"weights": {"bits": 4, "group": 32}}}, inputs)
    assert quantised.ok and not quantised.tokens_count and quantised.tokens_agree is not None
    assert "not required, as generate() decodes with weights in int4, groups of 32" in str(quantised)
    nothing = {"bits": 8, "exclude": ["*", "*.*"]}
    for options in ({"enable": True}, {"weights": nothing}):
        assert fuseopt.verify(model, {"generation": options}, inputs).tokens_count
