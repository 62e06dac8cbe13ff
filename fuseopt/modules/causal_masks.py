"""Attention masks of a traced step that hide nothing but the future, said in a way that lets flash kernels run.

transformers before 5.18 makes a mask [batch, 1, length, length] in every trace, whatever it is told. Where rows are
whole it is computed from sizes alone, and so is known before the step runs.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.nn import functional as F


def drop(graph: fx.GraphModule) -> None:
    """Exchanges, in a graph that Dynamo traced, every mask that is the causal one for `is_causal`.

    A mask that depends on an input is left alone; on a length that changes from call to call, too.
    """
    causal: dict[fx.Node, bool] = {}
    for node in graph.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        mask = node.kwargs.get("attn_mask")
        if not isinstance(mask, fx.Node):
            continue
        if mask not in causal:
            causal[mask] = _is_causal(mask)
        if causal[mask]:
            node.kwargs = {**node.kwargs, "attn_mask": None, "is_causal": True}
    graph.recompile()


def _is_causal(mask: fx.Node) -> bool:
    value = _constant(mask)
    if not isinstance(value, Tensor) or value.dtype != torch.bool or value.dim() < 2:
        return False
    rows, columns = value.shape[-2:]
    future = torch.ones(rows, columns, dtype=torch.bool, device=value.device).triu_(1)
    return rows == columns and torch.equal(value, ~future.expand_as(value))


def _constant(node: fx.Node) -> object:
    """What the graph computes at `node` whatever it is given; None if that depends on what it is given."""
    needed, waiting = {node}, [node]
    while waiting:
        new = set(waiting.pop().all_input_nodes) - needed
        needed |= new
        waiting += new
    if any(other.op not in ("call_function", "call_method") for other in needed):
        return None
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for other in node.graph.nodes:
        if other in needed:
            copies[other] = part.node_copy(other, copies.__getitem__)
    part.output(copies[node])
    with torch.no_grad():
        return fx.GraphModule({}, part)()
