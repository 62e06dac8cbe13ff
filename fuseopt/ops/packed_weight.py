"""Weights in 8 or 4 bits in the order in which the CUDA kernels read them."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fuseopt.ops.low_bit import LowBitWeight

_LINE = 16  # outputs of a line
_LANES = (8, 4)  # of a warp: outputs of a tile, and pieces of 8 inputs
_BYTE_ORDER = (0, 2, 1, 3)  # of 8 bits: `word >> 8 * i & 0x00ff00ff` is then the pair (2i, 2i + 1)
_BLOCK = {8: 64, 4: 128}  # inputs of a block
_MAGIC = {torch.bfloat16: 128.0, torch.float16: 1024.0}  # what kernels replace the last bits of


def pack_for_cuda(weight: LowBitWeight, dtype: torch.dtype) -> Tensor:
    """The weight as `csrc/cuda/decode/linear/low_bit/packed_weight.cuh` describes it.

    Args:
        weight: [N, K], of `quantize`.
        dtype: of the inputs, bfloat16 or float16; the scales of 4 bits are rounded to it.

    Returns:
        uint8 [N / 16 rounded up, bytes of a line], on the weight's device.
    """
    values, scales, zeros, bits, group = weight
    outputs, inputs = weight.shape
    lines, blocks = -(-outputs // _LINE), -(-inputs // _BLOCK[bits])
    more_outputs, more_inputs = lines * _LINE - outputs, blocks * _BLOCK[bits] - inputs
    of_lanes = (lines, 2, 8, blocks, 2)  # line, low or high output of a lane, lane // 4, block, unit
    if bits == 8:
        words = F.pad(values, (0, more_inputs, 0, more_outputs)).view(*of_lanes, 4, 2, 4)[..., list(_BYTE_ORDER)]
        units = words.permute(0, 3, 4, 2, 5, 1, 6, 7).reshape(lines, -1)
        header = F.pad(scales.flatten().float(), (0, more_outputs)).view(lines, _LINE)
        return torch.cat([_bytes(header), _bytes(units)], 1)
    fill = -2004318072  # eights
    words = F.pad(values, (0, more_inputs // 8, 0, more_outputs), value=fill).view(*of_lanes, 2, 4)
    units = words.permute(0, 3, 4, 2, 6, 5, 1).reshape(lines, blocks, -1)

    def of_groups(tensor: Tensor, value: float) -> Tensor:
        padded = F.pad(tensor.to(dtype), (0, more_inputs // group, 0, more_outputs), value=value)
        return padded.view(lines, 2, 8, blocks, _BLOCK[4] // group).permute(0, 3, 4, 2, 1)

    parts = [of_groups(scales, 0.0)]
    if zeros is not None:
        parts.append(of_groups(zeros.to(dtype) + _MAGIC[dtype], _MAGIC[dtype] + 8))
    of_block = torch.stack(parts, 3).reshape(lines, blocks, -1)
    return torch.cat([_bytes(units), _bytes(of_block)], 2).flatten(1)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
