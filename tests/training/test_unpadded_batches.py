"""Rows without padding and packing have no mask in the compiled step, and what is handed back is stock's."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fuseopt
from fuseopt.training import partitioner, unpadded_batches
from fuseopt.training.unpadded_batches import NoCache
from tests import tiny
from tests.training_steps import Graphs

CONFIG = {"kernel_fusion": {"memory_efficient_fusion": True}}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "attention_dropout": 0.0}
# GPT-2's forward, Llama's, one with a window and one with masks by the kind of layer; the others' are like these.
KINDS = ("gpt2", "llama", "mistral", "qwen2")


def model_of(family: str) -> nn.Module:
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    return getattr(tiny, family)(**NO_DROPOUT, **{layers: 1}).train()


@pytest.mark.parametrize(
    ("family", "can_skip_mask"),
    [
        ("gpt2", False),
        pytest.param("gpt2", True, marks=pytest.mark.slow),
        ("llama", True),
        pytest.param("mistral", True, marks=pytest.mark.slow),
        pytest.param("qwen2", True, marks=pytest.mark.slow),
    ],
)
def test_whole_rows_have_no_mask_and_others_have_theirs(family, can_skip_mask, monkeypatch):
    if can_skip_mask and not unpadded_batches.can_skip_mask():
        pytest.skip("transformers makes a mask in every trace")
    monkeypatch.setattr(unpadded_batches, "can_skip_mask", lambda: can_skip_mask)
    torch._dynamo.reset()
    graphs = Graphs("aot_eager")
    monkeypatch.setattr(partitioner, "compile_graph", graphs)
    # The graph shows it as Dynamo traced it, and runs as it is.
    monkeypatch.setattr(partitioner, "aot_autograd", lambda **_: lambda graph, inputs: graph.forward)
    stock = model_of(family)
    fused = fuseopt.initialize(copy.deepcopy(stock), CONFIG)
    ids = tiny.inputs(stock)["input_ids"]
    padded = torch.ones_like(ids)
    padded[0, :2] = 0
    for mask, masked in ((None, False), (torch.ones_like(ids), False), (padded, True)):
        batch = {"input_ids": ids, "labels": ids, "attention_mask": mask}
        outputs, expected = fused(**batch), stock(**batch, use_cache=False)
        torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-5, atol=0)
        assert list(outputs) == list(expected) and outputs.past_key_values is None
        calls = [node for node in graphs.last.graph.nodes if node.target is F.scaled_dot_product_attention]
        assert len(calls) == 1 and (calls[0].kwargs["attn_mask"] is not None) == masked
        assert calls[0].kwargs["is_causal"] != masked
    assert (graphs.compiled, graphs.calls) == (2, 3)
    outputs, expected = (model(ids, labels=ids, use_cache=False, return_dict=False) for model in (fused, stock))
    assert [type(value) for value in outputs] == [type(value) for value in expected]


needed = pytest.mark.skipif(not unpadded_batches.can_skip_mask(), reason="transformers makes a mask in every trace")


@needed
@pytest.mark.parametrize("family", unpadded_batches._FAMILIES)
def test_a_mask_of_ones_and_a_cache_say_nothing_to_these(family):
    model = tiny.decoder(family)
    windowed = [tiny.decoder(family, sliding_window=3)] if hasattr(model.config, "sliding_window") else []
    ids = tiny.inputs(model)["input_ids"]
    given = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    for decoder in (model, *windowed):
        changed = unpadded_batches.arguments(decoder, given)
        assert isinstance(changed["past_key_values"], NoCache) and changed["attention_mask"] is None
        outputs, expected = (
            unpadded_batches.without_cache(decoder(**given | changed)),
            decoder(**given, use_cache=False),
        )
        assert list(outputs) == list(expected)
        assert torch.equal(outputs.loss, expected.loss) and torch.equal(outputs.logits, expected.logits)


@needed
@pytest.mark.parametrize("family", KINDS)
def test_checkpointed_layers_are_given_no_cache(family):
    model = model_of(family)
    ids = tiny.inputs(model)["input_ids"]
    assert isinstance(unpadded_batches.arguments(model, {"input_ids": ids})["past_key_values"], NoCache)
    model.gradient_checkpointing_enable()
    assert unpadded_batches.arguments(model, {"input_ids": ids}) == {"attention_mask": None}


def test_versions_that_make_a_mask_whatever_they_are_told_are_told_of_no_cache(monkeypatch):
    monkeypatch.setattr(unpadded_batches, "can_skip_mask", lambda: False)
    assert unpadded_batches.arguments(model_of("gpt2"), {}) == {"attention_mask": None}


@needed
def test_positions_that_are_given_are_left_to_transformers():
    model = model_of("gpt2")
    ids = tiny.inputs(model)["input_ids"]
    positions = torch.arange(7).expand(2, 7)
    assert unpadded_batches.arguments(model, {"input_ids": ids, "position_ids": positions}) == {}
    assert unpadded_batches.arguments(model, {"input_ids": ids, "attention_mask": torch.ones(2, 1, 7, 7)}) == {}
    assert unpadded_batches.arguments(model, {"input_ids": ids, "encoder_hidden_states": torch.ones(2, 3, 24)}) == {}
    assert (
        unpadded_batches.arguments(tiny.t5(), {"input_ids": ids})
        == unpadded_batches.arguments(nn.Linear(2, 2), {})
        == {}
    )
