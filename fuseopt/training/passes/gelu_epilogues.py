"""Fuses a tanh GELU into the matrix product before it, as an epilogue of cuBLASLt.

Matches: a product that `autotuned_gemm` matches, with a bias, and pointwise nodes after it that compute GELU's tanh
    form.
Writes: `fuseopt::tuned_matmul_gelu`, which returns the product and its GELU; the backward needs both.
Does not fire: if the GELU has another dtype than the product, or the number of columns is no multiple of
    `GELU_COLUMNS`.

A separate GELU kernel would read the product from memory again. The nodes are recognised by evaluating them on sample
values, because decompositions of a GELU differ between versions of torch and transformers.
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
from fuseopt.training.passes import autotuned_gemm

aten, prims = torch.ops.aten, torch.ops.prims
# Identities for the evaluation on sample values, which is elementwise and in float64.
_IDENTITIES = (*RESHAPES, prims.convert_element_type.default, aten._to_copy.default)
_POINTWISE = (
    aten.add.Tensor,
    aten.div.Tensor,
    aten.mul.Tensor,
    aten.pow.Tensor_Scalar,
    aten.sigmoid.default,
    aten.sub.Tensor,
    aten.tanh.default,
)
# A GELU has fewer nodes than this.
_MOST_NODES = 24


def run(graph: fx.Graph) -> None:
    for product in list(graph.nodes):
        arguments = autotuned_gemm.arguments_of(product)
        if arguments is not None and arguments[2] is not None:
            _fuse(product, *arguments[:3])


def _fuse(product: fx.Node, left: fx.Node, right: fx.Node, bias: fx.Node) -> None:
    """Replaces `product` and its GELU, if there is one."""
    graph, value = product.graph, product.meta["val"]
    if value.shape[1] % GELU_COLUMNS:
        return
    pointwise = _pointwise_of(product)
    activated = _gelu_among(pointwise, product)
    if activated is None:
        return
    with graph.inserting_before(product):
        both = _call(graph, (value, value), WITH_GELU["cuda"], left, right, bias, True)
        kept, output = (_call(graph, value, operator.getitem, both, index) for index in range(2))
        shape = activated.meta["val"].shape
        if shape != value.shape:
            output = _call(graph, activated.meta["val"], aten.view.default, output, list(shape))
    activated.replace_all_uses_with(output)
    product.replace_all_uses_with(kept)
    for node in (*reversed(pointwise), product):
        if not node.users:
            graph.erase_node(node)


def _pointwise_of(product: fx.Node) -> list[fx.Node]:
    """The nodes computed elementwise from `product` alone, in the order of the graph."""
    found, waiting = {product: None}, list(product.users)
    while waiting and len(found) < _MOST_NODES:
        node = waiting.pop(0)
        if (node.target in _IDENTITIES or node.target in _POINTWISE) and found.keys() >= set(node.all_input_nodes):
            found[node] = None
            waiting += (user for user in node.users if user not in found)
    return list(found)[1:]


def _gelu_among(nodes: Sequence[fx.Node], product: fx.Node) -> fx.Node | None:
    """The node that is GELU's tanh form of the product, in the product's dtype."""
    # The graph may be traced under a fake tensor mode, which would compute no values.
    with _disable_current_modes():
        values = {product: torch.linspace(-6, 6, 97, dtype=torch.float64)}
        gelu = F.gelu(values[product], approximate="tanh")
        for node in nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = args[0] if node.target in _IDENTITIES else node.target(*args, **kwargs)
            is_candidate = node.target not in RESHAPES and node.meta["val"].dtype is product.meta["val"].dtype
            if is_candidate and torch.allclose(values[node], gelu, rtol=1e-9, atol=1e-12):
                return node
    return None


def _call(graph: fx.Graph, value: Any, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = value
    return node
