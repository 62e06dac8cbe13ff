"""The random numbers that torch's `exponential_()` draws on a GPU, for kernels that compute them one by one.

The kernels' own code is csrc/cuda/decode/select/exponential_draw.cuh. `random` is [3] int64 on the GPU: the seed and
the offset of a torch.Generator, and how many draws of the same size came before.
"""

import functools

import torch
from torch import Tensor

# Of torch's kernel: threads of a block, and numbers that a thread takes from a counter of Philox.
_DRAW_THREADS, _NUMBERS_OF_COUNTER = 256, 4
MOST_NUMBERS = 2**29
"""The most numbers that torch draws in one launch."""


@functools.cache
def _most_threads(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    return (
        properties.multi_processor_count * properties.max_threads_per_multi_processor // _DRAW_THREADS * _DRAW_THREADS
    )


def offset_of_draw(count: int, device: torch.device) -> int:
    """By how much a torch.Generator advances when `exponential_()` draws `count` float32 numbers on a GPU."""
    threads = min(-(-count // _DRAW_THREADS) * _DRAW_THREADS, _most_threads(device))
    return -(-count // (threads * _NUMBERS_OF_COUNTER)) * _NUMBERS_OF_COUNTER


def drawn(random: Tensor, shape: torch.Size) -> Tensor:
    """The numbers [shape] float32, from a generator of its own; waits for the device."""
    seed, offset, draws = random.tolist()
    generator = torch.Generator(random.device)
    generator.manual_seed(seed % 2**64)
    generator.set_offset(offset + draws * offset_of_draw(shape.numel(), random.device))
    return torch.empty(shape, device=random.device).exponential_(generator=generator)


def check_random(random: Tensor, numbers: Tensor) -> None:
    """Raises ValueError unless `random` can draw as many numbers as `numbers` has elements."""
    if random.dtype != torch.int64 or random.shape != (3,) or not random.is_cuda:
        raise ValueError(
            f"random must be [3] torch.int64 on a GPU, not {list(random.shape)} {random.dtype} on {random.device}"
        )
    if numbers.numel() > MOST_NUMBERS:
        raise ValueError(f"random serves up to {MOST_NUMBERS} numbers, not {numbers.numel()}")
