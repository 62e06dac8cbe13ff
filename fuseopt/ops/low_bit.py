"""Weights of linear layers in 8 or 4 bits: quantising, dequantising, and how they are stored."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fuseopt.ops.library import FLOATING, check_shape

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUPS = (32, 64, 128)
"""Numbers of neighbouring inputs that may share a 4-bit scale."""
MAX_ROWS = 64
"""Most rows of the kernels. With more, dequantising the weight and using the BLAS library is as fast."""

# Bits 4j to 4j + 3 of a word hold input NIBBLE_ORDER[j] of its eight: `word >> 4 * i & 0x000f000f` is then the pair
# (2i, 2i + 1) in two 16-bit halves.
NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PER_WORD = len(NIBBLE_ORDER)

# The scale is the largest absolute value, divided by one of these: the last quantised value that it reaches, or more,
# which clips the largest values and rounds the others finer.
_DIVISORS = {8: (127.0, 133.0, 140.0, 148.0, 158.0), 4: (8.0, 7.0, 7.5, 8.5, 9.0, 9.6, 10.3, 11.2)}
# With zero points, the same for the distance from the lowest to the highest value.
_DIVISORS_OF_RANGE = (15.0, 15.8, 16.7, 17.7, 18.8, 20.1, 21.5)
_CHUNK = 1 << 24


class LowBitWeight(NamedTuple):
    """A weight [N, K] of a linear layer, quantised.

    Attributes:
        values: with 8 bits int8 [N, K], from -127 to 127 if `quantize` made them; with 4 bits int32 [N, K / 8], eight
            unsigned nibbles a word in the order that `NIBBLE_ORDER` gives. Contiguous.
        scales: with 8 bits float32 [N, 1], else [N, K / group] in the model's dtype. May be negative.
        zeros: uint8 [N, K / group] from 0 to 15; None for a symmetric weight.
        bits: 8, with the weight `values * scales`; or 4, with `(nibbles - zeros) * scales`, where no zeros count as 8.
        group: how many neighbouring inputs share a scale; K with 8 bits.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.values.shape[0], self.values.shape[1] * (1 if self.bits == 8 else _PER_WORD)))

    @property
    def dtype(self) -> torch.dtype:
        """That of `values`."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(part for part in (self.values, self.scales, self.zeros) if part is not None)


def check_kind(weight: object, kind: type, made_by: str) -> None:
    """Raises a TypeError for something else than `kind`, which `made_by` makes."""
    if not isinstance(weight, kind):
        raise TypeError(f"weight must be a {kind.__name__}, as {made_by} makes it, not {type(weight).__name__}")


def check_low_bit(weight: LowBitWeight) -> None:
    """Raises a TypeError or ValueError for something else than `quantize` makes."""
    check_kind(weight, LowBitWeight, "quantize")
    values, scales, zeros, bits, group = weight
    if bits not in (4, 8):
        raise ValueError(f"a LowBitWeight has 4 or 8 bits, not {bits!r}")
    _check_part(f"values of {bits} bits", values, (torch.int8 if bits == 8 else torch.int32,))
    outputs, inputs = weight.shape
    if 0 in weight.shape:
        raise ValueError(f"a LowBitWeight has at least one output and one input, not shape {tuple(weight.shape)}")
    if group not in ((inputs,) if bits == 8 else GROUPS) or inputs % group:
        raise ValueError(f"no LowBitWeight of {inputs} inputs has {bits} bits and groups of {group}")
    if zeros is not None and bits == 8:
        raise ValueError("8 bits have no zeros")
    groups = torch.Size((outputs, inputs // group))
    parts: list[tuple[str, Tensor, tuple[torch.dtype, ...]]] = [("scales", scales, FLOATING)]
    if zeros is not None:
        parts.append(("zeros", zeros, (torch.uint8,)))
    for name, part, dtypes in parts:
        _check_part(name, part, dtypes)
        check_shape(name, part, groups)
        if part.device != values.device:
            raise ValueError(f"{name} are on {part.device}, values on {values.device}; move one of them")


def _check_part(name: str, part: object, dtypes: tuple[torch.dtype, ...]) -> None:
    if isinstance(part, Tensor) and part.dtype in dtypes and part.dim() == 2:
        return
    found = f"{part.dtype} of shape {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise TypeError(f"{name} must be {wanted} in two dimensions, not {found}")


def not_quantised_reason(shape: torch.Size, dtype: torch.dtype, bits: int, group: int) -> str | None:
    """Why `quantize` does not take a weight; None if it does."""
    if dtype not in DTYPES:
        return f"its weight is {dtype}; quantised are float32, bfloat16 and float16"
    if len(shape) != 2 or 0 in shape:
        return f"its weight has shape {tuple(shape)}, not [N, K] with at least one output and one input"
    if bits == 4 and shape[1] % group:
        return f"its {shape[1]} inputs are no multiple of the group of {group}"
    return None


def quantize(weight: Tensor, bits: int, group: int = 128, symmetric: bool = True) -> LowBitWeight:
    """Quantises by rounding to the nearest value, with the clipping that minimises the squared error.

    For each output (8 bits) or group of inputs (4 bits), several scales are tried, and the one with the least sum of
    squared errors is taken. Runs on the weight's device, in parts of 64 MiB.

    Args:
        weight: [N, K], float32, bfloat16 or float16, of any strides.
        bits: 8 or 4.
        group: with 4 bits 32, 64 or 128; K must be a multiple of it. Ignored with 8 bits.
        symmetric: whether zero is in the middle. If False, with 4 bits, each group has a zero point.

    Raises:
        TypeError: `weight` is not a dense tensor.
        ValueError: arguments other than these.
    """
    if not isinstance(weight, Tensor) or weight.layout is not torch.strided:
        kind = f"a tensor of {weight.layout}" if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(f"quantize: weight must be a dense tensor [N, K], not {kind}")
    if not isinstance(bits, int) or bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, not {bits!r}")
    if bits == 8 and not symmetric:
        raise ValueError("8 bits are symmetric; zero points need 4 bits")
    if bits == 4 and group not in GROUPS:
        raise ValueError(f"group must be one of {', '.join(map(str, GROUPS))}, not {group!r}")
    reason = not_quantised_reason(weight.shape, weight.dtype, bits, group)
    if reason is not None:
        raise ValueError(f"quantize: {reason}")
    size = weight.shape[1] if bits == 8 else group
    scale_dtype = torch.float32 if bits == 8 else weight.dtype
    with torch.no_grad():
        parts = [
            _quantized(part.to(torch.float32).unflatten(1, (-1, size)), bits, symmetric, scale_dtype)
            for part in weight.detach().split(max(_CHUNK // weight.shape[1], 1))
        ]
        values, scales, zeros = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return LowBitWeight(values, scales, None if symmetric else zeros, bits, size)


def _quantized(groups: Tensor, bits: int, symmetric: bool, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Values, scales and zero points of float32 [N, groups, group]."""
    least = groups.new_full(groups.shape[:2], torch.inf)
    scales, zeros = torch.zeros_like(least), torch.zeros_like(least)
    for scale, zero in _candidates(groups, bits, symmetric):
        scale = scale.to(scale_dtype).float()
        error = ((_nearest(groups, scale, zero, bits) - zero[..., None]) * scale[..., None] - groups).square_().sum(-1)
        # A group that is not finite has no least error; its scale is not finite either.
        better = ~(error >= least)
        least, scales, zeros = (
            torch.where(better, new, old) for new, old in ((error, least), (scale, scales), (zero, zeros))
        )
    values = _nearest(groups, scales, zeros, bits).nan_to_num_(0).flatten(1)
    stored = values.to(torch.int8) if bits == 8 else pack(values.to(torch.uint8))
    return stored, scales.to(scale_dtype), zeros.to(torch.uint8)


