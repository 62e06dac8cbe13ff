"""initialize(model, "auto", inputs=...): what it keeps, says, remembers and leaves as it was; times are stubbed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import fuseopt
from fuseopt import apply, kernel_table
from fuseopt.auto import search
from fuseopt.auto.planned import AutoPlan
from fuseopt.config import Config
from fuseopt.errors import ConfigError, InputsError
from fuseopt.generation.generate import FusedGenerate
from fuseopt.measurements import MeasuredChoice, Measurements
from tests import tiny

BLOCK = "GPT2InferenceForward"  # what FusedBlock puts in
AUTO = {"preset": "auto", "kernel_fusion": {"jit": False}}
"""Without `jit`, which compiles for seconds."""


class Clock:
    """Seconds of a call: one second, times a factor for each class of replacements that is in the model."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.factors: dict[str, float] = {}
        self.samples = 0
        self.gradients: set[bool] = set()

    def __call__(self, call, device, repetitions=1):
        self.samples += 1
        call()
        assert self.model is not None
        self.gradients.add(any(parameter.grad is not None for parameter in self.model.parameters()))
        record = apply.applied_to(self.model)
        targets = {row.target for row in record.report.replaced} if record is not None else set()
        return math.prod(self.factors.get(target, 1.0) for target in targets)


