"""Calls `ops.tuned_matmul` for large matrix products: the fastest of cuBLASLt's algorithms, timed in the first run.

Matches: `mm` and `addmm` of 16-bit matrices on a GPU with static sizes and at least 2**32 multiplications.
Writes: one call of `fuseopt::tuned_matmul` in place of the product.
Does not fire: on products with alpha or beta, a two-dimensional bias or dynamic sizes; under deterministic
    algorithms; without the native library.

cuBLASLt's own heuristics know neither the GPU's power limit nor how long a kernel with a short inner dimension waits
for its stores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fuseopt.ops import registry
from fuseopt.ops.tuned_matmul import RAW as TUNED_MATMUL
from fuseopt.training.graph_nodes import MATMULS
from fuseopt.tuning import tuned

aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def run(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        arguments = arguments_of(node)
        if arguments is not None:
            node.target, node.args = TUNED_MATMUL["cuda"], arguments


def is_available() -> bool:
    """Whether the op can run here. Loads the native library, but never builds it."""
    if torch.are_deterministic_algorithms_enabled():
        return False
    return registry.pick("tuned_matmul", "auto", torch.device("cuda"), _HALVES) == "cuda"


def arguments_of(node: fx.Node) -> tuple[Any, ...] | None:
    """Arguments of `ops.tuned_matmul` for a product that matches, else None."""
    if node.target not in MATMULS or node.kwargs:
        return None
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
    if not _is_worth_it(left.meta["val"], right.meta["val"]):
        return None
    return left, right, bias, "", float_result, True


def _is_worth_it(left: Tensor, right: Tensor) -> bool:
    if left.device.type != "cuda" or left.dtype not in _HALVES:
        return False
    if left._has_symbolic_sizes_strides or right._has_symbolic_sizes_strides:
        return False
    return left.shape[0] * left.shape[1] * right.shape[1] >= tuned("autotuned_gemm_min_work", left.device)
