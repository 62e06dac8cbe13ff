"""The parts of a recommender as ops: bias + ReLU by an expression and by CUDA, the pairwise interaction by Triton."""

from pathlib import Path

import torch
import triton
from dlrm_kernel import interaction_backward_kernel, interaction_kernel
from torch import Tensor

import fuseopt

bias_relu = fuseopt.elementwise("dlrm::bias_relu", "relu(x + bias)")


@bias_relu.samples
def _(device, dtype):
    yield torch.randn(16, 48, device=device, dtype=dtype), torch.randn(48, device=device, dtype=dtype)


def is_packed(x: Tensor, bias: Tensor) -> bool | str:
    packed = x.is_contiguous() and bias.is_contiguous() and bias.dim() == 1 and x.shape[-1:] == bias.shape
    return (packed and x.dtype == bias.dtype != torch.float64) or "takes contiguous [.., n] and [n] of one dtype"


bias_relu.native(cuda=Path(__file__).with_name("bias_relu.cu")).supports(is_packed, "cuda")
# The gradient of the CUDA kernel is the Triton kernel's.
bias_relu.backward("cuda")(bias_relu.formula("triton"))


@fuseopt.op("dlrm::interaction")
def interaction(features: Tensor) -> Tensor:
    """[batch, n, d] -> [batch, d + n (n - 1) / 2]: the first feature, then the product of each with those before it."""
    n = features.shape[1]
    rows, columns = torch.tril_indices(n, n, offset=-1, device=features.device)
    products = torch.bmm(features, features.transpose(1, 2))
    return torch.cat((features[:, 0], products[:, rows, columns]), 1)


@interaction.samples
def _(device, dtype):
    yield (torch.randn(6, 27, 16, device=device, dtype=dtype),)
    yield (torch.randn(3, 5, 24, device=device, dtype=dtype),)


def fits_a_tile(features: Tensor) -> bool | str:
    fits = features.dim() == 3 and 1 < features.shape[1] <= 64 and 0 < features.shape[2] <= 256
    packed = features.is_contiguous() and features.dtype != torch.float64
    return (fits and packed) or "takes contiguous [batch, 2 to 64, 1 to 256], not float64"


def tile(features: Tensor) -> dict[str, int]:
    """The sizes of a tile, which holds one sample: tl.dot takes 16 at least."""
    n, d = (max(16, triton.next_power_of_2(size)) for size in features.shape[1:])
    return {"N": n, "D": d}


@interaction.kernel("triton", supports=fits_a_tile)
def interaction_by_triton(features):
    batch, n, d = features.shape
    output = features.new_empty(batch, d + n * (n - 1) // 2)
    if batch:
        interaction_kernel[(batch,)](features, output, n, d, output.shape[1], **tile(features))
    return output


@interaction.backward("triton")
def interaction_backward_by_triton(inputs, output, grad_output):
    (features,) = inputs
    batch, n, d = features.shape
    result, grad = torch.empty_like(features), grad_output.contiguous()
    if batch:
        interaction_backward_kernel[(batch,)](features, grad, result, n, d, grad.shape[1], **tile(features))
    return result
