"""What a compiled training step keeps for its backward pass, and what that recomputes.

AOT Autograd's min-cut partitioner decides, under an activation budget:
https://dev-discuss.pytorch.org/t/min-cut-optimal-recomputation-i-e-activation-checkpointing-with-aotautograd/467
Below a budget of 1 torch lets it recompute random ops too, which then draw other numbers (seen on 2.13: the gradients
are wrong wherever there is dropout). Here what is drawn is kept. With Inductor that is a seed of 8 bytes a dropout,
from which the backward pass makes the mask again: on a GPU always, by `dropout_masks`, elsewhere below a budget of 1.
Only attention that draws its mask itself has to keep its output.
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
from fuseopt.runtime import frame_stack
from fuseopt.training import captured_steps, early_kernels, regional_compile, second_backward
from fuseopt.training.code_key import code_key
from fuseopt.training.passes import (
    autotuned_gemm,
    causal_masks,
    defer_grad_scaling,
    drop_logits,
    dropout_masks,
    float_gradients,
    joint_patterns,
    merge_projections,
    recomputed_norms,
    residual_stream,
    tanh_gelu,
)

# The plain min-cut also keeps pointwise results that are used far apart; without these bans it recomputes them. The ban
# on long chains stays: a transformer's residual stream is one, and recomputed from its start it is there of all layers
# at once when the backward begins. Kept every other layer or so, it takes a fraction of that.
_OPTIONS = {
    "ban_recompute_used_far_apart": False,
    "ban_recompute_materialized_backward": False,
    # The backward graph is compiled with the forward's, so that a failure shows before anything has been computed.
    "force_non_lazy_backward_lowering": True,
    # Also steps with autograd functions, as those of `fuseopt.ops`, are found in the cache of an earlier process.
    "autograd_cache_allow_custom_autograd_functions": True,
}
_BUDGET, _PARTITIONER = "activation_memory_budget", "custom_partitioner_fn"
_CODE_OPTIONS = {
    # Casts of a layer's weights and the like, which need nothing of one another, are one launch.
    "combo_kernels": True,
    # Inductor could turn loops to fuse kernels, and for that compares accesses in all their dimensions: one to
    # [batch, length, size] and one to the same numbers as [batch * length, size] differ. Views in transformers take one
    # to the other, and a norm's backward would not be fused with the norm, computed again, nor with the cast behind it.
    "loop_ordering_after_fusion": False,
    # Calls stay in autograd's order and that of `part_cuts`; Inductor would not count what a part allocates inside.
    "reorder_for_peak_memory": False,
}
# At 0 the partitioner keeps the inputs alone, whatever is marked.
_SMALLEST_BUDGET = 1e-6
# Of a budget's solver any op that it does not know costs nothing, and is recomputed first.
_PRODUCTS = frozenset((*LINEAR_CROSS_ENTROPY.values(), *RELATIVE_ATTENTION.values()))


def missing_options() -> list[str]:
    """The names of torch's options that `compile_graph` sets and this version of torch does not have."""
    patched = {
        functorch_config: (*_OPTIONS, _BUDGET),
        inductor_config: (_PARTITIONER, *joint_patterns.PLACES, *_CODE_OPTIONS),
    }
    missing = [name for config, names in patched.items() for name in names if not hasattr(config, name)]
    return missing + second_backward.missing_from_torch()


@frame_stack.in_one_chunk
def compile_graph(
    graph: fx.GraphModule,
    inputs: Sequence[Tensor],
    *,
    backend: str,
    budget: float,
    captured: captured_steps.CapturedSteps | None = None,
) -> Callable[..., Any]:
    """A Dynamo backend: compiles `graph` and its backward, whose split obeys `budget`.

    Args:
        backend: "inductor", or "aot_eager" for the same split run by torch's own kernels.
        budget: part of the bytes kept at 1, where no matmul is recomputed, that may be kept; 0 to 1.
        captured: what is to launch it as CUDA graphs, where `captured_steps.can_capture`.
    """
    causal_masks.drop(graph)
    with_lazy_logits = drop_logits.drop(graph)
    partitioner = Partitioner(in_parts=backend == "inductor" and not inductor_config.cpp_wrapper)
    with (
        early_kernels.pool(),
        # Also, Inductor applies indices of donated inputs of the whole graph to each part that it is cut into.
        second_backward.no_donated_buffers(),
        functorch_config.patch({**_OPTIONS, _BUDGET: max(budget, _SMALLEST_BUDGET)}),
    ):
        if backend == "inductor":
            with joint_patterns.where_they_pay(), inductor_config.patch({**_CODE_OPTIONS, _PARTITIONER: partitioner}):
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
    """The compiled graph, or the step that launches it as CUDA graphs."""
    if captured is None or not captured_steps.can_capture(inputs):
        return compiled
    if captured_steps.uses_checkpointing(graph):
        captured.say("gradient checkpointing draws random numbers with generators of its own")
        return compiled
    return captured_steps.CapturableStep(compiled, captured)


class Partitioner(CustomPartitionerFn):
    """torch's min-cut rematerialisation, which has to keep what random ops return.

    Args:
        in_parts: whether graphs are left as calls of their `repeated_parts`, for Inductor to compile once each.
    """

    def __init__(self, in_parts: bool) -> None:
        self.in_parts = in_parts

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        dropout_masks.shorten(gm.graph)
        tanh_gelu.shorten(gm.graph)
        float_gradients.widen(gm.graph)
        merge_projections.join(gm.graph)
        early_kernels.begin(gm.graph)
        residual_stream.keep(gm.graph, under_budget=functorch_config.activation_memory_budget < 1)
        for node in gm.graph.nodes:
            # Nodes of gradient checkpointing are marked already, and recomputed from the generator's state.
            if node.meta.get("recompute") is not None:
                continue
            if _draws(node) or node.target in _PRODUCTS:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            elif _looks_up(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        if not self.in_parts:
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        regional_compile.spread_seeds(gm.graph)
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        if autotuned_gemm.is_available():
            autotuned_gemm.exchange(forward.graph)
            autotuned_gemm.exchange(backward.graph)
        if recomputed_norms.is_available():
            recomputed_norms.exchange(backward.graph)
        defer_grad_scaling.defer(backward.graph)
        return regional_compile.outline(forward), regional_compile.outline(backward)

    def uuid(self) -> bytes:
        """Part of the key under which Inductor caches on disk what it compiles."""
        # Of autocast the key in torch 2.11 has only whether it is on.
        autocast = {
            device: torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
        }
        # Code that was kept may call ops of the native library.
        called = autotuned_gemm.is_available(), recomputed_norms.is_available()
        return code_key(f"{autocast}{called}")


def _draws(node: fx.Node) -> bool:
    """Whether the node calls a random op; attention is one unless its `dropout_p` is 0."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    given = {argument.name: argument.default_value for argument in op._schema.arguments}
    given |= dict(zip(given, node.args, strict=False)) | node.kwargs
    return given.get("dropout_p", 1) != 0


def _looks_up(node: fx.Node) -> bool:
    """Whether the node reads rows of a parameter, which takes no longer than to read what it returned."""
    return node.target is torch.ops.aten.embedding.default and node.args[0].op == "placeholder"


def _run_as_it_is(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    return make_boxed_func(graph.forward)
