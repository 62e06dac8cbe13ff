"""The parts of a recommender as ops: bias + ReLU, a linear layer that ends in it, and the pairwise interaction."""

from pathlib import Path

import torch
from dlrm_kernel import interaction_backward_by_triton, interaction_by_triton
from torch import Tensor
from torch.nn import functional as F

import fuseopt

FOLDER = Path(__file__).parent

bias_relu = fuseopt.elementwise("dlrm::bias_relu", "relu(x + bias)")


@bias_relu.samples
def _(device, dtype):
    yield torch.randn(16, 48, device=device, dtype=dtype), torch.randn(48, device=device, dtype=dtype)


def has_whole_packs(x: Tensor, bias: Tensor) -> bool | str:
    packed = all(t.dtype == x.dtype != torch.float64 and t.is_contiguous() and is_aligned(t) for t in (x, bias))
    fits = packed and bias.dim() == 1 and x.shape[-1:] == bias.shape and bias.shape[0] * x.element_size() % 16 == 0
    fits = fits and x.nbytes < 2**36
    return fits or "takes contiguous [.., n] and [n] of one dtype, not float64, in whole 16 bytes, up to 64 GiB"


def is_aligned(tensor: Tensor) -> bool:
    return tensor.storage_offset() * tensor.element_size() % 16 == 0


bias_relu.native(cuda=FOLDER / "bias_relu.cu").supports(has_whole_packs, "cuda")
# The gradient of the CUDA kernel is the Triton kernel's.
bias_relu.backward("cuda")(bias_relu.formula("triton"))


@fuseopt.op("dlrm::linear_relu")
def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[batch, in], [out, in], [out] -> [batch, out]: bias and ReLU end the product, without a pass of their own."""
    return F.relu(F.linear(x, weight, bias))


@linear_relu.samples
def _(device, dtype):
    shapes = (24, 32), (48, 32), (48,)
    yield tuple(torch.randn(shape, device=device, dtype=dtype) for shape in shapes)


def is_one_product(x: Tensor, weight: Tensor, bias: Tensor) -> bool | str:
    fits = x.dim() == weight.dim() == 2 and x.shape[1:] == weight.shape[1:] and bias.shape == weight.shape[:1]
    return (fits and x.dtype == weight.dtype == bias.dtype) or "takes [batch, in], [out, in] and [out] of one dtype"


@linear_relu.kernel("cuda", supports=is_one_product)
def _(x, weight, bias):
    return torch.ops.aten._addmm_activation(bias, x, weight.T)  # cuBLASLt's epilogue of bias and ReLU


@linear_relu.backward("cuda")
def _(inputs, output, grad_output, needed):
    x, weight, _ = inputs
    grad = torch.ops.aten.threshold_backward(grad_output, output, 0)
    return (
        grad @ weight if needed[0] else None,
        grad.T @ x if needed[1] else None,
        grad.sum(0) if needed[2] else None,
    )


@fuseopt.op("dlrm::interaction")
def interaction(features: Tensor) -> Tensor:
    """[batch, n, d] -> [batch, d + n (n - 1) / 2]: the first feature, then the product of each with those before it."""
    n = features.shape[1]
    rows, columns = torch.tril_indices(n, n, offset=-1, device=features.device)
    products = torch.bmm(features, features.transpose(1, 2))
    return torch.cat((features[:, 0], products[:, rows, columns]), 1)


@fuseopt.op("dlrm::interaction_backward")
def interaction_backward(features: Tensor, grad: Tensor) -> Tensor:
    """The gradient of `interaction` for its features [batch, n, d], of `grad` [batch, d + n (n - 1) / 2]."""
    n, d = features.shape[1:]
    row = torch.arange(n, device=features.device)
    low, high = torch.minimum(row, row[:, None]), torch.maximum(row, row[:, None])
    # Product i, j is in its place for both i, j and j, i; the diagonal has none.
    padded = F.pad(grad[:, d:], (0, 1))
    symmetric = torch.where(low == high, n * (n - 1) // 2, high * (high - 1) // 2 + low)
    result = torch.bmm(padded[:, symmetric], features)
    return torch.cat((result[:, :1] + grad[:, None, :d], result[:, 1:]), 1)


@interaction.samples
def _(device, dtype):
    yield (torch.randn(6, 27, 16, device=device, dtype=dtype),)
    yield (torch.randn(3, 5, 24, device=device, dtype=dtype),)


@interaction_backward.samples
def _(device, dtype):
    for (features,) in interaction.sample_arguments(device, dtype):
        batch, n, d = features.shape
        yield features, torch.randn(batch, d + n * (n - 1) // 2, device=device, dtype=dtype)


def is_packed(features: Tensor, *grad: Tensor) -> bool:
    batch, n, d = features.shape if features.dim() == 3 else (0, 0, 0)
    tensors = (features, *grad)
    packed = all(t.dtype == features.dtype != torch.float64 and t.is_contiguous() for t in tensors)
    return n > 1 and d > 0 and packed and all(t.shape == (batch, d + n * (n - 1) // 2) for t in grad)


def fits_a_tile(features: Tensor, *grad: Tensor) -> bool | str:
    fits = is_packed(features, *grad) and features.shape[1] <= 64 and features.shape[2] <= 256
    return fits or "takes contiguous [batch, 2 to 64, 1 to 256] of one dtype, not float64"


def fits_a_warp(features: Tensor, *grad: Tensor) -> bool | str:
    fits = is_packed(features, *grad) and features.shape[1] <= 32 and features.shape[2] <= 1024
    fits = fits and features.shape[2] * features.element_size() % 16 == 0 and is_aligned(features)
    return fits or "takes contiguous [batch, 2 to 32, up to 1024] of one dtype, not float64, rows of whole 16 bytes"


interaction.kernel("triton", supports=fits_a_tile)(interaction_by_triton)
interaction_backward.kernel("triton", supports=fits_a_tile)(interaction_backward_by_triton)
for op in (interaction, interaction_backward):
    op.native(cuda=FOLDER / "interaction.cu").supports(fits_a_warp, "cuda")


@interaction.backward("triton")
def _(inputs, output, grad):
    return interaction_backward(*inputs, grad.contiguous(), backend="triton")


@interaction.backward("cuda")
def _(inputs, output, grad):
    # In half precision the Triton kernel is faster: 38.0 against 39.4 us (8192 x 27 x 128, H200).
    by_triton = inputs[0].element_size() == 2 and fits_a_tile(*inputs) is True
    return interaction_backward(*inputs, grad.contiguous(), backend="triton" if by_triton else "cuda")
