"""Triton's interpreter: whether it runs on this machine's NumPy, and faster; for a process with TRITON_INTERPRET=1."""

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

UNFIT = "Triton's interpreter is unfit for this NumPy"


@triton.jit
def loop_from_the_program_id(output):
    for i in range(tl.program_id(0), 3):
        tl.store(output + i, 1.0)


@functools.cache
def unfit_interpreter() -> str | None:
    """Why a loop from a tensor on cannot be interpreted, or None. NumPy 2.4 refuses how Triton 3.6 makes it an int."""
    output = torch.zeros(3)
    try:
        loop_from_the_program_id[(1,)](output)
    except InterpreterError as error:
        return f"{UNFIT}: {error.__cause__}"
    assert output.tolist() == [1, 1, 1]
    return None


def exchange_the_language_once() -> Iterator[None]:
    """Meanwhile `triton.language` is exchanged for what is interpreted where a kernel is launched only.

    Triton goes through all that is in it in every call of a jitted function by another one too, where it finds nothing
    left to exchange: close to half of the time of these tests.
    """
    exchange = interpreter._patch_lang

    def exchange_what_is_left(function: Callable) -> object:
        is_left = any(tl.core.is_builtin(module.load) for module in (tl, tl.core))
        return exchange(function) if is_left else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", exchange_what_is_left)
        yield
