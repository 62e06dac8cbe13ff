"""Computes the tanh inside a float32 GELU on a GPU with a sigmoid, which takes half the instructions.

Matches: in a joint graph, `tanh` of float32 on a GPU whose only users are `1 + tanh` and `tanh * tanh`, as in a GELU
    and its gradient.
Writes: `2 * sigmoid(2 * x)` for `1 + tanh(x)`, and `2 * sigmoid(2 * x) - 1` for `tanh(x)`.
Does not fire: if anything else reads the tanh. The absolute rounding error, about that of numbers near 1, is
    negligible compared with the 1 in GELU's formulas, but a large relative error of the tanh of a small number.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten


def run(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.tanh.default):
        value = node.meta["val"]
        if (
            value.dtype != torch.float32
            or value.device.type != "cuda"
            or not all(_is_of_gelu(user, node) for user in node.users)
        ):
            continue
        (plus_one,) = node.args
        with graph.inserting_before(node):
            for op, *operands in ((aten.mul.Tensor, 2.0), (aten.sigmoid.default,), (aten.mul.Tensor, 2.0)):
                plus_one = _with_meta_of(node, graph.call_function(op, (plus_one, *operands)))
            tanh = _with_meta_of(node, graph.call_function(aten.sub.Tensor, (plus_one, 1.0)))
        for user in list(node.users):
            if _adds_one(user):
                user.replace_all_uses_with(plus_one)
                graph.erase_node(user)
        node.replace_all_uses_with(tanh)
        graph.erase_node(node)


def _is_of_gelu(user: fx.Node, tanh: fx.Node) -> bool:
    squares = user.target is aten.mul.Tensor and user.args == (tanh, tanh)
    return squares or _adds_one(user)


def _adds_one(user: fx.Node) -> bool:
    return user.target is aten.add.Tensor and 1.0 in user.args


def _with_meta_of(node: fx.Node, new: fx.Node) -> fx.Node:
    new.meta = dict(node.meta)
    return new
