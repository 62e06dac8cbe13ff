"""What "auto" keeps of a trained checkpoint, with real times: right, and not slower than stock."""

import functools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fuseopt
from fuseopt.runtime import timer

CHECKPOINT = Path(fuseopt.__file__).parents[1] / "examples" / "checkpoints" / "gpt2-kjv"


@pytest.mark.slow
def test_what_is_kept_is_right_and_not_slower_than_stock(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEOPT_MEASURED", "1")
    monkeypatch.setattr("fuseopt.runtime.measured_files.library_cache.folder", lambda: tmp_path / "cache")
    inputs = dict(AutoTokenizer.from_pretrained(CHECKPOINT)("In the beginning", return_tensors="pt"))
    options = {"max_new_tokens": 24, "do_sample": False}
    stock, model = (AutoModelForCausalLM.from_pretrained(CHECKPOINT).eval() for _ in range(2))
    fuseopt.initialize(model, "auto", inputs=inputs, generate=options, time_limit=20)
    assert "FusedGenerate" in {row.target for row in fuseopt.report(model).replaced}
    calls = {
        name: functools.partial(each.generate, **inputs, **options)
        for name, each in (("stock", stock), ("auto", model))
    }
    assert torch.equal(calls["stock"](), calls["auto"]())
    timings = timer.time_in_turns(calls, timer.host_seconds, rounds=7)
    assert timings["auto"].speed_up_over(timings["stock"]).median > 1
    assert fuseopt.plan(stock, fuseopt.report(model).config).expected
