"""Keys and values in 8 bits, with a scale for each head and token.

Scales are per token, not per channel, so a step can quantise its key and value without knowing those of other tokens
(Liu et al. 2024, arXiv 2402.02750, compare both).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fuseopt.ops import registry

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Dtype of a quantised cache -> the largest number that `quantize_heads` stores."""

EIGHT_BIT_ATTENTION = "decode_attention_of_8_bits"
"""Name in the registry of `decode_attention` and `decode_attention_` over such caches."""


def is_head_dim_of_kernel(head_dim: int) -> bool:
    """True if the CUDA kernel of attention supports 8-bit vectors of `head_dim` elements."""
    return head_dim % 16 == 0 and head_dim <= 256


def quantize_heads(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rounds vectors to 8 bits: `vectors` is about `quantized * scales[..., None]`.

    A scale is the vector's largest magnitude divided by 127 (int8) or 448 (float8_e4m3fn), so no element is clipped.
    The error of an element is at most half a scale (int8), or the greater of 1/16 of the element and 2**-10 scales
    (float8_e4m3fn). A vector with NaN or infinity becomes zeros with a scale of NaN or infinity; these dequantise to
    NaN.

    Args:
        vectors: [..., head_dim], floating point.
        dtype: torch.int8 or torch.float8_e4m3fn.

    Returns:
        [..., head_dim] of `dtype`, and float32 scales [...].

    Raises:
        KeyError: another `dtype`.
    """
    largest = LARGEST[dtype]
    wide = vectors.float()
    scales = wide.abs().amax(-1) / largest
    has_elements = (scales > 0) & (scales < torch.inf)
    quotients = wide / torch.where(has_elements, scales, 1.0)[..., None]
    quotients = torch.where(has_elements[..., None], quotients, 0.0).clamp(-largest, largest)
    return (quotients.round() if dtype == torch.int8 else quotients).to(dtype), scales


def dequantize_heads(quantized: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `quantize_heads`, up to rounding.

    Args:
        quantized: [..., head_dim], int8 or float8_e4m3fn.
        scales: [...], float32.
        dtype: dtype of the result. The product is computed in float32; in float64 if `dtype` is float64.

    Returns:
        [..., head_dim] of `dtype`.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (quantized.to(wide) * scales[..., None]).to(dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """A float8_e4m3fn tensor viewed as uint8; any other tensor unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    """Calls of `decode_attention` over int8 caches; torch lacks operations on float8 that the tests of all ops use."""

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def integers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def sample(query: Tensor, shape: tuple[int, ...], lengths: Tensor, **options: object) -> registry.SampleInput:
        (keys, key_scales), (values, value_scales) = (quantize_heads(make(*shape), torch.int8) for _ in range(2))
        scales = {"key_scales": key_scales, "value_scales": value_scales}
        return registry.SampleInput((query, keys, values, lengths), scales | options)

    yield sample(make(4, 6, 64), (4, 2, 37, 64), integers(37), scale=0.125)
    yield sample(make(6, 2, 80), (2, 2, 20, 80), integers(20, 0), starts=integers(3, 0), bias=make(2, 9))
    mask = torch.arange(50, device=device).expand(1, 50) % 3 > 0
    yield sample(make(1, 4, 16), (1, 1, 50, 16), integers(41).int(), mask=mask)
    yield sample(make(0, 2, 16), (0, 2, 4, 16), integers())
