"""Computes pointwise nodes in the region that reads them, if that takes less memory traffic than handing them over.

A tensor that one region computes and another reads is written to memory and kept until then. Two kinds are not worth
it:

- a node that follows from one graph input, such as its cast to float32 or its normalised rows: every region that reads
  it computes it again from that input;
- a sum of matmuls that one later region alone reads: it is computed there.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from fuseopt.training.dynamic_shapes import hint
from fuseopt.training.graph_nodes import is_fusible, materialized_inputs, stays_outside


def avoid_crossings(regions: Sequence[Sequence[fx.Node]]) -> list[list[fx.Node]]:
    """The regions with such nodes where they are read; nodes that nothing reads any more are left out.

    Args:
        regions: nodes in graph order, of all regions of one graph. A node may be in several.
    """
    (output,) = regions[0][0].graph.find_nodes(op="output")
    returned = set(materialized_inputs([output]))
    places = {node: place for place, node in enumerate(output.graph.nodes)}
    found = [set(region) for region in regions]
    _move_to_only_reader(found, returned, places)
    for region in found:
        for node in [node for node in region if is_fusible(node)]:
            for given in materialized_inputs([node]):
                region |= set() if given in region else _from_one_input(given) or set()
    return [_read_nodes(region, found, returned, places) for region in found]


def _move_to_only_reader(regions: Sequence[set[fx.Node]], returned: set[fx.Node], places: dict[fx.Node, int]) -> None:
    """Moves pointwise nodes of matmuls and graph inputs to the one other region that reads them, by fusible nodes."""
    readers = collections.defaultdict(list)
    for number, region in enumerate(regions):
        for node in region:
            for given in materialized_inputs([node]):
                readers[given].append((number, node))
    homes = collections.Counter(node for region in regions for node in region)
    for number, region in enumerate(regions):
        for node in sorted(region, key=places.__getitem__, reverse=True):
            numbers = {reader for reader, _ in readers[node]}
            if (
                _is_pointwise(node)
                and node not in returned
                and homes[node] == 1
                and len(numbers) == 1
                and min(numbers) > number
                and all(is_fusible(reader) for _, reader in readers[node])
                and not any(given in region and is_fusible(given) for given in materialized_inputs([node]))
            ):
                region.remove(node)
                regions[min(numbers)].add(node)


def _from_one_input(node: fx.Node) -> set[fx.Node] | None:
    """The pointwise nodes that compute `node` from graph inputs, only one of which has as many elements; else None."""
    found, waiting = {node}, [node]
    sources: set[fx.Node] = set()
    while waiting:
        current = waiting.pop()
        if not _is_pointwise(current):
            return None
        for given in materialized_inputs([current]):
            if stays_outside(given):
                sources.add(given)
            elif given not in found:
                found.add(given)
                waiting.append(given)
    size = hint(node.meta["val"].numel())
    large = [given for given in sources if hint(given.meta["val"].numel()) >= size]
    return found if len(large) == 1 else None


def _is_pointwise(node: fx.Node) -> bool:
    return node.op == "call_function" and torch.Tag.pointwise in getattr(node.target, "tags", ())


def _read_nodes(
    region: set[fx.Node], regions: Iterable[set[fx.Node]], returned: set[fx.Node], places: dict[fx.Node, int]
) -> list[fx.Node]:
    """The region in graph order, without fusible nodes that nothing reads in it, and no other region lacks."""
    needed = set(returned)
    for other in regions:
        if other is not region:
            needed |= set(materialized_inputs(sorted(other, key=places.__getitem__))) - other
    kept = []
    for node in sorted(region, key=places.__getitem__, reverse=True):
        if node in needed or not is_fusible(node):
            kept.append(node)
            needed |= set(materialized_inputs([node]))
    return kept[::-1]
