"""bench curves: what trains as stock does is told from what does not."""

import re

import pytest
import torch

from fuseopt.bench.harness.records import STOCK
from fuseopt.bench.suites import curves
from fuseopt.bench.suites.curves import Row
from fuseopt.cli import main

CPU = torch.device("cpu")
ROW = Row("gpt2-tiny", 2, 8)
KERNELS = {"kernel_fusion": {"custom_cuda_kernels": ["FusedGELU", "FusedLayerNorm"], "jit": False}}


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(curves, "EXACT_STEPS", 3)
    monkeypatch.setattr(curves, "WINDOW", 2)


def test_curves_gradients_and_the_first_steps():
    results = curves.run(device=CPU, rows=[ROW], configs={"fused": KERNELS}, steps=5, seeds=2)
    stock, fused, nudged, exact, stock_gradients, gradients = results.rows
    assert stock.case == fused.case == "gpt2-tiny, 2 x 8, dropout 0.1, bfloat16 autocast, 5 steps"
    assert stock.note.startswith("2 seeds end at 6.") and "inside stock's seeds in " in fused.note
    assert nudged.case == exact.case == "gpt2-tiny, 2 x 8, dropout 0, float32, 3 steps"
    assert nudged.variant == STOCK and nudged.note == "of the losses, weights 1e-07 of themselves off"
    assert 0 < float(nudged.difference) <= 1e-5 and float(exact.difference) <= 1e-5
    assert gradients.case == "gpt2-tiny, 2 x 8, dropout 0, bfloat16 autocast, gradients against float64"
    assert 0 < float(gradients.difference) <= 1.25 * float(stock_gradients.difference) < 0.1
    assert gradients.note.endswith(" times stock's")


def test_progress_counts_rows_and_steps(capsys):
    curves.run(device=CPU, rows=[ROW], configs={"fused": KERNELS}, steps=5, seeds=1)
    shown = capsys.readouterr().err
    assert shown.startswith(f"[1/1] {ROW.name}\nstock, seed 0, 5 steps\nfused, seed 0, 5 steps\n")


def test_a_config_that_raises_is_rows_and_the_others_are_trained(monkeypatch, capsys):
    fuse = curves.fuse

    def fuse_one(model, name, config):
        if config == "broken":
            raise RuntimeError("no such kernel")
        return fuse(model, name, config)

    monkeypatch.setattr(curves, "fuse", fuse_one)
    results = curves.run(device=CPU, rows=[ROW], configs={"broken": "broken", "fused": KERNELS}, steps=2, seeds=1)
    notes = {variant: [row.note for row in results.rows if row.variant == variant] for variant in ("broken", "fused")}
    assert notes["broken"] == ["failed: RuntimeError: no such kernel"] * 3
    assert len(notes["fused"]) == 3 and not any(row.failed for row in results.rows if row.variant == "fused")


def test_a_model_that_trains_otherwise_shows(monkeypatch):
    def spoil(model, name, config):
        for parameter in model.parameters():
            parameter.register_hook(torch.neg)
        return name, None

    monkeypatch.setattr(curves, "fuse", spoil)
    results = curves.run(device=CPU, rows=[ROW], configs={"spoilt": KERNELS}, steps=40, seeds=2)
    _, fused, _, exact, _, gradients = results.rows
    assert float(exact.difference) > 1e-4 and float(gradients.difference) > 0.5
    assert int(re.search(r"in (\d+)% of the windows", fused.note)[1]) < 30


def test_windows_inside_the_seeds():
    stock = [[4.0, 3.0, 2.0], [5.0, 3.5, 2.5]]
    assert curves._inside([[4.5, 3.6, 2.4], [4.5, 3.6, 2.0]], stock) == (2 / 3, 2.2)


def test_text_is_the_seeds_on_any_device():
    first, again, other = (next(curves._batches(Row("t5-tiny", 3, 5), CPU, seed, 1)) for seed in (1, 1, 2))
    assert first["input_ids"].shape == first["labels"].shape == (3, 5)
    assert torch.equal(first["labels"], again["labels"]) and not torch.equal(first["labels"], other["labels"])


def test_the_command_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(curves, "Row", lambda *arguments: ROW)
    config = tmp_path / "config.json"
    config.write_text('{"kernel_fusion": {"custom_cuda_kernels": ["FusedGELU"], "jit": false}}')
    arguments = ["bench", "curves", "--model", "gpt2-tiny", "--steps", "4", "--seeds", "1", "--device", "cpu"]
    assert main([*arguments, "--config", str(config), "--out", str(tmp_path / "out.json")]) == 0
    assert "times stock's" in capsys.readouterr().out and (tmp_path / "out.json").is_file()
