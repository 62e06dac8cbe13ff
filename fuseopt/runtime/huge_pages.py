"""Huge pages for large new tensors on a CPU: reading them needs 512 times fewer address translations."""

import ctypes
import functools
import mmap
from collections.abc import Callable

from torch import Tensor

# The size on Linux on x86-64, and on ARM with pages of 4 KiB.
_HUGE_PAGE = 2 * 2**20
# In a smaller tensor, the ends that fill no huge page are a large share.
_SMALLEST = 4 * _HUGE_PAGE


def with_huge_pages(tensor: Tensor) -> Tensor:
    """Asks the system to use huge pages for the memory of `tensor`, and returns `tensor`.

    Call it before a new tensor is first written, since existing pages are not replaced. A huge page takes 2 MiB once
    any of it is written. Small tensors, devices other than the CPU and systems other than Linux are left as they are.
    """
    advise = _madvise()
    if advise is not None and tensor.is_cpu and tensor.nbytes >= _SMALLEST:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        # A Linux kernel without huge pages returns an error, which can be ignored.
        advise(first, end // mmap.PAGESIZE * mmap.PAGESIZE - first, mmap.MADV_HUGEPAGE)
    return tensor


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
