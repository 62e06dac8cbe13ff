"""Which errors mean that memory ran out."""

from __future__ import annotations

import torch

# Where PyTorch raises a plain RuntimeError: its CPU allocator, cuBLAS for a handle, the CUDA runtime for a graph.
_PHRASES = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PHRASES)
