"""Quantised weights: how they are stored, how near they are, and linear layers with them."""

from collections.abc import Callable
from typing import Any

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


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ([[1.0]], "a dense tensor .* not list"),
        (torch.nn.Linear(4, 4), "a dense tensor .* not Linear"),
        (torch.ones(4, 64).to_sparse(), "a dense tensor .* not a tensor of torch.sparse_coo"),
    ],
)
def test_only_dense_tensors_are_quantised(weight: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        quantize(weight, 8)


WRONG_PARTS: dict[str, dict[str, Any]] = {
    "has 4 or 8 bits, not 3": {"bits": 3},
    "groups of 48": {"group": 48},
    "groups of 0": {"group": 0},
    "values of 8 bits must be int8": {"bits": 8},
    "values of 4 bits must be int32 .* not NoneType": {"values": None},
    "values of 4 bits must be int32 .* of shape": {"values": torch.zeros(8, dtype=torch.int32)},
    "at least one output": {"values": torch.zeros(0, 8, dtype=torch.int32)},
    "at least one output and one input": {"values": torch.zeros(40, 0, dtype=torch.int32)},
    r"scales must have shape \(40, 2\), not \(40, 1\)": {"scales": torch.ones(40, 1)},
    "scales must be float32 or .* not torch.int32": {"scales": torch.ones(40, 2, dtype=torch.int32)},
    "scales are on meta, values on cpu": {"scales": torch.ones(40, 2, device="meta")},
    "zeros must be uint8": {"zeros": torch.ones(40, 2)},
    r"zeros must have shape \(40, 2\)": {"zeros": torch.ones(40, 1, dtype=torch.uint8)},
}


@pytest.mark.parametrize("message", WRONG_PARTS)
@pytest.mark.parametrize("use", ["dequantize", "pack_for_cuda", "low_bit_linear", "decode_low_bit_linear"])
def test_a_weight_whose_parts_do_not_fit_is_refused(use: str, message: str) -> None:
    weight = quantize(torch.randn(40, 64), 4, 32)._replace(**WRONG_PARTS[message])
    calls: dict[str, Callable[[], Any]] = {
        "dequantize": lambda: dequantize(weight),
        "pack_for_cuda": lambda: ops.pack_for_cuda(weight, torch.bfloat16),
        "low_bit_linear": lambda: ops.low_bit_linear(torch.ones(MAX_ROWS + 1, 64), weight),
        "decode_low_bit_linear": lambda: ops.decode_low_bit_linear(torch.ones(2, 64), [weight]),
    }
    with pytest.raises((TypeError, ValueError), match=message):
        calls[use]()


@pytest.mark.parametrize("rows", [2, MAX_ROWS + 1])
@pytest.mark.parametrize("is_packed", [False, True])
def test_inputs_that_do_not_fit_are_refused(is_packed: bool, rows: int) -> None:
    low = quantize(torch.randn(40, 64), 4, 32)
    weight = ops.pack_for_cuda(low, torch.bfloat16) if is_packed else low
    input = torch.ones(rows, 64)
    for wrong, message in (
        (input.tolist(), "input must be .* not list"),
        (input.long(), "input must be .* not torch.int64"),
        (input.to(torch.complex64), "input must be .* not torch.complex64"),
        (torch.tensor(1.0), r"input must be .* of shape \(\)"),
        (input.to("meta"), "input is on meta, a quantised weight on cpu"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            ops.low_bit_linear(wrong, weight)
    for bias, message in (
        (1.0, "bias must be a tensor .* not float"),
        ([1.0] * 40, "bias must be a tensor .* not float"),
    ):
        with pytest.raises(TypeError, match=message):
            ops.low_bit_linear(input, weight, bias)
    with pytest.raises(TypeError, match="weight must be a tensor or a list of tensors, not "):
        ops.decode_linear(input, weight)


def test_refusals() -> None:
    weight = torch.randn(4, 48)
    for arguments, message in (
        ((weight, 3), "bits must be 4 or 8"),
        ((weight, 8, 128, False), "zero points need 4 bits"),
        ((weight, 4, 48), "group must be one of"),
        ((weight, 4, 32), "48 inputs are no multiple of the group of 32"),
        ((weight.double(), 8), "torch.float64"),
        ((weight[0], 8), r"shape \(48,\)"),
        ((weight[:0], 8), r"shape \(0, 48\), not .* at least one output"),
        ((weight[:, :0], 4, 32), r"shape \(4, 0\), not .* at least one output"),
        ((weight, 8.0), "bits must be 4 or 8, not 8.0"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize(*arguments)
    quantized = quantize(torch.randn(4, 64), 4, 32)
    for dtype in (torch.int8, torch.complex64, "float16"):
        with pytest.raises(ValueError, match="dtype must be float32"):
            dequantize(quantized, dtype)
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
