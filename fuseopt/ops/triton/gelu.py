"""GELU of the sum with a bias, and its gradients, in one pass each."""

import torch
import triton
import triton.language as tl

from fuseopt.ops.triton.elementwise import NUM_WARPS, activation, as_matrices, tile_places
from fuseopt.ops.triton.rms_norm import bwd_programs, column_sum_kernel
from fuseopt.ops.triton.rows import TL_DTYPES, compute_dtype


@triton.jit
def gelu_fwd_kernel(
    input_ptr,  # [rows, columns], adjacent columns
    bias_ptr,  # [columns] or None
    output_ptr,  # [rows, columns], contiguous
    rows,
    columns,
    input_row_stride,  # elements from one row of input to the next
    column_tiles,
    ACTIVATION: tl.constexpr,
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Each program takes one tile."""
    tile = tl.program_id(0)
    row, column, mask = tile_places(tile // column_tiles, tile % column_tiles, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
    x = tl.load(input_ptr + row * input_row_stride + column, mask=mask, other=0.0).to(COMPUTE)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(COMPUTE)
    value, _ = activation(x, ACTIVATION)
    tl.store(output_ptr + row * columns + column, value, mask=mask)


@triton.jit
def gelu_bwd_kernel(
    grad_output_ptr,  # [rows, columns], adjacent columns
    input_ptr,  # [rows, columns], adjacent columns
    bias_ptr,  # [columns] or None
    grad_input_ptr,  # [rows, columns], contiguous
    grad_bias_ptr,  # [shares, columns] in COMPUTE: the sum over each share of the rows; or None
    rows,
    columns,
    grad_output_row_stride,  # elements from one row of grad_output to the next
    input_row_stride,  # the same for input
    column_tiles,
    ACTIVATION: tl.constexpr,
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Each program takes BLOCK_COLUMNS columns of one share of the rows."""
    share, column_tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    tiles = tl.cdiv(row_tiles, tl.num_programs(0) // column_tiles)
    grad_bias = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=COMPUTE)
    for row_tile in tl.range(share * tiles, tl.minimum(share * tiles + tiles, row_tiles)):
        row, column, mask = tile_places(row_tile, column_tile, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
        x = tl.load(input_ptr + row * input_row_stride + column, mask=mask, other=0.0).to(COMPUTE)
        dy = tl.load(grad_output_ptr + row * grad_output_row_stride + column, mask=mask, other=0.0).to(COMPUTE)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(COMPUTE)
        _, derivative = activation(x, ACTIVATION)
        dx = dy * derivative
        tl.store(grad_input_ptr + row * columns + column, dx, mask=mask)
        if grad_bias_ptr is not None:
            grad_bias += tl.where(mask, dx, 0.0)
    if grad_bias_ptr is not None:
        column = tl.cast(column_tile, tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        place = grad_bias_ptr + tl.cast(share, tl.int64) * columns + column
        tl.store(place, tl.sum(grad_bias, axis=0), mask=column < columns)


def gelu_fwd(
    input: torch.Tensor,
    tanh: bool = False,
    bias: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`GELU(input + bias)`.

    Args:
        input: [*, H], any strides; float32, float16, bfloat16 or float64.
        tanh: the tanh approximation in place of the error function.
        bias: [H] in any of these dtypes, or None.
        output_dtype: the result's; input's by default.

    Returns:
        [*, H], contiguous. Arithmetic is in float32, or float64 where a tensor or the result is.
    """
    check_bias(bias, input)
    output = torch.empty(input.shape, dtype=output_dtype or input.dtype, device=input.device)
    if output.numel() == 0:
        return output
    matrices = as_matrices(input, by_columns=bias is not None)
    with torch.cuda.device_of(input):
        gelu_fwd_kernel[(matrices.row_tiles * matrices.column_tiles,)](
            *matrices.tensors, None if bias is None else bias.contiguous(), output, matrices.rows, matrices.columns,
            *matrices.row_strides, matrices.column_tiles, activation_name(tanh),
            TL_DTYPES[compute_dtype(input, bias, output)], matrices.block_rows, matrices.block_columns,
            num_warps=NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    return output


def gelu_bwd(
    grad_output: torch.Tensor, input: torch.Tensor, tanh: bool = False, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The gradient of `input`.

    Args:
        grad_output: [*, H], any strides; float32, float16, bfloat16 or float64.
        input, tanh, bias: as given to the forward.

    Returns:
        [*, H], contiguous, in input's dtype.
    """
    return _backward(grad_output, input, tanh, bias, need_bias_grad=False)[0]


def gelu_bias_bwd(
    grad_output: torch.Tensor, input: torch.Tensor, tanh: bool, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gelu_bwd`, and the gradient of `bias` [H] in its dtype: its rows are summed before they are rounded.

    The same inputs give the same bits.
    """
    grad_input, grad_bias = _backward(grad_output, input, tanh, bias, need_bias_grad=True)
    return grad_input, grad_bias.to(bias.dtype)


def _backward(
    grad_output: torch.Tensor, input: torch.Tensor, tanh: bool, bias: torch.Tensor | None, *, need_bias_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of input and, in the dtype of the arithmetic, of bias; an empty one unless it is needed."""
    check_bias(bias, input)
    grad_input = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    compute = compute_dtype(grad_output, input, bias)
    width = input.shape[-1] if need_bias_grad else 0
    grad_bias = torch.zeros(width, dtype=compute, device=input.device)
    if input.numel() == 0:
        return grad_input, grad_bias
    matrices = as_matrices(grad_output, input, by_columns=bias is not None)
    shares, partial = matrices.row_tiles, None
    if need_bias_grad:
        programs = bwd_programs(matrices.row_tiles * matrices.column_tiles, NUM_WARPS, input.device)
        shares = max(programs // matrices.column_tiles, 1)
        partial = torch.empty((shares, matrices.columns), dtype=compute, device=input.device)
    with torch.cuda.device_of(input):
        gelu_bwd_kernel[(shares * matrices.column_tiles,)](
            *matrices.tensors, None if bias is None else bias.contiguous(), grad_input, partial, matrices.rows,
            matrices.columns, *matrices.row_strides, matrices.column_tiles, activation_name(tanh), TL_DTYPES[compute],
            matrices.block_rows, matrices.block_columns, num_warps=NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
        if partial is not None:
            column_sum_kernel[(-(-matrices.columns // 16),)](
                partial, grad_bias, shares, matrices.columns, 256, 16, num_warps=8, enable_fp_fusion=True
            )
    return grad_input, grad_bias


def activation_name(tanh: bool) -> str:
    return "gelu_tanh" if tanh else "gelu"


def check_bias(bias: torch.Tensor | None, input: torch.Tensor) -> None:
    if bias is not None and bias.shape != input.shape[-1:]:
        raise RuntimeError(f"bias must have shape {tuple(input.shape[-1:])}, not {tuple(bias.shape)}")
