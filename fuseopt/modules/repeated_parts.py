"""Layers of a traced step that do the same, compiled once: Inductor's time grows with every node that it schedules.

A transformer's forward graph, and its backward's, is one sequence of operations many times over, on other tensors. Cut
behind one of its matmuls in every layer it falls into parts that are equal but for their inputs. Each kind of part
becomes a graph of its own, which the others call too (torch's `invoke_subgraph`). What is kept between forward and
backward has been decided before, on the whole graph. A matmul is a kernel of its own in any case, so the cut parts no
fused kernel but one that would span layers.
"""

from __future__ import annotations

import bisect
import collections
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import inductor_prims
from torch._subclasses import FakeTensor
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode

aten = torch.ops.aten
_MATMULS = (aten.mm.default, aten.mm.dtype, aten.addmm.default, aten.bmm.default)
# They cost nothing inside another kernel.
_CONSTANTS = (aten.full.default, torch.ops.prims.iota.default)
# Inductor returns its input, though its schema does not say so.
_VIEWS = (aten._unsafe_view.default,)
_SEEDED = (inductor_prims.lookup_seed, inductor_prims.random)
# In bytes, of the pointers that compiled code reads fastest.
_ALIGNMENT = 16
# What a call weighs beside nodes to compile: the shorter the parts, the fewer kernels can be fused.
_NODES_PER_CALL = 8
# The share of the nodes that may be left to compile for the cut to pay, and how much more than the least.
_WORTH = 0.7
_SLACK = 1.25


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

    Left alone are graphs with sizes that change, with operations that write to what they are given, and with those of
    higher order.
    """
    if not all(map(_is_understood, module.graph.nodes)):
        return module
    parts = [_Part(nodes) for nodes in _cut(_divisible(module.graph))]
    return _joined(module, parts) if parts else module


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
        nodes: in their order, without those that `_is_free`, which are copied to where they are needed.
        inputs: the other nodes whose results they take, in the order of first use.
        seeds: what of `inductor_prims.seeds` they look up: the first place and the one behind the last.
    """

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.nodes, own = nodes, set(nodes)
        self.inputs = [root for root in _roots(nodes) if root not in own]
        places = [node.args[1] for node in nodes if node.target is inductor_prims.lookup_seed]
        self.seeds = (min(places), max(places) + 1) if places else (0, 0)

    def graph(self, outputs: Sequence[fx.Node]) -> fx.Graph:
        """The part by itself; it returns what `outputs`, of its nodes, do."""
        graph = fx.Graph()
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
    needed = set(_roots([returned])).union(*(part.inputs for part in parts))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if _is_shared(node):
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
                assert _is_free(argument), argument
                _copy(graph, argument, copies)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return copies[node]


