"""RMSNorm over the last dimension, forward and backward (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467)."""

import torch
import triton
import triton.language as tl

from fuseopt.ops.rms_norm import cast_dtypes
from fuseopt.ops.triton.rows import TL_DTYPES, RowTile, Tiling, as_rows, compute_dtype, multiprocessor_count

# TUNED: measurement not recorded (c142e1e); `fuseopt bench ops --op rms_norm` measures it again.
FWD_TILING = Tiling(program_bytes=16 * 1024, thread_bytes=64, max_row_bytes=64 * 1024)
# Four rows are held at once: both inputs, the weight and its gradient.
BWD_TILING = Tiling(program_bytes=4 * 1024, thread_bytes=64, max_row_bytes=32 * 1024)
# Resident backward warps per multiprocessor. With loads in flight for BWD_STAGES tiles each, they hide memory latency.
# More warps would only add partial sums of the weight gradient.
BWD_WARPS = 16
BWD_STAGES = 3
# The smallest shared memory of a block among GPUs of compute capability 8.0 and later, less some for reductions.
BWD_STAGES_BYTES = 96 * 1024
# Piece of a row, and warps, of the kernels that loop over a wider row.
WIDE_BLOCK_BYTES = 32 * 1024
WIDE_WARPS = 16
# A float32 forward loops over rows of more bytes than this, in smaller pieces than above. As it holds no whole row in
# registers, a multiprocessor has room for its maximum of threads.
# TUNED: float32 over 4096 columns: as fast as Inductor and a copy (bc61c73).
WALKED_ROW_BYTES = 6 * 1024
WALKED_BLOCK_BYTES = 8 * 1024


@triton.jit
def rms_norm_fwd_kernel(
    input_ptr,  # [rows, columns], adjacent columns
    weight_ptr,  # [columns] or None
    output_ptr,  # [rows, columns], contiguous
    rstd_ptr,  # [rows] or None
    rows,
    columns,  # at most BLOCK_COLUMNS
    input_row_stride,  # elements from one row of input to the next
    eps: tl.float64,
    offset: tl.float64,  # added to the weight: 1 for Gemma
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    NORM_DTYPE: tl.constexpr,  # dtype that the normalised input is rounded to before the weight
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
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / columns + tl.full((), eps, COMPUTE))
    y = (x * rstd[:, None]).to(NORM_DTYPE).to(COMPUTE)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column_mask, other=0.0).to(COMPUTE)
        y *= (weight + tl.full((), offset, COMPUTE))[None, :]

    tl.store(output_ptr + row[:, None] * columns + column[None, :], y, mask=mask)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, mask=row_mask)


@triton.jit
def rms_norm_fwd_wide_kernel(
    input_ptr,  # [rows, columns], adjacent columns
    weight_ptr,  # [columns] or None
    output_ptr,  # [rows, columns], contiguous
    rstd_ptr,  # [rows] or None
    columns,
    input_row_stride,  # elements from one row of input to the next
    eps: tl.float64,
    offset: tl.float64,  # added to the weight: 1 for Gemma
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    NORM_DTYPE: tl.constexpr,  # dtype that the normalised input is rounded to before the weight
    BLOCK_COLUMNS: tl.constexpr,
):
    """Each program walks twice along one row that it does not hold; the second read comes from a cache."""
    row = tl.program_id(0).to(tl.int64)
    input_ptr += row * input_row_stride
    output_ptr += row * columns

    square_sum = tl.zeros((BLOCK_COLUMNS,), dtype=COMPUTE)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        x = tl.load(input_ptr + column, mask=column < columns, other=0.0, eviction_policy="evict_last").to(COMPUTE)
        square_sum += x * x
    rstd = tl.rsqrt(tl.sum(square_sum, axis=0) / columns + tl.full((), eps, COMPUTE))

    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        x = tl.load(input_ptr + column, mask=column < columns, other=0.0, eviction_policy="evict_first").to(COMPUTE)
        y = (x * rstd).to(NORM_DTYPE).to(COMPUTE)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(COMPUTE)
            y *= weight + tl.full((), offset, COMPUTE)
        tl.store(output_ptr + column, y, mask=column < columns)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd)


