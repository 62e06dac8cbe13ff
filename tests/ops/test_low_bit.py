"""Quantised weights: how they are stored, how near they are, and linear layers with them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseopt import ops
from fuseopt.ops.decode.low_bit_linear import MAX_ROWS
from fuseopt.ops.low_bit import (
    NIBBLE_ORDER,
    LowBitWeight,
    dequantize,
    pack,
    quantize,
    unpack,
)

KINDS = [(8, 128, True), (4, 32, True), (4, 64, False), (4, 128, True), (4, 128, False)]


def relative_error(weight: Tensor, quantized: LowBitWeight) -> float:
    return float((dequantize(quantized) - weight.float()).norm() / weight.float().norm())


def test_nibbles_lie_as_the_format_says() -> None:
    nibbles = torch.randint(0, 16, (5, 48), dtype=torch.uint8)
    words = pack(nibbles)
    assert words.dtype is torch.int32 and words.shape == (5, 6)
    assert torch.equal(unpack(words), nibbles)
    for place, index in enumerate(NIBBLE_ORDER):
        assert torch.equal(words >> 4 * place & 15, nibbles.view(5, 6, 8)[..., index].int())
    for pair in range(4):
        halves = words >> 4 * pair & 0x000F000F
        assert torch.equal(halves & 0xFFFF, nibbles.view(5, 6, 8)[..., 2 * pair].int())
        assert torch.equal(halves >> 16, nibbles.view(5, 6, 8)[..., 2 * pair + 1].int())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits, group, symmetric", KINDS)
def test_clipping_is_nearer_than_rounding_to_the_largest(
    bits: int, group: int, symmetric: bool, dtype: torch.dtype
) -> None:
    weight = torch.randn(37, 384).to(dtype)
    quantized = quantize(weight.T.contiguous().T, bits, group, symmetric)
    size = 384 if bits == 8 else group
    assert quantized.shape == weight.shape and quantized.group == size
    assert quantized.scales.shape == (37, 384 // size)
    assert quantized.scales.dtype is (torch.float32 if bits == 8 else dtype)
    assert (quantized.zeros is None) == symmetric

    groups = weight.double().unflatten(1, (-1, size))
    if symmetric:
        scale = groups.abs().amax(-1, keepdim=True) / (127 if bits == 8 else 7)
        plain = (groups / scale).round() * scale
    else:
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = (high - low) / 15
        plain = ((groups - low) / scale).round() * scale + low
    largest = float((plain - groups).norm() / groups.norm())
    assert 0 < relative_error(weight, quantized) <= largest * (1.02 if bits == 8 or not symmetric else 0.95)


def test_weights_that_are_representable_are_exact() -> None:
    scales = torch.rand(9, 3) + 0.5
    nibbles = torch.randint(0, 16, (9, 96))
    nibbles[:, ::32] = 0  # -8, the longer side
    weight = ((nibbles - 8.0).unflatten(1, (3, 32)) * scales[..., None]).flatten(1)
    torch.testing.assert_close(dequantize(quantize(weight, 4, 32)), weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits, group, symmetric", KINDS)
def test_zeros_and_values_that_are_not_finite(bits: int, group: int, symmetric: bool) -> None:
    weight = torch.randn(5, 128)
    weight[0], weight[1, 3], weight[2, 0] = 0, torch.nan, torch.inf
    result = dequantize(quantize(weight, bits, group, symmetric))
    assert not result[0].any()
    assert not result[1].isfinite().all() and not result[2].isfinite().all()
    assert result[3:].isfinite().all()


def test_refusals() -> None:
    weight = torch.randn(4, 48)
    for arguments, message in (
        ((weight, 3), "bits must be 4 or 8"),
        ((weight, 8, 128, False), "zero points need 4 bits"),
        ((weight, 4, 48), "group must be one of"),
        ((weight, 4, 32), "48 inputs are no multiple of the group of 32"),
        ((weight.double(), 8), "torch.float64"),
        ((weight[0], 8), r"shape \(48,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize(*arguments)
    quantized = quantize(torch.randn(4, 64), 4, 32)
    with pytest.raises(ValueError, match="scales must have shape"):
        ops.low_bit_linear(torch.randn(2, 64), quantized._replace(scales=quantized.scales[:, :1]))
    with pytest.raises(TypeError, match="values of 4 bits must be int32"):
        ops.low_bit_linear(torch.randn(2, 64), quantized._replace(values=quantized.values.long()))
    with pytest.raises(ValueError, match="same bits"):
        ops.decode_low_bit_linear(torch.randn(2, 64), [quantized, quantize(torch.randn(4, 64), 4, 64)])
    with pytest.raises(ValueError, match="weight must have shape"):
        ops.low_bit_linear(torch.randn(2, 32), quantized)


@pytest.mark.parametrize("rows", [1, MAX_ROWS, MAX_ROWS + 1])
@pytest.mark.parametrize("bits, group, symmetric", KINDS)
def test_linear_of_any_number_of_rows(bits: int, group: int, symmetric: bool, rows: int) -> None:
    weight, bias = quantize(torch.randn(33, 256), bits, group, symmetric), torch.randn(33)
    input = torch.randn(rows, 512)[:, ::2].requires_grad_()
    output = ops.low_bit_linear(input, weight, bias)
    expected = F.linear(input.double(), dequantize(weight, torch.float64), bias.double())
    torch.testing.assert_close(output, expected.float(), rtol=1e-5, atol=1e-4)
    (gradient,) = torch.autograd.grad(output.sum(), input)
    torch.testing.assert_close(gradient, dequantize(weight).sum(0).expand(rows, -1), rtol=1e-5, atol=1e-4)
