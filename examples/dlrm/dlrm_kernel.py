"""The pairwise interaction in Triton, a sample a program, forward and backward: the kernels and their launches."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def features_of(pointer, sample, n, d, N: tl.constexpr, D: tl.constexpr):
    """One sample's [n, d] features as a [N, D] tile, 0 outside."""
    row, column = tl.arange(0, N)[:, None], tl.arange(0, D)[None, :]
    mask = (row < n) & (column < d)
    return tl.load(pointer + sample * n * d + row * d + column, mask=mask, other=0.0), row * d + column, mask


@triton.jit
def interaction_kernel(features_ptr, output_ptr, n, d, width, N: tl.constexpr, D: tl.constexpr):
    sample = tl.program_id(0).to(tl.int64)
    features, _, _ = features_of(features_ptr, sample, n, d, N, D)
    products = tl.dot(features, tl.trans(features), input_precision="ieee")
    i, j, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :], tl.arange(0, D)
    dense = tl.load(features_ptr + sample * n * d + column, mask=column < d)
    tl.store(output_ptr + sample * width + column, dense, mask=column < d)
    tl.store(output_ptr + sample * width + d + i * (i - 1) // 2 + j, products, mask=(j < i) & (i < n))


@triton.jit
def interaction_backward_kernel(features_ptr, grad_ptr, result_ptr, n, d, width, N: tl.constexpr, D: tl.constexpr):
    sample = tl.program_id(0).to(tl.int64)
    features, place, mask = features_of(features_ptr, sample, n, d, N, D)
    i, j, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :], tl.arange(0, D)
    lower = tl.load(grad_ptr + sample * width + d + i * (i - 1) // 2 + j, mask=(j < i) & (i < n), other=0.0)
    result = tl.dot(lower + tl.trans(lower), features, input_precision="ieee")
    dense = tl.load(grad_ptr + sample * width + column, mask=column < d, other=0.0).to(tl.float32)
    result += tl.where(i == 0, dense[None, :], 0.0)
    tl.store(result_ptr + sample * n * d + place, result, mask=mask)


def launch_of(features: Tensor, warps_in_half: int) -> dict[str, int]:
    """Sizes of a tile, which holds one sample (tl.dot takes 16 at least), and the warps that are fastest on an H200."""
    n, d = (max(16, triton.next_power_of_2(size)) for size in features.shape[1:])
    return {"N": n, "D": d, "num_warps": 4 if features.dtype == torch.float32 else warps_in_half}


def interaction_by_triton(features: Tensor) -> Tensor:
    batch, n, d = features.shape
    output = features.new_empty(batch, d + n * (n - 1) // 2)
    if batch:
        interaction_kernel[(batch,)](features, output, n, d, output.shape[1], **launch_of(features, 1))
    return output


def interaction_backward_by_triton(features: Tensor, grad: Tensor) -> Tensor:
    batch, n, d = features.shape
    result = torch.empty_like(features)
    if batch:
        interaction_backward_kernel[(batch,)](features, grad, result, n, d, grad.shape[1], **launch_of(features, 2))
    return result
