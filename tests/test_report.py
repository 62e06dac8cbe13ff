"""What plans and reports print, also for a model that no longer runs on the planned backends."""

from __future__ import annotations

import html
import os
import pickle
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import fuseopt
from fuseopt.errors import ApplyError, PlanError, printable
from tests import tiny

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
    assert len(str(plan).split("\n")) == 6


def test_an_error_while_building_escapes_the_name(monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("broken")

    monkeypatch.setattr(fuseopt.modules.FusedLayerNorm, "from_module", broken)
    with pytest.raises(ApplyError, match="broken") as error:
        fuseopt.initialize(named(), NORMS)
    assert_printable(str(error.value))


def lines(printed) -> list[str]:
    found = str(printed).split("\n")
    assert all(len(line) <= 120 for line in found), [line for line in found if len(line) > 120]
    return found


@pytest.mark.parametrize("make", [tiny.gpt2, tiny.t5, named], ids=["gpt2", "t5", "named"])
def test_a_plan_starts_with_its_summary_and_says_the_rest_if_verbose(make):
    model = make()
    short, verbose = fuseopt.plan(model), fuseopt.plan(model, verbose=True)
    assert short.to_dict() == verbose.to_dict()
    assert lines(short)[0].startswith("plan for ") and lines(short)[1] == f"  {short.summary}"
    skipped = [row for row in short.rows if not row.replaced]
    assert skipped and all(row.reason for row in skipped)
    assert "-/->" not in str(short) and "kept as they are" not in str(short)
    assert lines(short)[-1] == f"  {len(skipped)} candidates not replaced; verbose=True, or -v, says why"
    text = " ".join(" ".join(lines(verbose)).split())
    assert all(printable(words) in text for row in short.rows for words in (row.reason, row.change))
    assert "not replaced; " not in text
    fuseopt.initialize(model)
    assert fuseopt.report(model) == fuseopt.report(model, verbose=True)
    assert lines(fuseopt.report(model))[1] == lines(short)[1]
    assert "-/->" in str(fuseopt.report(model, verbose=True))


def test_long_names_and_lines_are_cut_to_120_columns():
    model = nn.Sequential()
    inner = type("Layer" + "x" * 100, (nn.LayerNorm,), {})
    model.add_module("a" * 130, nn.Sequential(nn.LayerNorm(4), inner(4)))
    fusion = {"custom_cuda_kernels": ["FusedLayerNorm"], "jit": False, "exclude": ["nothing_" * 20]}
    for verbose in (False, True):
        decided = fuseopt.plan(model, {"kernel_fusion": fusion}, verbose=verbose)
        rows = [line for line in lines(decided) if "LayerNorm -> FusedLayerNorm" in line]
        assert len(rows) == 1 and "aaa...aaa" in rows[0] and rows[0].endswith("kernels")


def test_html_escapes_what_comes_from_outside():
    evil = type("<script>alert(1)</script>", (nn.Module,), {})()
    evil.add_module("<b>&\n", nn.LayerNorm(4))
    fusion = {"custom_cuda_kernels": ["FusedLayerNorm", "FusedGELU"], "exclude": ["<i>"], "jit": False}
    config = {"kernel_fusion": fusion}
    with pytest.warns(UserWarning):
        fuseopt.initialize(evil, config)
    for page in (fuseopt.plan(evil, config)._repr_html_(), fuseopt.report(evil).to_html()):
        assert "<script>" not in page and "<b>&" not in page and "<i>" not in page
        assert "&lt;script&gt;" in page and "&lt;b&gt;&amp;\\n" in page and "&lt;i&gt;" in page
        parser = Balanced()
        parser.feed(page)
        assert parser.open == [] and parser.rows == 4
    assert "nothing replaced" in fuseopt.report(nn.Linear(2, 2))._repr_html_()


def test_a_plan_that_changes_nothing_says_why():
    text = str(fuseopt.plan(nn.Sequential(nn.Tanh()), "inference"))
    assert "nothing replaced" in text and "no generate() of transformers" in text


class Balanced(HTMLParser):
    """Checks that every tag is closed, and counts the rows of tables."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows = 0

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.rows += tag == "tr"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html_has_all_reasons(capsys):
    model = fuseopt.initialize(tiny.t5())
    page = html.unescape(fuseopt.report(model).to_html())
    assert all(row.reason in page for row in fuseopt.report(model).rows)
    head, folded = page.split("<details>")
    assert "-/->" not in head and "-/->" in folded
    assert "generate()" in head


def test_a_fallback_is_shown_without_verbose():
    model = nn.Sequential(nn.LayerNorm(8))
    fusion = {"custom_cuda_kernels": ["FusedLayerNorm"], "jit": False, "backend": "triton"}
    text = " ".join(str(fuseopt.plan(model, {"kernel_fusion": fusion})).split())
    (row,) = fuseopt.plan(model, {"kernel_fusion": fusion}).rows
    assert row.refused and f"FusedLayerNorm runs on {row.backend}: {' '.join(row.refused.split())}" in text
