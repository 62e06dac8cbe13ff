"""What a joint graph returns in float32 of a 16-bit matmul on a GPU comes from the matmul so; nothing else does."""

import copy

import pytest
import torch
from torch import nn

import fuseopt
from fuseopt.training.passes import float_gradients
from tests.training.graphs import targets, traced

aten, prims = torch.ops.aten, torch.ops.prims


def product(call, a, b):
    return call(aten.mm.default, a, b)


def as_float(call, node):
    return call(prims.convert_element_type.default, node, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_returned_product_is_in_float32(dtype):
    graph = traced(lambda call, a, b: (as_float(call, product(call, a, b)),), (3, 4), (4, 5), dtype=dtype)
    float_gradients.run(graph)
    assert targets(graph) == [aten.mm.dtype]
    (matmul,) = graph.find_nodes(op="call_function", target=aten.mm.dtype)
    assert matmul.args[2] is torch.float32 and matmul.meta["val"].dtype is torch.float32
    graph.lint()


def test_through_views_with_the_strides_that_they_had():
    def transposed(call, a, b):
        return (as_float(call, call(aten.permute.default, product(call, a, b), [1, 0])),)

    graph = traced(transposed, (3, 4), (4, 5))
    (old,) = graph.find_nodes(op="call_function", target=prims.convert_element_type.default)
    expected = old.meta["val"]
    float_gradients.run(graph)
    assert targets(graph) == [aten.mm.dtype, aten.permute.default]
    (view,) = graph.find_nodes(op="call_function", target=aten.permute.default)
    found = view.meta["val"]
    assert (found.dtype, found.shape, found.stride()) == (torch.float32, expected.shape, expected.stride())


OTHERS = {
    "worked with": lambda call, a, b: (call(aten.mul.Tensor, as_float(call, product(call, a, b)), 2.0),),
    "asked for twice": lambda call, a, b: (as_float(call, p := product(call, a, b)), p),
    "a view asked for twice": lambda call, a, b: (as_float(call, v := call(aten.t.default, product(call, a, b))), v),
    "to another dtype": lambda call, a, b: (
        call(prims.convert_element_type.default, product(call, a, b), torch.float64),
    ),
    "no product": lambda call, a, b: (as_float(call, call(aten.add.Tensor, a, a)),),
}


@pytest.mark.parametrize("name", OTHERS)
def test_gradients_that_need_no_widening_stay_as_traced(name):
    graph = traced(OTHERS[name], (4, 4), (4, 4))
    before = targets(graph)
    float_gradients.run(graph)
    assert targets(graph) == before


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"dtype": torch.float64}])
def test_on_a_cpu_and_in_other_dtypes_all_stays(options):
    graph = traced(lambda call, a, b: (as_float(call, product(call, a, b)),), (4, 4), (4, 4), **options)
    before = targets(graph)
    float_gradients.run(graph)
    assert targets(graph) == before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_nearer_to_float64_than_rounded_ones(dtype):
    torch._dynamo.reset()
    torch.manual_seed(0)
    stock = nn.Sequential(nn.Linear(96, 160), nn.GELU(), nn.Linear(160, 40, bias=False)).cuda().train()
    fused, exact = copy.deepcopy(stock), copy.deepcopy(stock).double()
    fuseopt.initialize(fused, {"kernel_fusion": {"memory_efficient_fusion": True}}, strict=True)
    x = torch.randn(1000, 96, device="cuda")
    scale = 2.0**14  # or float16's gradients of activations would be too small for all its digits
    for model in (stock, fused):
        with torch.autocast("cuda", dtype):
            loss = model(x).square().mean()
        (scale * loss).backward()
    (scale * exact(x.double()).square().mean()).backward()
    for name in ("0.weight", "2.weight"):
        expected = exact.get_parameter(name).grad
        errors = [(model.get_parameter(name).grad - expected).norm() / expected.norm() for model in (fused, stock)]
        assert 0 < errors[0] <= errors[1] and fused.get_parameter(name).grad.dtype == torch.float32
