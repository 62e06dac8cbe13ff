"""What plans and reports print, also for a model that no longer runs on the planned backends."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import fuseopt
from fuseopt.errors import ApplyError, PlanError

NORMS = {"kernel_fusion": {"custom_cuda_kernels": ["FusedLayerNorm"], "jit": False}}
UNMET = {"kernel_fusion": {"custom_cuda_kernels": ["FusedLayerNorm", "FusedNoRepeatNGram"], "jit": False}}
ELSEWHERE = """
import pickle, sys, torch, fuseopt
with open(sys.argv[1], "rb") as file:
    model, input, expected = pickle.load(file)
torch.testing.assert_close(model(input), expected)
print(*fuseopt.report(model).since, sep="\\n")
"""


def test_unpickled_where_no_library_can_be_had_the_report_says_what_runs_and_why(tmp_path):
    model = fuseopt.initialize(nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8)), NORMS)
    assert fuseopt.report(model).since == () and fuseopt.report(model).replaced[0].backend == "cpu"
    input, path = torch.randn(3, 8), tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps((model, input, model(input))))
    environment = {**os.environ, "FUSEOPT_NO_BUILD": "1", "FUSEOPT_CACHE_DIR": str(tmp_path / "empty")}
    command = [sys.executable, "-c", ELSEWHERE, str(path)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.startswith("FusedLayerNorm x 2, planned for cpu, runs on reference now: its native library is ")
    assert "FUSEOPT_NO_BUILD forbids building" in found.stdout


def named() -> nn.Module:
    class_ = type("Model\x1b[2J", (nn.Module,), {})
    model = class_()
    model.add_module("\x1b[31m\nred", nn.LayerNorm(4))
    return model


def assert_printable(text: str) -> None:
    assert all(line.isprintable() for line in text.split("\n"))


def test_names_of_modules_are_printed_with_control_characters_escaped():
    model = named()
    plan = fuseopt.plan(model, UNMET)
    with pytest.warns(UserWarning) as warned:
        fuseopt.initialize(model, UNMET)
    report = fuseopt.report(model)
    with pytest.raises(PlanError) as refused:
        fuseopt.initialize(model, UNMET, strict=True)
    model._modules["\x1b[31m\nred"] = nn.LayerNorm(4)
    with pytest.warns(UserWarning, match="left as it is") as left:
        fuseopt.restore(model)
    for text in (plan, report, *(w.message for w in warned), refused.value, *(w.message for w in left)):
        assert_printable(str(text))
    assert r"\x1b[31m\nred" in str(plan) and r"\x1b[31m\nred" in str(report)
    assert len(str(plan).split("\n")) == 5


def test_an_error_while_building_escapes_the_name(monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("broken")

    monkeypatch.setattr(fuseopt.modules.FusedLayerNorm, "from_module", broken)
    with pytest.raises(ApplyError, match="broken") as error:
        fuseopt.initialize(named(), NORMS)
    assert_printable(str(error.value))
