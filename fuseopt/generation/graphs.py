"""StepGraphs: decode steps captured as CUDA graphs, and the static tensors they read and write, pooled and bounded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fuseopt.generation.selection import Selection
from fuseopt.generation.state import CacheShape, DecodeState, Sizes

Forward = Callable[[DecodeState], Tensor]
# A capture begins with a wait for the whole device, which is an error, and ruins the other one, while any stream of it
# is being captured.
_one_capture_at_a_time = threading.Lock()


class Step:
    """Call: runs one decode step, which is the forward, the selection if there is one, and the move to the next slot.

    `selection` is the one that runs: its tensors are at the addresses that a graph reads.
    """

    def __init__(self, forward: Forward, state: DecodeState, selection: Selection | None) -> None:
        self.forward, self.state, self.selection = forward, state, selection
        self.graph: torch.cuda.CUDAGraph | None = None

    @property
    def key(self) -> Hashable:
        return self.state.sizes, None if self.selection is None else self.selection.key

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        logits = self.forward(self.state)
        if self.selection is None:
            self.state.logits.copy_(logits)
            self.state.counters += 1
        else:
            self.selection(self.state, logits)

    def capture(self, pool: tuple[int, int], stream: torch.cuda.Stream) -> None:
        """Records on `stream` what a call does, to be replayed from then on; the step has run once before.

        Raises:
            RuntimeError: it cannot be captured; torch.OutOfMemoryError is one.
        """
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on allocating.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self()
        self.graph = graph


class StepGraphs:
    """A model's captured steps, and their states: the step used longest ago goes first, a state with its last step.

    Args:
        max_graphs: how many captured steps are kept; 0 for none.
    """

    def __init__(self, max_graphs: int) -> None:
        self.max_graphs = max_graphs
        self._steps: OrderedDict[Hashable, Step] = OrderedDict()
        self._last_use: torch.cuda.Event | None = None
        self._capture_stream: torch.cuda.Stream | None = None

    @property
    def count(self) -> int:
        return len(self._steps)

    @property
    def bytes(self) -> int:
        """What the states take; the graphs' own workspace comes on top."""
        return sum(state.bytes for state in {id(step.state): step.state for step in self._steps.values()}.values())

    def clear(self) -> None:
        self._steps.clear()

    def state(self, sizes: Sizes, shape: CacheShape, vocab: int) -> DecodeState:
        """The state of these sizes that a captured step has, or a new one."""
        kept = (step.state for step in self._steps.values() if step.state.sizes == sizes)
        return next(kept, None) or DecodeState(sizes, shape, vocab)

    def step(self, forward: Forward, state: DecodeState, selection: Selection | None) -> Step:
        """The captured step that does this, with the selection's values loaded into it, or a new one."""
        new = Step(forward, state, selection)
        step = self._steps.get(new.key, new)
        if step is not new:
            self._steps.move_to_end(step.key)
            if selection is not None and step.selection is not None:
                step.selection.load(selection)
        return step

    def capture(self, step: Step) -> str:
        """Captures a step on a GPU and keeps it; returns why it could not be done, or nothing."""
        device = step.state.ids.device
        if step.graph is not None or device.type != "cuda" or not self.max_graphs:
            return ""
        while len(self._steps) >= self.max_graphs:
            self._steps.popitem(last=False)
        # Graphs that never run at the same time can share their workspace.
        pools = (kept.graph.pool() for kept in self._steps.values() if kept.graph is not None)
        # torch's default is on the device of the process's first capture.
        if self._capture_stream is None or self._capture_stream.device != device:
            self._capture_stream = torch.cuda.Stream(device)
        try:
            with _one_capture_at_a_time:
                step.capture(next(pools, None) or torch.cuda.graph_pool_handle(), self._capture_stream)
        except RuntimeError as error:
            return f"the step could not be captured, so it ran eagerly: {str(error).splitlines()[0]}"
        self._steps[step.key] = step
        return ""

    @contextmanager
    def in_stream_order(self, device: torch.device) -> Iterator[None]:
        """Keeps what happens inside behind what the previous such block queued, whichever streams they are on."""
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream()
            if self._last_use is not None:
                stream.wait_event(self._last_use)
            try:
                yield
            finally:
                self._last_use = stream.record_event()
