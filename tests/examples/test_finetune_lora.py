"""The LoRA example: a fused step trains the adapter as stock does; reloaded and merged it gives the same logits."""

from __future__ import annotations

import re

import pytest
import torch

from tests.examples.scripts import load, losses_of, training_config

pytest.importorskip("peft")


def test_adapter_is_trained_saved_reloaded_and_merged(tmp_path, capsys):
    torch._dynamo.reset()
    load("finetune_lora").main(["--steps", "3", "--batch", "2", "--config", training_config(tmp_path)])
    printed = capsys.readouterr().out

    losses = losses_of(printed)
    assert losses["fused"] == pytest.approx(losses["stock"], rel=1e-3)
    assert losses["fused"][1] < losses["fused"][0]
    assert "TrainingForward[aot_eager]" in printed and "own forward" not in printed
    assert "adapter_model.safetensors" in printed

    differences = dict(
        re.findall(r"^(without the adapter|reloaded|reloaded and merged) +(\d\S+)", printed, re.MULTILINE)
    )
    assert float(differences["without the adapter"]) > 1e-2
    assert float(differences["reloaded"]) == 0.0
    assert float(differences["reloaded and merged"]) < 1e-3
    assert re.search(r"^reloaded  .* T0 device loop", printed, re.MULTILINE)
    assert re.search(r"^reloaded and merged  .* T0 device loop", printed, re.MULTILINE)
