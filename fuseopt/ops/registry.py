"""The registry of ops and the choice of a backend: which exist, which can run here, and why the others cannot."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fuseopt.build import loader
from fuseopt.errors import BackendError
from fuseopt.ops.backends import (
    CPU,
    CUDA,
    FLOATING,
    REFERENCE,
    TRITON,
    Backend,
    NativeBackend,
    TritonBackend,
)
from fuseopt.ops.library import in_forward_mode, needs_autograd
from fuseopt.ops.preferences import Limits, Preference, by_size

__all__ = [
    "CPU",
    "CUDA",
    "FLOATING",
    "REFERENCE",
    "TRITON",
    "Backend",
    "Benchmark",
    "Choice",
    "Direct",
    "NativeBackend",
    "Op",
    "Preference",
    "SampleInput",
    "TritonBackend",
    "Upstream",
    "get",
    "names",
    "pick",
    "pick_by_size",
    "pick_without_gradient",
    "register",
    "unregister",
]


@dataclass(frozen=True)
class SampleInput:
    """Arguments for one call of an op."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Upstream:
    """Something of another package that computes what an op does, by name: `ops` imports no other package than torch.

    Attributes:
        name: full name of the class or function.
        call: `call(class_or_function, *args, **kwargs)` computes the op with it.
    """

    name: str
    call: Callable


@dataclass(frozen=True)
class Benchmark:
    """One way of calling an op that `fuseopt bench ops` times, at sizes by name, and what it is held against.

    Attributes:
        make: `make(device, dtype, *sizes)` returns one call's arguments. Where some of them require a gradient, the
            backward is timed too. Called on the meta device to find out how large the arguments are.
        shapes: names of sizes: "8x768" stands for `make(device, dtype, 8, 768)`.
        more_shapes: likewise; left out unless they are asked for.
        variant: tells several benchmarks of one op apart.
        eager: takes the op's arguments and computes it as transformers does; None where that is `torch`, or nothing.
        torch: takes the op's arguments and computes it by one operation of torch; None where there is none.
        compiles: whether torch.compile can make a graph of `eager`, or else `torch`.
    """

    make: Callable[..., SampleInput]
    shapes: tuple[str, ...]
    more_shapes: tuple[str, ...] = ()
    variant: str = ""
    eager: Callable | Upstream | None = None
    torch: Callable | None = None
    compiles: bool = True


@dataclass(frozen=True)
class Choice:
    """The backend that was chosen, and the reasons of each backend that was asked before it and refused."""

    backend: str
    refused: Mapping[str, list[str]]


