"""`fuseopt demo --quick`, from the plan of a checkpoint to the table of times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from fuseopt.bench.suites import demo, demo_continuations
from fuseopt.cli import main


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the demo expects it: two tiny untrained models, their tokenizers, and prompts."""
    folder = tmp_path_factory.mktemp("checkpoints")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<pad>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "vocab_size": len(vocab)}
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, **ids))
    t5 = T5ForConditionalGeneration(
        T5Config(d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2, decoder_start_token_id=0, **ids)
    )
    for name, model in (("gpt2", gpt2), ("t5", t5)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "prompts.txt").write_text("In the beginning\nJesus wept.\n", encoding="utf-8")
    return folder


def test_quick_demo_from_plan_to_table(capsys, checkpoints: Path, tmp_path):
    out_file = tmp_path / "quick.json"
    argv = ["demo", "--quick", "--device", "cpu", "--checkpoints", str(checkpoints), "--out", str(out_file)]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert main(argv) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    out, err = capsys.readouterr()
    assert json.loads(out_file.read_text())["machine"]["threads"] == "1"
    for title in ("plan for GPT2LMHeadModel (policy gpt2)", "plan for T5ForConditionalGeneration (policy t5)"):
        assert title in out
    assert out.count("same tokens as stock") == 6
    assert "OTHER TOKENS" not in out
    # Two prompts, 16 tokens, three rounds: all of it is to take well under a minute.
    assert out.count("2 prompts x 16 tokens") == 6
    assert out.count("prompt  In the beginning\n") == 2
    assert "gpt2 continues 2 prompts, 16 tokens each" in err and "[11/11] t5-tiny generate, " in err

    rows = json.loads(out_file.read_text())["rows"]
    kernels = {"no-repeat-ngram", "its", "gelu_new", "T5LayerNorm", "LayerNorm"}
    assert {row["case"].split()[0] for row in rows} == {*kernels, "gpt2-tiny", "t5-tiny"}
    assert all(row["milliseconds"][1] > 0 for row in rows if "note" not in row)
    assert {row["rounds"] for row in rows if "tiny" in row["case"]} == {3}
    differences = [row["difference"] for row in rows if "difference" in row]
    assert all(d == "tokens equal" or float(d) < 1e-5 for d in differences)
    assert "tokens equal" in differences

    assert main(["demo", "--markdown", str(out_file)]) == 0
    assert capsys.readouterr().out.strip() in out


def test_a_checkpoint_that_raises_is_a_line_and_the_next_is_shown(capsys, checkpoints: Path, monkeypatch):
    def load(folder: Path):
        if folder.name == "gpt2":
            raise RuntimeError("half a file")
        return loads(folder)

    loads = demo_continuations._load
    monkeypatch.setattr(demo_continuations, "_load", load)
    monkeypatch.setattr("fuseopt.bench.suites.demo.demo_cases", lambda sizes, device: [])
    assert main(["demo", "--quick", "--device", "cpu", "--checkpoints", str(checkpoints)]) == 0
    out, err = capsys.readouterr()
    assert "gpt2: failed: RuntimeError: half a file" in out and "Traceback" in err
    assert "plan for T5ForConditionalGeneration" in out and out.count("same tokens as stock") == 3


def test_a_clone_in_the_current_folder_is_found_from_a_wheel(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert demo.default_checkpoints().is_absolute()
    (tmp_path / "examples" / "checkpoints").mkdir(parents=True)
    assert demo.default_checkpoints() == Path("examples/checkpoints")


def test_demo_without_checkpoints_says_so(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("fuseopt.bench.suites.demo.demo_cases", lambda sizes, device: [])
    assert main(["demo", "--quick", "--device", "cpu", "--checkpoints", str(tmp_path)]) == 0
    assert f"no checkpoints under {tmp_path}" in capsys.readouterr().out
