"""The tanh in a traced GELU of float32 on a GPU, said as a sigmoid, which takes half the instructions.

2 * sigmoid(2 * x) - 1 is tanh(x) up to the rounding of numbers near 1, and 2 * sigmoid(2 * x) itself what GELU makes of
it by adding 1. The rounding is nothing beside the 1 from which the gradient takes tanh(x) squared, but would be much
beside the tanh of a small number alone.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten


def shorten(graph: fx.Graph) -> None:
    """Exchanges, in a joint graph, every tanh of which nothing but a GELU and its gradient are made."""
    for node in graph.find_nodes(op="call_function", target=aten.tanh.default):
        value = node.meta["val"]
        if (
            value.dtype != torch.float32
            or value.device.type != "cuda"
            or not all(_is_of_gelu(u, node) for u in node.users)
        ):
            continue
        (plus_one,) = node.args
        with graph.inserting_before(node):
            for op, *operands in ((aten.mul.Tensor, 2.0), (aten.sigmoid.default,), (aten.mul.Tensor, 2.0)):
                plus_one = _like(node, graph.call_function(op, (plus_one, *operands)))
            tanh = _like(node, graph.call_function(aten.sub.Tensor, (plus_one, 1.0)))
        for user in list(node.users):
            if _adds_one(user):
                user.replace_all_uses_with(plus_one)
                graph.erase_node(user)
        node.replace_all_uses_with(tanh)
        graph.erase_node(node)


def _is_of_gelu(user: fx.Node, tanh: fx.Node) -> bool:
    squared = user.target is aten.mul.Tensor and user.args == (tanh, tanh)
    return squared or _adds_one(user)


def _adds_one(user: fx.Node) -> bool:
    return user.target is aten.add.Tensor and 1.0 in user.args


def _like(node: fx.Node, new: fx.Node) -> fx.Node:
    new.meta = dict(node.meta)
    return new
