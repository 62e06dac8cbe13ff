"""What tests of training share: gradients against differences of the loss, and what is kept for the backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5LayerNorm

from fuseopt.runtime.cuda_graphs import Captures
from fuseopt.training import captured_steps, partitioner, step_graphs, step_timing
from fuseopt.training.step_graphs import StepGraphs


class HostSpan:
    """A time in which a device was as busy as `device_over_host` says."""

    device_over_host = 1.0
    host_seconds = 0.5

    def __init__(self, device: torch.device) -> None: ...

    def end(self) -> None: ...

    def device_seconds(self) -> float:
        return self.host_seconds * self.device_over_host


def capture_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has steps captured on a CPU. Work runs there as it is, but gradients have one memory as those of a CUDA graph do.

    The host is what such a CPU waits for, and it has room.

    Returns:
        What has happened: "captured" and "replayed", once a step.
    """
    events: list[str] = []
    record, forward, backward = StepGraphs.record, StepGraphs.forward, step_graphs._Backward.run

    def counted_record(graphs: StepGraphs) -> str:
        events.append("captured")
        return record(graphs)

    def counted_forward(graphs: StepGraphs, inputs: Any) -> tuple[Any, ...]:
        events.append("replayed")
        return forward(graphs, inputs)

    def run_backward(work: Any) -> None:
        static = work.state.gradients
        backward(work)
        if static:
            for own, gradient in zip(static, work.state.gradients, strict=True):
                if own is not None:
                    own.copy_(gradient)
            work.state.gradients = static

    def run_once(captures: Captures, work: Any, others: Any, what: str) -> str:
        # Of memory that is shared only its own forward may be written to.
        assert all(other.state is work.state for other in others)
        with torch.random.fork_rng([]):
            work.run()
        return ""

    def has_one_size(inputs: Any) -> bool:
        return all(isinstance(value, Tensor) and not value._has_symbolic_sizes_strides for value in inputs)

    monkeypatch.setattr(StepGraphs, "record", counted_record)
    monkeypatch.setattr(StepGraphs, "forward", counted_forward)
    monkeypatch.setattr(step_graphs._Backward, "run", run_backward)
    monkeypatch.setattr(captured_steps, "can_capture", has_one_size)
    monkeypatch.setattr(step_timing, "_Span", HostSpan)
    monkeypatch.setattr(captured_steps, "_fits_in_memory", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Captures, "record", run_once)
    return events


class Graphs:
    """How many graphs were compiled, by `backend` whatever was asked for, and how often they were called.

    `backend` is what they are compiled by, `last` the graph that Dynamo traced last.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.compile_graph = functools.partial(partitioner.compile_graph, backend=backend)
        self.compiled = self.calls = 0
        self.last: Any = None

    def __call__(self, graph: Any, inputs: Any, *, backend: str, budget: float, captured: Any) -> Callable[..., Any]:
        self.compiled += 1
        self.last = graph
        run = self.compile_graph(graph, inputs, budget=budget, captured=captured)

        def counted(*arguments: Any) -> Any:
            self.calls += 1
            return run(*arguments)

        return counted


def assert_slope(model: nn.Module, loss: Callable[[], Tensor], *, rtol: float = 1e-5) -> None:
    """The gradient of `loss()`, which calls the float64 `model`, against a central difference along one direction.

    Every call draws from the same seed, and so the same masks; the backward pass finds the generator elsewhere.
    """
    parameters, step = list(model.parameters()), 1e-5
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = [torch.randn(p.shape, dtype=p.dtype, device="cpu", generator=generator) for p in parameters]
    direction = [drawing.to(p.device) for drawing, p in zip(drawn, parameters, strict=True)]

    def at(distance: float) -> Tensor:
        with torch.no_grad():
            torch._foreach_add_(parameters, direction, alpha=distance)
        torch.manual_seed(5)
        result = loss()
        torch.manual_seed(6)
        return result

    at(0.0)
    at(0.0).backward()
    slope = sum((p.grad * d).sum().item() for p, d in zip(parameters, direction, strict=True))
    forwards, backwards = at(step).item(), at(-2 * step).item()
    assert slope == pytest.approx((forwards - backwards) / (2 * step), rel=rtol)


def saved_tensors(model: nn.Module, *args: object, **kwargs: object) -> list[Tensor]:
    """What a forward keeps for its backward."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(*args, **kwargs)
    assert outputs is not None
    return kept


def saved_bytes(model: nn.Module, *args: object, **kwargs: object) -> int:
    """What a forward keeps for its backward, parameters apart."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = (tensor.untyped_storage() for tensor in saved_tensors(model, *args, **kwargs))
    by_pointer = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for pointer, size in by_pointer.items() if pointer not in parameters)


def norms_in_float64(model: nn.Module) -> nn.Module:
    """The model, T5's norms replaced by ones with the same weights that take the variance in the model's dtype.

    T5's take it in float32, too coarse for a central difference.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, T5LayerNorm):
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model
