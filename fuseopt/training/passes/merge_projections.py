"""Merges matrix products of one input with several weights, such as the query, key and value projections, into one.

Matches: in a joint graph under 16-bit autocast on a GPU, consecutive `mm` or `addmm` nodes with the same left
    operand, whose weights and biases are casts of parameters, with static sizes.
Writes: forward, one product with the concatenated weights, and slices of it. Backward, one product for the gradient
    of the input (was: several, rounded to 16 bits and added) and one for the gradients of the weights.
Does not fire: if a view needs a projection's rows to be contiguous; if another library's op reads one; if the
    backward needs only some of the projections; on nodes of gradient checkpointing. The backward's products stay
    apart if more than a third of the gradients would have to be copied to be concatenated.

Under autocast the weights are cast in every step, and casting them into one matrix costs nothing more. The pass runs
on the joint graph, because the partitioner can only keep the merged product as a whole and has to know its size.
Strides change, so metadata of the following nodes is recomputed (`_update_layouts`); strides of what the caller gets
do not.

Read `run`, `_merge_forward`, `_merge_backward`; the rest are conditions.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.utils.checkpoint import CheckpointPolicy

from fuseopt.ops.relative_attention import BWD as ATTENTION_BWD
from fuseopt.ops.relative_attention import BWD_JOINED as ATTENTION_BWD_JOINED
from fuseopt.training.graph_nodes import MATMULS, is_addition, is_fusible, is_view_or_constant, materialized_inputs

aten, prims = torch.ops.aten, torch.ops.prims

_VIEWS = (aten.view.default, aten._unsafe_view.default)
_CAST = prims.convert_element_type.default
# A weight must have a multiple of this many rows, so that each slice of the product is aligned to 16 bytes.
_COLUMNS = 8
# Namespaces of ops that are known to accept any strides.
_NAMESPACES = ("aten", "prims", "fuseopt")
# Largest share of the gradients that may be copied to concatenate them.
_MOST_COPIED = 1 / 3
_OF_RESULT = ("val", "tensor_meta", "eager_input_vals")


class _Projection(NamedTuple):
    """Nodes of one projection, `product = source @ weight.t() + bias`."""

    product: fx.Node  # [rows, columns]
    source: fx.Node  # [rows, inner]
    weight: fx.Node  # [columns, inner], cast of a parameter
    bias: fx.Node | None  # [columns], cast of a parameter


class _Backward(NamedTuple):
    """Nodes of a projection's backward."""

    grad: fx.Node  # of the product
    of_source: fx.Node  # grad @ weight
    of_weight: fx.Node | None  # grad.t() @ source; None where the weight is frozen


def run(graph: fx.Graph) -> None:
    restrided: list[fx.Node] = []
    for group in _groups(graph):
        weight, parts = _merge_forward(graph, group)
        restrided += parts + _merge_backward(graph, group, weight)
    if restrided:
        stable_topological_sort(graph)
        graph.eliminate_dead_code()
        _update_layouts(graph, restrided)


def _groups(graph: fx.Graph) -> list[list[_Projection]]:
    found = [_projection(node) for node in graph.nodes if node.target in MATMULS]
    runs = itertools.groupby(found, lambda member: member and (_origin(member.source), member.bias is None))
    groups = [[member for member in members if member] for _, members in runs]
    return [group for group in groups if len(group) > 1 and _are_kept_alike(group)]


def _are_kept_alike(group: Sequence[_Projection]) -> bool:
    """Whether the backward reads all of these products themselves, or none.

    With rotary embeddings it reads the values, but not queries and keys before rotation. Merged, all three would be
    kept.
    """
    return len({_is_kept_itself(member.product) for member in group}) == 1


