"""Capture of work on static tensors, as CUDA graphs or recorded runs, and stream order among a model's works."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, Protocol, TypeVar

import torch

from fuseopt.build import loader
from fuseopt.runtime import gc_pause
from fuseopt.runtime.recorded_runs import RecordedRun

# A capture starts with a device synchronisation, which is illegal while another stream is capturing and would
# invalidate that capture.
_one_capture_at_a_time = threading.Lock()


class State(Protocol):
    """Static tensors that a captured work reads and writes; `sizes` identifies their shapes."""

    @property
    def sizes(self) -> Hashable: ...

    @property
    def bytes(self) -> int: ...

    @property
    def device(self) -> torch.device: ...


_S = TypeVar("_S", bound=State)


class Work(Generic[_S]):
    """A function on static tensors. A call runs it, or after `capture` replays its CUDA graph.

    On a CPU, a RecordedRun takes the graph's place.

    Args:
        key: everything that `run` depends on apart from the values of tensors.
        state: the tensors that `run` reads and writes.
    """

    def __init__(self, key: Hashable, state: _S) -> None:
        self.key, self.state = key, state
        self.graph: torch.cuda.CUDAGraph | RecordedRun | None = None

    def run(self) -> None:
        raise NotImplementedError

    def __call__(self) -> None:
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()

    @property
    def how(self) -> str:
        """How a call runs: "graph", "recorded" or "eager"."""
        if isinstance(self.graph, RecordedRun):
            return "eager" if self.graph.refused else "recorded"
        return "eager" if self.graph is None else "graph"

    def record(self) -> None:
        """Makes later calls record `run`, and replay it."""
        self.graph = RecordedRun(self.run)

    def capture(self, pool: tuple[int, int], stream: torch.cuda.Stream) -> None:
        """Captures `run`, which must have run once before, on `stream`; later calls replay the graph.

        Raises:
            RuntimeError: the capture failed; torch.OutOfMemoryError is a subclass.
        """
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # "thread_local" lets other threads allocate. The collector is paused because freeing another graph during the
        # capture would invalidate it.
        recording = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        try:
            with gc_pause.paused(), recording:
                self.run()
        except RuntimeError:
            torch.cuda.set_stream(current)
            _end_lost_capture(graph, pool, stream)
            raise
        # torch resets the generator's offset on the capture stream; each replay sets its own on the current stream.
        current.wait_stream(stream)
        self.graph = graph


class Captures:
    """Captures the works of one model, and serialises their use of static tensors across streams."""

    def __init__(self) -> None:
        self._last_use: torch.cuda.Event | None = None
        self._in_use_on: torch.cuda.Stream | None = None
        self._capture_stream: torch.cuda.Stream | None = None

    def record(self, work: Work[Any], others: Iterable[Work[Any]], what: str) -> str:
        """Captures `work`, which must have run once; returns the reason of a failure, or "".

        On a CPU, the next calls of `work` are recorded.

        Args:
            others: captured works that never run at the same time as `work`, whose memory pool it may share.
            what: name of the work in the reason, such as "the blocks".
        """
        if work.state.device.type == "cpu":
            work.record()
            return ""
        pools = (other.graph.pool() for other in others if isinstance(other.graph, torch.cuda.CUDAGraph))
        # Not torch's default capture stream, which is on the device of the process's first capture. The stream is used
        # for captures only: its cuBLAS workspace is baked into the graph, so it has to be allocated from the pool.
        self._capture_stream = stream_on(work.state.device, self._capture_stream)
        try:
            with _one_capture_at_a_time:
                work.capture(next(pools, None) or torch.cuda.graph_pool_handle(), self._capture_stream)
        except RuntimeError as error:
            # Ending an invalidated capture raises as well; the first error is the cause.
            cause = error.__context__ or error
            return f"{what} could not be captured: {str(cause).splitlines()[0]}"
        return ""

    @staticmethod
    def can_capture(device: torch.device) -> bool:
        """Whether work on this device can be captured. On a CPU that takes the library for Python."""
        return device.type == "cuda" or (device.type == "cpu" and loader.python_library() is not None)

    def join(self, device: torch.device) -> None:
        """Makes the current stream wait for the work that the last `in_stream_order` block queued."""
        if device.type == "cuda" and self._last_use is not None:
            torch.cuda.current_stream(device.index).wait_event(self._last_use)

    def drain(self) -> None:
        """Blocks the host until all work queued in `in_stream_order` blocks is done; then its tensors can be freed.

        The caching allocator tracks only the stream that memory was allocated on: it reuses freed memory even while
        another stream still reads it.
        """
        for queued in (self._last_use, self._in_use_on):
            if queued is not None:
                queued.synchronize()

    @contextmanager
    def in_stream_order(self, device: torch.device) -> Iterator[None]:
        """Orders the work queued inside after the work of the previous such block, also across streams."""
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device), self.in_order_on(torch.cuda.current_stream(device.index)):
            yield

    @contextmanager
    def in_order_on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """`in_stream_order` for a caller that knows the current stream."""
        if self._last_use is not None:
            stream.wait_event(self._last_use)
        before, self._in_use_on = self._in_use_on, stream
        try:
            yield
        finally:
            self._in_use_on, self._last_use = before, stream.record_event()


def stream_on(device: torch.device, stream: torch.cuda.Stream | None) -> torch.cuda.Stream:
    """`stream` if it is on this device, or a new one."""
    return torch.cuda.Stream(device) if stream is None or stream.device != device else stream


def _end_lost_capture(graph: torch.cuda.CUDAGraph, pool: tuple[int, int], stream: torch.cuda.Stream) -> None:
    """Cleans up after an invalidated capture, which torch does not do.

    Without it the caching allocator keeps routing memory to the pool, and the generator refuses to draw random numbers,
    until another capture ends. So an empty one is run here.
    """
    graph.reset()
    with suppress(RuntimeError):  # the allocator may have ended it already
        torch._C._cuda_endAllocateToPool(stream.device.index, pool)
    something = torch.empty((), device=stream.device)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        something.zero_()
