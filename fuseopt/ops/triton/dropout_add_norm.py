"""Dropout, residual add and LayerNorm or RMSNorm in one pass; forward and backward each draw the dropout mask."""

import torch
import triton
import triton.language as tl

from fuseopt.ops.philox import COLUMNS, threshold
from fuseopt.ops.rms_norm import cast_dtypes
from fuseopt.ops.triton.rms_norm import bwd_programs, column_sum_kernel
from fuseopt.ops.triton.rows import TL_DTYPES, RowTile, Tiling, as_rows, compute_dtype

# TUNED: measurement not recorded (18fb827); `fuseopt bench ops --op dropout_add_layer_norm` measures it again.
FWD_TILING = Tiling(program_bytes=8 * 1024, thread_bytes=64, max_row_bytes=64 * 1024)
# Five rows are held at once: two gradients, the sum, and the gradients of weight and bias.
BWD_TILING = Tiling(program_bytes=4 * 1024, thread_bytes=64, max_row_bytes=32 * 1024)
# Tiles of two gradients and the sum that are loaded ahead of the one in work, if they fit in shared memory.
# TUNED: 65536 x 768, bfloat16: 200 -> 165 us (49c2179).
BWD_TILES_AHEAD = 2
BWD_MOST_BYTES_AHEAD = 96 * 1024


