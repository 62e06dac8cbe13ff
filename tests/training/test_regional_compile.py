"""A graph cut into its repeated parts computes what it did, to the bit, and every kind of part is there once."""

import copy
import pickle

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor_config
from torch._inductor import inductor_prims
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fuseopt
from fuseopt.training import partitioner, region_boundaries, regional_compile
from tests.training_steps import assert_slope

aten = torch.ops.aten
INVOKE = torch.ops.higher_order.invoke_subgraph
SIZE = 8


@pytest.fixture(autouse=True)
def short_parts_pay(monkeypatch):
    monkeypatch.setattr(region_boundaries, "_NODES_PER_CALL", 0)


def gelu(x, weight):
    return x + F.gelu(x @ weight)


def relu_of_heads(x, weight):
    """With views on both sides of the matmul, and of what is handed on."""
    heads = x.view(-1, 2, SIZE // 2).transpose(0, 1).relu()
    return (heads.transpose(0, 1).reshape(x.shape) @ weight).t().contiguous().t() + x


def spread(x, weight):
    """With an operation of several results, and a constant."""
    variance, mean = torch.var_mean(x, 1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + torch.full((), 1e-5)) @ weight + x


LAYERS = (gelu, relu_of_heads, spread)


def traced(function, *inputs) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def stack(layers, returned=()):
    """A function of x and a weight a layer; besides the last result it returns those of the layers in `returned`.

    And of each of these a product with an activation, behind an operation of several results; the next takes both.
    """

    def run(x, *weights):
        found = []
        for number, (layer, weight) in enumerate(zip(layers, weights, strict=True)):
            x = layer(x, weight)
            if number in returned:
                activation = x.sigmoid()
                variance, mean = torch.var_mean(activation, 1, keepdim=True)
                found += [x, x.t(), (activation * mean).t() @ x]
                x = x * activation + variance
        return x, *found

    return run


def inputs_of(layers):
    generator = torch.Generator().manual_seed(0)
    sizes = (5, *[SIZE] * len(layers))
    return [torch.randn(size, SIZE, generator=generator) for size in sizes]


def calls(module: fx.GraphModule) -> list[str]:
    return [node.args[1] for node in module.graph.find_nodes(op="call_function", target=INVOKE)]


def assert_same(module: fx.GraphModule, outlined: fx.GraphModule, inputs) -> None:
    for result, expected in zip(outlined(*inputs), module(*inputs), strict=True):
        assert torch.equal(result, expected) and result.stride() == expected.stride()


@pytest.mark.parametrize("layer", LAYERS)
def test_equal_layers_are_one_graph(layer):
    layers = [layer] * 6
    module, inputs = traced(stack(layers), *inputs_of(layers)), inputs_of(layers)
    outlined = regional_compile.outline(module)
    names = calls(outlined)
    assert names[1:-1] == names[1:2] * (len(names) - 2) and len(names) in (6, 7)
    assert {name for name, _ in outlined.named_children()} == set(names)
    assert_same(module, outlined, inputs)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(LAYERS), min_size=3, max_size=9), st.sets(st.integers(0, 8)))
def test_layers_of_any_kind_in_any_order(layers, returned):
    module, inputs = traced(stack(layers, returned), *inputs_of(layers)), inputs_of(layers)
    outlined = regional_compile.outline(module)
    assert_same(module, outlined, inputs)
    OwnMemory(outlined).run(*inputs)


class OwnMemory(fx.Interpreter):
    """Whatever a part returns has memory of its own, which Inductor takes for granted."""

    def call_function(self, target, args, kwargs):
        if target is not INVOKE:
            return super().call_function(target, args, kwargs)
        part, _, *operands = args
        returned = part(*operands)
        memory = [tensor.untyped_storage().data_ptr() for tensor in (*returned, *operands)]
        assert not set(memory[: len(returned)]) & set(memory[len(returned) :])
        assert len(set(memory[: len(returned)])) == len(returned)
        return returned