def _projection(product: fx.Node) -> _Projection | None:
    # Nodes that gradient checkpointing recomputes are marked.
    if product.target not in (aten.mm.default, aten.addmm.default) or product.kwargs or "recompute" in product.meta:
        return None
    *biases, source, transposed = product.args
    if not _is_transpose(transposed) or not all(map(_is_cast_parameter, (transposed.args[0], *biases))):
        return None
    weight, rows = transposed.args[0], source.meta["val"]
    is_fixed = not (rows._has_symbolic_sizes_strides or weight.meta["val"]._has_symbolic_sizes_strides)
    if not is_fixed or not _is_half(rows) or len(weight.meta["val"]) % _COLUMNS or not _can_be_a_slice(product):
        return None
    return _Projection(product, source, weight, *biases or [None])


def _can_be_a_slice(product: fx.Node) -> bool:
    """Whether `product` may become a column slice: no view merges its rows, and no unknown op or caller reads it."""
    rows = len(product.meta["val"])
    for user in (user for node in _views_of(product) for user in node.users):
        is_known = getattr(user.target, "namespace", None) in _NAMESPACES or user.target is operator.getitem
        if not is_known or user.target is aten.as_strided.default:
            return False
        if user.target in _VIEWS and rows not in itertools.accumulate(user.meta["val"].shape, operator.mul):
            return False
    return True


def _views_of(node: fx.Node) -> list[fx.Node]:
    """The node and all views of it."""
    found = [node]
    for view in found:
        found += (user for user in view.users if user.op == "call_function" and is_view_or_constant(user))
    return found


def _is_cast_parameter(node: fx.Node) -> bool:
    return node.target is _CAST and node.args[0].op == "placeholder"


def _is_half(value: Tensor) -> bool:
    return value.device.type == "cuda" and value.dtype in (torch.float16, torch.bfloat16)


def _origin(node: fx.Node) -> tuple[Any, ...]:
    """A key that is equal for nodes with the same source, casts and views; a trace repeats those for each product."""
    steps = []
    while node.target in (*_VIEWS, _CAST):
        steps.append((node.target, str(node.args[1:])))
        node = node.args[0]
    return node, *steps


def _is_transpose(node: fx.Node) -> bool:
    return node.target is aten.permute.default and list(node.args[1]) == [1, 0]


def _merge_forward(graph: fx.Graph, group: Sequence[_Projection]) -> tuple[fx.Node, list[fx.Node]]:
    """Replaces the products by slices of one; returns the concatenated weights and the slices."""
    first = group[0]
    with graph.inserting_before(first.product):
        weight = _concatenated_casts([member.weight for member in group])
        bias = [] if first.bias is None else [_concatenated_casts([member.bias for member in group])]
        transposed = _call(weight, aten.permute.default, weight, [1, 0])
        product = _call(first.product, first.product.target, *bias, first.source, transposed)
        parts = [_call(first.product, aten.slice.Tensor, product, 1, *span) for span in _spans(group)]
    for member, part in zip(group, parts, strict=True):
        member.product.replace_all_uses_with(part)
    # Keeping a slice would keep the whole product, while the partitioner counts only the slice.
    for view in _views_of(product)[1:]:
        view.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return weight, parts


def _is_kept_itself(product: fx.Node) -> bool:
    """Whether a node that Inductor cannot fuse reads the product, a view or a copy of it."""
    found = _views_of(product)
    for node in found:
        found += (view for user in node.users if user.target is aten.clone.default for view in _views_of(user))
    users = {user for node in found for user in node.users if user not in found}
    return not all(is_fusible(user) for user in users)


def _concatenated_casts(parameters: Sequence[fx.Node]) -> fx.Node:
    casts = [_call(node, _CAST, *node.args) for node in parameters]
    joined = _call(casts[0], aten.cat.default, casts)
    # Recomputed in the backward like each single cast: that is cheaper than keeping it.
    joined.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return joined


def _spans(group: Sequence[_Projection]) -> list[tuple[int, int]]:
    """Each member's range of columns in the merged product."""
    ends = list(itertools.accumulate(len(member.weight.meta["val"]) for member in group))
    return list(zip([0, *ends], ends, strict=False))