@triton.jit
def rms_norm_bwd_kernel(
    grad_output_ptr,  # [rows, columns], adjacent columns
    input_ptr,  # [rows, columns], adjacent columns
    weight_ptr,  # [columns] or None
    rstd_ptr,  # [rows]
    grad_input_ptr,  # [rows, columns], contiguous
    grad_weight_ptr,  # [programs, columns] in COMPUTE: each program's own sum over its rows; or None
    rows,
    columns,  # at most BLOCK_COLUMNS
    grad_output_row_stride,  # elements from one row of grad_output to the next
    input_row_stride,  # elements from one row of input to the next
    offset: tl.float64,  # added to the weight: 1 for Gemma
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,  # tiles whose loads are under way at a time, in shared memory; 1 for plain loads
):
    """Persistent: a program takes every num_programs-th tile of rows and keeps its weight gradient in registers."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK_COLUMNS)
    column_mask = column < columns
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column_mask, other=0.0).to(COMPUTE)
        weight += tl.full((), offset, COMPUTE)
    grad_weight = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=COMPUTE)

    for tile in tl.range(program, tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row_mask = row < rows
        mask = row_mask[:, None] & column_mask[None, :]
        dy = tl.load(
            grad_output_ptr + row[:, None] * grad_output_row_stride + column[None, :], mask=mask, other=0.0
        ).to(COMPUTE)
        x = tl.load(input_ptr + row[:, None] * input_row_stride + column[None, :], mask=mask, other=0.0).to(COMPUTE)
        rstd = tl.load(rstd_ptr + row, mask=row_mask, other=0.0).to(COMPUTE)[:, None]

        xhat = x * rstd
        if grad_weight_ptr is not None:
            grad_weight += dy * xhat
        if weight_ptr is not None:
            dy *= weight[None, :]
        projection = tl.sum(dy * xhat, axis=1) / columns
        dx = (dy - xhat * projection[:, None]) * rstd
        tl.store(grad_input_ptr + row[:, None] * columns + column[None, :], dx, mask=mask)

    if grad_weight_ptr is not None:
        partial_ptr = grad_weight_ptr + program.to(tl.int64) * columns
        tl.store(partial_ptr + column, tl.sum(grad_weight, axis=0), mask=column_mask)


@triton.jit
def rms_norm_bwd_wide_kernel(
    grad_output_ptr,  # [rows, columns], adjacent columns
    input_ptr,  # [rows, columns], adjacent columns
    weight_ptr,  # [columns] or None
    rstd_ptr,  # [rows]
    grad_input_ptr,  # [rows, columns], contiguous
    grad_weight_ptr,  # [programs, columns] in COMPUTE, zeros: each program's own sum over its rows; or None
    rows,
    columns,
    grad_output_row_stride,  # elements from one row of grad_output to the next
    input_row_stride,  # elements from one row of input to the next
    offset: tl.float64,  # added to the weight: 1 for Gemma
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    BLOCK_COLUMNS: tl.constexpr,
):
    """Persistent, walking twice along each row too wide for registers; the weight gradient is summed in memory."""
    program = tl.program_id(0)
    for row_index in range(program, rows, tl.num_programs(0)):
        row = tl.cast(row_index, tl.int64)
        rstd = tl.load(rstd_ptr + row).to(COMPUTE)

        products = tl.zeros((BLOCK_COLUMNS,), dtype=COMPUTE)
        for start in range(0, columns, BLOCK_COLUMNS):
            column = start + tl.arange(0, BLOCK_COLUMNS)
            mask = column < columns
            dy = tl.load(grad_output_ptr + row * grad_output_row_stride + column, mask=mask, other=0.0).to(COMPUTE)
            x = tl.load(input_ptr + row * input_row_stride + column, mask=mask, other=0.0).to(COMPUTE)
            if weight_ptr is not None:
                weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(COMPUTE)
                dy *= weight + tl.full((), offset, COMPUTE)
            products += dy * x
        projection = tl.sum(products, axis=0) * rstd / columns

        for start in range(0, columns, BLOCK_COLUMNS):
            column = start + tl.arange(0, BLOCK_COLUMNS)
            mask = column < columns
            dy = tl.load(grad_output_ptr + row * grad_output_row_stride + column, mask=mask, other=0.0).to(COMPUTE)
            x = tl.load(input_ptr + row * input_row_stride + column, mask=mask, other=0.0).to(COMPUTE)
            xhat = x * rstd
            if grad_weight_ptr is not None:
                partial_ptr = grad_weight_ptr + program.to(tl.int64) * columns + column
                grad_weight = tl.load(partial_ptr, mask=mask, other=0.0)
                tl.store(partial_ptr, grad_weight + dy * xhat, mask=mask)
            if weight_ptr is not None:
                weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(COMPUTE)
                dy *= weight + tl.full((), offset, COMPUTE)
            dx = (dy - xhat * projection) * rstd
            tl.store(grad_input_ptr + row * columns + column, dx, mask=mask)


@triton.jit
def column_sum_kernel(
    input_ptr,  # [rows, columns], contiguous
    output_ptr,  # [columns]
    rows,
    columns,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Each program adds up BLOCK_COLUMNS columns, in an order that depends on nothing but the shape of input."""
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=input_ptr.dtype.element_ty)
    for start in range(0, rows, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        total += tl.load(input_ptr + row[:, None].to(tl.int64) * columns + column[None, :], mask=mask, other=0.0)
    tl.store(output_ptr + column, tl.sum(total, axis=0), mask=column < columns)


def bwd_programs(tiles: int, num_warps: int, device: torch.device, *, least: int = 1) -> int:
    """Number of programs: BWD_WARPS warps and at least `least` programs per multiprocessor, at most one per tile."""
    return min(tiles, multiprocessor_count(device) * max(least, BWD_WARPS // num_warps))


def held_tile(columns: int, dtype: torch.dtype, compute: torch.dtype) -> RowTile | None:
    """The tile by which a norm's forward holds rows of `dtype`, or None where it walks along them."""
    walks = dtype == torch.float32 and columns * dtype.itemsize > WALKED_ROW_BYTES
    return None if walks else FWD_TILING.row_tile(columns, compute)


def _walk(row_bytes: int) -> tuple[int, int]:
    """The bytes of the pieces by which a forward walks along a row, and its warps."""
    if row_bytes > WIDE_BLOCK_BYTES:
        return WIDE_BLOCK_BYTES, WIDE_WARPS
    return WALKED_BLOCK_BYTES, WIDE_WARPS if row_bytes > WALKED_BLOCK_BYTES else WIDE_WARPS // 2


def rms_norm(
    input: torch.Tensor, weight: torch.Tensor | None, eps: float, cast_order: int = 0, offset: float = 0.0
) -> torch.Tensor:
    """The output of `rms_norm_fwd` alone."""
    return _forward(input, weight, eps, cast_order, offset, None)


def rms_norm_fwd(
    input: torch.Tensor, weight: torch.Tensor | None, eps: float, cast_order: int = 0, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over the last dimension: `round_to(norm_dtype, input * rstd) * (weight + offset)`.

    Args:
        input: [*, H], any strides; float32, float16, bfloat16 or float64.
        weight: [H] in any of these dtypes; None leaves out the offset, too.
        eps: added to the mean of squares, `rstd = rsqrt(mean(input * input) + eps)`.
        cast_order: of `ops.rms_norm.CAST_ORDERS`: which dtypes the normalised input and the output are rounded to.
        offset: added to the weight.

    Returns:
        The output [*, H], contiguous, and rstd [*] in float32 (float64 for a float64 input).
        Arithmetic is in float32, or float64 when input or weight is.
    """
    rstd_dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    rstd = torch.empty(input.shape[:-1], dtype=rstd_dtype, device=input.device)
    return _forward(input, weight, eps, cast_order, offset, rstd), rstd


def _forward(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    cast_order: int,
    offset: float,
    rstd: torch.Tensor | None,
) -> torch.Tensor:
    """The output; writes `rstd` unless it is None."""
    columns = input.shape[-1]
    if weight is not None and weight.shape != input.shape[-1:]:
        raise RuntimeError(f"weight must have shape ({columns},), not {tuple(weight.shape)}")
    rows = input.shape[:-1].numel()
    norm_dtype, output_dtype = cast_dtypes(cast_order, input.dtype, None if weight is None else weight.dtype)
    output = torch.empty(input.shape, dtype=output_dtype, device=input.device)
    if rows == 0 or columns == 0:
        if rstd is not None:
            rstd.fill_(float("nan"))
        return output

    matrix, row_stride = as_rows(input)
    weight = None if weight is None else weight.contiguous()
    compute = compute_dtype(input, weight)
    tile = held_tile(columns, input.dtype, compute)
    with torch.cuda.device_of(input):
        if tile is not None:
            rms_norm_fwd_kernel[(-(-rows // tile.rows),)](
                matrix, weight, output, rstd, rows, columns, row_stride, eps, offset,
                TL_DTYPES[compute], TL_DTYPES[norm_dtype], tile.rows, tile.columns,
                num_warps=tile.num_warps, enable_fp_fusion=True,
            )  # fmt: skip
        else:
            block_bytes, num_warps = _walk(columns * compute.itemsize)
            rms_norm_fwd_wide_kernel[(rows,)](
                matrix, weight, output, rstd, columns, row_stride, eps, offset,
                TL_DTYPES[compute], TL_DTYPES[norm_dtype], block_bytes // compute.itemsize,
                num_warps=num_warps, enable_fp_fusion=True,
            )  # fmt: skip
    return output


def rms_norm_bwd(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    need_weight_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `rms_norm_fwd`; its roundings count as the identity.

    Args:
        grad_output: [*, H], any strides; float32, float16, bfloat16 or float64.
        input, weight, offset: as given to the forward.
        rstd: [*], as the forward returned it.
        need_weight_grad: whether to compute the gradient of the weight.

    Returns:
        grad_input [*, H], contiguous, in input's dtype; grad_weight [H] in weight's dtype, or an empty [0] tensor.
        The same inputs give the same bits: a program sums the weight gradient over rows of its own, in order, and
        the programs' sums are added up in a second step.
    """
    columns = input.shape[-1]
    rows = rstd.numel()
    grad_input = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    with_weight = need_weight_grad and weight is not None
    grad_weight = torch.empty(
        columns if with_weight else 0, dtype=input.dtype if weight is None else weight.dtype, device=input.device
    )
    if rows == 0 or columns == 0:
        return grad_input, grad_weight.zero_()

    grad_matrix, grad_row_stride = as_rows(grad_output)
    matrix, row_stride = as_rows(input)
    rstd = rstd.contiguous()
    weight = None if weight is None else weight.contiguous()
    compute = compute_dtype(grad_output, input, weight)
    tile = BWD_TILING.row_tile(columns, compute)
    if tile is not None:
        programs = bwd_programs(-(-rows // tile.rows), tile.num_warps, input.device)
        new_partial = torch.empty
    else:
        programs = bwd_programs(rows, WIDE_WARPS, input.device)
        new_partial = torch.zeros
    partial = new_partial((programs, columns), dtype=compute, device=input.device) if with_weight else None

    with torch.cuda.device_of(input):
        if tile is not None:
            staged_bytes = (BWD_STAGES - 1) * tile.rows * tile.columns * (grad_matrix.itemsize + matrix.itemsize)
            rms_norm_bwd_kernel[(programs,)](
                grad_matrix, matrix, weight, rstd, grad_input, partial, rows, columns, grad_row_stride, row_stride,
                offset, TL_DTYPES[compute], tile.rows, tile.columns,
                BWD_STAGES if staged_bytes <= BWD_STAGES_BYTES else 1, num_warps=tile.num_warps, enable_fp_fusion=True,
            )  # fmt: skip
        else:
            rms_norm_bwd_wide_kernel[(programs,)](
                grad_matrix, matrix, weight, rstd, grad_input, partial, rows, columns, grad_row_stride, row_stride,
                offset, TL_DTYPES[compute], WIDE_BLOCK_BYTES // compute.itemsize,
                num_warps=WIDE_WARPS, enable_fp_fusion=True,
            )  # fmt: skip
        if partial is not None:
            column_sum_kernel[(-(-columns // 16),)](
                partial, grad_weight, programs, columns, 256, 16, num_warps=8, enable_fp_fusion=True
            )
    return grad_input, grad_weight
