"""Walks along rows too wide for registers: whole vectors of rows that begin anywhere, and the online softmax.

The online softmax (Milakov and Gimelshein, 2018, https://arxiv.org/abs/1805.02867) finds a row's maximum and its sum of
exponentials in one walk.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

# exp2 is one instruction; exp adds a multiplication and, unlike exp2, a repair of subnormal results.
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def split_scale(mask_ptr, scale, COMPUTE: tl.constexpr):
    """The factors of the input, and of differences between logits as powers of 2; both in COMPUTE.

    Without a mask logits are x / 2 or -x / 2, and 2 |scale| multiplies their differences. Halves are exact and their
    differences finite. Of `x * scale - max` the compiler makes an FMA, from whose exact product a rounded one is taken.
    """
    scale = tl.full((), scale, COMPUTE)
    factor, power = scale, tl.full((), LOG2_E, COMPUTE)
    if mask_ptr is None:
        factor = tl.where(scale < 0.0, -0.5, tl.where(scale == 0.0, 0.0, 0.5)).to(COMPUTE)
        power *= tl.where(scale == 0.0, 1.0, 2.0 * tl.abs(scale)).to(COMPUTE)
    return factor, power


@triton.jit
def aligned_row(columns, ALIGNMENT: tl.constexpr):
    """Where this program's row lies, counted from the last multiple of ALIGNMENT elements before its first one.

    Returns its first element, the end of its last one, and the same for the vectors of ALIGNMENT that it fills.
    """
    first = (tl.program_id(0).to(tl.int64) * columns % ALIGNMENT).to(tl.int32)
    end = first + columns
    return first, end, (first + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT, end // ALIGNMENT * ALIGNMENT


@triton.jit
def edge_positions(first, end, vectors_end, ALIGNMENT: tl.constexpr):
    """Positions [2 * ALIGNMENT] of the vectors that hold a row's ends, and which of them belong to the row."""
    edge = tl.arange(0, 2 * ALIGNMENT)
    position = tl.where(edge < ALIGNMENT, edge, vectors_end - ALIGNMENT + edge)
    return position, (position >= first) & (position < end)


@triton.jit
def update_online(lane_max, lane_sum, x, power=LOG2_E):
    """Takes `x` [STEPS, LANES] into each lane's maximum, and its sum of exponentials relative to that maximum.

    The exponentials are 2^(power * difference).
    """
    new_max = tl.maximum(lane_max, tl.max(x, axis=0))
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)  # -inf - -inf would be NaN
    new_sum = lane_sum * tl.exp2((lane_max - shift) * power)
    new_sum += tl.sum(tl.exp2((x - shift[None, :]) * power), axis=0)
    return new_max, new_sum


def row_alignment(matrices: Sequence[torch.Tensor], row_strides: Sequence[int], columns: int) -> int:
    """Elements of a 16-byte vector, if each row starts equally far from a multiple of it in all `matrices`; else 1.

    The last vector of a row may read past its end. That is safe only if vectors are aligned, as memory never ends
    inside an aligned vector. So it is 1 if one of `matrices` does not begin at a multiple of 16 bytes.
    """
    alignment = 16 // max(matrix.itemsize for matrix in matrices)
    is_aligned = all(matrix.data_ptr() % 16 == 0 for matrix in matrices)
    return alignment if is_aligned and all((stride - columns) % alignment == 0 for stride in row_strides) else 1
