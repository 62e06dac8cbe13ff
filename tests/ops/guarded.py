"""Runs Triton kernels in the interpreter on tensors next to unreadable pages: an access out of bounds ends the process.

TRITON_INTERPRET=1 python -m tests.ops.guarded
"""

import ctypes
import functools
import mmap
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.ops.cases import results
from tests.ops.interpreter import better, unfit_interpreter
from tests.ops.recorded_calls import TARGETS, Call, recorded

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
PROT_NONE = 0
_KEPT = []


def beside_a_guard(tensor: Tensor, *, at_end: bool) -> Tensor:
    """A copy with the tensor's strides, whose memory ends before (or begins after) an unreadable page."""
    size = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    pages = -(-size * tensor.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + 2 * mmap.PAGESIZE)
    _KEPT.append(memory)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (address, address + mmap.PAGESIZE + pages):
        assert LIBC.mprotect(guard, mmap.PAGESIZE, PROT_NONE) == 0
    offset = mmap.PAGESIZE + (pages - size * tensor.itemsize if at_end else 0)
    data = torch.frombuffer(memory, dtype=torch.uint8, count=size * tensor.itemsize, offset=offset).view(tensor.dtype)
    return data.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def wide_calls() -> Iterator[Call]:
    """Calls of the kernels for wide rows, at a width where only the first row is aligned to a vector."""
    raw = torch.ops.fuseopt
    for dtype in (torch.float16, torch.float32):
        wide = torch.randn(2, 33001).to(dtype)
        target, stored = torch.tensor([5, 33000]), torch.ones(2)
        yield Call(raw.softmax_fwd.triton, (wide, None, 1.0, None))
        yield Call(raw.softmax_fwd.triton, (wide, wide, 1.0, None))
        yield Call(raw.softmax_bwd.triton, (wide, wide.softmax(-1), 1.0, dtype))
        yield Call(raw.cross_entropy_fwd.triton, (wide, target, -100, 0.1, 0.0))
        yield Call(raw.cross_entropy_bwd.triton, (stored, wide, target, stored, stored, -100, 0.1, 0.0))


def main() -> None:
    reason = unfit_interpreter()
    if reason is not None:
        print(reason)
        return
    next(iter(guard := better()))
    calls = [call for calls in recorded(TARGETS["interpreted"]).values() for call in calls]
    calls += list(wide_calls())
    for call in calls:
        wanted = call.run()
        for at_end in (True, False):
            print(call.op, "at the end" if at_end else "at the beginning", flush=True)
            place = functools.partial(beside_a_guard, at_end=at_end)
            output = call.op(*tree_map_only(Tensor, place, call.arguments))
            if output is not None:
                torch.testing.assert_close(
                    results(output), wanted[: len(results(output))], rtol=1e-3, atol=1e-3, equal_nan=True
                )
    guard.close()
    print(f"{2 * len(calls)} calls")


if __name__ == "__main__":
    main()
