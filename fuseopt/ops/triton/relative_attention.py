"""Attention with a bias of the distance, a tile at a time: no score is kept (FlashAttention-2, arXiv 2307.08691)."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fuseopt.ops.library import TRITON_INTERPRETED
from fuseopt.ops.philox import threshold
from fuseopt.ops.relative_attention import MASKED
from fuseopt.ops.triton.philox import keep_tile
from fuseopt.ops.triton.rows import TL_DTYPES, compute_dtype

LOG2E = tl.constexpr(1.4426950408889634)
# The score of a masked key, in units of log2 e: the lowest there is, above the -inf of a key that is not there.
LOWEST = tl.constexpr(-3.0e38)
MASKS = tl.constexpr(MASKED)


class Tile(NamedTuple):
    """How many queries and keys a program holds at a time."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


class Tiles(NamedTuple):
    """The tile of a kernel by how large an element is, for heads of at most 64 elements and for larger ones."""

    half: tuple[Tile, Tile]
    single: tuple[Tile, Tile]
    double: tuple[Tile, Tile] = (Tile(8, 8, 8, 1), Tile(8, 8, 8, 1))

    def of(self, dtype: torch.dtype, block_dim: int) -> Tile:
        tiles = {2: self.half, 4: self.single, 8: self.double}[dtype.itemsize]
        return tiles[block_dim > 64]


FWD_TILES = Tiles(
    half=(Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)),
    single=(Tile(32, 32, 4, 2), Tile(32, 32, 8, 2)),
)


@triton.jit
def product(left, right, COMPUTE: tl.constexpr):
    if tl.float64 == COMPUTE:
        # tl.dot does not compile for float64 in every version.
        result = tl.sum(left[:, :, None] * right[None, :, :], axis=1)
    else:
        result = tl.dot(left, right, input_precision="tf32x3", out_dtype=COMPUTE)
    return result


