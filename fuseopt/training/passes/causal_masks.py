"""Attention masks of a traced step that hide nothing but the future, said in a way that lets flash kernels run.

transformers before 5.18 makes a mask [batch, 1, length, length] in every trace, whatever it is told. Where rows are
whole it is computed from sizes alone, and so is known before the step runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch.nn import functional as F

# Of the numbers in a mask's computation that depends on changing sizes. It is computed for more positions than any, as
# a window of so many, for instance, is no causal mask from there on.
_LARGEST = 256


def drop(graph: fx.GraphModule) -> None:
    """Exchanges, in a graph that Dynamo traced, every mask that is the causal one for `is_causal`.

    A mask that depends on anything but sizes is left alone. If these change from call to call, it has to be the causal
    one for several of them.
    """
    causal: dict[fx.Node, bool] = {}
    for node in graph.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        mask = node.kwargs.get("attn_mask")
        if not isinstance(mask, fx.Node):
            continue
        if mask not in causal:
            values = _values(mask)
            causal[mask] = bool(values) and all(map(_is_causal, values))
        if causal[mask]:
            node.kwargs = {**node.kwargs, "attn_mask": None, "is_causal": True}
    graph.recompile()


def _is_causal(mask: object) -> bool:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() < 2:
        return False
    rows, columns = mask.shape[-2:]
    future = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).triu_(1)
    return rows == columns and torch.equal(mask, ~future.expand_as(mask))


def _values(node: fx.Node) -> list[object]:
    """What the graph computes at `node` for some of the sizes that may change; nothing if it takes other inputs."""
    needed, waiting = {node}, [node]
    while waiting:
        new = set(waiting.pop().all_input_nodes) - needed
        needed |= new
        waiting += new
    ordered = [other for other in node.graph.nodes if other in needed]
    given = [other for other in ordered if other.op == "placeholder"]
    changing = [other for other in given if isinstance(other.meta["example_value"], torch.SymInt)]
    if any(other.op not in ("call_function", "call_method") for other in needed.difference(changing)):
        return []
    largest = _largest_number(ordered)
    if changing and largest > _LARGEST:
        return []
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for other in ordered:
        copies[other] = part.node_copy(other, copies.__getitem__)
    part.output(copies[node])
    compute = fx.GraphModule({}, part)
    with torch.no_grad():
        if not changing:
            return [compute()]
        return [compute(*(first + number for number in range(len(changing)))) for first in (2, 3, largest + 3)]


def _largest_number(nodes: Sequence[fx.Node]) -> int:
    numbers = [0]

    def note(argument: object) -> object:
        if isinstance(argument, int):
            numbers.append(abs(argument))
        return argument

    for node in nodes:
        fx.node.map_aggregate((node.args, node.kwargs), note)
    return max(numbers)
