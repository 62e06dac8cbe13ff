"""`fuseopt.ops.philox` inside a kernel: which elements of a tile dropout keeps."""

import triton
import triton.language as tl


@triton.jit
def keep_bits(seed, row, group, THRESHOLD: tl.constexpr):
    """In bit b: whether the element in that row and column `8 * group + b` is kept. Of row and group broadcast."""
    row, group = row.to(tl.int32) + group * 0, row.to(tl.int32) * 0 + group
    r0, r1, r2, r3 = tl.philox(seed, row, group, row * 0, row * 0, 10)
    return (
        two_bits(r0, THRESHOLD)
        | (two_bits(r1, THRESHOLD) << 2)
        | (two_bits(r2, THRESHOLD) << 4)
        | (two_bits(r3, THRESHOLD) << 6)
    )


@triton.jit
def two_bits(draw, THRESHOLD: tl.constexpr):
    return ((draw & 0xFFFF) >= THRESHOLD).to(tl.int32) | (((draw >> 16) >= THRESHOLD).to(tl.int32) << 1)


@triton.jit
def keep_tile(seed, row, first_column, THRESHOLD: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """`fuseopt.ops.philox.keep_mask` of some rows and columns: [rows, BLOCK_COLUMNS], of at least 8 columns.

    Bits are what moves between threads: a tile of flags takes many times the registers.

    Args:
        row: [rows], their indices among all rows of the mask.
        first_column: a multiple of 8.
    """
    group = first_column // 8 + tl.arange(0, BLOCK_COLUMNS // 8)
    bits = keep_bits(seed, row[:, None], group[None, :], THRESHOLD)
    flags = (bits[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return tl.reshape(flags, (row.shape[0], BLOCK_COLUMNS)) != 0
