"""Products of one matrix with several weights, as the projections to queries, keys and values, as one with all of them.

Under autocast on a GPU the weights of a step are cast in any case, and as well into one matrix. Forward one product
makes what several did. In the backward, what the gradients come out of writes them side by side too. One product then
makes the gradient of the matrix, whose parts were rounded and added up by a kernel, and one those of the weights.
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
from fuseopt.training.graph_nodes import MATMULS, is_addition, is_free, is_fused, roots

aten, prims = torch.ops.aten, torch.ops.prims

_VIEWS = (aten.view.default, aten._unsafe_view.default)
_CAST = prims.convert_element_type.default
# With a multiple of that each part begins at an address from which 16 bytes are read at a time.
_COLUMNS = 8
# Of ops that take any strides; nobody knows of others.
_NAMESPACES = ("aten", "prims", "fuseopt")
# The share of the gradients that may have to be copied to stand side by side.
_COPIED = 1 / 3
_OF_RESULT = ("val", "tensor_meta", "eager_input_vals")


class _Projection(NamedTuple):
    """`product = source @ weight.t() + bias`."""

    product: fx.Node  # [rows, columns]
    source: fx.Node  # [rows, inner]
    weight: fx.Node  # [columns, inner], a parameter, cast
    bias: fx.Node | None  # [columns], likewise


class _Backward(NamedTuple):
    grad: fx.Node  # of the product
    of_source: fx.Node  # grad @ weight
    of_weight: fx.Node | None  # grad.t() @ source; None where the weight is frozen


def join(graph: fx.Graph) -> None:
    """Joins products of a joint graph that take the same matrix, with no other product between them."""
    restrided: list[fx.Node] = []
    for group in _groups(graph):
        weight, parts = _join_forward(graph, group)
        restrided += parts + _join_backward(graph, group, weight)
    if restrided:
        stable_topological_sort(graph)
        graph.eliminate_dead_code()
        _lay_out_again(graph, restrided)


def _groups(graph: fx.Graph) -> list[list[_Projection]]:
    found = [_projection(node) for node in graph.nodes if node.target in MATMULS]
    runs = itertools.groupby(found, lambda member: member and (_origin(member.source), member.bias is None))
    groups = [[member for member in members if member] for _, members in runs]
    return [group for group in groups if len(group) > 1 and _are_kept_alike(group)]


def _are_kept_alike(group: Sequence[_Projection]) -> bool:
    """Whether the backward takes all of these products, or of none it takes the product itself.

    Where it takes values, but of queries and keys what a kernel made of them, as with rotary embeddings, all three
    would be kept for the values' sake.
    """
    return len({_is_taken_as_it_is(member.product) for member in group}) == 1


def _projection(product: fx.Node) -> _Projection | None:
    # What gradient checkpointing recomputes is marked.
    if product.target not in (aten.mm.default, aten.addmm.default) or product.kwargs or "recompute" in product.meta:
        return None
    *biases, source, turned = product.args
    if not _is_turned(turned) or not all(map(_is_cast_parameter, (turned.args[0], *biases))):
        return None
    weight, rows = turned.args[0], source.meta["val"]
    is_fixed = not (rows._has_symbolic_sizes_strides or weight.meta["val"]._has_symbolic_sizes_strides)
    if not is_fixed or not _is_half(rows) or len(weight.meta["val"]) % _COLUMNS or not _can_be_a_part(product):
        return None
    return _Projection(product, source, weight, *biases or [None])


def _can_be_a_part(product: fx.Node) -> bool:
    """Whether its rows may be apart: no view goes across them, and callers and their ops are given it as before."""
    rows = len(product.meta["val"])
    for user in (user for node in _views_of(product) for user in node.users):
        is_known = getattr(user.target, "namespace", None) in _NAMESPACES or user.target is operator.getitem
        if not is_known or user.target is aten.as_strided.default:
            return False
        if user.target in _VIEWS and rows not in itertools.accumulate(user.meta["val"].shape, operator.mul):
            return False
    return True


def _views_of(node: fx.Node) -> list[fx.Node]:
    """The node, and all views of it."""
    found = [node]
    for view in found:
        found += (user for user in view.users if user.op == "call_function" and is_free(user))
    return found


def _is_cast_parameter(node: fx.Node) -> bool:
    return node.target is _CAST and node.args[0].op == "placeholder"


def _is_half(value: Tensor) -> bool:
    return value.device.type == "cuda" and value.dtype in (torch.float16, torch.bfloat16)


def _origin(node: fx.Node) -> tuple[Any, ...]:
    """The same for nodes made of one by the same casts and views, of which a trace has one for each product."""
    steps = []
    while node.target in (*_VIEWS, _CAST):
        steps.append((node.target, str(node.args[1:])))
        node = node.args[0]
    return node, *steps


def _is_turned(node: fx.Node) -> bool:
    return node.target is aten.permute.default and list(node.args[1]) == [1, 0]


def _join_forward(graph: fx.Graph, group: Sequence[_Projection]) -> tuple[fx.Node, list[fx.Node]]:
    """The weights side by side, and the parts of the product with them, which are in the place of the products."""
    first = group[0]
    with graph.inserting_before(first.product):
        weight = _cast_side_by_side([member.weight for member in group])
        bias = [] if first.bias is None else [_cast_side_by_side([member.bias for member in group])]
        turned = _call(weight, aten.permute.default, weight, [1, 0])
        product = _call(first.product, first.product.target, *bias, first.source, turned)
        parts = [_call(first.product, aten.slice.Tensor, product, 1, *span) for span in _spans(group)]
    for member, part in zip(group, parts, strict=True):
        member.product.replace_all_uses_with(part)
    # Kept would be all of the product, whichever part of it the partitioner counts.
    for view in _views_of(product)[1:]:
        view.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return weight, parts


def _is_taken_as_it_is(product: fx.Node) -> bool:
    """Whether something that is no kernel's part takes it, or a copy of it."""
    found = _views_of(product)
    for node in found:
        found += (view for user in node.users if user.target is aten.clone.default for view in _views_of(user))
    users = {user for node in found for user in node.users if user not in found}
    return not all(is_fused(user) for user in users)


