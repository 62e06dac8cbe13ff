"""`activation(gate) * up` and its gradients in one pass each; the backward computes the activation again."""

import torch
import triton
import triton.language as tl

from fuseopt.ops.gated_activation import ACTIVATIONS
from fuseopt.ops.triton.elementwise import NUM_WARPS, activation, as_matrices, tile_places
from fuseopt.ops.triton.rows import TL_DTYPES, compute_dtype


@triton.jit
def gated_activation_fwd_kernel(
    gate_ptr,  # [rows, columns], adjacent columns
    up_ptr,  # [rows, columns], adjacent columns
    output_ptr,  # [rows, columns], contiguous
    rows,
    columns,
    gate_row_stride,  # elements from one row of gate to the next
    up_row_stride,  # the same for up
    column_tiles,
    ACTIVATION: tl.constexpr,
    ROUNDED: tl.constexpr,  # dtype that the activation is rounded to
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Each program takes one tile."""
    tile = tl.program_id(0)
    row, column, mask = tile_places(tile // column_tiles, tile % column_tiles, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
    gate = tl.load(gate_ptr + row * gate_row_stride + column, mask=mask, other=0.0).to(COMPUTE)
    up = tl.load(up_ptr + row * up_row_stride + column, mask=mask, other=0.0).to(COMPUTE)
    value, _ = activation(gate, ACTIVATION)
    tl.store(output_ptr + row * columns + column, value.to(ROUNDED).to(COMPUTE) * up, mask=mask)


@triton.jit
def gated_activation_bwd_kernel(
    grad_output_ptr,  # [rows, columns], adjacent columns
    gate_ptr,  # [rows, columns], adjacent columns
    up_ptr,  # [rows, columns], adjacent columns
    grad_gate_ptr,  # [rows, columns], contiguous
    grad_up_ptr,  # [rows, columns], contiguous
    rows,
    columns,
    grad_output_row_stride,  # elements from one row of grad_output to the next
    gate_row_stride,  # the same for gate
    up_row_stride,  # the same for up
    column_tiles,
    ACTIVATION: tl.constexpr,
    ROUNDED: tl.constexpr,  # dtype that the activation and its gradient are rounded to
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Each program takes one tile."""
    tile = tl.program_id(0)
    row, column, mask = tile_places(tile // column_tiles, tile % column_tiles, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
    grad = tl.load(grad_output_ptr + row * grad_output_row_stride + column, mask=mask, other=0.0).to(COMPUTE)
    gate = tl.load(gate_ptr + row * gate_row_stride + column, mask=mask, other=0.0).to(COMPUTE)
    up = tl.load(up_ptr + row * up_row_stride + column, mask=mask, other=0.0).to(COMPUTE)
    value, derivative = activation(gate, ACTIVATION)
    place = row * columns + column
    tl.store(grad_gate_ptr + place, (grad * up).to(ROUNDED).to(COMPUTE) * derivative, mask=mask)
    tl.store(grad_up_ptr + place, grad * value.to(ROUNDED).to(COMPUTE), mask=mask)


def gated_activation_fwd(
    gate: torch.Tensor, up: torch.Tensor, activation: int, activation_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`activation(gate) * up`, the activation rounded to `activation_dtype` on the way.

    Args:
        gate, up: [*, H], any strides; float32, float16, bfloat16 or float64, each its own.
        activation: its place in `ACTIVATIONS`.
        activation_dtype: gate's by default.

    Returns:
        [*, H], contiguous, in the dtype that `activation_dtype` and up's promote to. Arithmetic is in float32, or
        float64 where a tensor or the result is.
    """
    check_up(up, gate)
    rounded = activation_dtype or gate.dtype
    output = torch.empty(gate.shape, dtype=torch.promote_types(rounded, up.dtype), device=gate.device)
    if output.numel() == 0:
        return output
    matrices = as_matrices(gate, up)
    with torch.cuda.device_of(gate):
        gated_activation_fwd_kernel[(matrices.row_tiles * matrices.column_tiles,)](
            *matrices.tensors, output, matrices.rows, matrices.columns, *matrices.row_strides, matrices.column_tiles,
            NAMES[activation], TL_DTYPES[rounded], TL_DTYPES[compute_dtype(gate, up, output)],
            matrices.block_rows, matrices.block_columns, num_warps=NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    return output


def gated_activation_bwd(
    grad_output: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: int,
    activation_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up.

    Args:
        grad_output: [*, H], any strides; float32, float16, bfloat16 or float64.
        gate, up, activation, activation_dtype: as given to the forward.

    Returns:
        [*, H], contiguous, in the dtypes of gate and up.
    """
    check_up(up, gate)
    grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grad_up = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    if grad_gate.numel() == 0:
        return grad_gate, grad_up
    rounded = activation_dtype or gate.dtype
    matrices = as_matrices(grad_output, gate, up)
    with torch.cuda.device_of(gate):
        gated_activation_bwd_kernel[(matrices.row_tiles * matrices.column_tiles,)](
            *matrices.tensors, grad_gate, grad_up, matrices.rows, matrices.columns, *matrices.row_strides,
            matrices.column_tiles, NAMES[activation], TL_DTYPES[rounded],
            TL_DTYPES[compute_dtype(grad_output, gate, up)], matrices.block_rows, matrices.block_columns,
            num_warps=NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    return grad_gate, grad_up


NAMES = tuple(ACTIVATIONS)


def check_up(up: torch.Tensor, gate: torch.Tensor) -> None:
    if up.shape != gate.shape:
        raise RuntimeError(f"up must have shape {tuple(gate.shape)}, not {tuple(up.shape)}")
