"""Each compilation of a training step is said once, with its time and why it was due."""

import copy
import re

import torch

import fuseopt
from fuseopt.training import forward as training_forward
from tests import tiny

AOT = {"kernel_fusion": {"memory_efficient_fusion": {"backend": "aot_eager"}}}


def batch(rows, length):
    ids = torch.arange(rows * length).reshape(rows, length) % tiny.VOCAB
    return {"input_ids": ids, "labels": ids.clone()}


def test_each_compilation_is_said_with_its_time_and_reason(caplog, each_device):
    model = fuseopt.initialize(tiny.gpt2(n_layer=1), AOT).train()

    def said(**inputs):
        caplog.clear()
        model(**inputs).loss.backward()
        return [record.getMessage() for record in caplog.records if record.name.startswith("fuseopt.")]

    before, first = said(**batch(2, 5))
    begin, _, on_cpu = before.partition(": on a CPU that takes 1 to 2 minutes and pays only after thousands of steps")
    assert begin == "fuseopt: compiling a training step of GPT2LMHeadModel"
    assert ("without memory_efficient_fusion nothing is compiled" in on_cpu) == (each_device.type == "cpu")
    seconds = re.search(r"compiled a training step of GPT2LMHeadModel in ([\d.]+) s \(its first step\)", first)
    assert seconds is not None and 0 < float(seconds[1]) < 600
    assert said(**batch(2, 5)) == []
    begun, second = said(**batch(2, 7))
    assert begun == before
    assert "input_ids [2, 5] became [2, 7], and a size that has changed is dynamic from now on" in second
    assert said(**batch(2, 9)) == said(**batch(2, 5)) == []
    model.transformer.wte.weight.requires_grad_(False)
    begun, third = said(**batch(2, 5))
    assert begun == before
    assert "another combination of arguments" in third or "became" in third


def test_the_first_line_comes_before_the_trace(caplog, monkeypatch, each_device):
    """Trace and compilation are silent for up to 2 minutes."""
    compile_step, seen = training_forward._compile, []

    def recording(*arguments):
        step = compile_step(*arguments)

        def run(*args, **kwargs):
            seen.append([record.getMessage() for record in caplog.records if record.name.startswith("fuseopt.")])
            return step(*args, **kwargs)

        return run

    monkeypatch.setattr(training_forward, "_compile", recording)
    model = fuseopt.initialize(tiny.gpt2(n_layer=1), AOT).train()
    model(**batch(2, 5))
    (before_trace,) = seen
    assert len(before_trace) == 1 and "fuseopt: compiling a training step of GPT2LMHeadModel" in before_trace[0]


def test_what_is_not_compiled_is_not_said(caplog, each_device):
    model = fuseopt.initialize(tiny.gpt2(n_layer=1), AOT)
    model(**batch(2, 5))
    with torch.no_grad():
        copy.deepcopy(model).train()(**batch(2, 5))
    assert not [record for record in caplog.records if record.name.startswith("fuseopt.")]
