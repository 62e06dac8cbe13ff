"""Attention with a bias of the distance, a tile at a time: no score is kept (FlashAttention-2, arXiv 2307.08691)."""

import functools

import torch
import triton
import triton.language as tl

from fuseopt.ops.triton.launch import Launch
from fuseopt.ops.triton.philox import drop_scores
from fuseopt.ops.triton.relative_attention_tiles import (
    KINDS,
    LOG2E,
    LOWEST,
    MASK_BLOCK,
    Call,
    Tile,
    Tiles,
    load_tile,
    middle_of,
    product,
    score_tile,
    seen_end,
)
from fuseopt.ops.triton.rows import compute_dtype

# TUNED: measurement not recorded (7c73635); `fuseopt bench ops --op relative_attention` measures it again.
FWD_TILES = Tiles(
    half=(Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
    single=(Tile(32, 32, 4, 2), Tile(32, 32, 8, 2)),
)


@triton.jit
def relative_attention_fwd_kernel(
    query_ptr,  # [batch, heads, queries, DIM], adjacent in the last dimension
    key_ptr,  # [batch, heads, keys, DIM], likewise
    value_ptr,  # likewise
    line_ptr,  # [heads, 2 * margin + 1], contiguous, as `relative_attention_line` makes it; or None
    mask_ptr,  # [batch, heads, queries, keys], any strides; or None
    seed_ptr,  # [1], int64; or None
    output_ptr,  # [batch, queries, heads, DIM], contiguous
    lse_ptr,  # [batch, heads, queries], contiguous
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
    scale: tl.float64,  # of the products
    keep_scale: tl.float64,  # of what dropout keeps
    THRESHOLD: tl.constexpr,  # of 2**16, what is dropped
    KEY_MASK: tl.constexpr,  # the mask is the same for every query
    CAUSAL: tl.constexpr,
    EVEN: tl.constexpr,  # tiles end where queries and keys do
    DIM: tl.constexpr,
    COMPUTE: tl.constexpr,  # dtype of sums and scores
    FACTOR: tl.constexpr,  # dtype of what products are taken of
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Each program takes BLOCK_QUERIES queries of one head to all keys."""
    tiles = tl.cdiv(queries, BLOCK_QUERIES)
    row = tl.program_id(0) // tiles
    # Causal ones see more keys the later they are; the longest work goes first.
    first = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_QUERIES
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    query_ptr += batch * query_batch_stride + head * query_head_stride + first.to(tl.int64) * query_stride
    key_ptr += batch * key_batch_stride + head * key_head_stride
    value_ptr += batch * value_batch_stride + head * value_head_stride
    if line_ptr is not None:
        line_ptr = middle_of(line_ptr, head, reach)
    if mask_ptr is not None:
        mask_ptr += batch * mask_batch_stride + head * mask_head_stride

    query, key = tl.arange(0, BLOCK_QUERIES), tl.arange(0, BLOCK_KEYS)
    q = load_tile(query_ptr, query_stride, queries - first, EVEN, DIM, BLOCK_QUERIES, BLOCK_DIM).to(FACTOR)
    scale = tl.full((), scale * LOG2E, COMPUTE)
    if THRESHOLD > 0:
        drop_key, place_0, place_1, _ = tl.philox(tl.load(seed_ptr), row.to(tl.uint32), 0, 0, 0, 10)
    largest = tl.full((BLOCK_QUERIES,), float("-inf"), COMPUTE)
    total = tl.zeros((BLOCK_QUERIES,), COMPUTE)
    sums = tl.zeros((BLOCK_QUERIES, BLOCK_DIM), COMPUTE)
    end = keys
    if KEY_MASK:
        end = seen_end(mask_ptr, mask_key_stride, keys, MASK_BLOCK)
    if CAUSAL:
        end = tl.minimum(end, first + BLOCK_QUERIES + keys - queries)
    for start in tl.range(0, end, BLOCK_KEYS):
        offset = tl.cast(start, tl.int64)
        k = load_tile(key_ptr + offset * key_stride, key_stride, keys - start, EVEN, DIM, BLOCK_KEYS, BLOCK_DIM)
        scores = product(q, tl.trans(k.to(FACTOR)), COMPUTE)
        scores = score_tile(
            scores, scale, first, query[:, None], start, key[None, :], queries, keys, line_ptr, reach,
            mask_ptr, mask_query_stride, mask_key_stride, KEY_MASK, CAUSAL, EVEN,
        )  # fmt: skip
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(largest - reference)
        total = total * shrink + tl.sum(weights, axis=1)
        if THRESHOLD > 0:
            weights = drop_scores(
                weights, drop_key, place_0, place_1, first, query[:, None], start, key[None, :], THRESHOLD
            )
        v = load_tile(value_ptr + offset * value_stride, value_stride, keys - start, EVEN, DIM, BLOCK_KEYS, BLOCK_DIM)
        sums = sums * shrink[:, None] + product(weights.to(FACTOR), v.to(FACTOR), COMPUTE)
        largest = new_largest

    index = first + query
    mask = index < queries
    sums *= (tl.full((), keep_scale, COMPUTE) / tl.where(total == 0.0, 1.0, total))[:, None]
    # inf: there is no key; -inf: all keys are masked.
    lse = tl.where(largest == LOWEST, float("-inf"), (largest + tl.log2(total)) / LOG2E)
    tl.store(lse_ptr + row.to(tl.int64) * queries + index, tl.where(total == 0.0, float("inf"), lse), mask=mask)
    column = tl.arange(0, BLOCK_DIM)
    output_row = (batch * queries + index) * heads + head
    store = mask[:, None] & (column < DIM)[None, :]
    tl.store(output_ptr + output_row[:, None] * DIM + column[None, :], sums, mask=store)


def relative_attention_fwd(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    line: torch.Tensor | None,
    mask: torch.Tensor | None,
    seed: torch.Tensor | None,
    scale: float,
    p: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and what its backward needs of the scores.

    Args:
        query: [batch, heads, queries, dim], any strides; dim at most 128.
        key, value: [batch, heads, keys, dim], likewise.
        line: of the bias, as `relative_attention_line` makes it, or None.
        mask: broadcastable to [batch, heads, queries, keys], bool or additive, or None.
        seed: [1], int64, of the weights that are dropped; may be None where p is 0.
        scale: of the products of queries and keys.
        p: share of the weights that are dropped, less than 1.
        causal: the last query sees all keys, each one before it one less.

    Returns:
        [batch, queries, heads, dim], contiguous, in the dtype of query; the logsumexp of each query's scores,
        [batch, heads, queries], float32, or float64 for a float64 query: inf where there is no key, -inf where all are
        masked.
    """
    batch, heads, queries, dim = query.shape
    output = torch.empty((batch, queries, heads, dim), dtype=query.dtype, device=query.device)
    lse = torch.empty((batch, heads, queries), dtype=compute_dtype(query), device=query.device)
    if output.numel() == 0 or key.shape[2] == 0:
        return output.zero_(), lse.fill_(float("inf"))
    with torch.cuda.device_of(query):
        call, tensors = Call.of(query, key, value, line, mask, seed, scale, p, causal)
        _launch(call)(*tensors, output, lse)
    return output, lse


@functools.lru_cache(maxsize=KINDS)
def _launch(call: Call) -> Launch:
    heads, queries, _, _ = call.sizes
    tile = call.tile(FWD_TILES)
    return call.launch(relative_attention_fwd_kernel, tile, call.batch * heads * triton.cdiv(queries, tile.queries))
