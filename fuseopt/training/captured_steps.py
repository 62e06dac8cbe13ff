"""Training steps in CUDA graphs: their kernels are launched at once, not one by one.

A step runs as it was compiled until it is worth capturing. From then on its forward and its backward are replayed, on
tensors at addresses that stay. What a caller may keep stays as it is: outputs are copies, and gradients are looked for
before the next forward writes to their memory.
"""

from __future__ import annotations

import itertools
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fuseopt.errors import CompileError
from fuseopt.runtime.cuda_graphs import Captures, Work
from fuseopt.training import second_backward

When = bool | str
"""Whether steps are captured: True, False, or "auto", where the GPU waits for the host."""

_PRIVATE = (
    (torch._C, "_storage_Use_Count"),
    (torch._C._autograd, "_get_current_graph_task_keep_graph"),
    (torch._C._autograd, "_top_saved_tensors_default_hooks"),
)

# The first step compiles and loads; of so many behind it the GPU must have waited for the host in each.
_STEPS_TIMED = 2
# Of the host's time for a step, that the GPU took at most where it was the host that it waited for.
_GPU_OVER_HOST = 1.15
# Each time a weight has moved; one that is moved all the time is not worth it.
_MOST_CAPTURES = 4
_WHAT = "a training step"


def missing_from_torch() -> list[str]:
    """The names of private functions that this version of torch does not have."""
    return [name for module, name in _PRIVATE if not hasattr(module, name)]


def can_capture(inputs: Iterable[object]) -> bool:
    """Whether a step with these inputs can be captured: on one GPU, all of one size and in memory of their own."""
    values = list(inputs)
    tensors = [value for value in values if isinstance(value, Tensor)]
    if any(isinstance(value, (torch.SymInt, torch.SymFloat)) for value in values):
        return False
    return len({tensor.device for tensor in tensors}) == 1 and all(map(_stays, tensors))


def _stays(tensor: Tensor) -> bool:
    """Whether a copy on a GPU at an address that stays can stand in for it; what is expanded cannot be written to."""
    fixed = tensor.is_cuda and not tensor._has_symbolic_sizes_strides
    plain = tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
    return fixed and plain and (0 not in tensor.stride() or tensor.numel() <= 1)


def draws_again(graph: fx.GraphModule) -> bool:
    """Whether a backward pass of this graph may draw what its forward drew: by generators that no CUDA graph knows."""
    graphs = (module.graph for module in graph.modules() if isinstance(module, fx.GraphModule))
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    return any(nodes.find_nodes(op="call_function", target=checkpoint) for nodes in graphs)


class CapturedSteps:
    """The steps of one model that are captured, each by itself.

    Args:
        model: whose parameters and buffers stay where they are.
        when: "auto" captures a step where the GPU waited for the host, and as much memory stays free as it will take.

    Attributes:
        note: what is to be said of them.
    """

    def __init__(self, model: nn.Module, when: When) -> None:
        self.when, self.note = when, ""
        self._model = weakref.ref(model)
        self._captures = Captures()
        self._graphs: weakref.WeakSet[StepGraphs] = weakref.WeakSet()

    def capture(self, run: Callable[..., Any], inputs: Sequence[Any]) -> StepGraphs | None:
        """The graphs of a step that has run before, or None where it cannot be captured.

        Raises:
            CompileError: it cannot, and was asked to be whatever it takes.
        """
        model = self._model()
        own = () if model is None else map(id, itertools.chain(model.parameters(), model.buffers()))
        try:
            graphs = StepGraphs(run, StepTensors(inputs, frozenset(own)), self._captures)
            reason = graphs.record()
        except torch.OutOfMemoryError as error:
            reason = f"too little memory for what {_WHAT} reads and writes: {str(error).splitlines()[0]}"
        if not reason:
            self._graphs.add(graphs)
            self.note = "in CUDA graphs"
            return graphs
        self.note = reason
        if self.when is True:
            raise CompileError(f"{reason}; ask for memory_efficient_fusion with 'cuda_graphs': False")
        return None

    def say(self, note: str) -> None:
        """Takes note of why a step goes without graphs, and warns where they had been asked for."""
        self.note = f"not captured, as {note}"
        if self.when is True:
            warnings.warn(f"fuseopt: training steps are {self.note}", stacklevel=2)

    def report_lines(self) -> tuple[str, ...]:
        if not self.note:
            return ()
        size = sum(graphs.tensors.bytes for graphs in self._graphs) / 2**20
        return (f"training steps: {self.note}" + (f"; {size:.1f} MiB of static tensors" if size else ""),)


