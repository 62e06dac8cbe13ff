"""LayerNorm over the last dimension, forward and backward (Ba, Kiros and Hinton, 2016, arXiv 1607.06450)."""

import torch
import triton
import triton.language as tl

from fuseopt.ops.triton.rms_norm import WIDE_WARPS, bwd_programs, column_sum_kernel, held_tile
from fuseopt.ops.triton.rows import TL_DTYPES, Tiling, as_rows, compute_dtype

# Five rows are held at once: both inputs, the weight, and the gradients of weight and bias.
# TUNED: measurement not recorded (c142e1e); `fuseopt bench ops --op layer_norm` measures it again.
BWD_TILING = Tiling(program_bytes=4 * 1024, thread_bytes=64, max_row_bytes=32 * 1024)
# Piece of a wider row that is taken at a time, and in the forward how much of it by a warp.
# TUNED: float32 over 4096 columns: a warp per 1 KiB gains 1% on an H100 and loses 12% on an H200 (64347c2, 6aa03a2).
WALKED_BLOCK_BYTES = 16 * 1024
WALKED_WARP_BYTES = 2 * 1024


@triton.jit
def layer_norm_fwd_kernel(
    input_ptr,  # [rows, columns], adjacent columns
    weight_ptr,  # [columns] or None
    bias_ptr,  # [columns] or None
    output_ptr,  # [rows, columns], contiguous
    mean_ptr,  # [rows] or None
    rstd_ptr,  # [rows] or None, as mean_ptr
    rows,
    columns,  # at most BLOCK_COLUMNS
    input_row_stride,  # elements from one row of input to the next
    eps: tl.float64,
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Each program normalises BLOCK_ROWS whole rows, held in registers: one read, one write."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    row_mask = row < rows
    column_mask = column < columns
    mask = row_mask[:, None] & column_mask[None, :]

    x = tl.load(input_ptr + row[:, None] * input_row_stride + column[None, :], mask=mask, other=0.0).to(COMPUTE)
    mean = tl.sum(x, axis=1) / columns
    x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / columns + tl.full((), eps, COMPUTE))
    y = x * rstd[:, None]
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + column, mask=column_mask, other=0.0).to(COMPUTE)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(COMPUTE)[None, :]

    tl.store(output_ptr + row[:, None] * columns + column[None, :], y, mask=mask)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean, mask=row_mask)
        tl.store(rstd_ptr + row, rstd, mask=row_mask)


@triton.jit
def layer_norm_fwd_wide_kernel(
    input_ptr,  # [rows, columns], adjacent columns
    weight_ptr,  # [columns] or None
    bias_ptr,  # [columns] or None
    output_ptr,  # [rows, columns], contiguous
    mean_ptr,  # [rows] or None
    rstd_ptr,  # [rows] or None, as mean_ptr
    columns,
    input_row_stride,  # elements from one row of input to the next
    eps: tl.float64,
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    BLOCK_COLUMNS: tl.constexpr,
):
    """Each program walks twice along one row that it does not hold; the second read comes from a cache.

    Sums are of distances from the mean of the first BLOCK_COLUMNS elements, which is at most the root of columns /
    BLOCK_COLUMNS deviations from the row's: a variance is not lost in its mean, wherever the row begins.
    """
    row = tl.program_id(0).to(tl.int64)
    input_ptr += row * input_row_stride
    output_ptr += row * columns

    lane = tl.arange(0, BLOCK_COLUMNS)
    x = tl.load(input_ptr + lane, mask=lane < columns, other=0.0, eviction_policy="evict_last").to(COMPUTE)
    pivot = tl.sum(x, axis=0) / tl.minimum(columns, BLOCK_COLUMNS)
    distances = tl.where(lane < columns, x - pivot, 0.0)
    squares = distances * distances
    for start in range(BLOCK_COLUMNS, columns, BLOCK_COLUMNS):
        column = start + lane
        x = tl.load(input_ptr + column, mask=column < columns, other=0.0, eviction_policy="evict_last").to(COMPUTE)
        distance = tl.where(column < columns, x - pivot, 0.0)
        distances += distance
        squares += distance * distance
    # In one reduction, which waits for all warps once.
    distance, square = tl.split(tl.sum(tl.join(distances, squares), axis=0) / columns)
    mean = pivot + distance
    variance = tl.where(square == float("inf"), square, tl.maximum(square - distance * distance, 0.0))
    rstd = tl.rsqrt(variance + tl.full((), eps, COMPUTE))

    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + lane
        x = tl.load(input_ptr + column, mask=column < columns, other=0.0, eviction_policy="evict_first").to(COMPUTE)
        y = (x - mean) * rstd
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0, eviction_policy="evict_last")
            y *= weight.to(COMPUTE)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0, eviction_policy="evict_last")
            y += bias.to(COMPUTE)
        tl.store(output_ptr + column, y, mask=column < columns)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean)
        tl.store(rstd_ptr + row, rstd)


