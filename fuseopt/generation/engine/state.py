"""DecodeState: the tensors that decode steps read and write, at addresses that stay the same from call to call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fuseopt.generation.engine.beam_state import BeamState
from fuseopt.generation.engine.device_constants import Copied
from fuseopt.ops.decode.linear import FEW_ROWS

# Cache capacities are powers of two up to this one, then multiples of it: few classes, and little waste in long ones.
_LARGEST_POWER = 1024
_SMALLEST_CAPACITY = 128
# Prompts of more tokens keep a GPU busy for longer than it takes to launch their kernels one by one.
_MOST_PROMPT_TOKENS = 8192
_LONGEST_PROMPT = 1024
_PROMPT_CLASS = 64
# With more tokens padding is no longer for nothing, so classes are smaller.
_FEW_PROMPT_TOKENS = 4096
_SMALL_PROMPT_CLASS = 16


class Sizes(NamedTuple):
    """What the shapes of a DecodeState depend on.

    Attributes:
        rows: batch x num_return_sequences, or batch x beams.
        capacity: slots of the self-attention cache.
        cross_capacity: slots of the cross-attention cache; 0 without an encoder.
        queries_per_kv: neighbouring rows that share one item's keys and values of the encoder's output: its beams, or
            the sequences sampled for it.
        beams: neighbouring rows that are beams of one item; 1 outside beam search.
    """

    rows: int
    capacity: int
    cross_capacity: int = 0
    queries_per_kv: int = 1
    beams: int = 1

    @property
    def items(self) -> int:
        return self.rows // self.queries_per_kv

    def of_class(self) -> Sizes:
        """With the capacities of the classes that they are in."""
        cross = capacity_for(self.cross_capacity) if self.cross_capacity else 0
        return self._replace(capacity=capacity_for(self.capacity), cross_capacity=cross)


@dataclass(frozen=True)
class CacheShape:
    """What a model's key-value cache looks like, but for rows and slots; and how wide its encoder's output is.

    Attributes:
        absorbed_slots: the most slots of a cross-attention cache that is kept absorbed too; 0 for none.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    encoder_width: int = 0
    absorbed_slots: int = 0

    @property
    def bytes_per_slot(self) -> int:
        """Of keys and values of one row."""
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize


class AbsorbedCrossAttention:
    """Cross-attention to the few slots of one item, with its keys and values multiplied into the projections.

    For the norm's output x, the scores of a head are x @ (keys @ query weight).T, and the output is the sum over heads
    of softmax(scores) @ (values @ output weight). Both products are computed once a prompt.

    Attributes:
        keys, values: the products [layers, heads * slots, width]; zeros for masked slots.
        mask: [rows, heads * slots] float32, added to the scores: 0, or the lowest number for masked slots.
    """

    def __init__(self, rows: int, slots: int, shape: CacheShape) -> None:
        size, on = (shape.layers, shape.heads * slots, shape.encoder_width), {"device": shape.device}
        self.keys, self.values = (torch.zeros(size, dtype=shape.dtype, **on) for _ in range(2))
        self.mask = torch.zeros(rows, size[1], dtype=torch.float32, **on)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in vars(self).values())


