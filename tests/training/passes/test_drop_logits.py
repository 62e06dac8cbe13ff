"""Losses of a compiled step whose logits go to torch.nn.CrossEntropyLoss and to the caller alone do without them."""

import copy
import functools
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fuseopt import ops
from fuseopt.modules import FusedLinearCrossEntropy
from fuseopt.modules.lazy_logits import LazyLogits
from fuseopt.training import partitioner

pytestmark = pytest.mark.usefixtures("each_device")
CLASSES = 31
COMPILE = functools.partial(partitioner.compile_graph, backend="aot_eager", budget=1.0)


class Model(nn.Module):
    """A body, a head, and whatever `forward(logits, target)` makes of what the head returns."""

    def __init__(self, take, bias=False):
        super().__init__()
        self.body, self.head, self.take = nn.Linear(8, 8), nn.Linear(8, CLASSES, bias=bias), take

    def forward(self, input, target):
        return self.take(self.head(self.body(input).tanh()), target)


def stock_and_compiled(take, bias=False):
    torch._dynamo.reset()
    torch.manual_seed(0)
    stock = Model(take, bias)
    fused = copy.deepcopy(stock)
    fused.head = FusedLinearCrossEntropy.from_module(fused.head, traces=False)
    return stock, fused, torch.compile(fused, backend=COMPILE, fullgraph=True)


def batch(rows=2):
    torch.manual_seed(1)
    target = torch.randint(CLASSES, (rows, 5))
    target[0, :2] = -100
    return torch.randn(rows, 5, 8), target


def loss_and_logits(logits, target):
    return nn.CrossEntropyLoss(ignore_index=-100)(logits.view(-1, logits.size(-1)), target.view(-1)), logits


def loss_alone(logits, target):
    return (F.cross_entropy(logits.reshape((-1, CLASSES)), target.flatten(), reduction="sum", label_smoothing=0.1),)


def two_losses(logits, target):
    rows, labels = logits.view(-1, CLASSES), target.view(-1)
    of_each = nn.CrossEntropyLoss(reduction="none")(rows, labels)
    return nn.CrossEntropyLoss()(rows, labels) + of_each.square().mean(), logits


def upcast(logits, target):
    return F.cross_entropy(logits.float().view(-1, CLASSES), F.pad(target, (0, 1))[..., 1:].reshape(-1)), logits


TAKEN = {
    "loss and logits": loss_and_logits,
    "loss alone": loss_alone,
    "two losses": two_losses,
    "upcast": upcast,
}


def assert_same_step(stock, fused, outputs, expected):
    torch.testing.assert_close(outputs[0], expected[0])
    for model, loss in ((stock, expected[0]), (fused, outputs[0])):
        model.zero_grad()
        loss.backward()
    gradients = ([parameter.grad for parameter in model.parameters()] for model in (fused, stock))
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("name", "bias"),
    [
        # Each step with a bias or without one.
        pytest.param(name, bias, marks=[pytest.mark.slow] * (bias == place % 2))
        for place, name in enumerate(TAKEN)
        for bias in (False, True)
    ],
)
def test_the_loss_is_that_of_the_op(name, bias):
    stock, fused, compiled = stock_and_compiled(TAKEN[name], bias)
    for rows in (2, 3, 4):
        given = batch(rows)
        with mock.patch.object(ops, "linear_cross_entropy", wraps=ops.linear_cross_entropy) as op:
            outputs, expected = compiled(*given), stock(*given)
        # Traced for the first size, and once for all others.
        assert op.called == (rows < 4)
        for logits in outputs[1:]:
            assert isinstance(logits, LazyLogits) and logits.output.computed is None
            assert (logits.shape, logits.dtype) == (expected[1].shape, expected[1].dtype)
            assert logits.output.weight is fused.head.weight and logits.output.bias is fused.head.bias
            torch.testing.assert_close(logits.tensor(), expected[1])
        assert_same_step(stock, fused, outputs, expected)


def test_gradients_reach_the_logits_too():
    stock, fused, compiled = stock_and_compiled(loss_and_logits)
    outputs, expected = compiled(*batch()), stock(*batch())
    sums = [(loss + 0.1 * logits.square().sum(),) for loss, logits in (outputs, expected)]
    assert_same_step(stock, fused, *sums)


@pytest.mark.parametrize("enabled", [True, False])
def test_dtypes_are_those_of_a_linear_layer(enabled):
    stock, fused, compiled = stock_and_compiled(loss_and_logits)
    if not enabled:
        stock.bfloat16(), fused.bfloat16()
    input, target = batch()
    input = input if enabled else input.bfloat16()
    with torch.autocast(input.device.type, torch.bfloat16, enabled=enabled):
        (loss, logits), expected = compiled(input, target), stock(input, target)
        assert loss.dtype == expected[0].dtype
    assert logits.dtype == logits.output.input.dtype == expected[1].dtype == torch.bfloat16
    torch.testing.assert_close(logits.tensor(), expected[1])
    torch.testing.assert_close(loss, expected[0], rtol=1e-2, atol=1e-2)


READ = {
    "the sum": lambda logits, target: (loss_alone(logits, target)[0] + logits.sum(), logits),
    "the sum of rows": lambda logits, target: (
        nn.CrossEntropyLoss()(logits.view(-1, CLASSES), target.view(-1)) + logits.view(-1, CLASSES).sum(),
        logits,
    ),
    "other classes": lambda logits, target: (
        nn.CrossEntropyLoss()(logits.view(CLASSES, -1), target.view(-1)[:1].expand(CLASSES) % 2),
        logits,
    ),
    "places behind classes": lambda logits, target: (nn.CrossEntropyLoss()(logits.mT, target), logits),
    "probabilities": lambda logits, target: (
        nn.CrossEntropyLoss()(logits.view(-1, CLASSES), torch.full((10, CLASSES), 1 / CLASSES)),
        logits,
    ),
    "weights": lambda logits, target: (
        F.cross_entropy(
            logits.view(-1, CLASSES), target.view(-1), torch.arange(1.0, CLASSES + 1, device=logits.device)
        ),
        logits,
    ),
    "an upcast that is returned": lambda logits, target: (loss_alone(logits.float(), target)[0], logits.float()),
    "nothing": lambda logits, target: (logits.square().mean(), logits),
}


@pytest.mark.parametrize("name", READ)
def test_logits_that_something_else_reads_are_computed(name):
    stock, fused, compiled = stock_and_compiled(READ[name])
    with mock.patch.object(ops, "linear_cross_entropy", wraps=ops.linear_cross_entropy) as op:
        outputs, expected = compiled(*batch()), stock(*batch())
    assert not op.called and isinstance(outputs[1], torch.Tensor)
    torch.testing.assert_close(outputs[1], expected[1])
    assert_same_step(stock, fused, outputs, expected)


def test_a_weight_that_the_step_makes_itself_stays_in_it():
    def forward(model, input, target):
        return loss_and_logits(torch.func.functional_call(model.head, {"weight": 2 * model.head.weight}, input), target)

    stock, fused, _ = stock_and_compiled(loss_and_logits)
    compiled = torch.compile(functools.partial(forward, fused), backend=COMPILE, fullgraph=True)
    outputs, expected = compiled(*batch()), forward(stock, *batch())
    assert isinstance(outputs[1], torch.Tensor)
    torch.testing.assert_close(outputs, expected)
