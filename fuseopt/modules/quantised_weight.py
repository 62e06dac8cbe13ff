"""QuantisedWeight: the weight of a quantised linear layer, and what its readers for each library share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fuseopt.ops.low_bit import GROUPS, LowBitWeight, pack


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """The weight [N, K] of a linear layer, as its checkpoint stores it.

    Attributes:
        layout: library or method, and dtype, such as "AWQ int4".
        shape: (N, K).
        bits, group: those of the LowBitWeight that `read` returns.
        scales: in the shape of the layout; float32, bfloat16 or float16.
        tensors: all that the layer's forward reads, with its bias.
        whole: reads the LowBitWeight of all outputs of the layer.
        begin, end: the range of these outputs that is this object's weight; `end` is None for the last.
    """

    layout: str
    shape: tuple[int, int]
    bits: int
    group: int
    scales: Tensor
    tensors: tuple[Tensor, ...]
    whole: Callable[[], LowBitWeight]
    begin: int = 0
    end: int | None = None

    @property
    def format(self) -> str:
        """Must be equal for weights that one kernel reads together: "groups of 128, scales of torch.float16"."""
        groups = f"groups of {self.group}, " if self.bits == 4 else ""
        return f"{groups}scales of {self.scales.dtype}"

    def halves(self) -> tuple[QuantisedWeight, QuantisedWeight]:
        """The weights of the first and of the second half of the outputs."""
        middle, inputs = self.shape[0] // 2, self.shape[1]
        last = replace(self, shape=(self.shape[0] - middle, inputs), begin=middle)
        return replace(self, shape=(middle, inputs), end=middle), last

    def read(self) -> LowBitWeight:
        """The weight as kernels read it; int4 values are copies."""
        values, scales, zeros, bits, group = self.whole()
        rows = slice(self.begin, self.end)
        return LowBitWeight(values[rows], scales[rows], None if zeros is None else zeros[rows], bits, group)

    def stand_in(self, dtype: torch.dtype | None = None) -> Tensor:
        """A placeholder [N, K] that expands one NaN, so any use of its values shows.

        Args:
            dtype: None for that of the scales.
        """
        return self.scales.new_full((), torch.nan, dtype=dtype).expand(self.shape)


class NotRead(Exception):
    """Why a quantised weight is not read, as the end of a sentence that begins with the layer's path."""


def require(condition: bool, layout: str, reason: str) -> None:
    """Raises NotRead with the layout and `reason` unless `condition` holds."""
    if not condition:
        raise NotRead(f"is quantised ({layout}): {reason}")


def check_device(layout: str, device: torch.device) -> None:
    """Raises NotRead if tensors on a device cannot be read."""
    require(device.type != "meta", layout, "its tensors have no data")


def group_size(layout: str, inputs: int, groups: int) -> int:
    """The group size of the LowBitWeight: stored groups that are larger are split into several of equal scales."""
    size = inputs // max(groups, 1)
    fits = size * groups == inputs and size % GROUPS[0] == 0 and size > 0
    require(fits, layout, f"its {groups} groups of {inputs} inputs are not of a multiple of {GROUPS[0]} inputs")
    return max(group for group in GROUPS if size % group == 0)


def int4_weight(group: int, nibbles: Tensor, scales: Tensor, zeros: Tensor | None) -> LowBitWeight:
    """The weight of nibbles uint8 [N, K], and scales and zero points [N, groups of at least `group` inputs]."""
    parts = nibbles.shape[1] // scales.shape[1] // group
    scales = scales.detach().repeat_interleave(parts, dim=1)
    if zeros is not None:
        zeros = None if bool((zeros == 8).all()) else zeros.repeat_interleave(parts, dim=1)
    return LowBitWeight(pack(nibbles), scales, zeros, 4, group)


def int8_weight(values: Tensor, scales: Tensor) -> LowBitWeight:
    """The weight of values int8 [N, K], and scales [N, 1], or [1, 1] for all outputs."""
    spread = scales.detach().float().expand(len(values), 1)
    return LowBitWeight(values.contiguous(), spread.contiguous(), None, 8, values.shape[1])


def unpack_in_order(words: Tensor) -> Tensor:
    """int32 [..., n] -> uint8 [..., 8 n]: the nibbles of each word, the lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & 15).to(torch.uint8).flatten(-2)


def made(
    layout: str,
    module: Any,
    shape: tuple[int, int],
    bits: int,
    group: int,
    tensors: tuple[Tensor, ...],
    read: Callable[[], LowBitWeight],
) -> QuantisedWeight:
    """The weight of a layer: `tensors` begin with the scales, and the layer's bias is added to them."""
    bias = () if module.bias is None else (module.bias,)
    return QuantisedWeight(layout, shape, bits, group, tensors[0], (*tensors, *bias), read)
