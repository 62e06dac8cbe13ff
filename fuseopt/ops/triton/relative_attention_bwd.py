"""The backward of `relative_attention`: the gradient of the query, and the launches of all its kernels.

It recomputes the scores; no sum depends on the order of programs.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fuseopt.ops.relative_attention import reach_of
from fuseopt.ops.triton.launch import Launch
from fuseopt.ops.triton.philox import drop_scores
from fuseopt.ops.triton.relative_attention_bias import GradOfBias
from fuseopt.ops.triton.relative_attention_bwd_key import KEY_TILES, MASKED_KEY_TILES, relative_attention_bwd_key_kernel
from fuseopt.ops.triton.relative_attention_tiles import (
    KINDS,
    LOG2E,
    LOWEST,
    MASK_BLOCK,
    Call,
    Tile,
    Tiles,
    grad_scale,
    load_tile,
    middle_of,
    product,
    score_tile,
    seen_end,
    shift_of,
    store_tile,
)

# TUNED: measurement not recorded (503618d); `fuseopt bench ops --op relative_attention` measures it again.
QUERY_TILES = Tiles(
    half=(Tile(128, 32, 8, 3), Tile(64, 32, 4, 2)),
    single=(Tile(32, 16, 4, 1), Tile(16, 16, 4, 1)),
)


@triton.jit
def relative_attention_bwd_query_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    line_ptr,
    mask_ptr,
    seed_ptr,
    grad_output_ptr,  # [batch, queries, heads, DIM], adjacent in the last dimension
    output_ptr,  # [batch, queries, heads, DIM], contiguous
    lse_ptr,
    shift_ptr,  # [batch, heads, queries], in COMPUTE: `shift_of` lse, for the other kernels
    delta_ptr,  # likewise: grad_output * output summed, 0 if all keys are masked
    grad_query_ptr,  # [batch, queries, heads, DIM], queries `grad_query_stride` apart, the rest contiguous
    beyond_ptr,  # [2, batch, heads, tiles], in COMPUTE: gradients of scores, summed, behind and ahead of the band
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
    grad_query_stride,
    lowest,  # of the band's diagonals
    highest,
    BAND_BLOCK: tl.constexpr,  # the side of its tiles, a multiple of BLOCK_KEYS; 0 if there is nothing beyond it
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
    """Each program takes BLOCK_QUERIES queries of one head to all keys. Other arguments are as in the forward."""
    tiles = tl.cdiv(queries, BLOCK_QUERIES)
    row = tl.program_id(0) // tiles
    first = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_QUERIES
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    query_ptr += batch * query_batch_stride + head * query_head_stride + first.to(tl.int64) * query_stride
    key_ptr += batch * key_batch_stride + head * key_head_stride
    value_ptr += batch * value_batch_stride + head * value_head_stride
    grad_output_ptr += batch * grad_batch_stride + head * grad_head_stride + first.to(tl.int64) * grad_stride
    if line_ptr is not None:
        line_ptr = middle_of(line_ptr, head, reach)
    if mask_ptr is not None:
        mask_ptr += batch * mask_batch_stride + head * mask_head_stride

    query, key = tl.arange(0, BLOCK_QUERIES), tl.arange(0, BLOCK_KEYS)
    index = first + query
    left = queries - first
    statistic = row.to(tl.int64) * queries + index
    output_offset = ((batch * queries + first) * heads + head) * DIM
    q = load_tile(query_ptr, query_stride, left, EVEN, DIM, BLOCK_QUERIES, BLOCK_DIM).to(FACTOR)
    grad = load_tile(grad_output_ptr, grad_stride, left, EVEN, DIM, BLOCK_QUERIES, BLOCK_DIM).to(FACTOR)
    output = load_tile(output_ptr + output_offset, heads * DIM, left, EVEN, DIM, BLOCK_QUERIES, BLOCK_DIM)
    shift = shift_of(tl.load(lse_ptr + statistic, mask=index < queries, other=float("inf")))
    delta = tl.sum(grad.to(COMPUTE) * output.to(COMPUTE), axis=1)
    delta = tl.where(shift == LOWEST, 0.0, delta)
    tl.store(shift_ptr + statistic, shift, mask=index < queries)
    tl.store(delta_ptr + statistic, delta, mask=index < queries)
    log2_scale = tl.full((), scale * LOG2E, COMPUTE)
    scale = tl.full((), scale, COMPUTE)
    factor = grad_scale(shift, tl.full((), keep_scale, COMPUTE), mask_ptr is not None)
    if THRESHOLD > 0:
        drop_key, place_0, place_1, _ = tl.philox(tl.load(seed_ptr), row.to(tl.uint32), 0, 0, 0, 10)
    grad_query = tl.zeros((BLOCK_QUERIES, BLOCK_DIM), COMPUTE)
    behind = tl.zeros((BLOCK_QUERIES,), COMPUTE)
    ahead = tl.zeros((BLOCK_QUERIES,), COMPUTE)
    end = keys
    if KEY_MASK:
        end = seen_end(mask_ptr, mask_key_stride, keys, MASK_BLOCK)
    if CAUSAL:
        end = tl.minimum(end, first + BLOCK_QUERIES + keys - queries)
    for start in tl.range(0, end, BLOCK_KEYS):
        offset = tl.cast(start, tl.int64)
        k = load_tile(key_ptr + offset * key_stride, key_stride, keys - start, EVEN, DIM, BLOCK_KEYS, BLOCK_DIM)
        k = k.to(FACTOR)
        scores = product(q, tl.trans(k), COMPUTE)
        scores = score_tile(
            scores, log2_scale, first, query[:, None], start, key[None, :], queries, keys, line_ptr, reach,
            mask_ptr, mask_query_stride, mask_key_stride, KEY_MASK, CAUSAL, EVEN,
        )  # fmt: skip
        weights = tl.exp2(scores - shift[:, None])
        v = load_tile(value_ptr + offset * value_stride, value_stride, keys - start, EVEN, DIM, BLOCK_KEYS, BLOCK_DIM)
        grad_weights = product(grad, tl.trans(v.to(FACTOR)), COMPUTE)
        if THRESHOLD > 0:
            grad_weights = drop_scores(
                grad_weights, drop_key, place_0, place_1, first, query[:, None], start, key[None, :], THRESHOLD
            )
        grad_scores = weights * (grad_weights * factor[:, None] - delta[:, None])
        if BAND_BLOCK > 0:
            diagonal = start // BAND_BLOCK - index // BAND_BLOCK
            row_sum = tl.sum(grad_scores, axis=1)
            behind += tl.where(diagonal < lowest, row_sum, 0.0)
            ahead += tl.where(diagonal > highest, row_sum, 0.0)
        grad_query += product(grad_scores.to(FACTOR), k, COMPUTE)
    grad_query_ptr += (batch * queries + first) * grad_query_stride + head * DIM
    store_tile(grad_query_ptr, grad_query_stride, left, grad_query * scale, DIM, BLOCK_QUERIES, BLOCK_DIM)
    if BAND_BLOCK > 0:
        tl.store(beyond_ptr + tl.program_id(0), tl.sum(behind, axis=0))
        tl.store(beyond_ptr + tl.num_programs(0) + tl.program_id(0), tl.sum(ahead, axis=0))


def relative_attention_bwd(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    line: torch.Tensor | None,
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
        need_bias_grad: whether to compute that of bias, for which there is a line.

    Returns:
        Gradients of query [batch, queries, heads, dim], key and value [batch, keys, heads, dim], in the dtype of query;
        of bias [heads, 2 * reach + 1] in the dtype of lse, or empty. All are contiguous. The same inputs give the
        same bits.
    """
    batch, heads, _, dim = query.shape
    grads = [
        torch.empty((batch, tensor.shape[2], heads, dim), dtype=query.dtype, device=query.device)
        for tensor in (query, key, value)
    ]
    arguments = (query, key, value, line, mask, seed, output, lse, scale, p, causal, need_bias_grad)
    return *grads, _into(grads, grad_output, *arguments)


