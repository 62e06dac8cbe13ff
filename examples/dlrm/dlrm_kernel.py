"""The Triton kernels of the pairwise interaction, a sample a program, forward and backward."""

import triton
import triton.language as tl


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
