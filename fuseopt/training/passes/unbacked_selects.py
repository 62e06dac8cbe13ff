"""Lets Inductor take the last entry of a dimension whose size depends on data, as T5ForSequenceClassification does.

Matches: in a joint graph, `select` with a negative index in a dimension of unbacked size.
Writes: `index` with a tensor that holds that index.
Does not fire: for sizes that are known or come from inputs.

Inductor lowers `select` to a view of a slice, and has to know for it whether the size is 1.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

aten = torch.ops.aten


def run(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.select.int):
        source, dim, index = node.args
        value = source.meta["val"]
        if not isinstance(index, int) or index >= 0 or not free_unbacked_symbols(value.shape[dim]):
            continue
        with graph.inserting_before(node):
            options = {"dtype": torch.int64, "device": value.device}
            position = graph.call_function(aten.full.default, ([], index), options)
            position.meta["val"] = value.new_full((), index, dtype=torch.int64)
            entry = graph.call_function(aten.index.Tensor, (source, [None] * (dim % value.dim()) + [position]))
        entry.meta = dict(node.meta)
        node.replace_all_uses_with(entry)
        graph.erase_node(node)
