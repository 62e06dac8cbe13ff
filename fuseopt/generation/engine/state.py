"""DecodeState: the tensors that decode steps read and write, at fixed addresses, so that steps can be captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseopt.generation.engine.beam_state import BeamState
from fuseopt.generation.engine.device_constants import TrackedCopy
from fuseopt.generation.engine.quantised_cache import CACHE_NAMES, LayerCache, QuantisedCache
from fuseopt.ops.decode.linear import FEW_ROWS
from fuseopt.ops.decode.quantized_heads import EIGHT_BIT_ATTENTION
from fuseopt.runtime.huge_pages import with_huge_pages
from fuseopt.tuning import tuned

# Cache capacities are powers of two up to this one, then multiples of it: few classes, and little waste when long.
_LARGEST_POWER = 1024
_SMALLEST_CAPACITY = 128
# The longest prompt that is captured.
# TUNED: Llama-3.2-1B, bfloat16, 1 x 2048, H200: 7.0 ms of kernels, which a busy host takes 10.7 ms to launch (f3efbe4).
_LONGEST_PROMPT = 2048

_PROMPT_CLASS = 64
_SMALL_PROMPT_CLASS = 16


class Sizes(NamedTuple):
    """The sizes that determine the shapes of a DecodeState.

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

    def __str__(self) -> str:
        return f"{self.rows} row{'s' * (self.rows != 1)} and {self.capacity} slots"

    @property
    def items(self) -> int:
        return self.rows // self.queries_per_kv

    @property
    def slots(self) -> int:
        """Slots of all rows, plus those of the encoder's output of all items."""
        return self.rows * self.capacity + self.items * self.cross_capacity

    def rounded_up(self) -> Sizes:
        """With both capacities rounded up to their class, see `capacity_for`."""
        cross = capacity_for(self.cross_capacity) if self.cross_capacity else 0
        return self._replace(capacity=capacity_for(self.capacity), cross_capacity=cross)


@dataclass(frozen=True)
class CacheShape:
    """Shape of a model's key-value cache without rows and slots.

    Attributes:
        absorbed_slots: the most slots for which cross-attention is also kept absorbed; 0: never.
        stored_dtype: int8 or float8_e4m3fn for keys and values in 8 bits; None for `dtype`, which they are computed in.
            On a GPU, small caches are not quantised: see `stored_in`.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    encoder_width: int = 0
    absorbed_slots: int = 0
    stored_dtype: torch.dtype | None = None

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of keys and values of one row in one slot, over all layers, with their scales."""
        of_head = self.head_dim * self.dtype.itemsize
        if self.stored_dtype is not None:
            of_head = self.head_dim + torch.float32.itemsize
        return 2 * self.layers * self.heads * of_head

    def bytes_of(self, sizes: Sizes) -> int:
        """Bytes of all keys and values, of the encoder's output too."""
        return sizes.slots * replace(self, stored_dtype=self.stored_in(sizes)).bytes_per_slot

    def stored_in(self, sizes: Sizes) -> torch.dtype | None:
        """`stored_dtype` for caches of these sizes; None if they are so small that it slows attention on a GPU."""
        if self.stored_dtype is None or self.device.type != "cuda":
            return self.stored_dtype
        of_a_layer = 2 * sizes.slots * self.heads * self.head_dim * self.dtype.itemsize
        return self.stored_dtype if of_a_layer >= tuned("decode_attention_8_bit_bytes", self.device) else None


