"""quickstart.ipynb has the cells of quickstart.py, and they run to the end with stock's texts."""

from __future__ import annotations

import json
import re

import pytest
import torch

from tests.examples.scripts import EXAMPLES, load

make_notebook = load("make_notebook")


@pytest.fixture(scope="module")
def notebook():
    return json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]


def test_notebook_has_the_cells_of_the_script(notebook):
    script = (EXAMPLES / "quickstart.py").read_text(encoding="utf-8")
    without_results = [
        cell | {"execution_count": None, "outputs": []} if cell["cell_type"] == "code" else cell for cell in notebook
    ]
    assert without_results == make_notebook.cells_of(script)
    # Not by the same parser: every line of code is there, in order.
    code = "\n".join("".join(cell["source"]) for cell in notebook if cell["cell_type"] == "code")
    assert [line for line in code.splitlines() if line] == [
        line for line in script.splitlines() if line and not line.startswith("#")
    ]


def test_notebook_was_executed(notebook):
    code = [cell for cell in notebook if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(bool(cell["outputs"]) == ("\nprint(" in "\n" + "".join(cell["source"])) for cell in code)


def printed_by(cells):
    return "".join(
        line for cell in cells if cell["cell_type"] == "code" for out in cell["outputs"] for line in out["text"]
    )


def without_figures(text):
    """Times, ratios and errors, which no two runs share, as #."""
    return re.sub(r" *\d+\.\d+(e[+-]\d+)?", " #", text)


def test_cells_run_and_print_what_the_notebook_shows(notebook):
    shown = printed_by(notebook)
    make_notebook.execute(notebook)
    printed = printed_by(notebook)
    if not torch.cuda.is_available():  # the notebook was made on a CPU
        assert without_figures(shown) == without_figures(printed), "run python examples/make_notebook.py"
    assert "LayerNorm -> FusedLayerNorm" in printed and "GenerationMixin -> FusedGenerate" in printed
    assert "verify: ok" in printed and "tokens: the same" in printed
    assert re.search(r"^fused .* True$", printed, re.MULTILINE)
    assert "The LORD is my shepherd; I shall not | want." in printed
    assert "T0 device loop" in printed
    assert printed.endswith("report on GPT2LMHeadModel\n  nothing replaced\n")
