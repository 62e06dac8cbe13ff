"""Gradients of float32 weights under autocast on a GPU, in float32 straight from their matmul.

Its result would be rounded to 16 bits, and a kernel of its own for each weight would read it and write it in float32.
The sums are in float32 anyway.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

aten, prims = torch.ops.aten, torch.ops.prims
_VIEWS = (aten.permute.default, aten.t.default, aten.transpose.int, aten.view.default)


def widen(graph: fx.Graph) -> None:
    """Has every matmul of 16-bit numbers on a GPU that a joint graph only returns, in float32, return that.

    What is worked with in float32 is converted by the kernel that does so, out of half the bytes.
    """
    for conversion in graph.find_nodes(op="call_function", target=prims.convert_element_type.default):
        chain = list(_chain(conversion))
        matmul = chain[-1]
        returned = conversion.args[1] == torch.float32 and all(user.op == "output" for user in conversion.users)
        if not returned or matmul.target is not aten.mm.default or not _is_half(matmul):
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
    """The node, what it is made of through views that nothing else uses, and what these are views of."""
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
