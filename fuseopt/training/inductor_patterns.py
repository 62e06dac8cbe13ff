"""Skips Inductor's pattern matcher over a joint graph if its patterns cannot match there.

The patterns replace written-out attention, softmax and losses by kernels, and pad products of unaligned sizes.
Searching for them takes seconds of a first step, and a step of fused kernels contains none. The patterns also merge
nested views and casts, which cost nothing if left unmerged.

A padded product is sliced, so its result has other strides than before. torch (2.11 to 2.13) leaves views of it with
their old fake values. If such a view is kept for the backward of a step with symbolic sizes, torch then compiles the
backward for the strides of the first batch, and the next batch fails. `_follow_strides` corrects those fake values.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from fuseopt.training.code_key import code_key
from fuseopt.training.graph_nodes import RESHAPES, is_tensor, is_view_or_constant

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
        searched: set[fx.Node] = set()

        def before(graph: fx.Graph) -> None:
            searched.clear()
            if _may_match(graph):
                searched.update(graph.nodes)
            else:
                skipped.enter_context(inductor_config.patch(pattern_matcher=False))

        def after(graph: fx.Graph) -> None:
            if searched:
                _follow_strides(graph, searched)
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


def _follow_strides(graph: fx.Graph, unchanged: Container[fx.Node]) -> None:
    """Corrects the fake values of views of nodes that are not in `unchanged`, and of views of those views."""
    corrected: set[fx.Node] = set()
    for node in graph.nodes:
        viewed = next(iter(node.all_input_nodes), None)
        if viewed is None or not (is_tensor(node) and is_tensor(viewed) and is_view_or_constant(node)):
            continue
        if viewed in corrected or viewed not in unchanged:
            # A view that these strides do not allow is a copy, as from `reshape`.
            op = aten.reshape.default if node.target in RESHAPES else node.target
            given = fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
            with enable_python_dispatcher():
                node.meta["val"] = op(*given[0], **given[1])
            corrected.add(node)


def _is_aligned(product: fx.Node) -> bool:
    sizes = itertools.chain.from_iterable(node.meta["val"].shape for node in product.all_input_nodes)
    return all(isinstance(size, int) and size % _ALIGNMENT == 0 for size in sizes)
