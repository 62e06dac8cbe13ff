"""Training steps in CUDA graphs (torch's cudagraph trees): a step's kernels are launched at once, not one by one.

All that a captured step hands out lies in memory of its graph, which the next step writes to. So what the caller may
keep is taken out of it: outputs as they are returned, and gradients that are still there when the next step begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map

from fuseopt.modules.lazy_logits import LazyLogits

OPTIONS: Mapping[str, Any] = {
    "triton.cudagraphs": True,
    # What cannot be captured raises, where torch would warn and launch kernels one by one.
    "triton.cudagraph_or_error": True,
    # One graph forward and one backward.
    "graph_partition": False,
}
"""Of Inductor's config, while a step is compiled."""

NOT_CAPTURED: Mapping[str, Any] = {"triton.force_cudagraphs_warmup": True}
"""Of Inductor's config, while a step runs that is to launch its kernels one by one."""


def can_capture(inputs: Iterable[object]) -> bool:
    """Whether a step with these inputs is captured: on a GPU, all of one size. Each size would be a graph in memory."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    return all(tensor.is_cuda and not tensor._has_symbolic_sizes_strides for tensor in tensors) and not any(
        isinstance(value, torch.SymInt) for value in inputs
    )


class WarmUp:
    """Whether a step that was compiled has yet to run backward; until then its forward is not captured either.

    torch captures each of the two at its second run. Where a forward was left without a backward, the next one would be
    captured and its backward not; and attention has the seeds of its dropout on the GPU when it is captured, and else
    reads them on the host.
    """

    def __init__(self) -> None:
        self.awaits_backward = False

    def begin(self) -> None:
        """To be called when a step is compiled."""
        self.awaits_backward = True

    def end_with(self, output: Tensor) -> None:
        """Ends with the backward pass that begins at `output` of the step."""
        if self.awaits_backward:
            output.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(self._end))

    def _end(self) -> None:
        self.awaits_backward = False

    def options(self) -> AbstractContextManager[None]:
        """For a forward to run under."""
        if not self.awaits_backward:
            return nullcontext()
        from torch._inductor import config as inductor_config

        return inductor_config.patch(NOT_CAPTURED)


def copied(outputs: Any, warm_up: WarmUp) -> Any:
    """`outputs` with copies of all their tensors, which pass gradients on; from a GPU, once, and then end `warm_up`."""

    def copy_tensor(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        if copy.requires_grad:
            if copy.is_cuda:
                copy.register_hook(refuse_kept_graph)
            warm_up.end_with(copy)
        return copy

    def copy(value: Any) -> Any:
        if isinstance(value, LazyLogits):
            return value.copied(copy_tensor)
        return copy_tensor(value) if isinstance(value, Tensor) else value

    return tree_map(copy, outputs)


def refuse_kept_graph(gradient: Tensor) -> None:
    """A hook for what begins a backward pass, which in a CUDA graph overwrites what a second one would need.

    Raises:
        RuntimeError: the pass runs with `retain_graph=True` or `create_graph=True`.
    """
    if torch._C._autograd._get_current_graph_task_keep_graph():
        raise RuntimeError(
            "a training step in CUDA graphs has one backward pass, and this one was to keep its graph for another; add "
            "the losses up and call backward() once, or leave cuda_graphs out of memory_efficient_fusion"
        )


class Gradients:
    """Gradients that are added to from step to step, in memory of their own."""

    def __init__(self) -> None:
        self._own: set[StorageWeakRef] = set()

    def keep(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copies those that the last step left in its graph's memory. After `zero_grad()` there are none."""
        kept = set()
        for parameter in parameters:
            gradient = parameter.grad
            # A view is a part of a bucket of DistributedDataParallel's.
            if gradient is None or gradient._is_view():
                continue
            storage = StorageWeakRef(gradient.untyped_storage())
            if storage not in self._own:
                parameter.grad = gradient.clone()
                storage = StorageWeakRef(parameter.grad.untyped_storage())
            kept.add(storage)
        self._own = kept
