"""Times the first steps of a compiled model, to find out whether the GPU waits for the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

# The last steps that are compared; the first step of all compiles and is never one of them.
STEPS_TIMED = 2
# A step is host-bound if its kernels take at most this many times the host time for launching them.
# TUNED: measurement not recorded (0faf226); `fuseopt bench train --model gpt2` measures it again.
_GPU_OVER_HOST = 1.15


class StepTimer:
    """Runs steps kernel by kernel and measures host and device time of their forward and backward passes.

    Attributes:
        steps: number of steps whose backward pass has ended.
        keeps_graphs: whether one of these backward passes retained the autograd graph.
    """

    def __init__(self) -> None:
        self.steps, self.keeps_graphs = 0, False
        self._spans: list[tuple[_Span, _Span]] = []

    @property
    def is_host_bound(self) -> bool:
        """Whether the GPU waited for the host in each of the last `STEPS_TIMED` steps."""
        return all(
            sum(span.device_seconds() for span in spans) < _GPU_OVER_HOST * sum(span.host_seconds for span in spans)
            for spans in self._spans
        )

    def run(self, run: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Returns `run(*inputs)`, timed until the end of its backward pass."""
        device = device_of(inputs)
        forward = _Span(device)
        outputs = run(*inputs)
        forward.end()
        backward: _Span | None = None

        def begin(gradient: Tensor) -> None:
            nonlocal backward
            self.keeps_graphs |= retains_graph()
            if backward is None:
                backward = _Span(device)
                torch.autograd.Variable._execution_engine.queue_callback(end)

        def end() -> None:
            assert backward is not None
            backward.end()
            self.steps += 1
            self._spans = [*self._spans[1 - STEPS_TIMED :], (forward, backward)]

        for output in outputs:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(begin)
        return outputs


class _Span:
    """Host time between construction and `end`, and the device time of the kernels launched in between."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host_begin = time.perf_counter()
        self._begin = self._event()

    def end(self) -> None:
        self._end = self._event()
        self.host_seconds = time.perf_counter() - self._host_begin

    def device_seconds(self) -> float:
        """Infinity while the device is still busy."""
        return self._begin.elapsed_time(self._end) / 1000 if self._end.query() else float("inf")

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def device_of(inputs: Iterable[Any]) -> torch.device:
    """The device of the first tensor."""
    return next(value.device for value in inputs if isinstance(value, Tensor))


def retains_graph() -> bool:
    """Whether the running backward pass retains the autograd graph (`retain_graph`, `create_graph`)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()
