"""One pass through all blocks of a stack, on static tensors, so that a CUDA graph can record it.

`RunnableBlock` is the interface of a block's forward, `run_blocks` the loop over the blocks, `StackWork` what
`StackRunner` captures and replays.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fuseopt.blocks.recording_cache import RecordingCache
from fuseopt.ops.tuned_matmul import measuring
from fuseopt.runtime.cuda_graphs import Work


class BlockInputs(NamedTuple):
    """The tensors that a stack passes to every block, apart from hidden states and cache.

    Attributes:
        mask: attention mask over the block's own keys.
        encoded: [batch, keys, hidden], the encoder's output, which cross-attention reads.
        encoded_mask: attention mask over `encoded`.
        cos, sin: [batch or 1, length, rotary], rotation of each position.
    """

    mask: Tensor | None = None
    encoded: Tensor | None = None
    encoded_mask: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None


class RunnableBlock(Protocol):
    """The forward of a block as `StackRunner` calls it.

    A block takes and returns the residual stream as two addends, so that the last residual add of a block can be fused
    with the first norm of the next block.

    Attributes:
        read: names of plain module attributes that `constants` and `run` read, besides those of `ModuleWatch`.
        runner: the `StackRunner` of the stack that the block is in, or None.
    """

    read: tuple[str, ...]

    @property
    def runner(self) -> Any: ...

    def can_run(self, hidden_states: Tensor, inputs: BlockInputs) -> bool:
        """Whether `run` computes what the class's own forward computes, and can be captured."""

    def settings(self) -> Hashable:
        """Everything that `run` depends on apart from modules and weights; part of the key of a captured graph."""

    def constants(self, hidden_states: Tensor) -> Any:
        """Tensors that depend on module attributes only, computed once by the first block; passed to `shared`."""

    def shared(self, hidden_states: Tensor, inputs: BlockInputs, constants: Any) -> Any:
        """What the first block computes from `inputs` once a pass, for `run` of all blocks."""

    def run(
        self, hidden_states: Tensor, added: Tensor | None, past_key_values: Any, shared: Any, /
    ) -> tuple[Tensor, Tensor]:
        """Runs the block on `hidden_states + added`; returns two tensors whose sum is the block's output.

        Args:
            hidden_states: [batch, length, hidden].
            added: the same shape, or None in the first block.
        """

    def total(self, hidden_states: Tensor, added: Tensor) -> Tensor:
        """The sum of what the last block's `run` returned."""


class StackState:
    """The static tensors for one input size.

    Attributes:
        hidden: [batch, length, hidden], input of the first block.
        inputs: the other inputs of every block.
        output: [batch, length, hidden], output of the last block.
        cache: the keys and values of the pass, if the caller gave a cache to fill; else None.
    """

    def __init__(self, sizes: Hashable, hidden: Tensor, inputs: BlockInputs, caches: bool) -> None:
        self.sizes, self.device = sizes, hidden.device
        # Tensors made in inference mode cannot be written outside of it.
        with torch.inference_mode(False):
            self.hidden = _empty(hidden)
            self.inputs = BlockInputs(*(None if given is None else _empty(given) for given in inputs))
        self.output = self.hidden
        self.cache = RecordingCache() if caches else None

    @property
    def bytes(self) -> int:
        return self.hidden.nbytes + sum(tensor.nbytes for tensor in self.inputs if tensor is not None)

    def load(self, hidden: Tensor, inputs: BlockInputs) -> None:
        self.hidden.copy_(hidden)
        for tensor, given in zip(self.inputs, inputs, strict=True):
            if tensor is not None and given is not None:
                tensor.copy_(given)


class StackWork(Work[StackState]):
    """A pass through all blocks on the tensors of one `StackState`."""

    def __init__(self, key: Hashable, state: StackState, forwards: Sequence[RunnableBlock], constants: Any) -> None:
        super().__init__(key, state)
        self.forwards, self.constants, self.last_call = forwards, constants, 0

    def capture(self, pool: tuple[int, int], stream: torch.cuda.Stream) -> None:
        # Times cuBLASLt's algorithms for this size first, so that the graph records the fastest ones.
        with measuring():
            self.run()
        super().capture(pool, stream)

    def run(self) -> None:
        state = self.state
        if state.cache is not None:
            state.cache = RecordingCache()
        state.output = run_blocks(self.forwards, state.hidden, state.cache, state.inputs, self.constants)


def run_blocks(
    forwards: Sequence[RunnableBlock], hidden: Tensor, past_key_values: Any, inputs: BlockInputs, constants: Any
) -> Tensor:
    """Runs the blocks one after the other on `hidden`; returns the output of the last."""
    shared, added = forwards[0].shared(hidden, inputs, constants), None
    for forward in forwards:
        hidden, added = forward.run(hidden, added, past_key_values, shared)
    return hidden if added is None else forwards[-1].total(hidden, added)


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)
