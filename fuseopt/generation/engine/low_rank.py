"""Low-rank updates of a step's linear layers: buffers at fixed addresses, filled from LoRA layers in every call.

A captured step reads the buffers, so another active adapter, another scale or trained factors need no new capture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseopt.modules import lora
from fuseopt.ops.decode.low_rank import RANK_MULTIPLE, exchange_size


class LoraPart(NamedTuple):
    """Where a weight's update comes from.

    Attributes:
        layer: a LoRA layer, or the linear layer itself, which has no update.
        begin, end: the rows of the layer's weight that the weight has.
    """

    layer: nn.Module
    begin: int
    end: int

    @property
    def capacity(self) -> int:
        """Rank that there is room for."""
        if not lora.is_lora_linear(self.layer):
            return 0
        return -(-lora.capacity(self.layer) // RANK_MULTIPLE) * RANK_MULTIPLE


class _Copy(NamedTuple):
    """An adapter's factors, where they go, and their scale, a tensor after peft's preparation for `hotswap_adapter`."""

    a: Tensor
    from_a: Tensor
    b: Tensor
    from_b: Tensor
    scale: float | Tensor


class LowRank:
    """Updates of the weights of one Linear.

    Attributes:
        a: [R, K]; the rows of each part, one after another, zeros where no adapter is active.
        b: [N, R of the part] for each part; scales are multiplied in.
        exchange: see `ops.decode_linear_low_rank`.
    """

    def __init__(self, parts: Sequence[LoraPart], like: Tensor) -> None:
        self.parts, self.ranks = parts, [part.capacity for part in parts]
        # A tensor made in inference mode could not be written to outside it.
        with torch.inference_mode(False):
            self.a = like.new_zeros(sum(self.ranks), like.shape[1])
            lengths = (part.end - part.begin for part in parts)
            self.b = [like.new_zeros(length, rank) for length, rank in zip(lengths, self.ranks, strict=True)]
        self.exchange: Tensor | None = None

    @classmethod
    def of(cls, parts: Sequence[LoraPart], like: Tensor) -> LowRank | None:
        """None if no part is a LoRA layer."""
        return cls(parts, like) if any(lora.is_lora_linear(part.layer) for part in parts) else None

    def copies(self) -> Iterator[_Copy]:
        """For each active adapter; none for a part whose adapters exceed its room, until the step is made anew."""
        first = 0
        for part, rank, b in zip(self.parts, self.ranks, self.b, strict=True):
            active = lora.updates(part.layer) if rank else []
            if sum(len(update.a) for update in active) <= rank:
                column = 0
                for update in active:
                    columns = slice(column, column + len(update.a))
                    yield _Copy(
                        self.a[first + column : first + columns.stop],
                        update.a,
                        b[:, columns],
                        update.b[part.begin : part.end],
                        update.scale,
                    )
                    column = columns.stop
            first += rank


class LowRankUpdates:
    """All LowRanks of a step.

    Attributes:
        layers: the LoRA layers that they read.
    """

    def __init__(self, low_ranks: Iterable[LowRank | None]) -> None:
        self.low_ranks = [low_rank for low_rank in low_ranks if low_rank is not None]
        parts = (part.layer for low_rank in self.low_ranks for part in low_rank.parts)
        self.layers = list({id(layer): layer for layer in parts if lora.is_lora_linear(layer)}.values())
        self._state: list[Any] | None = None
        self._copies: tuple[list[Any], ...] = ()
        self._tickets: Tensor | None = None
        if self.low_ranks and self.low_ranks[0].a.is_cuda:
            sizes = [exchange_size(each.a) for each in self.low_ranks]
            with torch.inference_mode(False):
                together = self.low_ranks[0].a.new_zeros(len(sizes), max(sizes), dtype=torch.int64)
            self._tickets = together[:, 0]
            for each, size, exchange in zip(self.low_ranks, sizes, together, strict=True):
                each.exchange = exchange[:size]

    def fill(self) -> None:
        """Copies the factors of the active adapters; zeros replace those that are no longer active."""
        if not self.low_ranks:
            return
        state = [lora.state_of(layer) for layer in self.layers]
        with torch.inference_mode(False), torch.no_grad():
            if state != self._state:
                torch._foreach_zero_([buffer for each in self.low_ranks for buffer in (each.a, *each.b)])
                copies = [copy for each in self.low_ranks for copy in each.copies()]
                if any(isinstance(copy.scale, Tensor) for copy in copies):
                    copies = [copy._replace(scale=torch.as_tensor(copy.scale, device=copy.b.device)) for copy in copies]
                self._state, self._copies = state, tuple(map(list, zip(*copies, strict=True)))
            if self._copies:
                a, from_a, b, from_b, scales = self._copies
                torch._foreach_copy_([*a, *b], [*from_a, *from_b])
                torch._foreach_mul_(b, scales)

    def begin_step(self) -> None:
        """Marks all exchanges as unread. To be called before each run of the layers."""
        if self._tickets is not None:
            self._tickets += 1