def _cast_side_by_side(parameters: Sequence[fx.Node]) -> fx.Node:
    casts = [_call(node, _CAST, *node.args) for node in parameters]
    joined = _call(casts[0], aten.cat.default, casts)
    # As each cast by itself: it takes less time than memory.
    joined.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return joined


def _spans(group: Sequence[_Projection]) -> list[tuple[int, int]]:
    """Of each member's columns among those of all."""
    ends = list(itertools.accumulate(len(member.weight.meta["val"]) for member in group))
    return list(zip([0, *ends], ends, strict=False))


def _backward(member: _Projection) -> _Backward | None:
    """What there is of the product's backward, where it is that of one call; None without a gradient of the source."""
    turned_back = _turned(_turned([member.weight]))
    of_source = _only(user for node in turned_back for user in node.users if user.args[1:] == (node,))
    if of_source is None or of_source.target is not aten.mm.default:
        return None
    grad: fx.Node = of_source.args[0]
    of_weight = _only(user for node in _turned([grad]) for user in node.users if user.args[:1] == (node,))
    if of_weight is not None:
        is_product = of_weight.target in (aten.mm.default, aten.mm.dtype)
        if not is_product or _origin(of_weight.args[1]) != _origin(member.source):
            of_weight = None
    return _Backward(grad, of_source, of_weight)


