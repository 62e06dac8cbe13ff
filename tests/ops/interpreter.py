"""Whether Triton's interpreter runs on this machine's NumPy; for a process with TRITON_INTERPRET=1."""

import functools

import torch
import triton
import triton.language as tl
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
