"""bench forward: in eval mode and in training mode, every variant gives stock's logits."""

import pytest
import torch
from torch import nn

from fuseopt.bench.suites import forward
from fuseopt.bench.suites.forward import Row
from fuseopt.cli import main

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_both_modes_are_timed():
    rows = [Row("gpt2-tiny", 2, 5, torch.float32), Row("t5-tiny", 2, 5, torch.float32)]
    results = forward.run(device=CPU, rows=rows)
    assert list(dict.fromkeys(row.case for row in results.rows)) == [
        f"{model} {mode}, 2 x 5, float32"
        for model in ("gpt2-tiny", "t5-tiny")
        for mode in ("forward", "forward in training mode")
    ]
    variants = [row.variant.split(" [")[0] for row in results.rows]
    assert variants == ["stock", "preset inference", "jit torchscript", "stock", "jit torchscript"] * 2
    assert all(float(row.difference) <= 1e-5 for row in results.rows if row.variant != "stock")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_what_compiles_takes_part_where_it_is_asked_for(monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(module))
    (case, training) = forward._cases(Row("gpt2-tiny", 2, 5, torch.float32), CPU, True)
    calls = case.calls()
    assert {"torch.compile", "jit inductor"} <= set(calls)
    assert "memory_efficient_fusion [inductor]" in training.calls()
    calls["torch.compile"]()
    assert len(compiled) == 1 and not compiled[0].training


def test_the_command_line_makes_the_rows(monkeypatch):
    seen = {}

    def run(**options):
        seen.update(options)
        return forward.Results.measured_here("forward", [])

    monkeypatch.setattr(forward, "run", run)
    sizes = ["--model", "gpt2-tiny", "--batch", "1", "8", "--length", "16", "--dtype", "float32"]
    assert main(["bench", "forward", "--device", "cpu", *sizes, "--compile"]) == 0
    assert seen["rows"] == [Row("gpt2-tiny", batch, 16, torch.float32) for batch in (1, 8)]
    assert seen["compile"] is True and seen["device"] == CPU
    assert main(["bench", "forward", "--device", "cpu", *sizes, "--no-training"]) == 0
    assert [row.trains for row in seen["rows"]] == [False, False]
