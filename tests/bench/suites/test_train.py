"""bench train: every system trains a model of its own, its losses are compared, and only what is right is timed."""

from dataclasses import replace

import pytest
import torch

from fuseopt.bench.suites import train
from fuseopt.bench.suites.train import Row
from fuseopt.cli import main
from fuseopt.config import Config

CPU = torch.device("cpu")
ROW = Row("gpt2-tiny", 2, 8, dropout=0.0, precision="float32")
KERNELS = {"kernel_fusion": {"custom_cuda_kernels": ["FusedLayerNorm"], "jit": False}}
EAGER = {"kernel_fusion": {"memory_efficient_fusion": {"backend": "aot_eager", "budget": 0.5}}}


@pytest.fixture(autouse=True)
def small_matmul(monkeypatch):
    timing = train.matmul_timing
    monkeypatch.setattr(train, "matmul_timing", lambda size, *arguments: timing(32, *arguments))


def test_steps_are_timed_and_held_against_the_floor():
    results = train.run(device=CPU, rows=[ROW], configs={"half": EAGER})
    matmul, stock, half = results.rows
    assert matmul.case == "matmul, 1024 x 1024 x 1024, float32" and matmul.note.endswith(" TFLOP/s")
    assert stock.case == "gpt2-tiny training step, 2 x 8, dropout 0, float32"
    assert [stock.variant, half.variant] == ["stock", "half [aot_eager]"]
    assert float(half.difference) <= 1e-5 and stock.difference is None
    for row in (stock, half):
        assert row.tokens == 16 and row.first_seconds > 0
        assert row.tokens_per_second == pytest.approx(16 / row.milliseconds[1] * 1e3)
    assert half.of_floor / stock.of_floor == pytest.approx(stock.milliseconds[1] / half.milliseconds[1])


def test_a_system_that_trains_otherwise_is_not_timed(monkeypatch):
    def spoil(model, name, config):
        model.lm_head.weight.register_hook(torch.neg)
        return name, None

    monkeypatch.setattr(train, "fuse", spoil)
    *_, wrong = train.run(device=CPU, rows=[ROW], configs={"spoilt": EAGER}).rows
    assert wrong.milliseconds is None and wrong.note.startswith("losses differ from stock's by ")


def test_where_stock_runs_out_of_memory_the_next_system_is_the_baseline(monkeypatch):
    def trial(row, name, fusion, batch, device, plain=train.first_steps):
        return (name, train.OUT_OF_MEMORY) if name == "stock" else plain(row, name, fusion, batch, device)

    monkeypatch.setattr(train, "first_steps", trial)
    _, stock, first, second = train.run(device=CPU, rows=[ROW], configs={"first": KERNELS, "second": KERNELS}).rows
    assert (stock.note, stock.milliseconds) == (train.OUT_OF_MEMORY, None)
    assert first.milliseconds is not None and first.difference is None and first.speed_up is None
    assert float(second.difference) <= 1e-5 and second.speed_up is None
    _, stock = train.run(device=CPU, rows=[ROW], configs={}).rows
    assert stock.note == train.OUT_OF_MEMORY


def test_a_system_that_replaces_nothing_says_why():
    config = {"kernel_fusion": {"custom_cuda_kernels": ["FusedRMSNorm"], "jit": False}}
    *_, idle = train.run(device=CPU, rows=[ROW], configs={"norms": config}).rows
    assert idle.variant == "norms" and idle.milliseconds is None and "matches nothing in the model" in idle.note


def test_a_step_that_does_not_compile_says_why(monkeypatch):
    from fuseopt.training import partitioner

    def refuse(*_, **__):
        raise RuntimeError("no code today")

    monkeypatch.setattr(partitioner, "compile_graph", refuse)
    *_, stock, failed = train.run(device=CPU, rows=[ROW], configs={"half": EAGER}).rows
    assert stock.milliseconds is not None
    assert failed.milliseconds is None and "no code today" in failed.note


@pytest.mark.parametrize("model", ["gpt2-tiny", "t5-tiny"])
def test_padding_is_masked_and_not_learnt(model):
    batch = train.make_batch(Row(model, 4, 10, padded=True), 512, CPU)
    mask = batch["attention_mask"].bool()
    learnt = batch["decoder_attention_mask"].bool() if model == "t5-tiny" else mask
    for seen in (mask, learnt):
        lengths = seen.sum(1)
        assert lengths.min() >= 5 and lengths.max() <= 10 and len(set(lengths.tolist())) > 1
        assert torch.equal(seen, torch.arange(10) < lengths[:, None])
    assert ("decoder_attention_mask" in batch) == (model == "t5-tiny") == (not torch.equal(mask, learnt))
    assert torch.equal(batch["labels"] == -100, ~learnt) and torch.equal(batch["input_ids"] == 0, ~mask)


def test_a_padded_row_is_held_against_stock_as_any_other():
    config = {"kernel_fusion": {"triton_kernels": ["FusedRelativeAttention"]}}
    row = Row("t5-tiny", 3, 12, dropout=0.0, precision="float32", padded=True)
    *_, stock, fused = train.run(device=CPU, rows=[row], configs={"attention": config}).rows
    assert stock.case == "t5-tiny training step, 3 x (12 + 12), padded, dropout 0, float32"
    # Padding counts, in the encoder and in the decoder.
    assert fused.tokens == stock.tokens == 72
    assert fused.milliseconds is not None and float(fused.difference) <= 1e-5


def test_encoder_and_decoder_tokens_count():
    row = Row("t5-tiny", 2, 6, precision="bfloat16", padded=True)
    *_, stock = train.run(device=CPU, rows=[row], configs={}).rows
    assert stock.case == "t5-tiny training step, 2 x (6 + 6), padded, bfloat16" and stock.tokens == 24


def test_the_command_line_makes_rows_and_configs(monkeypatch, capsys):
    seen = {}

    def run(**options):
        seen.update(options)
        return train.Results.measured_here("train", [])

    monkeypatch.setattr(train, "run", run)
    row = ["--model", "gpt2-tiny", "--batch", "2", "4", "--length", "8", "--dropout", "0.2", "--precision", "bfloat16"]
    more = ["--padded", "--budget", "1", "0.5", "--config", "training", "--no-compile", "--device", "cpu"]
    assert main(["bench", "train", *row, *more]) == 0
    assert seen["rows"] == [Row("gpt2-tiny", batch, 8, 0.2, "bfloat16", True) for batch in (2, 4)]
    names = ["preset training, budget 1", "preset training, budget 0.5", "training"]
    assert list(seen["configs"]) == names and seen["compile"] is False
    preset, half = (Config.load(seen["configs"][name]).active_fusion for name in (names[2], names[1]))
    assert half == replace(preset, memory_efficient_fusion=replace(preset.memory_efficient_fusion, budget=0.5))
    assert main(["bench", "train", "--device", "cpu"]) == 0
    assert (seen["rows"], seen["configs"], seen["compile"]) == ([], None, None)
    assert main(["bench", "train", "--device", "cpu", "--config", "trainign"]) == 2
    assert "did you mean 'training'" in capsys.readouterr().err
