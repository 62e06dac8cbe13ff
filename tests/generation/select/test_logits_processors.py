"""generate() with n-gram bans: the same outputs as transformers, through fuseopt's ops, on one model instance only."""

import copy
import pickle
from unittest import mock

import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor
from transformers.generation.logits_process import EncoderNoRepeatNGramLogitsProcessor

import fuseopt
from fuseopt import ops
from fuseopt.generation.select.logits_processors import (
    FusedEncoderNoRepeatNGram,
    FusedLogitsProcessors,
    FusedNoRepeatNGram,
)
from tests import tiny

pytestmark = pytest.mark.usefixtures("each_device")

NGRAM = {"kernel_fusion": {"custom_cuda_kernels": ["FusedNoRepeatNGram"], "jit": False}}
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 4},
    "beam samples": {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
}


def generate(model, **kwargs):
    ids = tiny.inputs(model, batch=3, length=9)["input_ids"]
    attention_mask = torch.ones_like(ids)
    if not model.config.is_encoder_decoder:
        ids[0, :4], attention_mask[0, :4] = 0, 0
    torch.manual_seed(5)
    return model.generate(ids, attention_mask=attention_mask, pad_token_id=0, max_new_tokens=20, **kwargs)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "bans", [{"no_repeat_ngram_size": 2}, {"encoder_no_repeat_ngram_size": 1, "no_repeat_ngram_size": 3}]
)
def test_same_tokens_and_scores_as_transformers(family, mode, bans):
    model = tiny.FAMILIES[family]()
    wanted = dict(bans, **MODES[mode], output_scores=True, output_logits=True, return_dict_in_generate=True)
    stock = generate(model, **wanted)
    fuseopt.initialize(model, NGRAM, strict=True)
    with mock.patch.object(ops, "process_logits", wraps=ops.process_logits) as called:
        fused = generate(model, **wanted)
    assert called.call_count >= len(stock.scores) - 1  # a first token alone has no 2-gram to repeat
    assert type(fused) is type(stock)
    assert torch.equal(fused.sequences, stock.sequences)
    for part in ("scores", "logits"):
        assert all(map(torch.equal, getattr(fused, part), getattr(stock, part)))


def test_the_ban_bites_on_these_models():
    model = tiny.gpt2()
    assert not torch.equal(generate(model), generate(model, no_repeat_ngram_size=2))


def test_other_instances_keep_the_stock_processors():
    model, other = fuseopt.initialize(tiny.gpt2(), NGRAM), tiny.gpt2()
    with mock.patch.object(ops, "process_logits", wraps=ops.process_logits) as called:
        generate(other, no_repeat_ngram_size=2)
        fuseopt.restore(model)
        generate(model, no_repeat_ngram_size=2)
    assert called.call_count == 0


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_builds_processors_for_itself(duplicate):
    model = fuseopt.initialize(tiny.gpt2(), NGRAM)
    other = duplicate(model)
    assert other._get_logits_processor.model is other and model._get_logits_processor.model is model
    stock = generate(fuseopt.restore(model), no_repeat_ngram_size=2)
    assert torch.equal(generate(other, no_repeat_ngram_size=2), stock)
    fuseopt.restore(other)
    assert "_get_logits_processor" not in other.__dict__


def test_the_processors_alone():
    ids = torch.tensor([[1, 2, 3, 1, 2], [4, 4, 4, 4, 4]])
    scores = torch.randn(2, 7)
    for fused, stock in (
        (FusedNoRepeatNGram(2), NoRepeatNGramLogitsProcessor(2)),
        (FusedEncoderNoRepeatNGram(2, ids), EncoderNoRepeatNGramLogitsProcessor(2, ids)),
        (FusedEncoderNoRepeatNGram(2, ids[0]), EncoderNoRepeatNGramLogitsProcessor(2, ids[0])),
    ):
        before = scores.clone()
        assert torch.equal(fused(ids, scores), stock(ids, scores))
        assert torch.equal(scores, before)


@pytest.mark.parametrize("size", [0, -1, 1.5, "2"])
def test_wrong_sizes_are_refused_with_transformers_own_words(size):
    for fused, stock in (
        (lambda: FusedNoRepeatNGram(size), lambda: NoRepeatNGramLogitsProcessor(size)),
        (
            lambda: FusedEncoderNoRepeatNGram(size, torch.ones(1, 3, dtype=torch.long)),
            lambda: EncoderNoRepeatNGramLogitsProcessor(size, torch.ones(1, 3, dtype=torch.long)),
        ),
    ):
        with pytest.raises(ValueError) as stock_error:
            stock()
        with pytest.raises(ValueError) as fused_error:
            fused()
        assert str(fused_error.value) == str(stock_error.value)


def test_an_instance_with_its_own_method_is_left_alone():
    model = tiny.gpt2()
    model._get_logits_processor = FusedLogitsProcessors(model)
    mine = model._get_logits_processor
    with pytest.warns(UserWarning, match="has been set on the instance"):
        fuseopt.initialize(model, NGRAM)
    assert model._get_logits_processor is mine
