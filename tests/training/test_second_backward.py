"""Compiled steps with several backward passes, and gradients that are differentiated again."""

import copy

import pytest
import torch
from torch import nn

import fuseopt
from fuseopt.errors import CompileError
from tests import tiny

WHOLE = {"n_layer": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
with_inductor = pytest.mark.parametrize(
    "graphs", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)], indirect=True
)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@with_inductor
def test_a_graph_that_is_retained_gives_the_gradients_of_stock_each_time(graphs):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stock = tiny.gpt2(**WHOLE).to(device).train()
    fused = fuseopt.initialize(copy.deepcopy(stock), "training", strict=True)
    ids = tiny.inputs(stock)["input_ids"]
    found = []
    for model in (fused, stock):
        outputs = model(input_ids=ids, labels=ids)
        # Two losses by one forward, as of several tasks, and the first once more.
        second = outputs.logits.float().square().mean()
        passes = []
        for loss, keep in [(outputs.loss, True), (second, True), (outputs.loss, False)]:
            model.zero_grad()
            loss.backward(retain_graph=keep)
            passes.append(gradients(model))
        found.append(passes)
    for actual, expected in zip(*found, strict=True):
        tiny.assert_same_gradients(actual, expected)
    assert (graphs.compiled, graphs.calls) == (1, 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden).square().mean(), hidden.T


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_first_derivatives_with_create_graph_are_those_of_stock(graphs):
    torch.manual_seed(0)
    stock = Net()
    fused = fuseopt.initialize(copy.deepcopy(stock), {"kernel_fusion": {"memory_efficient_fusion": True}}, strict=True)
    x = torch.randn(4, 8)
    for model in (fused, stock):
        loss, hidden = model(x)
        (loss + hidden.sum()).backward(create_graph=True)
        assert all(parameter.grad.requires_grad for parameter in model.parameters())
    for parameter, expected in zip(fused.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.detach(), expected.grad.detach())
        parameter.grad = expected.grad = None
    assert graphs.calls == 1


@pytest.mark.parametrize("output", [0, 1])
def test_a_second_derivative_names_fuseopt_and_what_to_do(output, graphs):
    torch.manual_seed(0)
    model = fuseopt.initialize(Net(), {"kernel_fusion": {"memory_efficient_fusion": True}}, strict=True)
    outputs = model(torch.randn(4, 8))
    slopes = torch.autograd.grad(outputs[output].sum(), list(model.first.parameters()), create_graph=True)
    with pytest.raises(CompileError, match=r"cannot be differentiated again .*: call fuseopt.restore\(model\)"):
        sum(slope.square().sum() for slope in slopes).backward()
    fuseopt.restore(model)
    slopes = torch.autograd.grad(model(torch.randn(4, 8))[output].sum(), model.first.weight, create_graph=True)
    slopes[0].square().sum().backward()
    assert model.first.weight.grad.norm() > 0
