"""A linear layer and the cross-entropy of its output, in chunks of a few thousand rows whose logits exist at a time.

A chunk of logits is a matrix product into a buffer that every chunk uses; a kernel, CUDA's for wide rows, writes the
gradient over it; two products take that to the gradients of input and weight. The matrices stay with cuBLAS. The
classes are padded with weights of zero to a multiple of 64: products over an odd number of columns take several times
as long.
"""

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from fuseopt.ops import registry
from fuseopt.ops.cross_entropy_grad import RAW as CROSS_ENTROPY_GRAD
from fuseopt.ops.triton.cross_entropy import check_targets
from fuseopt.ops.triton.cross_entropy_grad import cross_entropy_grad_
from fuseopt.ops.triton.rows import compute_dtype
from fuseopt.ops.tuned_matmul import multiply_into
from fuseopt.tuning import multiprocessors, tuned

# A chunk has a multiple of this many rows if possible.
# TUNED: measurement not recorded (f367298); `fuseopt bench ops --op linear_cross_entropy` measures it again.
CHUNK_ROWS = 128
# Products of 16-bit matrices have tiles of so many columns, and of `CHUNK_ROWS` rows.
_TILE_COLUMNS = 256


class Gradients(NamedTuple):
    """Gradients summed over all rows, except that of `input`; None for one that is not needed."""

    input: torch.Tensor | None  # [rows, features], in the dtype of the products
    weight: torch.Tensor | None  # [width, features], in that of the arithmetic
    bias: torch.Tensor | None  # [width], likewise


