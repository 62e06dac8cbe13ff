"""generate() with packed weights in 8 or 4 bits, as on a GPU: logits of the model with the dequantised weights."""

import copy
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fuseopt
from fuseopt import ops, verify_low_bit
from fuseopt.generation.engine import layers as engine_layers
from fuseopt.generation.engine import low_bit
from fuseopt.generation.engine.layers import Linear, linear_of
from fuseopt.generation.prompt.prefill import UNQUANTISED_PROMPT
from fuseopt.ops.decode.packed_linear import SLOW_TRANSPOSED_ROWS, most_fast_rows
from fuseopt.ops.packed_weight import PackedWeight
from fuseopt.verify_low_bit import forced_logits
from tests.generation.checkpoint_layouts import LAYOUTS, checkpoint
from tests.generation.same_calls import calls_of, prompt
from tests.generation.test_checkpoint_layouts import MODELS
from tests.generation.test_low_bit import SWEPT, WEIGHTS, dequantised, fused
from tests.generation.test_low_bit import quantised_layers as found_layers

STEPS = 6
NO_GAIN_REASON = low_bit.no_gain_reason
CASES = [("gpt2", "int8"), ("llama", "int4"), ("t5", "zero points"), ("t5", "int8")]


pytestmark = pytest.mark.usefixtures("packs")


@pytest.fixture
def counted() -> Iterator[mock.Mock]:
    with mock.patch.object(ops, "decode_packed_linear", wraps=ops.decode_packed_linear) as op:
        yield op


