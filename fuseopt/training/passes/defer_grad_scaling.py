"""Gradients that the forward has made but for a factor, multiplied by it where a backward next reads them.

That of a head's weight is one: `ops.linear_cross_entropy` makes it with the loss. At the beginning of the backward,
where all that was kept is there, it would be there twice; read at the end, to be added to that of the embeddings it is
tied to, it is multiplied on the way.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten
# Shapes of what is one number.
_NUMBERS = ((), (1,))


def defer(graph: fx.Graph) -> None:
    """Moves products of an input of a backward graph and a number to ahead of the first node that reads them."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        if _is_scaled_input(node) and node.users:
            min(node.users, key=places.__getitem__).prepend(node)


def _is_scaled_input(node: fx.Node) -> bool:
    inputs = sorted(node.all_input_nodes, key=lambda given: given.meta["val"].dim())
    return len(inputs) == 2 and tuple(inputs[0].meta["val"].shape) in _NUMBERS and inputs[1].op == "placeholder"