def _candidates(groups: Tensor, bits: int, symmetric: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Scales and zero points [N, groups] to choose from."""
    if symmetric:
        high, low = groups.amax(-1), groups.amin(-1)
        largest = torch.where(-low > high, low, high)
        zero = torch.full_like(largest, 0.0 if bits == 8 else 8.0)
        for divisor in _DIVISORS[bits]:
            # Nibbles reach -8 but only 7: the value of largest magnitude gets the longer side, by the scale's sign.
            yield (largest.abs() if bits == 8 else -largest) / divisor, zero
        return
    high, low = groups.amax(-1).clamp_(min=0), groups.amin(-1).clamp_(max=0)
    for divisor in _DIVISORS_OF_RANGE:
        scale = (high - low) / divisor
        middle = (high + low) / 2
        zero = (7.5 - middle / torch.where(scale == 0, 1, scale)).round_().clamp_(0, 15)
        yield scale, zero.nan_to_num_(0)


def _nearest(groups: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    lowest, highest = (-127, 127) if bits == 8 else (0, 15)
    divisor = torch.where(scale == 0, 1, scale)
    return (groups / divisor[..., None]).add_(zero[..., None]).round_().clamp_(lowest, highest)


def dequantize(weight: LowBitWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight [N, K] that `weight` stands for, computed in float32, then rounded.

    Args:
        weight: of `quantize`.
        dtype: the result's: float32, float16, bfloat16, or float64, which is computed in float64.

    Raises:
        TypeError, ValueError: something else than `quantize` makes, or another dtype.
    """
    check_low_bit(weight)
    if dtype not in FLOATING:
        raise ValueError(f"dequantize: dtype must be float32, float16, bfloat16 or float64, not {dtype}")
    values, scales, zeros, bits, group = weight
    exact = torch.promote_types(torch.promote_types(dtype, torch.float32), scales.dtype)
    grouped = (values if bits == 8 else unpack(values)).unflatten(1, (-1, group)).to(exact)
    if bits == 4:
        grouped = grouped - (8 if zeros is None else zeros.to(exact)[..., None])
    return (grouped * scales.to(exact)[..., None]).flatten(1).to(dtype)


def pack(nibbles: Tensor) -> Tensor:
    """[N, K] of 0 to 15 -> int32 [N, K / 8], in the order of `NIBBLE_ORDER`."""
    words = nibbles.unflatten(1, (-1, _PER_WORD))
    packed = words.new_zeros(words.shape[:2], dtype=torch.int32)
    for place, index in enumerate(NIBBLE_ORDER):
        packed |= words[..., index].to(torch.int32) << 4 * place
    return packed


def unpack(words: Tensor) -> Tensor:
    """int32 [N, K / 8] -> uint8 [N, K] of 0 to 15: `pack` undone."""
    nibbles = words.new_empty((*words.shape, _PER_WORD), dtype=torch.uint8)
    for place, index in enumerate(NIBBLE_ORDER):
        nibbles[..., index] = words >> 4 * place & 15
    return nibbles.flatten(1)
