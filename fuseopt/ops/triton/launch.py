"""Launches a compiled kernel again without Triton's check of every argument, which takes longer than the launch."""

import functools
import operator
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton

# In these versions a compiled kernel takes all arguments of its function, and skips constants. Later ones may differ.
_TAKES_ALL = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 10)
_ALIGNMENT = 16
# What `parameters_of` understands of a compiled kernel: no cluster, no attribute of a launch, no scratch memory.
_PLAIN = {
    "num_ctas": 1,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
}
_FORMATS = {"i32": "i", "i64": "q", "u64": "Q"}


class Loaded(NamedTuple):
    """A compiled kernel that cuLaunchKernel can launch.

    Attributes:
        function: the kernel's handle, a CUfunction of the device that was the current one.
        threads: of a block.
        shared: dynamic shared memory in bytes.
        parameters: of the kernel: the place that stands for a tensor or a float, or a constant's bytes.
        kernel: has to live as long as the handle is used.
    """

    function: int
    threads: int
    shared: int
    parameters: list[int | bytes]
    kernel: Any


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
        first, second, third = (*grid, 1, 1)[:3]
        self.grid = (first, second, third)
        self._function, self._kernel = kernel, kernel[self.grid]
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
            self._compiled = compiled[self.grid]

    def loaded(self, tensors: Mapping[int, torch.Tensor], floats: Mapping[int, float]) -> Loaded | None:
        """The kernel of a call, compiled and loaded on the current device.

        Args:
            tensors, floats: in the order of a call, by the places that stand for them in the parameters.

        Returns:
            None if this version of Triton compiles or launches in another way than those known here.
        """
        values = [*tensors.values(), *self._numbers, *floats.values()]
        compiled = self._function.warmup(*values, grid=self.grid, **self._constants)
        parameters = parameters_of(compiled, [*tensors], self._numbers, [*floats])
        if parameters is None:
            return None
        compiled[self.grid]  # loads it
        if not isinstance(getattr(compiled, "function", None), int):
            return None
        threads = compiled.metadata.target.warp_size * compiled.metadata.num_warps
        return Loaded(compiled.function, threads, compiled.metadata.shared, parameters, compiled)


def parameters_of(
    compiled: Any, tensors: Sequence[int], numbers: Sequence[float], floats: Sequence[int]
) -> list[int | bytes] | None:
    """What the parameters of a compiled kernel are.

    Args:
        compiled: of a function that takes tensors, numbers, floats, then constants.
        tensors, floats: the places that stand for them in the list.
        numbers: their values.

    Returns:
        The places of tensors and floats, and the bytes of constants. None if the kernel's code has other parameters, or
        if its launch needs more than parameters, grid, block and shared memory.
    """
    metadata = getattr(compiled, "metadata", None)
    types = list(getattr(getattr(compiled, "src", None), "signature", {}).values())
    given: list[tuple[str, Any]] = [("*", place) for place in tensors]
    given += [("", number) for number in numbers]
    given += [("fp32", place) for place in floats]
    if not _TAKES_ALL or len(types) < len(given) or set(types[len(given) :]) - {"constexpr"}:
        return None
    if getattr(metadata, "tensordesc_meta", None) or any(getattr(metadata, k, None) != v for k, v in _PLAIN.items()):
        return None
    found: list[int | bytes] = []
    for (wanted, value), kind in zip(given, types, strict=False):
        if kind == "constexpr":  # a number for whose value Triton has compiled the kernel
            continue
        if not kind.startswith(wanted) or (not wanted and kind not in _FORMATS):
            return None
        found.append(value if wanted else struct.pack(_FORMATS[kind], value))
    found += [bytes(8)] * 2  # pointers to scratch memory, of which such a kernel uses none
    floating = set(floats)
    sizes = [len(each) if isinstance(each, bytes) else 4 if each in floating else 8 for each in found]
    return found if sizes == _sizes_in_code(compiled) else None


def _sizes_in_code(compiled: Any) -> list[int]:
    """Bytes of each parameter by the kernel's PTX."""
    entry = re.search(r"\.entry[^(]*\(([^)]*)\)", getattr(compiled, "asm", {}).get("ptx", ""))
    bits = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)", entry.group(1)) if entry else []
    return [int(each) // 8 for each in bits]
