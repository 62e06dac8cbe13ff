"""Regional compilation: equal layers of a step are compiled once, which shortens Inductor's time.

Inductor's time grows with the number of nodes; a step of T5-base has about 10,000. The forward and the backward graph
of a transformer repeat one sequence of operations in every layer. Cut after one matmul in each layer, such a graph
consists of regions that are equal apart from their inputs. Equal regions become calls of one subgraph (torch's
`invoke_subgraph`).

torch's own regional compilation marks regions before the trace, and then decides layer by layer what is kept for the
backward. Here the partitioner has already decided that on the whole graph. A matmul is a kernel of its own, so a cut
after it separates few operations that would have been fused. A region returns no views, because Inductor assumes that
what a subgraph returns has memory of its own.
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

from fuseopt.training import dynamic_shapes
from fuseopt.training.dynamic_shapes import is_size
from fuseopt.training.graph_nodes import (
    Unquoted,
    is_tensor,
    is_view_or_constant,
    layout,
    materialized_inputs,
    stays_outside,
)
from fuseopt.training.region_boundaries import cut

aten = torch.ops.aten


def spread_seeds(graph: fx.Graph) -> None:
    """Leaves every second seed of a joint graph unused, so that each region's seeds are aligned to 16 bytes."""
    for seeds in graph.find_nodes(op="call_function", target=inductor_prims.seeds):
        count, device = seeds.args
        seeds.args = (2 * count, device)
        seeds.meta["val"] = seeds.meta["val"].new_empty(2 * count)
        for lookup in list(seeds.users):
            lookup.args = (seeds, 2 * lookup.args[1])


def outline(module: fx.GraphModule) -> fx.GraphModule:
    """The graph with equal regions as calls of one subgraph each; `module` itself if no cut is worth it.

    Graphs with in-place operations, higher-order operations or data-dependent sizes are returned unchanged.
    """
    if not (all(map(_is_supported, module.graph.nodes)) and dynamic_shapes.compute_first(module.graph)):
        return module
    symbols = dynamic_shapes.symbols(module.graph)
    regions = [_Region(nodes, symbols) for nodes in cut(_nodes_of_regions(module.graph))]
    return _as_calls(module, regions) if regions else module


class _RegionTracer(fx.Tracer):
    """Tracer that rebuilds a region's graph from Inductor's disk cache.

    `fx.Tracer` executes operations without tensor arguments, such as `zeros`, and the graph would keep their results
    alive. This tracer records them as nodes.
    """

    def trace(self, *arguments: Any, **options: Any) -> fx.Graph:
        with _RecordAll(self):
            return super().trace(*arguments, **options)


