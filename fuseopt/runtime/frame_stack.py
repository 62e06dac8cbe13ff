"""Memory for the frames of Python's calls.

CPython 3.11 and later takes it in chunks of 16 KiB and gives each back when its last frame has returned. Where a chunk
is full, every call that a loop makes maps memory, touches it for the first time and unmaps it.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar, cast

Function = TypeVar("Function")

# In values of 8 bytes. A chunk is the power of two that has room for a frame: this one's is 2 MiB, half of it free.
_STACK = 2**17


def with_room(function: Function) -> Function:
    """Decorates a plain function: the frames of what it calls, some thousand one in another, lie in one chunk."""
    plain = cast(FunctionType, function)
    plain.__code__ = plain.__code__.replace(co_stacksize=_STACK)
    return function
