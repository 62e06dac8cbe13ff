"""Layers of a traced step that do the same, compiled once: Inductor's time grows with every node that it schedules.

A transformer's forward graph, and its backward's, is one sequence of operations many times over, on other tensors. Cut
behind one of its matmuls in every layer it falls into parts that are equal but for their inputs. Each kind of part
becomes a graph of its own, which the others call too (torch's `invoke_subgraph`). What is kept between forward and
backward has been decided before, on the whole graph. A matmul is a kernel of its own in any case, so the cut parts no
fused kernel but one that would span layers.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._inductor import inductor_prims
from torch._subclasses import FakeTensor
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

from fuseopt.training import changing_sizes
from fuseopt.training.changing_sizes import is_size
from fuseopt.training.graph_nodes import Text, is_free, is_shared, is_tensor, layout, roots
from fuseopt.training.region_boundaries import cut

aten = torch.ops.aten


def spread_seeds(graph: fx.Graph) -> None:
    """Leaves every second seed of a joint graph unused, so that those of each part begin at an aligned address."""
    for seeds in graph.find_nodes(op="call_function", target=inductor_prims.seeds):
        count, device = seeds.args
        seeds.args = (2 * count, device)
        seeds.meta["val"] = seeds.meta["val"].new_empty(2 * count)
        for lookup in list(seeds.users):
            lookup.args = (seeds, 2 * lookup.args[1])


def outline(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph, its repeated parts as calls of one graph each; `module` itself where that does not pay.

    Left alone are graphs with operations that write to what they are given, with those of higher order, and with sizes
    that come of the data.
    """
    if not (all(map(_is_understood, module.graph.nodes)) and changing_sizes.compute_first(module.graph)):
        return module
    symbols = changing_sizes.symbols(module.graph)
    parts = [_Part(nodes, symbols) for nodes in cut(_divisible(module.graph))]
    return _joined(module, parts) if parts else module


class _PartTracer(fx.Tracer):
    """By which a part that was kept on disk becomes a graph again: `fx.Tracer` would call each operation that is given
    no tensor, zeros for a gradient say, and keep what it returns as long as the graph is there.
    """

    def trace(self, *arguments: Any, **options: Any) -> fx.Graph:
        with _Recorded(self):
            return super().trace(*arguments, **options)


