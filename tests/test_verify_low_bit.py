"""verify with weights in 8 or 4 bits: error of the steps, error of the weights, and drift of the predictions."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fuseopt
from fuseopt.generation.engine import low_bit as engine
from fuseopt.generation.engine.graphs import StepGraphs
from fuseopt.generation.prompt.prefill import UNQUANTISED_PROMPT
from fuseopt.ops.low_bit import LowBitWeight, dequantize, quantize
from fuseopt.verify_low_bit import MOST_HALF_STEPS, Drift, StepRun, forced_logits, rounding_error
from tests import tiny
from tests.generation.same_calls import prompt
from tests.generation.test_low_bit import SWEPT, WEIGHTS, dequantised

KINDS = pytest.mark.parametrize("kind", WEIGHTS)


def verified(family: str, kind: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, fuseopt.Verification]:
    model = SWEPT[family]().to(dtype)
    config = {"generation": {"weights": WEIGHTS[kind]}}
    inputs = prompt(model, 2, 5, seed=3)
    return model, fuseopt.verify(model, config, inputs, generate={"max_new_tokens": 6, "num_beams": 2})


@pytest.mark.parametrize(
    "family, kind, dtype",
    [
        ("gpt2", "int8", torch.float32),
        ("t5", "zero points", torch.float32),
        ("llama", "int4", torch.bfloat16),
    ],
)
def test_the_share_of_quantising_is_said(family: str, kind: str, dtype: torch.dtype) -> None:
    model, found = verified(family, kind, dtype)
    low = found.low_bit
    assert found.ok and low is not None, found
    assert 0 < low.steps.fused_error <= low.steps.tolerance and low.steps.name == "logits of generate()"
    assert 0.4 < low.rounding <= 1 and low.drift.tokens == 12
    # The same computed by stock models only, over the tokens of the dequantised one.
    stock, ids = dequantised(model, **WEIGHTS[kind]), prompt(model, 2, 5, seed=3)
    tokens = stock.generate(**ids, max_new_tokens=6, do_sample=False)[:, -6:]
    expected, quantised = (forced_logits(each, ids, tokens).double() for each in (model, stock))
    kl = nn.functional.kl_div(quantised.log_softmax(-1), expected.softmax(-1), reduction="none").sum(-1).mean()
    assert low.drift.kl == pytest.approx(kl.item(), rel=1e-3 if dtype is torch.float32 else 0.3)
    assert f"KL divergence {low.drift.kl:.1e} nats a token" in str(found)
    assert not fuseopt.report(model).replaced


def test_a_step_that_rounds_more_than_it_may_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def inexact(low: LowBitWeight, dtype: torch.dtype) -> Tensor:
        return dequantize(low, dtype) * (1 + 1e-4)

    monkeypatch.setattr("fuseopt.generation.engine.layers.takes_kernel", lambda *args, **kwargs: False)
    assert verified("gpt2", "int8")[1].ok
    monkeypatch.setattr("fuseopt.generation.engine.layers.dequantize", inexact)
    found = verified("gpt2", "int8")[1]
    assert not found.ok and found.problem.startswith("logits of generate(): error"), found
    assert found.low_bit.steps.fused_error > 3 * found.low_bit.steps.tolerance and found.low_bit.rounding <= 1


BROKEN: dict[str, Callable[[LowBitWeight], LowBitWeight]] = {
    "scales": lambda low: low._replace(scales=low.scales * 1.125),
    "rows": lambda low: low._replace(values=low.values.roll(1, 0)),
    "inputs": lambda low: low._replace(values=low.values.roll(1, 1)),
    "nan": lambda low: low._replace(scales=low.scales * torch.nan),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_quantiser_fails(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """verify fails although the steps are exact for the quantised weights."""
    monkeypatch.setattr(engine, "quantize", lambda *args: BROKEN[fault](quantize(*args)))
    found = verified("gpt2", "int4")[1]
    assert not found.ok and found.low_bit.rounding > MOST_HALF_STEPS, found
    if fault != "nan":
        assert found.problem.startswith("quantised weights: off by") and found.low_bit.steps.ok


def odd_weights() -> dict[str, Tensor]:
    random = functools.partial(torch.randn, 48, 96)
    outlier = random()
    outlier[5, 7], outlier[6] = 1000.0, 0.0
    return {
        "normal": random(),
        "heavy tails": random() / random().abs().clamp(min=1e-3),
        "positive": random().abs() + 1,
        "outlier": outlier,
        "two values": random().sign() * 0.3,
        "tiny": random() * 1e-6,
        "transposed": torch.randn(96, 48).T,
    }


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", odd_weights())
def test_rounding_to_nearest_is_always_allowed(kind: str, dtype: torch.dtype, name: str) -> None:
    weight = odd_weights()[name].to(dtype)
    low = quantize(weight, **WEIGHTS[kind])
    run = StepRun(weight, weight, [engine.QuantisedModule("", (weight,), (low,), False)], None)
    assert 0 <= rounding_error(run) <= MOST_HALF_STEPS


def test_modules_are_found_with_their_own_weights() -> None:
    """Layers of several weights, weights stored as [K, N], and several weights in one module."""
    for family in ("gpt2", "llama", "phi3"):
        model = SWEPT.get(family, functools.partial(tiny_decoder, family))()
        fuseopt.initialize(model, {"generation": {"weights": "int8"}})
        model.generate(prompt(model, 1, 5, seed=3)["input_ids"], max_new_tokens=2)
        modules = list(model.generate.checked.low_bit.modules())
        assert len(modules) == len({module.path for module in modules}) > 3
        for module in modules:
            weight = model.get_submodule(module.path).weight
            assert (module.dequantised(weight.dtype) - weight).abs().max() <= weight.abs().max() / 127


def tiny_decoder(family: str) -> nn.Module:
    from tests.generation.families.tiny_decoders import DECODERS

    return DECODERS[family]()


def test_what_is_not_compared_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.gpt2()
    model.set_attn_implementation("eager")
    padded = prompt(model, 2, 5, seed=3, padded=True)
    found = fuseopt.verify(model, {"generation": {"weights": "int8"}}, padded)
    assert found.low_bit is None and f"not run: logits with weights in int8: {UNQUANTISED_PROMPT}" in str(found)
    # A step that is not captured, and transformers' loop around it, say so in the same note.
    fuseopt.initialize(model, {"generation": {"weights": "int8"}})
    monkeypatch.setattr(StepGraphs, "capture", lambda graphs, step: "not captured")
    model.generate(**padded, max_new_tokens=3, bad_words_ids=[[5, 6]])
    call = model.generate.calls[-1]
    assert call.tier.value == "T1" and call.note == f"{UNQUANTISED_PROMPT}; not captured" and call.unquantised_prompt
    fuseopt.restore(model)
    config = {"generation": {"weights": "int8", "max_length": 10}}
    found = fuseopt.verify(model, config, prompt(model, 2, 5, seed=3, padded=False))
    assert found.ok and found.low_bit is None and "max_length" in str(found), found


def test_drift_of_known_distributions() -> None:
    wanted = torch.tensor([[[0.5, 0.5, 0.0], [0.25, 0.25, 0.5]]]).log()
    found = torch.tensor([[[0.25, 0.25, 0.5], [0.25, 0.25, 0.5]]]).log()
    drift = Drift.between(wanted, found)
    assert drift.kl == pytest.approx(torch.tensor(2.0).log().item() / 2) and drift.same_top == 0.5
    assert str(drift) == "KL divergence 3.5e-01 nats a token, the same most probable token for 1 of 2"
