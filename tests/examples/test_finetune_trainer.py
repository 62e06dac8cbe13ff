"""The Trainer example: the fused model trains in a compiled step, as stock does, and its folder loads elsewhere."""

from __future__ import annotations

import pytest
import torch
from accelerate.state import AcceleratorState

from tests.examples.scripts import load, losses_of, training_config


@pytest.fixture(autouse=True)
def accelerate_starts_anew():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_fused_model_trains_like_stock_and_is_saved(tmp_path, capsys):
    torch._dynamo.reset()
    arguments = ["--steps", "3", "--batch", "2", "--config", training_config(tmp_path), "--out", str(tmp_path / "out")]
    load("finetune_trainer").main(arguments)
    printed = capsys.readouterr().out
    losses = losses_of(printed)
    assert losses["fused"] == pytest.approx(losses["stock"], rel=1e-3)
    assert losses["fused"][0] != losses["fused"][1]
    assert "TrainingForward[aot_eager]" in printed and "own forward" not in printed
    assert "loaded by transformers: weights equal" in printed
    assert (tmp_path / "out" / "model.safetensors").exists()
