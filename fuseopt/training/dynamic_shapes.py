"""Symbolic sizes in a traced graph: which symbols nodes depend on, and computing all sizes at the graph's start."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

# `size_hint` is its name in torch 2.11.
_HINT: Callable[..., int] = getattr(symbolic_shapes, "optimization_hint", None) or symbolic_shapes.size_hint


def is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def symbols(graph: fx.Graph) -> dict[sympy.Symbol, fx.Node]:
    """The graph's inputs that are sizes, by their symbols."""
    sizes = {_expression(node): node for node in graph.find_nodes(op="placeholder") if is_size(node)}
    return {size: node for size, node in sizes.items() if isinstance(size, sympy.Symbol)}


def symbols_of(nodes: Iterable[fx.Node]) -> set[sympy.Symbol]:
    """The symbols in the shapes of the nodes' results."""
    values = (node.meta.get("val") for node in nodes)
    changing = (value for value in values if not isinstance(value, Tensor) or value._has_symbolic_sizes_strides)
    return set().union(*map(free_symbols, changing))


def hint(size: torch.SymInt | int) -> int:
    """The size in the traced call, without a guard on it."""
    return _HINT(size)


def hints(graph: fx.Graph) -> dict[sympy.Symbol, int]:
    """The values of a graph's `symbols` in the traced call."""
    return {symbol: hint(node.meta["val"]) for symbol, node in symbols(graph).items()}


def at(size: torch.SymInt | int, values: Mapping[sympy.Symbol, int]) -> int:
    """A size as an integer, with `values` for its symbols."""
    return int(size.node.expr.xreplace(values)) if isinstance(size, torch.SymInt) else size


def compute_first(graph: fx.Graph) -> bool:
    """Moves the computation of all sizes to the start of the graph, from input sizes; False if those do not suffice."""
    given = symbols(graph)
    if not symbols_of(graph.nodes) <= given.keys():
        return False
    sizes = {node: _expression(node) for node in graph.nodes if node.op == "call_function" and is_size(node)}
    if not all(size.free_symbols for size in sizes.values()):
        return False
    proxies = {symbol: fx.Proxy(node) for symbol, node in given.items()}
    begin = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(begin):
        computed = {size: sympy_interp(PythonReferenceAnalysis, proxies, size).node for size in set(sizes.values())}
    for node in itertools.takewhile(lambda node: node is not begin, graph.nodes):
        if node.op == "call_function":
            node.meta["val"] = node.target(*fx.node.map_arg(node.args, lambda argument: argument.meta["val"]))
    for node, size in sizes.items():
        node.replace_all_uses_with(computed[size])
        graph.erase_node(node)
    return True


def _expression(node: fx.Node) -> sympy.Expr:
    return node.meta["val"].node.expr
