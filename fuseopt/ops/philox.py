"""Counter-based random numbers for dropout: Philox (Salmon et al. 2011) in plain PyTorch.

The seed and an element's position decide whether dropout keeps it. Kernels compute the same numbers in the forward and
in the backward, so no mask is stored. `dropout_add_layer_norm` uses all numbers of Philox4x32-10. The masks of a
compiled step use one number of Philox2x32-7, which has the fewest rounds that pass BigCrush.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
# Of Philox2x32; its authors find no flaw with 7 or more rounds.
_ROUND_2, _ROUNDS_2 = 0xD256D193, 7

PAIR_ROUNDS, PAIR_FACTOR, PAIR_KEY = 7, 0xD256D193, 0x9E3779B9

# One draw gives this many 16-bit numbers, for as many neighbouring columns.
COLUMNS = 8


def draw_seed(device: torch.device) -> Tensor:
    """A seed [1], int64, for one call with dropout, drawn from torch's generator of the device."""
    return torch.randint(2**62, (1,), device=device)


def threshold(p: float) -> int:
    """An element is kept if its 16-bit number is at least this."""
    return round(p * 2**16)


def philox(seed: Tensor, c0: Tensor, c1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four 32-bit numbers, as int64, for each counter (c0, c1, 0, 0).

    Args:
        seed: [1], int64.
        c0, c1: int64, less than 2**32, broadcastable to each other.
    """
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1 = torch.broadcast_tensors(c0, c1)
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(_ROUNDS):
        (a_high, a_low), (b_high, b_low) = _product(c0, _ROUND_A), _product(c2, _ROUND_B)
        c0, c1, c2, c3 = b_high ^ c1 ^ k0, b_low, a_high ^ c3 ^ k1, a_low
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return c0, c1, c2, c3


def philox_pair(seed: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Philox2x32-7: two 32-bit numbers, as int64, for each counter (position, seed >> 32); key: its low half.

    Args:
        seed: [], int64.
        position: int64, less than 2**32.
    """
    key, second = seed & _MASK, ((seed >> 32) & _MASK).expand_as(position)
    first = position
    for _ in range(PAIR_ROUNDS):
        high, low = _product(first, PAIR_FACTOR)
        first, second = high ^ key ^ second, low
        key = (key + PAIR_KEY) & _MASK
    return first, second


def _product(number: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Upper and lower 32 bits of the product, computed by halves of `factor` because int64 cannot hold all of it."""
    low, high = number * (factor & 0xFFFF), number * (factor >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & _MASK


def keep_mask(seed: Tensor, shape: torch.Size, p: float) -> Tensor:
    """[..., columns], boolean, on the device of `seed`: the element in row r and column c by counter (r, c // 8)."""
    *leading, columns = shape
    rows = torch.Size(leading).numel()
    row = torch.arange(rows, device=seed.device)[:, None]
    group = torch.arange(-(-columns // COLUMNS), device=seed.device)[None, :]
    draws = torch.stack(philox(seed, row, group), -1)
    numbers = torch.stack((draws & 0xFFFF, draws >> 16), -1).flatten(1)[:, :columns]
    return (numbers >= threshold(p)).reshape(shape)


def philox2(key: Tensor, c0: Tensor, c1: Tensor) -> tuple[Tensor, Tensor]:
    """Philox2x32-7: two 32-bit numbers, as int64, for each counter (c0, c1). Arguments: int64, less than 2**32."""
    for _ in range(_ROUNDS_2):
        high, low = _product(c0, _ROUND_2)
        c0, c1 = high ^ key ^ c1, low
        key = (key + _KEY_A) & _MASK
    return c0, c1


def keep_scores(seed: Tensor, shape: torch.Size, p: float) -> Tensor:
    """Dropout mask of attention weights: [batch, heads, queries, keys], bool, on the device of `seed`.

    One draw serves four elements: two rows and two columns, each 8 apart. In the tiles of tensor cores, for
    [queries, keys] and for [keys, queries], one thread holds all four. Each item and head has its own key and its own
    offsets for the counters.
    """
    batch, heads, queries, keys = shape
    matrix = torch.arange(batch * heads, device=seed.device)
    key, place_0, place_1, _ = (word[:, None, None] for word in philox(seed, matrix, torch.zeros_like(matrix)))
    row, column = torch.arange(queries, device=seed.device)[:, None], torch.arange(keys, device=seed.device)
    counters = torch.broadcast_tensors((column & ~8) ^ place_0, (row & ~8) ^ place_1)
    first, second = philox2(key, *counters)
    draw = torch.where(row & 8 == 0, first, second)
    number = torch.where(column & 8 == 0, draw & 0xFFFF, draw >> 16)
    return (number >= threshold(p)).reshape(shape)
