"""A GELU's tanh said as a sigmoid is as near to the function as tanh is, and no other tanh is touched."""

import math

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fuseopt.training.passes import tanh_gelu

aten = torch.ops.aten


def gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x.pow(3))))


def gelu_and_gradient(x):
    """As AOT Autograd has them: the gradient made of the square of the forward's tanh."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x.pow(3))
    tanh = torch.tanh(inner)
    slope = math.sqrt(2.0 / math.pi) * (1 + 3 * 0.044715 * x * x)
    return 0.5 * x * (tanh + 1.0), 0.5 * (tanh + 1.0) + 0.5 * x * (1 - tanh * tanh) * slope


def added_and_returned(x):
    tanh = torch.tanh(x)
    return tanh + 1.0, tanh


def traced(function, dtype: torch.dtype = torch.float32, device: str = "cuda") -> fx.GraphModule:
    """The graph of `function`, said to be on `device`."""
    module = make_fx(function)(torch.randn(5, dtype=dtype))
    with FakeTensorMode():
        value = torch.empty(5, dtype=dtype, device=device)
    for node in module.graph.nodes:
        node.meta["val"] = value
    return module


def shortened(module: fx.GraphModule) -> bool:
    before = len(module.graph.find_nodes(op="call_function", target=aten.tanh.default))
    tanh_gelu.run(module.graph)
    module.recompile()
    after = len(module.graph.find_nodes(op="call_function", target=aten.tanh.default))
    assert before == 1 and after in (0, 1)
    return after == 0


def test_no_further_from_float64_than_tanh():
    x = torch.cat((torch.linspace(-12, 12, 20001), torch.logspace(-30, 0, 1001), -torch.logspace(-30, 0, 1001)))
    module = traced(gelu_and_gradient)
    assert shortened(module)
    exact = gelu_and_gradient(x.double())
    for result, stock, value in zip(module(x), gelu_and_gradient(x), exact, strict=True):
        scale = value.abs().clamp(min=1e-3)
        error, allowed = ((y - value).abs().div(scale).max() for y in (result, stock))
        assert error <= max(2 * allowed, 1e-6)


def test_infinite_and_huge_inputs_give_what_gelu_gives():
    module = traced(gelu)
    assert shortened(module)
    assert module(torch.tensor([math.inf, 1e30])).tolist() == gelu(torch.tensor([math.inf, 1e30])).tolist()


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (torch.tanh, {}),
        (lambda x: torch.tanh(x) * x, {}),
        (added_and_returned, {}),
        (gelu, {"dtype": torch.float64}),
        (gelu, {"device": "cpu"}),
    ],
)
def test_other_tanh_stay(function, options):
    assert not shortened(traced(function, **options))
