"""Forward and backward of one compiled step as two CUDA graphs, and the autograd function that replays them.

Graphs read and write static tensors. The caller gets copies of the outputs. Parameter gradients are handed out without
a copy, because a copy would take as much memory as all weights. So before the next forward overwrites them,
`StepGraphs` counts the references to their storages; gradients that a parameter still has are moved to new memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuseopt.runtime.cuda_graphs import Captures, Work
from fuseopt.training import second_backward
from fuseopt.training.step_timing import device_of, retains_graph

WHAT = "a training step"


class ForwardPass:
    """A replayed forward pass. Over when its backward begins, or when nothing refers to its outputs any more."""

    is_over = False


class StepTensors:
    """The static tensors of a step's graphs.

    Args:
        inputs: arguments of the call to capture; gives sizes and dtypes.
        in_place_ids: `id` of each parameter and buffer of the model, which the graphs read without a copy.

    Attributes:
        copied: positions of the inputs that are copied into static memory in every call.
        in_place: positions of the inputs that are read where they are.
        trained: positions of the inputs that require gradients.
        inputs: what the graphs read. A parameter appears as a detached alias, so that hooks on it do not run.
        outputs: what the last forward returned.
        differentiable: positions of the outputs that require gradients.
        grad_outputs: gradients of those outputs.
        gradients: gradients of the `trained` inputs; None for one that the outputs do not depend on.
    """

    def __init__(self, inputs: Sequence[Any], in_place_ids: frozenset[int]) -> None:
        tensors = {i: value for i, value in enumerate(inputs) if isinstance(value, Tensor)}
        self.device = device_of(inputs)
        self.sizes = tuple(tensor.shape for tensor in tensors.values())
        self.copied = [i for i, tensor in tensors.items() if id(tensor) not in in_place_ids]
        self.in_place = [i for i, tensor in tensors.items() if id(tensor) in in_place_ids]
        self.trained = [i for i, tensor in tensors.items() if tensor.requires_grad]
        self.inputs = list(inputs)
        for i, tensor in tensors.items():
            self.inputs[i] = tensor.detach() if id(tensor) in in_place_ids else tensor.detach().clone()
            self.inputs[i].requires_grad_(tensor.requires_grad)
        self.outputs: list[Any] = []
        self.differentiable: list[int] = []
        self.grad_outputs: list[Tensor] = []
        self.gradients: list[Tensor | None] = []

    @property
    def bytes(self) -> int:
        tensors = [*(self.inputs[i] for i in self.copied), *self.grad_outputs, *self.gradients, *self.outputs]
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


class _Forward(Work[StepTensors]):
    def __init__(self, compiled: Callable[..., Any], tensors: StepTensors) -> None:
        super().__init__("forward", tensors)
        self.compiled = compiled

    def run(self) -> None:
        with torch.enable_grad():
            self.state.outputs = list(self.compiled(*self.state.inputs))


class _Backward(Work[StepTensors]):
    def __init__(self, tensors: StepTensors) -> None:
        super().__init__("backward", tensors)

    def run(self) -> None:
        tensors = self.state
        outputs = [tensors.outputs[i] for i in tensors.differentiable]
        inputs = [tensors.inputs[i] for i in tensors.trained]
        tensors.gradients = list(torch.autograd.grad(outputs, inputs, tensors.grad_outputs, allow_unused=True))


class StepGraphs:
    """The CUDA graphs of a step's forward and backward.

    Their memory pool is shared with no other step: a gradient in it may be a parameter's `.grad` for any length of
        time.

    Args:
        compiled: the compiled step.
        tensors: its static tensors.
        captures: those of the model.
    """

    def __init__(self, compiled: Callable[..., Any], tensors: StepTensors, captures: Captures) -> None:
        self.tensors, self.captures = tensors, captures
        self._forward, self._backward = _Forward(compiled, tensors), _Backward(tensors)
        self._addresses = [tensors.inputs[i].data_ptr() for i in tensors.in_place]
        self._is_nonzero: list[bool] = []
        self._gradient_storages: list[tuple[list[int], torch.UntypedStorage, int]] = []
        self._pass: Callable[[], ForwardPass | None] = lambda: None

    def record(self) -> str:
        """Captures both passes; returns the reason of a failure, or ""."""
        tensors = self.tensors
        versions = [tensors.inputs[i]._version for i in tensors.copied]
        reason = self.captures.record(self._forward, (), WHAT)
        if not reason and [tensors.inputs[i]._version for i in tensors.copied] != versions:
            reason = "a training step that writes to its inputs is not captured"
        if reason:
            return reason
        outputs = enumerate(tensors.outputs)
        tensors.differentiable = [i for i, out in outputs if isinstance(out, Tensor) and out.requires_grad]
        tensors.grad_outputs = [torch.zeros_like(tensors.outputs[i]) for i in tensors.differentiable]
        self._is_nonzero = [False] * len(tensors.grad_outputs)
        reason = self.captures.record(self._backward, (self._forward,), WHAT)
        if not reason:
            # Frees the autograd graph and the tensors that it saved.
            tensors.outputs = [out.detach() if isinstance(out, Tensor) else out for out in tensors.outputs]
            self._gradient_storages = _gradient_storages(tensors)
        return reason

    def awaits_backward(self) -> bool:
        """Whether the last forward's saved tensors are still needed by its backward."""
        last = self._pass()
        return last is not None and not last.is_over

    def begin_pass(self) -> ForwardPass:
        begun = ForwardPass()
        self._pass = weakref.ref(begun)
        return begun

    def has_same_addresses(self, inputs: Sequence[Any]) -> bool:
        """Whether parameters and buffers have the addresses that the graphs read."""
        return [inputs[i].data_ptr() for i in self.tensors.in_place] == self._addresses

    def gradients_are_held(self, inputs: Sequence[Any]) -> bool:
        """Whether anything but a parameter's `.grad` refers to gradients of the last step.

        If not, gradients that parameters still have are moved to new memory, so that the graphs can overwrite theirs.
        """
        moved = []
        for takers, storage, own_uses in self._gradient_storages:
            other_uses = torch._C._storage_Use_Count(storage._cdata) - own_uses
            if not other_uses:
                continue
            given = (inputs[i].grad for i in takers)
            held = [grad for grad in given if grad is not None and grad.untyped_storage()._cdata == storage._cdata]
            if len(held) != other_uses:
                return True
            moved += held
        for gradient in moved:
            # Sets the data of the same tensor object, which other code may refer to as well.
            gradient.data = gradient.clone()
        return False

    def forward(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Replays the forward; returns copies of the outputs."""
        tensors = self.tensors
        for i in tensors.copied:
            tensors.inputs[i].detach().copy_(inputs[i])
        self._forward()
        return tuple(out.detach().clone() if isinstance(out, Tensor) else out for out in tensors.outputs)

    def backward(self, grad_outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replays the backward; returns the gradients of `trained`, those of parameters in the graph's own memory."""
        tensors = self.tensors
        for at, static in enumerate(tensors.grad_outputs):
            given = grad_outputs[tensors.differentiable[at]]
            if given is not None:
                static.copy_(given)
            elif self._is_nonzero[at]:
                static.zero_()
            self._is_nonzero[at] = given is not None
        self._backward()
        results = []
        for i, gradient in zip(tensors.trained, tensors.gradients, strict=True):
            # autograd stores a tensor as `.grad` without a copy only if nothing else refers to that tensor object.
            share = Tensor.clone if i in tensors.copied else Tensor.detach
            results.append(None if gradient is None else share(gradient))
        return results

    def backward_by_recomputation(
        self, grad_outputs: Sequence[Tensor | None], generator_state: Tensor
    ) -> list[Tensor | None]:
        """The gradients of `trained` in new memory, by running forward and backward uncaptured.

        For passes that retain the autograd graph: a captured backward overwrites what its forward has saved.

        Args:
            grad_outputs: gradients of the outputs, None for outputs that have none.
            generator_state: state of the random generator before the forward.
        """
        tensors, generator = self.tensors, default_generator(self.tensors.device)
        inputs = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in tensors.inputs]
        current_state = generator.get_state()
        generator.set_state(generator_state)
        try:
            with torch.enable_grad():
                outputs = self._forward.compiled(*inputs)
        finally:
            generator.set_state(current_state)
        with_gradient = [i for i in tensors.differentiable if grad_outputs[i] is not None]
        trained = [inputs[i] for i in tensors.trained]
        given = [grad_outputs[i] for i in with_gradient]
        return list(torch.autograd.grad([outputs[i] for i in with_gradient], trained, given, allow_unused=True))