@triton.jit
def keep_tile(seed, row, THRESHOLD: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """`fuseopt.ops.philox.keep_mask` of whole rows: [BLOCK_ROWS, BLOCK_COLUMNS], of at least 8 columns."""
    c0 = row.to(tl.int32)[:, None] + tl.zeros((1, BLOCK_COLUMNS // 8), tl.int32)
    c1 = tl.zeros((BLOCK_ROWS, 1), tl.int32) + tl.arange(0, BLOCK_COLUMNS // 8)[None, :]
    zero = c0 * 0
    r0, r1, r2, r3 = tl.philox(seed, c0, c1, zero, zero, 10)
    draws = tl.join(tl.join(r0, r2), tl.join(r1, r3))
    numbers = tl.join(draws & 0xFFFF, draws >> 16)
    return tl.reshape(numbers, (BLOCK_ROWS, BLOCK_COLUMNS)) >= THRESHOLD


@triton.jit
def dropout_add_norm_fwd_kernel(
    input_ptr,  # [rows, columns], adjacent columns
    residual_ptr,  # [rows, columns], adjacent columns
    weight_ptr,  # [columns] or None
    bias_ptr,  # [columns] or None
    seed_ptr,  # [1], int64
    output_ptr,  # [rows, columns], contiguous
    sum_ptr,  # [rows, columns], contiguous
    mean_ptr,  # [rows]; None for RMSNorm
    rstd_ptr,  # [rows]
    rows,
    columns,  # at most BLOCK_COLUMNS
    input_row_stride,  # elements from one row of input to the next
    residual_row_stride,  # the same for residual
    scale: tl.float64,  # of what is kept
    eps: tl.float64,
    THRESHOLD: tl.constexpr,  # of 2**16, what is dropped
    OFFSET: tl.constexpr,  # added to the weight
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    NORM: tl.constexpr,  # dtype that the normalised sum is rounded to before the weight
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Each program takes BLOCK_ROWS whole rows, held in registers: two reads, two writes."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    row_mask = row < rows
    column_mask = column < columns
    mask = row_mask[:, None] & column_mask[None, :]

    x = tl.load(input_ptr + row[:, None] * input_row_stride + column[None, :], mask=mask, other=0.0).to(COMPUTE)
    if THRESHOLD > 0:
        keep = keep_tile(tl.load(seed_ptr), row, THRESHOLD, BLOCK_ROWS, BLOCK_COLUMNS)
        x = tl.where(keep, x * tl.full((), scale, COMPUTE), 0.0)
    residual_offset = row[:, None] * residual_row_stride + column[None, :]
    x += tl.load(residual_ptr + residual_offset, mask=mask, other=0.0).to(COMPUTE)
    rounded = x.to(sum_ptr.dtype.element_ty)
    offset = row[:, None] * columns + column[None, :]
    tl.store(sum_ptr + offset, rounded, mask=mask)

    x = rounded.to(COMPUTE)
    if mean_ptr is not None:
        mean = tl.sum(x, axis=1) / columns
        x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / columns + tl.full((), eps, COMPUTE))
    y = x * rstd[:, None]
    if COMPUTE != NORM:
        y = y.to(NORM).to(COMPUTE)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column_mask, other=0.0).to(COMPUTE)
        if OFFSET != 0.0:
            weight += OFFSET
        y *= weight[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(COMPUTE)[None, :]
    tl.store(output_ptr + offset, y, mask=mask)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean, mask=row_mask)
    tl.store(rstd_ptr + row, rstd, mask=row_mask)


@triton.jit
def dropout_add_norm_bwd_kernel(
    grad_output_ptr,  # [rows, columns], adjacent columns
    grad_sum_ptr,  # [rows, columns], adjacent columns; or None
    sum_ptr,  # [rows, columns], adjacent columns
    weight_ptr,  # [columns] or None
    mean_ptr,  # [rows]; None for RMSNorm
    rstd_ptr,  # [rows]
    seed_ptr,  # [1], int64
    grad_input_ptr,  # [rows, columns], contiguous
    grad_residual_ptr,  # [rows, columns], contiguous
    grad_weight_ptr,  # [programs, columns] in COMPUTE: each program's own sum over its rows; or None
    grad_bias_ptr,  # likewise
    rows,
    columns,  # at most BLOCK_COLUMNS
    grad_output_row_stride,  # elements from one row of grad_output to the next
    grad_sum_row_stride,  # the same for grad_sum
    sum_row_stride,  # the same for sum
    scale: tl.float64,  # of what is kept
    THRESHOLD: tl.constexpr,  # of 2**16, what is dropped
    OFFSET: tl.constexpr,  # added to the weight
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TILES_AHEAD: tl.constexpr,  # that are loaded while one is worked on
):
    """Persistent: a program takes neighbouring tiles of rows and keeps its weight gradients in registers."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK_COLUMNS)
    column_mask = column < columns
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column_mask, other=0.0).to(COMPUTE)
        if OFFSET != 0.0:
            weight += OFFSET
    grad_weight = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=COMPUTE)
    grad_bias = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=COMPUTE)

    tiles = tl.cdiv(rows, BLOCK_ROWS)
    share = tl.cdiv(tiles, tl.num_programs(0))
    for tile in tl.range(program * share, tl.minimum(program * share + share, tiles), num_stages=TILES_AHEAD + 1):
        row = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row_mask = row < rows
        mask = row_mask[:, None] & column_mask[None, :]
        dy_offset = row[:, None] * grad_output_row_stride + column[None, :]
        dy = tl.load(grad_output_ptr + dy_offset, mask=mask, other=0.0).to(COMPUTE)
        x = tl.load(sum_ptr + row[:, None] * sum_row_stride + column[None, :], mask=mask, other=0.0).to(COMPUTE)
        if mean_ptr is not None:
            mean = tl.load(mean_ptr + row, mask=row_mask, other=0.0).to(COMPUTE)[:, None]
        rstd = tl.load(rstd_ptr + row, mask=row_mask, other=0.0).to(COMPUTE)[:, None]
        if mean_ptr is not None:
            x -= mean

        xhat = tl.where(mask, x * rstd, 0.0)
        if grad_weight_ptr is not None:
            grad_weight += dy * xhat
        if grad_bias_ptr is not None:
            grad_bias += dy
        if weight_ptr is not None:
            dy *= weight[None, :]
        projection = tl.sum(dy * xhat, axis=1) / columns
        if mean_ptr is not None:
            dy -= (tl.sum(dy, axis=1) / columns)[:, None]
        dx = (dy - xhat * projection[:, None]) * rstd
        if grad_sum_ptr is not None:
            grad_sum_offset = row[:, None] * grad_sum_row_stride + column[None, :]
            dx += tl.load(grad_sum_ptr + grad_sum_offset, mask=mask, other=0.0).to(COMPUTE)
        offset = row[:, None] * columns + column[None, :]
        tl.store(grad_residual_ptr + offset, dx, mask=mask)
        if THRESHOLD > 0:
            keep = keep_tile(tl.load(seed_ptr), row, THRESHOLD, BLOCK_ROWS, BLOCK_COLUMNS)
            dx = tl.where(keep, dx * tl.full((), scale, COMPUTE), 0.0)
        tl.store(grad_input_ptr + offset, dx, mask=mask)

    if grad_weight_ptr is not None:
        weight_row = grad_weight_ptr + program.to(tl.int64) * columns
        tl.store(weight_row + column, tl.sum(grad_weight, axis=0), mask=column_mask)
    if grad_bias_ptr is not None:
        bias_row = grad_bias_ptr + program.to(tl.int64) * columns
        tl.store(bias_row + column, tl.sum(grad_bias, axis=0), mask=column_mask)


def dropout_add_layer_norm_fwd(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    seed: torch.Tensor,
    p: float,
    eps: float,
    output_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`sum = dropout(input) + residual`, and its layer normalisation.

    Args:
        input, residual: [*, H], any strides; H at most 8192 (float64: 4096).
        weight, bias: [H], or None.
        seed: [1], int64, of the mask.
        p: share of the elements of input that are dropped, less than 1.
        eps: added to the variance.
        output_dtype: dtype of the norm.

    Returns:
        The norm and the sum [*, H], contiguous; mean and rstd [*], float32, or float64 for a float64 sum.
    """
    output, sum, rstd, mean = _forward(input, residual, weight, bias, seed, p, eps, output_dtype, has_mean=True)
    return output, sum, mean, rstd


def dropout_add_rms_norm_fwd(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    seed: torch.Tensor,
    p: float,
    eps: float,
    cast_order: int,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`sum = dropout(input) + residual`, and its RMSNorm.

    Args:
        input, residual: [*, H], any strides; H at most 8192 (float64: 4096).
        weight: [H]; None leaves out the offset, too.
        seed: [1], int64, of the mask.
        p: share of the elements of input that are dropped, less than 1.
        eps: added to the mean of squares.
        cast_order: of `ops.rms_norm.CAST_ORDERS`.
        offset: added to the weight.

    Returns:
        The norm and the sum [*, H], contiguous; rstd [*], float32, or float64 for a float64 sum.
    """
    sum_dtype = torch.promote_types(input.dtype, residual.dtype)
    norm_dtype, output_dtype = cast_dtypes(cast_order, sum_dtype, None if weight is None else weight.dtype)
    output, sum, rstd, _ = _forward(
        input, residual, weight, None, seed, p, eps, output_dtype, has_mean=False, norm_dtype=norm_dtype, offset=offset
    )
    return output, sum, rstd


def _forward(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    seed: torch.Tensor,
    p: float,
    eps: float,
    output_dtype: torch.dtype,
    *,
    has_mean: bool,
    norm_dtype: torch.dtype | None = None,
    offset: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """The norm, the sum, rstd, and the mean, which is empty unless the norm has one.

    `norm_dtype`: what the normalised sum is rounded to before the weight; None: not at all.
    """
    columns = input.shape[-1]
    output = torch.empty(input.shape, dtype=output_dtype, device=input.device)
    sum_dtype = torch.promote_types(input.dtype, residual.dtype)
    sum = torch.empty(input.shape, dtype=sum_dtype, device=input.device)
    rstd = torch.empty(input.shape[:-1], dtype=compute_dtype(sum), device=input.device)
    mean = torch.empty_like(rstd) if has_mean else rstd.new_empty(0)
    rows = rstd.numel()
    if rows == 0 or columns == 0:
        return output, sum, rstd.fill_(float("nan")), mean.fill_(float("nan"))
    matrix, row_stride = as_rows(input)
    residual_matrix, residual_row_stride = as_rows(residual)
    weight, bias = (None if parameter is None else parameter.contiguous() for parameter in (weight, bias))
    compute = compute_dtype(sum, weight, bias)
    tile = row_tile(FWD_TILING, columns, compute)
    with torch.cuda.device_of(input):
        dropout_add_norm_fwd_kernel[(-(-rows // tile.rows),)](
            matrix, residual_matrix, weight, bias, seed, output, sum, mean if has_mean else None, rstd, rows, columns,
            row_stride, residual_row_stride, 1.0 / (1.0 - p), eps, threshold(p), offset, TL_DTYPES[compute],
            TL_DTYPES[norm_dtype or compute], tile.rows, tile.columns, num_warps=tile.num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    return output, sum, rstd, mean


def dropout_add_layer_norm_bwd(
    grad_output: torch.Tensor,
    grad_sum: torch.Tensor | None,
    sum: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    seed: torch.Tensor,
    p: float,
    input_dtype: torch.dtype,
    need_weight_grad: bool,
    need_bias_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `dropout_add_layer_norm_fwd`.

    Args:
        grad_output, grad_sum: of the norm and, if there is one, of the sum: [*, H], any strides.
        sum, mean, rstd: as the forward returned them.
        weight, seed, p: as given to the forward.
        input_dtype: dtype of the gradient of input.
        need_weight_grad, need_bias_grad: whether to compute these.

    Returns:
        Gradients [*, H] of input, in `input_dtype`, and of residual, in the dtype of the sum; of weight and bias, [H]
        in the dtype of the arithmetic, or empty. All are contiguous. The same inputs give the same bits.
    """
    needed = need_weight_grad, need_bias_grad
    return _backward(grad_output, grad_sum, sum, weight, mean, rstd, seed, p, 0.0, input_dtype, needed)


def dropout_add_rms_norm_bwd(
    grad_output: torch.Tensor,
    grad_sum: torch.Tensor | None,
    sum: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    seed: torch.Tensor,
    p: float,
    offset: float,
    input_dtype: torch.dtype,
    need_weight_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `dropout_add_rms_norm_fwd`, whose roundings count as the identity; otherwise as those of LayerNorm.

    Returns:
        Gradients of input, residual and weight.
    """
    needed = need_weight_grad, False
    return _backward(grad_output, grad_sum, sum, weight, None, rstd, seed, p, offset, input_dtype, needed)[:3]


def _backward(
    grad_output: torch.Tensor,
    grad_sum: torch.Tensor | None,
    sum: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    seed: torch.Tensor,
    p: float,
    offset: float,
    input_dtype: torch.dtype,
    needed: tuple[bool, bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of input, residual, weight and bias; `needed`: of the last two."""
    columns, rows = sum.shape[-1], rstd.numel()
    grad_input = torch.empty(sum.shape, dtype=input_dtype, device=sum.device)
    grad_residual = torch.empty(sum.shape, dtype=sum.dtype, device=sum.device)
    compute = compute_dtype(grad_output, sum, weight)
    grad_weight, grad_bias = (torch.zeros(columns * need, dtype=compute, device=sum.device) for need in needed)
    if rows == 0 or columns == 0:
        return grad_input, grad_residual, grad_weight, grad_bias
    grad_matrix, grad_row_stride = as_rows(grad_output)
    grad_sum_matrix, grad_sum_row_stride = (None, 0) if grad_sum is None else as_rows(grad_sum)
    matrix, row_stride = as_rows(sum)
    weight = None if weight is None else weight.contiguous()
    tile = row_tile(BWD_TILING, columns, compute)
    tile_bytes = 3 * tile.rows * tile.columns * max(grad_output.itemsize, sum.itemsize)
    tiles_ahead = BWD_TILES_AHEAD if BWD_TILES_AHEAD * tile_bytes <= BWD_MOST_BYTES_AHEAD else 0
    programs = bwd_programs(-(-rows // tile.rows), tile.num_warps, sum.device, least=4)
    partials = [torch.empty(programs, columns, dtype=compute, device=sum.device) if need else None for need in needed]
    with torch.cuda.device_of(sum):
        dropout_add_norm_bwd_kernel[(programs,)](
            grad_matrix, grad_sum_matrix, matrix, weight, None if mean is None else mean.contiguous(),
            rstd.contiguous(), seed, grad_input, grad_residual, *partials, rows, columns, grad_row_stride,
            grad_sum_row_stride, row_stride, 1.0 / (1.0 - p), threshold(p), offset, TL_DTYPES[compute], tile.rows,
            tile.columns, tiles_ahead, num_warps=tile.num_warps, enable_fp_fusion=True,
        )  # fmt: skip
        for partial, total in zip(partials, (grad_weight, grad_bias), strict=True):
            if partial is not None:
                column_sum_kernel[(-(-columns // 16),)](
                    partial, total, programs, columns, 256, 16, num_warps=8, enable_fp_fusion=True
                )
    return grad_input, grad_residual, grad_weight, grad_bias


def row_tile(tiling: Tiling, columns: int, compute: torch.dtype) -> RowTile:
    """A tile of whole rows, at least as wide as the columns of one draw."""
    tile = tiling.row_tile(max(columns, COLUMNS), compute)
    if tile is None:
        raise ValueError(f"rows have at most {tiling.max_row_bytes // compute.itemsize} columns here, not {columns}")
    return tile
