"""The line that `initialize` logs: seen once without setup, silenced by the usual means, never twice."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys

import pytest
import torch
from torch import nn

import fuseopt
from fuseopt.runtime import announcements
from tests import tiny

NORMS = {"kernel_fusion": {"custom_cuda_kernels": ["FusedLayerNorm"], "jit": False, "backend": "reference"}}
LINE = "fuseopt: 1 of 2 modules replaced; fuseopt.report(model) says more"
SCRIPT = f"""
import logging, warnings
BEFORE
import fuseopt, torch
warnings.simplefilter("error")
AFTER
for _ in range(2):
    model = fuseopt.initialize(torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 4)), {NORMS})
    fuseopt.initialize(model, {NORMS})
"""


# Each script in a fork of one process that has imported torch: importing that again, and an end in order, take seconds.
FORKS = """
import json, os, sys
import torch
for script in json.loads(sys.argv[1]):
    if os.fork() == 0:
        exec(script)
        os._exit(0)
    assert os.wait()[1] == 0
    os.write(sys.stderr.fileno(), bytes(1))
"""
CASES = (
    ("", "", LINE),
    ("", "import importlib; importlib.reload(fuseopt)", LINE),
    ("", "logging.getLogger('fuseopt').setLevel(logging.WARNING)", None),
    ("logging.getLogger('fuseopt').setLevel(logging.WARNING)", "", None),
    ("logging.basicConfig()", "", f"INFO:fuseopt:{LINE}"),
    ("", "logging.basicConfig(format='%(message)s')", LINE),
    ("logging.disable(logging.INFO)", "", None),
    ("", "logging.getLogger('fuseopt').addHandler(logging.NullHandler())", None),
)


def model():
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))


@pytest.fixture(scope="module")
def printed():
    """What the script prints in each case."""
    scripts = json.dumps([SCRIPT.replace("BEFORE", before).replace("AFTER", after) for before, after, _ in CASES])
    run = subprocess.run([sys.executable, "-c", FORKS, scripts], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return dict(zip(CASES, run.stderr.split("\0"), strict=False))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_line_for_each_model_that_was_changed(case, printed):
    line = case[-1]
    assert printed[case].splitlines() == ([] if line is None else [line] * 2)


def test_caplog_sees_it_once_and_nothing_is_printed(caplog, capfd):
    fuseopt.initialize(model(), NORMS)
    assert [record.getMessage() for record in caplog.records if record.name == "fuseopt"] == [LINE]
    assert capfd.readouterr().err == ""


def test_it_says_what_is_done_to_the_whole_model(caplog):
    fuseopt.initialize(tiny.gpt2())
    fuseopt.initialize(tiny.gpt2(), {"kernel_fusion": {"memory_efficient_fusion": {"backend": "aot_eager"}}})
    with fuseopt.fused(tiny.gpt2()):
        pass
    fuseopt.initialize(nn.Linear(2, 2))
    first, second = (record.getMessage() for record in caplog.records if record.name == "fuseopt")
    assert " modules replaced, generate() by the decode loop; " in first
    assert second.startswith("fuseopt: training steps compiled; ")


def test_only_the_first_process_of_a_job_shows_it(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, logger="fuseopt")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        announcements.announce("here")
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.DEBUG]


@pytest.mark.parametrize(
    ("notebook", "widgets", "module", "disabled"),
    [(False, True, "tqdm", None), (True, False, "tqdm", False), (True, True, "tqdm.auto", False)],
)
def test_a_bar_is_of_widgets_in_a_notebook_that_has_them_and_of_text_else(
    monkeypatch, notebook, widgets, module, disabled
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: widgets or None if name == "ipywidgets" else find(name)
    )
    monkeypatch.delitem(sys.modules, "ipykernel.zmqshell", raising=False)
    if notebook:
        monkeypatch.setitem(sys.modules, "ipykernel.zmqshell", sys)
    made = []
    monkeypatch.setattr(f"{module}.tqdm", lambda iterable=None, **options: made.append(options) or iterable)
    announcements.bar("here")
    model = fuseopt.initialize(tiny.gpt2(), {"generation": {"weights": "int8"}})
    model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=1)
    monkeypatch.setattr("transformers.utils.logging.is_progress_bar_enabled", lambda: False)
    announcements.bar("there")
    assert [each["desc"] for each in made] == ["here", "fuseopt quantises", "there"]
    assert [each["disable"] for each in made] == [disabled, disabled, True]
