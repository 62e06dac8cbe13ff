"""Cross-entropy of logits against class indices, forward and backward.

A row is walked along twice: once for its maximum and its sum of exponentials by the online softmax (Milakov and
Gimelshein, 2018, https://arxiv.org/abs/1805.02867), once to write the gradient, which finds the row in the L2 cache.
"""

import torch
import triton
import triton.language as tl

from fuseopt.ops.triton.rows import TL_DTYPES, as_rows, compute_dtype
from fuseopt.ops.triton.wide_rows import LOG2_E, aligned_row, edge_positions, row_alignment, update_online

# Bytes per thread that its lanes hold, in the dtype of the arithmetic.
# TUNED: measurement not recorded, nor of the warps in `row_blocks` (9a9259d); `fuseopt bench ops --op cross_entropy`
# measures it again.
LANE_BYTES = 32
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_part(
    input_ptr,
    position,  # from input_ptr
    readable_end,  # position past the last one that may be read
    inside,  # which positions belong to the part of the row that is wanted
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
):
    """The logits at `position`, -inf where `inside` is false."""
    x = tl.load(input_ptr + position, mask=position < readable_end, other=0.0).to(COMPUTE)
    return tl.where(inside, x, -float("inf"))


@triton.jit
def update_statistics(lane_max, lane_sum, lane_excess, x, inside, pivot, SMOOTHED: tl.constexpr):
    """Adds `x` [STEPS, LANES] to the lanes' maxima and sums; `inside` masks it, None takes all of it."""
    lane_max, lane_sum = update_online(lane_max, lane_sum, x)
    if SMOOTHED:
        excess = x - pivot
        if inside is not None:
            excess = tl.where(inside, excess, 0.0)
        lane_excess += tl.sum(excess, axis=0)
    return lane_max, lane_sum, lane_excess