@triton.jit
def layer_norm_bwd_kernel(
    grad_output_ptr,  # [rows, columns], adjacent columns
    input_ptr,  # [rows, columns], adjacent columns
    weight_ptr,  # [columns] or None
    mean_ptr,  # [rows]
    rstd_ptr,  # [rows]
    grad_input_ptr,  # [rows, columns], contiguous
    grad_weight_ptr,  # [programs, columns] in COMPUTE: each program's own sum over its rows; or None
    grad_bias_ptr,  # likewise
    rows,
    columns,  # at most BLOCK_COLUMNS
    grad_output_row_stride,  # elements from one row of grad_output to the next
    input_row_stride,  # elements from one row of input to the next
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Persistent: a program takes every num_programs-th tile of rows and keeps its sums over rows in registers."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK_COLUMNS)
    column_mask = column < columns
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column_mask, other=0.0).to(COMPUTE)
    grad_weight = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=COMPUTE)
    grad_bias = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=COMPUTE)

    for tile in range(program, tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row_mask = row < rows
        mask = row_mask[:, None] & column_mask[None, :]
        dy = tl.load(
            grad_output_ptr + row[:, None] * grad_output_row_stride + column[None, :], mask=mask, other=0.0
        ).to(COMPUTE)
        x = tl.load(input_ptr + row[:, None] * input_row_stride + column[None, :], mask=mask, other=0.0).to(COMPUTE)
        mean = tl.load(mean_ptr + row, mask=row_mask, other=0.0).to(COMPUTE)[:, None]
        rstd = tl.load(rstd_ptr + row, mask=row_mask, other=0.0).to(COMPUTE)[:, None]

        xhat = tl.where(mask, (x - mean) * rstd, 0.0)
        if grad_weight_ptr is not None:
            grad_weight += dy * xhat
        if grad_bias_ptr is not None:
            grad_bias += dy
        if weight_ptr is not None:
            dy *= weight[None, :]
        projection = tl.sum(dy * xhat, axis=1) / columns
        dy -= (tl.sum(dy, axis=1) / columns)[:, None]
        dx = (dy - xhat * projection[:, None]) * rstd
        tl.store(grad_input_ptr + row[:, None] * columns + column[None, :], dx, mask=mask)

    partial = program.to(tl.int64) * columns + column
    if grad_weight_ptr is not None:
        tl.store(grad_weight_ptr + partial, tl.sum(grad_weight, axis=0), mask=column_mask)
    if grad_bias_ptr is not None:
        tl.store(grad_bias_ptr + partial, tl.sum(grad_bias, axis=0), mask=column_mask)


@triton.jit
def layer_norm_bwd_wide_kernel(
    grad_output_ptr,  # [rows, columns], adjacent columns
    input_ptr,  # [rows, columns], adjacent columns
    weight_ptr,  # [columns] or None
    mean_ptr,  # [rows]
    rstd_ptr,  # [rows]
    grad_input_ptr,  # [rows, columns], contiguous
    grad_weight_ptr,  # [programs, columns] in COMPUTE, zeros: each program's own sum over its rows; or None
    grad_bias_ptr,  # likewise
    rows,
    columns,
    grad_output_row_stride,  # elements from one row of grad_output to the next
    input_row_stride,  # elements from one row of input to the next
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    BLOCK_COLUMNS: tl.constexpr,
):
    """Persistent, walking twice along each row too wide for registers; sums over rows are kept in memory."""
    program = tl.program_id(0)
    for row_index in range(program, rows, tl.num_programs(0)):
        row = tl.cast(row_index, tl.int64)
        mean = tl.load(mean_ptr + row).to(COMPUTE)
        rstd = tl.load(rstd_ptr + row).to(COMPUTE)

        products = tl.zeros((BLOCK_COLUMNS,), dtype=COMPUTE)
        gradients = tl.zeros((BLOCK_COLUMNS,), dtype=COMPUTE)
        for start in range(0, columns, BLOCK_COLUMNS):
            column = start + tl.arange(0, BLOCK_COLUMNS)
            mask = column < columns
            dy = tl.load(grad_output_ptr + row * grad_output_row_stride + column, mask=mask, other=0.0).to(COMPUTE)
            x = tl.load(input_ptr + row * input_row_stride + column, mask=mask, other=0.0).to(COMPUTE)
            if weight_ptr is not None:
                dy *= tl.load(weight_ptr + column, mask=mask, other=0.0).to(COMPUTE)
            products += dy * ((x - mean) * rstd)
            gradients += dy
        projection = tl.sum(products, axis=0) / columns
        gradient = tl.sum(gradients, axis=0) / columns

        for start in range(0, columns, BLOCK_COLUMNS):
            column = start + tl.arange(0, BLOCK_COLUMNS)
            mask = column < columns
            dy = tl.load(grad_output_ptr + row * grad_output_row_stride + column, mask=mask, other=0.0).to(COMPUTE)
            x = tl.load(input_ptr + row * input_row_stride + column, mask=mask, other=0.0).to(COMPUTE)
            xhat = (x - mean) * rstd
            partial = program.to(tl.int64) * columns + column
            if grad_weight_ptr is not None:
                grad_weight = tl.load(grad_weight_ptr + partial, mask=mask, other=0.0)
                tl.store(grad_weight_ptr + partial, grad_weight + dy * xhat, mask=mask)
            if grad_bias_ptr is not None:
                grad_bias = tl.load(grad_bias_ptr + partial, mask=mask, other=0.0)
                tl.store(grad_bias_ptr + partial, grad_bias + dy, mask=mask)
            if weight_ptr is not None:
                dy *= tl.load(weight_ptr + column, mask=mask, other=0.0).to(COMPUTE)
            dx = (dy - gradient - xhat * projection) * rstd
            tl.store(grad_input_ptr + row * columns + column, dx, mask=mask)


def layer_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The output of `layer_norm_fwd` alone."""
    return _forward(input, weight, bias, eps, output_dtype, None, None)


def layer_norm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """LayerNorm over the last dimension: `(input - mean) * rstd * weight + bias`.

    Args:
        input: [*, H], any strides; float32, float16, bfloat16 or float64.
        weight, bias: [H] in any of these dtypes, or None.
        eps: added to the variance, `rstd = rsqrt(mean((input - mean)**2) + eps)`.
        output_dtype: dtype of the output; the input's by default.

    Returns:
        The output [*, H], contiguous; mean and rstd [*] in float32 (float64 for a float64 input).
        Arithmetic is in float32, or float64 when input, weight or bias is.
    """
    mean = torch.empty(input.shape[:-1], dtype=compute_dtype(input), device=input.device)
    rstd = torch.empty_like(mean)
    return _forward(input, weight, bias, eps, output_dtype, mean, rstd), mean, rstd


def _forward(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    output_dtype: torch.dtype | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor | None,
) -> torch.Tensor:
    """The output; writes `mean` and `rstd` unless they are None."""
    columns = input.shape[-1]
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != input.shape[-1:]:
            raise RuntimeError(f"{name} must have shape ({columns},), not {tuple(parameter.shape)}")
    rows = input.shape[:-1].numel()
    output = torch.empty(input.shape, dtype=output_dtype or input.dtype, device=input.device)
    if rows == 0 or columns == 0:
        for statistic in (mean, rstd):
            if statistic is not None:
                statistic.fill_(float("nan"))
        return output

    matrix, row_stride = as_rows(input)
    weight, bias = (None if parameter is None else parameter.contiguous() for parameter in (weight, bias))
    compute = compute_dtype(input, weight, bias)
    tile = held_tile(columns, input.dtype, compute)
    with torch.cuda.device_of(input):
        if tile is not None:
            layer_norm_fwd_kernel[(-(-rows // tile.rows),)](
                matrix, weight, bias, output, mean, rstd, rows, columns, row_stride, eps,
                TL_DTYPES[compute], tile.rows, tile.columns, num_warps=tile.num_warps, enable_fp_fusion=True,
            )  # fmt: skip
        else:
            block = min(triton.next_power_of_2(columns), WALKED_BLOCK_BYTES // compute.itemsize)
            layer_norm_fwd_wide_kernel[(rows,)](
                matrix, weight, bias, output, mean, rstd, columns, row_stride, eps,
                TL_DTYPES[compute], block, num_warps=block * compute.itemsize // WALKED_WARP_BYTES,
                enable_fp_fusion=True,
            )  # fmt: skip
    return output


def layer_norm_bwd(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    need_weight_grad: bool,
    need_bias_grad: bool,
    bias_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `layer_norm_fwd`.

    Args:
        grad_output: [*, H], any strides; float32, float16, bfloat16 or float64.
        input, weight: as given to the forward.
        mean, rstd: [*], as the forward returned them.
        need_weight_grad, need_bias_grad: whether to compute these.
        bias_dtype: dtype of the gradient of bias; by default that of the gradient of weight.

    Returns:
        grad_input [*, H], contiguous, in input's dtype; the gradient of weight [H], in weight's dtype or, without a
        weight, input's; the gradient of bias [H], in `bias_dtype`. Gradients that are not needed are empty [0]. The
        same inputs give the same bits: a program sums over rows of its own, in order, and the programs' sums are added
        up in a second step.
    """
    columns, rows = input.shape[-1], rstd.numel()
    grad_input = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    needed, dtype = (need_weight_grad, need_bias_grad), input.dtype if weight is None else weight.dtype
    grad_weight, grad_bias = (
        torch.empty(columns * need, dtype=own_dtype, device=input.device)
        for need, own_dtype in zip(needed, (dtype, bias_dtype or dtype), strict=True)
    )
    if rows == 0 or columns == 0:
        return grad_input, grad_weight.zero_(), grad_bias.zero_()

    grad_matrix, grad_row_stride = as_rows(grad_output)
    matrix, row_stride = as_rows(input)
    mean, rstd = mean.contiguous(), rstd.contiguous()
    weight = None if weight is None else weight.contiguous()
    compute = compute_dtype(grad_output, input, weight)
    tile = BWD_TILING.row_tile(columns, compute)
    if tile is not None:
        programs = bwd_programs(-(-rows // tile.rows), tile.num_warps, input.device)
        new_partial = torch.empty
    else:
        programs = bwd_programs(rows, WIDE_WARPS, input.device)
        new_partial = torch.zeros
    partials = [
        new_partial((programs, columns), dtype=compute, device=input.device) if need else None for need in needed
    ]
    arguments = (
        grad_matrix,
        matrix,
        weight,
        mean,
        rstd,
        grad_input,
        *partials,
        rows,
        columns,
        grad_row_stride,
        row_stride,
    )
    with torch.cuda.device_of(input):
        if tile is not None:
            layer_norm_bwd_kernel[(programs,)](
                *arguments, TL_DTYPES[compute], tile.rows, tile.columns, num_warps=tile.num_warps, enable_fp_fusion=True
            )
        else:
            layer_norm_bwd_wide_kernel[(programs,)](
                *arguments, TL_DTYPES[compute], WALKED_BLOCK_BYTES // compute.itemsize, num_warps=WIDE_WARPS,
                enable_fp_fusion=True,
            )  # fmt: skip
        for partial, total in zip(partials, (grad_weight, grad_bias), strict=True):
            if partial is not None:
                column_sum_kernel[(-(-columns // 16),)](
                    partial, total, programs, columns, 256, 16, num_warps=8, enable_fp_fusion=True
                )
    return grad_input, grad_weight, grad_bias
