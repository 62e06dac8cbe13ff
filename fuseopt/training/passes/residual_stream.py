"""Where a step keeps the residual stream: in the same place of every layer, so that equal layers stay equal.

The partitioner keeps it wherever a chain of 100 operations ends, as every fourth addition. In layers with three, as
those of T5's decoder, that is another place in each of four layers, and nothing repeats but all four. Below a budget
of 1 it keeps none of it: the backward's first layer then has to have the stream computed again from its start, and all
layers' parts of it stay until they are needed, more than the budget spares.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fuseopt.training.graph_nodes import is_addition
from fuseopt.training.passes import recomputed_norms

# At a budget of 1 layers of fewer nodes are left to the partitioner, which keeps less than once a layer. Below it the
# stream of layers of few operations would be a good part of all that is kept.
_LONG = 90
_LONG_UNDER_BUDGET = 30
# The first of them may have more nodes than the others.
_FEWEST_LAYERS = 3
# Between two that are kept the backward writes out one more.
_RARELY = 2 * recomputed_norms.ADDENDS_A_CALL


def keep(graph: fx.Graph, *, under_budget: bool = False) -> None:
    """Marks the last addition of every long layer of a joint graph as what is kept for the backward.

    Where `recomputed_norms` read what a stream is added up from, one addition in `_RARELY` is, and none of the others.

    Args:
        under_budget: less is kept than by a budget of 1, and layers are long from fewer nodes on.
    """
    shortest = _LONG_UNDER_BUDGET if under_budget else _LONG
    places = {node: place for place, node in enumerate(graph.nodes)}
    for chain in _chains(_forward(graph)):
        sums = [] if under_budget else recomputed_norms.normalised_sums(chain[-1])
        if len(sums) > _RARELY:
            for place, node in enumerate(sums, 1):
                is_kept = place % _RARELY == 0 and place < len(sums)
                policy = CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.MUST_RECOMPUTE
                node.meta.setdefault("recompute", policy)
            continue
        additions = _layer([places[node] for node in chain], shortest)
        for node in chain[additions - 1 :: additions] if additions else ():
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def _forward(graph: fx.Graph) -> list[fx.Node]:
    """What the graph does without the gradients of what it returns."""
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    return [node for node in graph.nodes if node not in backward]


def _chains(nodes: Iterable[fx.Node]) -> Iterator[list[fx.Node]]:
    """Additions to what another one returned, one after the other."""
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
    """After how many additions at these places the nodes between them repeat.

    0 where they do not, or do so in layers of fewer than `shortest` nodes.
    """
    lengths = [end - start for start, end in itertools.pairwise(places)]
    for additions in range(1, len(places) // _FEWEST_LAYERS + 1):
        repeated = lengths[additions:]
        if repeated[additions:] == repeated[:-additions]:
            return additions if sum(repeated[:additions]) >= shortest else 0
    return 0