def _roots(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """What is not free of the inputs of these nodes, and of the free ones among them, in the order of first use."""
    found: dict[fx.Node, None] = {}
    for node in nodes:
        for argument in node.all_input_nodes:
            found.update(dict.fromkeys(_roots([argument]) if _is_free(argument) else [argument]))
    return list(found)


def _cut(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The nodes in parts, each up to a matmul of one kind; none where no kind pays.

    Of the kinds that leave little to compile: that whose cuts make kernels read the least once more.
    """
    signs = [_sign(node) for node in nodes]
    matmuls = (sign for node, sign in zip(nodes, signs, strict=True) if node.target in _MATMULS)
    weights = {}
    for mark, count in collections.Counter(matmuls).items():
        if count > 2:
            kinds = {tuple(signs[start:end]) for start, end in _spans(signs, mark)}
            weights[mark] = sum(map(len, kinds)) + _NODES_PER_CALL * (count + 1)
    most = min(_WORTH * len(nodes), _SLACK * min(weights.values(), default=0))
    uses = _fused_uses(nodes)
    best = min(
        (mark for mark, weight in weights.items() if weight <= most),
        key=lambda mark: (_severed(uses, _spans(signs, mark)), weights[mark]),
        default=None,
    )
    if best is None:
        return []
    first, *others = (list(nodes[start:end]) for start, end in _spans(signs, best))
    return [*_begun(first), *others]


def _begun(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The first part of a backward in three: up to its first matmul, the gradient of that one's weight, and the rest.

    When it begins, all that was kept is there. So what the gradients of a loss and a last norm take, and the activation
    that is recomputed for the weight, are not to stay beside what comes next. The rest recomputes of that activation
    what it needs.
    """
    matmuls = [place for place, node in enumerate(nodes) if node.target in _MATMULS]
    gradient = next((nodes[place] for place in matmuls[:2] if _is_only_returned(nodes[place])), None)
    if gradient is None:
        return [list(nodes)]
    head, others = nodes[: matmuls[0]], nodes[matmuls[0] :]
    own = set(others)
    early = _sources([gradient], own)
    early |= {node for node in others if node.target is operator.getitem and node.args[0] in early}
    late = own - early
    late |= _sources(late, {node for node in early if _is_recomputed(node)})
    parts = head, *([node for node in others if node in part] for part in (early, late))
    return [list(part) for part in parts if part]


def _sources(nodes: Iterable[fx.Node], among: set[fx.Node]) -> set[fx.Node]:
    """These nodes, and those that go into them through others of `among`."""
    found, waiting = set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += among.intersection(_roots([node]))
    return found


def _is_only_returned(node: fx.Node) -> bool:
    """Whether nothing else becomes of it, but for a view or a cast."""
    return all(
        user.op == "output" or (len(user.all_input_nodes) == 1 and _is_only_returned(user)) for user in node.users
    )


def _is_recomputed(node: fx.Node) -> bool:
    """Whether it may be part of two kernels, for what it costs; a mask comes out of the same seed again."""
    return node.target in _SEEDED or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _spans(signs: Sequence[str], mark: str) -> list[tuple[int, int]]:
    ends = [place + 1 for place, sign in enumerate(signs) if sign == mark]
    return [(start, end) for start, end in zip([0, *ends], [*ends, len(signs)], strict=True) if start < end]


def _fused_uses(nodes: Sequence[fx.Node]) -> list[tuple[int, list[int]]]:
    """Of each tensor the bytes, and the places of the nodes that make and take it inside of fused kernels."""
    places = {node: place for place, node in enumerate(nodes)}
    uses: dict[fx.Node, list[int]] = collections.defaultdict(list)
    for node, place in places.items():
        if _is_fused(node):
            for tensor in (node, *_roots([node])):
                uses[tensor].append(place)
    return [(tensor.meta["val"].nbytes, at) for tensor, at in uses.items() if _is_tensor(tensor) and len(at) > 1]


def _severed(uses: Sequence[tuple[int, list[int]]], spans: Sequence[tuple[int, int]]) -> int:
    """Bytes of what is made or taken in one part and taken in another, once for each other one."""
    starts = [start for start, _ in spans]
    return sum(size * (len({bisect.bisect(starts, place) for place in at}) - 1) for size, at in uses)


def _divisible(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that go into parts; the results of an operation that has several stand behind it."""
    found: list[fx.Node] = []
    for node in graph.nodes:
        if (
            node.op == "call_function"
            and node.target is not operator.getitem
            and not (_is_shared(node) or _is_free(node))
        ):
            found += [node, *(user for user in node.users if user.target is operator.getitem)]
    return found


def _is_shared(node: fx.Node) -> bool:
    """Whether it stays outside of the parts, and is passed to them."""
    return node.op == "placeholder" or node.target is inductor_prims.seeds


def _is_free(node: fx.Node) -> bool:
    """Whether it is a view, or a constant. A part must not return a view of what it is given or returns beside."""
    if node.target is operator.getitem:
        return _is_free(node.args[0])
    if node.op != "call_function" or node.target in (*_CONSTANTS, *_VIEWS):
        return node.op == "call_function"
    return any(result.alias_info is not None for result in node.target._schema.returns)


def _is_fused(node: fx.Node) -> bool:
    """Whether Inductor makes it a part of a kernel of its own; attention returns several tensors."""
    return _is_tensor(node) and node.target not in (*_MATMULS, operator.getitem)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], Tensor)


def _is_understood(node: fx.Node) -> bool:
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        # Of an operation with several results, those that are used are looked at by themselves.
        several = isinstance(node.meta.get("val"), (tuple, list))
        return not node.target._schema.is_mutable and (several or _has_constant_sizes(node))
    given = node.op == "placeholder" or node.target is operator.getitem
    return node.op == "output" or (given and _has_constant_sizes(node))


def _has_constant_sizes(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not value._has_symbolic_sizes_strides


def _sign(node: fx.Node) -> str:
    """What the node does, but for where its inputs come from."""
    if node.target is inductor_prims.lookup_seed:
        return str(node.target)
    arguments = fx.node.map_arg((node.args, node.kwargs), lambda argument: _Text(_layout(argument.meta["val"])))
    return f"{node.target}{arguments}"


def _key(graph: fx.Graph) -> str:
    """What is the same for graphs that compute the same."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda argument: _Text(f"%{numbers[argument]}"))
        given = _layout(node.meta["val"]) if node.op == "placeholder" else ""
        lines.append(f"{node.op} {given or node.target} {arguments}")
    return "\n".join(lines)


def _without_data(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _layout(value: object) -> str:
    """Of a tensor, all that compiled code depends on; of several, that of each."""
    if not isinstance(value, Tensor):
        return str([_layout(part) for part in value]) if isinstance(value, (tuple, list)) else str(value)
    aligned = value.storage_offset() * value.element_size() % _ALIGNMENT == 0
    return f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.device}{aligned}"


class _Text(str):
    """Shown without quotes."""

    __repr__ = str.__str__
