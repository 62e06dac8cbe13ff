"""`in_one_chunk`: avoids repeated allocation of Python's frame stack while a step compiles.

CPython 3.11 and later allocates frames in chunks of 16 KiB and frees a chunk when its last frame returns. If a loop
runs at the end of a full chunk, each call in it maps, faults in and unmaps a new chunk.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar, cast

Function = TypeVar("Function")

# In slots of 8 bytes: a frame of 1 MiB. CPython rounds the chunk up to 2 MiB, so 1 MiB stays free for the callees.
_STACK = 2**17


def in_one_chunk(function: Function) -> Function:
    """Decorator that gives a plain function a large frame, so that about 1000 nested calls fit in its chunk."""
    plain = cast(FunctionType, function)
    plain.__code__ = plain.__code__.replace(co_stacksize=_STACK)
    return function
