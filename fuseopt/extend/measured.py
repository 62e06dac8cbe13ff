"""What `Op.bench` measured of an op's backends on this machine, and how "auto" takes the fastest.

The times are in `fuseopt.runtime.measured_files`: one file for an op, its sources, the device and the versions. So a
changed kernel, or another GPU, finds none.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fuseopt.extend.backends import Kernel, both
from fuseopt.extend.signature import tensors_of
from fuseopt.runtime import measured_files

if TYPE_CHECKING:
    from fuseopt.extend.own_op import Op

# A backend must be this much faster than the one that "auto" would take without measurements.
_GAIN = 1.05

Key = tuple[str, int, bool]  # dtype and size class of the first tensor, and whether a gradient is needed


def size_class(elements: int) -> int:
    """Sizes between two powers of two are one class."""
    return elements.bit_length()


@dataclass(frozen=True)
class Measured:
    """Microseconds by backend, for each kind of call that was measured."""

    times: Mapping[Key, Mapping[str, float]]

    def text(self, arguments: Sequence[Any]) -> str:
        """The times of a call of this kind, as "triton 12.1 us, compile 15.0 us"; empty if it was not measured."""
        times = self.times.get(_key(arguments), {})
        return ", ".join(f"{name} {time:.1f} us" for name, time in sorted(times.items(), key=lambda item: item[1]))

    def ordered(self, kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
        """The kernels, and before them those that were measured as the fastest, for the calls for which they are."""
        names = [kernel.backend for kernel in kernels]
        fastest: dict[Key, str] = {}
        for key, times in self.times.items():
            present = {name: times[name] for name in names if name in times}
            usual = next(iter(present), None)
            if usual is None:
                continue
            best = min(present, key=lambda name: present[name])
            if present[best] * _GAIN < present[usual]:
                fastest[key] = best
        winners = [kernel for kernel in kernels if kernel.backend in fastest.values()]
        return (*(_preferred(kernel, fastest) for kernel in winners), *kernels)


@dataclass(frozen=True)
class Preferred:
    """For `Kernel.in_eager`: whether a backend is the fastest for a call."""

    backend: str
    fastest: Mapping[Key, str]

    def __call__(self, *arguments: Any) -> bool:
        return self.fastest.get(_key(arguments)) == self.backend


def _preferred(kernel: Kernel, fastest: Mapping[Key, str]) -> Kernel:
    asked = Preferred(kernel.backend, fastest)
    return replace(kernel, in_eager=asked, supports=asked if kernel.supports is None else both(asked, kernel.supports))


def _key(arguments: Sequence[Any]) -> Key:
    tensors = list(tensors_of(arguments))
    if not tensors:
        return "", 0, False
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return str(tensors[0].dtype), size_class(tensors[0].numel()), needs_grad


def load(op: Op, kernels: Mapping[str, Kernel], device: str) -> Measured | None:
    """What was measured of the op as it is now on this machine; None if nothing was, or must not be read."""
    content = measured_files.load(_name(op, kernels, device)) if measured_files.is_wanted() else None
    if content is None or "times" not in content:
        return None
    return Measured({(dtype, size, needs_grad): times for dtype, size, needs_grad, times in content["times"]})


def save(op: Op, kernels: Mapping[str, Kernel], device: str, times: Mapping[Key, Mapping[str, float]]) -> Path:
    """Keep times in microseconds, in place of those of the same kinds of calls.

    Raises:
        library_cache.CacheError: the cache folder must not be used.
        OSError: it cannot be written.
    """
    before = load(op, kernels, device)
    merged = {**(before.times if before else {}), **times}
    content = {"op": op.name, "device": measured_files.device_name(device)}
    rows = [[*key, each] for key, each in merged.items()]
    return measured_files.save(_name(op, kernels, device), {**content, "times": rows})


def _name(op: Op, kernels: Mapping[str, Kernel], device: str) -> str:
    """The file's name: a digest of the op and its sources, among others."""
    return measured_files.digest(device, sources_of_op(op, kernels))


def sources_of_op(op: Op, kernels: Mapping[str, Kernel]) -> Iterator[str]:
    """The op's name, and what names its kernels and their code."""
    yield op.name
    functions = [op.function] if op.fake_function is None else [op.function, op.fake_function]
    for kernel in kernels.values():
        yield repr((kernel.backend, kernel.raw and kernel.raw._schema.name))
        formula = op.formula(kernel.backend)
        functions += [kernel.function] if formula is None else [kernel.function, formula]
    yield from dict.fromkeys(text for function in functions for text in _sources(function, set()))


def sources_of_kernel(propose: Callable) -> Iterator[str]:
    """The code of a kernel's `propose`, and of the functions and classes that `replaces` has bound to it."""
    for part in (getattr(propose, "func", propose), *getattr(propose, "args", ())):
        for function in vars(part).values() if isinstance(part, type) else (part,):
            if callable(function):
                yield from _sources(function, set())


def _sources(function: Any, seen: set[int]) -> Iterator[str]:
    """The file and the code of a function and of those in its closure, and the text of Triton kernels that it names."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if id(function) in seen:
        return
    seen.add(id(function))
    yield str(getattr(function, "digest", None) or getattr(function, "__doc__", ""))
    code = getattr(function, "__code__", None)
    if code is None:
        return
    yield "".join(linecache.getlines(code.co_filename))
    constants = [each for each in code.co_consts if not inspect.iscode(each)]
    yield f"{code.co_code!r} {code.co_names} {constants}"
    for name in code.co_names:
        yield str(getattr(function.__globals__.get(name), "src", ""))
    for cell in function.__closure__ or ():
        try:
            inner: Callable = cell.cell_contents
        except ValueError:  # a name that has no value yet
            continue
        if callable(inner):
            yield from _sources(inner, seen)
        elif isinstance(inner, (bool, int, float, str)):
            yield repr(inner)
