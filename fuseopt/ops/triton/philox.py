"""`fuseopt.ops.philox` inside a kernel: which elements of a tile dropout keeps."""

import triton
import triton.language as tl

from fuseopt.ops.library import TRITON_INTERPRETED

INTERPRETED = tl.constexpr(TRITON_INTERPRETED)


@triton.jit
def philox2(key, c0, c1):
    """`fuseopt.ops.philox.philox2`, of uint32."""
    for _ in tl.static_range(7):
        if INTERPRETED:
            product = c0.to(tl.uint64) * 0xD256D193
        else:
            # Of a product in Triton two instructions are made, one for each half.
            product = tl.inline_asm_elementwise(
                "mul.wide.u32 $0, $1, 0xD256D193;", "=l,r", [c0], dtype=tl.uint64, is_pure=True, pack=1
            )
        c0 = (product >> 32).to(tl.uint32) ^ key ^ c1
        c1 = product.to(tl.uint32)
        key = (key + 0x9E3779B9).to(tl.uint32)
    return c0, c1


@triton.jit
def drop_scores(tile, key, place_0, place_1, first_row, row, first_column, column, THRESHOLD: tl.constexpr):
    """`tile`, and 0 where `fuseopt.ops.philox.keep_scores` keeps nothing.

    Every element computes its draw. Those of a thread that share one are seen to, and it is computed once.

    Args:
        key, place_0, place_1: of the item and head, from Philox4x32-10.
        first_row, first_column: multiples of 16, or of 8 for a tile of 8.
        row, column: of the tile, from 0, each with a dimension of 1 for the other.
    """
    if row.numel < 16:
        row, first_row = row + (first_row & 8), first_row & ~8
    if column.numel < 16:
        column, first_column = column + (first_column & 8), first_column & ~8
    nothing = row * 0 + column * 0
    c0 = ((column & ~8) + first_column + nothing).to(tl.uint32) ^ place_0
    c1 = ((row & ~8) + first_row + nothing).to(tl.uint32) ^ place_1
    first, second = philox2(key, c0, c1)
    draw = tl.where((row & 8) == 0, first, second)
    # The lower half's bits are moved up, and below the upper half's the others make no difference.
    number = tl.where((column & 8) == 0, draw << 16, draw)
    limit = tl.full((), THRESHOLD << 16, tl.uint32)
    if INTERPRETED or tile.dtype != tl.float32:
        result = tl.where(number >= limit, tile, 0.0)
    else:
        # As tl.where it would move past the rounding to 16 bits, and take two instructions there.
        result = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.hs.u32 p, $2, $3; selp.f32 $0, $1, 0f00000000, p; }",
            "=f,f,r,r", [tile, number, limit], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return result
