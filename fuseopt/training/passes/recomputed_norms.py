"""Computes the backward of LayerNorms over a recomputed residual stream with `ops.layer_norm_of_sum_bwd`.

Matches: in a backward graph on a GPU, torch's decomposition of LayerNorm's backward, node by node, where the norm's
    input is a float32 sum of 16-bit tensors (the residual stream) and the matrix has at least 2**20 elements.
Writes: one call of the op, which recomputes the sum from its addends and returns the gradients of input, weight, bias
    and of the addends' biases; views and casts of its results.
Does not fire: on any other decomposition, dynamic sizes, strides that the kernel does not read, a norm whose base sum
    no other norm reads, or without the native library.

Inductor can recompute the sum as well. But it writes a sum that several kernels read to memory first, and computes
bias gradients from results that it has just written.

Read `run`, `_norm_of` (what is matched), `_call_for` (arguments and results of the call), `_replace`.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fuseopt.ops import registry
from fuseopt.ops.layer_norm_of_sum_bwd import ALIGNMENT, RAW, fits
from fuseopt.training.graph_nodes import MATMULS, RESHAPES, is_addition, is_view_or_constant, materialized_inputs
from fuseopt.tuning import tuned

aten, prims = torch.ops.aten, torch.ops.prims
_HALVES = (torch.float16, torch.bfloat16)
_CASTS = (prims.convert_element_type.default,)
# Most addends that a call sums. For more, the partial sum is written to memory once for every third addition, which
# costs less than summing more addends in each call.
ADDENDS_PER_CALL = 3


class _Norm(NamedTuple):
    """Nodes of one norm's backward.

    Attributes:
        grad: gradient of the output, float32.
        x: the norm's input.
        xhat: `(x - mean) * rstd`.
        grad_input: gradient of `x` through the norm alone.
    """

    grad: fx.Node
    weight: fx.Node
    x: fx.Node
    mean: fx.Node
    rstd: fx.Node
    xhat: fx.Node
    grad_input: fx.Node


class _Call(NamedTuple):
    """Arguments of a call, the shape of its matrices, and for each result the nodes that it replaces."""

    given: tuple[Any, ...]
    shape: tuple[int, ...]
    results: tuple[Sequence[fx.Node], ...]

    @property
    def base(self) -> fx.Node:
        return self.given[2]


def run(graph: fx.Graph) -> None:
    calls = [call for node in graph.nodes if (norm := _norm_of(node)) and (call := _call_for(norm))]
    bases = collections.Counter(call.base for call in calls)
    made: dict[fx.Node, fx.Node] = {}
    for call in calls:
        # A base sum that only one norm reads would have to be written to memory for it alone.
        if _is_in_memory(call.base) or bases[call.base] > 1:
            _replace(graph, call, made)
    graph.eliminate_dead_code()


def is_available() -> bool:
    """Whether the op can run here. Loads the native library, but never builds it."""
    return registry.pick("layer_norm_of_sum_bwd", "auto", torch.device("cuda"), _HALVES) == "cuda"


def _added_up(x: fx.Node) -> tuple[fx.Node, list[fx.Node], list[fx.Node]]:
    """Decomposes the float32 sum `x`: its first operand, the 16-bit addends in order, and the node of each sum."""
    addends: list[fx.Node] = []
    sums: list[fx.Node] = []
    while is_addition(x) and not x.kwargs:
        narrow, wide = sorted(map(_uncast, x.args), key=lambda node: node.meta["val"].dtype not in _HALVES)
        if (
            narrow.meta["val"].dtype not in _HALVES
            or wide.meta["val"].dtype != torch.float32
            or not _is_in_memory(narrow)
        ):
            break
        addends.insert(0, narrow)
        sums.insert(0, x)
        x = wide
    return x, addends, sums


def normalised_sums(x: fx.Node) -> list[fx.Node]:
    """The sums of a residual stream in a joint graph, up to its last one, `x`.

    [] unless the backward of the norm over each of them will be a call of the op.
    """
    *_, sums = _added_up(x)
    is_normalised = all(any(user.target is aten.var_mean.correction for user in sum.users) for sum in sums)
    return sums if is_normalised and _is_supported(x.meta["val"]) and is_available() else []


def _norm_of(grad_input: fx.Node) -> _Norm | None:
    """The norm whose input gradient, as torch decomposes it, is this node; else None."""
    scale, inner = _arguments(grad_input, aten.mul.Tensor)
    rstd, columns = _arguments(scale, aten.div.Tensor)
    centred, along = _arguments(inner, aten.sub.Tensor)
    scaled, total = _arguments(centred, aten.sub.Tensor)
    product, count = _arguments(scaled, aten.mul.Tensor)
    xhat, dot = _arguments(along, aten.mul.Tensor)
    grad, weight = _arguments(product, aten.mul.Tensor)
    difference, _ = _arguments(xhat, aten.mul.Tensor)
    x, mean = _arguments(difference, aten.sub.Tensor)
    if not all(isinstance(node, fx.Node) for node in (rstd, x, mean, grad, weight)):
        return None
    is_norm = (
        columns == count == x.meta["val"].shape[-1]
        and _arguments(xhat, aten.mul.Tensor) == (difference, rstd)
        and _sums_rows_of(total, product)
        and dot.target is aten.sum.dim_IntList
        and _arguments(dot.args[0], aten.mul.Tensor) == (product, xhat)
        and _sums_rows_of(dot, dot.args[0])
    )
    return _Norm(grad, weight, x, mean, rstd, xhat, grad_input) if is_norm else None


def _arguments(node: Any, op: Any) -> tuple[Any, Any]:
    """The two arguments of a call of `op`; (None, None) for any other node."""
    is_call = isinstance(node, fx.Node) and node.target is op and len(node.args) == 2 and not node.kwargs
    return node.args if is_call else (None, None)


def _sums_rows_of(node: Any, summand: fx.Node) -> bool:
    last = summand.meta["val"].dim() - 1
    return isinstance(node, fx.Node) and node.target is aten.sum.dim_IntList and node.args == (summand, [last], True)


def _call_for(norm: _Norm) -> _Call | None:
    """The call of the op for a norm, or None if the op does not support it."""
    x, grad = norm.x.meta["val"], _uncast(norm.grad)
    dtype = grad.meta["val"].dtype
    base, addends, sums = _added_up(norm.x)
    kept = max(len(addends) - 1, 0) // ADDENDS_PER_CALL * ADDENDS_PER_CALL
    base, addends = sums[kept - 1] if kept else base, addends[kept:]
    is_supported = (
        _is_supported(x)
        and dtype in _HALVES
        and {addend.meta["val"].dtype for addend in addends} <= {dtype}
        and _is_in_memory(grad)
        and norm.mean.meta["val"].shape == norm.rstd.meta["val"].shape == (*x.shape[:-1], 1)
    )
    totals = [user for user in norm.grad_input.users if is_addition(user) and user.meta["val"].dtype == torch.float32]
    shifted = [
        (node, bias)
        for scaled in _calls(norm.xhat, norm.weight, aten.mul.Tensor)
        for node in scaled.users
        for other, bias in [_arguments(node, aten.add.Tensor)]
        if other is scaled and _is_parameter(bias, x)
    ]
    if not is_supported or not _is_parameter(norm.weight, x):
        return None
    if len(norm.grad_input.users) != 1 or len(totals) != 1 or len(shifted) != 1:
        return None
    ((total,), ((output, bias),)) = totals, shifted
    (grad_sum,) = (node for node in total.args if node is not norm.grad_input)
    outputs, rounded = list(_casts(output, dtype)), list(_casts(total, dtype))
    given = (grad, grad_sum, base, addends, norm.weight, bias, norm.mean, norm.rstd)
    if not outputs or not all(map(_is_readable, (*given[:3], *addends, *given[4:]))):
        return None
    products = _calls(norm.grad, norm.xhat, aten.mul.Tensor)
    return _Call(
        given,
        tuple(x.shape),
        (
            outputs,
            [total],
            rounded,
            [sums for product in products for sums in _column_sums(product)],
            list(_column_sums(norm.grad)),
            [sums for node in rounded for sums in _column_sums(node)],
        ),
    )


def _is_supported(x: Tensor) -> bool:
    if x.dtype != torch.float32 or x._has_symbolic_sizes_strides or not _is_on_gpu(x):
        return False
    # For smaller matrices launches dominate, and the op needs as many.
    return x.numel() >= tuned("recomputed_norms_min_elements", x.device) and fits(x.shape[-1], torch.bfloat16)


def _is_parameter(node: Any, x: Tensor) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.dtype == torch.float32 and value.shape == x.shape[-1:]


def _is_readable(node: fx.Node) -> bool:
    """Whether the kernel supports the tensor's strides and alignment."""
    value = node.meta["val"]
    return value.is_contiguous() and value.storage_offset() * value.itemsize % ALIGNMENT == 0


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _calls(left: fx.Node, right: fx.Node, op: Any) -> list[fx.Node]:
    return [user for user in left.users if _arguments(user, op) in ((left, right), (right, left))]


