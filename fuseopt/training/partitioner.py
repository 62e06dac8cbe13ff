"""The Dynamo backend of training steps: runs the graph passes and splits the joint graph into forward and backward.

torch's min-cut partitioner decides what is kept for the backward and what is recomputed, under an activation budget:
https://dev-discuss.pytorch.org/t/min-cut-optimal-recomputation-i-e-activation-checkpointing-with-aotautograd/467 Below
a budget of 1, torch 2.13 also recomputes random ops, which then return other numbers, so gradients through dropout are
wrong. Here the results of random ops are always kept. With Inductor that is a seed of 8 bytes per dropout, from which
the backward recomputes the mask: on a GPU always (`passes/dropout_masks.py`), on a CPU below a budget of 1. Attention
that draws its own mask keeps its output.

`compile_graph` and `Partitioner.__call__` are the order of all passes; `training/README.md` says why it is so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx
from torch._dynamo import lookup_backend
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch.utils.checkpoint import CheckpointPolicy

from fuseopt.ops.linear_cross_entropy import FWD as LINEAR_CROSS_ENTROPY
from fuseopt.ops.relative_attention import FWD as RELATIVE_ATTENTION
from fuseopt.runtime import donated_buffers, frame_stack
from fuseopt.training import captured_steps, early_kernels, inductor_patterns, regional_compile, second_backward
from fuseopt.training.code_key import code_key
from fuseopt.training.passes import (
    autotuned_gemm,
    causal_masks,
    defer_grad_scaling,
    drop_logits,
    dropout_masks,
    float_gradients,
    gelu_epilogues,
    merge_projections,
    recomputed_norms,
    residual_stream,
    tanh_gelu,
    unbacked_selects,
)

# torch bans recomputing pointwise results whose uses are far apart; the first two options lift that ban. Its ban on
# long chains stays: a transformer's residual stream is one. Recomputed from its start, it would exist for all layers at
# once when the backward begins.
_OPTIONS = {
    "ban_recompute_used_far_apart": False,
    "ban_recompute_materialized_backward": False,
    # Compiles the backward together with the forward, so that a failure shows before anything is computed.
    "force_non_lazy_backward_lowering": True,
    # Lets the disk cache hold steps with custom autograd functions, such as those of `fuseopt.ops`.
    "autograd_cache_allow_custom_autograd_functions": True,
}
_BUDGET, _PARTITIONER = "activation_memory_budget", "custom_partitioner_fn"
_CODE_OPTIONS = {
    # One launch for several independent pointwise kernels, such as the casts of a layer's weights.
    "combo_kernels": True,
    # With loop reordering on, Inductor compares index expressions by dimension, so [batch, length, size] does not match
    # its view [batch * length, size]. A norm's backward would then be fused neither with the recomputed norm nor with
    # the cast after it.
    "loop_ordering_after_fusion": False,
    # Keeps the order of autograd and of `regional_compile`. Inductor's own order ignores memory allocated in a region.
    "reorder_for_peak_memory": False,
}
# With a budget of 0 the partitioner keeps inputs only and ignores MUST_SAVE marks.
_SMALLEST_BUDGET = 1e-6
# The budget's solver assumes that an op it does not know costs nothing, and would recompute these first.
_EXPENSIVE_OPS = frozenset((*LINEAR_CROSS_ENTROPY.values(), *RELATIVE_ATTENTION.values()))


def missing_options() -> list[str]:
    """Names of the torch options that `compile_graph` sets and this version of torch lacks."""
    patched = {
        functorch_config: (*_OPTIONS, _BUDGET),
        inductor_config: (_PARTITIONER, *inductor_patterns.PLACES, *_CODE_OPTIONS),
    }
    missing = [name for config, names in patched.items() for name in names if not hasattr(config, name)]
    return missing + donated_buffers.missing_from_torch()


@frame_stack.in_one_chunk
def compile_graph(
    graph: fx.GraphModule,
    inputs: Sequence[Tensor],
    *,
    backend: str,
    budget: float,
    captured: captured_steps.CapturedSteps | None = None,
) -> Callable[..., Any]:
    """Dynamo backend: compiles `graph` and its backward.

    Args:
        backend: "inductor", or "aot_eager" for the same split run by torch's own kernels.
        budget: fraction, 0 to 1, of the activation bytes that are kept when no matmul is recomputed.
        captured: the model's captured steps, if this one may be captured as CUDA graphs.
    """
    causal_masks.run(graph)
    with_lazy_logits = drop_logits.run(graph)
    partitioner = Partitioner(in_regions=backend == "inductor" and not inductor_config.cpp_wrapper)
    with (
        early_kernels.pool(),
        # Inductor would also apply the whole graph's indices of donated inputs to each region.
        donated_buffers.no_donated_buffers(),
        functorch_config.patch({**_OPTIONS, _BUDGET: max(budget, _SMALLEST_BUDGET)}),
    ):
        if backend == "inductor":
            with (
                inductor_patterns.only_where_useful(),
                inductor_config.patch({**_CODE_OPTIONS, _PARTITIONER: partitioner}),
            ):
                compiled = lookup_backend(backend)(graph, inputs)
        else:
            compile_split = aot_autograd(
                fw_compiler=_run_as_it_is, partition_fn=partitioner, decompositions=select_decomp_table
            )
            compiled = compile_split(graph, inputs)
    step = _captured(compiled, graph, inputs, captured)
    return with_lazy_logits(second_backward.without_second_derivatives(step))


def _captured(
    compiled: Callable[..., Any],
    graph: fx.GraphModule,
    inputs: Sequence[Tensor],
    captured: captured_steps.CapturedSteps | None,
) -> Callable[..., Any]:
    """`compiled`, wrapped into a `CapturableStep` if it can be captured."""
    if captured is None or not captured_steps.can_capture(inputs):
        return compiled
    if captured_steps.uses_checkpointing(graph):
        captured.say("gradient checkpointing draws random numbers with generators of its own")
        return compiled
    return captured_steps.CapturableStep(compiled, captured)


class Partitioner(CustomPartitionerFn):
    """Partitioner for Inductor: the graph passes around torch's min-cut, which must keep results of random ops.

    Args:
        in_regions: whether equal layers become calls of one subgraph (`regional_compile`).
    """

    def __init__(self, in_regions: bool) -> None:
        self.in_regions = in_regions

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        dropout_masks.run(gm.graph)
        tanh_gelu.run(gm.graph)
        float_gradients.run(gm.graph)
        merge_projections.run(gm.graph)
        unbacked_selects.run(gm.graph)
        early_kernels.begin(gm.graph)
        residual_stream.run(gm.graph, under_budget=functorch_config.activation_memory_budget < 1)
        for node in gm.graph.nodes:
            # Marked already by gradient checkpointing, which restores the generator, or by a pass.
            if node.meta.get("recompute") is not None:
                continue
            if _is_random(node) or node.target in _EXPENSIVE_OPS:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            elif _is_parameter_lookup(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        if not self.in_regions:
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        regional_compile.spread_seeds(gm.graph)
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        if autotuned_gemm.is_available():
            for graph in (forward.graph, backward.graph):
                gelu_epilogues.run(graph)
                autotuned_gemm.run(graph)
        if recomputed_norms.is_available():
            recomputed_norms.run(backward.graph)
        defer_grad_scaling.run(backward.graph)
        return regional_compile.outline(forward), regional_compile.outline(backward)

    def uuid(self) -> bytes:
        """Part of the key of Inductor's disk cache."""
        # torch 2.11's own key has whether autocast is on, but not its dtype.
        autocast = {
            device: torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
        }
        # Cached code may call ops that need the native library.
        called = autotuned_gemm.is_available(), recomputed_norms.is_available()
        return code_key(f"{autocast}{called}")


def _is_random(node: fx.Node) -> bool:
    """Whether the node calls a random op. Attention is one unless its `dropout_p` is 0."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    given = {argument.name: argument.default_value for argument in op._schema.arguments}
    given |= dict(zip(given, node.args, strict=False)) | node.kwargs
    return given.get("dropout_p", 1) != 0


def _is_parameter_lookup(node: fx.Node) -> bool:
    """Whether the node looks up rows of a parameter, which is as fast as reading a kept result."""
    return node.target is torch.ops.aten.embedding.default and node.args[0].op == "placeholder"


def _run_as_it_is(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    return make_boxed_func(graph.forward)
