"""Dequantises a weight of a linear layer in one pass."""

import torch
import triton
import triton.language as tl

from fuseopt.ops.triton.elementwise import NUM_WARPS, PROGRAM_ELEMENTS, tile_places


@triton.jit
def dequantize_kernel(
    values_ptr,  # int8 [N, K], or int32 [N, K / 8]; contiguous
    scales_ptr,  # [N, K / GROUP], contiguous
    zeros_ptr,  # uint8 [N, K / GROUP], contiguous, or None
    output_ptr,  # [N, K], contiguous
    rows,
    columns,
    group,
    column_tiles,
    IS_PACKED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Each program takes one tile."""
    tile = tl.program_id(0)
    row, column, mask = tile_places(tile // column_tiles, tile % column_tiles, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
    groups = columns // group
    place = row * groups + column // group
    scale = tl.load(scales_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if IS_PACKED:
        word = tl.load(values_ptr + row * (columns // 8) + column // 8, mask=mask, other=0)
        # As NIBBLE_ORDER: even inputs are in the low half of the word, odd ones in the high half.
        shift = ((column % 8 // 2) * 4 + (column % 2) * 16).to(tl.int32)
        value = ((word >> shift) & 15).to(tl.float32)
        if zeros_ptr is None:
            value -= 8.0
        else:
            value -= tl.load(zeros_ptr + place, mask=mask, other=0).to(tl.float32)
    else:
        value = tl.load(values_ptr + row * columns + column, mask=mask, other=0).to(tl.float32)
    tl.store(output_ptr + row * columns + column, value * scale, mask=mask)


def dequantize(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The weight [N, K] that a LowBitWeight's tensors stand for, computed in float32.

    Args:
        values: int8 [N, K], or int32 [N, K / 8], any strides.
        scales: [N, groups], float32, float16 or bfloat16, any strides.
        zeros: uint8 [N, groups], any strides, or None.
        dtype: the result's: float32, float16 or bfloat16.
    """
    if {scales.dtype, dtype} - {torch.float32, torch.float16, torch.bfloat16}:
        raise RuntimeError(f"dequantize takes float32, float16 and bfloat16, not {scales.dtype} and {dtype}")
    is_packed = values.dtype is torch.int32
    values, scales = values.contiguous(), scales.contiguous()
    zeros = None if zeros is None else zeros.contiguous()
    rows, columns = values.shape[0], values.shape[1] * (8 if is_packed else 1)
    output = torch.empty((rows, columns), dtype=dtype, device=values.device)
    block_columns = min(triton.next_power_of_2(columns), PROGRAM_ELEMENTS)
    block_rows, column_tiles = PROGRAM_ELEMENTS // block_columns, -(-columns // block_columns)
    with torch.cuda.device_of(values):
        dequantize_kernel[(-(-rows // block_rows) * column_tiles,)](
            values, scales, zeros, output, rows, columns, columns // scales.shape[1], column_tiles, is_packed,
            block_rows, block_columns, num_warps=NUM_WARPS,
        )  # fmt: skip
    return output
