"""Shared by the kernels of `relative_attention`: a tile of scores, its bias and weights, and the kind of a call."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fuseopt.ops.library import TRITON_INTERPRETED
from fuseopt.ops.philox import threshold
from fuseopt.ops.relative_attention import MASKED, MOST_OF_TILE, reach_of
from fuseopt.ops.triton.launch import Launch
from fuseopt.ops.triton.philox import INTERPRETED
from fuseopt.ops.triton.rows import TL_DTYPES

LOG2E = tl.constexpr(1.4426950408889634)
# The score of a masked key, in units of log2 e: the lowest there is, above the -inf of a key that is not there.
LOWEST = tl.constexpr(-3.0e38)
MASKS = tl.constexpr(MASKED)
MOST = tl.constexpr(MOST_OF_TILE)
MASK_BLOCK = tl.constexpr(1024)
_LINE_BLOCK = 256
# Number of kinds of calls whose launches are cached.
KINDS = 256


class Tile(NamedTuple):
    """Numbers of queries and keys that a program holds at a time: powers of 2, at least 8."""

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
    pointers = ptr + row.to(tl.int64) * row_stride + column
    if EVEN and DIM == BLOCK:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(row < rows_left) & (column < DIM), other=0.0)
    return tile


@triton.jit
def store_tile(ptr, row_stride, rows_left, tile, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    tl.store(ptr + row.to(tl.int64) * row_stride + column, tile, mask=(row < rows_left) & (column < DIM))


@triton.jit
def load_line(pointers):
    """What is there, a number a diagonal: of a thread's elements on the same one, one is loaded.

    tl.load would be pipelined through shared memory, where a tile's diagonals meet in the same banks.
    """
    if INTERPRETED or pointers.dtype.element_ty != tl.float32:
        line = tl.load(pointers)
    else:
        line = tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [pointers.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )
    return line


@triton.jit
def score_tile(
    products,  # of queries and keys
    scale,  # of the products, in units of log2 e
    first_query,
    query,  # indices of the tile's queries from its first, with a dimension of 1 for the keys
    first_key,
    key,  # likewise
    queries,
    keys,
    line_ptr,  # the bias of this head at distance 0, as `relative_attention_line` makes it; or None
    reach,
    mask_ptr,  # of this item and head; or None
    mask_query_stride,
    mask_key_stride,
    KEY_MASK: tl.constexpr,  # it is the same for every query
    CAUSAL: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Scores in units of log2 e: LOWEST where the mask masks, -inf where there is no key, or the mask hides it."""
    # No bare product: the compiler would fuse it with the subtraction of the rounded maximum.
    scores = tl.fma(products, scale, 0.0)
    if line_ptr is not None:
        ahead = tl.minimum(tl.maximum(first_key - first_query, -reach - MOST), reach + MOST)
        # In 64 bits, what differs between elements of a thread is a constant in its instructions.
        scores += load_line(line_ptr + ahead + (key.to(tl.int64) - query.to(tl.int64)))
    if mask_ptr is not None:
        seen = key < keys - first_key
        pointers = mask_ptr + (first_key + key).to(tl.int64) * mask_key_stride
        if KEY_MASK:
            mask = tl.load(pointers, mask=seen, other=0)
        else:
            pointers += (first_query + query).to(tl.int64) * mask_query_stride
            mask = tl.load(pointers, mask=seen & (query < queries - first_query), other=0)
        if mask.dtype == tl.int1:
            scores = tl.where(mask, scores, LOWEST)
        else:
            added = mask.to(scores.dtype)
            masked = (added <= MASKS) & (added != float("-inf"))
            scores = tl.where(masked, LOWEST, scores + added * LOG2E)
    if CAUSAL:
        scores = tl.where(key - query <= first_query - first_key + (keys - queries), scores, float("-inf"))
    if not EVEN:
        scores = tl.where(key < keys - first_key, scores, float("-inf"))
    return scores


@triton.jit
def shift_of(lse):
    """What weights are 2 to the power of, below the scores: their logsumexp, or the score of keys if all are masked."""
    return tl.where(lse == float("-inf"), LOWEST, lse * LOG2E)


@triton.jit
def share_of(shift, query, queries, keys, CAUSAL: tl.constexpr):
    """What weights are still to be multiplied by: the share of each key where all are masked; else 1."""
    seen = tl.zeros_like(shift) + keys
    if CAUSAL:
        seen = tl.minimum(seen, (query + (keys - queries + 1)).to(shift.dtype))
    return tl.where(shift == LOWEST, 1.0 / seen, 1.0)


@triton.jit
def grad_scale(shift, keep_scale, HAS_MASK: tl.constexpr):
    """`keep_scale` for each query, but 0 if all its keys are masked: they do not depend on their scores."""
    if HAS_MASK:
        result = tl.where(shift == LOWEST, 0.0, keep_scale)
    else:
        result = tl.zeros_like(shift) + keep_scale
    return result


@triton.jit
def seen_end(mask_ptr, mask_key_stride, keys, BLOCK: tl.constexpr):
    """The index after the last key that the mask, one for all queries, leaves to be seen; `keys` if it leaves none."""
    last = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, keys, BLOCK):
        key = start + tl.arange(0, BLOCK)
        mask = tl.load(mask_ptr + key.to(tl.int64) * mask_key_stride, mask=key < keys, other=0)
        seen = mask if mask.dtype == tl.int1 else mask > MASKS
        last = tl.where(seen & (key < keys), key + 1, last)
    end = tl.max(last, axis=0)
    return tl.where(end == 0, keys, end)