class Operations(TorchDispatchMode):
    """Those that are run inside."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func)
        return func(*args, **(kwargs or {}))


def test_a_backward_begins_with_what_stands_behind_the_layers_and_a_weight():
    def backward(gradient, *layers):
        found = []
        for up, down, hidden in zip(*[iter(layers)] * 3, strict=True):
            gradient = gradient.softmax(1)
            back = gradient @ up
            activation = hidden.sigmoid()
            found += [(activation * hidden).t() @ gradient, gradient.sum(0)]
            gradient = (back * activation) @ down
        return gradient, *found

    inputs = [torch.randn(size) for size in ((3, 4), *[(4, 8), (8, 4), (3, 8)] * 5)]
    module = traced(backward, *inputs)
    outlined = regional_compile.outline(module)
    head, weight, rest, *_ = outlined.graph.find_nodes(op="call_function", target=INVOKE)
    (gradient,), (of_weight,) = head.users, weight.users
    hidden = list(outlined.graph.find_nodes(op="placeholder"))[3]
    assert weight.args[2:] == (hidden, gradient) and {hidden, gradient} < set(rest.all_input_nodes)
    assert of_weight.meta["val"].shape == (8, 4) and all(user.op == "output" for user in of_weight.users)
    assert_same(module, outlined, inputs)


def test_without_data_no_operation_of_a_part_is_run():
    layers = [relu_of_heads] * 6
    outlined = regional_compile.outline(traced(stack(layers), *inputs_of(layers)))
    for part in outlined.children():
        given = [node.meta["val"] for node in part.graph.find_nodes(op="placeholder")]
        with given[0].fake_mode:
            expected = fx.Interpreter(part).run(*given)
            with Operations() as operations:
                found = part(*given)
        assert operations.seen == {aten.empty_strided.default}
        assert [(value.shape, value.stride()) for value in found] == [(one.shape, one.stride()) for one in expected]


def test_a_part_read_from_disk_keeps_no_tensor():
    layers = [spread] * 3
    outlined = regional_compile.outline(traced(stack(layers), *inputs_of(layers)))
    part = outlined.get_submodule(calls(outlined)[0])
    read = pickle.loads(pickle.dumps(part))
    assert read.graph.find_nodes(op="call_function", target=aten.full.default)
    assert not read.graph.find_nodes(op="get_attr")
    assert not [name for name, value in vars(read).items() if isinstance(value, torch.Tensor)]
    inputs = [torch.randn(node.meta["val"].shape) for node in part.graph.find_nodes(op="placeholder")]
    assert_same(part, read, inputs)


def test_a_trace_of_the_parts_has_their_operations():
    layers = [spread] * 6
    inputs = inputs_of(layers)
    module = traced(stack(layers), *inputs)
    outlined = regional_compile.outline(module)
    assert_same(module, traced(outlined, *inputs), inputs)


@pytest.mark.parametrize(("factors", "transposed"), [((2.0, 3.0), False), ((2.0, 2.0), True)])
def test_parts_that_differ_in_a_number_or_a_stride_are_two(factors, transposed):
    def layers(x, *tensors):
        for number, (weight, added) in enumerate(zip(tensors[:10], tensors[10:], strict=True)):
            x = F.gelu(x @ weight + added) * factors[number % 2]
        return (x,)

    inputs = inputs_of([gelu] * 10)
    inputs += [torch.randn(SIZE, 5).t() if number % 2 and transposed else torch.randn(5, SIZE) for number in range(10)]
    module = traced(layers, *inputs)
    outlined = regional_compile.outline(module)
    _, first, second, *others, _ = calls(outlined)
    assert first != second and others == [first, second] * 3 + [first]
    assert_same(module, outlined, inputs)


def seeded(layers: int) -> fx.GraphModule:
    """Layers that draw by Inductor's seeds, one each, as after its passes."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    weights = [graph.placeholder(f"weight_{number}") for number in range(layers)]
    seeds = graph.call_function(inductor_prims.seeds, (layers, torch.device("cpu")))
    for number, weight in enumerate(weights):
        seed = graph.call_function(inductor_prims.lookup_seed, (seeds, number))
        x = graph.call_function(aten.mm.default, (x, weight))
        for op, *operands in ((aten.add.Tensor, seed), (aten.sin.default,), (aten.cos.default,)):
            x = graph.call_function(op, (x, *operands))
    graph.output((x,))
    module = fx.GraphModule({}, graph)
    given = iter(inputs_of([gelu] * layers))
    for node in module.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = next(given)
        elif node.op == "call_function":
            arguments = fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
            node.meta["val"] = node.target(*arguments[0], **arguments[1])
    return module