def relative_attention_bwd_joined(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    line: torch.Tensor | None,
    mask: torch.Tensor | None,
    seed: torch.Tensor | None,
    output: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    p: float,
    causal: bool,
    need_bias_grad: bool,
    with_query: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`relative_attention_bwd`, whose gradients of key and value stand side by side, as their projection takes them.

    Args:
        with_query: whether that of query, which has as many rows as key, stands ahead of them.

    Returns:
        The gradient of query [batch, queries, heads, dim], or empty; the others [batch, keys, 2, heads, dim], or all
        [batch, keys, 3, heads, dim]; that of bias. All are contiguous.
    """
    batch, heads, queries, dim = query.shape
    like = {"dtype": query.dtype, "device": query.device}
    joined = torch.empty((batch, key.shape[2], 3 if with_query else 2, heads, dim), **like)
    grad_query = torch.empty((0,) if with_query else (batch, queries, heads, dim), **like)
    grads = [*([] if with_query else [grad_query]), *joined.unbind(2)]
    arguments = (query, key, value, line, mask, seed, output, lse, scale, p, causal, need_bias_grad)
    return grad_query, joined, _into(grads, grad_output, *arguments)


def _into(
    grads: Sequence[torch.Tensor],
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    line: torch.Tensor | None,
    mask: torch.Tensor | None,
    seed: torch.Tensor | None,
    output: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    p: float,
    causal: bool,
    need_bias_grad: bool,
) -> torch.Tensor:
    """Writes the gradients of query, key and value, and returns that of bias.

    Args:
        grads: [batch, length, heads, dim] each; rows may be apart, in those of key and value as far.
    """
    if lse.numel() == 0 or key.shape[2] == 0 or query.shape[3] == 0:
        for grad in grads:
            grad.zero_()
        return lse.new_zeros((query.shape[1], 2 * reach_of(line) + 1) if need_bias_grad else (0,))
    grad_query, grad_key, grad_value = grads
    output, lse = output.contiguous(), lse.contiguous()
    with torch.cuda.device_of(query):
        call, tensors = Call.of(query, key, value, line, mask, seed, scale, p, causal, grad_output)
        if output.dtype != query.dtype or lse.dtype != call.compute:
            raise ValueError(f"output and lse must be those of the forward, not {output.dtype} and {lse.dtype}")
        launches = _launches(call, grad_query.stride(1), grad_key.stride(1), need_bias_grad)
        shift, delta, beyond, partial = lse.new_empty(sum(launches.scratch)).split(launches.scratch)
        launches.of_query(*tensors, output, lse, shift, delta, grad_query, beyond)
        launches.of_key(*tensors, shift, delta, grad_key, grad_value)
        if launches.of_bias is None:
            return lse.new_empty(0)
        return launches.of_bias(tensors, shift, delta, beyond, partial)


class _Launches(NamedTuple):
    of_query: Launch
    of_key: Launch
    of_bias: GradOfBias | None
    scratch: tuple[int, ...]  # numbers: a shift and a delta a query, and what `of_bias` takes beside


@functools.lru_cache(maxsize=KINDS)
def _launches(call: Call, grad_query_stride: int, grad_key_stride: int, need_bias_grad: bool) -> _Launches:
    heads, queries, keys, _ = call.sizes
    rows = call.batch * heads
    tile, key_tile = call.tile(QUERY_TILES), call.tile(KEY_TILES if call.dtypes[2] is None else MASKED_KEY_TILES)
    tiles = triton.cdiv(queries, tile.queries)
    of_bias = GradOfBias(call, tiles) if need_bias_grad else None
    band = of_bias.band if of_bias is not None and of_bias.band.ends else None
    of_query = call.launch(
        relative_attention_bwd_query_kernel,
        tile,
        rows * tiles,
        after=(grad_query_stride, *((0, 0) if band is None else (band.lowest, band.highest))),
        BAND_BLOCK=0 if band is None else band.tile.keys,
    )
    programs = rows * triton.cdiv(keys, key_tile.keys)
    of_key = call.launch(relative_attention_bwd_key_kernel, key_tile, programs, after=(grad_key_stride,))
    scratch = (
        rows * queries,
        rows * queries,
        0 if band is None else 2 * rows * tiles,
        of_bias.partials if of_bias else 0,
    )
    # Each buffer begins at an address that is aligned for vector loads.
    return _Launches(of_query, of_key, of_bias, tuple(triton.cdiv(numbers, 4) * 4 for numbers in scratch))