def default_generator(device: torch.device) -> torch.Generator:
    """torch's default random generator of a device."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _gradient_storages(tensors: StepTensors) -> list[tuple[list[int], torch.UntypedStorage, int]]:
    """Storages of parameter gradients: (positions of the inputs, storage, its use count before any is handed out)."""
    storages: dict[int, torch.UntypedStorage] = {}
    takers: dict[int, list[int]] = {}
    for i, gradient in zip(tensors.trained, tensors.gradients, strict=True):
        if gradient is not None and i not in tensors.copied:
            storage = gradient.untyped_storage()
            storages.setdefault(storage._cdata, storage)
            takers.setdefault(storage._cdata, []).append(i)
            del storage
    return [(takers[at], storage, torch._C._storage_Use_Count(at)) for at, storage in storages.items()]


class Replay(torch.autograd.Function):
    """`Replay.apply(graphs, graphs.begin_pass(), *inputs)` returns the step's outputs; its backward replays too."""

    @staticmethod
    def forward(ctx: Any, graphs: StepGraphs, begun: ForwardPass, *inputs: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        tensors = graphs.tensors
        # Reading them in the backward raises PyTorch's errors for an input written to and for a second backward pass.
        ctx.save_for_backward(*(inputs[i] for i in tensors.trained))
        ctx.graphs, ctx.begun, ctx.taken = graphs, begun, len(inputs)
        ctx.generator_state = default_generator(tensors.device).get_state()
        with graphs.captures.in_stream_order(tensors.device):
            outputs = graphs.forward(inputs)
        fixed = [out for i, out in enumerate(outputs) if i not in tensors.differentiable]
        ctx.mark_non_differentiable(*(out for out in fixed if isinstance(out, Tensor)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        if torch.is_grad_enabled():
            second_backward.refuse()
        tensors, retains = ctx.graphs.tensors, retains_graph()
        ctx.begun.is_over = not retains
        with ctx.graphs.captures.in_stream_order(tensors.device):
            if retains:
                found = ctx.graphs.backward_by_recomputation(grad_outputs, ctx.generator_state)
            else:
                found = ctx.graphs.backward(grad_outputs)
        gradients: list[Tensor | None] = [None] * ctx.taken
        for i, gradient in zip(tensors.trained, found, strict=True):
            gradients[i] = gradient
        return None, None, *gradients