def _backward(member: _Projection) -> _Backward | None:
    """The backward of one projection; None if there is no single product that is the gradient of the source."""
    transposed_twice = _transposes(_transposes([member.weight]))
    of_source = _only(user for node in transposed_twice for user in node.users if user.args[1:] == (node,))
    if of_source is None or of_source.target is not aten.mm.default:
        return None
    grad: fx.Node = of_source.args[0]
    of_weight = _only(user for node in _transposes([grad]) for user in node.users if user.args[:1] == (node,))
    if of_weight is not None:
        is_product = of_weight.target in (aten.mm.default, aten.mm.dtype)
        if not is_product or _origin(of_weight.args[1]) != _origin(member.source):
            of_weight = None
    return _Backward(grad, of_source, of_weight)


def _transposes(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [user for node in nodes for user in node.users if _is_transpose(user)]


def _only(nodes: Iterator[fx.Node]) -> fx.Node | None:
    found = list(nodes)
    return found[0] if len(found) == 1 else None


def _merge_backward(graph: fx.Graph, group: Sequence[_Projection], weight: fx.Node) -> list[fx.Node]:
    """Merges the products of the backward; returns the nodes whose strides have changed."""
    backwards = [backward for backward in map(_backward, group) if backward is not None]
    if len(backwards) < len(group):
        return []
    addends = _in_order([_Addend.of(backward.of_source) for backward in backwards])
    of_weights = [backward.of_weight for backward in backwards if backward.of_weight is not None]
    if len(of_weights) < len(group) or len({(node.target, *node.args[2:]) for node in of_weights}) > 1:
        of_weights = []
    if not (addends or of_weights):
        return []
    places = {node: place for place, node in enumerate(graph.nodes)}
    last = max((*of_weights, *(backward.of_source for backward in backwards)), key=places.__getitem__)
    with graph.inserting_before(last):
        grad, restrided = _concatenated([backward.grad for backward in backwards])
        if grad is None:
            return []
        if addends:
            _replace_addends(graph, addends, _call(backwards[0].of_source, aten.mm.default, grad, weight))
        if of_weights:
            first = of_weights[0]
            transposed = _call(grad, aten.permute.default, grad, [1, 0])
            whole = _call(first, first.target, transposed, group[0].source, *first.args[2:])
            for node, span in zip(of_weights, _spans(group), strict=True):
                node.replace_all_uses_with(_call(node, aten.slice.Tensor, whole, 0, *span))
    return restrided


class _Addend(NamedTuple):
    """A product that is added to others after `steps`, its views and casts; `node` is the last of them."""

    steps: tuple[tuple[Any, ...], ...]
    node: fx.Node

    @classmethod
    def of(cls, product: fx.Node) -> _Addend | None:
        """None if the product is used in any other way."""
        steps, node = [], product
        while len(node.users) == 1:
            (user,) = node.users
            if user.target not in (*_VIEWS, _CAST):
                break
            steps.append((user.target, *user.args[1:]))
            node = user
        return cls(tuple(steps), node) if len(node.users) == 1 and _is_plain_addition(*node.users) else None

    @property
    def addition(self) -> fx.Node:
        (addition,) = self.node.users
        return addition


def _is_plain_addition(node: fx.Node) -> bool:
    """Whether the node adds two tensors of its own shape and dtype."""
    if not is_addition(node) or node.kwargs:
        return False
    return len({given.meta["val"].dtype for given in (*node.all_input_nodes, node)}) == 1


def _in_order(addends: Sequence[_Addend | None]) -> list[_Addend]:
    """The addends in the order in which one chain of additions sums them; [] if they are not summed in one chain."""
    known = [addend for addend in addends if addend is not None]
    if len(known) < len(addends) or len({str(addend.steps) for addend in known}) > 1:
        return []
    for first in known:
        chain = list(_chain(first.addition))
        if all(addend.addition in chain for addend in known):
            return sorted(known, key=lambda addend: chain.index(addend.addition))
    return []


def _chain(addition: fx.Node) -> Iterator[fx.Node]:
    yield addition
    while len(addition.users) == 1 and _is_plain_addition(*addition.users):
        (addition,) = addition.users
        yield addition


def _replace_addends(graph: fx.Graph, addends: Sequence[_Addend], product: fx.Node) -> None:
    """Replaces the last addend by `product`, and removes the additions of the others."""
    *others, last = addends
    for addend in others:
        addition = addend.addition
        (other,) = (node for node in addition.all_input_nodes if node is not addend.node)
        addition.replace_all_uses_with(other)
        graph.erase_node(addition)
    for target, *arguments in last.steps:
        product = _call(last.node, target, product, *arguments)
    last.node.replace_all_uses_with(product)


def _concatenated(grads: Sequence[fx.Node]) -> tuple[fx.Node | None, list[fx.Node]]:
    """The gradients concatenated, or None if too much would be copied; and the nodes whose strides have changed."""
    found = _attention_grads(grads)
    if found is not None:
        return found
    sizes = [grad.meta["val"].numel() for grad in grads]
    copied = sum(size for grad, size in zip(grads, sizes, strict=True) if not is_fusible(_producer(grad)))
    if copied > _MOST_COPIED * sum(sizes):
        return None, []
    return _call(grads[-1], aten.cat.default, list(grads), 1), []


def _producer(grad: fx.Node) -> fx.Node:
    return materialized_inputs([grad])[0] if is_view_or_constant(grad) else grad


def _attention_grads(grads: Sequence[fx.Node]) -> tuple[fx.Node, list[fx.Node]] | None:
    """The same for views of the results of one `relative_attention` backward, which can write them concatenated."""
    results = [_contiguous_source(grad) for grad in grads]
    if not all(node.target is operator.getitem for node in results) or len({node.args[0] for node in results}) > 1:
        return None
    attention: fx.Node = results[0].args[0]
    places = [node.args[1] for node in results]
    overload = next((name for name, op in ATTENTION_BWD.items() if op is attention.target), None)
    rows, columns = grads[0].meta["val"].shape
    is_whole = results[0].meta["val"].shape[2:].numel() == columns
    if overload is None or places not in ([0, 1, 2], [1, 2]) or not is_whole:
        return None
    with_query = 0 in places
    with attention.graph.inserting_before(attention):
        both = _call(attention, ATTENTION_BWD_JOINED[overload], *attention.args, with_query)
        query, joined, bias = (_call(attention, operator.getitem, both, place) for place in range(3))
        parts = [_call(attention, aten.select.int, joined, 2, slot) for slot in range(joined.meta["val"].shape[2])]
        exchanged = [*parts, bias] if with_query else [query, *parts, bias]
        for user in list(attention.users):
            user.replace_all_uses_with(exchanged[user.args[1]])
        return _call(attention, aten.view.default, joined, [rows, len(parts) * columns]), parts


def _contiguous_source(node: fx.Node) -> fx.Node:
    """The node that this is a view of, if both are contiguous and have the same elements; else the node itself."""
    source = node
    while source.target in (*_VIEWS, aten.permute.default):
        source = source.args[0]
    values = [given.meta["val"] for given in (node, source)]
    is_all = all(isinstance(value, Tensor) and value.is_contiguous() for value in values)
    return source if is_all and values[0].numel() == values[1].numel() else node


def _update_layouts(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Recomputes the metadata of all nodes whose strides change because those of `nodes` did."""
    changed = set(nodes)
    for node in graph.nodes:
        if node.op != "call_function" or changed.isdisjoint(node.all_input_nodes):
            continue
        node.meta.pop("eager_input_vals", None)
        value = _value(node.target, node.args, node.kwargs)
        if _strides(value) != _strides(node.meta["val"]):
            node.meta["val"] = value
            changed.add(node)


def _strides(value: Any) -> list[Any]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [(part.stride(), part.storage_offset()) if isinstance(part, Tensor) else None for part in values]


def _value(target: Any, args: Any, kwargs: Any) -> Any:
    given = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
    return target(*given[0], **given[1])


def _call(like: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A new node with the metadata of `like`, apart from its value."""
    node = like.graph.call_function(target, args)
    node.meta = {name: value for name, value in like.meta.items() if name not in _OF_RESULT}
    node.meta["val"] = _value(target, args, {})
    return node
