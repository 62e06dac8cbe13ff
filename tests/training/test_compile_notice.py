"""Each compilation of a training step is said once, with its time and why it was due."""

import copy
import re

import torch

import fuseopt
from tests import tiny

AOT = {"kernel_fusion": {"memory_efficient_fusion": {"backend": "aot_eager"}}}


def batch(rows, length):
    ids = torch.arange(rows * length).reshape(rows, length) % tiny.VOCAB
    return {"input_ids": ids, "labels": ids.clone()}


def test_each_compilation_is_said_with_its_time_and_reason(caplog, each_device):
    model = fuseopt.initialize(tiny.gpt2(), AOT).train()

    def said(**inputs):
        caplog.clear()
        model(**inputs).loss.backward()
        return [record.getMessage() for record in caplog.records if record.name.startswith("fuseopt.")]

    (first,) = said(**batch(2, 5))
    seconds = re.search(r"compiled a training step of GPT2LMHeadModel in ([\d.]+) s \(its first step\)", first)
    assert seconds is not None and 0 < float(seconds[1]) < 600
    assert ("On a CPU" in first) == (each_device.type == "cpu")
    assert said(**batch(2, 5)) == []
    (second,) = said(**batch(2, 7))
    assert "input_ids [2, 5] became [2, 7], and a size that has changed is dynamic from now on" in second
    assert said(**batch(2, 9)) == said(**batch(2, 5)) == []
    model.transformer.wte.weight.requires_grad_(False)
    (third,) = said(**batch(2, 5))
    assert "another combination of arguments" in third or "became" in third


def test_what_is_not_compiled_is_not_said(caplog, each_device):
    model = fuseopt.initialize(tiny.gpt2(), AOT)
    model(**batch(2, 5))
    with torch.no_grad():
        copy.deepcopy(model).train()(**batch(2, 5))
    assert not [record for record in caplog.records if record.name.startswith("fuseopt.")]