class DecodeState:
    """The static tensors of one decode step.

    `cache` is [layers, 2, rows, heads, capacity, head_dim] (keys, then values); `cross_cache` likewise, with items for
    rows. A step reads `tokens` and `positions` [rows], writes keys and values to `slot` [1], and lets each row attend
    to the slots up to it that `keep` [rows, capacity] allows, and to the first `cross_length` [1] of its item's that
    `cross_keep` [items, cross_capacity] allows. The device loop has the sequences in `ids` [rows, capacity + 1], of
    which `length` [1] columns are filled, whether a row goes on in `unfinished` [rows], and in `going` [capacity + 1]
    whether any does behind each column. Integers are int64, the rest of these is bool; `logits` and `scores` are
    [rows, vocab] float32. A prompt is read from `ids`, with `prompt_positions` [rows, capacity], as far as `slot` says;
    an encoder's output from `encoded` [items, cross_capacity, encoder_width].
    `beams` has what beam search needs beside, or is None; then `ids` are those of its running beams. `absorbed` is the
    AbsorbedCrossAttention of a single item, or None. `steps_overlap`: a step's first kernel starts before
    the step ahead has ended.
    """

    def __init__(self, sizes: Sizes, shape: CacheShape, vocab: int) -> None:
        self.sizes, self.used, self.steps_overlap = sizes, False, False
        # What the host knows of tensors: nothing is masked, prompts are numbered from 0 on, so many slots of the
        # encoder's count in all items.
        self._keeps_all = self._counts_up = False
        self._cross_length: int | None = None
        rows, capacity, cross_capacity = sizes.rows, sizes.capacity, sizes.cross_capacity

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=shape.device)

        # A tensor made in inference mode could not be written to outside it later.
        with torch.inference_mode(False):
            layers, heads, head_dim = shape.layers, shape.heads, shape.head_dim
            self.cache = zeros(layers, 2, rows, heads, capacity, head_dim, dtype=shape.dtype)
            self.cross_cache = zeros(layers, 2, sizes.items, heads, cross_capacity, head_dim, dtype=shape.dtype)
            self.keep = zeros(rows, capacity, dtype=torch.bool)
            self.cross_keep = zeros(sizes.items, cross_capacity, dtype=torch.bool)
            self.encoded = zeros(sizes.items, cross_capacity, shape.encoder_width, dtype=shape.dtype)
            self.absorbed: AbsorbedCrossAttention | None = None
            if sizes.items == 1 and rows <= FEW_ROWS and 0 < cross_capacity <= shape.absorbed_slots:
                self.absorbed = AbsorbedCrossAttention(rows, cross_capacity, shape)
            self.slots = torch.arange(capacity, device=shape.device)
            self.tokens, self.pad, self.cross_length = zeros(rows), zeros(1), zeros(1)
            # What every forward adds one to, at one stroke.
            self.counters = zeros(rows + 1)
            self.slot, self.positions = self.counters.split((1, rows))
            self.length = zeros(1)
            self.flags = zeros(rows + capacity + 1, dtype=torch.bool)
            self.unfinished, self.going = self.flags.split((rows, capacity + 1))
            self.beams: BeamState | None = None
            if sizes.beams > 1:
                self.beams = BeamState(rows // sizes.beams, sizes.beams, capacity, shape.device)
            self.ids = zeros(rows, capacity + 1) if self.beams is None else self.beams.ids[0]
            self.prompt_positions = zeros(rows, capacity)
            self.load_pad = Copied(self.pad)
            self.logits = zeros(rows, vocab, dtype=torch.float32)
            self.scores = zeros(rows, vocab, dtype=torch.float32)

    @property
    def bytes(self) -> int:
        own = sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor) and value._base is None)
        return own + sum(part.bytes for part in (self.beams, self.absorbed) if part is not None)

    @property
    def device(self) -> torch.device:
        return self.ids.device

    def forget(self) -> None:
        """Zeros the caches, for attention that multiplies masked values by a weight of 0, which leaves NaN as it is."""
        if self.used:
            self.cache.zero_()
            self.cross_cache.zero_()
        self.used = True

    def begin(self, filled: int, keep: Tensor | None = None, positions: Tensor | None = None) -> None:
        """Says where the first step stands, after a prefill that filled the first slots of the cache.

        Args:
            filled: slots that hold keys and values.
            keep: attention mask [rows, any], nonzero where a slot counts, or None where all do.
            positions: [rows] of the tokens that the first step takes, or None for `filled`.
        """
        self.counters.fill_(filled)
        if positions is not None:
            self.positions.copy_(positions)
        if keep is not None or not self._keeps_all:
            self._keeps_all = False
            self.keep.fill_(True)
        if keep is None:
            self._keeps_all = True
        else:
            # transformers' mask has a column for a next token even where none will follow.
            keep = keep[:, : self.sizes.capacity]
            self.keep[:, : keep.shape[1]] = keep.bool()
        if self.beams is not None:
            self.beams.forget_ancestors()

    def load_prompt(self, input_ids: Tensor, keep: Tensor | None, positions: Tensor | None) -> None:
        """Says what a prefill finds, and where the first step after it stands.

        Args:
            input_ids: [rows, length] int64.
            keep: attention mask [rows, any], nonzero where a token counts, or None where all do.
            positions: [rows, length] int64, or [1, length] where they are the same in all rows, or None where they
                are counted from 0 on.
        """
        length = input_ids.shape[1]
        self.begin(length, keep, None if positions is None else positions[:, -1] + 1)
        self.ids[:, :length] = input_ids
        if positions is not None:
            self._counts_up = False
            self.prompt_positions[:, :length] = positions
        elif not self._counts_up:
            self.prompt_positions.copy_(self.slots)
            self._counts_up = True

    def load_cross(self, length: int, keep: Tensor | None) -> None:
        """Says which of the first `length` slots of the cross-attention cache count.

        Args:
            keep: attention mask [items, any], nonzero where a slot counts, or None where all do.
        """
        if keep is None and self._cross_length == length:
            return
        self._cross_length = None
        self.cross_length.fill_(length)
        self.cross_keep.fill_(False)
        if keep is None:
            self.cross_keep[:, :length] = True
            self._cross_length = length
        else:
            # As transformers takes a mask of another length: cut, or zeros for what is missing.
            keep = keep[:, :length]
            self.cross_keep[:, : keep.shape[1]] = keep.bool()


def capacity_for(length: int) -> int:
    """The smallest capacity class that holds `length` slots."""
    if length > _LARGEST_POWER:
        return -(-length // _LARGEST_POWER) * _LARGEST_POWER
    return max(_SMALLEST_CAPACITY, 1 << (length - 1).bit_length())


def prompt_length_for(rows: int, length: int) -> int | None:
    """The smallest length class that holds `length` tokens a row, or None where there would be too many tokens."""
    padded = -(-length // _PROMPT_CLASS) * _PROMPT_CLASS if length > _PROMPT_CLASS else 1 << (length - 1).bit_length()
    if rows * padded > _FEW_PROMPT_TOKENS:
        padded = -(-length // _SMALL_PROMPT_CLASS) * _SMALL_PROMPT_CLASS
    return padded if padded <= _LONGEST_PROMPT and rows * padded <= _MOST_PROMPT_TOKENS else None
