"""Chooses after which nodes `regional_compile` cuts a traced graph, so that its layers become equal regions."""

from __future__ import annotations

import bisect
import collections
import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, fx
from torch._inductor import inductor_prims

from fuseopt.training.dynamic_shapes import hint
from fuseopt.training.graph_nodes import MATMULS, is_fusible, is_tensor, materialized_inputs, signature
from fuseopt.training.region_crossings import avoid_crossings

# Cost of a region call, in nodes to compile: shorter regions leave fewer kernels to fuse.
_NODES_PER_CALL = 8
# A cut must leave at most this share of the nodes to compile, and at most `_SLACK` times the least of all cuts.
# TUNED: measurement not recorded (ec0b193); `fuseopt bench train --model t5-base` measures it again.
_WORTH = 0.7
_SLACK = 1.25
_SEEDED = (inductor_prims.lookup_seed, inductor_prims.random)


def cut(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The nodes in regions, each ending with a matmul of one signature; [] if no cut is worth it.

    Among the signatures that leave few nodes to compile, takes the one whose cuts add the least memory traffic.
    """
    signs = [signature(node) for node in nodes]
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
        key=lambda mark: (_crossing_bytes(uses, _spans(signs, mark)), weights[mark]),
        default=None,
    )
    if best is None:
        return []
    first, *others = (list(nodes[start:end]) for start, end in _spans(signs, best))
    return avoid_crossings([*_split_backward_start(first), *others])


def _split_backward_start(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Splits the first region of a backward in three: before its first matmul, that weight's gradient, and the rest.

    Memory use peaks when the backward begins, because everything kept exists then. The split frees the inputs of the
    gradients of loss and last norm, and the activation recomputed for the weight's gradient, before the rest runs. The
    rest recomputes what it needs of that activation.
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
    regions = head, *([node for node in others if node in part] for part in (early, late))
    return [list(region) for region in regions if region]


def _sources(nodes: Iterable[fx.Node], among: set[fx.Node]) -> set[fx.Node]:
    """These nodes and all their ancestors that are reached through nodes of `among`."""
    found, waiting = set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += among.intersection(materialized_inputs([node]))
    return found


def _is_only_returned(node: fx.Node) -> bool:
    """Whether the node's result is only returned, possibly after operations that take nothing else, such as casts."""
    return all(
        user.op == "output" or (len(user.all_input_nodes) == 1 and _is_only_returned(user)) for user in node.users
    )


def _is_recomputed(node: fx.Node) -> bool:
    """Whether the node is cheap enough to compute in two regions: pointwise, or random numbers from a seed."""
    return node.target in _SEEDED or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _spans(signs: Sequence[str], mark: str) -> list[tuple[int, int]]:
    ends = [place + 1 for place, signature in enumerate(signs) if signature == mark]
    return [(start, end) for start, end in zip([0, *ends], [*ends, len(signs)], strict=True) if start < end]


def _fused_uses(nodes: Sequence[fx.Node]) -> list[tuple[int, list[int]]]:
    """For each tensor: its bytes, and the positions of the fusible nodes that write and read it."""
    places = {node: place for place, node in enumerate(nodes)}
    uses: dict[fx.Node, list[int]] = collections.defaultdict(list)
    for node, place in places.items():
        if is_fusible(node):
            for tensor in (node, *materialized_inputs([node])):
                uses[tensor].append(place)
    return [(_bytes(tensor.meta["val"]), at) for tensor, at in uses.items() if is_tensor(tensor) and len(at) > 1]


def _bytes(tensor: Tensor) -> int:
    return hint(tensor.numel()) * tensor.element_size()


def _crossing_bytes(uses: Sequence[tuple[int, list[int]]], spans: Sequence[tuple[int, int]]) -> int:
    """Bytes of the tensors used in several regions, counted once for each region after the first."""
    starts = [start for start, _ in spans]
    return sum(size * (len({bisect.bisect(starts, place) for place in at}) - 1) for size, at in uses)
