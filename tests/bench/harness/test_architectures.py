"""Models by name or folder, without a download and, to plan on, without memory."""

from __future__ import annotations

import huggingface_hub
import pytest
import torch

import fuseopt
from fuseopt.bench.harness.architectures import ARCHITECTURES, load_config, random_model, weightless
from fuseopt.errors import ConfigError

CPU = torch.device("cpu")
# Parameters in millions, tied ones once: what the checkpoints of these names have.
MILLIONS = {
    "gpt2": 124,
    "gpt2-medium": 355,
    "gpt2-large": 774,
    "gpt2-xl": 1558,
    "t5-small": 61,
    "t5-base": 223,
    "t5-large": 738,
    "t5-v1_1-base": 248,
    "llama-3.2-1b": 1236,
    "llama-3.1-8b": 8030,
    "smollm2-135m": 135,
    "smollm2-360m": 362,
    "smollm3-3b": 3075,
    "mistral-7b": 7242,
    "qwen2.5-0.5b": 494,
    "qwen3-0.6b": 596,
    "phi-3-mini": 3821,
    "gemma-2b": 2506,
    "gemma-2-2b": 2614,
    "gemma-3-1b": 1000,
    "olmo-1b": 1177,
    "olmo2-1b": 1485,
    "granite-3-2b": 2534,
    "stablelm-2-1.6b": 1645,
    "starcoder2-3b": 3030,
    "aya-expanse-8b": 8028,
    "pythia-410m": 405,
    "gpt-j-6b": 6051,
    "opt-125m": 125,
    "opt-350m": 331,
    "bart-base": 139,
    "mbart-large": 611,
    "pegasus-large": 571,
    "opus-mt": 74,
    "mt5-base": 582,
    "umt5-base": 592,
    "whisper-small": 242,
}
# transformers ties the heads of these T5s, and the checkpoints have one.
OWN_HEADS = ("t5-v1_1-base", "mt5-base", "umt5-base")


@pytest.mark.parametrize("name", MILLIONS)
def test_sizes_are_those_of_the_checkpoints(name):
    model = weightless(load_config(name), CPU)
    tied = {*model.all_tied_weights_keys} - ({"lm_head.weight"} if name in OWN_HEADS else set())
    count = sum(p.numel() for path, p in model.named_parameters() if path not in tied)
    assert round(count / 1e6) == MILLIONS[name]


def test_a_weightless_model_plans_like_a_real_one():
    placeholder = weightless(load_config("t5-tiny"), CPU)
    assert all(p.untyped_storage().nbytes() <= 8 for p in placeholder.parameters())
    real = random_model("t5-tiny", CPU, torch.float32)
    for config in ("inference", "reference"):
        assert fuseopt.plan(placeholder, config).to_dict() == fuseopt.plan(real, config).to_dict()


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name.endswith("tiny")])
def test_a_random_model_is_tied_finite_and_generates_what_it_is_asked_for(name):
    model = random_model(name, CPU, torch.bfloat16)
    assert model.dtype is torch.bfloat16
    assert not model.training
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert all(p.isfinite().all() for p in model.parameters())
    prompt = torch.ones(2, 3, dtype=torch.long)
    tokens = model.generate(prompt, attention_mask=prompt, max_new_tokens=5, do_sample=False)
    assert tokens.shape == (2, 6 if model.config.is_encoder_decoder else 8)


def test_the_config_of_a_model_id(tmp_path, monkeypatch):
    """From transformers' cache, where a download would have put it."""
    repository = tmp_path / "models--someone--gpt2-small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (repository / "snapshots" / ("0" * 40) / "config.json").write_text('{"model_type": "gpt2", "n_layer": 5}')
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert load_config("someone/gpt2-small").n_layer == 5
    with pytest.raises(ConfigError, match="someone/else is not in transformers' cache, and fuseopt downloads"):
        load_config("someone/else")


def test_a_folder_without_architectures_is_built_by_its_type(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1}')
    assert type(weightless(load_config(str(tmp_path)), CPU)).__name__ == "GPT2LMHeadModel"


def test_a_model_that_cannot_be_had_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean 't5-base'\?"):
        load_config("t5-bse")
    with pytest.raises(ConfigError, match="neither a folder"):
        load_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="transformers cannot read it"):
        load_config(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ConfigError, match="'architectures'"):
        weightless(load_config(str(tmp_path)), CPU)


def test_an_unknown_name_gets_the_nearest_one_and_all_in_short_lines():
    with pytest.raises(ConfigError, match="did you mean 'gpt2-medium'") as raised:
        load_config("gpt2-meduim")
    _, *names = str(raised.value).splitlines()
    assert len(names) > 3 and all(len(line) <= 102 and line.startswith("  ") for line in names)
    assert "".join(names).split() == ", ".join(ARCHITECTURES).split()
