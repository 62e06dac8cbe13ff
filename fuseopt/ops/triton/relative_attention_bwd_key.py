"""The gradients of key and value of `relative_attention`; see relative_attention_bwd.py."""

import triton
import triton.language as tl

from fuseopt.ops.triton.philox import drop_scores
from fuseopt.ops.triton.relative_attention_tiles import (
    LOG2E,
    MASK_BLOCK,
    Tile,
    Tiles,
    grad_scale,
    load_tile,
    middle_of,
    product,
    score_tile,
    seen_end,
    share_of,
    store_tile,
)

# At capability 8.0 a mask per query needs more registers than few warps have.
# TUNED: measurement not recorded (7c73635, 503618d); `fuseopt bench ops --op relative_attention` measures it again.
MASKED_KEY_TILES = Tiles(
    half=(Tile(32, 128, 8, 2), Tile(32, 64, 8, 2)),
    single=(Tile(32, 32, 4, 1), Tile(16, 16, 4, 1)),
)
KEY_TILES = Tiles(
    half=(Tile(32, 64, 4, 3), Tile(32, 64, 8, 2)),
    single=(Tile(32, 32, 4, 1), Tile(16, 16, 4, 1)),
)


@triton.jit
def relative_attention_bwd_key_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    line_ptr,
    mask_ptr,
    seed_ptr,
    grad_output_ptr,  # [batch, queries, heads, DIM], adjacent in the last dimension
    shift_ptr,
    delta_ptr,
    grad_key_ptr,  # [batch, keys, heads, DIM], keys `grad_key_stride` apart, the rest contiguous
    grad_value_ptr,  # likewise
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
    grad_key_stride,
    THRESHOLD: tl.constexpr,
    KEY_MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN: tl.constexpr,
    DIM: tl.constexpr,
    COMPUTE: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Each program takes BLOCK_KEYS keys of one head to all queries; its tiles are [keys, queries]."""
    tiles = tl.cdiv(keys, BLOCK_KEYS)
    row = tl.program_id(0) // tiles
    first = (tl.program_id(0) % tiles) * BLOCK_KEYS
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    query_ptr += batch * query_batch_stride + head * query_head_stride
    key_ptr += batch * key_batch_stride + head * key_head_stride + first.to(tl.int64) * key_stride
    value_ptr += batch * value_batch_stride + head * value_head_stride + first.to(tl.int64) * value_stride
    grad_output_ptr += batch * grad_batch_stride + head * grad_head_stride
    shift_ptr += row.to(tl.int64) * queries
    delta_ptr += row.to(tl.int64) * queries
    if line_ptr is not None:
        line_ptr = middle_of(line_ptr, head, reach)
    if mask_ptr is not None:
        mask_ptr += batch * mask_batch_stride + head * mask_head_stride

    query, key = tl.arange(0, BLOCK_QUERIES), tl.arange(0, BLOCK_KEYS)
    left = keys - first
    k = load_tile(key_ptr, key_stride, left, EVEN, DIM, BLOCK_KEYS, BLOCK_DIM).to(FACTOR)
    v = load_tile(value_ptr, value_stride, left, EVEN, DIM, BLOCK_KEYS, BLOCK_DIM).to(FACTOR)
    log2_scale = tl.full((), scale * LOG2E, COMPUTE)
    scale = tl.full((), scale, COMPUTE)
    keep_scale = tl.full((), keep_scale, COMPUTE)
    if THRESHOLD > 0:
        drop_key, place_0, place_1, _ = tl.philox(tl.load(seed_ptr), row.to(tl.uint32), 0, 0, 0, 10)
    grad_key = tl.zeros((BLOCK_KEYS, BLOCK_DIM), COMPUTE)
    grad_value = tl.zeros((BLOCK_KEYS, BLOCK_DIM), COMPUTE)
    begin, end = 0, queries
    if CAUSAL:
        begin = tl.maximum(first - (keys - queries), 0) // BLOCK_QUERIES * BLOCK_QUERIES
    if KEY_MASK:
        end = tl.where(first < seen_end(mask_ptr, mask_key_stride, keys, MASK_BLOCK), queries, begin)
    for start in tl.range(begin, end, BLOCK_QUERIES):
        offset = tl.cast(start, tl.int64)
        q = load_tile(
            query_ptr + offset * query_stride, query_stride, queries - start, EVEN, DIM, BLOCK_QUERIES, BLOCK_DIM
        ).to(FACTOR)
        grad = load_tile(
            grad_output_ptr + offset * grad_stride, grad_stride, queries - start, EVEN, DIM, BLOCK_QUERIES, BLOCK_DIM
        ).to(FACTOR)
        index = start + query
        # A query outside the tensor has no weight.
        shift = tl.load(shift_ptr + index, mask=index < queries, other=float("inf"))
        delta = tl.load(delta_ptr + index, mask=index < queries, other=0.0)
        scores = product(k, tl.trans(q), COMPUTE)
        scores = score_tile(
            scores, log2_scale, start, query[None, :], first, key[:, None], queries, keys, line_ptr, reach,
            mask_ptr, mask_query_stride, mask_key_stride, KEY_MASK, CAUSAL, EVEN,
        )  # fmt: skip
        weights = tl.exp2(scores - shift[None, :])
        grad_weights = product(v, tl.trans(grad), COMPUTE)
        kept = weights
        if mask_ptr is not None:
            kept *= share_of(shift, index, queries, keys, CAUSAL)[None, :]
        if THRESHOLD > 0:
            kept = drop_scores(kept, drop_key, place_0, place_1, start, query[None, :], first, key[:, None], THRESHOLD)
            grad_weights = drop_scores(
                grad_weights, drop_key, place_0, place_1, start, query[None, :], first, key[:, None], THRESHOLD
            )
        grad_value += product(kept.to(FACTOR), grad, COMPUTE)
        factor = grad_scale(shift, keep_scale, mask_ptr is not None)
        grad_scores = weights * (grad_weights * factor[None, :] - delta[None, :])
        grad_key += product(grad_scores.to(FACTOR), q, COMPUTE)
    offset = (batch * keys + first) * grad_key_stride + head * DIM
    store_tile(grad_key_ptr + offset, grad_key_stride, left, grad_key * scale, DIM, BLOCK_KEYS, BLOCK_DIM)
    store_tile(grad_value_ptr + offset, grad_key_stride, left, grad_value * keep_scale, DIM, BLOCK_KEYS, BLOCK_DIM)