@triton.jit
def bias_line_kernel(
    bias_ptr,  # [heads, 2 * reach + 1], contiguous
    line_ptr,  # [heads, 2 * margin + 1], contiguous
    reach,
    margin,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program takes BLOCK distances of one head."""
    head = tl.program_id(1)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    distance = tl.minimum(tl.maximum(index - margin, -reach), reach)
    bias = tl.load(bias_ptr + head * (2 * reach + 1) + distance + reach).to(COMPUTE) * LOG2E
    tl.store(line_ptr + head * (2 * margin + 1) + index, bias, mask=index < 2 * margin + 1)


@triton.jit
def middle_of(line_ptr, head, reach):
    """Where the bias of a head at distance 0 is, in a line as `relative_attention_line` makes it."""
    margin = reach + 2 * MOST
    return line_ptr + head * (2 * margin + 1) + margin


@functools.lru_cache(maxsize=KINDS)
def _line_launch(heads: int, reach: int, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device) -> Launch:
    margin = reach + 2 * MOST_OF_TILE
    grid = triton.cdiv(2 * margin + 1, _LINE_BLOCK), heads
    constants = {"COMPUTE": TL_DTYPES[dtypes[1]], "BLOCK": _LINE_BLOCK, "num_warps": 4, "enable_fp_fusion": True}
    return Launch(bias_line_kernel, grid, (reach, margin), constants)


def relative_attention_line(bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`bias` [heads, 2 * reach + 1] in units of log2 e, drawn out at both ends: no tile of scores reaches beyond.

    Returns:
        [heads, 2 * margin + 1] in `dtype`, contiguous; the element of distance 0 is in the middle.
    """
    heads, reach = bias.shape[0], bias.shape[1] // 2
    line = torch.empty((heads, 2 * (reach + 2 * MOST_OF_TILE) + 1), dtype=dtype, device=bias.device)
    if heads:
        with torch.cuda.device_of(bias):
            _line_launch(heads, reach, (bias.dtype, dtype), bias.device)(bias.contiguous(), line)
    return line


class Call(NamedTuple):
    """Calls of one kind: all that the kernels take besides tensors, and what the tensors' own kind goes by."""

    device: torch.device
    dtypes: tuple[torch.dtype | None, ...]  # of query, line, mask, seed and grad_output, None for those not there
    batch: int
    sizes: tuple[int, ...]  # heads, queries, keys, reach
    dim: int
    strides: tuple[int, ...]  # of query, key, value, mask, and in a backward grad_output
    scale: float  # of the products
    p: float
    causal: bool

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        line: torch.Tensor | None,
        mask: torch.Tensor | None,
        seed: torch.Tensor | None,
        scale: float,
        p: float,
        causal: bool,
        grad_output: torch.Tensor | None = None,
    ) -> tuple["Call", tuple[torch.Tensor | None, ...]]:
        """The call, and the first of its kernels' tensors: query, key, value, line, mask, seed and grad_output.

        The line, mask and seed may be None; without a `grad_output` none is among them.
        """
        batch, heads, queries, dim = query.shape
        keys = key.shape[2]
        if key.dtype != query.dtype or value.dtype != query.dtype:
            raise ValueError(f"key and value must be {query.dtype} as query, not {key.dtype} and {value.dtype}")
        query, key, value = adjacent(query), adjacent(key), adjacent(value)
        line = None if line is None else line.contiguous()
        full = None if mask is None else mask.expand(batch, heads, queries, keys)
        strides = (
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            *(full.stride() if full is not None else (0,) * 4),
        )
        tensors: tuple[torch.Tensor | None, ...] = (query, key, value, line, full, seed)
        if grad_output is not None:
            grad_output = adjacent(grad_output)
            strides += grad_output.stride()[:3]
            tensors += (grad_output,)
        dtypes = query.dtype, *(None if tensor is None else tensor.dtype for tensor in tensors[3:])
        sizes = heads, queries, keys, reach_of(line)
        return cls(query.device, dtypes, batch, sizes, dim, strides, scale, p, causal), tensors

    @property
    def compute(self) -> torch.dtype:
        """Of sums and scores."""
        return torch.promote_types(self.dtypes[0], torch.float32)

    @property
    def block_dim(self) -> int:
        return max(16, triton.next_power_of_2(self.dim))

    def tile(self, tiles: Tiles) -> Tile:
        return tiles.of(self.dtypes[0], self.block_dim)

    def launch(
        self,
        kernel: Any,
        tile: Tile,
        programs: int,
        *,
        before: Sequence[int] = (),
        after: Sequence[int] = (),
        **constants: Any,
    ) -> Launch:
        """Of a kernel that takes `tile` at a time.

        Args:
            before, after: its numbers ahead of and behind those that all kernels take.
        """
        _, queries, keys, _ = self.sizes
        factor = torch.float32 if TRITON_INTERPRETED and self.dtypes[0] == torch.bfloat16 else self.dtypes[0]
        constants |= {
            "THRESHOLD": threshold(self.p),
            "KEY_MASK": self.dtypes[2] is not None and self.strides[11] == 0,
            "CAUSAL": self.causal,
            "EVEN": queries % tile.queries == 0 and keys % tile.keys == 0,
            "DIM": self.dim,
            "COMPUTE": TL_DTYPES[self.compute],
            "FACTOR": TL_DTYPES[factor],
            "BLOCK_QUERIES": tile.queries,
            "BLOCK_KEYS": tile.keys,
            "BLOCK_DIM": self.block_dim,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "enable_fp_fusion": True,
        }
        numbers = *before, *self.sizes, *self.strides, self.scale, 1.0 / (1.0 - self.p), *after
        return Launch(kernel, (programs,), numbers, constants)


def adjacent(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy where elements of its last dimension are not neighbours in memory."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
