"""Marks at which residual adds the residual stream is kept for the backward: at the same one of every layer.

Matches: in the forward part of a joint graph, chains of additions with at least three equal layers between them.
Writes: `recompute` marks on additions, MUST_SAVE or MUST_RECOMPUTE; no node changes.
Does not fire: on layers of few nodes, which the partitioner handles well by itself; on nodes that are marked already.

The min-cut partitioner saves the stream after every chain of 100 nodes, which is about every fourth addition. T5's
decoder layers have three, so the saved place would differ among four consecutive layers, and `regional_compile` would
find no equal layers. With a budget below 1 the partitioner saves none of the stream: the backward would recompute all
of it before its first layer, and hold every layer's part at once, which takes more memory than the budget saves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fuseopt.training.graph_nodes import is_addition
from fuseopt.training.passes import recomputed_norms

# Fewest nodes of a layer whose stream is kept. For shorter layers the partitioner saves the stream less than once a
# layer, at a budget of 1; below 1 the stream of very short layers would be a large share of everything kept.
# TUNED: measurement not recorded (03d1a41); `fuseopt bench train --model gpt2` measures it again.
_LONG = 90
_LONG_UNDER_BUDGET = 30
# Fewest layers in a chain; the first may have more nodes than the others.
_FEWEST_LAYERS = 3
# One sum in so many is saved if `recomputed_norms` runs; the backward writes out one more between two saved ones.
_SAVED_EVERY = 2 * recomputed_norms.ADDENDS_PER_CALL


def run(graph: fx.Graph, *, under_budget: bool = False) -> None:
    """Marks the last addition of every layer as saved.

    If `recomputed_norms` will recompute the sums from their addends, only one addition in `_SAVED_EVERY` is saved.

    Args:
        under_budget: whether the activation budget is below 1.
    """
    shortest = _LONG_UNDER_BUDGET if under_budget else _LONG
    places = {node: place for place, node in enumerate(graph.nodes)}
    for chain in _chains(_forward(graph)):
        sums = [] if under_budget else recomputed_norms.normalised_sums(chain[-1])
        if len(sums) > _SAVED_EVERY:
            for place, node in enumerate(sums, 1):
                is_kept = place % _SAVED_EVERY == 0 and place < len(sums)
                policy = CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.MUST_RECOMPUTE
                node.meta.setdefault("recompute", policy)
            continue
        additions = _layer([places[node] for node in chain], shortest)
        for node in chain[additions - 1 :: additions] if additions else ():
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def _forward(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that do not depend on tangents (gradients of outputs)."""
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    return [node for node in graph.nodes if node not in backward]


def _chains(nodes: Iterable[fx.Node]) -> Iterator[list[fx.Node]]:
    """Chains of additions, each of which has the previous one as an operand."""
    follows: dict[fx.Node, fx.Node] = {}
    for node in filter(is_addition, nodes):
        sources = [source for source in node.all_input_nodes if is_addition(source) and source not in follows]
        if len(sources) == 1:
            follows[sources[0]] = node
    for first in follows.keys() - follows.values():
        chain = [first]
        while chain[-1] in follows:
            chain.append(follows[chain[-1]])
        yield chain


def _layer(places: Sequence[int], shortest: int) -> int:
    """Number of additions per layer, from the positions of a chain's additions in the graph.

    0 if the distances between them do not repeat, or a layer has fewer than `shortest` nodes.
    """
    lengths = [end - start for start, end in itertools.pairwise(places)]
    for additions in range(1, len(places) // _FEWEST_LAYERS + 1):
        repeated = lengths[additions:]
        if repeated[additions:] == repeated[:-additions]:
            return additions if sum(repeated[:additions]) >= shortest else 0
    return 0
