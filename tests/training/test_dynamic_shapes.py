"""Sizes of a traced graph, computed in front from those that it is given, are what they were."""

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from fuseopt.training import dynamic_shapes

aten = torch.ops.aten


def reshaped(x, y):
    """Sizes that are products, sums, quotients and remainders of two."""
    rows = torch.cat([x.sin(), y.cos()]).view(-1, 4)
    padded = torch.cat([rows, x.new_zeros(rows.shape[0] % 3 + 1, 4)])
    halves = padded[: padded.shape[0] // 2]
    return halves * halves.shape[0], padded.new_full((3 * padded.shape[0] - 1,), 2.0), x.expand(2, *x.shape)


def traced(function, *inputs) -> fx.GraphModule:
    """As AOT Autograd hands it to a compiler, for sizes that change."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=aot_autograd(fw_compiler=keep), dynamic=True, fullgraph=True)(*inputs)
    return graphs[0]


def test_sizes_are_computed_in_front_and_are_what_they_were():
    module = traced(reshaped, torch.randn(3, 8), torch.randn(5, 8))
    # As partitioned graphs have them.
    for node in list(module.graph.find_nodes(op="call_function", target=aten.view.default)):
        with module.graph.inserting_after(node):
            size = module.graph.call_function(aten.sym_size.int, (node, 0))
            size.meta["val"] = node.meta["val"].shape[0]
    assert dynamic_shapes.compute_first(module.graph)
    module.graph.lint()
    module.recompile()
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    are_sizes = [dynamic_shapes.is_size(node) for node in calls]
    assert sum(are_sizes) >= 4 and are_sizes == sorted(are_sizes, reverse=True)
    assert not module.graph.find_nodes(op="call_function", target=aten.sym_size.int)
    given = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    symbols = list(dynamic_shapes.symbols(module.graph))
    for rows in ((3, 5), (4, 7), (9, 2)):
        inputs = [torch.randn(number, 8) for number in rows]
        tensors, sizes = iter(inputs), dict(zip(symbols, _in_order(given, inputs), strict=True))
        arguments = [sizes[v.node.expr] if isinstance(v, torch.SymInt) else next(tensors) for v in given]
        torch.testing.assert_close(module(*arguments), reshaped(*inputs))


def _in_order(given, inputs):
    """The sizes of `inputs` in the order in which a graph is given their symbols."""
    tensors = iter([value for value in given if isinstance(value, torch.Tensor)])
    found = {}
    for tensor in inputs:
        for symbol, size in zip(next(tensors).shape, tensor.shape, strict=True):
            if isinstance(symbol, torch.SymInt):
                found.setdefault(symbol.node.expr, size)
    return [found[value.node.expr] for value in given if isinstance(value, torch.SymInt)]


def test_sizes_that_only_tensors_have_are_left_alone():
    graph = make_fx(reshaped, tracing_mode="symbolic")(torch.randn(3, 8), torch.randn(5, 8)).graph
    before = [node.target for node in graph.nodes]
    assert not dynamic_shapes.compute_first(graph)
    assert [node.target for node in graph.nodes] == before


def test_a_graph_of_constant_sizes_stays_as_it_is():
    graph = make_fx(reshaped, tracing_mode="fake")(torch.randn(3, 8), torch.randn(5, 8)).graph
    before = list(graph.nodes)
    assert dynamic_shapes.compute_first(graph) and list(graph.nodes) == before