@dataclass(frozen=True)
class Op:
    """An op as tests, benchmarks and strategies see it.

    Attributes:
        name: its key in the registry.
        function: the public function; takes `backend: str = "auto"` beside its own arguments.
        reference: the same function in plain differentiable PyTorch, without `backend`.
        sample_inputs: `sample_inputs(device, dtype, requires_grad)` yields small calls that cover the op's arguments,
            odd and empty shapes included. An op without gradients ignores `requires_grad`.
        backends: in the order in which "auto" tries them.
        benchmarks: what `fuseopt bench ops` times.
        preferences: calls for which "auto" takes another backend; `function` asks `pick_by_size`.
        raw: names of the raw ops that a native backend needs kernels for; it is skipped if one is missing. By default
            the raw op of this op's name, if there is one.
        in_place: it writes into its arguments, so what holds for functions of tensors does not hold for it.
    """

    name: str
    function: Callable
    reference: Callable
    sample_inputs: Callable[[torch.device, torch.dtype, bool], Iterator[SampleInput]]
    backends: tuple[Backend, ...]
    benchmarks: tuple[Benchmark, ...] = ()
    preferences: tuple[Preference, ...] = ()
    in_place: bool = False
    raw: tuple[str, ...] = ()

    def candidates(self, backend: str) -> list[Backend]:
        """The backends to ask, in order: the one named, or for "auto" all."""
        return [candidate for candidate in self.backends if backend in ("auto", candidate.name)]

    def choose(
        self, backend: str, device: torch.device, dtypes: Sequence[torch.dtype], *, may_build: bool = False
    ) -> Choice:
        """The first of `candidates` that can run.

        Raises:
            BackendError: none can; the message lists each backend tried, and why it refused.
        """
        candidates = self.candidates(backend)
        if not candidates:
            known = ", ".join(candidate.name for candidate in self.backends)
            raise BackendError(f"{self.name} has no backend {backend!r}; it has auto, {known}")
        refused: dict[str, list[str]] = {}
        for candidate in candidates:
            reasons = candidate.not_supported_reasons(device, dtypes, may_build=may_build)
            if not reasons and isinstance(candidate, NativeBackend):
                reasons = candidate.missing_kernels(self.raw or (self.name,))
            if not reasons:
                return Choice(candidate.name, refused)
            refused[candidate.name] = reasons
        listed = "".join(f"\n  {name}: {'; '.join(reasons)}" for name, reasons in refused.items())
        raise BackendError(
            f"{self.name} cannot run on {device} with {', '.join(map(str, dtypes))}; backends tried:{listed}"
        )

    def preferred(self, backend: str, device: torch.device, dtypes: Sequence[torch.dtype]) -> list[Preference]:
        """Those of `preferences` that hold for some size of a call like this; none where a backend is named."""
        if backend != "auto":
            return []
        return [
            preference
            for preference in self.preferences
            if set(dtypes) == {preference.dtype}
            and preference.holds_on(device)
            and not any(b.not_supported_reasons(device, dtypes) for b in self.candidates(preference.backend))
        ]


_OPS: dict[str, Op] = {}
_CHOSEN: dict[tuple[Any, ...], tuple[str, tuple[Limits, ...]]] = {}


def pick(name: str, backend: str, device: torch.device, dtypes: tuple[torch.dtype | None, ...]) -> str:
    """`get(name).choose(backend, device, dtypes).backend`, remembered until another native library is loaded.

    Every call of an op comes through here, through `pick_by_size` or `Direct`. In forward-mode AD, which no kernel
    supports, it is always "reference".

    Args:
        dtypes: of the op's floating point arguments; None for one that is absent.
    """
    return "reference" if in_forward_mode() else _chosen(name, backend, device, dtypes)[0]


def pick_by_size(
    name: str, backend: str, device: torch.device, dtypes: tuple[torch.dtype | None, ...], shape: torch.Size
) -> tuple[str, str]:
    """The backends of an op's forward and of its backward: what it prefers for that size, else what `pick` gives.

    torch.compile has a guard for each comparison of a size that changes.

    Args:
        shape: of the op's first tensor.
    """
    if in_forward_mode():
        return "reference", "reference"
    picked, preferred = _chosen(name, backend, device, dtypes)
    return by_size(picked, preferred, shape)


def _chosen(
    name: str, backend: str, device: torch.device, dtypes: tuple[torch.dtype | None, ...]
) -> tuple[str, tuple[Limits, ...]]:
    """What `pick` gives, and when another backend is preferred to it. torch.compile takes both for constants."""
    key = (len(torch.ops.loaded_libraries), name, backend, device, dtypes)
    chosen = _CHOSEN.get(key)
    if chosen is None:
        op, present = get(name), [dtype for dtype in dtypes if dtype is not None]
        picked = op.choose(backend, device, present).backend
        chosen = picked, tuple(preference.limits for preference in op.preferred(backend, device, present))
        _CHOSEN[(len(torch.ops.loaded_libraries), *key[1:])] = chosen  # choosing may have loaded a library
    return chosen


_ANY = 2**63 - 1  # more elements than a tensor has


