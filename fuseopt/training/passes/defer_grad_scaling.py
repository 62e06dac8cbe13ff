"""Moves the multiplication of a precomputed gradient by a scalar to just before the node that reads it.

Matches: in a backward graph, `mul` of a graph input and a one-element tensor, and a cast of it that alone reads it.
Writes: the same nodes, moved before their first user.
Does not fire: on products of two tensors, or of a tensor that the backward computes.

`ops.linear_cross_entropy` computes the gradient of the head's weight in the forward, and the backward only scales it.
Scaled at the start of the backward, where memory use peaks, it would exist twice. Scaled just before it is added to
the gradient of the tied embedding, Inductor fuses the multiplication with that addition.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_SCALAR_SHAPES = ((), (1,))


def run(graph: fx.Graph) -> None:
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        if not _is_scaled_input(node):
            continue
        moved = [node]
        while len(moved[-1].users) == 1 and (user := next(iter(moved[-1].users))).target is _CAST:
            moved.append(user)
        if moved[-1].users:
            first = min(moved[-1].users, key=places.__getitem__)
            for each in moved:
                first.prepend(each)


def _is_scaled_input(node: fx.Node) -> bool:
    inputs = sorted(node.all_input_nodes, key=lambda given: given.meta["val"].dim())
    return len(inputs) == 2 and tuple(inputs[0].meta["val"].shape) in _SCALAR_SHAPES and inputs[1].op == "placeholder"
