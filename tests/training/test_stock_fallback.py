"""A training step that cannot be compiled runs as stock, with one warning and the reason in the report."""

import copy
import unittest.mock
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fuseopt
from fuseopt.errors import CompileError
from fuseopt.training import partitioner
from tests import tiny
from tests.pairs import stock_and_fused

CONFIG = {"kernel_fusion": {"memory_efficient_fusion": True}}
WHOLE = {
    "gpt2": {"n_layer": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {"num_hidden_layers": 1},
}
X = torch.linspace(-1, 1, 4 * 8).view(4, 8)


class Net(nn.Module):
    """A model with state that a failed attempt could change: random generators and buffers."""

    def __init__(self, *, breaks: bool = False):
        super().__init__()
        self.inner, self.norm, self.dropout = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.breaks, self.calls = breaks, 0

    def forward(self, x, *, scale=1.0):
        self.calls += 1
        x = self.dropout(self.norm(self.inner(x)))
        if self.breaks and x.sum().item() > 1e9:
            return x
        return x * scale


def seeded(make):
    torch.manual_seed(0)
    return make().train()


def step(model, *args, **kwargs):
    """The loss of a step with a fixed seed."""
    torch.manual_seed(3)
    outputs = model(*args, **kwargs)
    loss = outputs.loss if hasattr(outputs, "loss") else outputs.square().mean()
    loss.backward()
    return loss.detach()


def assert_same_step(fused, stock, *args, **kwargs):
    actual, generator = step(fused, *args, **kwargs), torch.get_rng_state()
    torch.testing.assert_close(actual, step(stock, *args, **kwargs), rtol=1e-5, atol=0)
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(fused.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-6)
    for name, buffer in stock.named_buffers():
        torch.testing.assert_close(fused.get_buffer(name), buffer)
    return generator


def fails_to_compile(graphs, monkeypatch):
    def refuse(*_, **__):
        torch.rand(3)
        raise RuntimeError("no code today\nand more of it")

    monkeypatch.setattr(graphs, "compile_graph", refuse)
    return lambda: Net()


def fails_to_run(graphs, monkeypatch):
    def compile_graph(*_, **__):
        def run(*inputs):
            torch.rand(3)
            raise AssertionError("wrong stride at dimension 1")

        return run

    monkeypatch.setattr(graphs, "compile_graph", compile_graph)
    return lambda: Net()


def cannot_be_traced(graphs, monkeypatch):
    return lambda: Net(breaks=True)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (cannot_be_traced, "Could not guard on data-dependent expression"),
        (fails_to_compile, "RuntimeError: no code today"),
        (fails_to_run, "AssertionError: wrong stride at dimension 1"),
    ],
)
def test_a_step_that_cannot_be_compiled_trains_as_stock_from_the_same_state(fault, reason, graphs, monkeypatch):
    stock, fused = stock_and_fused(seeded(fault(graphs, monkeypatch)), CONFIG, strict=False)
    with pytest.warns(UserWarning, match=f"fuseopt: the training step of Net cannot be compiled .*{reason}") as caught:
        generator = assert_same_step(fused, stock, X)
    assert torch.equal(generator, torch.get_rng_state())
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    assert fused.calls == stock.calls == 1
    tried = graphs.calls
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_step(fused, stock, X[:3])
    (line,) = fuseopt.report(fused).since
    assert (
        line.startswith("training steps: the model's own forward, as 'inductor' cannot compile it") and reason in line
    )
    assert fused.calls == stock.calls == 2 and graphs.calls == tried


def test_strict_raises_in_the_call_and_leaves_the_model_as_it_was(graphs):
    _, fused = stock_and_fused(seeded(lambda: Net(breaks=True)), CONFIG)
    for copied in (fused, copy.deepcopy(fused)):
        with pytest.raises(CompileError, match=r"the training step of Net .* initialize without strict=True") as caught:
            copied(X)
        assert "data-dependent" in str(caught.value.__cause__)
        assert all(parameter.grad is None for parameter in fused.parameters())


def test_strict_may_come_later_and_go_again(graphs):
    _, fused = stock_and_fused(seeded(lambda: Net(breaks=True)), CONFIG, strict=False)
    with pytest.warns(UserWarning, match="cannot be compiled"):
        fused(X)
    with pytest.raises(CompileError):
        fuseopt.initialize(fused, CONFIG, strict=True)(X)
    with pytest.warns(UserWarning, match="cannot be compiled"):
        fuseopt.initialize(fused, CONFIG)(X)


