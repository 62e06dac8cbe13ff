"""Launches a compiled kernel again without Triton's check of every argument, which takes longer than the launch."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton

# In these versions a compiled kernel takes all arguments of its function, and skips constants. Later ones may differ.
_TAKES_ALL = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 10)
_ALIGNMENT = 16


class Launch:
    """A kernel for calls that differ only in the addresses of their tensors.

    Call: the tensors, on one device, which is the current one, in the order of the kernel's first parameters; each
    has the dtype that it had in the first call, or is None as it was there. `floats` are numbers that may differ from
    call to call, as Triton compiles a kernel for no value of a float.

    What Triton compiles a kernel for is then the same but for which tensors begin at multiples of 16 bytes. Where all
    do, what it compiled before is launched; else it is asked.

    Args:
        kernel: its parameters are tensors, then numbers, then floats, then constants.
        grid: programs along up to three dimensions.
        numbers: the kernel's, in their order.
        constants: by name, and Triton's options, as `num_warps`.
    """

    def __init__(
        self, kernel: Any, grid: Sequence[int], numbers: Sequence[float], constants: Mapping[str, Any]
    ) -> None:
        self._grid = (*grid, 1, 1)[:3]
        self._kernel = kernel[self._grid]
        self._numbers = tuple(numbers)
        self._constants = dict(constants)
        self._of_parameters = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *tensors: torch.Tensor | None, floats: Sequence[float] = ()) -> None:
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        is_aligned = functools.reduce(operator.or_, addresses) % _ALIGNMENT == 0
        if is_aligned and self._compiled is not None:
            # For a tensor it would query the driver for its device.
            self._compiled(*addresses, *self._numbers, *floats, *self._of_parameters)
            return
        compiled = self._kernel(*tensors, *self._numbers, *floats, **self._constants)
        # The interpreter compiles nothing.
        if is_aligned and compiled is not None and _TAKES_ALL:
            self._compiled = compiled[self._grid]