def _uncast(node: fx.Node) -> fx.Node:
    """The 16-bit tensor of which this node is a view or a cast; else the node itself."""
    source = node
    while source.target in (*RESHAPES, *_CASTS):
        is_half = source.meta["val"].dtype in _HALVES
        if is_half and source.args[0].meta["val"].dtype not in _HALVES:
            break
        source = source.args[0]
    return source if source.meta["val"].dtype in _HALVES else node


def _is_in_memory(node: fx.Node) -> bool:
    """Whether the tensor is in memory anyway: an input, or the result of a matmul or another opaque op."""
    sources = materialized_inputs([node]) if is_view_or_constant(node) else [node]
    return all(source.op == "placeholder" or source.target in (*MATMULS, operator.getitem) for source in sources)


def _casts(node: fx.Node, dtype: torch.dtype) -> Iterator[fx.Node]:
    """Casts of the node, or of row-preserving views of it, to `dtype`."""
    for user in node.users:
        if user.target in _CASTS and user.args[1] == dtype:
            yield user
        elif _keeps_columns(user):
            yield from _casts(user, dtype)


def _keeps_columns(node: fx.Node) -> bool:
    return node.target in RESHAPES and node.meta["val"].shape[-1:] == node.args[0].meta["val"].shape[-1:]


