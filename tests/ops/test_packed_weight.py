"""The order of packed weights, read as the CUDA kernels read it: lane by lane, with their masks and magic numbers."""

import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from fuseopt import ops
from fuseopt.errors import BackendError
from fuseopt.ops.dequantize_packed import dequantize_packed
from fuseopt.ops.low_bit import LowBitWeight, dequantize, pack, quantize
from fuseopt.ops.packed_weight import data_shape, pack_for_cuda, parts_of, unpacked


def _float(half: int, dtype: torch.dtype) -> float:
    if dtype is torch.bfloat16:
        return struct.unpack("<f", struct.pack("<I", half << 16))[0]
    return struct.unpack("<e", struct.pack("<H", half))[0]


def _halves(word: int, dtype: torch.dtype) -> list[float]:
    return [_float(word & 0xFFFF, dtype), _float(word >> 16, dtype)]


def _pairs(word: int, bits: int, zero: float, dtype: torch.dtype) -> list[float]:
    """`unpack` of low_bit/packed_weight.cuh."""
    magic, values = 0x43004300 if dtype is torch.bfloat16 else 0x64006400, []
    for i in range(16 // bits):
        moved = word >> bits * i
        if bits == 4:
            values += [value - zero for value in _halves(moved & 0x000F000F ^ magic, dtype)]
        elif dtype is torch.float16:
            values += [value - (1024 + 128) for value in _halves(moved & 0x00FF00FF ^ (magic + 0x00800080), dtype)]
        else:
            low, sign = _halves(moved & 0x007F007F ^ magic, dtype), _halves(moved & 0x00800080 ^ magic, dtype)
            values += [a - b for a, b in zip(low, sign, strict=True)]
    return values


def _weight_of(packed: torch.Tensor, outputs: int, inputs: int, bits: int, group: int, zeros: bool, dtype: torch.dtype):
    """float64 [N, K], and how many bytes were read."""
    block_k, read = 128 if bits == 4 else 64, set()
    weight = torch.full((outputs + 16, inputs + block_k), torch.nan, dtype=torch.float64)
    data = bytes(packed.flatten().tolist())
    line_bytes, blocks = packed.shape[1], -(-inputs // block_k)
    groups = block_k // group if bits == 4 else 0
    header, group_bytes = 64 if bits == 8 else 0, 64 if zeros else 32
    block_bytes = 1024 + groups * group_bytes
    assert line_bytes == header + blocks * block_bytes and line_bytes % 16 == 0

    def words(at: int, count: int) -> tuple[int, ...]:
        read.update(range(at, at + 4 * count))
        return struct.unpack_from(f"<{count}I", data, at)

    for line in range(len(packed)):
        for block in range(blocks):
            start = line * line_bytes + header + block * block_bytes
            for lane in range(32):
                for c in range(block_k // 32):
                    unit = words(start + (c // 2 if bits == 4 else c) * 512 + lane * 16, 4)
                    scale, zero, of_line = [1.0, 1.0], [136.0, 136.0], line * line_bytes
                    if bits == 8:
                        low = _pairs(unit[0], 8, 0, dtype) + _pairs(unit[1], 8, 0, dtype)
                        high = _pairs(unit[2], 8, 0, dtype) + _pairs(unit[3], 8, 0, dtype)
                        scale = [
                            struct.unpack("<f", struct.pack("<I", words(of_line + (lane // 4 + 8 * i) * 4, 1)[0]))[0]
                            for i in range(2)
                        ]
                    else:
                        at = start + 1024 + c * 32 // group * group_bytes + lane // 4 * 4
                        scale = _halves(words(at, 1)[0], dtype)
                        zero = [136.0 if dtype is torch.bfloat16 else 1032.0] * 2
                        if zeros:
                            zero = _halves(words(at + 32, 1)[0], dtype)
                        low = _pairs(unit[c % 2 * 2], 4, zero[0], dtype)
                        high = _pairs(unit[c % 2 * 2 + 1], 4, zero[1], dtype)
                    k = block * block_k + c * 32 + lane % 4 * 8
                    for i, values in enumerate((low, high)):
                        row = torch.tensor(values, dtype=torch.float64) * scale[i]
                        weight[line * 16 + lane // 4 + 8 * i, k : k + 8] = row
    padding = [
        weight[outputs : len(packed) * 16, : blocks * block_k],
        weight[: len(packed) * 16, inputs : blocks * block_k],
    ]
    assert all((part == 0).all() for part in padding)
    assert len(read) == len(data)
    return weight[:outputs, :inputs]


@pytest.mark.parametrize(
    ("bits", "group", "zeros", "outputs", "inputs", "dtype"),
    [
        (8, 0, False, 17, 72, torch.bfloat16),
        (8, 0, False, 7, 64, torch.float16),
        (4, 32, True, 7, 96, torch.bfloat16),
        (4, 64, True, 17, 64, torch.bfloat16),
        (4, 128, False, 7, 128, torch.bfloat16),
        (4, 32, False, 7, 32, torch.float16),
    ],
)
def test_lanes_read_the_weight(bits, group, zeros, outputs, inputs, dtype):
    torch.manual_seed(outputs)
    if bits == 8:
        values = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        weight = LowBitWeight(values, torch.rand(outputs, 1) + 0.5, None, 8, inputs)
    else:
        scales = torch.randn(outputs, inputs // group).to(dtype)
        points = torch.randint(0, 16, scales.shape, dtype=torch.uint8) if zeros else None
        nibbles = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
        weight = LowBitWeight(pack(nibbles), scales, points, 4, group)
    packed = pack_for_cuda(weight, dtype)
    actual = _weight_of(packed.data, outputs, inputs, bits, group, zeros, dtype)
    assert torch.equal(actual, dequantize(weight, torch.float64))
    assert packed.shape == weight.shape and packed[3:] == (bits, weight.group, zeros, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "outputs", "inputs"),
    [
        (8, 128, True, 1, 8),
        (8, 128, True, 33, 200),
        (4, 32, True, 17, 160),
        (4, 64, False, 40, 64),
        (4, 128, False, 16, 256),
    ],
)
def test_unpacked_is_what_was_packed(bits, group, symmetric, outputs, inputs, dtype):
    weight = quantize(torch.randn(outputs, inputs).to(dtype), bits, group, symmetric)
    found = unpacked(pack_for_cuda(weight, dtype))
    assert found[3:] == weight[3:] and (found.zeros is None) == (weight.zeros is None)
    for part, expected in zip(found.tensors, weight.tensors, strict=True):
        assert part.dtype is expected.dtype and torch.equal(part, expected)
    assert unpacked(weight) is weight


def test_refusals():
    weight = quantize(torch.randn(4, 64), 4, 32)
    for arguments, message in (
        ((weight, torch.float32), "dtype must be bfloat16 or float16, not torch.float32"),
        ((quantize(torch.randn(4, 60), 8), torch.float16), "60 inputs are no multiple of 8"),
    ):
        with pytest.raises(ValueError, match=message):
            pack_for_cuda(*arguments)
    packed, x = pack_for_cuda(weight, torch.float16), torch.randn(2, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="same bits"):
        ops.decode_packed_linear(x, [packed, pack_for_cuda(weight, torch.bfloat16)])
    with pytest.raises(TypeError, match="data of a PackedWeight must be uint8"):
        ops.decode_packed_linear(x, packed._replace(data=packed.data.int()))
    with pytest.raises(BackendError, match=r"takes no torch\.float32 input with weights packed for torch.float16"):
        ops.decode_packed_linear(x.float(), packed, backend="cuda")
    with pytest.raises(BackendError, match="takes no more than 64 rows, such as 65"):
        ops.decode_packed_linear(x[:1].expand(65, 64), packed, backend="cuda")


@pytest.mark.parametrize("rows", [3, 65])
def test_a_layer_on_a_cpu(rows):
    weight = quantize(torch.randn(33, 64).half(), 4, 32, False)
    x, bias = torch.randn(rows, 64, dtype=torch.float16), torch.randn(33, dtype=torch.float16)
    output = ops.low_bit_linear(x, pack_for_cuda(weight, torch.float16), bias)
    expected = x.double() @ dequantize(weight, torch.float64).T + bias
    torch.testing.assert_close(output.double(), expected, rtol=2e-3, atol=2e-2)


def test_parts_of_a_weight():
    weight = quantize(torch.randn(100, 64).half(), 4, 32, False)
    parts = list(parts_of(pack_for_cuda(weight, torch.float16), 40 * 64 * 2))
    assert [(first, part.outputs) for first, part in parts] == [(0, 32), (32, 32), (64, 32), (96, 4)]
    whole = torch.cat([dequantize_packed(part) for _, part in parts])
    assert torch.equal(whole, dequantize(weight, torch.float16))


def test_other_weights_are_refused() -> None:
    low = quantize(torch.randn(16, 128), 4, 128, symmetric=True)
    packed, input = pack_for_cuda(low, torch.float16), torch.randn(2, 128).half()
    for op, other, message in (
        (ops.decode_packed_linear, low, "must be a PackedWeight, as pack_for_cuda makes it, not LowBitWeight"),
        (ops.decode_packed_linear, [packed, input], "must be a PackedWeight, as pack_for_cuda makes it, not Tensor"),
        (ops.decode_low_bit_linear, packed, "must be a LowBitWeight, as quantize makes it, not PackedWeight"),
        (ops.decode_low_bit_linear, input, "must be a LowBitWeight, as quantize makes it, not Tensor"),
    ):
        with pytest.raises(TypeError, match=message):
            op(input, other)
    with pytest.raises(ValueError, match=r"data must have shape \(1, 2112\), not \(1, 1056\)"):
        ops.decode_packed_linear(input, packed._replace(bits=8))


@pytest.mark.parametrize("use", [unpacked, dequantize_packed, partial(ops.decode_packed_linear, torch.ones(2, 64))])
def test_a_packed_weight_whose_parts_do_not_fit_is_refused(use: Callable[..., Any]) -> None:
    packed = pack_for_cuda(quantize(torch.randn(40, 64), 4, 32), torch.bfloat16)
    for changed, message in (
        ({"outputs": 0}, "no PackedWeight with {'outputs': 0"),
        ({"outputs": 100}, r"data must have shape \(7, 1152\), not \(3, 1152\)"),
        ({"inputs": 60}, "'inputs': 60"),
        ({"inputs": 56}, "'inputs': 56"),  # no multiple of the group
        ({"bits": 3}, "'bits': 3"),
        ({"group": 0}, "'group': 0"),
        ({"has_zeros": True}, "data must have shape"),
        ({"dtype": torch.float32}, "'dtype': torch.float32"),
        ({"data": None}, "data of a PackedWeight must be uint8"),
        ({"data": packed.data.view(torch.int8)}, "data of a PackedWeight must be uint8"),
        ({"data": packed.data.flatten()}, "data of a PackedWeight must be uint8"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            use(packed._replace(**changed))
    with pytest.raises(TypeError, match="must be a PackedWeight, as pack_for_cuda makes it, not Tensor"):
        use(torch.ones(3))


@pytest.mark.parametrize("bits, group, symmetric", [(8, 136, True), (4, 32, False), (4, 64, True), (4, 128, False)])
def test_shape_of_the_data(bits: int, group: int, symmetric: bool) -> None:
    packed = pack_for_cuda(quantize(torch.randn(17, 136 if bits == 8 else 256), bits, group, symmetric), torch.bfloat16)
    assert packed.data.shape == data_shape(packed)