def test_an_error_of_stock_is_raised_as_it_is_and_later_steps_are_compiled(graphs):
    stock, fused = stock_and_fused(seeded(Net), CONFIG, strict=False)
    for wrong in ({"scale": torch.ones(3, 5)}, {"factor": 2.0}):
        with pytest.raises((RuntimeError, TypeError)) as expected:
            stock(X, **wrong)
        with pytest.raises(type(expected.value)) as raised:
            fused(X, **wrong)
        assert str(raised.value) == str(expected.value) and raised.value.__context__ is None
    assert fuseopt.report(fused).since == ()
    fused(X)
    assert graphs.calls == 1


@pytest.mark.parametrize("when", ["compiling", "running"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()])
def test_what_is_the_users_is_raised_and_is_no_reason_to_fall_back(when, error, graphs, monkeypatch):
    def fail(*_, **__):
        raise error

    plain = graphs.compile_graph
    with monkeypatch.context() as failing:
        failing.setattr(graphs, "compile_graph", fail if when == "compiling" else lambda *_, **__: fail)
        _, fused = stock_and_fused(seeded(Net), CONFIG, strict=False)
        with warnings.catch_warnings(), pytest.raises(type(error)) as raised:
            warnings.simplefilter("error")
            fused(X)
        assert raised.value is error and fused.calls == 0
    torch._dynamo.reset()
    assert graphs.compile_graph is plain
    fused(X)
    assert graphs.calls >= 1 and fuseopt.report(fused).since == ()


# Whether the user's change comes before fuseopt's, once with each family.
families_and_times = pytest.mark.parametrize(
    ("family", "before"),
    [
        ("gpt2", True),
        ("llama", False),
        pytest.param("gpt2", False, marks=pytest.mark.slow),
        pytest.param("llama", True, marks=pytest.mark.slow),
    ],
)


def own_loss(logits, labels, vocab_size, **kwargs):
    """A user's loss, which reads the logits by index, by method and by function."""
    rows = logits[:, :-1].reshape(-1, vocab_size).float()
    return F.cross_entropy(rows, labels[:, 1:].reshape(-1)) + 1e-2 * torch.logsumexp(logits, -1).square().mean()


@families_and_times
def test_a_loss_of_ones_own_is_compiled(family, before, graphs):
    stock = tiny.FAMILIES[family](**WHOLE[family]).train()
    fused = copy.deepcopy(stock)
    stock.loss_function = own_loss
    if before:
        fused.loss_function = own_loss
    fuseopt.initialize(fused, "training", strict=True)
    fused.loss_function = own_loss
    ids = tiny.inputs(stock)["input_ids"]
    assert_same_step(fused, stock, input_ids=ids, labels=ids)
    assert (graphs.compiled, graphs.calls) == (1, 1)
    outputs = fused(input_ids=ids, labels=ids)
    torch.testing.assert_close(outputs.logits.tensor(), stock(input_ids=ids).logits)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True", "ignore:Model .* tie_word_embeddings")
@families_and_times
def test_lora_on_the_head_is_compiled(family, before, graphs):
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM", init_lora_weights=False)
    models = []
    for fuses in (False, True):
        model = tiny.FAMILIES[family](**WHOLE[family])
        if fuses and not before:
            fuseopt.initialize(model, "training", strict=True)
        torch.manual_seed(3)
        model = peft.get_peft_model(model, options).train()
        models.append(fuseopt.initialize(model, "training", strict=True) if fuses and before else model)
    stock, fused = models
    ids = tiny.inputs(stock.get_base_model())["input_ids"]
    for model in (stock, fused):
        step(model, input_ids=ids, labels=ids)
    trained = {name: parameter.grad for name, parameter in stock.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 and all(gradient.norm() > 0 for gradient in trained.values())
    tiny.assert_same_gradients({name: fused.get_parameter(name).grad for name in trained}, trained)
    assert (graphs.compiled, graphs.calls) == (1, 1)


def test_blocks_that_are_mocked_train_as_stock(graphs):
    """transformers' tests mock gradient checkpointing so; Dynamo does not trace a mock."""
    stock, fused = stock_and_fused(seeded(lambda: tiny.gpt2(**WHOLE["gpt2"])), "training", strict=False)
    ids, counts = tiny.inputs(stock)["input_ids"], []
    for model in (stock, fused):
        model.gradient_checkpointing_enable()
        block = model.transformer.h[0]
        watched = unittest.mock.patch.object(block, "forward", wraps=block.forward)
        expected = (
            pytest.warns(UserWarning, match="cannot be compiled") if model is fused else warnings.catch_warnings()
        )
        with watched as forward, expected:
            step(model, input_ids=ids, labels=ids)
        counts.append(forward.call_count)
    assert counts[0] == counts[1] > 0
    gradients = ({name: p.grad for name, p in model.named_parameters()} for model in (fused, stock))
    tiny.assert_same_gradients(*gradients)
    assert partitioner.compile_graph is graphs and graphs.compiled == 0
