"""generate() of pre-quantised models: the tokens of the dequantised model, or tier T2 with a reason."""

import copy
import itertools
import re
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

import fuseopt
from fuseopt import ops
from fuseopt.generation.families.reference_step import KeyValueCache, ReferenceDecoder
from fuseopt.modules import lora
from fuseopt.modules.quantised import quantised_weight, stored_tensors
from fuseopt.ops.low_bit import dequantize
from tests import tiny
from tests.generation import checkpoint_layouts as layouts
from tests.generation.checkpoint_layouts import LAYOUTS, checkpoint
from tests.generation.families.tiny_decoders import DECODERS
from tests.generation.same_calls import GENERATION, assert_same, calls_of, generate, prompt

GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6}
NOT_GREEDY = ({"num_beams": 3, "max_new_tokens": 5}, {"do_sample": True, "top_k": 20, "max_new_tokens": 6})
_WIDE = {"hidden_size": 96, "intermediate_size": 64}
llama = partial(DECODERS["llama"], **_WIDE, head_dim=16)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "gpt2": partial(tiny.gpt2, n_embd=32, n_head=2),
    "phi3": partial(DECODERS["phi3"], **_WIDE, head_dim=16),
    "t5": partial(tiny.t5, d_model=64, d_ff=96, d_kv=32),
}
CASES = [
    *itertools.product(["llama"], LAYOUTS),
    *(("gpt2", "AWQ int4"), ("phi3", "GPTQ int4"), ("t5", "torchao int4")),
]
ALL = [
    *itertools.product(["llama", "phi3"], LAYOUTS),
    # The others' layers have no `weight`, which T5's feed-forwards read, or a hook that its encoder does not call.
    *itertools.product(["t5"], ["torchao int8", "torchao int4"]),
    *itertools.product(["gpt2"], ["GPTQ int4", "AWQ int4"]),  # those that quantise a Conv1D
]


def is_head(path: str) -> bool:
    return path.endswith("lm_head")


def first_reason(model: nn.Module, config: object = GENERATION) -> str:
    plan = fuseopt.plan(model, config)
    return next(r.reason for r in plan.replacements if r.sites[0].path == "generate")


def fused(model: nn.Module) -> nn.Module:
    return fuseopt.initialize(model, GENERATION)


@pytest.mark.parametrize("family, layout", CASES)
def test_tokens_of_the_dequantised_model(family: str, layout: str) -> None:
    model, dense = checkpoint(MODELS[family](), layout)
    inputs = prompt(model, 2, 5, seed=3)
    own = generate(copy.deepcopy(model), inputs, **GREEDY)
    found = {path for path, module in model.named_modules() if quantised_weight(module) is not None}
    in_step = f"{sum(not path.startswith('encoder.') for path in found)} pre-quantised linear layers ({layout})"
    assert f"{in_step}, read by the step" in first_reason(model)
    ours = fused(model)
    with mock.patch.object(ops, "decode_low_bit_linear", wraps=ops.decode_low_bit_linear) as counted:
        got = generate(ours, inputs, **GREEDY)
    assert calls_of(ours)[-1].tier.value == "T0" and counted.called and len(found) >= 8, calls_of(ours)
    assert_same(got, generate(dense, inputs, **GREEDY))
    assert_same(got, own)
    assert in_step in str(fuseopt.report(ours))
    assert_same(generate(fuseopt.restore(model), inputs, **GREEDY), own)