@pytest.fixture(autouse=True)
def clock(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEOPT_MEASURED", "1")
    monkeypatch.setattr("fuseopt.runtime.measured_files.library_cache.folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(torch, "compile", lambda model: model)
    made = Clock()
    monkeypatch.setattr(search.timer, "work_seconds", made)
    return made


def auto(clock: Clock, model: nn.Module, config=AUTO, inputs=None, **options) -> nn.Module:
    clock.model = model
    return fuseopt.initialize(model, config, inputs=tiny.inputs(model) if inputs is None else inputs, **options)


def notes(model: nn.Module) -> dict[str, str]:
    return {choice.name: choice.note for choice in fuseopt.report(model).measured.choices}


def targets(model: nn.Module) -> set[str]:
    return {row.target for row in fuseopt.report(model).replaced}


def test_keeps_the_fastest_kernel_and_says_what_it_measured(clock):
    clock.factors = {"FusedGELU": 0.5, "FusedLayerNorm": 1.2, BLOCK: 1.2, "FusedNoRepeatNGram": 1.2}
    model = auto(clock, tiny.gpt2())
    report = fuseopt.report(model)
    assert targets(model) == {"FusedGELU"} and report.config == Config.load(json.loads(report.config.to_json()))
    assert report.measured.kept.name == "FusedGELU" and report.measured.kept.speed_up == 2.0
    assert {"stock", "inference", "FusedLayerNorm", "FusedBlock", "torch.compile"} < notes(model).keys()
    printed = str(report)
    assert "FusedGELU " in printed and "2.00x  kept" in printed and max(map(len, printed.splitlines())) <= 120
    assert json.loads(report.to_json())["measured"]["choices"][0]["seconds"] == 1.0
    assert "<td>2.00x</td>" in report.to_html()


def test_a_long_note_does_not_hide_the_time_or_the_gain_and_goes_on_below():
    choice = MeasuredChoice("inference, " * 9, 0.0157, 4.92, "within noise of " + "inference, without FusedGELU, " * 3)
    measured = Measurements("GPT2LMHeadModel", "a forward", "a CPU", "2026-11-30", 1.0, 180.0, (choice,))
    _, _, *lines = measured.lines()
    assert "  15.7 ms   4.92x  within noise of " in lines[0] and max(map(len, lines)) <= 118 and len(lines) == 3
    notes_of, names_of = (" ".join(line[part] for line in lines) for part in (slice(50, None), slice(50)))
    assert notes_of.count("FusedGELU,") == 3 and names_of.count("inference,") == 9


def test_the_kept_config_does_the_same_when_it_is_passed_elsewhere(clock):
    clock.factors = {"FusedGELU": 0.5, BLOCK: 1.2}
    model = auto(clock, tiny.gpt2())
    config = fuseopt.report(model).config
    other = fuseopt.initialize(tiny.gpt2(), config.to_json(), strict=True)
    assert fuseopt.report(other).rows == fuseopt.report(model).rows and targets(other)
    assert fuseopt.report(other).measured is None


def test_combines_what_gains_alone_and_leaves_out_what_does_not(clock):
    clock.factors = {"FusedGELU": 0.9, "FusedLayerNorm": 0.9, BLOCK: 1.5, "FusedNoRepeatNGram": 1.1}
    model = auto(clock, tiny.gpt2())
    assert targets(model) == {"FusedGELU", "FusedLayerNorm"}
    assert fuseopt.report(model).measured.kept.speed_up == pytest.approx(1 / 0.81)
    assert "FusedGELU, with FusedLayerNorm" in notes(model) or "FusedLayerNorm, with FusedGELU" in notes(model)


def test_leaves_a_bad_part_of_the_best_preset_out(clock):
    clock.factors = {"FusedGELU": 0.5, "FusedLayerNorm": 1.2, BLOCK: 0.8}
    model = auto(clock, tiny.gpt2())
    assert targets(model) == {"FusedGELU", BLOCK, "FusedNoRepeatNGram"}  # the last acts in no forward
    assert notes(model)["inference, without FusedLayerNorm"] == "kept"


@pytest.mark.parametrize(("norm", "kept"), [(0.9, "FusedLayerNorm"), (1.0, "stock")])
def test_the_next_fastest_start_is_kept_if_the_best_is_not_confirmed(clock, monkeypatch, norm, kept):
    clock.factors = {"FusedGELU": 0.5, "FusedLayerNorm": 0.9, BLOCK: 1.5}
    confirmed = search.Search._confirmed

    def timed_again(*arguments):
        clock.factors |= {"FusedGELU": 1.2, "FusedLayerNorm": norm}
        return confirmed(*arguments)

    monkeypatch.setattr(search.Search, "_confirmed", timed_again)
    model = auto(clock, tiny.gpt2())
    assert targets(model) == {kept} - {"stock"}
    assert fuseopt.report(model).measured.kept.speed_up == pytest.approx(1 / norm)
    noted = {name for name, note in notes(model).items() if note == "within noise of stock when timed again"}
    assert noted >= {"FusedGELU, with FusedLayerNorm", "FusedGELU"}


@pytest.mark.parametrize("factor", [0.99, 1.0, 1.3])
def test_stock_stays_if_nothing_is_faster_beyond_the_noise(clock, factor):
    clock.factors = dict.fromkeys(("FusedGELU",), factor)
    model = tiny.gpt2()
    before, stock = tiny.snapshot(model), tiny.logits(model)
    auto(clock, model, {"preset": "auto", "kernel_fusion": {"jit": False, "exclude": ["*.1.*"]}})
    assert notes(model)["stock"] == "kept" and not targets(model)
    assert notes(model)["FusedGELU"] == ("within noise of stock" if factor <= 1 else "")
    assert torch.equal(tiny.logits(model), stock)
    assert tiny.snapshot(fuseopt.restore(model)) == before


def test_noise_is_no_gain(clock, monkeypatch):
    """Rounds in which the choice is now faster, now slower, by more than the least gain."""
    model = clock.model = nn.Sequential(nn.LayerNorm(8))
    noise = iter([1.2, 0.8, 0.7, 1.3] * 1000)
    monkeypatch.setattr(search.timer, "work_seconds", lambda call, device, repetitions=1: next(noise))
    auto(clock, model, inputs={"input": torch.randn(2, 8)})
    assert notes(model)["stock"] == "kept"


def test_a_gain_that_is_gone_when_timed_again_is_none(clock, monkeypatch):
    model = clock.model = nn.Sequential(nn.LayerNorm(8))
    fused = iter([0.5] * search._ROUNDS)
    monkeypatch.setattr(
        search.timer,
        "work_seconds",
        lambda call, device, repetitions=1: 1.0 if apply.applied_to(model) is None else next(fused, 1.0),
    )
    auto(clock, model, inputs={"input": torch.randn(2, 8)})
    assert notes(model)["FusedLayerNorm"] == "within noise of stock when timed again"
    assert notes(model)["stock"] == "kept" and not targets(model)


def test_noise_of_stock_makes_samples_longer_and_gains_smaller_than_it_are_none(clock, monkeypatch):
    """Every second sample takes 10% more, so that stock seems 10% slower or faster than itself."""
    model = clock.model = nn.Sequential(nn.LayerNorm(8))
    repeated, seconds = [], [1.1e-3, 1e-3]

    def noisy(call, device, repetitions=1):
        repeated.append(repetitions)
        return seconds[len(repeated) % 2] * (0.95 if apply.applied_to(model) is not None else 1.0)

    monkeypatch.setattr(search.timer, "work_seconds", noisy)
    auto(clock, model, inputs={"input": torch.randn(2, 8)})
    measured = fuseopt.report(model).measured
    assert measured.noise == pytest.approx(0.1, abs=0.02) and measured.cells()[0][3] == f"noise {measured.noise:.0%}"
    assert max(repeated) >= 2 * repeated[3] > 2
    assert notes(model)["stock"] == "kept" and Measurements.from_dict(measured.to_dict()) == measured


def test_settings_beside_the_preset_hold_for_every_choice(clock):
    clock.factors = {"FusedGELU": 0.5}
    config = {"preset": "auto", "kernel_fusion": {"jit": False, "exclude": ["transformer.h.1"]}}
    model = auto(clock, tiny.gpt2(), json.dumps(config))
    assert [row.paths for row in fuseopt.report(model).replaced if row.target == "FusedGELU"] == [
        ("transformer.h.0.mlp.act",)
    ]
    assert all(
        choice.config is None or choice.name == "stock" or choice.config["kernel_fusion"]["exclude"]
        for choice in fuseopt.report(model).measured.choices
    )


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.fixture
def user_kernel():
    made = []

    def register(given):
        @fuseopt.replaces(Doubled)
        class FusedDoubled(fuseopt.FusedModule):
            forward = given

        made.append("FusedDoubled")

    yield register
    for kernel in made:
        with contextlib.suppress(KeyError):
            fuseopt.unregister(kernel)


def raising(self, x):
    raise RuntimeError("no such launch\nmore of it")


@pytest.mark.parametrize(
    ("forward", "note"),
    [
        (lambda self, x: 2.1 * x, "not right: output: error "),
        (raising, "failed: RuntimeError: no such launch"),
        (lambda self, x: x + x, "kept"),
    ],
    ids=["wrong", "raising", "right"],
)
def test_keeps_a_users_kernel_only_if_it_runs_and_is_right(clock, user_kernel, forward, note):
    user_kernel(forward)
    clock.factors = {"FusedDoubled": 0.1, "FusedLayerNorm": 0.8}
    model = nn.Sequential(nn.LayerNorm(8), Doubled()).eval()
    auto(clock, model, inputs={"input": torch.randn(4, 8)})
    found = {name: each for name, each in notes(model).items() if "FusedDoubled" in name or name == "inference"}
    assert any(each.startswith(note) for each in found.values()), notes(model)
    assert targets(model) == ({"FusedLayerNorm", "FusedDoubled"} if note == "kept" else {"FusedLayerNorm"})


def test_a_users_kernel_is_measured_again_after_its_code_has_changed(clock, user_kernel):
    inputs = {"input": torch.randn(4, 8)}

    def targets_and_samples(forward) -> tuple[set[str], int]:
        user_kernel(forward)
        count, model = clock.samples, nn.Sequential(nn.LayerNorm(8), Doubled()).eval()
        found = targets(auto(clock, model, inputs=inputs)), clock.samples - count
        fuseopt.unregister("FusedDoubled")
        return found

    clock.factors = {"FusedDoubled": 0.1}
    right, _ = targets_and_samples(lambda self, x: x + x)
    assert "FusedDoubled" in right
    wrong, count = targets_and_samples(lambda self, x: x + x + 1)
    assert "FusedDoubled" not in wrong and count
    assert targets_and_samples(lambda self, x: x + x) == (right, 0)


def test_defaults_of_generate_are_part_of_the_call(clock):
    options = {"generate": {"max_new_tokens": 3}}
    for beams, is_new in ((1, True), (2, True), (1, False)):
        model = tiny.gpt2()
        model.generation_config.num_beams = beams
        count = clock.samples
        auto(clock, model, **options)
        assert (clock.samples > count) is is_new


def test_a_later_call_finds_the_result_and_measures_nothing(clock, monkeypatch, caplog):
    clock.factors = {"FusedGELU": 0.5}
    model, inputs = auto(clock, tiny.gpt2()), tiny.inputs(tiny.gpt2(), batch=3)
    # stderr is no terminal here, so that a line takes the place of the bar.
    assert caplog.messages[0] == (
        "fuseopt: auto: measuring forward of input_ids [2, 7]; no further choice is timed after 180 s"
    )
    caplog.clear()
    monkeypatch.setattr(torch, "compile", None)
    measured, count = fuseopt.report(model).measured, clock.samples
    again = auto(clock, tiny.gpt2(seed=1))
    assert clock.samples == count and targets(again) == targets(model)
    assert not any("measuring" in message for message in caplog.messages)
    assert fuseopt.report(again).measured.choices == measured.choices and fuseopt.report(again).measured.remembered
    for other, given in ((tiny.gpt2(), inputs), (tiny.gpt2(n_layer=1), None)):
        count = clock.samples
        auto(clock, other, inputs=given)
        assert clock.samples > count
    monkeypatch.setenv("FUSEOPT_MEASURED", "0")
    count = clock.samples
    auto(clock, tiny.gpt2())
    assert clock.samples > count


def test_says_what_the_time_limit_left_out_and_measures_it_when_there_is_more(clock, monkeypatch):
    clock.factors = {"FusedGELU": 0.5}
    monkeypatch.setattr(search, "monotonic", lambda: float(clock.samples))
    model = auto(clock, tiny.gpt2(), time_limit=5)
    measured = fuseopt.report(model).measured
    assert notes(model)["FusedGELU"] == "not measured: after the time limit (5 s)" and not measured.is_complete
    assert [choice.name for choice in measured.choices if choice.seconds is not None] == ["stock", "inference"]
    count = clock.samples
    auto(clock, tiny.gpt2(), time_limit=5)
    assert clock.samples == count
    model = auto(clock, tiny.gpt2(), time_limit=10_000)
    assert fuseopt.report(model).measured.is_complete and clock.samples > count


def test_plan_says_the_gain_that_was_measured_for_such_a_model(clock):
    clock.factors = {"FusedGELU": 0.5, BLOCK: 1.3}
    config = {"kernel_fusion": {"custom_cuda_kernels": ["FusedGELU"], "jit": False}}
    assert fuseopt.plan(tiny.gpt2(), config).expected == ()
    auto(clock, tiny.gpt2())
    planned = fuseopt.plan(tiny.gpt2(seed=3), config)
    (line,) = planned.expected
    assert line.startswith("expected: 2.00 times as fast as stock; forward of input_ids [2, 7]; auto, 20")
    assert line in str(planned) and line in planned.to_html() and json.loads(planned.to_json())["expected"] == [line]
    others = {"kernel_fusion": {"custom_cuda_kernels": ["FusedGELU", "FusedSoftmax"], "jit": False, "backend": "cpu"}}
    assert fuseopt.plan(tiny.gpt2(), others).expected == fuseopt.plan(tiny.gpt2(n_layer=1), config).expected == ()


def test_measures_training_steps_with_backward_and_keeps_gradients(clock):
    model = tiny.gpt2().train()
    inputs = {**tiny.inputs(model), "labels": tiny.inputs(model)["input_ids"]}
    model(**inputs).loss.backward()
    kept = {name: parameter.grad for name, parameter in model.named_parameters()}
    clock.factors = {"FusedLayerNorm": 0.5}
    state = torch.get_rng_state()
    auto(clock, model, {"preset": "auto", "kernel_fusion": {"jit": False, "memory_efficient_fusion": False}}, inputs)
    assert "FusedLayerNorm" in targets(model) and "training step of input_ids [2, 7], labels [2, 7]" in str(
        fuseopt.report(model)
    )
    assert "FusedLayerNorm" in notes(model) and not {"FusedBlock", "FusedNoRepeatNGram"} & notes(model).keys()
    assert clock.gradients == {True} and model.training and torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is kept[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize("sample", [pytest.param(False, marks=pytest.mark.slow), True], ids=["greedy", "sampling"])
def test_measures_generate_and_keeps_the_decode_loop(clock, sample):
    clock.factors = {"FusedGenerate": 0.5, BLOCK: 1.1}
    model = tiny.gpt2()
    prompt = {**tiny.inputs(model), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    options = {"max_new_tokens": 5, "do_sample": sample}
    torch.manual_seed(0)
    expected = model.generate(**prompt, **options)
    auto(clock, model, inputs=prompt, generate=options)
    report = fuseopt.report(model)
    assert "FusedGenerate" in targets(model) and BLOCK not in targets(model) and report.generate_calls == ()
    assert "max_new_tokens 5" in report.measured.work
    torch.manual_seed(0)
    assert torch.equal(model.generate(**prompt, **options), expected)
    assert fuseopt.report(model).generate_calls[0]["tier"] == "T0"


def test_no_time_is_that_of_a_cached_prompt(clock, monkeypatch):
    notes, run = [], FusedGenerate.__call__

    def noting(fused, *args, **kwargs):
        made = run(fused, *args, **kwargs)
        notes.append((fused.options.prefix_cache_mib, fused.calls[-1].note))
        return made

    monkeypatch.setattr(FusedGenerate, "__call__", noting)
    clock.factors = {"FusedGenerate": 0.5}
    model = tiny.gpt2()
    prompt = {"input_ids": torch.arange(3, 43)[None], "attention_mask": torch.ones(1, 40, dtype=torch.long)}
    config = {"preset": "auto", "kernel_fusion": {"jit": False}, "generation": {"prefix_cache_mib": 2}}
    auto(clock, model, config, inputs=prompt, generate={"max_new_tokens": 2})
    assert len(notes) > 9 and set(notes[:9]) == {(2, "")}
    assert fuseopt.report(model).config.generation.prefix_cache_mib == 2
    assert "prefix cache:" not in str(fuseopt.report(model))
    del notes[:]
    for _ in range(2):
        model.generate(**prompt, max_new_tokens=2)
    assert notes == [(2, ""), (2, "32 prompt tokens from the prefix cache")]


@pytest.mark.parametrize("when", [1, 12, 30])
def test_interrupted_the_model_is_as_it_was(clock, monkeypatch, when):
    model = fuseopt.initialize(tiny.gpt2(), {"kernel_fusion": {"custom_cuda_kernels": ["FusedGELU"], "jit": False}})
    before, record = tiny.snapshot(model), apply.applied_to(model)

    def interrupted(call, device, repetitions=1):
        if clock.samples == when:
            raise KeyboardInterrupt
        return clock(call, device, repetitions)

    monkeypatch.setattr(search.timer, "work_seconds", interrupted)
    clock.factors = {"FusedLayerNorm": 0.5}
    with pytest.raises(KeyboardInterrupt):
        auto(clock, model)
    assert clock.samples == when and tiny.snapshot(model) == before and apply.applied_to(model) is record


IDS = torch.ones(1, 4, dtype=torch.long)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "inputs: 'auto' measures on your inputs; pass inputs="),
        ({"inputs": [1]}, "inputs: expected a dict of the forward's keyword arguments"),
        ({"inputs": {"input_id": IDS}}, "takes no 'input_id'; did you mean 'input_ids'"),
        ({"inputs": {"input_ids": IDS}, "generate": 5}, "generate: expected a dict"),
        ({"inputs": {"input_ids": IDS}, "time_limit": 0}, "time_limit: expected a number of seconds above 0, got 0"),
        ({"inputs": {"input_ids": IDS}, "time_limit": True}, "time_limit: expected a number"),
    ],
)
def test_refuses_wrong_arguments_before_anything_runs(options, message):
    model = tiny.gpt2()
    with pytest.raises(InputsError, match=message.replace("(", "\\(")):
        fuseopt.initialize(model, "auto", **options)
    assert apply.applied_to(model) is None


def test_refuses_what_does_not_fit_the_mode():
    with pytest.raises(InputsError, match=r"whose steps need labels; .* call model.eval\(\)"):
        fuseopt.initialize(tiny.gpt2().train(), "auto", inputs={"input_ids": IDS})
    with pytest.raises(InputsError, match=r"generate: the model is in training mode; call model.eval\(\) first"):
        fuseopt.initialize(tiny.gpt2().train(), "auto", inputs={"input_ids": IDS}, generate={"max_new_tokens": 2})
    frozen = tiny.gpt2().train().requires_grad_(False)
    with pytest.raises(InputsError, match=r"no parameter requires a gradient; .* call model.eval\(\)"):
        fuseopt.initialize(frozen, "auto", inputs={"input_ids": IDS, "labels": IDS})


def test_inputs_need_auto_and_auto_needs_initialize():
    for options in ({"inputs": {}}, {"generate": {}}, {"time_limit": 3}):
        with pytest.raises(InputsError, match=f"{next(iter(options))}: only the config 'auto' measures"):
            fuseopt.initialize(tiny.gpt2(), "inference", **options)
    with pytest.raises(ConfigError, match="'auto' measures the model on your inputs, which only"):
        fuseopt.verify(tiny.gpt2(), "auto", tiny.inputs(tiny.gpt2()))
    with pytest.raises(ConfigError, match="jitt: unknown key"):
        fuseopt.initialize(tiny.gpt2(), {"preset": "auto", "kernel_fusion": {"jitt": True}}, inputs={"input_ids": IDS})


@pytest.mark.parametrize("config", ["auto", {"preset": "auto", "generation": False}], ids=["name", "dict"])
def test_plan_says_what_auto_would_measure(config):
    model = tiny.gpt2()
    planned = fuseopt.plan(model, config)
    assert isinstance(planned, AutoPlan) and apply.applied_to(model) is None
    assert "FusedNoRepeatNGram" in planned.choices["generate()"]
    for kind in ("forward", "training step"):  # without logits processors
        assert "FusedNoRepeatNGram" not in planned.choices[kind] and "FusedGELU" in planned.choices[kind]
    assert "\n  to measure: fuseopt.initialize(model, 'auto', inputs=" in str(planned)
    assert "<pre>plan for GPT2LMHeadModel: " in planned._repr_html_()


def test_options_without_effect_on_a_cpu_are_not_measured_there(clock):
    clock.factors = {BLOCK: 0.5}
    model = auto(clock, tiny.gpt2().cpu())
    assert BLOCK in targets(model) and "inference, without FusedBlock" in notes(model)
    assert not any("cuda_graphs" in name for name in notes(model))


def test_where_an_own_kernel_has_an_effect_is_read_from_its_entry(clock, monkeypatch):
    def propose(context):
        for candidate in context.index.of_class("torch.nn.modules.normalization.LayerNorm"):
            yield context.replacement(candidate.sites, "LayerNorm", context.request, "", lambda m=candidate.module: m)

    monkeypatch.setattr(kernel_table, "_kernels", dict(kernel_table._kernels))
    lists = {kernel_table.CUSTOM: {"streams": bool, "exact": bool}}
    entry = kernel_table.Kernel("FusedMine", propose, None, lists, gpu_options=("streams",))
    kernel_table.register_kernel(entry)
    kernel_table.register_kernel(dataclasses.replace(entry, name="FusedLoop", only_generates=True))
    choices = fuseopt.plan(tiny.gpt2(), "auto").choices
    assert "FusedMine" in choices["forward"] and "FusedLoop" not in choices["forward"]
    assert "FusedLoop" in choices["generate()"]
    clock.factors = {"FusedMine": 0.5, BLOCK: 1.5, "FusedLayerNorm": 1.5}
    noted = notes(auto(clock, tiny.gpt2().cpu()))
    assert "FusedMine, FusedMine exact=True" in noted and not any("streams" in name for name in noted)


def test_transformers_compiles_generate_on_a_cpu_too_but_no_beam_search(clock, monkeypatch):
    compiled = []
    monkeypatch.setattr(PreTrainedModel, "get_compiled_call", lambda model, how: compiled.append(how) or model.__call__)
    model = tiny.gpt2().cpu()
    attributes = set(vars(model))
    prompt = {**tiny.inputs(model), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    auto(clock, model, inputs=prompt, generate={"max_new_tokens": 3, "num_beams": 2})
    assert notes(model)["torch.compile"] == "transformers does not compile beam search" and not compiled
    auto(clock, model, inputs=prompt, generate={"max_new_tokens": 3})
    row = next(choice for choice in fuseopt.report(model).measured.choices if choice.name == "torch.compile")
    assert row.seconds == 1.0 and compiled and compiled[0].mode == "default"
    assert set(vars(fuseopt.restore(model))) == attributes
