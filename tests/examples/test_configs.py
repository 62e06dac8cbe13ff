"""The files in examples/configs: each is what its name says, and each plans on GPT-2 and on T5."""

from __future__ import annotations

from pathlib import Path

import pytest

import fuseopt
from fuseopt import Config
from tests import tiny

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"
FILES = sorted(CONFIGS.glob("*.json"))
MODELS = {"gpt2": tiny.gpt2, "t5": tiny.t5}

# A class that the plan must name as a replacement on a CPU, by file and model.
REPLACED = {
    ("generation", "gpt2"): "FusedGenerate",
    ("generation", "t5"): "FusedGenerate",
    ("inference", "gpt2"): "GPT2InferenceForward",
    ("inference", "t5"): "FusedRMSNorm",
    ("kernels_gpt2", "gpt2"): "GPT2BlockForward",
    ("kernels_gpt2", "t5"): "FusedNoRepeatNGram",
    ("kernels_t5", "gpt2"): "FusedNoRepeatNGram",
    ("kernels_t5", "t5"): "T5BlockForward",
    ("reference", "gpt2"): "GPT2InferenceForward",
    ("reference", "t5"): "FusedRMSNorm",
    ("training", "gpt2"): "TrainingForward",
    ("training", "t5"): "TrainingForward",
}


def test_every_file_is_in_the_table():
    assert {name for name, _ in REPLACED} == {path.stem for path in FILES}


@pytest.mark.parametrize("preset", ["inference", "training", "reference"])
def test_file_of_a_preset_spells_it_out(preset):
    written, known = Config.load(CONFIGS / f"{preset}.json").to_dict(), Config.load(preset).to_dict()
    assert (known.pop("preset"), "preset" in written) == (preset, False)
    for config in (written, known):
        for key in ("custom_cuda_kernels", "triton_kernels"):
            config["kernel_fusion"][key].sort(key=str)
    assert written == known


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_file_plans_on_gpt2_and_t5(path, name):
    plan = fuseopt.plan(MODELS[name](), path)
    replaced = {row.target: row.backend for row in plan.rows if row.replaced}
    expected = REPLACED[path.stem, name]
    assert expected in replaced
    if path.stem == "reference":
        assert replaced[expected] == "reference"
    if path.stem in ("generation", f"kernels_{name}"):
        assert plan.unmet == ()
