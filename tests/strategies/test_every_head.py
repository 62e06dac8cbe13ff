"""Every class with a loss that transformers has for six families trains a step under the preset as stock does.

The classes are found in transformers' modules, so that one it adds is covered, or fails for want of a batch.
"""

import copy
import importlib
import inspect

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import fuseopt
from tests import tiny

# One of a kind of head and of each family; a trace takes seconds.
SAMPLE = [
    "GPT2ForSequenceClassification",
    "T5ForTokenClassification",
    "LlamaForQuestionAnswering",
    "BertForMultipleChoice",
]
ROWS, LENGTH = 2, 7


def heads() -> list[type[PreTrainedModel]]:
    found = []
    for family in ("gpt2", "t5", "mt5", "umt5", "llama", "bert"):
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if issubclass(cls, PreTrainedModel) and cls.config_class is not None and _targets(cls):
                found.append(cls)
    return sorted(set(found), key=lambda cls: cls.__name__)


def _targets(cls: type) -> list[str]:
    """What it takes that a loss is computed from."""
    names = ("labels", "start_positions", "end_positions", "mc_labels", "next_sentence_label")
    return [name for name in names if name in inspect.signature(cls.forward).parameters]


def of_every_head(sample):
    """Over all heads, on a CPU and on a GPU; all but the `sample` are left out of quick runs."""
    marks = {True: [], False: [pytest.mark.slow]}
    classes = [pytest.param(cls, marks=marks[cls.__name__ in sample], id=cls.__name__) for cls in heads()]
    by = [pytest.param("aot_eager", id="cpu"), pytest.param("inductor", marks=pytest.mark.gpu, id="gpu")]

    def over_all(test):
        return pytest.mark.parametrize("cls", classes)(pytest.mark.parametrize("graphs", by, indirect=True)(test))

    return over_all


def make(cls: type[PreTrainedModel], dropout: float = 0.0) -> nn.Module:
    layers = {"n_layer", "num_layers", "num_hidden_layers", "num_decoder_layers"} & cls.config_class().to_dict().keys()
    model = tiny.of_class(cls, **dict.fromkeys(layers, 1), pad_token_id=0).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout
    return model


def batch_of(model: nn.Module) -> dict[str, Tensor]:
    """Random tokens, and of each thing that the class takes to be learnt one for every row, token or choice."""
    name, generator = type(model).__name__, torch.Generator().manual_seed(1)
    ids = torch.randint(3, tiny.VOCAB, (ROWS, LENGTH), generator=generator)
    # Sequence classification of T5's kind reads where a row ends.
    ids[:, -1] = getattr(model.config, "eos_token_id", None) or 2
    mask = torch.ones_like(ids)
    of_rows, of_tokens = torch.tensor([0, 1]), ids.clone().index_fill(1, torch.tensor([0]), -100)
    labels = {
        "ForSequenceClassification": of_rows,
        "ForNextSentencePrediction": of_rows,
        "ForMultipleChoice": of_rows[1:],
        "ForTokenClassification": ids % 2,
        **dict.fromkeys(("ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "ForMaskedLM"), of_tokens),
        **dict.fromkeys(("ForPreTraining", "DoubleHeadsModel"), of_tokens),
        "ForQuestionAnswering": None,
    }
    (kind,) = [kind for kind in labels if name.endswith(kind)]
    known = {
        "labels": labels[kind],
        "start_positions": of_rows,
        "end_positions": of_rows + 2,
        "mc_labels": of_rows[1:],
        "next_sentence_label": of_rows,
    }
    batch = {"input_ids": ids, "attention_mask": mask, **{name: known[name] for name in _targets(type(model))}}
    if kind in ("ForMultipleChoice", "DoubleHeadsModel"):
        batch |= {name: batch[name][None] for name in ("input_ids", "attention_mask")}
    if kind == "DoubleHeadsModel":
        batch |= {"labels": of_tokens[None], "mc_token_ids": torch.tensor([[6, 5]])}
    return batch


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Zeros for a parameter that the loss does not reach, as a compiled graph has them."""
    named = model.named_parameters()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named if p.requires_grad}


@pytest.mark.parametrize("cls", heads(), ids=lambda cls: cls.__name__)
def test_there_is_a_batch_for_every_head(cls):
    model = make(cls)
    model(**batch_of(model)).loss.backward()
    assert any(gradient.norm() > 0 for gradient in gradients(model).values())


def test_the_heads_are_found():
    names = {cls.__name__ for cls in heads()}
    assert len(names) >= 29 and {*SAMPLE} <= names


@of_every_head(SAMPLE)
@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_step_has_the_loss_and_gradients_of_stock(cls, padded, graphs):
    device = "cuda" if graphs.backend == "inductor" else "cpu"
    stock = make(cls).to(device)
    fused = fuseopt.initialize(copy.deepcopy(stock), "training")
    batch = {name: value.to(device) for name, value in batch_of(stock).items()}
    if padded:
        batch["attention_mask"].view(ROWS, LENGTH)[0, 0] = 0
    outputs = fused(**batch)
    expected = stock(**batch)
    assert type(outputs) is type(expected)
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=2e-5, atol=0)
    outputs.loss.backward()
    expected.loss.backward()
    tiny.assert_same_gradients(gradients(fused), gradients(stock))
    assert graphs.calls == 1


@of_every_head(SAMPLE[:2])
def test_a_step_with_dropout(cls, graphs):
    """It draws other numbers than stock; the same from the same seed."""
    device = "cuda" if graphs.backend == "inductor" else "cpu"
    model = make(cls, dropout=0.3).to(device)
    plain = model.eval()(**{name: value.to(device) for name, value in batch_of(model).items()}).loss
    fuseopt.initialize(model.train(), "training")
    found = []
    for seed in (0, 0, 1):
        model.zero_grad()
        torch.manual_seed(seed)
        loss = model(**{name: value.to(device) for name, value in batch_of(model).items()}).loss
        loss.backward()
        found.append((loss.detach(), gradients(model)))
    (first, slopes), (again, same), (other, _) = found
    assert torch.equal(first, again) and first != other and first != plain and torch.isfinite(other)
    tiny.assert_same_gradients(slopes, same)
    assert sum(slope.norm() for slope in slopes.values()) > 0
