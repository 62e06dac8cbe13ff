"""OSLO's tutorial at a small size: each section replaces what its config names, and computes what stock computes."""

from __future__ import annotations

import re

from tests.examples.scripts import load

ROW = re.compile(r"^(\d\. .*?: .*?)  +[\d.]+ +[\d.]+ +[\d.]+x +(\S.*?)  +(\d+ .*)$")
# What the table has to name as replaced, by section.
REPLACED = {
    "1. JIT: GPT-2 forward": ("FusedMLP[torchscript]",),
    "2. memory efficient: GPT-2 training": ("TrainingForward[inductor]",),
    "3. custom kernels: T5 generate()": ("FusedRMSNorm[", "FusedNoRepeatNGram["),
    "3. and generation: T5 generate()": ("FusedRMSNorm[", "FusedNoRepeatNGram[", "FusedGenerate"),
}


def test_each_section_replaces_its_parts_and_agrees_with_stock(capsys, recwarn):
    load("oslo_tutorial").main(["--tiny", "--batch", "2", "--calls", "1"])
    rows = {
        match[1]: (match[2], match[3]) for line in capsys.readouterr().out.splitlines() if (match := ROW.match(line))
    }
    assert rows.keys() == REPLACED.keys()
    for section, (outputs, replaced) in rows.items():
        assert all(name in replaced for name in REPLACED[section]), section
        if "generate" in section:
            assert outputs == "0 of 40 tokens"
        else:
            assert float(outputs) < 1e-4
    assert [str(warning.message) for warning in recwarn if "fuseopt" in str(warning.message)] == []
