"""Triton kernels on tensors with offsets above 2^31 elements, in memory that is mostly not touched."""

import pytest
import torch
from torch import Tensor

from fuseopt import ops

pytestmark = pytest.mark.interpreter


def far_apart(tensor: Tensor, dim: int, stride: int = 2**26) -> Tensor:
    """A copy whose elements along `dim` are `stride` apart."""
    strides = [tensor[0].numel() if d == 0 else s for d, s in enumerate(tensor.stride())]
    strides[dim] = stride
    assert stride * (tensor.shape[dim] - 1) > 2**31
    try:
        memory = torch.empty(stride * tensor.shape[dim], dtype=tensor.dtype)
    except RuntimeError as error:
        pytest.skip(f"no address space: {error}")
    return memory.as_strided(tensor.shape, strides).copy_(tensor)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_relative_attention_reads_tensors_beyond_2_to_the_31_elements(name: str) -> None:
    torch.manual_seed(0)
    tensors = {each: torch.randn(1, 1, 40, 8, dtype=torch.float16) for each in ("query", "key", "value")}
    expected = ops.relative_attention(**tensors, backend="reference")
    tensors[name] = far_apart(tensors[name], 2)
    torch.testing.assert_close(ops.relative_attention(**tensors, backend="triton"), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("rotary", [40, 8])
def test_rotary_embedding_reads_tensors_beyond_2_to_the_31_elements(rotary: int) -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(1, 1, 2, 40, dtype=torch.float16) for _ in range(2))
    cos, sin = (torch.randn(1, 2, rotary, dtype=torch.float16) for _ in range(2))
    expected = ops.rotary_embedding(query, key, cos, sin, backend="reference")
    outputs = ops.rotary_embedding(far_apart(query, 3), key, cos, sin, backend="triton")
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0)


def test_a_mask_of_softmax() -> None:
    torch.manual_seed(0)
    input, mask = torch.randn(2, 40), torch.randn(1, 40, dtype=torch.float16)
    expected = ops.softmax(input, mask, backend="reference")
    torch.testing.assert_close(ops.softmax(input, far_apart(mask, 1), backend="triton"), expected)