@pytest.mark.slow
@pytest.mark.parametrize("family, layout", ALL)
def test_tokens_of_beams_and_samples(family: str, layout: str) -> None:
    for symmetric in (False, True):
        model, dense = checkpoint(MODELS[family](), layout, symmetric=symmetric)
        inputs = prompt(model, 3, 9, seed=5)
        ours = fused(model)
        for arguments in (GREEDY, *NOT_GREEDY):
            assert_same(generate(ours, inputs, **arguments), generate(dense, inputs, **arguments))
            assert calls_of(ours)[-1].tier.value == "T0", calls_of(ours)[-1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("symmetric, group", [(False, 32), (True, 64), (False, 0)])
def test_a_layer_is_read_without_a_loss(layout: str, symmetric: bool, group: int) -> None:
    bits, inputs, outputs = int(layout[-1]), 192, 40
    groups = 1 if bits == 8 or not group else inputs // group
    of = layouts.drawn(outputs, inputs, bits, groups, symmetric or bits == 8, torch.float16)
    stored = quantised_weight(LAYOUTS[layout](of, None))
    assert stored is not None and stored.layout == layout and stored.shape == (outputs, inputs)
    low = stored.read()
    assert torch.equal(dequantize(low, torch.float64).float(), of.dequantised())
    assert (low.bits, low.group) == (bits, inputs if bits == 8 else group or 64)
    assert (low.zeros is None) == (symmetric or bits == 8) and all(part.is_contiguous() for part in low.tensors)
    assert stored.group == low.group and stored.bits == bits
    first, last = stored.halves()
    halves = torch.cat([dequantize(half.read()) for half in (first, last)])
    assert torch.equal(halves, dequantize(low)) and first.shape == last.shape == (outputs // 2, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_and_biases_of_another_dtype(dtype: torch.dtype) -> None:
    """A layer computes in the dtype of its input, which is the model's."""
    model, dense = checkpoint(llama(), "GPTQ int4", dtype=dtype)
    inputs = prompt(model, 2, 5, seed=3)
    ours = fused(model)
    assert_same(generate(ours, inputs, **GREEDY), generate(dense, inputs, **GREEDY))
    half, _ = checkpoint(llama().bfloat16(), "GPTQ int4", dtype=torch.float16)
    output, _ = generate(fused(half), inputs, **GREEDY)
    assert output.logits[0].dtype is torch.float32 and output.logits[0].isfinite().all()
    assert {call.tier.value for call in (*calls_of(half), *calls_of(ours))} == {"T0"}


def test_a_long_prompt_and_the_reference_decoder() -> None:
    """Prompts with more rows than the kernels take dequantise one layer at a time."""
    model, dense = checkpoint(llama(max_position_embeddings=128), "AWQ int4")
    inputs = prompt(model, 2, 50, seed=3)
    ours = fused(model)
    assert_same(generate(ours, inputs, **GREEDY), generate(dense, inputs, **GREEDY))
    assert calls_of(ours)[-1].tier.value == "T0"
    ids = inputs["input_ids"][1:]
    logits = ReferenceDecoder(ours.generate.checked.step.spec)(KeyValueCache(), ids)
    torch.testing.assert_close(logits, dense(ids).logits, rtol=1e-4, atol=1e-5)


def test_edits_are_seen() -> None:
    model, _ = checkpoint(llama(), "GPTQ int4")
    inputs = prompt(model, 1, 5, seed=3)
    stock = copy.deepcopy(model)
    ours = fused(model)
    before, _ = generate(ours, inputs, **GREEDY)
    edits: list[Callable[[nn.Module], object]] = [
        lambda layer: layer.scales.mul_(-2),
        lambda layer: layer.bias.add_(1),
        lambda layer: layer.scales.data.mul_(3),
        lambda layer: layer.qweight.bitwise_not_(),
        lambda layer: setattr(layer, "qzeros", layer.qzeros ^ 0x11111111),
    ]
    for edit in edits:
        for edited in (ours, stock):
            edit(edited.model.layers[1].mlp.down_proj)
        after, random = generate(ours, inputs, **GREEDY)
        assert_same((after, random), generate(stock, inputs, **GREEDY))
        assert calls_of(ours)[-1].tier.value == "T0"
        assert not torch.equal(before.logits[0], after.logits[0])
        before = after


def test_a_model_that_its_first_forward_decompresses() -> None:
    model, dense = checkpoint(llama(), "compressed-tensors int4")
    inputs = prompt(model, 2, 5, seed=3)
    ours = fused(model)
    for _ in range(2):
        assert_same(generate(ours, inputs, **GREEDY), generate(dense, inputs, **GREEDY))
        assert calls_of(ours)[-1].tier.value == "T0"
    model(**inputs)
    assert_same(generate(ours, inputs, **GREEDY), generate(dense, inputs, **GREEDY))
    assert calls_of(ours)[-1].tier.value == "T2" and "has had its forward replaced" in calls_of(ours)[-1].reason


def with_attributes(**attributes: object) -> Callable[[nn.Module], object]:
    return lambda layer: [setattr(layer, name, value) for name, value in attributes.items()]


def out_of_order(layer: nn.Module) -> None:
    layer.g_idx = layer.g_idx.flip(0)


def with_zero_points(layer: nn.Module) -> None:
    layer.weight.zero_point.fill_(1)


def in_groups(layer: nn.Module) -> None:
    layer.weight.scale = layer.weight.scale.expand(-1, 3)


def with_float_zeros(layer: nn.Module) -> None:
    layer.weight.zero_point = layer.weight.zero_point.float()


def with_half_scales(layer: nn.Module) -> None:
    layer.scales = layer.scales.half()


def with_fewer_zeros(layer: nn.Module) -> None:
    layer.qzeros = layer.qzeros[:, :-1]


def of_quantised_inputs(layer: nn.Module) -> None:
    layer.quantization_scheme.input_activations = object()


REFUSED: dict[str, tuple[str, Callable[[nn.Module], object]]] = {
    "g_idx orders its groups by activations": ("GPTQ int4", out_of_order),
    "(GPTQ int8): only 4 bits are read": ("GPTQ int4", with_attributes(bits=8)),
    "its forward has repacked it for a kernel": ("GPTQ int4", with_attributes(linear_mode="inference")),
    "its forward has repacked it": ("AWQ int4", with_attributes(transformed=True)),
    "its scales and qzeros have shapes (3, 96) and (3, 11)": ("AWQ int4", with_fewer_zeros),
    "it has an adapter": ("AWQ int4", with_attributes(adapter=object())),
    "its scales are torch.float64": ("AWQ int4", lambda layer: layer.double()),
    "it has zero points": ("torchao int8", with_zero_points),
    "only a scale for each output is read, not for groups": ("torchao int8", in_groups),
    "its zero points are not integers of 4 bits": ("torchao int4", with_float_zeros),
    "its activations are quantised too": ("compressed-tensors int4", of_quantised_inputs),
    "the layers that read the same input: GPTQ int4, groups of 32, scales of torch.float16, GPTQ int4": (
        "GPTQ int4",
        with_half_scales,
    ),
    "has had its forward replaced": ("AWQ int4", with_attributes(forward=lambda input: input)),
    "carries hooks": ("AWQ int4", lambda layer: layer.register_forward_hook(lambda *_: None)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_layers_that_are_not_read(reason: str) -> None:
    layout, change = REFUSED[reason]
    model, _ = checkpoint(llama(), layout)
    change(model.model.layers[1].self_attn.q_proj)
    path = "model.layers.1.self_attn.q_proj"
    if "hooks" not in reason and "forward replaced" not in reason:  # which only a call's check looks for
        assert re.search(f"transformers decodes, since {path} is (not )?quantised", first_reason(model))
        assert reason in first_reason(model)
        assert "weights in int8: none, since transformers decodes" in first_reason(
            model, {"generation": {"weights": "int8"}}
        )
    ours = fused(model)
    assert ours.generate.checked.check().reason.startswith(path)
    assert reason in ours.generate.checked.check().reason
    assert not ours.generate.checked.is_built


OTHERS = {
    "bitsandbytes.nn.modules.Linear4bit": "bitsandbytes",
    "hqq.core.quantize.HQQLinear": "HQQ",
    "transformers.integrations.finegrained_fp8.FP8Linear": "transformers",
    "gptqmodel.nn_modules.qlinear.torch_int8.TorchInt8Linear": "GPTQModel",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_libraries_layers_are_named(name: str) -> None:
    cls = layouts.named(type(name.rpartition(".")[2], (nn.Linear,), {}), name)
    model = llama()
    inputs = prompt(model, 1, 5, seed=3)
    for path, module in list(layouts.linears(model)):
        if not is_head(path):
            module.__class__ = cls
    wanted = generate(copy.deepcopy(model), inputs, **GREEDY)
    reason = f"is a {cls.__name__} of {OTHERS[name]}, a layout that the decode step does not read"
    assert "14 pre-quantised linear layers; transformers decodes" in first_reason(model)
    assert reason in first_reason(model)
    ours = fused(model)
    assert_same(generate(ours, inputs, **GREEDY), wanted)
    assert calls_of(ours)[-1].tier.value == "T2" and reason in calls_of(ours)[-1].reason


def test_a_tensor_of_torchao_that_is_not_read() -> None:
    model, dense = checkpoint(llama(), "torchao int4")
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.__class__ = layouts.Int4Tensor
    inputs = prompt(model, 1, 5, seed=3)
    assert "its zero points are floating point, not integers" in first_reason(model)
    assert_same(generate(fused(model), inputs, **GREEDY), generate(dense, inputs, **GREEDY))
    assert calls_of(model)[-1].tier.value == "T2"


def replace_scale(layer: nn.Module) -> None:
    layer.weight.scale = layer.weight.scale * 2


def test_a_tensor_replaced_inside_a_weight_of_torchao() -> None:
    model, _ = checkpoint(llama(), "torchao int8")
    inputs = prompt(model, 1, 5, seed=3)
    stock = copy.deepcopy(model)
    ours = fuseopt.initialize(model, {"generation": {"prefix_cache_mib": 1}})
    generate(ours, inputs, **GREEDY)
    for edited in (ours, stock):
        replace_scale(edited.model.layers[0].self_attn.v_proj)
    assert_same(generate(ours, inputs, **GREEDY), generate(stock, inputs, **GREEDY))
    assert calls_of(ours)[-1].tier.value == "T0"


@pytest.mark.parametrize("targets", [["o_proj"], ["q_proj", "k_proj", "v_proj"], ["q_proj", "v_proj"]])
def test_lora_around_a_layer_of_torchao(targets: list[str]) -> None:
    peft = pytest.importorskip("peft")
    model, _ = checkpoint(llama(), "torchao int8")
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    model.eval()
    inputs = prompt(model, 1, 5, seed=3)
    wanted = generate(copy.deepcopy(model), inputs, **GREEDY)
    reason = f"model.layers.0.self_attn.{targets[0]} is a LoRA layer around a quantised layer"
    assert f"14 pre-quantised linear layers; transformers decodes, since {reason}" in first_reason(model)
    assert f"linear layers, by transformers: {reason}" in first_reason(model)
    assert_same(generate(fused(model), inputs, **GREEDY), wanted)
    assert calls_of(model)[-1].tier.value == "T2"
    assert calls_of(model)[-1].reason.endswith("_proj is a LoRA layer around a quantised layer")
    for layer in (layer for layer in fuseopt.restore(model).modules() if lora.is_lora_linear(layer)):
        name = "peft.tuners.lora.torchao.TorchaoLoraLinear"
        layer.__class__ = layouts.named(type("TorchaoLoraLinear", (type(layer),), {}), name)
    reason = "_proj is a LoRA layer of peft around no plain linear layer (TorchaoLoraLinear)"
    assert reason in first_reason(model) and fused(model).generate.checked.check().reason.endswith(reason)


def test_other_versions_of_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that lacks an attribute is read if its numbers do not depend on it; else transformers decodes."""
    model, dense = checkpoint(llama(), "torchao int8")
    inputs = prompt(model, 1, 5, seed=3)
    wanted = generate(dense, inputs, **GREEDY)
    weights = [layer.weight for path, layer in layouts.linears(model) if not is_head(path)]
    for weight in weights:
        del weight.act_pre_scale
    assert_same(generate(fused(model), inputs, **GREEDY), wanted)
    assert calls_of(model)[-1].tier.value == "T0"
    fuseopt.restore(model)
    del weights[3].zero_point
    monkeypatch.setattr(layouts.Int8Tensor, "dequantize", lambda weight: weight.qdata * weight.scale)
    reason = "is quantised in a layout that fuseopt cannot read ('Int8Tensor' object has no attribute"
    assert reason in first_reason(model)
    assert_same(generate(fused(model), inputs, **GREEDY), wanted)
    assert calls_of(model)[-1].tier.value == "T2" and reason in calls_of(model)[-1].reason


def test_a_part_that_is_not_quantised() -> None:
    """Layers that read the same input must be quantised alike; other layers may differ."""
    inputs = prompt(llama(), 2, 5, seed=3)
    model, dense = checkpoint(llama(), "AWQ int4", keep=lambda path: "mlp" in path or is_head(path))
    assert_same(generate(fused(model), inputs, **GREEDY), generate(dense, inputs, **GREEDY))
    assert calls_of(model)[-1].tier.value == "T0"
    model, dense = checkpoint(llama(), "AWQ int4", keep=lambda path: path.endswith(("k_proj", "lm_head")))
    assert_same(generate(fused(model), inputs, **GREEDY), generate(dense, inputs, **GREEDY))
    assert calls_of(model)[-1].tier.value == "T2"
    assert "same input: AWQ int4, groups of 32, scales of torch.float32, floating point" in calls_of(model)[-1].reason


def test_weights_of_a_model_that_came_quantised() -> None:
    model, _ = checkpoint(llama(), "torchao int8")
    config = {"generation": {"weights": "int8"}}
    assert "weights in int8: 1 of 15 linear layers" in first_reason(model, config)
    assert "14, such as model.layers.0.self_attn.q_proj, unchanged: it is pre-quantised (torchao int8)" in first_reason(
        model, config
    )
    ours = fuseopt.initialize(model, config)
    ours.generate(**prompt(model, 1, 5, seed=3), max_new_tokens=3)
    assert calls_of(ours)[-1].tier.value == "T0" and len(ours.generate.checked.step.head.low_bit) == 1
    assert "14 pre-quantised linear layers (torchao int8)" in str(fuseopt.report(ours))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_default_preset_leaves_the_results(layout: str) -> None:
    model, dense = checkpoint(llama(), layout)
    inputs = prompt(model, 2, 5, seed=3)
    torch.testing.assert_close(fuseopt.initialize(model)(**inputs).logits, dense(**inputs).logits)


def test_where_no_kernel_reads_such_weights_transformers_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, reason = LAYOUTS["GPTQ int4"](layouts.drawn(8, 32, 4, 1, True, torch.float16), None), "no kernels here"
    assert stored_tensors(layer.to("meta"))[1] == "is quantised (GPTQ int4): its tensors have no data"
    monkeypatch.setattr("fuseopt.generation.engine.low_bit.no_kernel_reason", lambda layer: reason)
    for layout in LAYOUTS:
        model, _ = checkpoint(llama(), layout)
        assert re.search(rf"is quantised \({layout[:5]}.*\): {reason}", first_reason(model))
        fused(model).generate(**prompt(model, 1, 5, seed=3), max_new_tokens=2)
        assert calls_of(model)[-1].tier.value == "T2" and reason in calls_of(model)[-1].reason
