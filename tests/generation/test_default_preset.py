"""`initialize(model)` without a config: generate() is exact, and whoever never calls it sees the model unchanged."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, Seq2SeqTrainer, Seq2SeqTrainingArguments

import fuseopt
from fuseopt.generation.generate import FusedGenerate
from tests import tiny

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
MAKERS = {"gpt2": tiny.gpt2, "t5": tiny.t5}
families = pytest.mark.parametrize("family", MAKERS)


def prompt():
    ids = torch.randint(3, 40, (2, 5), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def tokens(model, **options):
    torch.manual_seed(0)
    return model.generate(**prompt(), max_new_tokens=6, **options)


def tiers(model):
    return [line for line in fuseopt.report(model).since if line.startswith("generate(): T")]


@families
@pytest.mark.parametrize(
    ("options", "tier"),
    [
        ({}, "T0"),
        ({"do_sample": True, "top_k": 5}, "T0"),
        ({"num_beams": 2, "no_repeat_ngram_size": 2}, "T0"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "T2 stock transformers: output_attentions"),
    ],
    ids=["greedy", "sampling", "beams", "attentions"],
)
def test_tokens_are_stock_s_and_the_report_has_the_tier(family, options, tier):
    model = MAKERS[family]()
    stock = tokens(model, **options)
    fused = tokens(fuseopt.initialize(model), **options)
    if options.get("return_dict_in_generate"):
        stock, fused = stock.sequences, fused.sequences
    assert torch.equal(stock, fused)
    (line,) = tiers(model)
    assert line.startswith(f"generate(): {tier}")


@families
def test_copies_pickles_and_saved_models_generate_the_same(family, tmp_path):
    model = fuseopt.initialize(MAKERS[family]())
    expected = tokens(model)
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(tokens(duplicate), expected) and tiers(duplicate)[-1].startswith("generate(): T0")
    model.save_pretrained(tmp_path)
    assert torch.equal(tokens(type(model).from_pretrained(tmp_path).eval()), expected)
    assert type(model).__dict__.get("generate") is type(MAKERS[family]()).__dict__.get("generate")
    assert "generate" not in vars(fuseopt.restore(model))


def test_a_model_without_a_decode_step_differs_by_one_row():
    model = tiny.decoder("arcee")
    rows = fuseopt.plan(model).rows
    without = fuseopt.plan(model, {"preset": "inference", "generation": {"enable": False}}).rows
    (row,) = [row for row in rows if row.strategy == "generation"]
    assert [other for other in rows if other is not row] == list(without)
    assert not row.replaced and row.reason.startswith("no decode step is written for ")
    assert "generate" not in vars(fuseopt.initialize(model))


def test_a_forward_runs_no_code_of_the_decode_loop(monkeypatch):
    monkeypatch.setattr(FusedGenerate, "__call__", None)
    model, stock = fuseopt.initialize(tiny.gpt2()), tiny.gpt2()
    called = []

    def profile(frame, event, argument):
        if event == "call" and "fuseopt/generation" in frame.f_code.co_filename:
            called.append(frame.f_code)

    sys.setprofile(profile)
    try:
        logits = tiny.logits(model)
    finally:
        sys.setprofile(None)
    assert not called
    torch.testing.assert_close(logits, tiny.logits(stock), rtol=1e-5, atol=1e-5)


def test_trainer_trains_evaluates_by_generate_and_saves(tmp_path):
    def trained(model, folder):
        ids = prompt()["input_ids"]
        rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]
        arguments = Seq2SeqTrainingArguments(
            str(folder),
            max_steps=2,
            per_device_train_batch_size=2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            predict_with_generate=True,
            generation_max_length=6,
            disable_tqdm=True,
        )
        trainer = Seq2SeqTrainer(model, arguments, train_dataset=rows, eval_dataset=rows)
        loss = trainer.train().training_loss
        predicted = trainer.predict(rows).predictions
        trainer.save_model(str(folder))
        return loss, torch.from_numpy(predicted)

    loss, predicted = trained(tiny.t5(dropout_rate=0.0), tmp_path / "stock")
    model = fuseopt.initialize(tiny.t5(dropout_rate=0.0))
    fused_loss, fused_predicted = trained(model, tmp_path / "fused")
    assert fused_loss == pytest.approx(loss, rel=1e-5) and torch.equal(fused_predicted, predicted)
    assert tiers(model)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "fused").eval()
    assert torch.equal(tokens(again), tokens(model.eval()))
