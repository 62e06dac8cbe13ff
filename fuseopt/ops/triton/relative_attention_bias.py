"""The gradient of `relative_attention`'s bias: sums over the batch along diagonals, in a fixed order.

All tiles on one diagonal of tiles hold the same distances at the same places. So a program adds such tiles up as they
are, in registers, and only their sum is taken apart by distance, in a second kernel. That is for a band of diagonals:
beyond it no tile has a distance less than the bias's reach, and its sum, which the kernel for the queries takes along,
is all one of the bias's ends.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fuseopt.ops.triton.launch import Launch
from fuseopt.ops.triton.philox import drop_scores
from fuseopt.ops.triton.relative_attention_tiles import (
    LOG2E,
    Call,
    Tile,
    Tiles,
    grad_scale,
    load_tile,
    middle_of,
    product,
    score_tile,
)
from fuseopt.ops.triton.rows import TL_DTYPES, multiprocessor_count

# Programs for each multiprocessor, as far as there are items in the batch: diagonals differ in length.
# TUNED: measurement not recorded; `fuseopt bench ops --op relative_attention` measures it again.
PROGRAMS = 8
_DISTANCES = 64
_BEYOND = 1024


# Square, and so of one size along a diagonal; multiples of the keys in the tiles of the kernel for the queries.
# TUNED: measurement not recorded (503618d); `fuseopt bench ops --op relative_attention` measures it again.
BIAS_TILES = Tiles(
    half=(Tile(64, 64, 4, 3), Tile(32, 32, 4, 2)),
    single=(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
)


class Band(NamedTuple):
    """The diagonals of tiles with a distance less than the reach, by how many tiles a key's is ahead of its query's."""

    tile: Tile
    lowest: int
    highest: int
    ends: bool  # there are others

    @classmethod
    def of(cls, call: Call) -> "Band":
        _, queries, keys, reach = call.sizes
        tile = call.tile(BIAS_TILES)
        block = tile.queries
        least, most = 1 - triton.cdiv(queries, block), triton.cdiv(keys, block) - 1
        near = (reach + 2 * block - 2) // block - 1
        lowest, highest = max(-near, least), min(near, most)
        return cls(tile, lowest, highest, (lowest, highest) != (least, most))


@triton.jit
def relative_attention_bwd_bias_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    line_ptr,
    mask_ptr,
    seed_ptr,
    grad_output_ptr,
    shift_ptr,
    delta_ptr,
    partial_ptr,  # [splits, heads, diagonals, BLOCK, BLOCK] in COMPUTE: sums of tiles
    batch,
    splits,
    lowest,  # of the band's diagonals
    highest,
    heads,
    queries,
    keys,
    reach,
    query_batch_stride,
    query_head_stride,
    query_stride,
    key_batch_stride,
    key_head_stride,
    key_stride,
    value_batch_stride,
    value_head_stride,
    value_stride,
    mask_batch_stride,
    mask_head_stride,
    mask_query_stride,
    mask_key_stride,
    grad_batch_stride,
    grad_stride,
    grad_head_stride,
    scale: tl.float64,
    keep_scale: tl.float64,
    THRESHOLD: tl.constexpr,
    KEY_MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN: tl.constexpr,
    DIM: tl.constexpr,
    COMPUTE: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,  # as many as BLOCK_KEYS
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Each program takes one diagonal of tiles of one head, of every splits-th item of the batch."""
    query_tiles, key_tiles = tl.cdiv(queries, BLOCK_QUERIES), tl.cdiv(keys, BLOCK_KEYS)
    diagonals = highest - lowest + 1
    ahead = lowest + tl.program_id(0) % diagonals
    head = (tl.program_id(0) // diagonals) % heads
    split = tl.program_id(0) // (diagonals * heads)
    begin = tl.maximum(-ahead, 0)
    length = tl.minimum(query_tiles, key_tiles - ahead) - begin
    if CAUSAL:
        length = tl.where((ahead - 1) * BLOCK_KEYS < keys - queries, length, 0)
    log2_scale = tl.full((), scale * LOG2E, COMPUTE)
    keep_scale = tl.full((), keep_scale, COMPUTE)
    head = head.to(tl.int64)
    query_ptr += head * query_head_stride
    key_ptr += head * key_head_stride
    value_ptr += head * value_head_stride
    grad_output_ptr += head * grad_head_stride
    if line_ptr is not None:
        line_ptr = middle_of(line_ptr, head, reach)
    if mask_ptr is not None:
        mask_ptr += head * mask_head_stride
    query, key = tl.arange(0, BLOCK_QUERIES), tl.arange(0, BLOCK_KEYS)
    if THRESHOLD > 0:
        seed = tl.load(seed_ptr)
    total = tl.zeros((BLOCK_QUERIES, BLOCK_KEYS), COMPUTE)
    for step in tl.range(0, length * tl.cdiv(batch - split, splits)):
        item = (split + step // length * splits).to(tl.int64)
        first_query = (begin + step % length) * BLOCK_QUERIES
        first_key = first_query + ahead * BLOCK_KEYS
        query_rows, key_rows = first_query.to(tl.int64), first_key.to(tl.int64)
        q = load_tile(
            query_ptr + item * query_batch_stride + query_rows * query_stride,
            query_stride, queries - first_query, EVEN, DIM, BLOCK_QUERIES, BLOCK_DIM,
        ).to(FACTOR)  # fmt: skip
        grad = load_tile(
            grad_output_ptr + item * grad_batch_stride + query_rows * grad_stride,
            grad_stride, queries - first_query, EVEN, DIM, BLOCK_QUERIES, BLOCK_DIM,
        ).to(FACTOR)  # fmt: skip
        k = load_tile(
            key_ptr + item * key_batch_stride + key_rows * key_stride,
            key_stride, keys - first_key, EVEN, DIM, BLOCK_KEYS, BLOCK_DIM,
        ).to(FACTOR)  # fmt: skip
        v = load_tile(
            value_ptr + item * value_batch_stride + key_rows * value_stride,
            value_stride, keys - first_key, EVEN, DIM, BLOCK_KEYS, BLOCK_DIM,
        ).to(FACTOR)  # fmt: skip
        index = first_query + query
        row = (item * heads + head) * queries + index
        # Of a query that is not there: no weight.
        shift = tl.load(shift_ptr + row, mask=index < queries, other=float("inf"))
        delta = tl.load(delta_ptr + row, mask=index < queries, other=0.0)
        mask = mask_ptr
        if mask_ptr is not None:
            mask = mask_ptr + item * mask_batch_stride
        scores = score_tile(
            product(q, tl.trans(k), COMPUTE), log2_scale, first_query, query[:, None], first_key, key[None, :],
            queries, keys, line_ptr, reach, mask, mask_query_stride, mask_key_stride, KEY_MASK, CAUSAL, EVEN,
        )  # fmt: skip
        weights = tl.exp2(scores - shift[:, None])
        grad_weights = product(grad, tl.trans(v), COMPUTE)
        if THRESHOLD > 0:
            drop_key, place_0, place_1, _ = tl.philox(seed, (item * heads + head).to(tl.uint32), 0, 0, 0, 10)
            grad_weights = drop_scores(
                grad_weights, drop_key, place_0, place_1, first_query, query[:, None], first_key, key[None, :],
                THRESHOLD,
            )  # fmt: skip
        factor = grad_scale(shift, keep_scale, mask_ptr is not None)
        total += weights * (grad_weights * factor[:, None] - delta[:, None])
    row, column = tl.arange(0, BLOCK_QUERIES)[:, None], tl.arange(0, BLOCK_KEYS)[None, :]
    partial = partial_ptr + tl.program_id(0).to(tl.int64) * (BLOCK_QUERIES * BLOCK_KEYS)
    tl.store(partial + row * BLOCK_KEYS + column, total)


@triton.jit
def end_sum(
    partial_ptr, beyond_ptr, side, splits, lowest, highest, head, heads, items, tiles, reach,
    ENDS: tl.constexpr, BLOCK: tl.constexpr, BEYOND: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Of a head: all as far behind as the reach or farther, where `side` is 0; ahead, where it is 1."""
    diagonals = highest - lowest + 1
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), COMPUTE)
    for step in tl.range(0, splits * diagonals):
        split, diagonal = step // diagonals, step % diagonals
        distance = (lowest + diagonal) * BLOCK + column - row
        mask = tl.where(side == 0, distance <= -reach, distance >= reach)
        tile = (tl.cast(split, tl.int64) * heads + head) * diagonals + diagonal
        total += tl.load(partial_ptr + tile * (BLOCK * BLOCK) + row * BLOCK + column, mask=mask, other=0.0)
    result = tl.sum(tl.sum(total, axis=1), axis=0)
    if ENDS:
        beyond = tl.zeros((BEYOND,), COMPUTE)
        for start in tl.range(0, items * tiles, BEYOND):
            index = start + tl.arange(0, BEYOND)
            offset = ((side * items + index // tiles).to(tl.int64) * heads + head) * tiles + index % tiles
            beyond += tl.load(beyond_ptr + offset, mask=index < items * tiles, other=0.0)
        result += tl.sum(beyond, axis=0)
    return result


@triton.jit
def distance_sums(
    partial_ptr, index, splits, lowest, highest, head, heads, reach, BLOCK: tl.constexpr, COMPUTE: tl.constexpr
):
    """Of a head: those of the distances `index - reach`."""
    diagonals = highest - lowest + 1
    # A distance is `ahead` tiles and `rest` places; from the row in which rest runs over it is in the next tile.
    distance = index - reach - lowest * BLOCK + BLOCK
    ahead, rest = distance // BLOCK - 1, distance % BLOCK
    row = tl.arange(0, BLOCK)[:, None]
    column = row + rest[None, :]
    diagonal = ahead[None, :] + (column >= BLOCK).to(tl.int32)
    mask = (diagonal >= 0) & (diagonal < diagonals)
    offset = (diagonal * BLOCK + row) * BLOCK + column % BLOCK
    total = tl.zeros((BLOCK, index.shape[0]), COMPUTE)
    for split in tl.range(0, splits):
        tiles = (tl.cast(split, tl.int64) * heads + head) * diagonals
        total += tl.load(partial_ptr + tiles * (BLOCK * BLOCK) + offset, mask=mask, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def diagonal_sum_kernel(
    partial_ptr,  # [splits, heads, diagonals, BLOCK, BLOCK]
    beyond_ptr,  # [2, items, heads, tiles]: sums behind and ahead of the band; not read if it is all there is
    grad_bias_ptr,  # [heads, 2 * reach + 1], contiguous
    splits,
    lowest,
    highest,
    items,
    tiles,
    reach,
    ENDS: tl.constexpr,  # whether there is anything beyond the band
    BLOCK: tl.constexpr,
    DISTANCES: tl.constexpr,
    BEYOND: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Two programs of a head take its ends, each other one DISTANCES between them."""
    head, heads = tl.program_id(1), tl.num_programs(1)
    grad_bias_ptr += head * (2 * reach + 1)
    side = tl.program_id(0)
    if side < 2:
        end = end_sum(
            partial_ptr, beyond_ptr, side, splits, lowest, highest, head, heads, items, tiles, reach,
            ENDS, BLOCK, BEYOND, COMPUTE,
        )  # fmt: skip
        tl.store(grad_bias_ptr + side * (2 * reach), end)
    else:
        index = 1 + (side - 2) * DISTANCES + tl.arange(0, DISTANCES)
        sums = distance_sums(partial_ptr, index, splits, lowest, highest, head, heads, reach, BLOCK, COMPUTE)
        tl.store(grad_bias_ptr + index, sums, mask=index < 2 * reach)


class GradOfBias:
    """The gradient of the bias in calls of one kind.

    Call: the kernels' tensors, `shift` and `delta` [batch, heads, queries], `beyond` [2, batch, heads, tiles], sums of
    the gradients of scores behind and ahead of the band, which is empty where the band is all there is, and `partials`
    numbers to be written to -> [heads, 2 * reach + 1], in the dtype of the arithmetic.

    Args:
        tiles: of a head's queries, as the kernel for the queries takes them.
    """

    def __init__(self, call: Call, tiles: int) -> None:
        heads, _, _, reach = call.sizes
        self.band = Band.of(call)
        tile, lowest, highest, ends = self.band
        diagonals = highest - lowest + 1
        wanted = PROGRAMS * multiprocessor_count(call.device)
        splits = min(call.batch, triton.cdiv(wanted, diagonals * heads))
        self.partials = splits * heads * diagonals * tile.queries * tile.keys
        self._shape = heads, 2 * reach + 1
        self._of_band = call.launch(
            relative_attention_bwd_bias_kernel,
            tile,
            splits * heads * diagonals,
            before=(call.batch, splits, lowest, highest),
        )
        self._of_distances = Launch(
            diagonal_sum_kernel,
            (2 + triton.cdiv(2 * reach - 1, _DISTANCES), heads),
            (splits, lowest, highest, call.batch, tiles if ends else 0, reach),
            {
                "ENDS": ends,
                "BLOCK": tile.queries,
                "DISTANCES": _DISTANCES,
                "BEYOND": _BEYOND,
                "COMPUTE": TL_DTYPES[call.compute],
                "num_warps": 4,
                "enable_fp_fusion": True,
            },
        )

    def __call__(
        self,
        tensors: tuple[torch.Tensor | None, ...],
        shift: torch.Tensor,
        delta: torch.Tensor,
        beyond: torch.Tensor,
        partial: torch.Tensor,
    ) -> torch.Tensor:
        grad_bias = shift.new_empty(self._shape)
        self._of_band(*tensors, shift, delta, partial)
        self._of_distances(partial, beyond, grad_bias)
        return grad_bias
