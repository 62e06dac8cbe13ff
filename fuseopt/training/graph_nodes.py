"""Classification of nodes of a traced graph: views, fusible nodes, additions; and their signatures for comparison."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch._inductor import inductor_prims
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuseopt.ops.tuned_matmul import RAW as TUNED_MATMUL
from fuseopt.training.dynamic_shapes import is_size

aten = torch.ops.aten
MATMULS = (aten.mm.default, aten.mm.dtype, aten.addmm.default, aten.bmm.default, TUNED_MATMUL["cuda"])
# Views with another shape and the same elements in the same order.
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
# Constants that cost nothing inside of another kernel.
_CONSTANTS = (aten.full.default, torch.ops.prims.iota.default)
# Inductor returns the input itself, though the schema does not declare an alias.
_VIEWS = (aten._unsafe_view.default,)
# Inductor compiles other code for pointers that are not a multiple of this many bytes.
_ALIGNMENT = 16


def stays_outside(node: fx.Node) -> bool:
    """Whether the node stays outside of the regions and is passed to them: inputs, seeds, sizes."""
    return node.op == "placeholder" or node.target is inductor_prims.seeds or is_size(node)


def is_view_or_constant(node: fx.Node) -> bool:
    """Whether the node is a view or a constant, which each region computes for itself.

    A region must not return a view of its inputs or of its other outputs.
    """
    if is_size(node):
        return False
    if node.target is operator.getitem:
        return is_view_or_constant(node.args[0])
    if node.op != "call_function" or node.target in (*_CONSTANTS, *_VIEWS):
        return node.op == "call_function"
    return any(result.alias_info is not None for result in node.target._schema.returns)


def is_fusible(node: fx.Node) -> bool:
    """Whether Inductor can fuse the node with others: no matmul, no op with several results such as attention."""
    return is_tensor(node) and node.target not in (*MATMULS, operator.getitem)


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def is_addition(node: fx.Node) -> bool:
    """Whether the node adds two tensors of the same shape."""
    if node.target is not aten.add.Tensor or len(node.all_input_nodes) != 2:
        return False
    left, right = (source.meta.get("val") for source in node.all_input_nodes)
    return isinstance(left, Tensor) and isinstance(right, Tensor) and left.shape == right.shape


def materialized_inputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The inputs of these nodes, traced back through views and constants, in the order of first use."""
    found: dict[fx.Node, None] = {}
    for node in nodes:
        for argument in node.all_input_nodes:
            found.update(
                dict.fromkeys(materialized_inputs([argument]) if is_view_or_constant(argument) else [argument])
            )
    return list(found)


def signature(node: fx.Node) -> str:
    """Target and arguments of the node, with the layouts of its inputs in place of their names."""
    if node.target is inductor_prims.lookup_seed:
        return str(node.target)
    arguments = fx.node.map_arg((node.args, node.kwargs), lambda argument: Unquoted(layout(argument.meta["val"])))
    return f"{node.target}{arguments}"


def layout(value: object) -> str:
    """All that compiled code depends on in a tensor, or in each of several: dtype, sizes, strides, device,
    alignment."""
    if not isinstance(value, Tensor):
        return str([layout(part) for part in value]) if isinstance(value, (tuple, list)) else str(value)
    aligned = statically_known_true(value.storage_offset() * value.element_size() % _ALIGNMENT == 0)
    return f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.device}{aligned}"


class Unquoted(str):
    """A string whose repr has no quotes."""

    __repr__ = str.__str__
