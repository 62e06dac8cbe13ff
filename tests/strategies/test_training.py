"""Training under a budget is stock's training, whoever holds the loop and whatever is done to the model in it."""

import copy
import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import Trainer, TrainingArguments

import fuseopt
from fuseopt.training import partitioner
from tests import tiny
from tests.pairs import stock_and_fused
from tests.training_steps import assert_slope, capture_on_cpu

CONFIG = {"kernel_fusion": {"memory_efficient_fusion": {"budget": 0.5, "cuda_graphs": True}}}
SMALL = {
    "gpt2": {"n_layer": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "t5": {"num_layers": 1, "dropout_rate": 0.0},
    "llama": {"num_hidden_layers": 1},
}
# As padded batches have them, one after the other.
LENGTHS = (16, 24, 9, 31, 64, 17, 40, 11)
WAYS = [pytest.param("launched one by one", marks=pytest.mark.slow), "captured"]


@pytest.fixture(autouse=True, params=WAYS)
def replayed(request, monkeypatch):
    """What was captured and replayed, if anything is to be: as on a GPU, from the second step on."""
    return capture_on_cpu(monkeypatch) if request.param == "captured" else None


SPLIT: dict[tuple[object, ...], Callable[..., object]] = {}


@pytest.fixture(autouse=True)
def split_once(request, monkeypatch):
    """A step's graph is split once, for both ways of launching it: half of such a test's time goes into that."""
    plain, numbers = partitioner.aot_autograd, itertools.count()
    test = request.node.name.replace(request.node.callspec.params["replayed"], "")

    def aot_autograd(**options):
        def compile_split(graph, inputs):
            texts = tuple(str(part.graph) for part in graph.modules() if isinstance(part, torch.fx.GraphModule))
            sizes = tuple(
                (x.shape, x.stride(), x.dtype, x.requires_grad) for x in inputs if isinstance(x, torch.Tensor)
            )
            # Changing sizes are those of one trace.
            if len(sizes) < len(inputs) or graph.state_dict():
                return plain(**options)(graph, inputs)
            key = test, next(numbers), texts, sizes
            if key not in SPLIT:
                SPLIT[key] = plain(**options)(graph, inputs)
            return SPLIT[key]

        return compile_split

    monkeypatch.setattr(partitioner, "aot_autograd", aot_autograd)


def model_of(family: str = "gpt2") -> nn.Module:
    return tiny.FAMILIES[family](**SMALL[family]).train()


def batches(model: nn.Module, count: int) -> list[dict[str, torch.Tensor]]:
    ids = [tiny.inputs(model, batch=4, seed=seed)["input_ids"] for seed in range(count)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in ids]


def train(model: nn.Module, steps: int) -> torch.Tensor:
    """The losses of `steps` steps of AdamW over three batches."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for step in range(steps):
        loss = model(**batches(model, 3)[step % 3]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def assert_same_weights(fused: nn.Module, stock: nn.Module, atol: float = 1e-5) -> None:
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(fused.get_parameter(name), parameter, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("family", ["gpt2", pytest.param("t5", marks=pytest.mark.slow)])
def test_fifty_steps_have_the_losses_of_stock(family, graphs, replayed):
    stock, fused = stock_and_fused(model_of(family), CONFIG)
    expected = train(stock, 50)
    torch.testing.assert_close(train(fused, 50), expected, rtol=1e-5, atol=0)
    assert expected[-3:].mean() < 0.95 * expected[:3].mean()
    assert (graphs.compiled, graphs.calls) == (1, 50)
    assert replayed is None or replayed == ["captured", *["replayed"] * 49]


def run_trainer(model: nn.Module, folder: str, resume: str | None = None) -> list[float]:
    """Six steps of two accumulated batches each, clipped; a checkpoint is left after three."""
    arguments = TrainingArguments(
        folder,
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    rows = [
        dict(zip(batch, rows, strict=True)) for batch in batches(model, 6) for rows in zip(*batch.values(), strict=True)
    ]
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_accumulates_clips_and_resumes(graphs, tmp_path):
    stock, fused = stock_and_fused(model_of(), CONFIG)
    _, resumed = stock_and_fused(model_of(), CONFIG)
    expected = run_trainer(stock, str(tmp_path / "stock"))
    assert run_trainer(fused, str(tmp_path / "fused")) == pytest.approx(expected, rel=1e-3)
    # Adam makes steps of a gradient that is rounding alone, as that of a key's bias is: up to the rate, 0.01.
    assert_same_weights(fused, stock, atol=1e-4)
    assert len(expected) == 6 and graphs.calls == 12
    assert run_trainer(resumed, str(tmp_path / "resumed"), str(tmp_path / "fused" / "checkpoint-3")) == pytest.approx(
        expected, rel=1e-3
    )
    assert_same_weights(resumed, stock, atol=1e-4)
    assert graphs.calls == 18


@pytest.mark.slow
def test_accelerate_accumulates_and_clips(graphs):
    stock, fused = stock_and_fused(model_of(), CONFIG)
    for model in (stock, fused):
        accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in batches(model, 4):
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(**batch).loss)
                if accelerator.sync_gradients:
                    assert accelerator.clip_grad_norm_(prepared.parameters(), 0.5) > 0.5
                optimizer.step()
                optimizer.zero_grad()
    assert_same_weights(fused, stock)
    assert (graphs.compiled, graphs.calls) == (1, 4)


def test_half_precision_with_a_scaler(graphs):
    losses = []
    for model in stock_and_fused(model_of(), CONFIG):
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
        for batch in batches(model, 4):
            with torch.autocast("cpu", torch.float16):
                loss = model(**batch).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert scaler.get_scale() == 2.0**16
    assert losses[4:] == pytest.approx(losses[:4], rel=5e-3)
    assert graphs.calls == 4


def test_checkpointed_blocks_find_the_dropout_that_was_drawn(graphs):
    rates = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    model = fuseopt.initialize(tiny.gpt2(n_layer=1, **rates).double().train(), CONFIG)
    model.gradient_checkpointing_enable()
    batch = tiny.inputs(model)
    assert_slope(model, lambda: model(**batch).logits.square().mean())
    assert graphs.compiled == 1


def test_frozen_layers_stay_as_they_are(graphs):
    stock, fused = stock_and_fused(model_of(), CONFIG)
    before = copy.deepcopy(fused.state_dict())
    for model in (stock, fused):
        model.transformer.wte.requires_grad_(False)
        model.transformer.h[0].attn.requires_grad_(False)
    torch.testing.assert_close(train(fused, 6), train(stock, 6), rtol=1e-5, atol=0)
    same = {name for name, tensor in fused.state_dict().items() if torch.equal(tensor, before[name])}
    assert same == {name for name in before if "wte" in name or ".attn." in name or "lm_head" in name}
    assert (graphs.compiled, graphs.calls) == (1, 6)


def with_lora(model: nn.Module, family: str) -> nn.Module:
    """On attention, feed-forward and head."""
    peft = pytest.importorskip("peft")
    targets = {"gpt2": ["c_attn", "c_fc", "c_proj", "lm_head"], "t5": ["q", "v", "wi", "wo", "lm_head"]}
    task = {"gpt2": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM"}
    torch.manual_seed(3)
    options = peft.LoraConfig(
        r=2, target_modules=targets[family], task_type=task[family], fan_in_fan_out=family == "gpt2"
    )
    return peft.get_peft_model(model, options).train()


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True", "ignore:Model .* tie_word_embeddings")
@pytest.mark.parametrize(
    ("family", "before", "replayed"),
    [  # every two of them together
        ("gpt2", True, "captured"),
        pytest.param("gpt2", False, "launched one by one", marks=pytest.mark.slow),
        pytest.param("t5", True, "launched one by one", marks=pytest.mark.slow),
        pytest.param("t5", False, "captured", marks=pytest.mark.slow),
    ],
    indirect=["replayed"],
)
def test_lora_trains_as_on_stock_whether_it_comes_first_or_last(family, before, graphs):
    make = functools.partial(tiny.FAMILIES[family], **SMALL[family])
    stock = with_lora(make(), family)
    if before:
        fused = with_lora(fuseopt.initialize(make(), CONFIG), family)
    else:
        fused = fuseopt.initialize(with_lora(make(), family), CONFIG)
    expected = train(stock, 6)
    torch.testing.assert_close(train(fused, 6), expected, rtol=1e-5, atol=0)
    assert expected[-1] != expected[0] and (graphs.compiled, graphs.calls) == (1, 6)
    assert_same_weights(fused, stock)


@pytest.mark.slow
def test_moving_averages_of_the_weights(graphs):
    averages = []
    for model in stock_and_fused(model_of(), CONFIG):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        for _ in range(3):
            train(model, 1)
            average.update_parameters(model)
        averages.append(average.module.eval())
    torch.testing.assert_close(*map(tiny.logits, averages), rtol=1e-4, atol=1e-5)
    assert averages[1].train()(**batches(averages[1], 1)[0]).loss.requires_grad and graphs.calls == 4


def test_padded_and_packed_batches(graphs):
    stock, fused = stock_and_fused(model_of(), CONFIG)
    ids = tiny.inputs(stock, batch=2, length=8)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    padded = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    packed = {"input_ids": ids[:1], "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]), "labels": ids[:1]}
    for batch in (padded, packed):
        # With a cache, its default, transformers does not look for packed sequences.
        expected, actual = stock(**batch, use_cache=False).loss, fused(**batch).loss
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
        expected.backward()
        actual.backward()
    gradients = ({name: p.grad for name, p in model.named_parameters()} for model in (fused, stock))
    tiny.assert_same_gradients(*gradients)
    assert graphs.calls == 2


# T5 on machines with a GPU, which have the processors for it: it is traced for half a minute.
@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("gpt2", ["FusedAttention", "FusedLinearCrossEntropy"]),
        pytest.param(
            "llama", ["FusedAttention", "FusedLinearCrossEntropy", "FusedRotaryEmbedding"], marks=pytest.mark.slow
        ),
        pytest.param("t5", ["FusedLinearCrossEntropy", "FusedRelativeAttention"], marks=pytest.mark.gpu),
    ],
)
def test_batches_of_any_size_with_kernels(family, kernels, graphs):
    """Rows, lengths and padding change from step to step, as in fine-tuning.

    A graph for whole rows, one for the first padded batch, and one for padded batches of all other sizes.
    """
    stock = tiny.FAMILIES[family](**SMALL[family], attn_implementation="sdpa").train()
    fusion = {"memory_efficient_fusion": True, "triton_kernels": kernels}
    fused = fuseopt.initialize(copy.deepcopy(stock), {"kernel_fusion": fusion})
    padded = [(rows, length, length // 3) for rows, length in zip((3, 2, 3, 4) * 2, LENGTHS, strict=True)]
    for rows, length, padding in [(2, 7, 0), *padded]:
        ids = tiny.inputs(stock, rows, length)["input_ids"]
        mask = torch.ones_like(ids)
        mask[0, length - padding :] = 0
        batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
        if stock.config.is_encoder_decoder:
            batch |= {"labels": ids[:, 1:].contiguous(), "decoder_attention_mask": mask[:, 1:].flip(0)}
        gradients = []
        losses = [model(**batch).loss for model in (fused, stock)]
        for model, loss in zip((fused, stock), losses, strict=True):
            model.zero_grad()
            loss.backward()
            gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
        tiny.assert_same_gradients(*gradients)
    assert graphs.compiled <= 3 and graphs.calls == 1 + len(LENGTHS)
