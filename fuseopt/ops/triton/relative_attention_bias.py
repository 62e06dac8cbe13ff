"""The gradient of `relative_attention`'s bias: sums over the batch along diagonals, in a fixed order.

All tiles on one diagonal of tiles hold the same distances at the same places. So a program adds such tiles up as they
are, in registers, and only their sum is taken apart by distance, in a second kernel.
"""

import torch
import triton
import triton.language as tl

from fuseopt.ops.triton.philox import keep_tile
from fuseopt.ops.triton.relative_attention import (
    Call,
    Tile,
    Tiles,
    grad_scores_of,
    load_tile,
    product,
    score_tile,
    weights_of,
)
from fuseopt.ops.triton.rows import multiprocessor_count

# Programs for each multiprocessor, as far as there are items in the batch: diagonals differ in length.
PROGRAMS = 8


# Square, and so of one size along a diagonal.
BIAS_TILES = Tiles(
    half=(Tile(64, 64, 8, 2), Tile(32, 32, 4, 2)),
    single=(Tile(16, 16, 4, 1), Tile(16, 16, 4, 2)),
)


@triton.jit
def relative_attention_bwd_bias_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    bias_ptr,
    mask_ptr,
    seed_ptr,
    grad_output_ptr,
    lse_ptr,
    delta_ptr,
    partial_ptr,  # [splits, heads, diagonals, BLOCK, BLOCK] in COMPUTE: sums of tiles
    batch,
    splits,
    heads,
    queries,
    keys,
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
    diagonals = query_tiles + key_tiles - 1
    diagonal = tl.program_id(0) % diagonals
    head = (tl.program_id(0) // diagonals) % heads
    split = tl.program_id(0) // (diagonals * heads)
    # Tiles that a key's tile is ahead of its query's. The last diagonals are the shortest where attention is causal.
    ahead = key_tiles - 1 - diagonal
    begin = tl.maximum(-ahead, 0)
    length = tl.minimum(query_tiles, key_tiles - ahead) - begin
    if CAUSAL:
        length = tl.where((ahead - 1) * BLOCK_KEYS < keys - queries, length, 0)
    if bias_ptr is not None:
        bias_ptr += head * (queries + keys - 1)
    scale = tl.full((), scale, COMPUTE)
    keep_scale = tl.full((), keep_scale, COMPUTE)
    head = head.to(tl.int64)
    query_ptr += head * query_head_stride
    key_ptr += head * key_head_stride
    value_ptr += head * value_head_stride
    grad_output_ptr += head * grad_head_stride
    if mask_ptr is not None:
        mask_ptr += head * mask_head_stride
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
        query = first_query + tl.arange(0, BLOCK_QUERIES)
        key = first_key + tl.arange(0, BLOCK_KEYS)
        row = (item * heads + head) * queries + query
        # Of a query that is not there: no weight.
        lse = tl.load(lse_ptr + row, mask=query < queries, other=float("inf"))
        delta = tl.load(delta_ptr + row, mask=query < queries, other=0.0)
        mask = mask_ptr
        if mask_ptr is not None:
            mask = mask_ptr + item * mask_batch_stride
        scores = score_tile(
            product(q, tl.trans(k), COMPUTE), scale, query[:, None], key[None, :],
            queries, keys, bias_ptr, mask, mask_query_stride, mask_key_stride, KEY_MASK, CAUSAL, EVEN,
        )  # fmt: skip
        weights = weights_of(scores, lse[:, None], query[:, None], queries, keys, mask_ptr is not None, CAUSAL)
        grad_weights = product(grad, tl.trans(v), COMPUTE)
        if THRESHOLD > 0:
            keep = keep_tile(tl.load(seed_ptr), row, first_key, THRESHOLD, BLOCK_KEYS)
            grad_weights = tl.where(keep, grad_weights * keep_scale, 0.0)
        total += grad_scores_of(weights, grad_weights, delta[:, None], lse[:, None], mask_ptr is not None)
    row, column = tl.arange(0, BLOCK_QUERIES)[:, None], tl.arange(0, BLOCK_KEYS)[None, :]
    partial = partial_ptr + tl.program_id(0).to(tl.int64) * (BLOCK_QUERIES * BLOCK_KEYS)
    tl.store(partial + row * BLOCK_KEYS + column, total)


@triton.jit
def diagonal_sum_kernel(
    partial_ptr,  # [splits, heads, diagonals, BLOCK, BLOCK]
    grad_bias_ptr,  # [heads, queries + keys - 1], contiguous
    splits,
    heads,
    queries,
    keys,
    BLOCK: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Each program takes BLOCK distances of one head."""
    query_tiles, key_tiles = tl.cdiv(queries, BLOCK), tl.cdiv(keys, BLOCK)
    diagonals = query_tiles + key_tiles - 1
    head = tl.program_id(1)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # A distance is `ahead` tiles and `rest` places; from the row in which rest runs over it is in the next tile.
    distance = index - (queries - 1) + query_tiles * BLOCK
    ahead, rest = distance // BLOCK - query_tiles, distance % BLOCK
    row = tl.arange(0, BLOCK)[:, None]
    column = row + rest[None, :]
    diagonal = key_tiles - 1 - ahead[None, :] - (column >= BLOCK).to(tl.int32)
    mask = (diagonal >= 0) & (diagonal < diagonals) & (index < queries + keys - 1)[None, :]
    offset = (diagonal * BLOCK + row) * BLOCK + column % BLOCK
    total = tl.zeros((BLOCK, BLOCK), COMPUTE)
    for split in tl.range(0, splits):
        tiles = (tl.cast(split, tl.int64) * heads + head) * diagonals
        total += tl.load(partial_ptr + tiles * (BLOCK * BLOCK) + offset, mask=mask, other=0.0)
    grad_bias = grad_bias_ptr + head * (queries + keys - 1)
    tl.store(grad_bias + index, tl.sum(total, axis=0), mask=index < queries + keys - 1)


def grad_of_bias(call: Call, grad_output: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """[heads, queries + keys - 1], in the dtype of the arithmetic.

    Args:
        grad_output: [batch, queries, heads, dim], adjacent in the last dimension.
        lse, delta: [batch, heads, queries].
    """
    heads, queries, keys = call.sizes
    batch = lse.shape[0]
    tile = call.tile(BIAS_TILES)
    diagonals = triton.cdiv(queries, tile.queries) + triton.cdiv(keys, tile.keys) - 1
    wanted = PROGRAMS * multiprocessor_count(lse.device)
    splits = min(batch, triton.cdiv(wanted, diagonals * heads))
    like = {"dtype": lse.dtype, "device": lse.device}
    partial = torch.empty(splits, heads, diagonals, tile.queries, tile.keys, **like)
    grad_bias = torch.empty(heads, queries + keys - 1, **like)
    relative_attention_bwd_bias_kernel[(splits * heads * diagonals,)](
        *call.tensors, grad_output, lse, delta, partial, batch, splits, *call.sizes, *call.strides,
        *grad_output.stride()[:3], *call.scales, **call.tiled(tile),
    )  # fmt: skip
    diagonal_sum_kernel[(triton.cdiv(queries + keys - 1, tile.keys), heads)](
        partial, grad_bias, splits, heads, queries, keys, tile.keys, call.constants["COMPUTE"], num_warps=4
    )
    return grad_bias