def _column_sums(node: fx.Node) -> Iterator[fx.Node]:
    """Sums of the node over all dimensions but the last, also through row-preserving views."""
    value = node.meta["val"]
    for user in node.users:
        if user.target is aten.sum.dim_IntList and user.kwargs.keys() <= {"dtype"}:
            if user.args[1] == list(range(value.dim() - 1)):
                yield user
        elif _keeps_columns(user):
            yield from _column_sums(user)


def _readers(nodes: Sequence[fx.Node], counts: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Users of the nodes, direct or through other such users, for which `counts` is true."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        fresh = {user for user in waiting.pop().users if counts(user)} - found
        found |= fresh
        waiting += fresh
    return found


def _replace(graph: fx.Graph, call: _Call, made: dict[fx.Node, fx.Node]) -> None:
    """Inserts the call after its last argument, and moves users of its results that came earlier after it.

    Args:
        made: node -> its replacement, of earlier calls; updated.
    """
    call = call._replace(given=fx.node.map_arg(call.given, lambda node: made.get(node, node)))
    inputs = [node for given in call.given for node in (given if isinstance(given, Sequence) else [given])]
    places = {node: place for place, node in enumerate(graph.nodes)}
    cursor = max(inputs, key=places.__getitem__)
    early = _readers([node for nodes in call.results for node in nodes], lambda node: places[node] <= places[cursor])
    if not early.isdisjoint(inputs):
        return

    def insert(value: Any, target: Any, *args: Any) -> fx.Node:
        nonlocal cursor
        with graph.inserting_after(cursor):
            cursor = graph.call_function(target, args)
        cursor.meta["val"] = value
        return cursor

    def shaped(node: fx.Node, shape: Sequence[int]) -> fx.Node:
        value = node.meta["val"]
        return node if value.shape == shape else insert(value.view(shape), aten.view.default, node, list(shape))

    grad, grad_sum, base, addends, *others = call.given
    grad, grad_sum, base, *addends = (shaped(node, call.shape) for node in (grad, grad_sum, base, *addends))
    given = (grad, grad_sum, base, addends, *others[:2], *(shaped(node, call.shape[:-1]) for node in others[2:]))
    values = RAW["cuda"](*fx.node.map_arg(given, lambda node: node.meta["val"]))
    results = insert(values, RAW["cuda"], *given)
    for number, nodes in enumerate(call.results):
        if not nodes:
            continue
        result = insert(values[number], operator.getitem, results, number)
        for node in nodes:
            value = node.meta["val"]
            made[node] = shaped(result, value.shape)
            if value.dtype != result.meta["val"].dtype:
                made[node] = insert(value, prims.convert_element_type.default, made[node], value.dtype)
            node.replace_all_uses_with(made[node])
    for node in sorted(early, key=places.__getitem__):
        cursor.append(node)
        cursor = node
