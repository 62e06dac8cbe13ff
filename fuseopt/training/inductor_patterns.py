"""Skips Inductor's pattern matcher over a joint graph if its patterns cannot match there.

The patterns replace written-out attention, softmax and losses by kernels, and pad products of unaligned sizes.
Searching for them takes seconds of a first step, and a step of fused kernels contains none. The patterns also merge
nested views and casts, which cost nothing if left unmerged.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from fuseopt.training.code_key import code_key
from fuseopt.training.graph_nodes import is_tensor

aten = torch.ops.aten

# Inductor's options for custom passes over a joint graph, before and after the patterns.
PLACES = ("joint_custom_pre_pass", "joint_custom_post_pass")
# Nodes of written-out attention, softmax, a loss's gradient, and random row selection.
_PATTERN_NODES = (
    aten.bmm.default,
    aten.baddbmm.default,
    aten.amax.default,
    aten.scatter.value,
    aten.randperm.default,
)
_PRODUCTS = (aten.mm.default, aten.addmm.default)
# In elements. No product is padded beyond a multiple of this.
_ALIGNMENT = 8


@contextlib.contextmanager
def only_where_useful() -> Iterator[None]:
    """Skips the patterns for graphs that contain none of them; does nothing if the caller has set one of `PLACES`."""
    if any(getattr(inductor_config, place) for place in PLACES):
        yield
        return
    with contextlib.ExitStack() as skipped:

        def before(graph: fx.Graph) -> None:
            if not _may_match(graph):
                skipped.enter_context(inductor_config.patch(pattern_matcher=False))

        def after(graph: fx.Graph) -> None:
            skipped.close()

        with inductor_config.patch(dict(zip(PLACES, (_Pass(before), _Pass(after)), strict=True))):
            yield


class _Pass(CustomGraphPass):
    def __init__(self, run: Callable[[fx.Graph], None]) -> None:
        self._run = run

    def __call__(self, graph: fx.Graph) -> None:
        self._run(graph)

    def uuid(self) -> Any:
        return code_key()


def _may_match(graph: fx.Graph) -> bool:
    # With several devices, Inductor moves index tensors to the device of the tensor that they index.
    devices = {node.meta["val"].device for node in graph.nodes if is_tensor(node)}
    return len(devices) > 1 or any(
        node.target in _PATTERN_NODES or (node.target in _PRODUCTS and not _is_aligned(node)) for node in graph.nodes
    )


def _is_aligned(product: fx.Node) -> bool:
    sizes = itertools.chain.from_iterable(node.meta["val"].shape for node in product.all_input_nodes)
    return all(isinstance(size, int) and size % _ALIGNMENT == 0 for size in sizes)