class Step:
    """A compiled step. Call: what it takes -> what it returns, launched as two CUDA graphs once that is worth it.

    To the compiled step itself go calls under hooks for saved tensors, those in somebody's own CUDA graph, and those
    while another forward waits for its backward; and all that come after somebody was found to keep gradients that the
    parameters no longer have.

    Args:
        run: the compiled step.
    """

    def __init__(self, run: Callable[..., Any], steps: CapturedSteps) -> None:
        self._run, self._steps = run, steps
        self._pace: Pace | None = Pace()
        self._graphs: StepGraphs | None = None
        self._captures_left = _MOST_CAPTURES

    def __call__(self, *inputs: Any) -> Any:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if self._pace is None or hooks is not None or torch.cuda.is_current_stream_capturing():
            return self._run(*inputs)
        if self._graphs is not None and not self._graphs.reads(inputs):
            self._graphs, self._pace = None, Pace()
            if not self._captures_left:
                self._give_up("parameters move time and again")
        if self._graphs is not None and self._graphs.are_kept(inputs):
            self._give_up("gradients of an earlier step are kept")
        if self._graphs is None and self._is_due(inputs):
            self._captures_left -= 1
            self._graphs = self._steps.capture(self._run, inputs)
            if self._graphs is None:
                self._pace = None
        if self._graphs is None:
            return self._run(*inputs) if self._pace is None else self._pace.run(self._run, inputs)
        if self._graphs.are_busy():
            return self._run(*inputs)
        return _Replay.apply(self._graphs, self._graphs.begin_pass(), *inputs)

    def _give_up(self, note: str) -> None:
        self._graphs = self._pace = None
        self._steps.say(note)

    def _is_due(self, inputs: Sequence[Any]) -> bool:
        """Whether it is to be captured now; gives that up where it never will be."""
        if self._pace is None:
            return False
        if self._pace.keeps_graphs:
            self._give_up("a step has several backward passes (retain_graph)")
            return False
        if self._steps.when is True:
            return self._pace.steps > 0
        if self._pace.steps <= _STEPS_TIMED:
            return False
        if not self._pace.waits_for_host:
            self._give_up("the GPU takes longer than the host")
        elif not _has_room(_device_of(inputs)):
            self._give_up("too little memory would stay free")
        return self._pace is not None


class Pass:
    """A replayed forward, over as soon as its backward has begun or nobody has its outputs any more."""

    is_over = False


