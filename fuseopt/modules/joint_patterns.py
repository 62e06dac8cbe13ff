"""Inductor's patterns over a joint graph, left out where they would find nothing.

They put kernels in the place of attention, softmax and losses that are written out, and pad products of sizes that no
fast kernel has. Looking for them takes seconds of a first step, and one of fused kernels has none. What else they do,
take views of views and casts of casts together, costs nothing where it is left as it is.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from fuseopt.modules.graph_nodes import is_tensor

aten = torch.ops.aten

# Of attention, softmax, a loss's gradient, and rows taken in random order.
_WRITTEN_OUT = (
    aten.bmm.default,
    aten.baddbmm.default,
    aten.amax.default,
    aten.scatter.value,
    aten.randperm.default,
)
_PRODUCTS = (aten.mm.default, aten.addmm.default)
# In elements. No product is padded to more.
_ALIGNMENT = 8


class JointPatterns(CustomGraphPass):
    """Inductor's pass ahead of the patterns. As a context it ends with them as they were when it began."""

    def __init__(self) -> None:
        self._left_out = contextlib.ExitStack()

    def __enter__(self) -> JointPatterns:
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on()

    def __call__(self, graph: fx.Graph) -> None:
        if not _has_work(graph):
            self._left_out.enter_context(inductor_config.patch(pattern_matcher=False))

    def go_on(self) -> None:
        """For what comes after the joint graph."""
        self._left_out.close()

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _has_work(graph: fx.Graph) -> bool:
    devices = {node.meta["val"].device for node in graph.nodes if is_tensor(node)}
    return len(devices) > 1 or any(
        node.target in _WRITTEN_OUT or (node.target in _PRODUCTS and not _is_aligned(node)) for node in graph.nodes
    )


def _is_aligned(product: fx.Node) -> bool:
    sizes = itertools.chain.from_iterable(node.meta["val"].shape for node in product.all_input_nodes)
    return all(isinstance(size, int) and size % _ALIGNMENT == 0 for size in sizes)
