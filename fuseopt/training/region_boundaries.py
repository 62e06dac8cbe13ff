"""Where a traced graph is cut so that its layers fall into equal parts; `repeated_parts` says what for."""

from __future__ import annotations

import bisect
import collections
import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, fx
from torch._inductor import inductor_prims

from fuseopt.training.changing_sizes import hint
from fuseopt.training.graph_nodes import MATMULS, is_fused, is_tensor, roots, sign

# What a call weighs beside nodes to compile: the shorter the parts, the fewer kernels can be fused.
_NODES_PER_CALL = 8
# The share of the nodes that may be left to compile for the cut to pay, and how much more than the least.
_WORTH = 0.7
_SLACK = 1.25
_SEEDED = (inductor_prims.lookup_seed, inductor_prims.random)


def cut(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The nodes in parts, each up to a matmul of one kind; none where no kind pays.

    Of the kinds that leave little to compile: that whose cuts make kernels read the least once more.
    """
    signs = [sign(node) for node in nodes]
    matmuls = (mark for node, mark in zip(nodes, signs, strict=True) if node.target in MATMULS)
    weights = {}
    for mark, count in collections.Counter(matmuls).items():
        if count > 2:
            kinds = {tuple(signs[start:end]) for start, end in _spans(signs, mark)}
            weights[mark] = sum(map(len, kinds)) + _NODES_PER_CALL * (count + 1)
    most = min(_WORTH * len(nodes), _SLACK * min(weights.values(), default=0))
    uses = _fused_uses(nodes)
    best = min(
        (mark for mark, weight in weights.items() if weight <= most),
        key=lambda mark: (_severed(uses, _spans(signs, mark)), weights[mark]),
        default=None,
    )
    if best is None:
        return []
    first, *others = (list(nodes[start:end]) for start, end in _spans(signs, best))
    return [*_begun(first), *others]


def _begun(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The first part of a backward in three: up to its first matmul, the gradient of that one's weight, and the rest.

    When it begins, all that was kept is there. So what the gradients of a loss and a last norm take, and the activation
    that is recomputed for the weight, are not to stay beside what comes next. The rest recomputes of that activation
    what it needs.
    """
    matmuls = [place for place, node in enumerate(nodes) if node.target in MATMULS]
    gradient = next((nodes[place] for place in matmuls[:2] if _is_only_returned(nodes[place])), None)
    if gradient is None:
        return [list(nodes)]
    head, others = nodes[: matmuls[0]], nodes[matmuls[0] :]
    own = set(others)
    early = _sources([gradient], own)
    early |= {node for node in others if node.target is operator.getitem and node.args[0] in early}
    late = own - early
    late |= _sources(late, {node for node in early if _is_recomputed(node)})
    parts = head, *([node for node in others if node in part] for part in (early, late))
    return [list(part) for part in parts if part]


def _sources(nodes: Iterable[fx.Node], among: set[fx.Node]) -> set[fx.Node]:
    """These nodes, and those that go into them through others of `among`."""
    found, waiting = set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += among.intersection(roots([node]))
    return found


def _is_only_returned(node: fx.Node) -> bool:
    """Whether all that becomes of it is returned, after views, casts and the like, which take nothing else."""
    return all(
        user.op == "output" or (len(user.all_input_nodes) == 1 and _is_only_returned(user)) for user in node.users
    )


def _is_recomputed(node: fx.Node) -> bool:
    """Whether it may be part of two kernels, for what it costs; a mask comes out of the same seed again."""
    return node.target in _SEEDED or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _spans(signs: Sequence[str], mark: str) -> list[tuple[int, int]]:
    ends = [place + 1 for place, sign in enumerate(signs) if sign == mark]
    return [(start, end) for start, end in zip([0, *ends], [*ends, len(signs)], strict=True) if start < end]


def _fused_uses(nodes: Sequence[fx.Node]) -> list[tuple[int, list[int]]]:
    """Of each tensor the bytes, and the places of the nodes that make and take it inside of fused kernels."""
    places = {node: place for place, node in enumerate(nodes)}
    uses: dict[fx.Node, list[int]] = collections.defaultdict(list)
    for node, place in places.items():
        if is_fused(node):
            for tensor in (node, *roots([node])):
                uses[tensor].append(place)
    return [(_bytes(tensor.meta["val"]), at) for tensor, at in uses.items() if is_tensor(tensor) and len(at) > 1]


def _bytes(tensor: Tensor) -> int:
    return hint(tensor.numel()) * tensor.element_size()


def _severed(uses: Sequence[tuple[int, list[int]]], spans: Sequence[tuple[int, int]]) -> int:
    """Bytes of what is made or taken in one part and taken in another, once for each other one."""
    starts = [start for start, _ in spans]
    return sum(size * (len({bisect.bisect(starts, place) for place in at}) - 1) for size, at in uses)
