"""Shared by elementwise Triton kernels: matrices cut into tiles, a program's tile, and activations."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from fuseopt.ops.triton.philox import INTERPRETED
from fuseopt.ops.triton.rows import as_rows

# 8 a thread: one access of 16 bytes in half precision, two in float32.
# TUNED: measurement not recorded; `fuseopt bench ops --op gelu` measures it again.
PROGRAM_ELEMENTS = 1024
NUM_WARPS = 4

TWICE_ROOT_2_OVER_PI: tl.constexpr = tl.constexpr(1.5957691216057308)


class Matrices(NamedTuple):
    """Tensors of one shape as matrices [rows, columns] with adjacent columns, and their tiling."""

    tensors: list[torch.Tensor]
    row_strides: list[int]
    rows: int
    columns: int
    block_rows: int
    block_columns: int

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.block_rows)

    @property
    def column_tiles(self) -> int:
        return -(-self.columns // self.block_columns)


def as_matrices(*tensors: torch.Tensor, by_columns: bool = False) -> Matrices:
    """`tensors` [*, H], with elements, in any strides; one long row where all are contiguous, unless `by_columns`."""
    if not by_columns and all(tensor.is_contiguous() for tensor in tensors):
        columns = tensors[0].numel()
        matrices = [(tensor, columns) for tensor in tensors]
    else:
        columns = tensors[0].shape[-1]
        matrices = [as_rows(tensor) for tensor in tensors]
    rows = tensors[0].numel() // columns
    block_columns = min(triton.next_power_of_2(columns), PROGRAM_ELEMENTS)
    strided, row_strides = map(list, zip(*matrices, strict=True))
    return Matrices(strided, row_strides, rows, columns, PROGRAM_ELEMENTS // block_columns, block_columns)


@triton.jit
def tile_places(
    row_tile,
    column_tile,
    rows,
    columns,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """A tile's rows [BLOCK_ROWS, 1] and columns [1, BLOCK_COLUMNS], int64, and the mask of places inside the matrix."""
    row = (tl.cast(row_tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    column = (tl.cast(column_tile, tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS))[None, :]
    return row, column, (row < rows) & (column < columns)


@triton.jit
def _exp_of_half(x):
    """e^x; 0 below 2^-126."""
    return tl.exp(x) if INTERPRETED else libdevice.fast_expf(x)


@triton.jit
def normal_cdf(x, IS_HALF: tl.constexpr):
    """The standard normal distribution, by which GELU multiplies x.

    For results of 16 bits by a fit with an error of 1e-7 (Abramowitz and Stegun, 1964, 7.1.26), whose exponential is
    the density's: on sm_90 a backward of GELU takes 37 instructions an element instead of 59, a forward 35 instead of
    48.
    """
    z = x * 0.7071067811865476
    if not IS_HALF:
        return 0.5 + 0.5 * tl.erf(z)
    y = 1.0 + 0.3275911 * tl.abs(z)
    t = 1.0 / y if INTERPRETED else libdevice.fast_dividef(1.0, y)
    fit = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    half = 0.5 - 0.5 * fit * _exp_of_half(-(z * z))
    return 0.5 + tl.where(x < 0.0, -half, half)


@triton.jit
def normal_pdf(x, IS_HALF: tl.constexpr):
    """The derivative of `normal_cdf`."""
    z = x * 0.7071067811865476
    return 0.3989422804014327 * (_exp_of_half(-(z * z)) if IS_HALF else tl.exp(-(z * z)))


@triton.jit
def sigmoid(z):
    """1 / (1 + exp(-z)) and its derivative, of which neither overflows or cancels."""
    e = tl.exp(-tl.abs(z))
    r = 1.0 / (1.0 + e)
    return tl.where(z < 0.0, e * r, r), e * r * r


@triton.jit
def activation(x, NAME: tl.constexpr):
    """The activation of that name, of `fuseopt.ops.gated_activation.ACTIVATIONS`, and its derivative."""
    if NAME == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * cdf, cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif NAME == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the sigmoid of 2u.
        s, ds = sigmoid(x * (TWICE_ROOT_2_OVER_PI + TWICE_ROOT_2_OVER_PI * 0.044715 * x * x))
        return x * s, s + x * (TWICE_ROOT_2_OVER_PI + TWICE_ROOT_2_OVER_PI * 0.134145 * x * x) * ds
    elif NAME == "silu":
        s, ds = sigmoid(x)
        return x * s, s + x * ds
    else:
        tl.static_assert(NAME == "relu")
        return tl.where(x <= 0.0, 0.0, x), tl.where(x <= 0.0, 0.0, 1.0)
