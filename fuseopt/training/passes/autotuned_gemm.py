"""Large matrix products of a compiled step on a GPU by the fastest of cuBLASLt's algorithms, measured in its first run.

The library's own choice goes by rules that do not know of the GPU's power limit, nor how short sums leave a kernel
waiting for its stores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fuseopt.ops import registry
from fuseopt.ops.tuned_matmul import RAW as TUNED_MATMUL
from fuseopt.training.graph_nodes import MATMULS
from fuseopt.training.passes import gelu_epilogues

aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
# Of fewer multiplications the host takes as long to call.
_LEAST_WORK = 2**32


def exchange(graph: fx.Graph) -> None:
    """Has products of 16-bit matrices call `ops.tuned_matmul`; those with a scale, or sizes that change, stay."""
    for node in list(graph.nodes):
        arguments = _arguments(node) if node.target in MATMULS and not node.kwargs else None
        if arguments is None:
            continue
        left, right, bias, *_ = arguments
        if bias is None or not gelu_epilogues.fuse(node, left, right, bias):
            node.target, node.args = TUNED_MATMUL["cuda"], arguments


def is_available() -> bool:
    """Whether code that calls the op can run here; the native library is loaded if that takes no building."""
    if torch.are_deterministic_algorithms_enabled():
        return False
    return registry.pick("tuned_matmul", "auto", torch.device("cuda"), _HALVES) == "cuda"


def _arguments(node: fx.Node) -> tuple[Any, ...] | None:
    """The op's, for a product that it can compute and that is worth it."""
    bias, float_result = None, False
    if node.target is aten.addmm.default:
        bias, left, right = node.args
        if bias.meta["val"].dim() != 1:
            return None
    elif node.target is aten.mm.dtype:
        left, right, dtype = node.args
        if dtype != torch.float32:
            return None
        float_result = True
    elif node.target is aten.mm.default:
        left, right = node.args
    else:
        return None
    if not _is_large(left.meta["val"], right.meta["val"]):
        return None
    return left, right, bias, "", float_result, True


def _is_large(left: Tensor, right: Tensor) -> bool:
    if left.device.type != "cuda" or left.dtype not in _HALVES:
        return False
    if left._has_symbolic_sizes_strides or right._has_symbolic_sizes_strides:
        return False
    return left.shape[0] * left.shape[1] * right.shape[1] >= _LEAST_WORK