class _Recorded(TorchFunctionMode):
    def __init__(self, tracer: fx.Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(function, torch._ops.OpOverload):
            return self.tracer.create_proxy("call_function", function, args, kwargs or {})
        return function(*args, **(kwargs or {}))


class _PartModule(_LazyGraphModule):
    """A part's graph, whose Python is written when somebody asks for it.

    Given tensors without data, as by Inductor for every call of a step, it returns such as it did when it was traced.
    """

    def __call__(self, *inputs: Tensor) -> Any:
        # Whoever traces wants the operations.
        if get_proxy_mode() is not None or not any(isinstance(tensor, FakeTensor) for tensor in inputs):
            return super().__call__(*inputs)
        (returned,) = self.graph.output_node().args
        return tuple(_without_data(node.meta["val"]) for node in returned)


class _Part:
    """Nodes that become one call.

    Attributes:
        nodes: in their order, without those that `is_free`, which are copied to where they are needed.
        inputs: the other nodes whose results they take, in the order of first use, and behind them the graph's inputs
            from which the sizes of all these follow.
        seeds: what of `inductor_prims.seeds` they look up: the first place and the one behind the last.
    """

    def __init__(self, nodes: Sequence[fx.Node], symbols: Mapping[sympy.Symbol, fx.Node]) -> None:
        self.nodes, own = nodes, set(nodes)
        taken = [root for root in roots(nodes) if root not in own]
        sizes = changing_sizes.symbols_of([*taken, *nodes])
        self.inputs = list(dict.fromkeys([*taken, *(node for size, node in symbols.items() if size in sizes)]))
        places = [node.args[1] for node in nodes if node.target is inductor_prims.lookup_seed]
        self.seeds = (min(places), max(places) + 1) if places else (0, 0)

    def graph(self, outputs: Sequence[fx.Node]) -> fx.Graph:
        """The part by itself; it returns what `outputs`, of its nodes, do."""
        graph = fx.Graph(tracer_cls=_PartTracer)
        copies: dict[fx.Node, fx.Node] = {}
        for number, node in enumerate(self.inputs):
            copies[node] = graph.placeholder(f"input_{number}")
            copies[node].meta["val"] = self.given(node)
        for node in self.nodes:
            _copy(graph, node, copies)
            if node.target is inductor_prims.lookup_seed:
                copies[node].update_arg(1, node.args[1] - self.seeds[0])
        returned = graph.output(tuple(copies[node] for node in outputs))
        # In the strides that the nodes had when they were traced, as the next part expects.
        returned.meta["user_visible_output_idxs"] = list(range(len(outputs)))
        return graph

    def given(self, node: fx.Node) -> Tensor:
        """What the part is given of this input: of seeds those that it looks up, of others all."""
        value: Tensor = node.meta["val"]
        return value[slice(*self.seeds)] if self.takes_seeds(node) else value

    def takes_seeds(self, node: fx.Node) -> bool:
        return any(user.target is inductor_prims.lookup_seed for user in node.users)


def _joined(module: fx.GraphModule, parts: Sequence[_Part]) -> fx.GraphModule:
    """The graph as calls of the parts, one after the other."""
    (returned,) = module.graph.find_nodes(op="output")
    needed = set(roots([returned])).union(*(part.inputs for part in parts))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if is_shared(node):
            _copy(graph, node, copies)
    subgraphs: dict[str, fx.GraphModule] = {}
    names: dict[str, str] = {}
    for part in parts:
        outputs = [node for node in part.nodes if node in needed]
        if not outputs:
            continue
        subgraph = part.graph(outputs)
        name = names.setdefault(_key(subgraph), f"part_{len(names)}")
        if name not in subgraphs:
            subgraphs[name] = _PartModule({}, subgraph)
        call = graph.call_function(
            torch.ops.higher_order.invoke_subgraph,
            (graph.get_attr(name), name, *(_passed(graph, part, node, copies[node]) for node in part.inputs)),
        )
        call.meta["val"] = tuple(node.meta["val"] for node in outputs)
        for number, node in enumerate(outputs):
            copies[node] = graph.call_function(operator.getitem, (call, number))
            copies[node].meta = dict(node.meta)
    _copy(graph, returned, copies)
    joined = _LazyGraphModule(subgraphs, graph)
    joined.meta.update(module.meta)
    return joined


def _passed(graph: fx.Graph, part: _Part, node: fx.Node, copy: fx.Node) -> fx.Node:
    if not part.takes_seeds(node):
        return copy
    own = graph.call_function(aten.slice.Tensor, (copy, 0, *part.seeds))
    own.meta["val"] = part.given(node)
    return own


def _copy(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Copies a node, and what is free among its inputs; notes in `copies` what became of them."""
    if node not in copies:
        for argument in node.all_input_nodes:
            if argument not in copies:
                assert is_free(argument), argument
                _copy(graph, argument, copies)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return copies[node]


def _divisible(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that go into parts; the results of an operation that has several stand behind it."""
    found: list[fx.Node] = []
    for node in graph.nodes:
        if (
            node.op == "call_function"
            and node.target is not operator.getitem
            and not (is_shared(node) or is_free(node))
        ):
            found += [node, *(user for user in node.users if user.target is operator.getitem)]
    return found


def _is_understood(node: fx.Node) -> bool:
    if node.op == "output" or is_size(node):
        return True
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        # Of an operation with several results, those that are used are looked at by themselves.
        several = isinstance(node.meta.get("val"), (tuple, list))
        return not node.target._schema.is_mutable and (several or is_tensor(node))
    return is_tensor(node) and (node.op == "placeholder" or node.target is operator.getitem)


def _key(graph: fx.Graph) -> str:
    """What is the same for graphs that compute the same."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda argument: Text(f"%{numbers[argument]}"))
        given = layout(node.meta["val"]) if node.op == "placeholder" else ""
        lines.append(f"{node.op} {given or node.target} {arguments}")
    return "\n".join(lines)


def _without_data(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
