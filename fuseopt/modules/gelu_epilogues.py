"""A tanh GELU behind a product with a bias in a traced graph, which cuBLASLt computes on the product's way to memory.

Both are kept, the sum for the backward pass. A kernel of its own would read that again.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fuseopt.ops.tuned_matmul import WITH_GELU

aten, prims = torch.ops.aten, torch.ops.prims
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
# Looked at one by one, and not rounded.
_SAME_NUMBERS = (*_VIEWS, prims.convert_element_type.default, aten._to_copy.default)
_POINTWISE: dict[Any, Callable[..., float]] = {
    aten.add.Tensor: operator.add,
    aten.div.Tensor: operator.truediv,
    aten.mul.Tensor: operator.mul,
    aten.pow.Tensor_Scalar: operator.pow,
    aten.sigmoid.default: lambda x: 1 / (1 + math.exp(-x)),
    aten.sub.Tensor: operator.sub,
    aten.tanh.default: math.tanh,
}
# Operations that a GELU is at most.
_MOST = 24


def fuse(product: fx.Node, left: fx.Node, right: fx.Node, bias: fx.Node) -> bool:
    """Exchanges `product`, and what is its GELU, for `tuned_matmul_gelu`; whether there is one."""
    graph, value = product.graph, product.meta["val"]
    made = _made_of(product)
    activated = next((node for node in made if _is_gelu(node, product)), None)
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


def _is_gelu(node: fx.Node, product: fx.Node) -> bool:
    if node.target in _VIEWS or node.meta["val"].dtype is not product.meta["val"].dtype:
        return False
    numbers = [step / 8 for step in range(-48, 49)]
    return all(math.isclose(_made_of_number(x, node, product), _gelu(x), rel_tol=1e-9, abs_tol=1e-12) for x in numbers)


def _gelu(x: float) -> float:
    """Its tanh approximation (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _made_of_number(x: float, node: fx.Node, product: fx.Node) -> float:
    """What `node` is where `product` is `x`."""
    if node is product:
        return x
    given = fx.node.map_arg(node.args, lambda argument: _made_of_number(x, argument, product))
    return given[0] if node.target in _SAME_NUMBERS else _POINTWISE[node.target](*given)


def _call(graph: fx.Graph, value: Any, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = value
    return node
