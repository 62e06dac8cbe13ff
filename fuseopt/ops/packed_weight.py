"""Weights in 8 or 4 bits in the order in which the CUDA kernels read them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fuseopt.ops.library import FLOATING, check_shape
from fuseopt.ops.low_bit import GROUPS, LowBitWeight, check_kind, check_low_bit

DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes of the inputs that packed weights are multiplied with."""
ALIGNMENT = 8
"""The number of inputs must be a multiple of this, the number of values that a kernel loads at a time."""

_LINE = 16  # outputs of a line
_BLOCK = {8: 64, 4: 128}  # bits -> inputs of a block
_BLOCK_BYTES = 1024  # bytes of a block's values
_HEADER = 4 * _LINE  # bytes of a line's scales, with 8 bits
_MAGIC = {torch.bfloat16: 128.0, torch.float16: 1024.0}  # kernels put an integer into the last bits of these
_EIGHTS = -2004318072


class PackedWeight(NamedTuple):
    """Quantised weight [N, K] of a linear layer, stored in the order of tensor core fragments.

    Attributes:
        data: uint8 [N / 16 rounded up, bytes of a line], contiguous, as `csrc/cuda/decode/linear/low_bit/
            packed_weight.cuh` describes it.
        outputs, inputs: N and K; K is a multiple of 8.
        bits, group: as in LowBitWeight.
        has_zeros: whether each group has a zero point.
        dtype: dtype of the inputs it is multiplied with, bfloat16 or float16, and of the scales with 4 bits.
    """

    data: Tensor
    outputs: int
    inputs: int
    bits: int
    group: int
    has_zeros: bool
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.outputs, self.inputs))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.data,)


def not_packed_reason(inputs: int) -> str | None:
    """The reason why `pack_for_cuda` refuses a weight with this number of inputs; None if it accepts it."""
    return f"its {inputs} inputs are no multiple of {ALIGNMENT}" if inputs % ALIGNMENT else None


