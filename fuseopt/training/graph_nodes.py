"""Nodes of a traced graph as the parts see them that it is cut into: what they are, and what they take."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch._inductor import inductor_prims
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuseopt.ops.tuned_matmul import RAW as TUNED_MATMUL
from fuseopt.training.changing_sizes import is_size

aten = torch.ops.aten
MATMULS = (aten.mm.default, aten.mm.dtype, aten.addmm.default, aten.bmm.default, TUNED_MATMUL["cuda"])
# Views that make another shape of the same numbers in their order.
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
# They cost nothing inside another kernel.
_CONSTANTS = (aten.full.default, torch.ops.prims.iota.default)
# Inductor returns its input, though its schema does not say so.
_VIEWS = (aten._unsafe_view.default,)
# In bytes, of the pointers that compiled code reads fastest.
_ALIGNMENT = 16


def is_shared(node: fx.Node) -> bool:
    """Whether it stays outside of the parts, and is passed to them."""
    return node.op == "placeholder" or node.target is inductor_prims.seeds or is_size(node)


def is_free(node: fx.Node) -> bool:
    """Whether it is a view, or a constant. A part must not return a view of what it is given or returns beside."""
    if is_size(node):
        return False
    if node.target is operator.getitem:
        return is_free(node.args[0])
    if node.op != "call_function" or node.target in (*_CONSTANTS, *_VIEWS):
        return node.op == "call_function"
    return any(result.alias_info is not None for result in node.target._schema.returns)


def is_fused(node: fx.Node) -> bool:
    """Whether Inductor makes it a part of a kernel of its own; attention returns several tensors."""
    return is_tensor(node) and node.target not in (*MATMULS, operator.getitem)


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def is_addition(node: fx.Node) -> bool:
    """Whether it adds up two tensors of one shape."""
    if node.target is not aten.add.Tensor or len(node.all_input_nodes) != 2:
        return False
    left, right = (source.meta.get("val") for source in node.all_input_nodes)
    return isinstance(left, Tensor) and isinstance(right, Tensor) and left.shape == right.shape


def roots(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """What is not free of the inputs of these nodes, and of the free ones among them, in the order of first use."""
    found: dict[fx.Node, None] = {}
    for node in nodes:
        for argument in node.all_input_nodes:
            found.update(dict.fromkeys(roots([argument]) if is_free(argument) else [argument]))
    return list(found)


def sign(node: fx.Node) -> str:
    """What the node does, but for where its inputs come from."""
    if node.target is inductor_prims.lookup_seed:
        return str(node.target)
    arguments = fx.node.map_arg((node.args, node.kwargs), lambda argument: Text(layout(argument.meta["val"])))
    return f"{node.target}{arguments}"


def layout(value: object) -> str:
    """Of a tensor, all that compiled code depends on; of several, that of each."""
    if not isinstance(value, Tensor):
        return str([layout(part) for part in value]) if isinstance(value, (tuple, list)) else str(value)
    aligned = statically_known_true(value.storage_offset() * value.element_size() % _ALIGNMENT == 0)
    return f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.device}{aligned}"


class Text(str):
    """Shown without quotes."""

    __repr__ = str.__str__
