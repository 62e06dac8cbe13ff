"""Softmax over the last dimension of `scale * input + mask`, forward and backward.

Rows that fit a program's registers are read once; wider ones take the online softmax (Milakov and Gimelshein, 2018,
https://arxiv.org/abs/1805.02867), whose second read comes from the L2 cache.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fuseopt.ops.triton.rows import TL_DTYPES, Tiling, as_rows, compute_dtype
from fuseopt.ops.triton.wide_rows import aligned_row, edge_positions, row_alignment, split_scale, update_online

# TUNED: measurement not recorded (c142e1e); `fuseopt bench ops --op softmax` measures it again.
FWD_TILING = Tiling(program_bytes=16 * 1024, thread_bytes=64, max_row_bytes=128 * 1024)
# Two rows are held at once: the output and its gradient.
BWD_TILING = Tiling(program_bytes=16 * 1024, thread_bytes=64, max_row_bytes=64 * 1024)
# Bytes of the arithmetic that each of 1024 threads takes at a time along a wider row; half of it with a mask.
WIDE_THREAD_BYTES = 32


@triton.jit
def mask_row_offset(row, size_1, size_2, stride_0, stride_1, stride_2):
    """Offset of the mask's row for each `row` of an input whose leading dimensions fold to [size_0, size_1, size_2]."""
    index_2 = (row % size_2).to(tl.int64)
    index_1 = (row // size_2 % size_1).to(tl.int64)
    index_0 = (row // size_2 // size_1).to(tl.int64)
    return index_0 * stride_0 + index_1 * stride_1 + index_2 * stride_2


@triton.jit(do_not_specialize=["rows", "mask_size_1", "mask_size_2"])
def softmax_fwd_kernel(
    input_ptr,  # [rows, columns], adjacent columns
    mask_ptr,  # mask as broadcast to input, by the sizes and strides below; or None
    output_ptr,  # [rows, columns], contiguous
    rows,
    columns,  # at most BLOCK_COLUMNS
    input_row_stride,  # elements from one row of input to the next
    mask_size_1,
    mask_size_2,
    mask_stride_0,
    mask_stride_1,
    mask_stride_2,
    mask_column_stride,
    scale: tl.float64,
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Each program takes BLOCK_ROWS whole rows, held in registers: one read, one write."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    column_mask = (column < columns)[None, :]
    mask = (row < rows)[:, None] & column_mask

    x = tl.load(input_ptr + row[:, None] * input_row_stride + column[None, :], mask=mask, other=0.0).to(COMPUTE)
    factor, power = split_scale(mask_ptr, scale, COMPUTE)
    x *= factor
    if mask_ptr is not None:
        mask_row = mask_row_offset(
            row.to(rows.dtype),  # a 64-bit division only where the count of rows needs it
            mask_size_1,
            mask_size_2,
            mask_stride_0,
            mask_stride_1,
            mask_stride_2,
        )
        mask_offset = mask_row[:, None] + column[None, :].to(tl.int64) * mask_column_stride
        x += tl.load(mask_ptr + mask_offset, mask=mask, other=0.0).to(COMPUTE)
    x = tl.where(column_mask, x, -float("inf"))

    exponential = tl.exp2((x - tl.max(x, axis=1)[:, None]) * power)
    y = exponential * (1.0 / tl.sum(exponential, axis=1))[:, None]
    tl.store(output_ptr + row[:, None] * columns + column[None, :], y, mask=mask)


@triton.jit
def load_logits(
    input_ptr,
    mask_ptr,  # or None
    position,  # from both pointers
    readable,  # which positions of input may be read; None for all
    inside,  # which positions belong to the row; None for all
    mask_column_stride,
    factor,  # of input, in COMPUTE
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
):
    """`factor * input + mask` at `position`, -inf where `inside` is false."""
    if readable is None:
        x = tl.load(input_ptr + position).to(COMPUTE)
    else:
        x = tl.load(input_ptr + position, mask=readable, other=0.0).to(COMPUTE)
    x *= factor
    if mask_ptr is not None:
        mask_pointers = mask_ptr + position.to(tl.int64) * mask_column_stride
        if inside is None:
            x += tl.load(mask_pointers).to(COMPUTE)
        else:
            x += tl.load(mask_pointers, mask=inside, other=0.0).to(COMPUTE)
    if inside is not None:
        x = tl.where(inside, x, -float("inf"))
    return x


@triton.jit(do_not_specialize=["mask_size_1", "mask_size_2"])
def softmax_fwd_wide_kernel(
    input_ptr,  # [rows, columns], adjacent columns
    mask_ptr,  # mask as broadcast to input, by the sizes and strides below; or None
    output_ptr,  # [rows, columns], contiguous
    columns,  # at least STEPS * LANES
    input_row_stride,  # elements from one row of input to the next; equal to columns, modulo ALIGNMENT
    mask_size_1,
    mask_size_2,
    mask_stride_0,
    mask_stride_1,
    mask_stride_2,
    mask_column_stride,
    scale: tl.float64,
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    ALIGNMENT: tl.constexpr,  # elements of a 16-byte vector, or 1 for access by element
    STEPS: tl.constexpr,  # elements that a lane takes at a time: their maximum needs no other thread
    LANES: tl.constexpr,  # running maxima and sums, which meet only at the end of the row
):
    """Each program walks twice along one row too wide for registers: once for its maximum and sum, once to write.

    Rows of an odd width start anywhere. Positions count from the start of a row's first vector, so that whole vectors
    are read, the neighbours' elements in the first and last one dropped; those two are written by element. The second
    walk goes backwards, to find what the caches still hold.
    """
    BLOCK: tl.constexpr = STEPS * LANES
    row = tl.program_id(0).to(tl.int64)
    input_ptr += row * input_row_stride // ALIGNMENT * ALIGNMENT
    output_ptr += row * columns // ALIGNMENT * ALIGNMENT
    first, end, vectors_first, vectors_end = aligned_row(columns, ALIGNMENT)
    if mask_ptr is not None:
        mask_ptr += mask_row_offset(
            tl.program_id(0), mask_size_1, mask_size_2, mask_stride_0, mask_stride_1, mask_stride_2
        )
        mask_ptr -= first.to(tl.int64) * mask_column_stride
    factor, power = split_scale(mask_ptr, scale, COMPUTE)

    last = end // BLOCK * BLOCK
    first_block = tl.arange(0, STEPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    last_block = last + first_block
    last_readable = last_block < (end + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT

    lane_max = tl.full((LANES,), -float("inf"), COMPUTE)
    lane_sum = tl.zeros((LANES,), COMPUTE)
    x = load_logits(input_ptr, mask_ptr, first_block, None, first_block >= first, mask_column_stride, factor, COMPUTE)
    lane_max, lane_sum = update_online(lane_max, lane_sum, x, power)
    for start in range(BLOCK, last, BLOCK):
        x = load_logits(input_ptr, mask_ptr, start + first_block, None, None, mask_column_stride, factor, COMPUTE)
        lane_max, lane_sum = update_online(lane_max, lane_sum, x, power)
    x = load_logits(
        input_ptr, mask_ptr, last_block, last_readable, last_block < end, mask_column_stride, factor, COMPUTE
    )
    lane_max, lane_sum = update_online(lane_max, lane_sum, x, power)

    row_max = tl.max(lane_max, axis=0)
    normaliser = 1.0 / tl.sum(lane_sum * tl.exp2((lane_max - row_max) * power), axis=0)

    y = tl.exp2((x - row_max) * power) * normaliser
    tl.store(output_ptr + last_block, y, mask=last_block < vectors_end)
    for start in range(BLOCK, last, BLOCK):
        block = (last - start) + first_block
        x = load_logits(input_ptr, mask_ptr, block, None, None, mask_column_stride, factor, COMPUTE)
        tl.store(output_ptr + block, tl.exp2((x - row_max) * power) * normaliser)
    x = load_logits(input_ptr, mask_ptr, first_block, None, first_block >= first, mask_column_stride, factor, COMPUTE)
    y = tl.exp2((x - row_max) * power) * normaliser
    tl.store(output_ptr + first_block, y, mask=first_block >= vectors_first)

    edge, inside = edge_positions(first, end, vectors_end, ALIGNMENT)
    x = load_logits(input_ptr, mask_ptr, edge, inside, inside, mask_column_stride, factor, COMPUTE)
    tl.store(output_ptr + edge, tl.exp2((x - row_max) * power) * normaliser, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def softmax_bwd_kernel(
    grad_output_ptr,  # [rows, columns], adjacent columns
    output_ptr,  # [rows, columns], adjacent columns
    grad_input_ptr,  # [rows, columns], contiguous
    rows,
    columns,  # at most BLOCK_COLUMNS
    grad_output_row_stride,  # elements from one row of grad_output to the next
    output_row_stride,  # elements from one row of output to the next
    scale: tl.float64,
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Each program takes BLOCK_ROWS whole rows, held in registers: two reads, one write."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]

    dy_offset = row[:, None] * grad_output_row_stride + column[None, :]
    dy = tl.load(grad_output_ptr + dy_offset, mask=mask, other=0.0).to(COMPUTE)
    y = tl.load(output_ptr + row[:, None] * output_row_stride + column[None, :], mask=mask, other=0.0).to(COMPUTE)
    projection = tl.sum(dy * y, axis=1)
    dx = y * (dy - projection[:, None]) * tl.full((), scale, COMPUTE)
    tl.store(grad_input_ptr + row[:, None] * columns + column[None, :], dx, mask=mask)


@triton.jit
def softmax_bwd_wide_kernel(
    grad_output_ptr,  # [rows, columns], adjacent columns
    output_ptr,  # [rows, columns], adjacent columns
    grad_input_ptr,  # [rows, columns], contiguous
    columns,  # at least BLOCK
    grad_output_row_stride,  # elements from one row of grad_output to the next; equal to columns, modulo ALIGNMENT
    output_row_stride,  # the same for output
    scale: tl.float64,
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    ALIGNMENT: tl.constexpr,  # elements of a 16-byte vector, or 1 for access by element
    BLOCK: tl.constexpr,
):
    """Each program walks twice along one row too wide for registers, as softmax_fwd_wide_kernel does."""
    row = tl.program_id(0).to(tl.int64)
    grad_output_ptr += row * grad_output_row_stride // ALIGNMENT * ALIGNMENT
    output_ptr += row * output_row_stride // ALIGNMENT * ALIGNMENT
    grad_input_ptr += row * columns // ALIGNMENT * ALIGNMENT
    first, end, vectors_first, vectors_end = aligned_row(columns, ALIGNMENT)
    scale = tl.full((), scale, COMPUTE)

    last = end // BLOCK * BLOCK
    first_block = tl.arange(0, BLOCK)
    last_block = last + first_block
    last_readable = last_block < (end + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT

    dy = tl.load(grad_output_ptr + first_block).to(COMPUTE)
    y = tl.load(output_ptr + first_block).to(COMPUTE)
    products = tl.where(first_block >= first, dy * y, 0.0)
    for start in range(BLOCK, last, BLOCK):
        dy = tl.load(grad_output_ptr + start + first_block).to(COMPUTE)
        y = tl.load(output_ptr + start + first_block).to(COMPUTE)
        products += dy * y
    dy = tl.load(grad_output_ptr + last_block, mask=last_readable, other=0.0).to(COMPUTE)
    y = tl.load(output_ptr + last_block, mask=last_readable, other=0.0).to(COMPUTE)
    products += tl.where(last_block < end, dy * y, 0.0)
    projection = tl.sum(products, axis=0)

    tl.store(grad_input_ptr + last_block, y * (dy - projection) * scale, mask=last_block < vectors_end)
    for start in range(BLOCK, last, BLOCK):
        block = (last - start) + first_block
        dy = tl.load(grad_output_ptr + block).to(COMPUTE)
        y = tl.load(output_ptr + block).to(COMPUTE)
        tl.store(grad_input_ptr + block, y * (dy - projection) * scale)
    dy = tl.load(grad_output_ptr + first_block).to(COMPUTE)
    y = tl.load(output_ptr + first_block).to(COMPUTE)
    tl.store(grad_input_ptr + first_block, y * (dy - projection) * scale, mask=first_block >= vectors_first)

    edge, inside = edge_positions(first, end, vectors_end, ALIGNMENT)
    dy = tl.load(grad_output_ptr + edge, mask=inside, other=0.0).to(COMPUTE)
    y = tl.load(output_ptr + edge, mask=inside, other=0.0).to(COMPUTE)
    tl.store(grad_input_ptr + edge, y * (dy - projection) * scale, mask=inside)


class BroadcastMask(NamedTuple):
    """A mask [*, columns] over the rows of the tensor it broadcasts to, whose leading dimensions fold to three.

    Row r reads from `(r // size_2 // size_1) * stride_0 + (r // size_2 % size_1) * stride_1 + (r % size_2) * stride_2`.
    """

    tensor: torch.Tensor | None
    size_1: int
    size_2: int
    stride_0: int
    stride_1: int
    stride_2: int
    column_stride: int


NO_MASK = BroadcastMask(None, 1, 1, 0, 0, 0, 0)


def broadcast_mask(mask: torch.Tensor, shape: torch.Size) -> BroadcastMask:
    """`mask` as the kernels read it: its own memory, with stride 0 where it is broadcast to `shape`.

    Copied in full only where more than three leading dimensions cannot be folded into each other, as in a mask
    broadcast along every second one of four.
    """
    expanded = mask.expand(shape)
    folded: list[tuple[int, int]] = []
    for size, stride in zip(shape[:-1], expanded.stride()[:-1], strict=True):
        if size == 1:
            continue
        if folded and folded[-1][1] == size * stride:
            folded[-1] = (folded[-1][0] * size, stride)
        else:
            folded.append((size, stride))
    if len(folded) > 3:
        return broadcast_mask(expanded.contiguous(), shape)
    (_, stride_0), (size_1, stride_1), (size_2, stride_2) = [(1, 0)] * (3 - len(folded)) + folded
    return BroadcastMask(mask, size_1, size_2, stride_0, stride_1, stride_2, expanded.stride(-1))


def wide_warps(matrices: Sequence[torch.Tensor], columns: int) -> int:
    """A warp for each 16 KiB to read of a row, so that the rows under way at once stay in the L2 cache; 8 to 32."""
    # TUNED: 16 KiB a warp: measurement not recorded (c142e1e); `fuseopt bench ops --op softmax` measures it again.
    row_bytes = columns * sum(matrix.itemsize for matrix in matrices)
    return min(max(triton.next_power_of_2(row_bytes // 16384), 8), 32)


def softmax_fwd(
    input: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`softmax(scale * input + mask)` over the last dimension.

    Args:
        input: [*, columns], any strides; float32, float16, bfloat16 or float64.
        mask: added to the scaled input; broadcastable to it, any strides, any of these dtypes. It is not expanded in
            memory.
        scale: factor of the input.
        output_dtype: dtype of the output; the input's by default.

    Returns:
        [*, columns], contiguous. A row of -inf alone gives NaN, as in torch.softmax. Arithmetic is in float32, or
        float64 when input or mask is.
    """
    output = torch.empty(input.shape, dtype=output_dtype or input.dtype, device=input.device)
    if output.numel() == 0:
        return output
    columns = input.shape[-1]
    rows = output.numel() // columns
    matrix, row_stride = as_rows(input)
    broadcast = NO_MASK if mask is None else broadcast_mask(mask, input.shape)
    compute = compute_dtype(input, mask)
    tile = FWD_TILING.row_tile(columns, compute)
    with torch.cuda.device_of(input):
        if tile is not None:
            softmax_fwd_kernel[(-(-rows // tile.rows),)](
                matrix, broadcast.tensor, output, rows, columns, row_stride, *broadcast[1:], scale,
                TL_DTYPES[compute], tile.rows, tile.columns, num_warps=tile.num_warps, enable_fp_fusion=True,
            )  # fmt: skip
        else:
            num_warps = wide_warps([matrix], columns)
            thread_bytes = WIDE_THREAD_BYTES if mask is None else WIDE_THREAD_BYTES // 2
            softmax_fwd_wide_kernel[(rows,)](
                matrix, broadcast.tensor, output, columns, row_stride, *broadcast[1:], scale,
                TL_DTYPES[compute], row_alignment([matrix], [row_stride], columns),
                32 // num_warps, 32 * num_warps * thread_bytes // compute.itemsize,
                num_warps=num_warps, enable_fp_fusion=True,
            )  # fmt: skip
    return output


def softmax_bwd(
    grad_output: torch.Tensor, output: torch.Tensor, scale: float, input_dtype: torch.dtype
) -> torch.Tensor:
    """Gradient of `softmax_fwd` with respect to its input: `scale * y * (g - sum(g * y))`.

    Args:
        grad_output: g, [*, columns], any strides; float32, float16, bfloat16 or float64.
        output: y, as the forward returned it.
        scale: as given to the forward.
        input_dtype: dtype of the gradient.

    Returns:
        [*, columns], contiguous, in `input_dtype`. Arithmetic is in float32, or float64 when grad_output or output is.
    """
    grad_input = torch.empty(output.shape, dtype=input_dtype, device=output.device)
    if grad_input.numel() == 0:
        return grad_input
    columns = output.shape[-1]
    rows = grad_input.numel() // columns
    grad_matrix, grad_row_stride = as_rows(grad_output)
    matrix, row_stride = as_rows(output)
    compute = compute_dtype(grad_output, output)
    tile = BWD_TILING.row_tile(columns, compute)
    with torch.cuda.device_of(output):
        if tile is not None:
            softmax_bwd_kernel[(-(-rows // tile.rows),)](
                grad_matrix, matrix, grad_input, rows, columns, grad_row_stride, row_stride, scale,
                TL_DTYPES[compute], tile.rows, tile.columns, num_warps=tile.num_warps, enable_fp_fusion=True,
            )  # fmt: skip
        else:
            softmax_bwd_wide_kernel[(rows,)](
                grad_matrix, matrix, grad_input, columns, grad_row_stride, row_stride, scale,
                TL_DTYPES[compute], row_alignment([grad_matrix, matrix], [grad_row_stride, row_stride], columns),
                1024 * WIDE_THREAD_BYTES // compute.itemsize,
                num_warps=wide_warps([grad_matrix, matrix], columns), enable_fp_fusion=True,
            )  # fmt: skip
    return grad_input
