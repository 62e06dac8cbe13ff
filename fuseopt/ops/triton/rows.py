"""Host code of row-wise Triton kernels: a matrix view of the input, and the tile that each program takes."""

from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl

TL_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float64: tl.float64,
}

MULTIPROCESSORS: ContextVar[int] = ContextVar("multiprocessors", default=4)
"""Assumed multiprocessors of other devices than CUDA; few, so that persistent programs loop in the interpreter too."""


class RowTile(NamedTuple):
    """The piece of a matrix [rows, columns] that one program works on at a time, and its warps."""

    rows: int
    columns: int
    num_warps: int


class Tiling(NamedTuple):
    """How a kernel that holds whole rows in registers cuts a matrix into tiles.

    Bytes are counted in the dtype of the arithmetic. The width of a row settles all of it, so nothing is autotuned:
    these kernels wait for memory, and timing candidates would stall the first call at every new width.
    """

    program_bytes: int  # narrow rows are put together until they make this much
    thread_bytes: int  # a thread's share of a row
    max_row_bytes: int  # the widest row that fits without spilling registers

    @lru_cache(maxsize=1024)  # noqa: B019 - the few Tilings are module constants
    def row_tile(self, columns: int, compute: torch.dtype) -> RowTile | None:
        """The tile for rows of `columns`; None if they are too wide."""
        block_columns = 1 << max(columns - 1, 0).bit_length()
        row_bytes = block_columns * compute.itemsize
        if row_bytes > self.max_row_bytes:
            return None
        block_rows = max(1, self.program_bytes // row_bytes)
        thread_bytes = self.thread_bytes if block_rows == 1 else 2 * self.thread_bytes
        warps = block_rows * row_bytes // (32 * thread_bytes)
        return RowTile(block_rows, block_columns, min(max(warps, 1), 32))


def as_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`tensor` [*, columns] with adjacent columns and evenly spaced rows, and the stride between its rows.

    Slices and broadcasts over leading dimensions stay views; any other layout is copied.
    """
    columns = tensor.shape[-1]
    if tensor.is_contiguous():
        return tensor, columns
    matrix = tensor.reshape(-1, columns)
    if columns > 1 and matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    return matrix, matrix.stride(0)


def compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """The dtype of the arithmetic: float64 if any of `tensors` has it, else float32."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype == torch.float64:
            return torch.float64
    return torch.float32


@lru_cache
def _multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def multiprocessor_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; elsewhere `MULTIPROCESSORS`."""
    return _multiprocessors(device.index) if device.type == "cuda" else MULTIPROCESSORS.get()