@triton.jit
def row_statistics(
    input_ptr,
    first,  # position of the row's first element
    end,  # position past its last one
    readable_end,  # position past the last one that may be read
    pivot,  # in COMPUTE
    SMOOTHED: tl.constexpr,  # whether the sum of logits is wanted
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    STEPS: tl.constexpr,  # elements that a lane takes at a time: their maximum needs no other thread
    LANES: tl.constexpr,  # running maxima and sums, which meet only at the end of the row
):
    """A row's maximum, its sum of exponentials relative to that, and the sum of what its logits exceed `pivot` by."""
    BLOCK: tl.constexpr = STEPS * LANES
    block = tl.arange(0, STEPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    lane_max = tl.full((LANES,), -float("inf"), COMPUTE)
    lane_sum = tl.zeros((LANES,), COMPUTE)
    lane_excess = tl.zeros((LANES,), COMPUTE)

    inside = (block >= first) & (block < end)
    x = load_part(input_ptr, block, readable_end, inside, COMPUTE)
    lane_max, lane_sum, lane_excess = update_statistics(lane_max, lane_sum, lane_excess, x, inside, pivot, SMOOTHED)
    last = end // BLOCK * BLOCK
    for start in range(BLOCK, last, BLOCK):
        x = tl.load(input_ptr + (start + block)).to(COMPUTE)
        lane_max, lane_sum, lane_excess = update_statistics(lane_max, lane_sum, lane_excess, x, None, pivot, SMOOTHED)
    if last > 0:
        position = last + block
        inside = position < end
        x = load_part(input_ptr, position, readable_end, inside, COMPUTE)
        lane_max, lane_sum, lane_excess = update_statistics(lane_max, lane_sum, lane_excess, x, inside, pivot, SMOOTHED)

    row_max = tl.max(lane_max, axis=0)
    # Lanes that saw nothing hold -inf and 0; if all do, the row's sum is NaN, as torch's loss is.
    row_sum = tl.sum(lane_sum * tl.exp2((lane_max - row_max) * LOG2_E), axis=0)
    return row_max, row_sum, tl.sum(lane_excess, axis=0)


@triton.jit
def row_loss(
    target_logit,
    row_max,
    row_sum,
    row_excess,
    pivot,
    columns,
    label_smoothing,
    z_loss,
    SMOOTHED: tl.constexpr,
):
    """The row's loss; differences from the maximum first, so that large logits cost no precision."""
    log_sum = tl.log2(row_sum) * LN_2
    loss = log_sum - (target_logit - row_max)
    if SMOOTHED:
        loss *= 1.0 - label_smoothing
        loss += label_smoothing * (log_sum + (row_max - pivot) - row_excess / columns)
    return loss + z_loss * (row_max + log_sum) * (row_max + log_sum)


@triton.jit
def gradient_scales(
    grad_output,
    row_max,
    row_sum,
    columns,
    label_smoothing,
    z_loss,
    SMOOTHED: tl.constexpr,
):
    """Factor of exp(x - row_max) in the gradient, and what is subtracted at the target and everywhere."""
    logsumexp = row_max + tl.log2(row_sum) * LN_2
    probability_scale = grad_output * (1.0 + 2.0 * z_loss * logsumexp) / row_sum
    if SMOOTHED:
        return probability_scale, grad_output * (1.0 - label_smoothing), grad_output * label_smoothing / columns
    return probability_scale, grad_output, 0.0 * grad_output


@triton.jit(do_not_specialize=["ignore_index"])
def cross_entropy_fwd_kernel(
    input_ptr,  # [rows, columns], adjacent columns
    target_ptr,  # [rows], int64
    losses_ptr,  # [rows]
    row_max_ptr,  # [rows]
    row_sum_ptr,  # [rows]
    in_range_ptr,  # [rows]
    columns,
    input_row_stride,  # elements from one row of input to the next; equal to columns, modulo ALIGNMENT
    ignore_index,
    label_smoothing: tl.float64,
    z_loss: tl.float64,
    SMOOTHED: tl.constexpr,
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    ALIGNMENT: tl.constexpr,  # elements of a 16-byte vector, or 1 for access by element
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Each program takes one row."""
    row = tl.program_id(0).to(tl.int64)
    input_ptr += row * input_row_stride // ALIGNMENT * ALIGNMENT
    first, end, _, _ = aligned_row(columns, ALIGNMENT)
    readable_end = (end + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    target = tl.load(target_ptr + row)
    ignored = target == ignore_index
    is_class = (target >= 0) & (target < columns)

    target_logit = tl.load(input_ptr + first + target, mask=is_class, other=0.0).to(COMPUTE)
    pivot = tl.where(tl.abs(target_logit) < float("inf"), target_logit, 0.0)
    row_max, row_sum, row_excess = row_statistics(
        input_ptr, first, end, readable_end, pivot, SMOOTHED, COMPUTE, STEPS, LANES
    )
    loss = row_loss(
        target_logit,
        row_max,
        row_sum,
        row_excess,
        pivot,
        columns,
        tl.full((), label_smoothing, COMPUTE),
        tl.full((), z_loss, COMPUTE),
        SMOOTHED,
    )
    tl.store(losses_ptr + row, tl.where(ignored, 0.0, loss))
    tl.store(row_max_ptr + row, row_max)
    tl.store(row_sum_ptr + row, row_sum)
    tl.store(in_range_ptr + row, ignored | is_class)


@triton.jit(do_not_specialize=["ignore_index"])
def cross_entropy_bwd_kernel(
    grad_output_ptr,  # [rows]
    input_ptr,  # [rows, columns], adjacent columns
    target_ptr,  # [rows], int64
    row_max_ptr,  # [rows]
    row_sum_ptr,  # [rows]
    grad_input_ptr,  # [rows, columns], contiguous
    columns,
    input_row_stride,  # elements from one row of input to the next; equal to columns, modulo ALIGNMENT
    ignore_index,
    label_smoothing: tl.float64,
    z_loss: tl.float64,
    SMOOTHED: tl.constexpr,
    COMPUTE: tl.constexpr,  # dtype of the arithmetic
    ALIGNMENT: tl.constexpr,  # elements of a 16-byte vector, or 1 for access by element
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Each program takes one row. The vectors that it shares with its neighbours are written by element."""
    BLOCK: tl.constexpr = STEPS * LANES
    row = tl.program_id(0).to(tl.int64)
    input_ptr += row * input_row_stride // ALIGNMENT * ALIGNMENT
    grad_input_ptr += row * columns // ALIGNMENT * ALIGNMENT
    first, end, vectors_first, vectors_end = aligned_row(columns, ALIGNMENT)
    target = tl.load(target_ptr + row)
    ignored = target == ignore_index

    row_max = tl.load(row_max_ptr + row).to(COMPUTE)
    probability_scale, target_share, other_share = gradient_scales(
        tl.load(grad_output_ptr + row).to(COMPUTE),
        row_max,
        tl.load(row_sum_ptr + row).to(COMPUTE),
        columns,
        tl.full((), label_smoothing, COMPUTE),
        tl.full((), z_loss, COMPUTE),
        SMOOTHED,
    )
    block = tl.arange(0, BLOCK)
    for start in range(0, vectors_end, BLOCK):
        position = start + block
        x = tl.load(input_ptr + position, mask=position < vectors_end, other=0.0).to(COMPUTE)
        dx = tl.exp2((x - row_max) * LOG2_E) * probability_scale - other_share
        inside = (position >= vectors_first) & (position < vectors_end)
        tl.store(grad_input_ptr + position, tl.where(ignored, 0.0, dx), mask=inside)
    edge, inside = edge_positions(first, end, vectors_end, ALIGNMENT)
    x = tl.load(input_ptr + edge, mask=inside, other=0.0).to(COMPUTE)
    dx = tl.exp2((x - row_max) * LOG2_E) * probability_scale - other_share
    tl.store(grad_input_ptr + edge, tl.where(ignored, 0.0, dx), mask=inside)

    # Over what another thread has written there.
    tl.debug_barrier()
    x = tl.load(input_ptr + first + target, mask=~ignored, other=0.0).to(COMPUTE)
    dx = tl.exp2((x - row_max) * LOG2_E) * probability_scale - other_share - target_share
    tl.store(grad_input_ptr + first + target, dx, mask=~ignored)


def row_blocks(columns: int, itemsize: int, compute: torch.dtype) -> tuple[int, int, int]:
    """STEPS, LANES and the warps of a program for a row of `columns`, so that rows under way stay in the L2 cache.

    The lanes fill the program's threads, so that all steps of a lane belong to one thread: threads that share a lane
    would have to meet at every block.
    """
    num_warps = min(max(triton.next_power_of_2(columns * itemsize // 16384), 1), 8)
    lanes = 32 * num_warps * LANE_BYTES // compute.itemsize
    steps = 2 if itemsize == 4 else 4  # four of float32 spill registers
    block = min(max(triton.next_power_of_2(columns + 1) // 2, 64), steps * lanes)
    lanes = min(block, lanes)
    return block // lanes, lanes, num_warps


def check_targets(in_range: torch.Tensor) -> None:
    """Fails, on a GPU when the kernels have run, unless every target is a class or ignored."""
    torch._assert_async(in_range.all(), "cross_entropy: a target is neither ignore_index nor a class of the logits")


def cross_entropy_fwd(
    input: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of each row, the row's maximum, and its sum of exponentials relative to that.

    Args:
        input: logits, [*, classes], any strides; float32, float16, bfloat16 or float64.
        target: class indices, [*], int64, any strides.
        ignore_index: target of rows whose loss is 0.
        label_smoothing: share of the target that is spread over all classes.
        z_loss: factor of the squared logsumexp.

    Returns:
        Three tensors [*], contiguous, float32, or float64 for float64 logits.
    """
    compute = compute_dtype(input)
    losses, row_max, row_sum = (torch.empty(target.shape, dtype=compute, device=input.device) for _ in range(3))
    rows, columns = target.numel(), input.shape[-1]
    if rows == 0:
        return losses, row_max, row_sum
    matrix, row_stride = as_rows(input)
    in_range = torch.empty(rows, dtype=torch.bool, device=input.device)
    steps, lanes, num_warps = row_blocks(columns, input.itemsize, compute)
    with torch.cuda.device_of(input):
        cross_entropy_fwd_kernel[(rows,)](
            matrix, target.contiguous(), losses, row_max, row_sum, in_range, columns, row_stride, ignore_index,
            label_smoothing, z_loss, label_smoothing != 0.0, TL_DTYPES[compute],
            row_alignment([matrix], [row_stride], columns), steps, lanes, num_warps=num_warps, enable_fp_fusion=True,
        )  # fmt: skip
        check_targets(in_range)
    return losses, row_max, row_sum


def cross_entropy_bwd(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    target: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> torch.Tensor:
    """Gradient of the losses of `cross_entropy_fwd` with respect to its input.

    Args:
        grad_output: [*], any strides.
        input: as given to the forward, like all that follows but `row_max` and `row_sum`, which it returned.

    Returns:
        [*, classes], contiguous, in the dtype of `input`; zeros in rows that are ignored.
    """
    grad_input = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    rows, columns = target.numel(), input.shape[-1]
    if rows == 0:
        return grad_input
    matrix, row_stride = as_rows(input)
    compute = compute_dtype(input)
    steps, lanes, num_warps = row_blocks(columns, input.itemsize, compute)
    with torch.cuda.device_of(input):
        cross_entropy_bwd_kernel[(rows,)](
            grad_output.contiguous(), matrix, target.contiguous(), row_max.contiguous(), row_sum.contiguous(),
            grad_input, columns, row_stride, ignore_index, label_smoothing, z_loss, label_smoothing != 0.0,
            TL_DTYPES[compute], row_alignment([matrix], [row_stride], columns), steps, lanes,
            num_warps=num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    return grad_input
