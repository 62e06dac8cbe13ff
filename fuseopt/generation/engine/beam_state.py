"""BeamState: what beam search carries from step to step, at addresses that stay the same from call to call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fuseopt.ops.decode.beams import follow


class BestBeams(NamedTuple):
    """`sequences` [rows, length] and `beam_indices` [rows, generated] int32 as transformers returns them; `scores`."""

    sequences: Tensor
    scores: Tensor
    beam_indices: Tensor


class BeamState:
    """The static tensors of beam search over `items` of `beams` neighbouring rows each.

    `ids` [2, rows, capacity + 1] and `ancestry` [2, rows, capacity] are of the running beams, then of the best finished
    ones so far. Keys and values stay in the row of the cache that wrote them: `ancestry`, int32, says for each slot
    which one that was, so that beams go on from one another by a gather of this table. The finished ones have
    `lengths`, in tokens generated, `scores` and, where they have been filled, `is_finished`, the running ones
    `running_scores`, all [items, beams]; `improvable` [items] says whether a running beam may still get in, and
    `generated` [1] how many steps there have been. `arrived` [2] is for `ops.decode_beams_`.
    """

    def __init__(self, items: int, beams: int, capacity: int, device: torch.device) -> None:
        rows, self.shape = items * beams, (items, beams)

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.ids = zeros(2, rows, capacity + 1)
        self.ancestry = zeros(2, rows, capacity, dtype=torch.int32)
        self.own_row = torch.arange(rows, dtype=torch.int32, device=device)
        self.running_scores = zeros(items, beams, dtype=torch.float32)
        self.scores = zeros(items, beams, dtype=torch.float32)
        self.is_finished = zeros(items, beams, dtype=torch.bool)
        self.lengths = zeros(items, beams)
        self.improvable = zeros(items, dtype=torch.bool)
        self.generated = zeros(1)
        self.arrived = zeros(2, dtype=torch.int32)

    @property
    def bytes(self) -> int:
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    def forget_ancestors(self) -> None:
        """Every row is its own ancestor, as it is where a prompt has been read."""
        self.ancestry.copy_(self.own_row[:, None])

    def begin(self, input_ids: Tensor) -> None:
        """From prompts [rows, length] on: the first beam of each item runs, and nothing is finished."""
        self.ids[:, :, : input_ids.shape[1]] = input_ids
        # As transformers has it: what scores this low has not been found yet.
        self.scores.fill_(-1e9)
        self.running_scores.fill_(-1e9)
        self.running_scores[:, 0] = 0.0
        self.is_finished.fill_(False)
        self.lengths.zero_()
        self.improvable.fill_(True)
        self.generated.zero_()

    def follow(self, rows: Tensor, slot: Tensor) -> None:
        """Lets running beams go on from those at `rows` [rows], with all that these have before `slot` [1]."""
        follow(self.ancestry, rows, slot)

    def best(self, count: int, length: int, filled: int, fill: Tensor) -> BestBeams:
        """The best `count` sequences of each item.

        Args:
            length: of the prompts.
            filled: slots of the cache that were filled by the prompts.
            fill: [], stands behind sequences that are shorter than others.
        """
        rows = self.own_row.unflatten(0, self.shape)[:, :count].flatten()
        lengths = self.lengths[:, :count].flatten()[:, None]
        longest = int(lengths.max())
        is_behind = torch.arange(longest, device=lengths.device) >= lengths
        sequences = self.ids[1, rows, : length + longest]
        sequences[:, length:].masked_fill_(is_behind, fill)
        # A token comes from the row that had the one before it as its input.
        beam_indices = self.ancestry[1, rows, filled - 1 : filled - 1 + longest].masked_fill_(is_behind, -1)
        return BestBeams(sequences, self.scores[:, :count].flatten().clone(), beam_indices)


def along_ancestry(cache: Tensor, ancestry: Tensor) -> Tensor:
    """[2, rows, heads, capacity, head_dim] -> [2, rows, heads, slots, head_dim]: what each row's ancestors wrote.

    Args:
        ancestry: [rows, slots] int32.
    """
    slots = torch.arange(ancestry.shape[1], device=ancestry.device)
    return cache[:, ancestry, :, slots].permute(2, 0, 3, 1, 4)
