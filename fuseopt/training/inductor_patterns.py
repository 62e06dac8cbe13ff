"""Inductor's patterns over a joint graph, left out where they would find nothing.

They put kernels in the place of attention, softmax and losses that are written out, and pad products of sizes that no
fast kernel has. Looking for them takes seconds of a first step, and one of fused kernels has none. What else they do,
take views of views and casts of casts together, costs nothing where it is left as it is.
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

# Of Inductor's options: passes over a joint graph ahead of the patterns, and behind them.
PLACES = ("joint_custom_pre_pass", "joint_custom_post_pass")
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


@contextlib.contextmanager
def where_they_pay() -> Iterator[None]:
    """Has graphs without work for them pass by the patterns; none where a pass of the caller's has one of `PLACES`."""
    if any(getattr(inductor_config, place) for place in PLACES):
        yield
        return
    with contextlib.ExitStack() as left_out:

        def look(graph: fx.Graph) -> None:
            if not _has_work(graph):
                left_out.enter_context(inductor_config.patch(pattern_matcher=False))

        def go_on(graph: fx.Graph) -> None:
            left_out.close()

        with inductor_config.patch(dict(zip(PLACES, (_Pass(look), _Pass(go_on)), strict=True))):
            yield


class _Pass(CustomGraphPass):
    def __init__(self, run: Callable[[fx.Graph], None]) -> None:
        self._run = run

    def __call__(self, graph: fx.Graph) -> None:
        self._run(graph)

    def uuid(self) -> Any:
        return code_key()


def _has_work(graph: fx.Graph) -> bool:
    # Numbers that index another device's tensor are made there.
    devices = {node.meta["val"].device for node in graph.nodes if is_tensor(node)}
    return len(devices) > 1 or any(
        node.target in _WRITTEN_OUT or (node.target in _PRODUCTS and not _is_aligned(node)) for node in graph.nodes
    )


def _is_aligned(product: fx.Node) -> bool:
    sizes = itertools.chain.from_iterable(node.meta["val"].shape for node in product.all_input_nodes)
    return all(isinstance(size, int) and size % _ALIGNMENT == 0 for size in sizes)
