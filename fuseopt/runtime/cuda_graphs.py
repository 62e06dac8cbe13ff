"""Work captured as CUDA graphs: what runs once and is replayed from then on, on static tensors."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, Protocol, TypeVar

import torch

from fuseopt.runtime import gc_pause

# A capture begins with a wait for the whole device, which is an error, and ruins the other one, while any stream of it
# is being captured.
_one_capture_at_a_time = threading.Lock()


class State(Protocol):
    """Tensors at addresses that stay, and what their shapes depend on."""

    @property
    def sizes(self) -> Hashable: ...

    @property
    def bytes(self) -> int: ...

    @property
    def device(self) -> torch.device: ...


_S = TypeVar("_S", bound=State)


class Work(Generic[_S]):
    """Call: does what `run` does, which is replayed once it has been captured.

    Args:
        key: of all that `run` depends on but values of tensors.
        state: the tensors that it reads and writes.
    """

    def __init__(self, key: Hashable, state: _S) -> None:
        self.key, self.state = key, state
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        raise NotImplementedError

    def __call__(self) -> None:
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()

    def capture(self, pool: tuple[int, int], stream: torch.cuda.Stream) -> None:
        """Records on `stream` what a call does, to be replayed from then on; the same has run once before.

        Raises:
            RuntimeError: it cannot be captured; torch.OutOfMemoryError is one.
        """
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # Other threads may go on allocating; but a graph of a model that nobody has any more must not be freed now.
        recording = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        try:
            with gc_pause.not_collected(), recording:
                self.run()
        except RuntimeError:
            torch.cuda.set_stream(current)
            _end_lost_capture(graph, pool, stream)
            raise
        # Before it records, torch sets the offset of random numbers back to 0 there; a replay sets its own here.
        current.wait_stream(stream)
        self.graph = graph


class Captures:
    """Captures the works of one model, and keeps what uses their tensors in order."""

    def __init__(self) -> None:
        self._last_use: torch.cuda.Event | None = None
        self._in_use_on: torch.cuda.Stream | None = None
        self._capture_stream: torch.cuda.Stream | None = None

    def record(self, work: Work[Any], others: Iterable[Work[Any]], what: str) -> str:
        """Captures `work`, which has run before; returns why that could not be done, or nothing.

        Args:
            others: that have been captured; none of them ever runs at the same time.
            what: the work is, for the reason.
        """
        # Graphs that never run at the same time can share their workspace.
        pools = (other.graph.pool() for other in others if other.graph is not None)
        # torch's default is on the device of the process's first capture. This one serves captures alone: a graph goes
        # on to use the workspace that the BLAS library has for its stream, which has to be memory of the pool.
        self._capture_stream = stream_on(work.state.device, self._capture_stream)
        try:
            with _one_capture_at_a_time:
                work.capture(next(pools, None) or torch.cuda.graph_pool_handle(), self._capture_stream)
        except RuntimeError as error:
            # The end of a capture that something has spoiled raises, too.
            cause = error.__context__ or error
            return f"{what} could not be captured: {str(cause).splitlines()[0]}"
        return ""

    def join(self, device: torch.device) -> None:
        """Lets the current stream wait for the last block of `in_stream_order`."""
        if device.type == "cuda" and self._last_use is not None:
            torch.cuda.current_stream(device.index).wait_event(self._last_use)

    def drain(self) -> None:
        """Blocks the host until all work queued in `in_stream_order` blocks is done, so that its tensors can be freed.

        The caching allocator tracks only the stream that memory was allocated on: it reuses freed memory even while
        another stream still reads it.
        """
        for queued in (self._last_use, self._in_use_on):
            if queued is not None:
                queued.synchronize()

    @contextmanager
    def in_stream_order(self, device: torch.device) -> Iterator[None]:
        """Keeps what happens inside behind what the previous such block queued, whichever streams they are on."""
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device), self.in_order_on(torch.cuda.current_stream(device.index)):
            yield

    @contextmanager
    def in_order_on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """As `in_stream_order`, where the current stream is this one."""
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
    """Does what torch leaves undone where CUDA gave the capture up: its allocator would go on to keep memory that other
    streams have used, and its generator to refuse to draw, up to the end of another capture."""
    graph.reset()
    with suppress(RuntimeError):  # of an allocator that knows
        torch._C._cuda_endAllocateToPool(stream.device.index, pool)
    something = torch.empty((), device=stream.device)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        something.zero_()