class _RecordAll(TorchFunctionMode):
    def __init__(self, tracer: fx.Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(function, torch._ops.OpOverload):
            return self.tracer.create_proxy("call_function", function, args, kwargs or {})
        return function(*args, **(kwargs or {}))


class _RegionModule(_LazyGraphModule):
    """A region's graph as a lazily generated module.

    Inductor calls it with fake tensors to learn the sizes of its results. Those are known from the trace, so it returns
    new fake tensors without running the operations.
    """

    def __call__(self, *inputs: Tensor) -> Any:
        # A tracer needs the operations themselves.
        if get_proxy_mode() is not None or not any(isinstance(tensor, FakeTensor) for tensor in inputs):
            return super().__call__(*inputs)
        (returned,) = self.graph.output_node().args
        return tuple(_like_traced(node.meta["val"]) for node in returned)


class _Region:
    """A region: nodes that become one call of a subgraph.

    Attributes:
        nodes: in graph order, without views and constants, which are copied into each region that needs them.
        inputs: nodes outside of the region whose results it reads, in the order of first use; then the size inputs of
            the graph on which shapes in the region depend.
        seeds: slice of `inductor_prims.seeds` that the region looks up, as (begin, end).
    """

    def __init__(self, nodes: Sequence[fx.Node], symbols: Mapping[sympy.Symbol, fx.Node]) -> None:
        self.nodes, own = nodes, set(nodes)
        taken = [root for root in materialized_inputs(nodes) if root not in own]
        sizes = dynamic_shapes.symbols_of([*taken, *nodes])
        self.inputs = list(dict.fromkeys([*taken, *(node for size, node in symbols.items() if size in sizes)]))
        places = [node.args[1] for node in nodes if node.target is inductor_prims.lookup_seed]
        self.seeds = (min(places), max(places) + 1) if places else (0, 0)

    def graph(self, outputs: Sequence[fx.Node]) -> fx.Graph:
        """The region's own graph, which returns the results of `outputs`."""
        graph = fx.Graph(tracer_cls=_RegionTracer)
        copies: dict[fx.Node, fx.Node] = {}
        for number, node in enumerate(self.inputs):
            copies[node] = graph.placeholder(f"input_{number}")
            copies[node].meta["val"] = self.given(node)
        for node in self.nodes:
            _copy(graph, node, copies)
            if node.target is inductor_prims.lookup_seed:
                copies[node].update_arg(1, node.args[1] - self.seeds[0])
        returned = graph.output(tuple(copies[node] for node in outputs))
        # Makes Inductor return the strides of the trace, which the next region expects.
        returned.meta["user_visible_output_idxs"] = list(range(len(outputs)))
        return graph

    def given(self, node: fx.Node) -> Tensor:
        """The value that the region gets for this input: its slice of the seeds, or the whole tensor."""
        value: Tensor = node.meta["val"]
        return value[slice(*self.seeds)] if self.takes_seeds(node) else value

    def takes_seeds(self, node: fx.Node) -> bool:
        return any(user.target is inductor_prims.lookup_seed for user in node.users)


def _as_calls(module: fx.GraphModule, regions: Sequence[_Region]) -> fx.GraphModule:
    """The graph as a sequence of calls of its regions."""
    (returned,) = module.graph.find_nodes(op="output")
    needed = set(materialized_inputs([returned])).union(*(region.inputs for region in regions))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if stays_outside(node):
            _copy(graph, node, copies)
    subgraphs: dict[str, fx.GraphModule] = {}
    names: dict[str, str] = {}
    for region in regions:
        outputs = [node for node in region.nodes if node in needed]
        if not outputs:
            continue
        subgraph = region.graph(outputs)
        name = names.setdefault(_key(subgraph), f"region_{len(names)}")
        if name not in subgraphs:
            subgraphs[name] = _RegionModule({}, subgraph)
        call = graph.call_function(
            torch.ops.higher_order.invoke_subgraph,
            (graph.get_attr(name), name, *(_passed(graph, region, node, copies[node]) for node in region.inputs)),
        )
        call.meta["val"] = tuple(node.meta["val"] for node in outputs)
        for number, node in enumerate(outputs):
            copies[node] = graph.call_function(operator.getitem, (call, number))
            copies[node].meta = dict(node.meta)
    _copy(graph, returned, copies)
    outlined = _LazyGraphModule(subgraphs, graph)
    outlined.meta.update(module.meta)
    return outlined


def _passed(graph: fx.Graph, region: _Region, node: fx.Node, copy: fx.Node) -> fx.Node:
    if not region.takes_seeds(node):
        return copy
    own = graph.call_function(aten.slice.Tensor, (copy, 0, *region.seeds))
    own.meta["val"] = region.given(node)
    return own


def _copy(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Copies a node, and the views and constants among its inputs, into `graph`; records them in `copies`."""
    if node not in copies:
        for argument in node.all_input_nodes:
            if argument not in copies:
                assert is_view_or_constant(argument), argument
                _copy(graph, argument, copies)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return copies[node]


def _nodes_of_regions(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that belong to regions. The `getitem`s of an operation with several results follow it directly."""
    found: list[fx.Node] = []
    for node in graph.nodes:
        if (
            node.op == "call_function"
            and node.target is not operator.getitem
            and not (stays_outside(node) or is_view_or_constant(node))
        ):
            found += [node, *(user for user in node.users if user.target is operator.getitem)]
    return found


def _is_supported(node: fx.Node) -> bool:
    if node.op == "output" or is_size(node):
        return True
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        # The results of an operation with several are checked at their `getitem` nodes.
        several = isinstance(node.meta.get("val"), (tuple, list))
        return not node.target._schema.is_mutable and (several or is_tensor(node))
    return is_tensor(node) and (node.op == "placeholder" or node.target is operator.getitem)


def _key(graph: fx.Graph) -> str:
    """A string that is equal for graphs with the same operations and layouts."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda argument: Unquoted(f"%{numbers[argument]}"))
        given = layout(node.meta["val"]) if node.op == "placeholder" else ""
        lines.append(f"{node.op} {given or node.target} {arguments}")
    return "\n".join(lines)


def _like_traced(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
