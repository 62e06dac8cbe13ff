"""OSLO's tutorial row: the old processor bans what transformers' bans, and every variant gives the same tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import NoRepeatNGramLogitsProcessor

from fuseopt.bench.suites import tutorial
from fuseopt.bench.suites.tutorial import PerRowNoRepeatNGram
from fuseopt.cli import main


@given(
    rows=st.integers(1, 5),
    length=st.integers(1, 30),
    vocab=st.integers(2, 6),
    ngram_size=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_row_by_row_bans_the_same(rows, length, vocab, ngram_size, seed):
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(vocab, (rows, length), generator=generator)
    scores = torch.randn(rows, vocab, generator=generator)
    before = scores.clone()
    banned = PerRowNoRepeatNGram(ngram_size)(input_ids, scores)
    assert torch.equal(banned, NoRepeatNGramLogitsProcessor(ngram_size)(input_ids, scores))
    assert torch.equal(scores, before)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_every_variant_is_timed_against_both_processors(monkeypatch):
    calls = []
    call = PerRowNoRepeatNGram.__call__
    monkeypatch.setattr(PerRowNoRepeatNGram, "__call__", lambda *arguments: calls.append(1) or call(*arguments))
    results = tutorial.run(device=torch.device("cpu"), name="t5-tiny", batch=3, length=2, new=5)
    assert calls and len(calls) % 5 == 0
    variants = ["stock", "three kernels", "preset without generation", "preset inference"]
    assert [row.variant.split(" [")[0] for row in results.rows] == variants * 4
    assert {row.difference for row in results.rows if row.variant != "stock"} == {"tokens equal"}
    assert {row.case.split(", ")[3] for row in results.rows} == {"float32", "bfloat16"}
    assert results.unit == "us"
    assert results.rows[0].case == "a token of t5-tiny generate, 3 x (2 + 5), ngram 3, float32"


def test_sizes_from_the_command_line(monkeypatch):
    asked = []
    monkeypatch.setattr(tutorial, "run", lambda **options: asked.append(options) or exit(0))
    for argv in (["--model", "gpt2", "--batch", "4", "--length", "7", "--new", "9"], []):
        with pytest.raises(SystemExit):
            main(["bench", "tutorial", "--device", "cpu", *argv])
    device = torch.device("cpu")
    assert asked == [
        {"device": device, "name": "gpt2", "batch": 4, "length": 7, "new": 9},
        {"device": device, "name": "t5-base", "batch": None, "length": 1, "new": 19},
    ]