def pack_for_cuda(weight: LowBitWeight, dtype: torch.dtype) -> PackedWeight:
    """Reorders a weight for the CUDA kernels.

    Args:
        weight: [N, K], of `quantize`, on any device.
        dtype: dtype of the inputs, bfloat16 or float16. With 4 bits, scales are rounded to it.

    Raises:
        TypeError, ValueError: something else than `quantize` makes, another dtype, or a K that is no multiple of 8.
    """
    check_low_bit(weight)
    values, scales, zeros, bits, group = weight
    outputs, inputs = weight.shape
    reason = not_packed_reason(inputs)
    if reason is not None:
        raise ValueError(f"pack_for_cuda: {reason}")
    if dtype not in DTYPES:
        raise ValueError(f"pack_for_cuda: dtype must be bfloat16 or float16, not {dtype}")
    lines, blocks = _counts(outputs, inputs, bits)
    more_outputs, more_inputs = lines * _LINE - outputs, blocks * _BLOCK[bits] - inputs
    of_lanes = (lines, 2, 8, blocks, 2)  # line, low or high output of a lane, lane // 4, block, unit
    if bits == 8:
        # Bytes are in the order 0, 2, 1, 3: `word >> 8 * i & 0x00ff00ff` is then the pair (2i, 2i + 1).
        words = F.pad(values, (0, more_inputs, 0, more_outputs)).view(*of_lanes, 4, 2, 2, 2)
        units = words.permute(0, 3, 4, 2, 5, 1, 6, 8, 7).reshape(lines, -1)
        header = F.pad(scales.flatten().float(), (0, more_outputs)).view(lines, _LINE)
        return PackedWeight(torch.cat([_bytes(header), _bytes(units)], 1), outputs, inputs, 8, group, False, dtype)
    words = F.pad(values, (0, more_inputs // 8, 0, more_outputs), value=_EIGHTS).view(*of_lanes, 2, 4)
    units = words.permute(0, 3, 4, 2, 6, 5, 1).reshape(lines, blocks, -1)

    def of_groups(tensor: Tensor, value: float) -> Tensor:
        padded = F.pad(tensor.to(dtype), (0, more_inputs // group, 0, more_outputs), value=value)
        return padded.view(lines, 2, 8, blocks, _BLOCK[4] // group).permute(0, 3, 4, 2, 1)

    parts = [of_groups(scales, 0.0)]
    if zeros is not None:
        parts.append(of_groups(zeros.to(dtype) + _MAGIC[dtype], _MAGIC[dtype] + 8))
    of_block = torch.stack(parts, 3).reshape(lines, blocks, -1)
    data = torch.cat([_bytes(units), _bytes(of_block)], 2).flatten(1)
    return PackedWeight(data, outputs, inputs, 4, group, zeros is not None, dtype)


def check_packed(weight: PackedWeight) -> None:
    """Raises a TypeError or ValueError for something else than `pack_for_cuda` makes."""
    check_kind(weight, PackedWeight, "pack_for_cuda")
    data, outputs, inputs, bits, group, has_zeros, dtype = weight
    groups = {8: (inputs,), 4: GROUPS}.get(bits, ())
    is_sized = outputs > 0 and inputs > 0 and inputs % ALIGNMENT == 0
    if not is_sized or group not in groups or inputs % group or (has_zeros and bits == 8) or dtype not in DTYPES:
        raise ValueError(f"pack_for_cuda makes no PackedWeight with {dict(list(weight._asdict().items())[1:])}")
    if not isinstance(data, Tensor) or data.dtype is not torch.uint8 or data.dim() != 2:
        raise TypeError("data of a PackedWeight must be uint8 [lines, bytes], as pack_for_cuda makes it")
    check_shape("data", data, data_shape(weight))


def check_input(input: Tensor, weights: Sequence[LowBitWeight | PackedWeight] = ()) -> None:
    """Raises a TypeError or ValueError if `input` cannot be multiplied with quantised weights."""
    if not isinstance(input, Tensor) or input.dtype not in FLOATING or input.dim() == 0:
        kind = f"{input.dtype} of shape {tuple(input.shape)}" if isinstance(input, Tensor) else type(input).__name__
        raise TypeError(f"input must be a float32, float16, bfloat16 or float64 tensor [..., K], not {kind}")
    for weight in weights:
        if weight.tensors[0].device != input.device:
            raise ValueError(
                f"input is on {input.device}, a quantised weight on {weight.tensors[0].device}; move one of them"
            )


def data_shape(weight: PackedWeight) -> torch.Size:
    """The shape that `data` has for the other attributes."""
    lines, blocks = _counts(weight.outputs, weight.inputs, weight.bits)
    if weight.bits == 8:
        return torch.Size((lines, _HEADER + blocks * _BLOCK_BYTES))
    of_group = 2 * _LINE * (2 if weight.has_zeros else 1)
    return torch.Size((lines, blocks * (_BLOCK_BYTES + _BLOCK[4] // weight.group * of_group)))


def unpacked(weight: LowBitWeight | PackedWeight) -> LowBitWeight:
    """The weight in the original order; `weight` itself if it is a LowBitWeight.

    Raises:
        TypeError, ValueError: something else than `quantize` or `pack_for_cuda` makes.
    """
    if isinstance(weight, LowBitWeight):
        return weight
    check_packed(weight)
    data, outputs, inputs, bits, group, has_zeros, dtype = weight
    lines, blocks = _counts(outputs, inputs, bits)
    if bits == 8:
        units = data[:, _HEADER:].contiguous().view(torch.int8).view(lines, blocks, 2, 8, 4, 2, 2, 2, 2)
        values = units.permute(0, 5, 3, 1, 2, 4, 6, 8, 7).reshape(lines * _LINE, -1)
        scales = data[:, :_HEADER].contiguous().view(torch.float32).view(-1, 1)
        return LowBitWeight(values[:outputs, :inputs].contiguous(), scales[:outputs], None, 8, group)
    of_blocks = data.view(lines, blocks, -1)
    units = of_blocks[..., :_BLOCK_BYTES].contiguous().view(torch.int32).view(lines, blocks, 2, 8, 4, 2, 2)
    values = units.permute(0, 6, 3, 1, 2, 5, 4).reshape(lines * _LINE, -1)
    of_groups = of_blocks[..., _BLOCK_BYTES:].contiguous().view(dtype).view(lines, blocks, _BLOCK[4] // group, -1, 8, 2)
    scales, *zeros = (
        part.permute(0, 4, 3, 1, 2).reshape(lines * _LINE, -1)[:outputs, : inputs // group].contiguous()
        for part in of_groups.unbind(3)
    )
    points = (zeros[0].float() - _MAGIC[dtype]).to(torch.uint8) if has_zeros else None
    return LowBitWeight(values[:outputs, : inputs // 8].contiguous(), scales, points, 4, group)


def parts_of(weight: PackedWeight, most_bytes: int) -> Iterator[tuple[int, PackedWeight]]:
    """Splits a weight along the outputs: yields the first output of each part, and the part.

    A part has at most `most_bytes` when dequantised, but at least 16 outputs.
    """
    step = max(most_bytes // (max(weight.inputs, 1) * weight.dtype.itemsize) // _LINE, 1) * _LINE
    for first in range(0, weight.outputs, step):
        data = weight.data[first // _LINE : (first + step) // _LINE]
        yield first, weight._replace(data=data, outputs=min(step, weight.outputs - first))


def _counts(outputs: int, inputs: int, bits: int) -> tuple[int, int]:
    """The number of lines, and of blocks in a line."""
    return -(-outputs // _LINE), -(-inputs // _BLOCK[bits])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
