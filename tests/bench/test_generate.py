"""bench generate: each row as a first token and as all of them, stock beside fuseopt and the static cache."""

import pytest
import torch

from fuseopt.bench import generate
from fuseopt.bench.generate import STATIC, Row
from fuseopt.cli import main

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_rows_are_timed_per_token_and_keep_their_tokens():
    rows = [Row("gpt2-tiny", 2, prompt=5, new=3), Row("t5-tiny", 1, prompt=4, new=4, beams=2, ngram=2)]
    results = generate.run(device=CPU, rows=rows, compiled=True)
    assert results.benchmark == "generate" and results.unit == "us"
    gpt2, t5 = (
        {row.case: [] for row in results.rows if f" of {name} " in row.case} for name in ("gpt2-tiny", "t5-tiny")
    )
    assert list(gpt2) == [
        "the first token of gpt2-tiny generate, 2 x (5 + 1), greedy, float32",
        "a token of gpt2-tiny generate, 2 x (5 + 3), greedy, float32",
    ]
    assert list(t5)[1] == "a token of t5-tiny generate, 1 x (4 + 4), 2 beams, ngram 2, float32"
    variants = [row.variant.split(" [")[0] for row in results.rows]
    # Beam search has no static cache in transformers.
    beside = ["preset inference", "generation"]
    assert variants == ["stock", STATIC, *beside] * 2 + ["stock", *beside] * 2
    assert {row.difference for row in results.rows if row.variant != "stock"} == {"tokens equal"}


def test_sizes_without_a_model_are_refused(capsys):
    assert main(["bench", "generate", "--device", "cpu", "--new", "3", "--batch", "2"]) == 2
    assert "--new, --batch: of which model? Name it with --model" in capsys.readouterr().err


def test_the_command_line_makes_the_rows(monkeypatch, tmp_path):
    seen = {}

    def run(**options):
        seen.update(options)
        return generate.Results.measured_here("generate", [], unit="us")

    monkeypatch.setattr(generate, "run", run)
    sizes = ["--model", "gpt2-tiny", "--model", "t5-tiny", "--batch", "1", "8", "--prompt", "6", "--beams", "2"]
    assert main(["bench", "generate", "--device", "cpu", "--dtype", "float16", *sizes]) == 0
    expected = [Row(model, batch, prompt=6, beams=2) for model in ("gpt2-tiny", "t5-tiny") for batch in (1, 8)]
    assert seen["rows"] == expected
    assert (seen["dtype"], seen["compiled"], seen["device"]) == (torch.float16, False, CPU)
