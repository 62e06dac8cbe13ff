"""Cross-entropy of logits, and its gradient in their place, in one kernel."""

import torch
import triton
import triton.language as tl

from fuseopt.ops.triton.cross_entropy import gradient_scales, load_part, row_blocks, row_loss, row_statistics
from fuseopt.ops.triton.rows import TL_DTYPES, compute_dtype
from fuseopt.ops.triton.wide_rows import LOG2_E


@triton.jit(do_not_specialize=["ignore_index"])
def cross_entropy_grad_kernel(
    logits_ptr,  # [rows, width], contiguous; on return the gradient, zeros past the classes
    grad_output_ptr,  # [rows], or None for ones
    target_ptr,  # [rows], int64
    losses_ptr,  # [rows]
    in_range_ptr,  # [rows]
    columns,  # classes
    width,  # at least columns, and a whole number of 16-byte vectors
    ignore_index,
    label_smoothing: tl.float64,
    z_loss: tl.float64,
    SMOOTHED: tl.constexpr,
    WRITES_GRADIENT: tl.constexpr,  # else the logits stay
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Each program takes one row, writes its loss, and its gradient over it."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * width
    target = tl.load(target_ptr + row)
    ignored = target == ignore_index
    is_class = (target >= 0) & (target < columns)
    smoothing = tl.full((), label_smoothing, COMPUTE)
    z = tl.full((), z_loss, COMPUTE)

    target_logit = tl.load(logits_ptr + target, mask=is_class, other=0.0).to(COMPUTE)
    pivot = tl.where(tl.abs(target_logit) < float("inf"), target_logit, 0.0)
    row_max, row_sum, row_excess = row_statistics(logits_ptr, 0, columns, width, pivot, SMOOTHED, COMPUTE, STEPS, LANES)
    loss = row_loss(target_logit, row_max, row_sum, row_excess, pivot, columns, smoothing, z, SMOOTHED)
    tl.store(losses_ptr + row, tl.where(ignored, 0.0, loss))
    tl.store(in_range_ptr + row, ignored | is_class)
    if not WRITES_GRADIENT:
        return

    grad_output = tl.full((), 1.0, COMPUTE)
    if grad_output_ptr is not None:
        grad_output = tl.load(grad_output_ptr + row).to(COMPUTE)
    probability_scale, target_share, other_share = gradient_scales(
        grad_output, row_max, row_sum, columns, smoothing, z, SMOOTHED
    )
    # Every thread must have read the target's logit before any thread overwrites it.
    tl.debug_barrier()
    BLOCK: tl.constexpr = STEPS * LANES
    block = tl.arange(0, STEPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    last = columns // BLOCK * BLOCK
    position = last + block
    x = load_part(logits_ptr, position, width, position < columns, COMPUTE)
    dx = tl.exp2((x - row_max) * LOG2_E) * probability_scale - other_share
    tl.store(logits_ptr + position, tl.where(ignored | (position >= columns), 0.0, dx), mask=position < width)
    for back in range(BLOCK, last + 1, BLOCK):
        pointers = logits_ptr + (last - back + block)
        x = tl.load(pointers).to(COMPUTE)
        dx = tl.exp2((x - row_max) * LOG2_E) * probability_scale - other_share
        tl.store(pointers, tl.where(ignored, 0.0, dx))
    tl.debug_barrier()
    dx = tl.exp2((target_logit - row_max) * LOG2_E) * probability_scale - other_share - target_share
    tl.store(logits_ptr + target, dx, mask=is_class & ~ignored)


def cross_entropy_grad_(
    logits: torch.Tensor,
    grad_output: torch.Tensor | None,
    target: torch.Tensor,
    losses: torch.Tensor,
    in_range: torch.Tensor,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    writes_gradient: bool,
) -> None:
    """The loss of each row, and its gradient over the logits.

    Args:
        logits: [rows, width], contiguous rows of whole 16 bytes; float32, float16, bfloat16 or float64. Read, and
            written to if `writes_gradient`: zeros past the classes.
        grad_output: [rows], contiguous, in the dtype of `losses`, or None for ones.
        target: class indices, [rows], int64, contiguous.
        losses: [rows], in the dtype of the arithmetic: float32 or float64. Written to.
        in_range: [rows], bool. Written to: whether the target is a class or ignored.
        classes: the first columns; what is past them counts for nothing.
        ignore_index: target of rows whose loss and gradient are 0.
        label_smoothing: share of the target that is spread over all classes.
        z_loss: factor of the squared logsumexp.
    """
    if not all(tensor is None or tensor.is_contiguous() for tensor in (logits, grad_output, target, losses, in_range)):
        raise ValueError("cross_entropy_grad_ takes contiguous tensors")
    compute = compute_dtype(logits)
    if losses.dtype != compute:
        raise ValueError(f"losses must be {compute}, not {losses.dtype}")
    rows, width = logits.shape
    if rows == 0:
        return
    steps, lanes, num_warps = row_blocks(width, logits.itemsize, compute)
    with torch.cuda.device_of(logits):
        cross_entropy_grad_kernel[(rows,)](
            logits, grad_output, target, losses, in_range, classes, width, ignore_index, label_smoothing, z_loss,
            label_smoothing != 0.0, writes_gradient, TL_DTYPES[compute], steps, lanes, num_warps=num_warps,
            enable_fp_fusion=True,
        )  # fmt: skip
