"""The backward of `relative_attention`: scores are computed again, and no sum depends on the order of programs."""

import torch
import triton
import triton.language as tl

from fuseopt.ops.triton.philox import keep_tile
from fuseopt.ops.triton.relative_attention import (
    Call,
    Tile,
    Tiles,
    adjacent,
    grad_scores_of,
    load_tile,
    product,
    score_tile,
    weights_of,
)
from fuseopt.ops.triton.relative_attention_bias import grad_of_bias

QUERY_TILES = Tiles(
    half=(Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
    single=(Tile(32, 32, 4, 1), Tile(16, 16, 4, 1)),
)
KEY_TILES = Tiles(
    half=(Tile(32, 128, 8, 2), Tile(32, 64, 8, 2)),
    single=(Tile(32, 32, 4, 1), Tile(16, 16, 4, 1)),
)


@triton.jit
def relative_attention_bwd_query_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    bias_ptr,
    mask_ptr,
    seed_ptr,
    grad_output_ptr,  # [batch, queries, heads, DIM], adjacent in the last dimension
    output_ptr,  # [batch, queries, heads, DIM], contiguous
    lse_ptr,
    delta_ptr,  # [batch, heads, queries], in COMPUTE: grad_output * output summed, for the other kernels
    grad_query_ptr,  # [batch, queries, heads, DIM], contiguous
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
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Each program takes BLOCK_QUERIES queries of one head to all keys. What is not said is as in the forward."""
    tiles = tl.cdiv(queries, BLOCK_QUERIES)
    row = tl.program_id(0) // tiles
    first = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_QUERIES
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    query_ptr += batch * query_batch_stride + head * query_head_stride + first.to(tl.int64) * query_stride
    key_ptr += batch * key_batch_stride + head * key_head_stride
    value_ptr += batch * value_batch_stride + head * value_head_stride
    grad_output_ptr += batch * grad_batch_stride + head * grad_head_stride + first.to(tl.int64) * grad_stride
    if bias_ptr is not None:
        bias_ptr += head * (queries + keys - 1)
    if mask_ptr is not None:
        mask_ptr += batch * mask_batch_stride + head * mask_head_stride

    index = first + tl.arange(0, BLOCK_QUERIES)
    left = queries - first
    statistic = row.to(tl.int64) * queries + index
    output_offset = ((batch * queries + first) * heads + head) * DIM
    q = load_tile(query_ptr, query_stride, left, EVEN, DIM, BLOCK_QUERIES, BLOCK_DIM).to(FACTOR)
    grad = load_tile(grad_output_ptr, grad_stride, left, EVEN, DIM, BLOCK_QUERIES, BLOCK_DIM).to(FACTOR)
    output = load_tile(output_ptr + output_offset, heads * DIM, left, EVEN, DIM, BLOCK_QUERIES, BLOCK_DIM)
    delta = tl.sum(grad.to(COMPUTE) * output.to(COMPUTE), axis=1)
    tl.store(delta_ptr + statistic, delta, mask=index < queries)
    lse = tl.load(lse_ptr + statistic, mask=index < queries, other=float("inf"))
    scale = tl.full((), scale, COMPUTE)
    keep_scale = tl.full((), keep_scale, COMPUTE)
    grad_query = tl.zeros((BLOCK_QUERIES, BLOCK_DIM), COMPUTE)
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, first + BLOCK_QUERIES + keys - queries)
    for start in tl.range(0, end, BLOCK_KEYS):
        offset = tl.cast(start, tl.int64)
        k = load_tile(key_ptr + offset * key_stride, key_stride, keys - start, EVEN, DIM, BLOCK_KEYS, BLOCK_DIM)
        k = k.to(FACTOR)
        scores = product(q, tl.trans(k), COMPUTE)
        key = start + tl.arange(0, BLOCK_KEYS)
        scores = score_tile(
            scores, scale, index[:, None], key[None, :], queries, keys, bias_ptr, mask_ptr, mask_query_stride,
            mask_key_stride, KEY_MASK, CAUSAL, EVEN,
        )  # fmt: skip
        weights = weights_of(scores, lse[:, None], index[:, None], queries, keys, mask_ptr is not None, CAUSAL)
        v = load_tile(value_ptr + offset * value_stride, value_stride, keys - start, EVEN, DIM, BLOCK_KEYS, BLOCK_DIM)
        grad_weights = product(grad, tl.trans(v.to(FACTOR)), COMPUTE)
        if THRESHOLD > 0:
            keep = keep_tile(tl.load(seed_ptr), statistic, start, THRESHOLD, BLOCK_KEYS)
            grad_weights = tl.where(keep, grad_weights * keep_scale, 0.0)
        grad_scores = grad_scores_of(weights, grad_weights, delta[:, None], lse[:, None], mask_ptr is not None)
        grad_query += product(grad_scores.to(FACTOR), k, COMPUTE)
    store_tile(grad_query_ptr + output_offset, heads * DIM, left, grad_query * scale, DIM, BLOCK_QUERIES, BLOCK_DIM)


@triton.jit
def store_tile(ptr, row_stride, rows_left, tile, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    tl.store(ptr + row * row_stride + column, tile, mask=(row < rows_left) & (column < DIM))


@triton.jit
def relative_attention_bwd_key_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    bias_ptr,
    mask_ptr,
    seed_ptr,
    grad_output_ptr,  # [batch, queries, heads, DIM], adjacent in the last dimension
    lse_ptr,
    delta_ptr,
    grad_key_ptr,  # [batch, keys, heads, DIM], contiguous
    grad_value_ptr,  # likewise
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
    lse_ptr += row.to(tl.int64) * queries
    delta_ptr += row.to(tl.int64) * queries
    if bias_ptr is not None:
        bias_ptr += head * (queries + keys - 1)
    if mask_ptr is not None:
        mask_ptr += batch * mask_batch_stride + head * mask_head_stride

    key = first + tl.arange(0, BLOCK_KEYS)
    left = keys - first
    k = load_tile(key_ptr, key_stride, left, EVEN, DIM, BLOCK_KEYS, BLOCK_DIM).to(FACTOR)
    v = load_tile(value_ptr, value_stride, left, EVEN, DIM, BLOCK_KEYS, BLOCK_DIM).to(FACTOR)
    scale = tl.full((), scale, COMPUTE)
    keep_scale = tl.full((), keep_scale, COMPUTE)
    grad_key = tl.zeros((BLOCK_KEYS, BLOCK_DIM), COMPUTE)
    grad_value = tl.zeros((BLOCK_KEYS, BLOCK_DIM), COMPUTE)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(first - (keys - queries), 0) // BLOCK_QUERIES * BLOCK_QUERIES
    for start in tl.range(begin, queries, BLOCK_QUERIES):
        offset = tl.cast(start, tl.int64)
        q = load_tile(
            query_ptr + offset * query_stride, query_stride, queries - start, EVEN, DIM, BLOCK_QUERIES, BLOCK_DIM
        ).to(FACTOR)
        grad = load_tile(
            grad_output_ptr + offset * grad_stride, grad_stride, queries - start, EVEN, DIM, BLOCK_QUERIES, BLOCK_DIM
        ).to(FACTOR)
        index = start + tl.arange(0, BLOCK_QUERIES)
        # Of a query that is not there: no weight.
        lse = tl.load(lse_ptr + index, mask=index < queries, other=float("inf"))
        delta = tl.load(delta_ptr + index, mask=index < queries, other=0.0)
        scores = product(k, tl.trans(q), COMPUTE)
        scores = score_tile(
            scores, scale, index[None, :], key[:, None], queries, keys, bias_ptr, mask_ptr, mask_query_stride,
            mask_key_stride, KEY_MASK, CAUSAL, EVEN,
        )  # fmt: skip
        weights = weights_of(scores, lse[None, :], index[None, :], queries, keys, mask_ptr is not None, CAUSAL)
        grad_weights = product(v, tl.trans(grad), COMPUTE)
        kept = weights
        if THRESHOLD > 0:
            drawn = row.to(tl.int64) * queries + index
            keep = tl.trans(keep_tile(tl.load(seed_ptr), drawn, first, THRESHOLD, BLOCK_KEYS))
            kept = tl.where(keep, weights * keep_scale, 0.0)
            grad_weights = tl.where(keep, grad_weights * keep_scale, 0.0)
        grad_value += product(kept.to(FACTOR), grad, COMPUTE)
        grad_scores = grad_scores_of(weights, grad_weights, delta[None, :], lse[None, :], mask_ptr is not None)
        grad_key += product(grad_scores.to(FACTOR), q, COMPUTE)
    offset = ((batch * keys + first) * heads + head) * DIM
    store_tile(grad_key_ptr + offset, heads * DIM, left, grad_key * scale, DIM, BLOCK_KEYS, BLOCK_DIM)
    store_tile(grad_value_ptr + offset, heads * DIM, left, grad_value, DIM, BLOCK_KEYS, BLOCK_DIM)


def relative_attention_bwd(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    seed: torch.Tensor | None,
    output: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    p: float,
    causal: bool,
    need_bias_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `relative_attention_fwd`.

    Args:
        grad_output: [batch, queries, heads, dim], any strides.
        output, lse: as the forward returned them; the rest as given to it.
        need_bias_grad: whether to compute that of bias.

    Returns:
        Gradients of query [batch, queries, heads, dim], key and value [batch, keys, heads, dim], in the dtype of query;
        of bias [heads, queries + keys - 1] in the dtype of lse, or empty. All are contiguous. The same inputs give the
        same bits.
    """
    batch, heads, queries, dim = query.shape
    keys = key.shape[2]
    grads = [
        torch.empty((batch, length, heads, dim), dtype=query.dtype, device=query.device)
        for length in (queries, keys, keys)
    ]
    grad_bias = lse.new_zeros((heads, queries + keys - 1) if need_bias_grad else (0,))
    if lse.numel() == 0 or keys == 0 or dim == 0:
        return *(grad.zero_() for grad in grads), grad_bias
    call = Call.of(query, key, value, bias, mask, seed, scale, p, causal)
    grad_output = adjacent(grad_output)
    strides = *call.strides, *grad_output.stride()[:3]
    output, lse, delta = output.contiguous(), lse.contiguous(), torch.empty_like(lse)
    with torch.cuda.device_of(query):
        tile = call.tile(QUERY_TILES)
        relative_attention_bwd_query_kernel[(batch * heads * triton.cdiv(queries, tile.queries),)](
            *call.tensors, grad_output, output, lse, delta, grads[0], *call.sizes, *strides, *call.scales,
            **call.tiled(tile),
        )  # fmt: skip
        tile = call.tile(KEY_TILES)
        relative_attention_bwd_key_kernel[(batch * heads * triton.cdiv(keys, tile.keys),)](
            *call.tensors, grad_output, lse, delta, *grads[1:], *call.sizes, *strides, *call.scales, **call.tiled(tile)
        )
        if need_bias_grad:
            grad_bias = grad_of_bias(call, grad_output, lse, delta)
    return *grads, grad_bias
