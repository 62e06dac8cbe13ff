"""The tanh GELU of a large product with a bias is a part of the product; whatever is no such GELU stays."""

import copy
import math

import pytest
import torch
from torch import nn
from transformers.activations import NewGELUActivation

import fuseopt
from fuseopt.ops.tuned_matmul import RAW, WITH_GELU
from fuseopt.training.passes import autotuned_gemm, gelu_epilogues
from tests.training.graphs import targets, traced

aten, prims = torch.ops.aten, torch.ops.prims
ROWS, INNER, COLUMNS = 2048, 1024, 4096


SHAPES = (COLUMNS,), (ROWS, INNER), (INNER, COLUMNS)


def gelu(call, x, *, cubic: float = 0.044715, alpha: int = 1):
    """As NewGELUActivation under autocast, its tanh said as a sigmoid."""
    half = call(aten.mul.Tensor, x, 0.5)
    cube = call(aten.pow.Tensor_Scalar, call(prims.convert_element_type.default, x, torch.float32), 3.0)
    inner = call(aten.add.Tensor, x, call(aten.mul.Tensor, cube, cubic), alpha=alpha)
    inner = call(aten.mul.Tensor, inner, math.sqrt(2 / math.pi))
    sigmoid = call(aten.sigmoid.default, call(aten.mul.Tensor, inner, 2.0))
    return call(aten.mul.Tensor, half, call(aten.mul.Tensor, sigmoid, 2.0))


def run(graph):
    """Both passes, in the order in which the partitioner runs them."""
    gelu_epilogues.run(graph)
    autotuned_gemm.run(graph)


def layer(call, bias, left, right, activation=gelu):
    """The sum, and what a layer behind it gets, through views as transformers has them."""
    kept = call(aten.addmm.default, bias, left, right)
    x = call(aten.view.default, kept, [2, ROWS // 2, COLUMNS])
    activated = call(prims.convert_element_type.default, activation(call, x), kept.meta["val"].dtype)
    return kept, call(aten.view.default, activated, [ROWS, COLUMNS])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sum_and_gelu_come_of_one_operation(dtype):
    graph = traced(layer, *SHAPES, dtype=dtype)
    before = [node.meta["val"] for node in graph.output_node().args[0]]
    run(graph)
    graph.lint()
    (both,) = graph.find_nodes(op="call_function", target=WITH_GELU["cuda"])
    assert [str(argument) for argument in both.args] == ["input_1", "input_2", "input_0", "True"]
    kept, activated = graph.output_node().args[0]
    assert kept.args == (both, 0) and len(targets(graph)) == 5
    after = [kept.meta["val"], activated.meta["val"]]
    assert [(v.shape, v.stride(), v.dtype) for v in after] == [(v.shape, v.stride(), v.dtype) for v in before]
    while activated.target is aten.view.default:
        activated = activated.args[0]
    assert activated.args == (both, 1)


def of_two(call, bias, left, right):
    kept = call(aten.addmm.default, bias, left, right)
    return kept, call(aten.mul.Tensor, kept, call(aten.mul.Tensor, kept, bias))


def doubled(call, x, times: int = 20):
    for _ in range(times):
        x = call(aten.add.Tensor, x, x)
    return x


OTHERS = {
    "another constant": lambda call, *given: layer(call, *given, lambda call, x: gelu(call, x, cubic=0.0447)),
    "another function": lambda call, *given: layer(call, *given, lambda call, x: call(aten.tanh.default, x)),
    "more than the sum goes in": of_two,
    "not a number everywhere": lambda call, *given: layer(
        call, *given, lambda call, x: call(aten.tanh.default, call(aten.pow.Tensor_Scalar, x, 0.5))
    ),
    "infinite somewhere": lambda call, *given: layer(call, *given, lambda call, x: call(aten.div.Tensor, x, x)),
    "a number too large": lambda call, *given: layer(
        call, *given, lambda call, x: call(aten.sigmoid.default, call(aten.mul.Tensor, x, 1e4))
    ),
    "each twice what went before": lambda call, *given: layer(call, *given, doubled),
    "more of the cube": lambda call, *given: layer(call, *given, lambda call, x: gelu(call, x, alpha=2)),
    "without a bias": lambda call, bias, left, right: (gelu(call, call(aten.mm.default, left, right)),),
    "not in the dtype of the sum": lambda call, *given: (gelu(call, call(aten.addmm.default, *given)),),
}


@pytest.mark.parametrize("name", OTHERS)
def test_products_without_a_gelu_of_their_own_get_no_epilogue(name):
    graph = traced(OTHERS[name], *SHAPES)
    before = targets(graph)
    run(graph)
    graph.lint()
    products = (aten.addmm.default, aten.mm.default)
    assert targets(graph) == [RAW["cuda"] if target in products else target for target in before]


def test_what_else_the_sum_goes_to_still_gets_it():
    def forward(call, *given):
        kept, activated = layer(call, *given)
        return kept, activated, call(aten.mul.Tensor, kept, 3.0)

    graph = traced(forward, *SHAPES)
    run(graph)
    graph.lint()
    kept, _, tripled = graph.output_node().args[0]
    assert tripled.args == (kept, 3.0)


@pytest.mark.parametrize("columns", [COLUMNS - 7, COLUMNS - 4, COLUMNS - 1])
def test_a_sum_that_the_library_cannot_keep_has_a_gelu_of_its_own(columns):
    def forward(call, bias, left, right):
        kept = call(aten.addmm.default, bias, left, right)
        return kept, call(prims.convert_element_type.default, gelu(call, kept), torch.bfloat16)

    for width, target in ((COLUMNS, WITH_GELU["cuda"]), (columns, RAW["cuda"])):
        graph = traced(forward, (width,), (ROWS, INNER), (INNER, width))
        run(graph)
        assert target in targets(graph)


class MLP(nn.Module):
    def __init__(self, columns: int = COLUMNS) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(INNER, columns), nn.Linear(columns, INNER), NewGELUActivation()

    def forward(self, x):
        return self.down(self.act(self.up(x)))


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [COLUMNS, COLUMNS - 7])
def test_gradients_are_no_further_from_float64_than_stock_ones(columns):
    torch._dynamo.reset()
    torch.manual_seed(0)
    stock = MLP(columns).cuda().train()
    fused, exact = copy.deepcopy(stock), copy.deepcopy(stock).double()
    fuseopt.initialize(fused, {"kernel_fusion": {"memory_efficient_fusion": True}}, strict=True)
    x = torch.randn(ROWS, INNER, device="cuda")

    def step(model, x):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=x.dtype is torch.float32):
            loss = model(x).square().mean()
        loss.backward()

    step(fused, x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(fused, x)
    assert [event.count for event in profile.key_averages() if event.key == "fuseopt::tuned_matmul_gelu"] == (
        [1] if columns == COLUMNS else []
    )
    step(stock, x)
    step(exact, x.double())
    for name, expected in exact.named_parameters():
        errors = [(model.get_parameter(name).grad - expected.grad).norm() for model in (fused, stock)]
        assert 0 < errors[0] <= 1.1 * errors[1]
