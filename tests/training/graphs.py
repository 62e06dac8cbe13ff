"""What tests of passes over traced graphs share: graphs of operations on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode


def traced(function: Callable[..., Any], *shapes: Sequence[int], device="cuda", dtype=torch.bfloat16) -> fx.Graph:
    """The graph of `function(call, *placeholders)`, where `call(op, ...)` is a node of `op`."""
    graph = fx.Graph()

    def call(op, *args, **kwargs):
        node = graph.call_function(op, args, kwargs)
        given = fx.node.map_arg((args, kwargs), lambda argument: argument.meta["val"])
        node.meta["val"] = op(*given[0], **given[1])
        return node

    with FakeTensorMode():
        nodes = []
        for number, shape in enumerate(shapes):
            nodes.append(graph.placeholder(f"input_{number}"))
            nodes[-1].meta["val"] = torch.empty(shape, dtype=dtype, device=device)
        graph.output(function(call, *nodes))
    return graph


def targets(graph: fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]
