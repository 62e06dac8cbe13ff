"""DecodeState: the tensors that decode steps read and write, at addresses that stay the same from call to call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Cache capacities are powers of two up to this one, then multiples of it: few classes, and little waste in long ones.
_LARGEST_POWER = 1024
_SMALLEST_CAPACITY = 128


@dataclass(frozen=True)
class Sizes:
    """What the shapes of a DecodeState depend on.

    Attributes:
        rows: batch x num_return_sequences.
        capacity: slots of the self-attention cache.
        cross_capacity: slots of the cross-attention cache; 0 without an encoder.
    """

    rows: int
    capacity: int
    cross_capacity: int = 0


@dataclass(frozen=True)
class CacheShape:
    """What a model's key-value cache looks like, but for rows and slots."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class DecodeState:
    """The static tensors of one decode step.

    `cache` is [layers, 2, rows, heads, capacity, head_dim] (keys, then values); `cross_cache` likewise. A step reads
    `tokens` and `positions` [rows], writes keys and values to `slot` [1] and lets each row attend to the slots up to it
    that `keep` [rows, capacity] allows, and to those of the encoder that `cross_keep` allows. The device loop keeps the
    sequences in `ids` [rows, capacity + 1], of which `length` [1] columns are filled, `unfinished` [rows] as 0 or 1,
    and `done` [1], set when no row is left. All integers are int64; `logits` and `scores` are [rows, vocab] float32.
    """

    def __init__(self, sizes: Sizes, shape: CacheShape, vocab: int) -> None:
        self.sizes = sizes
        rows, capacity, cross_capacity = sizes.rows, sizes.capacity, sizes.cross_capacity

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=shape.device)

        # A tensor made in inference mode could not be written to outside it later.
        with torch.inference_mode(False):
            per_slot = (shape.layers, 2, rows, shape.heads)
            # Zeros, not garbage: a masked slot has weight 0, and 0 times NaN is NaN.
            self.cache = zeros(*per_slot, capacity, shape.head_dim, dtype=shape.dtype)
            self.cross_cache = zeros(*per_slot, cross_capacity, shape.head_dim, dtype=shape.dtype)
            self.keep = zeros(rows, capacity, dtype=torch.bool)
            self.cross_keep = zeros(rows, cross_capacity, dtype=torch.bool)
            self.slots = torch.arange(capacity, device=shape.device)
            self.tokens, self.positions, self.unfinished = zeros(rows), zeros(rows), zeros(rows)
            self.slot, self.length, self.pad = zeros(1), zeros(1), zeros(1)
            self.done = zeros(1, dtype=torch.bool)
            self.ids = zeros(rows, capacity + 1)
            self.logits = zeros(rows, vocab, dtype=torch.float32)
            self.scores = zeros(rows, vocab, dtype=torch.float32)

    @property
    def bytes(self) -> int:
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    def begin(self, filled: int, keep: Tensor | None, positions: Tensor | None) -> None:
        """Says where the first step stands, after a prefill that filled the first slots of the cache.

        Args:
            filled: slots that hold keys and values.
            keep: attention mask [rows, any], nonzero where a slot counts, or None where all do.
            positions: [rows] of the tokens that the first step takes, or None for `filled`.
        """
        self.slot.fill_(filled)
        self.keep.fill_(True)
        if keep is not None:
            # transformers' mask has a column for a next token even where none will follow.
            keep = keep[:, : self.sizes.capacity]
            self.keep[:, : keep.shape[1]] = keep.bool()
        if positions is None:
            self.positions.fill_(filled)
        else:
            self.positions.copy_(positions)

    def load_cross(self, length: int, keep: Tensor | None) -> None:
        """Says which of the first `length` slots of the cross-attention cache count."""
        self.cross_keep.fill_(False)
        self.cross_keep[:, :length] = True if keep is None else keep.bool()

    def attention_mask(self, dtype: torch.dtype) -> Tensor:
        """Additive [rows, 1, 1, capacity]: 0 for slots up to this step's that count, the lowest number elsewhere."""
        return _additive(self.keep & (self.slots <= self.slot), dtype)

    def cross_attention_mask(self, dtype: torch.dtype) -> Tensor:
        """Additive [rows, 1, 1, cross_capacity]."""
        return _additive(self.cross_keep, dtype)

    def advance(self) -> None:
        """Moves on to the next slot and positions."""
        self.slot += 1
        self.positions += 1


def capacity_for(length: int) -> int:
    """The smallest capacity class that holds `length` slots."""
    if length > _LARGEST_POWER:
        return -(-length // _LARGEST_POWER) * _LARGEST_POWER
    return max(_SMALLEST_CAPACITY, 1 << (length - 1).bit_length())


def _additive(keep: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(keep.shape, dtype=dtype, device=keep.device)
    return mask.masked_fill_(~keep, torch.finfo(dtype).min)[:, None, None, :]
