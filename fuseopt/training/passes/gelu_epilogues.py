"""A tanh GELU behind a product with a bias in a traced graph, which cuBLASLt computes on the product's way to memory.

Both are kept, the sum for the backward pass. A kernel of its own would read that again.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from fuseopt.ops.tuned_matmul import GELU_COLUMNS, WITH_GELU
from fuseopt.training.graph_nodes import RESHAPES

aten, prims = torch.ops.aten, torch.ops.prims
# Looked at one by one, and not rounded.
_SAME_NUMBERS = (*RESHAPES, prims.convert_element_type.default, aten._to_copy.default)
_POINTWISE = (
    aten.add.Tensor,
    aten.div.Tensor,
    aten.mul.Tensor,
    aten.pow.Tensor_Scalar,
    aten.sigmoid.default,
    aten.sub.Tensor,
    aten.tanh.default,
)
# Operations that a GELU is at most.
_MOST = 24


def fuse(product: fx.Node, left: fx.Node, right: fx.Node, bias: fx.Node) -> bool:
    """Exchanges `product`, and what is its GELU, for `tuned_matmul_gelu`; whether there is one."""
    graph, value = product.graph, product.meta["val"]
    if value.shape[1] % GELU_COLUMNS:
        return False
    made = _made_of(product)
    activated = _gelu_of(product, made)
    if activated is None:
        return False
    with graph.inserting_before(product):
        both = _call(graph, (value, value), WITH_GELU["cuda"], left, right, bias, True)
        kept, output = (_call(graph, value, operator.getitem, both, index) for index in range(2))
        shape = activated.meta["val"].shape
        if shape != value.shape:
            output = _call(graph, activated.meta["val"], aten.view.default, output, list(shape))
    activated.replace_all_uses_with(output)
    product.replace_all_uses_with(kept)
    for node in (*reversed(made), product):
        if not node.users:
            graph.erase_node(node)
    return True


def _made_of(product: fx.Node) -> list[fx.Node]:
    """What is made of nothing but the product, number by number, in the order of the graph."""
    found, waiting = {product: None}, list(product.users)
    while waiting and len(found) < _MOST:
        node = waiting.pop(0)
        if (node.target in _SAME_NUMBERS or node.target in _POINTWISE) and found.keys() >= set(node.all_input_nodes):
            found[node] = None
            waiting += (user for user in node.users if user not in found)
    return list(found)[1:]


def _gelu_of(product: fx.Node, made: Sequence[fx.Node]) -> fx.Node | None:
    """The one of these nodes that is GELU's tanh form of the product, in its dtype."""
    # Numbers are wanted, whichever mode the graph is traced in.
    with _disable_current_modes():
        values = {product: torch.linspace(-6, 6, 97, dtype=torch.float64)}
        gelu = F.gelu(values[product], approximate="tanh")
        for node in made:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = args[0] if node.target in _SAME_NUMBERS else node.target(*args, **kwargs)
            is_of_its_kind = node.target not in RESHAPES and node.meta["val"].dtype is product.meta["val"].dtype
            if is_of_its_kind and torch.allclose(values[node], gelu, rtol=1e-9, atol=1e-12):
                return node
    return None


def _call(graph: fx.Graph, value: Any, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = value
    return node