class Pace:
    """How the steps went that were launched kernel by kernel.

    Attributes:
        steps: number of steps that had a backward pass.
        keeps_graphs: whether one of these passes retained the graph for another one.
    """

    def __init__(self) -> None:
        self.steps, self.keeps_graphs = 0, False
        self._spans: list[tuple[_Span, _Span]] = []

    @property
    def waits_for_host(self) -> bool:
        """Whether the GPU waited for the host in each of the last steps."""
        return all(
            sum(span.device_seconds() for span in spans) < _GPU_OVER_HOST * sum(span.host_seconds for span in spans)
            for spans in self._spans
        )

    def run(self, run: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """What `run` returns, observed until the end of its backward pass."""
        device = _device_of(inputs)
        forward = _Span(device)
        outputs = run(*inputs)
        forward.end()
        backward: _Span | None = None

        def begin(gradient: Tensor) -> None:
            nonlocal backward
            self.keeps_graphs |= _keeps_graph()
            if backward is None:
                backward = _Span(device)
                torch.autograd.Variable._execution_engine.queue_callback(end)

        def end() -> None:
            assert backward is not None
            backward.end()
            self.steps += 1
            self._spans = [*self._spans[1 - _STEPS_TIMED :], (forward, backward)]

        for output in outputs:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(begin)
        return outputs


class _Span:
    """A time during which the host launches kernels, and the one that the device has them for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host_begin = time.perf_counter()
        self._begin = self._event()

    def end(self) -> None:
        self._end = self._event()
        self.host_seconds = time.perf_counter() - self._host_begin

    def device_seconds(self) -> float:
        """Infinity where it is not over yet."""
        return self._begin.elapsed_time(self._end) / 1000 if self._end.query() else float("inf")

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _device_of(inputs: Iterable[Any]) -> torch.device:
    return next(value.device for value in inputs if isinstance(value, Tensor))


def _has_room(device: torch.device) -> bool:
    """Whether beside the graphs of a step there would be room for one more such step."""
    # The peak may be that of something else, and then more than a step's.
    step = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached > 2 * step


class StepTensors:
    """What the graphs of a step read and write.

    Args:
        inputs: of a call.
        own: the `id` of each parameter and buffer of the model, which are read where they are.

    Attributes:
        moving: which inputs are copied for every call.
        staying: which are read where they are.
        trained: which take gradients.
        inputs: what is read; a parameter under another name, so that what hangs on its own is left alone.
        outputs: what the last forward returned.
        differentiable: which of these take gradients.
        slopes: those gradients.
        gradients: of the inputs that take one, or None for one that has no part in the outputs.
    """

    def __init__(self, inputs: Sequence[Any], own: frozenset[int]) -> None:
        tensors = {i: value for i, value in enumerate(inputs) if isinstance(value, Tensor)}
        self.device = _device_of(inputs)
        self.sizes = tuple(tensor.shape for tensor in tensors.values())
        self.moving = [i for i, tensor in tensors.items() if id(tensor) not in own]
        self.staying = [i for i, tensor in tensors.items() if id(tensor) in own]
        self.trained = [i for i, tensor in tensors.items() if tensor.requires_grad]
        self.inputs = list(inputs)
        for i, tensor in tensors.items():
            self.inputs[i] = tensor.detach() if id(tensor) in own else tensor.detach().clone()
            self.inputs[i].requires_grad_(tensor.requires_grad)
        self.outputs: list[Any] = []
        self.differentiable: list[int] = []
        self.slopes: list[Tensor] = []
        self.gradients: list[Tensor | None] = []

    @property
    def bytes(self) -> int:
        tensors = [*(self.inputs[i] for i in self.moving), *self.slopes, *self.gradients, *self.outputs]
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
        tensors.gradients = list(torch.autograd.grad(outputs, inputs, tensors.slopes, allow_unused=True))


class StepGraphs:
    """A step's forward and backward, in memory that other graphs never write to: gradients in it may be a parameter's.

    Args:
        compiled: the step.
        tensors: that it is to read.
        captures: of the model.
    """

    def __init__(self, compiled: Callable[..., Any], tensors: StepTensors, captures: Captures) -> None:
        self.tensors, self.captures = tensors, captures
        self._forward, self._backward = _Forward(compiled, tensors), _Backward(tensors)
        self._places = [tensors.inputs[i].data_ptr() for i in tensors.staying]
        self._sloped: list[bool] = []
        self._lent: list[tuple[list[int], torch.UntypedStorage, int]] = []
        self._pass: Callable[[], Pass | None] = lambda: None

    def record(self) -> str:
        """Captures both; returns why that could not be done, or nothing."""
        tensors = self.tensors
        versions = [tensors.inputs[i]._version for i in tensors.moving]
        reason = self.captures.record(self._forward, (), _WHAT)
        if not reason and [tensors.inputs[i]._version for i in tensors.moving] != versions:
            reason = "a training step that writes to its inputs is not captured"
        if reason:
            return reason
        outputs = enumerate(tensors.outputs)
        tensors.differentiable = [i for i, out in outputs if isinstance(out, Tensor) and out.requires_grad]
        tensors.slopes = [torch.zeros_like(tensors.outputs[i]) for i in tensors.differentiable]
        self._sloped = [False] * len(tensors.slopes)
        reason = self.captures.record(self._backward, (self._forward,), _WHAT)
        if not reason:
            # With the autograd graph goes what it has kept.
            tensors.outputs = [out.detach() if isinstance(out, Tensor) else out for out in tensors.outputs]
            self._lent = _lent(tensors)
        return reason

    def are_busy(self) -> bool:
        """Whether what the last forward has left for its backward is still waiting for it."""
        last = self._pass()
        return last is not None and not last.is_over

    def begin_pass(self) -> Pass:
        begun = Pass()
        self._pass = weakref.ref(begun)
        return begun

    def reads(self, inputs: Sequence[Any]) -> bool:
        """Whether parameters and buffers are where they were."""
        return [inputs[i].data_ptr() for i in self.tensors.staying] == self._places

    def are_kept(self, inputs: Sequence[Any]) -> bool:
        """Whether anybody but parameters has gradients of the last step; if not, theirs get memory of their own."""
        moved = []
        for takers, storage, holders in self._lent:
            others = torch._C._storage_Use_Count(storage._cdata) - holders
            if not others:
                continue
            given = (inputs[i].grad for i in takers)
            own = [grad for grad in given if grad is not None and grad.untyped_storage()._cdata == storage._cdata]
            if len(own) != others:
                return True
            moved += own
        for gradient in moved:
            # The tensor stays the one that somebody else may have as well.
            gradient.data = gradient.clone()
        return False

    def forward(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Copies of the outputs."""
        tensors = self.tensors
        for i in tensors.moving:
            tensors.inputs[i].detach().copy_(inputs[i])
        self._forward()
        return tuple(out.detach().clone() if isinstance(out, Tensor) else out for out in tensors.outputs)

    def backward(self, slopes: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of `trained`, in the graph's memory where a parameter takes them."""
        tensors = self.tensors
        for at, own in enumerate(tensors.slopes):
            slope = slopes[tensors.differentiable[at]]
            if slope is not None:
                own.copy_(slope)
            elif self._sloped[at]:
                own.zero_()
            self._sloped[at] = slope is not None
        self._backward()
        results = []
        for i, gradient in zip(tensors.trained, tensors.gradients, strict=True):
            # A parameter takes what it is given, not a copy, where nobody else has that tensor.
            share = Tensor.clone if i in tensors.moving else Tensor.detach
            results.append(None if gradient is None else share(gradient))
        return results

    def backward_of_another(self, slopes: Sequence[Tensor | None], drawn_from: Tensor) -> list[Tensor | None]:
        """The gradients of `trained` in new memory, by running the forward again, uncaptured.

        For passes that retain the graph: a captured backward overwrites what its forward has saved.

        Args:
            slopes: gradients of the outputs, None for outputs that have none.
            drawn_from: state of the random generator before the forward.
        """
        tensors, generator = self.tensors, generator_of(self.tensors.device)
        inputs = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in tensors.inputs]
        drawing = generator.get_state()
        generator.set_state(drawn_from)
        try:
            with torch.enable_grad():
                outputs = self._forward.compiled(*inputs)
        finally:
            generator.set_state(drawing)
        sloped = [i for i in tensors.differentiable if slopes[i] is not None]
        trained = [inputs[i] for i in tensors.trained]
        given = [slopes[i] for i in sloped]
        return list(torch.autograd.grad([outputs[i] for i in sloped], trained, given, allow_unused=True))


def generator_of(device: torch.device) -> torch.Generator:
    """torch's default random generator of a device."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _keeps_graph() -> bool:
    """Whether the running backward pass retains the graph (`retain_graph`, `create_graph`)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _lent(tensors: StepTensors) -> list[tuple[list[int], torch.UntypedStorage, int]]:
    """Memory of gradients: which inputs' they are, and how many have it while nobody has been given any."""
    storages: dict[int, torch.UntypedStorage] = {}
    takers: dict[int, list[int]] = {}
    for i, gradient in zip(tensors.trained, tensors.gradients, strict=True):
        if gradient is not None and i not in tensors.moving:
            storage = gradient.untyped_storage()
            storages.setdefault(storage._cdata, storage)
            takers.setdefault(storage._cdata, []).append(i)
            del storage
    return [(takers[at], storage, torch._C._storage_Use_Count(at)) for at, storage in storages.items()]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: StepGraphs, begun: Pass, *inputs: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        tensors = graphs.tensors
        # Unpacked in the backward pass for PyTorch's errors: one was written to, or the pass is the second.
        ctx.save_for_backward(*(inputs[i] for i in tensors.trained))
        ctx.graphs, ctx.begun, ctx.taken = graphs, begun, len(inputs)
        ctx.drawn_from = generator_of(tensors.device).get_state()
        with graphs.captures.in_stream_order(tensors.device):
            outputs = graphs.forward(inputs)
        fixed = [out for i, out in enumerate(outputs) if i not in tensors.differentiable]
        ctx.mark_non_differentiable(*(out for out in fixed if isinstance(out, Tensor)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        if torch.is_grad_enabled():
            second_backward.refuse()
        tensors, keeps_graph = ctx.graphs.tensors, _keeps_graph()
        ctx.begun.is_over = not keeps_graph
        with ctx.graphs.captures.in_stream_order(tensors.device):
            if keeps_graph:
                found = ctx.graphs.backward_of_another(slopes, ctx.drawn_from)
            else:
                found = ctx.graphs.backward(slopes)
        gradients: list[Tensor | None] = [None] * ctx.taken
        for i, gradient in zip(tensors.trained, found, strict=True):
            gradients[i] = gradient
        return None, None, *gradients