def forced(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Logits of the same tokens in each call."""
    rows = len(inputs["input_ids"])
    tokens = torch.arange(3, 3 + rows * STEPS, device=inputs["input_ids"].device).view(rows, STEPS)
    return forced_logits(model, inputs, tokens).double()


def errors(ours: nn.Module, stock: nn.Module, inputs: dict[str, Tensor]) -> tuple[float, float]:
    """Root-mean-square errors of both models against `stock` in float32."""
    exact = forced(copy.deepcopy(stock).float(), inputs)
    ours_error, stock_error = ((forced(model, inputs) - exact).square().mean().sqrt() for model in (ours, stock))
    return ours_error.item(), stock_error.item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "family, weights", [("gpt2", "int8"), ("llama", "int4"), ("t5", "zero points"), ("t5", "int8")]
)
def test_logits_of_the_dequantised_model(family: str, weights: str, dtype: torch.dtype, counted: mock.Mock) -> None:
    model = SWEPT[family]().to(dtype)
    stock, ours = dequantised(model, **WEIGHTS[weights]), fused(model, WEIGHTS[weights])
    found, stocks = errors(ours, stock, prompt(model, 2, 5, seed=3, padded=False))
    assert found <= 2 * stocks and counted.called
    call, layers = calls_of(ours)[-1], dict(found_layers(model, **WEIGHTS[weights]))
    assert call.tier.value == "T1" and not call.unquantised_prompt, call
    packed = [low for linear in ours.generate.checked.step.spec.linears for low in linear.low_bit]
    assert len(packed) >= len(layers) > 3 and all(isinstance(low, PackedWeight) for low in packed)
    # Each weight is in memory once, packed.
    size = sum({low.data.data_ptr(): low.nbytes for low in packed}.values()) / 2**20
    assert f"{size:.1f} MiB, beside" in str(fuseopt.report(ours))


def test_long_prompts_and_large_batches_read_the_unquantised_weights(counted: mock.Mock) -> None:
    model = SWEPT["llama"](max_position_embeddings=128).bfloat16()
    stock, ours = copy.deepcopy(model), fused(model, "int8")
    inputs = prompt(model, 2, 40, seed=3, padded=False)
    with mock.patch.object(ops, "dequantize") as unused:
        found = forced(ours, inputs)
    (call,) = calls_of(ours)[-1:]
    assert call.unquantised_prompt and UNQUANTISED_PROMPT in call.note and not unused.called and counted.called
    expected = forced(stock, inputs)
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()
    counted.reset_mock()
    ours.generate(**prompt(model, 20, 5, seed=3, padded=False), max_new_tokens=3)
    assert not counted.called and calls_of(ours)[-1].tier.value == "T0"


@pytest.mark.parametrize(
    ("family", "rows", "length", "part"),
    [
        ("llama", 2, 40, "the last 8 of 40 tokens of 2 of 2 prompts: products of more than 16 rows"),
        ("llama", 20, 5, "the last 1 of 5 tokens of 16 of 20 prompts"),
        ("llama", 20, 1, "the last 1 of 1 tokens of 16 of 20 prompts"),
        ("llama", 1, 16, ""),
        ("t5", 20, 5, "the last 5 of 5 tokens of 16 of 20 prompts"),
        ("t5", 2, 40, ""),
    ],
)
def test_verify_compares_steps_on_a_prompt_within_the_limit(family: str, rows: int, length: int, part: str) -> None:
    model = SWEPT[family](**({"max_position_embeddings": 128} if family == "llama" else {})).bfloat16()
    inputs = prompt(model, rows, length, seed=3, padded=False)
    config = {"generation": {"weights": "int8"}}
    found = fuseopt.verify(model, config, inputs, generate={"max_new_tokens": 5})
    assert found.ok and found.low_bit is not None, found
    assert found.low_bit.shortened.startswith(part) and bool(found.low_bit.shortened) == bool(part)
    assert found.low_bit.drift.tokens == 5 * min(rows, 16) and not any("logits" in line for line in found.not_run)
    assert (f"steps compared on {part}" in str(found)) == bool(part)
    # Such steps do read the quantised weights.
    with mock.patch.object(low_bit, "quantize", lambda *args: ops.quantize(-args[0], *args[1:])):
        assert not fuseopt.verify(model, config, inputs, generate={"max_new_tokens": 5}).low_bit.drift.same_top > 0.9


@pytest.mark.parametrize("lengths", [{"max_new_tokens": 5}, {"max_length": 45}])
def test_verify_compares_parts_of_padded_prompts(lengths: dict[str, int]) -> None:
    """On the right, where the last 8 tokens of one prompt are padding; and with a length that counts the prompt."""
    model = SWEPT["llama"](max_position_embeddings=128).bfloat16()
    inputs = prompt(model, 2, 40, seed=3, padded=False)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][1, 20:] = 0
    with mock.patch.object(verify_low_bit, "greedy", wraps=verify_low_bit.greedy) as runs:
        found = fuseopt.verify(model, {"generation": {"weights": "int8"}}, inputs, generate=lengths)
    assert found.low_bit is not None and found.low_bit.steps.ok, found
    assert all(call.args[1]["attention_mask"].any(1).all() for call in runs.call_args_list)
    assert found.low_bit.shortened.startswith("the last 8 of 40 tokens") and found.low_bit.drift.tokens == 2 * 5


def test_a_weight_that_is_written_to_is_packed_again() -> None:
    model = SWEPT["gpt2"]().half()
    inputs = prompt(model, 1, 5, seed=3, padded=False)
    ours = fused(model, "int8")
    before = forced(ours, inputs)
    edits = [
        lambda: model.transformer.h[0].mlp.c_fc.weight.mul_(-3),
        lambda: setattr(model.lm_head.weight, "data", model.lm_head.weight.data * 2),
        lambda: model.transformer.h[1].mlp.c_proj.weight.data.neg_(),
    ]
    for edit in edits:
        with torch.no_grad():
            edit()
        stock = dequantised(fuseopt.restore(copy.deepcopy(model)), bits=8)
        after = forced(ours, inputs)
        assert (after - forced(stock, inputs)).abs().max() < 0.1 * (after - before).abs().max()
        before = after


def test_layers_that_gain_nothing_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_bit, "no_gain_reason", NO_GAIN_REASON)
    monkeypatch.setattr(low_bit, "LEAST_TRANSPOSED", 32)
    monkeypatch.setattr(low_bit, "LEAST_WITH_ATTENTION", 32 * 96)
    choices = {}
    for bits, keep in ((4, "device"), (8, "device"), (4, "cpu")):
        group = {"group": 32} if bits == 4 else {}
        model = fused(SWEPT["gpt2"]().half(), {"bits": bits, "keep": keep, **group})
        model.generate(**prompt(model, 1, 5, seed=3, padded=False), max_new_tokens=2)
        choices[bits, keep] = {module.path for module in model.generate.checked.low_bit.modules()}
        reasons = " ".join(model.generate.report_lines())
        is_kept = "transformer.h.0.attn.c_attn, unchanged: one kernel computes it" in reasons
        assert is_kept == ((bits, keep) == (4, "device"))
    assert len(choices[8, "device"]) == len(choices[4, "cpu"]) == 9
    queries = {f"transformer.h.{i}.attn.c_attn" for i in (0, 1)}
    assert choices[8, "device"] - choices[4, "device"] == queries
    wide, narrow = Linear((torch.ones(128, 32).T,)), Linear((torch.ones(128, 31).T,))
    assert NO_GAIN_REASON(wide, 8, False) is None and "as fast" in NO_GAIN_REASON(narrow, 4, False)
    assert "attention" in NO_GAIN_REASON(Linear((torch.ones(32, 95).T,)), 8, True)
    assert NO_GAIN_REASON(linear_of(nn.Linear(8, 8)), 8, True) is None  # stored as [N, K]


def test_two_to_eight_rows_read_unquantised_weights_of_a_conv1d(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_layers, "SLOW_TRANSPOSED_ROWS", SLOW_TRANSPOSED_ROWS)
    model = fused(SWEPT["gpt2"]().half(), "int8")
    model.generate(**prompt(model, 1, 5, seed=3, padded=False), max_new_tokens=2)
    for layer in model.generate.checked.step.layers[0].linears:
        assert [rows for rows in range(1, 11) if layer.at(rows).low_bit] == [1, 9, 10]
    assert model.generate.checked.low_bit.most_rows == 1


def test_a_layer_of_more_rows_than_its_kernel_is_fast_for_is_that_of_the_unquantised_model() -> None:
    model = fused(SWEPT["llama"]().half(), "int8")
    model.generate(**prompt(model, 1, 5, seed=3, padded=False), max_new_tokens=2)
    layer = model.generate.checked.step.spec.head
    (weight,) = layer.weights
    assert layer.most_low_bit_rows == most_fast_rows([len(weight)], weight.shape[1]) == 16
    assert layer.at(16) is layer and not layer.at(17).low_bit and layer.at(17).weights is layer.weights
    layers = ([1024], [900], [1024, 512], [1000, 400])
    assert [most_fast_rows(outputs, 4096) for outputs in layers] == [32, 16, 32, 16]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pre_quantised_checkpoints(layout: str, counted: mock.Mock) -> None:
    model, dense = checkpoint(MODELS["llama"]().bfloat16(), layout, dtype=torch.bfloat16)
    ours = fuseopt.initialize(model, {"generation": {"enable": True}})
    found, stocks = errors(ours, dense, prompt(model, 2, 5, seed=3, padded=False))
    assert found <= 2 * stocks and counted.called and calls_of(ours)[-1].tier.value == "T1"
    packed = [low for linear in ours.generate.checked.step.spec.linears for low in linear.low_bit]
    assert len(packed) > 5 and all(isinstance(low, PackedWeight) for low in packed)