class Direct:
    """Calls of one op that need no more than a raw op: eager, without gradient, outside an autocast that concerns it.

    Attributes:
        run: `run(backend, *arguments)`, those of the raw op, a tensor first. Gives NotImplemented, and has done
            nothing, where the public function has to see to the call itself: the choice falls on the reference, a
            gradient or a transform is asked for, a tensor is of a subclass or on another device, or the kernel refuses
            what it is given, which the function can say in its own words.

    Once a choice is settled, `run` is the shortest way to the raw op. It is not settled while a better backend of the
    device cannot run: a native library may be loaded yet. Dtypes have no part in it: a kernel refuses those that it
    does not take. Nor is it for as many elements as the least of the op's preferences asks for: such a call is chosen
    for each time, and is one of the backend that it names then.

    Args:
        overloads: the raw op of each backend.
        autocasts: whether CUDA's autocast has a say in the op.
    """

    def __init__(self, name: str, overloads: Mapping[str, OpOverload], autocasts: bool = False) -> None:
        self._name, self._overloads, self._autocasts = name, overloads, autocasts
        self.run: Any = self._choose_and_call

    def _choose_and_call(self, backend: str, *arguments: Any) -> Any:
        if self._autocasts and torch.is_autocast_enabled("cuda"):
            return NotImplemented
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        input, dtypes = tensors[0], tuple(tensor.dtype for tensor in tensors if tensor.is_floating_point())
        device = input.device
        chosen, _ = pick_by_size(self._name, backend, device, dtypes, input.shape)
        if chosen not in self._overloads:
            return NotImplemented
        preferences = [p for p in get(self._name).preferences if not p.backward and p.holds_on(device)]
        settled_elements = min((preference.elements for preference in preferences), default=_ANY)
        if backend == "auto" and input.numel() >= settled_elements:
            return self.run(chosen, *arguments)
        op = self._overloads[chosen]
        library = loader.python_library()
        candidates = get(self._name).candidates(backend)
        if library is None or chosen != next(candidate.name for candidate in candidates if candidate.runs_on(device)):
            return _call_overload(op, tensors, arguments)
        if not isinstance(self.run, library.DirectCalls):
            self.run = library.DirectCalls(self._choose_and_call, self._autocasts)
        elements = settled_elements if backend == "auto" else _ANY
        self.run.settle(backend, device.type, op._schema.name, op._schema.overload_name, elements)
        return self.run(backend, *arguments)


def _call_overload(op: OpOverload, tensors: Sequence[Tensor], arguments: Sequence[Any]) -> Any:
    """What `DirectCalls` of the library for Python does, the long way."""
    if needs_autograd(*tensors):
        return NotImplemented
    try:
        return op._op(*arguments)
    except RuntimeError:
        return NotImplemented


def pick_without_gradient(
    name: str, backend: str, dtypes: tuple[torch.dtype | None, ...], *tensors: Tensor | None
) -> str:
    """`pick` for an op whose kernels have no gradient, on the device of the first of `tensors`.

    Where a gradient could be asked for, or inside a torch.func transform, "auto" means the reference.

    Raises:
        BackendError: such a call names another backend than the reference.
    """
    if not needs_autograd(*tensors):
        assert tensors[0] is not None
        return pick(name, backend, tensors[0].device, dtypes)
    if backend in ("auto", "reference"):
        return "reference"
    raise BackendError(f"{name}: {backend!r} takes no part in autograd or torch.func transforms; use 'reference'")


# What torch.compiler.assume_constant_result sets; calling that would import torch._dynamo, and triton with it.
_chosen._dynamo_marked_constant = True  # type: ignore[attr-defined]


def register(op: Op) -> Op:
    """Add an op, from this package or from outside it; returns it.

    Raises:
        ValueError: the name is taken.
    """
    if op.name in _OPS:
        raise ValueError(f"an op named {op.name!r} is registered already")
    _OPS[op.name] = op
    return op


def unregister(name: str) -> None:
    """Remove an op; nothing happens where there is none of that name."""
    _OPS.pop(name, None)
    for key in [key for key in _CHOSEN if key[1] == name]:
        del _CHOSEN[key]


def get(name: str) -> Op:
    """The op of that name.

    Raises:
        KeyError: no such op; the message lists those that exist.
    """
    if name not in _OPS:
        raise KeyError(f"no op named {name!r}; registered: {', '.join(names())}")
    return _OPS[name]


def names() -> list[str]:
    """The names of all registered ops, sorted."""
    return sorted(_OPS)
