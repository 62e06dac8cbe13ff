"""Lets matrix products write gradients of float32 weights in float32, instead of a 16-bit result and a cast.

Matches: in a joint graph, a 16-bit `mm` on a GPU that is, after views and a cast to float32, only returned.
Writes: `mm.dtype` with a float32 result, without the cast.
Does not fire: if the float32 result is used in a computation. There the cast is fused with its user, which reads half
    as many bytes.

The product accumulates in float32 anyway. The 16-bit result would be rounded, and each weight would need a kernel
that reads it and writes it again in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

aten, prims = torch.ops.aten, torch.ops.prims
_VIEWS = (aten.permute.default, aten.t.default, aten.transpose.int, aten.view.default)


def run(graph: fx.Graph) -> None:
    for conversion in graph.find_nodes(op="call_function", target=prims.convert_element_type.default):
        chain = list(_chain(conversion))
        matmul = chain[-1]
        is_returned = conversion.args[1] == torch.float32 and all(user.op == "output" for user in conversion.users)
        if not is_returned or matmul.target is not aten.mm.default or not _is_half(matmul):
            continue
        with graph.inserting_before(matmul):
            wide = graph.call_function(aten.mm.dtype, (*matmul.args, torch.float32))
        wide.meta = dict(matmul.meta)
        matmul.replace_all_uses_with(wide)
        graph.erase_node(matmul)
        for node in (wide, *chain[1:-1]):
            node.meta["val"] = node.meta["val"].to(torch.float32)
        conversion.replace_all_uses_with(conversion.args[0])
        graph.erase_node(conversion)


def _chain(node: fx.Node) -> Iterator[fx.Node]:
    """`node`, the views that it is computed through, and the node before them, as far as each has one user."""
    yield node
    source = node.args[0]
    while source.target in _VIEWS and len(source.users) == 1:
        yield source
        source = source.args[0]
    if len(source.users) == 1:
        yield source


def _is_half(matmul: fx.Node) -> bool:
    values = [node.meta["val"] for node in matmul.args]
    return all(value.device.type == "cuda" and value.dtype in (torch.float16, torch.bfloat16) for value in values)