@triton.jit
def load_tile(
    ptr, row_stride, rows_left, EVEN: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """[ROWS, BLOCK] from `ptr` on, zeros beyond the `rows_left` rows and DIM columns that there are."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    pointers = ptr + row * row_stride + column
    if EVEN and DIM == BLOCK:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(row < rows_left) & (column < DIM), other=0.0)
    return tile


@triton.jit
def score_tile(
    products,  # of queries and keys
    scale,  # of the products
    query,  # indices of the tile's queries, with a dimension of 1 for the keys
    key,  # likewise
    queries,
    keys,
    bias_ptr,  # [queries + keys - 1] of this head; or None
    mask_ptr,  # of this item and head; or None
    mask_query_stride,
    mask_key_stride,
    KEY_MASK: tl.constexpr,  # it is the same for every query
    CAUSAL: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Scores in units of log2 e: LOWEST where the mask masks, -inf where there is no key."""
    scores = products * (scale * LOG2E)
    inside = (query < queries) & (key < keys)
    if bias_ptr is not None:
        distance = bias_ptr + (key - query + (queries - 1))
        if EVEN:
            bias = tl.load(distance)
        else:
            bias = tl.load(distance, mask=inside, other=0.0)
        scores += bias.to(scores.dtype) * LOG2E
    if mask_ptr is not None:
        pointers = mask_ptr + key.to(tl.int64) * mask_key_stride
        if KEY_MASK:
            mask = tl.load(pointers, mask=key < keys, other=0)
        else:
            mask = tl.load(pointers + query.to(tl.int64) * mask_query_stride, mask=inside, other=0)
        if mask.dtype == tl.int1:
            scores = tl.where(mask, scores, LOWEST)
        else:
            added = mask.to(scores.dtype)
            scores = tl.where(added > MASKS, scores + added * LOG2E, LOWEST)
    if CAUSAL:
        scores = tl.where((key <= query + (keys - queries)) & (key < keys), scores, float("-inf"))
    elif not EVEN:
        scores = tl.where(key < keys, scores, float("-inf"))
    return scores


@triton.jit
def weights_of(scores, lse, query, queries, keys, HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr):
    """The softmax of scores, given its logsumexp, broadcastable to them; equal weights where all keys are masked."""
    weights = tl.exp2(scores - lse * LOG2E)
    if HAS_MASK:
        seen = tl.zeros_like(lse) + keys
        if CAUSAL:
            seen = tl.minimum(seen, (query + (keys - queries + 1)).to(lse.dtype))
        equal = tl.where(scores == float("-inf"), 0.0, 1.0 / seen)
        weights = tl.where(lse == float("-inf"), equal, weights)
    return weights


@triton.jit
def grad_scores_of(weights, grad_weights, delta, lse, HAS_MASK: tl.constexpr):
    grad = weights * (grad_weights - delta)
    if HAS_MASK:
        # What is masked does not depend on its score.
        grad = tl.where(lse == float("-inf"), 0.0, grad)
    return grad


@triton.jit
def relative_attention_fwd_kernel(
    query_ptr,  # [batch, heads, queries, DIM], adjacent in the last dimension
    key_ptr,  # [batch, heads, keys, DIM], likewise
    value_ptr,  # likewise
    bias_ptr,  # [heads, queries + keys - 1], contiguous; or None
    mask_ptr,  # [batch, heads, queries, keys], any strides; or None
    seed_ptr,  # [1], int64; or None
    output_ptr,  # [batch, queries, heads, DIM], contiguous
    lse_ptr,  # [batch, heads, queries], contiguous
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
    if bias_ptr is not None:
        bias_ptr += head * (queries + keys - 1)
    if mask_ptr is not None:
        mask_ptr += batch * mask_batch_stride + head * mask_head_stride

    index = first + tl.arange(0, BLOCK_QUERIES)
    q = load_tile(query_ptr, query_stride, queries - first, EVEN, DIM, BLOCK_QUERIES, BLOCK_DIM).to(FACTOR)
    scale = tl.full((), scale, COMPUTE)
    largest = tl.full((BLOCK_QUERIES,), float("-inf"), COMPUTE)
    total = tl.zeros((BLOCK_QUERIES,), COMPUTE)
    sums = tl.zeros((BLOCK_QUERIES, BLOCK_DIM), COMPUTE)
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, first + BLOCK_QUERIES + keys - queries)
    for start in tl.range(0, end, BLOCK_KEYS):
        offset = tl.cast(start, tl.int64)
        k = load_tile(key_ptr + offset * key_stride, key_stride, keys - start, EVEN, DIM, BLOCK_KEYS, BLOCK_DIM)
        scores = product(q, tl.trans(k.to(FACTOR)), COMPUTE)
        key = start + tl.arange(0, BLOCK_KEYS)
        scores = score_tile(
            scores, scale, index[:, None], key[None, :], queries, keys, bias_ptr, mask_ptr, mask_query_stride,
            mask_key_stride, KEY_MASK, CAUSAL, EVEN,
        )  # fmt: skip
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(largest - reference)
        total = total * shrink + tl.sum(weights, axis=1)
        if THRESHOLD > 0:
            drawn = row.to(tl.int64) * queries + index
            keep = keep_tile(tl.load(seed_ptr), drawn, start, THRESHOLD, BLOCK_KEYS)
            weights = tl.where(keep, weights, 0.0)
        v = load_tile(value_ptr + offset * value_stride, value_stride, keys - start, EVEN, DIM, BLOCK_KEYS, BLOCK_DIM)
        sums = sums * shrink[:, None] + product(weights.to(FACTOR), v.to(FACTOR), COMPUTE)
        largest = new_largest

    mask = index < queries
    sums *= (tl.full((), keep_scale, COMPUTE) / tl.where(total == 0.0, 1.0, total))[:, None]
    # inf: there is no key; -inf: all keys are masked.
    lse = tl.where(largest == LOWEST, float("-inf"), (largest + tl.log2(total)) / LOG2E)
    tl.store(lse_ptr + row.to(tl.int64) * queries + index, tl.where(total == 0.0, float("inf"), lse), mask=mask)
    column = tl.arange(0, BLOCK_DIM)
    output_row = (batch * queries + index) * heads + head
    store = mask[:, None] & (column < DIM)[None, :]
    tl.store(output_ptr + output_row[:, None] * DIM + column[None, :], sums, mask=store)


class Call(NamedTuple):
    """What the kernels of one call share: arguments by position up to the mask's strides, and constants by name."""

    tensors: tuple[Any, ...]  # query, key, value, bias, mask, seed; the last three may be None
    sizes: tuple[int, ...]  # heads, queries, keys
    strides: tuple[int, ...]  # of query, key, value and mask
    scales: tuple[float, float]  # of the products, and of what dropout keeps
    constants: dict[str, Any]

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        seed: torch.Tensor | None,
        scale: float,
        p: float,
        causal: bool,
    ) -> "Call":
        batch, heads, queries, dim = query.shape
        keys = key.shape[2]
        query, key, value = map(adjacent, (query, key, value))
        bias = None if bias is None else bias.contiguous()
        full = None if mask is None else mask.expand(batch, heads, queries, keys)
        compute = compute_dtype(query)
        factor = torch.float32 if TRITON_INTERPRETED and query.dtype == torch.bfloat16 else query.dtype
        constants = {
            "THRESHOLD": threshold(p),
            "KEY_MASK": full is not None and full.stride(2) == 0,
            "CAUSAL": causal,
            "DIM": dim,
            "COMPUTE": TL_DTYPES[compute],
            "FACTOR": TL_DTYPES[factor],
            "BLOCK_DIM": max(16, triton.next_power_of_2(dim)),
        }
        strides = (
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            *(full.stride() if full is not None else (0,) * 4),
        )
        scales = scale, 1.0 / (1.0 - p)
        return cls((query, key, value, bias, full, seed), (heads, queries, keys), strides, scales, constants)

    def tile(self, tiles: Tiles) -> Tile:
        return tiles.of(self.tensors[0].dtype, self.constants["BLOCK_DIM"])

    def tiled(self, tile: Tile) -> dict[str, Any]:
        """The constants of a kernel that takes `tile` at a time."""
        _, queries, keys = self.sizes
        return {
            **self.constants,
            "EVEN": queries % tile.queries == 0 and keys % tile.keys == 0,
            "BLOCK_QUERIES": tile.queries,
            "BLOCK_KEYS": tile.keys,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }


def adjacent(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy where elements of its last dimension are not neighbours in memory."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def relative_attention_fwd(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
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
        bias: [heads, queries + keys - 1], of the distance, or None.
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
    call = Call.of(query, key, value, bias, mask, seed, scale, p, causal)
    tile = call.tile(FWD_TILES)
    programs = batch * heads * triton.cdiv(queries, tile.queries)
    with torch.cuda.device_of(query):
        relative_attention_fwd_kernel[(programs,)](
            *call.tensors, output, lse, *call.sizes, *call.strides, *call.scales, **call.tiled(tile)
        )
    return output, lse
