"""What a BlockChain runs: the blocks of a stack, one after the other; on tensors that stay, to be captured."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fuseopt.blocks.kept_cache import KeptCache
from fuseopt.ops.tuned_matmul import measuring
from fuseopt.runtime.cuda_graphs import Work

if TYPE_CHECKING:
    from fuseopt.blocks.stack_runner import BlockChain


class Inputs(NamedTuple):
    """What a stack calls each of its blocks with, beside hidden states and cache.

    Attributes:
        mask: of the attention to the blocks' own keys.
        encoded: [batch, keys, hidden], what cross-attention takes keys and values of.
        encoded_mask: of that attention.
    """

    mask: Tensor | None = None
    encoded: Tensor | None = None
    encoded_mask: Tensor | None = None


class ChainedForward(Protocol):
    """The forward of a block that a chain can run.

    Attributes:
        chain: runs all blocks of the stack at once; None if there is none.
        read: names of plain attributes of modules that `constants` and `run` read, beside `CONSTANTS`.
    """

    read: tuple[str, ...]

    @property
    def chain(self) -> BlockChain | None: ...

    def can_chain(self, hidden_states: Tensor, inputs: Inputs) -> bool:
        """Whether `run` computes what a call of the block does, and can be captured."""

    def settings(self) -> Hashable:
        """What `run` depends on beside modules and their weights."""

    def constants(self, hidden_states: Tensor) -> Any:
        """What `shared` needs that takes no part in a pass, made from such attributes; of the stack's first block."""

    def shared(self, hidden_states: Tensor, inputs: Inputs, constants: Any) -> Any:
        """What all blocks make of `inputs`, by the stack's first."""

    def run(
        self, hidden_states: Tensor, added: Tensor | None, past_key_values: Any, shared: Any, /
    ) -> tuple[Tensor, Tensor]:
        """What a call does with the sum of the first two, as two addends; for a stream that is none yet, None."""

    def total(self, hidden_states: Tensor, added: Tensor) -> Tensor:
        """What the last block returns."""


class ChainState:
    """The static tensors of one size.

    Attributes:
        hidden: [batch, length, hidden], what goes into the first block.
        inputs: what goes into every block beside.
        output: [batch, length, hidden], what comes out of the last.
        kept: keys and values, where a cache asks for them.
    """

    def __init__(self, sizes: Hashable, hidden: Tensor, inputs: Inputs, caches: bool) -> None:
        self.sizes, self.device = sizes, hidden.device
        # A tensor made in inference mode could not be written to outside it later.
        with torch.inference_mode(False):
            self.hidden = _empty(hidden)
            self.inputs = Inputs(*(None if given is None else _empty(given) for given in inputs))
        self.output = self.hidden
        self.kept = KeptCache() if caches else None

    @property
    def bytes(self) -> int:
        return self.hidden.nbytes + sum(tensor.nbytes for tensor in self.inputs if tensor is not None)

    def load(self, hidden: Tensor, inputs: Inputs) -> None:
        self.hidden.copy_(hidden)
        for tensor, given in zip(self.inputs, inputs, strict=True):
            if tensor is not None and given is not None:
                tensor.copy_(given)


class ChainWork(Work[ChainState]):
    """All blocks, one after the other, on the tensors of a state."""

    def __init__(self, key: Hashable, state: ChainState, forwards: Sequence[ChainedForward], constants: Any) -> None:
        super().__init__(key, state)
        self.forwards, self.constants, self.last_call = forwards, constants, 0

    def capture(self, pool: tuple[int, int], stream: torch.cuda.Stream) -> None:
        # Of products the fastest algorithms, for a size that comes often.
        with measuring():
            self.run()
        super().capture(pool, stream)

    def run(self) -> None:
        state = self.state
        if state.kept is not None:
            state.kept = KeptCache()
        state.output = passed(self.forwards, state.hidden, state.kept, state.inputs, self.constants)


def passed(
    forwards: Sequence[ChainedForward], hidden: Tensor, past_key_values: Any, inputs: Inputs, constants: Any
) -> Tensor:
    """What the last block returns for what goes into the first."""
    shared, added = forwards[0].shared(hidden, inputs, constants), None
    for forward in forwards:
        hidden, added = forward.run(hidden, added, past_key_values, shared)
    return hidden if added is None else forwards[-1].total(hidden, added)


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)