class AbsorbedCrossAttention:
    """Cross-attention to the few slots of one item, with its keys and values multiplied into the projections.

    For the norm's output x, the scores of a head are x @ (keys @ query weight).T, and the output is the sum over heads
    of softmax(scores) @ (values @ output weight). Both products are computed once per prompt.

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
    """The static tensors of one decode step. Integers are int64 and flags bool; caches have the model's dtype.

    A step reads `tokens` and `positions`, writes keys and values to slot `slot`, and lets each row attend to the slots
    up to that one. A prefill reads the prompt from `ids` and `prompt_positions`, up to slot `slot`.

    Attributes:
        dtype: of keys and values before they are quantised, which is the model's.
        cache: [layers, 2, rows, kv_heads, capacity, head_dim]; keys, then values.
        scales: [layers, 2, rows, kv_heads, capacity] float32, of a cache in 8 bits; else None.
        rotary_tables: what a step derives from the slots' numbers, [capacity, any] float32 each.
        cross_cache: [layers, 2, items, heads, cross_capacity, head_dim], of the encoder's output.
        cross_scales: [layers, 2, items, heads, cross_capacity] float32, of a `cross_cache` in 8 bits; else None.
        tokens, positions: [rows], of the tokens that the next step takes.
        slot: [1], the slot that the next step fills.
        keep: [rows, capacity], the slots that a row may attend to.
        cross_length: [1], how many slots of `cross_cache` are filled.
        cross_keep: [items, cross_capacity], those of them that may be attended to.
        encoded: [items, cross_capacity, encoder_width], the encoder's output.
        ids: [rows, capacity + 1], the sequences; with beams, those of the running beams.
        length: [1], how many columns of `ids` are filled.
        prompt_positions: [rows, capacity], positions of the prompt's tokens.
        unfinished: [rows], whether a row has no EOS token yet.
        going: [capacity + 1], whether any row continues after the token in this column.
        pad: [1], the id that finished rows are given.
        random: [3], where a kernel draws its random numbers from; see `ops.decode_sample_`.
        logits, scores: [rows, vocab] float32, before and after the logits processors.
        beams: static tensors of beam search; None outside it.
        absorbed: AbsorbedCrossAttention of a single item, or None.
        may_pad: whether a prefill may be given more tokens a row than the prompts have.
        start: the slot at which a prefill begins; the prefix cache has filled those before it.
        prompts: for each row, a PrefixCache's record of the prompt whose keys and values are in the cache; empty
            without a record.
        start_slot: [1], `start` on the device, if `start_varies`.
        start_varies: a prefill reads `start_slot`, so that one captured prefill serves any start.
    """

    def __init__(self, sizes: Sizes, shape: CacheShape, vocab: int) -> None:
        self.sizes, self.dtype, self.used, self.may_pad = sizes, shape.dtype, False, True
        self.start, self.start_varies = 0, False
        self.prompts: Sequence[Any] = ()
        # What the host knows of device tensors, to skip writing them again: `keep` is all True, `prompt_positions`
        # count up from 0, and `cross_keep` is True for so many slots in every item.
        self._keeps_all = self._counts_up = False
        self._cross_length: int | None = None
        rows, capacity, cross_capacity = sizes.rows, sizes.capacity, sizes.cross_capacity

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=shape.device)

        # A tensor made in inference mode cannot be written to outside it.
        with torch.inference_mode(False):
            layers, heads, head_dim = shape.layers, shape.heads, shape.head_dim
            # On a CPU nothing reads an unfilled slot, and the system provides a page when it is first written.
            allocate = torch.empty if shape.device.type == "cpu" else torch.zeros
            size, cross_size = (layers, 2, rows, heads, capacity), (layers, 2, sizes.items, heads, cross_capacity)
            in_8_bits = shape.stored_in(sizes)
            stored = in_8_bits or shape.dtype
            self.cache = with_huge_pages(allocate((*size, head_dim), dtype=stored, device=shape.device))
            self.cross_cache = torch.empty((*cross_size, head_dim), dtype=stored, device=shape.device)
            with_huge_pages(self.cross_cache).zero_()
            self.scales = self.cross_scales = None
            if in_8_bits is not None:
                self.scales = allocate(size, dtype=torch.float32, device=shape.device)
                self.cross_scales = zeros(*cross_size, dtype=torch.float32)
            self.keep = zeros(rows, capacity, dtype=torch.bool)
            self.cross_keep = zeros(sizes.items, cross_capacity, dtype=torch.bool)
            self.encoded = zeros(sizes.items, cross_capacity, shape.encoder_width, dtype=shape.dtype)
            self.absorbed: AbsorbedCrossAttention | None = None
            if sizes.items == 1 and rows <= FEW_ROWS and 0 < cross_capacity <= shape.absorbed_slots:
                self.absorbed = AbsorbedCrossAttention(rows, cross_capacity, shape)
            self.slots = torch.arange(capacity, device=shape.device)
            self.rotary_tables: tuple[Tensor, ...] = ()
            self.tokens, self.pad, self.cross_length = zeros(rows), zeros(1), zeros(1)
            # In one tensor, so that a step advances both by one addition.
            self.counters = zeros(rows + 1)
            self.slot, self.positions = self.counters.split((1, rows))
            self.length, self.random, self.start_slot = zeros(1), zeros(3), zeros(1)
            self.flags = zeros(rows + capacity + 1, dtype=torch.bool)
            self.unfinished, self.going = self.flags.split((rows, capacity + 1))
            self.beams: BeamState | None = None
            if sizes.beams > 1:
                self.beams = BeamState(rows // sizes.beams, sizes.beams, capacity, shape.device)
            self.ids = zeros(rows, capacity + 1) if self.beams is None else self.beams.ids[0]
            self.prompt_positions = zeros(rows, capacity)
            self.load_pad = TrackedCopy(self.pad)
            self.logits = zeros(rows, vocab, dtype=torch.float32)
            self.scores = zeros(rows, vocab, dtype=torch.float32)

    @property
    def bytes(self) -> int:
        own = sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor) and value._base is None)
        own += sum(table.nbytes for table in self.rotary_tables)
        return own + sum(part.bytes for part in (self.beams, self.absorbed) if part is not None)

    @property
    def cache_size(self) -> str:
        """For the report."""
        caches = self.cache, self.cross_cache, self.scales, self.cross_scales
        mebibytes = sum(cache.nbytes for cache in caches if cache is not None) / 2**20
        kind = "" if self.scales is None else f" in {CACHE_NAMES[self.cache.dtype]}"
        return f"{self.sizes}, {mebibytes:.1f} MiB of keys and values{kind}"

    @property
    def device(self) -> torch.device:
        return self.ids.device

    @property
    def layer_caches(self) -> Sequence[LayerCache]:
        """`cache` by layer."""
        return _by_layer(self.cache, self.scales)

    @property
    def cross_caches(self) -> Sequence[LayerCache]:
        """`cross_cache` by layer."""
        return _by_layer(self.cross_cache, self.cross_scales)

    @property
    def attention_op(self) -> str:
        """The op that attends to the caches; `encoded` has the dtype of its queries."""
        return "decode_attention" if self.scales is None else EIGHT_BIT_ATTENTION

    def zero_caches(self) -> None:
        """Zeros the caches of an earlier call. Attention multiplies masked values by 0, and 0 * NaN is NaN."""
        if self.used:
            for cache in (self.cache, self.cross_cache, self.scales, self.cross_scales):
                if cache is not None:
                    cache.zero_()
            self.prompts = ()
        self.used = True

    def begin(self, filled: int, keep: Tensor | None = None, positions: Tensor | None = None) -> None:
        """Sets `slot`, `positions` and `keep` for the first step, after `filled` slots of the cache.

        Args:
            keep: attention mask [rows, any], nonzero where a slot may be attended to; None if all may.
            positions: [rows] of the tokens that the first step takes; None for `filled`.
        """
        self.prompts = ()
        self.counters.fill_(filled)
        if positions is not None:
            self.positions.copy_(positions)
        if keep is not None or not self._keeps_all:
            self._keeps_all = False
            self.keep.fill_(True)
        if keep is None:
            self._keeps_all = True
        else:
            # transformers' mask may have a column for a next token where none will follow.
            keep = keep[:, : self.sizes.capacity]
            self.keep[:, : keep.shape[1]] = keep.bool()
        if self.beams is not None:
            self.beams.forget_ancestors()

    def prefilled_slots(self, length: int) -> Tensor:
        """[length]: the slots of `length` tokens a row, from slot `start` on."""
        return self.start_slot + self.slots[:length] if self.start_varies else self.slots[self.start :][:length]

    def in_prompt(self, length: int) -> Tensor | None:
        """[length] bool: which of the tokens in `prefilled_slots` are the prompts'; None if all are."""
        return self.prefilled_slots(length) < self.slot if self.may_pad else None

    def load_prompt(self, input_ids: Tensor, keep: Tensor | None, positions: Tensor | None) -> None:
        """Loads a prompt for `prefill`, and sets where the first step after it starts.

        Args:
            input_ids: [rows, length] int64.
            keep: attention mask [rows, any], nonzero where a token may be attended to; None if all may.
            positions: [rows, length] int64, or [1, length] if equal in all rows; None if they count up from 0.
        """
        length, self.start = input_ids.shape[1], 0
        self.begin(length, keep, None if positions is None else positions[:, -1] + 1)
        self.ids[:, :length] = input_ids
        if positions is not None:
            self._counts_up = False
            self.prompt_positions[:, :length] = positions
        elif not self._counts_up:
            self.prompt_positions.copy_(self.slots)
            self._counts_up = True

    def load_random(self, generator: torch.Generator) -> None:
        """Lets kernels draw what `generator` would draw from now on."""
        seed, (own_seed, offset, draws) = generator.initial_seed(), self.random.split(1)
        own_seed.fill_(seed if seed < 2**63 else seed - 2**64)
        offset.fill_(generator.get_offset())
        draws.zero_()

    def load_cross(self, length: int, keep: Tensor | None) -> None:
        """Sets which of the first `length` slots of the cross-attention cache may be attended to.

        Args:
            keep: attention mask [items, any], nonzero where a slot may be attended to; None if all may.
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
            # As in transformers, a longer mask is cut and a shorter one is padded with zeros.
            keep = keep[:, :length]
            self.cross_keep[:, : keep.shape[1]] = keep.bool()


def _by_layer(cache: Tensor, scales: Tensor | None) -> Sequence[LayerCache]:
    return tuple(cache) if scales is None else tuple(map(QuantisedCache, cache, scales))


def capacity_for(length: int) -> int:
    """The smallest capacity class that holds `length` slots."""
    if length > _LARGEST_POWER:
        return -(-length // _LARGEST_POWER) * _LARGEST_POWER
    return max(_SMALLEST_CAPACITY, 1 << (length - 1).bit_length())


def prompt_length_for(rows: int, length: int, device: torch.device) -> int | None:
    """The smallest length class that holds `length` tokens a row; None for prompts that are not captured."""
    padded = -(-length // _PROMPT_CLASS) * _PROMPT_CLASS if length > _PROMPT_CLASS else 1 << (length - 1).bit_length()
    # Padding is free while launches dominate. With more tokens it costs compute, so classes are finer.
    if rows * padded > tuned("prompt_free_padding_tokens", device):
        padded = -(-length // _SMALL_PROMPT_CLASS) * _SMALL_PROMPT_CLASS
    # More tokens keep a GPU busy for longer than the host takes to launch their kernels.
    is_captured = padded <= _LONGEST_PROMPT and rows * padded <= tuned("prompt_graph_max_tokens", device)
    return padded if is_captured else None