def test_each_part_is_given_its_own_seeds():
    module = seeded(6)
    regional_compile.spread_seeds(module.graph)
    module.recompile()
    (seeds,) = module.graph.find_nodes(op="call_function", target=inductor_prims.seeds)
    assert seeds.args[0] == 12 and [user.args[1] for user in seeds.users] == [0, 2, 4, 6, 8, 10]
    outlined = regional_compile.outline(module)
    slices = outlined.graph.find_nodes(op="call_function", target=aten.slice.Tensor)
    assert [node.args[2:] for node in slices][1:] == [(place, place + 1) for place in (2, 4, 6, 8, 10)]
    assert len(set(calls(outlined))) == 3
    inputs = inputs_of([gelu] * 6)
    results = []
    for graph in (module, outlined):
        torch.manual_seed(0)
        results.append(graph(*inputs)[0])
    assert torch.equal(*results)


def test_what_is_not_understood_is_left_alone():
    layers = [gelu] * 6
    inputs = inputs_of(layers)

    def writes(x, *weights):
        x.mul_(2.0)
        return stack(layers)(x, *weights)

    # Its sizes are those of tensors, none is given.
    changing = make_fx(stack(layers), tracing_mode="symbolic")(*inputs)
    unlike = traced(stack([gelu, relu_of_heads, spread]), *inputs[:4])
    for module in (traced(writes, *inputs), changing, unlike):
        assert regional_compile.outline(module) is module


class Net(nn.Module):
    """[batch, 16] -> [batch, 16], with dropout behind every other layer."""

    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.dropout = dropout

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = x + F.dropout(F.gelu(layer(x)), self.dropout if number % 2 else 0.0)
        return x


@pytest.fixture
def outlined(monkeypatch):
    """The graphs that were cut, as calls of their parts."""
    made = []

    def outline(module, plain=regional_compile.outline):
        result = plain(module)
        made.extend([calls(result)] if result is not module else [])
        return result

    monkeypatch.setattr(regional_compile, "outline", outline)
    torch._dynamo.reset()
    return made


def test_forward_and_backward_of_a_step(outlined):
    torch.manual_seed(0)
    model, x = Net(8, 0.0), torch.randn(3, 16)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    backend = aot_autograd(fw_compiler=partitioner._run_as_it_is, partition_fn=partitioner.Partitioner(in_regions=True))
    step = torch.compile(model, backend=backend, fullgraph=True)
    gradients = torch.autograd.grad(step(x).square().sum(), list(model.parameters()))
    torch.testing.assert_close(gradients, expected)
    assert len(outlined) == 2 and all(len(set(names)) < len(names) for names in outlined)


@pytest.mark.slow
def test_inductor_compiles_parts_with_the_dropout_of_each(outlined):
    torch.manual_seed(0)
    model, x = Net(8, 0.4).double(), torch.randn(64, 16, dtype=torch.float64)
    # Below a budget of 1 masks are drawn again from their seeds, on a CPU too.
    config = {"kernel_fusion": {"memory_efficient_fusion": {"budget": 0.5}}}
    fuseopt.initialize(model.train(), config, strict=True)
    with inductor_config.patch(force_disable_caches=True):
        assert_slope(model, lambda: model(x).square().mean())
    assert len(outlined) == 2 and all(len(set(names)) < len(names) for names in outlined)


@pytest.mark.slow
def test_inductor_compiles_parts_for_sizes_that_change(outlined):
    torch.manual_seed(0)
    model = Net(8, 0.0).double()
    stock = copy.deepcopy(model)
    fuseopt.initialize(model.train(), {"kernel_fusion": {"memory_efficient_fusion": True}}, strict=True)
    with inductor_config.patch(force_disable_caches=True):
        for rows in (3, 4, 7, 64):
            x = torch.randn(rows, 16, dtype=torch.float64)
            results = [(net(x), *torch.autograd.grad(net(x).mean(), net.parameters())) for net in (model, stock)]
            torch.testing.assert_close(*results)
    # Compiled for 3 rows, and for any number of them.
    assert len(outlined) == 4 and all(len(set(names)) < len(names) for names in outlined)