def _turned(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [user for node in nodes for user in node.users if _is_turned(user)]


def _only(nodes: Iterator[fx.Node]) -> fx.Node | None:
    found = list(nodes)
    return found[0] if len(found) == 1 else None


def _join_backward(graph: fx.Graph, group: Sequence[_Projection], weight: fx.Node) -> list[fx.Node]:
    """Joins the gradients; returns what is laid out otherwise than before."""
    backwards = [backward for backward in map(_backward, group) if backward is not None]
    if len(backwards) < len(group):
        return []
    added = _in_order([_Addend.of(backward.of_source) for backward in backwards])
    learnt = [backward.of_weight for backward in backwards if backward.of_weight is not None]
    if len(learnt) < len(group) or len({(node.target, *node.args[2:]) for node in learnt}) > 1:
        learnt = []
    if not (added or learnt):
        return []
    places = {node: place for place, node in enumerate(graph.nodes)}
    last = max((*learnt, *(backward.of_source for backward in backwards)), key=places.__getitem__)
    with graph.inserting_before(last):
        grad, restrided = _side_by_side([backward.grad for backward in backwards])
        if grad is None:
            return []
        if added:
            _add_once(graph, added, _call(backwards[0].of_source, aten.mm.default, grad, weight))
        if learnt:
            first = learnt[0]
            turned = _call(grad, aten.permute.default, grad, [1, 0])
            whole = _call(first, first.target, turned, group[0].source, *first.args[2:])
            for node, span in zip(learnt, _spans(group), strict=True):
                node.replace_all_uses_with(_call(node, aten.slice.Tensor, whole, 0, *span))
    return restrided


class _Addend(NamedTuple):
    """What a gradient is added to others as: a product, behind views and casts."""

    steps: tuple[tuple[Any, ...], ...]
    node: fx.Node

    @classmethod
    def of(cls, product: fx.Node) -> _Addend | None:
        """None where the product becomes something else."""
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
    """Whether it adds up two tensors like the one that it returns."""
    if not is_addition(node) or node.kwargs:
        return False
    return len({given.meta["val"].dtype for given in (*node.all_input_nodes, node)}) == 1


def _in_order(addends: Sequence[_Addend | None]) -> list[_Addend]:
    """These as they are added up, one after the other, to a sum that nothing else takes a part of; else none."""
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


def _add_once(graph: fx.Graph, addends: Sequence[_Addend], product: fx.Node) -> None:
    """Has the sum of these take `product` in the place of the last, and none of the others."""
    *others, last = addends
    for addend in others:
        addition = addend.addition
        (other,) = (node for node in addition.all_input_nodes if node is not addend.node)
        addition.replace_all_uses_with(other)
        graph.erase_node(addition)
    for target, *arguments in last.steps:
        product = _call(last.node, target, product, *arguments)
    last.node.replace_all_uses_with(product)


def _side_by_side(grads: Sequence[fx.Node]) -> tuple[fx.Node | None, list[fx.Node]]:
    """These as one matrix, unless too much would be copied for it; and what is laid out otherwise than before."""
    found = _attention_grads(grads)
    if found is not None:
        return found
    sizes = [grad.meta["val"].numel() for grad in grads]
    copied = sum(size for grad, size in zip(grads, sizes, strict=True) if not is_fused(_made_by(grad)))
    if copied > _COPIED * sum(sizes):
        return None, []
    return _call(grads[-1], aten.cat.default, list(grads), 1), []


def _made_by(grad: fx.Node) -> fx.Node:
    return roots([grad])[0] if is_free(grad) else grad


def _attention_grads(grads: Sequence[fx.Node]) -> tuple[fx.Node, list[fx.Node]] | None:
    """Likewise of gradients that are results of one `relative_attention`, in other shapes."""
    results = [_seen_through(grad) for grad in grads]
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


def _seen_through(node: fx.Node) -> fx.Node:
    """What this is a view of, where it is all of that as it is in memory."""
    source = node
    while source.target in (*_VIEWS, aten.permute.default):
        source = source.args[0]
    values = [given.meta["val"] for given in (node, source)]
    is_all = all(isinstance(value, Tensor) and value.is_contiguous() for value in values)
    return source if is_all and values[0].numel() == values[1].numel() else node


def _lay_out_again(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Has what is made of these nodes, whose strides are no longer those of the trace, say what its own are."""
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
    """A node that is traced as `like` was."""
    node = like.graph.call_function(target, args)
    node.meta = {name: value for name, value in like.meta.items() if name not in _OF_RESULT}
    node.meta["val"] = _value(target, args, {})
    return node