def chunks(rows: int, row_bytes: int, features: int, device: torch.device) -> Iterator[slice]:
    """Slices of rows whose logits, of `row_bytes` each, fit in the buffer; of equal length except the last.

    Chunks are large, as each adds to the whole gradient of the weight. Of the lengths that take more than half of the
    buffer, the one is chosen with which the gradient of the input, [length, features], leaves the fewest
    multiprocessors idle.
    """
    fits = max(tuned("linear_cross_entropy_chunk_bytes", device) // row_bytes // CHUNK_ROWS, 1)
    most = CHUNK_ROWS * _busiest(fits, -(-features // _TILE_COLUMNS), multiprocessors(device))
    for start in range(0, rows, most):
        yield slice(start, min(start + most, rows))


@lru_cache
def _busiest(fits: int, of_row: int, places: int) -> int:
    """Of the numbers of rows of tiles from half of `fits` on, the one that leaves the fewest places idle."""
    return max(range(fits, fits // 2, -1), key=lambda tiles: _busy(tiles * of_row, places))


def _busy(tiles: int, places: int) -> float:
    """Share of the places that have a tile, over all rounds."""
    return tiles / (-(-tiles // places) * places)


def padded(tensor: torch.Tensor, dtype: torch.dtype, width: int) -> torch.Tensor:
    """`tensor` [classes, *] in `dtype`, rows of zeros after it up to `width`; itself where nothing is to be done."""
    if tensor.shape[0] == width:
        return tensor.to(dtype)
    result = torch.empty((width, *tensor.shape[1:]), dtype=dtype, device=tensor.device)
    result[: tensor.shape[0]] = tensor
    result[tensor.shape[0] :] = 0
    return result


def run(
    grad_output: torch.Tensor | None,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    product_dtype: torch.dtype,
    wanted: tuple[bool, bool, bool],
) -> tuple[torch.Tensor, Gradients]:
    """The losses [rows], and of the gradients of `sum(grad_output * losses)` those wanted of input, weight and bias."""
    (rows, features), classes = input.shape, weight.shape[0]
    width = -(-classes // 64) * 64
    compute = compute_dtype(input, weight)
    like = {"device": input.device}
    losses = torch.empty(rows, dtype=compute, **like)
    gradients = Gradients(
        torch.empty(rows, features, dtype=product_dtype, **like) if wanted[0] else None,
        torch.empty(width, features, dtype=compute, **like) if wanted[1] else None,
        torch.zeros(width, dtype=compute, **like) if wanted[2] else None,
    )
    if rows == 0:
        return losses, Gradients(*(None if gradient is None else gradient.zero_() for gradient in gradients))
    weight = padded(weight, product_dtype, width)
    bias = None if bias is None else padded(bias, product_dtype, width)
    target = target.contiguous()
    grad_output = None if grad_output is None else grad_output.contiguous()
    in_range = torch.empty(rows, dtype=torch.bool, **like)
    chosen = registry.pick("cross_entropy_grad_", "auto", input.device, (product_dtype, compute))
    row_bytes = width * product_dtype.itemsize
    # The CUDA kernel has a block for a row; over narrower ones Triton's, of a warp or two, is faster.
    in_cuda = chosen == "cuda" and row_bytes >= tuned("cross_entropy_grad_min_row_bytes", input.device)
    write_gradient = CROSS_ENTROPY_GRAD["cuda"] if in_cuda else cross_entropy_grad_
    buffer: torch.Tensor | None = None
    for chunk in chunks(rows, row_bytes, features, input.device):
        x = input[chunk].to(product_dtype)
        if buffer is None:
            buffer = torch.empty(len(x), width, dtype=product_dtype, **like)
        logits = buffer[: len(x)]
        # Chunks are of one size but for the last, which may be another in every call.
        multiply = partial(multiply_into, measure=rows > len(x) == len(buffer))
        if bias is None:
            multiply(logits, x, weight.t())
        else:
            torch.addmm(bias, x, weight.t(), out=logits)
        write_gradient(
            logits, None if grad_output is None else grad_output[chunk], target[chunk], losses[chunk], in_range[chunk],
            classes, ignore_index, label_smoothing, z_loss, any(wanted),
        )  # fmt: skip
        if gradients.input is not None:
            multiply(gradients.input[chunk], logits, weight)
        if gradients.weight is not None:
            multiply(gradients.weight, logits.t(), x, accumulate=chunk.start > 0)
        if gradients.bias is not None:
            gradients.bias.add_(logits.sum(0, dtype=compute))
    check_targets(in_range)
    return losses, gradients


def linear_cross_entropy_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    product_dtype: torch.dtype,
    need_input_grad: bool,
    need_weight_grad: bool,
    need_bias_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of each row, and the gradients of their sum.

    Args:
        input: [rows, features], any strides; float32, float16, bfloat16 or float64.
        weight: [classes, features].
        bias: [classes], or None.
        target: class indices, [rows], int64.
        ignore_index: target of rows whose loss is 0.
        label_smoothing: share of the target that is spread over all classes.
        z_loss: factor of the squared logsumexp.
        product_dtype: what input, weight and bias are cast to, and the logits rounded to.

    Returns:
        losses [rows], float32, or float64 where a tensor is; the gradients of input in `product_dtype`, of weight and
        bias in the dtype of the losses; empty where not needed.
    """
    wanted = need_input_grad, need_weight_grad, need_bias_grad
    losses, gradients = run(
        None, input, weight, bias, target, ignore_index, label_smoothing, z_loss, product_dtype, wanted
    )
    return losses, *present(gradients, weight.shape[0], losses)


def linear_cross_entropy_bwd(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    product_dtype: torch.dtype,
    need_input_grad: bool,
    need_weight_grad: bool,
    need_bias_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `sum(grad_output * losses)`, from logits that are computed again.

    Args:
        grad_output: [rows].

    Returns:
        The gradients as `linear_cross_entropy_fwd` returns them.
    """
    wanted = need_input_grad, need_weight_grad, need_bias_grad
    losses, gradients = run(
        grad_output, input, weight, bias, target, ignore_index, label_smoothing, z_loss, product_dtype, wanted
    )
    return present(gradients, weight.shape[0], losses)


def present(gradients: Gradients, classes: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients without padding, with empty tensors in place of None."""
    input, weight, bias = gradients
    return (
        like.new_empty(0) if input is None else input,
        like.new_empty(0) if weight is None else weight[:classes],
        like.new_empty(0) if bias is None else bias[:classes],
    )
