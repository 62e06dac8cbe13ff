"""Decides which compiled training steps are launched as CUDA graphs, and when they go back to single kernels.

`step_timing.StepTimer` measures the first steps, `step_graphs.StepGraphs` captures and replays. torch's own cudagraph
trees are not used: they overwrite the outputs of earlier steps, and never free their memory.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fuseopt.errors import CompileError
from fuseopt.runtime.cuda_graphs import Captures
from fuseopt.training.step_graphs import WHAT, Replay, StepGraphs, StepTensors
from fuseopt.training.step_timing import STEPS_TIMED, StepTimer, device_of

When = bool | str
"""Whether steps are captured: True, False, or "auto" for steps in which the GPU waits for the host."""

_PRIVATE = (
    (torch._C, "_storage_Use_Count"),
    (torch._C._autograd, "_get_current_graph_task_keep_graph"),
    (torch._C._autograd, "_top_saved_tensors_default_hooks"),
)

# A step is captured again after its weights have moved, at most this often.
_MOST_CAPTURES = 4


def missing_from_torch() -> list[str]:
    """Names of the private functions used here that this version of torch lacks."""
    return [name for module, name in _PRIVATE if not hasattr(module, name)]


def can_capture(inputs: Iterable[object]) -> bool:
    """Whether a step with these inputs can be captured: static sizes, plain tensors, all on one GPU."""
    values = list(inputs)
    tensors = [value for value in values if isinstance(value, Tensor)]
    if any(isinstance(value, (torch.SymInt, torch.SymFloat)) for value in values):
        return False
    return len({tensor.device for tensor in tensors}) == 1 and all(map(_can_be_static, tensors))


def _can_be_static(tensor: Tensor) -> bool:
    """Whether a static copy on a GPU can stand in for the tensor; an expanded tensor cannot be written to."""
    fixed = tensor.is_cuda and not tensor._has_symbolic_sizes_strides
    plain = tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
    return fixed and plain and (0 not in tensor.stride() or tensor.numel() <= 1)


def uses_checkpointing(graph: fx.GraphModule) -> bool:
    """Whether gradient checkpointing is in the graph: it restores random generators that no CUDA graph knows."""
    graphs = (module.graph for module in graph.modules() if isinstance(module, fx.GraphModule))
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    return any(nodes.find_nodes(op="call_function", target=checkpoint) for nodes in graphs)


class CapturedSteps:
    """The captured steps of one model, and the line about them in its report.

    Args:
        model: its parameters and buffers are read in place.
        when: "auto" captures host-bound steps, if enough memory stays free.

    Attributes:
        note: state of the last step, for the report.
    """

    def __init__(self, model: nn.Module, when: When) -> None:
        self.when, self.note = when, ""
        self._model = weakref.ref(model)
        self._captures = Captures()
        self._graphs: weakref.WeakSet[StepGraphs] = weakref.WeakSet()

    def capture(self, run: Callable[..., Any], inputs: Sequence[Any]) -> StepGraphs | None:
        """Captures a step that has run before; None if that fails.

        Raises:
            CompileError: it fails and `when` is True.
        """
        model = self._model()
        own = () if model is None else map(id, itertools.chain(model.parameters(), model.buffers()))
        try:
            graphs = StepGraphs(run, StepTensors(inputs, frozenset(own)), self._captures)
            reason = graphs.record()
        except torch.OutOfMemoryError as error:
            reason = f"too little memory for what {WHAT} reads and writes: {str(error).splitlines()[0]}"
        if not reason:
            self._graphs.add(graphs)
            self.note = "in CUDA graphs"
            return graphs
        self.note = reason
        if self.when is True:
            raise CompileError(f"{reason}; ask for memory_efficient_fusion with 'cuda_graphs': False")
        return None

    def say(self, reason: str) -> None:
        """Records why a step is not captured; warns if `when` is True."""
        self.note = f"not captured: {reason}"
        if self.when is True:
            warnings.warn(f"fuseopt: training steps are {self.note}", stacklevel=2)

    def report_lines(self) -> tuple[str, ...]:
        if not self.note:
            return ()
        size = sum(graphs.tensors.bytes for graphs in self._graphs) / 2**20
        return (f"training steps: {self.note}" + (f"; {size:.1f} MiB of static tensors" if size else ""),)


class CapturableStep:
    """A compiled step that is replayed as two CUDA graphs once that is worth it. Same arguments and results.

    The compiled step itself runs under hooks for saved tensors, inside another CUDA graph's capture, and while an
    earlier forward waits for its backward. It runs for good once the caller is found to keep gradients apart from
    parameters.

    Args:
        run: the compiled step.
    """

    def __init__(self, run: Callable[..., Any], steps: CapturedSteps) -> None:
        self._run, self._steps = run, steps
        # None once the step has been given up.
        self._timer: StepTimer | None = StepTimer()
        self._graphs: StepGraphs | None = None
        self._captures_left = _MOST_CAPTURES

    def __call__(self, *inputs: Any) -> Any:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if self._timer is None or hooks is not None or torch.cuda.is_current_stream_capturing():
            return self._run(*inputs)
        if self._graphs is not None and not self._graphs.has_same_addresses(inputs):
            self._graphs, self._timer = None, StepTimer()
            if not self._captures_left:
                self._give_up(f"the addresses of parameters have changed {_MOST_CAPTURES} times")
        if self._graphs is not None and self._graphs.gradients_are_held(inputs):
            self._give_up("gradients of an earlier step are kept")
        if self._graphs is None and self._is_due(inputs):
            self._captures_left -= 1
            self._graphs = self._steps.capture(self._run, inputs)
            if self._graphs is None:
                self._timer = None
        if self._graphs is None:
            return self._run(*inputs) if self._timer is None else self._timer.run(self._run, inputs)
        if self._graphs.awaits_backward():
            return self._run(*inputs)
        return Replay.apply(self._graphs, self._graphs.begin_pass(), *inputs)

    def _give_up(self, reason: str) -> None:
        self._graphs = self._timer = None
        self._steps.say(reason)

    def _is_due(self, inputs: Sequence[Any]) -> bool:
        """Whether to capture the step now. Gives it up if it should never be captured."""
        if self._timer is None:
            return False
        if self._timer.keeps_graphs:
            self._give_up("a step has several backward passes (retain_graph)")
            return False
        if self._steps.when is True:
            return self._timer.steps > 0
        if self._timer.steps <= STEPS_TIMED:
            return False
        if not self._timer.is_host_bound:
            self._give_up("the GPU takes longer than the host")
        elif not _fits_in_memory(device_of(inputs)):
            self._give_up("too little memory would stay free")
        return self._timer is not None


def _fits_in_memory(device: torch.device) -> bool:
    """Whether the memory of two more steps is free: one for the graphs, one to spare."""
    # An upper bound of a step's memory, as the peak may come from other work.
    step = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached > 2 * step
