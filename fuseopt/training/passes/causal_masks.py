"""Replaces causal attention masks by `is_causal=True`, so that flash attention can run.

Matches: in a graph of Dynamo, `scaled_dot_product_attention` with a boolean mask that is computed from sizes alone
    and has the values of the causal mask.
Writes: the same call with `attn_mask=None, is_causal=True`; where keys and values were repeated for groups of queries,
    with `enable_gqa=True` and the keys and values themselves.
Does not fire: on masks that depend on tensors, or, with dynamic sizes, that are not causal for every size tried.

transformers before 5.18 builds a mask [batch, 1, length, length] in every trace. For a batch without padding it
depends on sizes only, so its values are known before the step runs. Because of the mask it also repeats keys and
values. Kernels without repetition exist for 16-bit tensors on a CPU and from compute capability 8 on.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch.nn import functional as F

# A sliding window of w positions is causal for lengths up to w. So with dynamic sizes a mask is evaluated for a length
# above every integer in its computation; those integers must not be larger than this.
_LARGEST_CONSTANT = 256
# Largest head of flash attention.
_LARGEST_HEAD = 256


def run(module: fx.GraphModule) -> None:
    causal: dict[fx.Node, bool] = {}
    for node in module.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        mask = node.kwargs.get("attn_mask")
        if not isinstance(mask, fx.Node):
            continue
        if mask not in causal:
            values = _values(mask)
            causal[mask] = bool(values) and all(map(_is_causal, values))
        if causal[mask]:
            node.kwargs = {**node.kwargs, "attn_mask": None, "is_causal": True}
            _use_groups(node)
    module.recompile()


def _use_groups(attention: fx.Node) -> None:
    """Gives the attention keys and values as they were before transformers repeated them, if a kernel reads them."""
    if len(attention.args) != 3:
        return
    query, *repeated = attention.args
    sources = [_before_repetition(node) for node in repeated]
    if None not in sources and all(_has_grouped_kernel(node.meta["example_value"]) for node in (query, *repeated)):
        attention.args = (query, *sources)
        attention.kwargs = {**attention.kwargs, "enable_gqa": True}


def _before_repetition(repeated: fx.Node) -> fx.Node | None:
    """The source [b, kv, s, d] of `source[:, :, None].expand(b, kv, n, s, d).reshape(b, kv * n, s, d)`; else None."""
    reshaped = repeated
    expanded = _argument_of(reshaped, "reshape")
    indexed = _argument_of(expanded, "expand")
    source = _argument_of(indexed, operator.getitem)
    if reshaped is None or expanded is None or indexed is None or source is None:
        return None
    whole = slice(None, None, None)
    batch, heads, length, size = source.meta["example_value"].shape
    shape = expanded.meta["example_value"].shape
    is_repeated = (
        indexed.args[1] == (whole, whole, None, whole, whole)
        and shape == (batch, heads, shape[2], length, size)
        and reshaped.meta["example_value"].shape == (batch, heads * shape[2], length, size)
    )
    return source if is_repeated else None


def _argument_of(node: fx.Node | None, target: object) -> fx.Node | None:
    """The first argument of a call of `target`."""
    is_call = node is not None and node.target == target and isinstance(node.args[0], fx.Node)
    return node.args[0] if is_call else None  # type: ignore[union-attr, return-value]


def _has_grouped_kernel(tensor: Tensor) -> bool:
    if tensor.dtype not in (torch.float16, torch.bfloat16) or tensor.shape[-1] > _LARGEST_HEAD:
        return False
    return not tensor.is_cuda or torch.cuda.get_device_capability(tensor.device) >= (8, 0)


def _is_causal(mask: object) -> bool:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() < 2:
        return False
    rows, columns = mask.shape[-2:]
    future = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).triu_(1)
    return rows == columns and torch.equal(mask, ~future.expand_as(mask))


def _values(node: fx.Node) -> list[object]:
    """Values of `node` for a few dynamic sizes, or its one value without any; [] if it depends on tensor inputs."""
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
    if changing and largest > _LARGEST_CONSTANT:
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
