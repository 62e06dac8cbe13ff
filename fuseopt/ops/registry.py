"""Registry of ops, and the choice of a backend for a call: which can run here, and why the others cannot."""

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
from fuseopt.ops.library import in_forward_mode, is_recorded, needs_autograd

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
    "SampleInput",
    "TritonBackend",
    "Upstream",
    "get",
    "names",
    "pick",
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
    """A class or function of another package that computes the same as an op. It is named and imported on use only,
    because `ops` imports no package but torch.

    Attributes:
        name: full name of the class or function.
        call: `call(class_or_function, *args, **kwargs)` computes the op with it.
    """

    name: str
    call: Callable


@dataclass(frozen=True)
class Benchmark:
    """One way of calling an op for `fuseopt bench ops`: sizes by name, and other ways to compute the same.

    Attributes:
        make: `make(device, dtype, *sizes)` returns one call's arguments. If some of them require a gradient, the
            backward is timed too. It is also called on the meta device, to find out the arguments' sizes.
        shapes: names of sizes: "8x768" stands for `make(device, dtype, 8, 768)`.
        more_shapes: further sizes, timed only on request.
        variant: distinguishes several benchmarks of one op.
        eager: computes the op from its arguments as transformers does; None if that is `torch`, or if nothing does.
        torch: computes the op from its arguments by one operation of torch; None if there is none.
        compiles: whether torch.compile can compile `eager`, or `torch` if there is no `eager`.
        flops: (arguments, whether of the backward) -> floating-point operations of a call; None where nobody said.
    """

    make: Callable[..., SampleInput]
    shapes: tuple[str, ...]
    more_shapes: tuple[str, ...] = ()
    variant: str = ""
    eager: Callable | Upstream | None = None
    torch: Callable | None = None
    compiles: bool = True
    flops: Callable[[tuple[Any, ...], bool], int | None] | None = None


@dataclass(frozen=True)
class Choice:
    """The chosen backend, and for each backend asked before it, the reasons why it refused.

    Attributes:
        measured: times by which it was chosen, as "triton 12.1 us, compile 15.0 us"; empty where none were measured.
    """

    backend: str
    refused: Mapping[str, list[str]]
    measured: str = ""

    def __str__(self) -> str:
        measured = f", the fastest here: {self.measured}" if self.measured else ""
        refused = (f"\n  not {name}: {'; '.join(reasons)}" for name, reasons in self.refused.items())
        return f"runs on {self.backend}{measured}{''.join(refused)}"


@dataclass(frozen=True)
class Op:
    """An op as tests, benchmarks and strategies see it.

    Attributes:
        name: its key in the registry.
        function: the public function; it takes `backend: str = "auto"` besides its own arguments.
        reference: the same function in plain differentiable PyTorch, without `backend`.
        sample_inputs: `sample_inputs(device, dtype, requires_grad)` yields small calls that cover the op's arguments,
            including odd and empty shapes. An op without gradients ignores `requires_grad`.
        backends: in the order in which "auto" tries them.
        benchmarks: what `fuseopt bench ops` times.
        in_place: whether the op writes into its arguments.
        raw: names of the raw ops that a native backend must have kernels for; otherwise it is skipped. The default is
            the raw op of the same name, if there is one.
    """

    name: str
    function: Callable
    reference: Callable
    sample_inputs: Callable[[torch.device, torch.dtype, bool], Iterator[SampleInput]]
    backends: tuple[Backend, ...]
    benchmarks: tuple[Benchmark, ...] = ()
    in_place: bool = False
    raw: tuple[str, ...] = ()

    def candidates(self, backend: str) -> list[Backend]:
        """The backends to ask, in order: the named one, or all for "auto"."""
        return [candidate for candidate in self.backends if backend in ("auto", candidate.name)]

    def choose(
        self, backend: str, device: torch.device, dtypes: Sequence[torch.dtype], *, may_build: bool = False
    ) -> Choice:
        """The first of `candidates` that can run.

        Raises:
            BackendError: none can run; the message lists each backend and its reasons.
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
        failed = f"{self.name} cannot run on {device} with {', '.join(map(str, dtypes))}"
        if len(refused) == 1:
            ((name, reasons),) = refused.items()
            raise BackendError(f"{failed} by {name}: {'; '.join(reasons)}")
        listed = "".join(f"\n  {name}: {'; '.join(reasons)}" for name, reasons in refused.items())
        raise BackendError(f"{failed}; backends tried:{listed}")


_OPS: dict[str, Op] = {}
_CHOSEN: dict[tuple[Any, ...], str] = {}


def pick(name: str, backend: str, device: torch.device, dtypes: tuple[torch.dtype | None, ...]) -> str:
    """`get(name).choose(backend, device, dtypes).backend`, cached until another native library is loaded.

    Every call of an op comes through here, or through `Direct`. The backend is always "reference" in forward-mode AD,
    which no kernel supports, and while torch.jit.trace or torch.export records torch's own operations.

    Args:
        dtypes: dtypes of the op's floating-point arguments; None for an absent one.
    """
    return "reference" if in_forward_mode() or is_recorded() else _chosen(name, backend, device, dtypes)


def _chosen(name: str, backend: str, device: torch.device, dtypes: tuple[torch.dtype | None, ...]) -> str:
    """`pick` outside forward-mode AD. torch.compile treats the result as a constant."""
    key = (len(torch.ops.loaded_libraries), name, backend, device, dtypes)
    chosen = _CHOSEN.get(key)
    if chosen is None:
        chosen = get(name).choose(backend, device, [dtype for dtype in dtypes if dtype is not None]).backend
        _CHOSEN[(len(torch.ops.loaded_libraries), *key[1:])] = chosen  # choosing may have loaded a library
    return chosen


class Direct:
    """Shortcut for an op's calls that need nothing but its raw op: eager, without gradient, without autocast.

    Attributes:
        run: called as `run(backend, *arguments)` with the raw op's arguments, a tensor first. It returns the result, or
            NotImplemented without having done anything if the public function has to handle the call: the chosen
            backend is the reference; a gradient, a torch.func transform or torch.jit.trace is active; a tensor is of a
            subclass or on another device; or the kernel refuses its arguments, for which the public function has the
            error message.

    The first call of a backend on a device settles the choice; later calls skip it and go straight to the raw op. The
    choice stays open while a better backend of the device cannot run, because a native library may be loaded later.
    Dtypes are not part of the choice: a kernel refuses those that it does not take.

    Args:
        overloads: the raw op of each backend.
        autocasts: whether CUDA's autocast changes the op's result.
    """

    def __init__(self, name: str, overloads: Mapping[str, OpOverload], autocasts: bool = False) -> None:
        self._name, self._overloads, self._autocasts = name, overloads, autocasts
        self.run: Any = self._choose_and_call

    def _choose_and_call(self, backend: str, *arguments: Any) -> Any:
        if self._autocasts and torch.is_autocast_enabled("cuda"):
            return NotImplemented
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        device, dtypes = tensors[0].device, tuple(tensor.dtype for tensor in tensors if tensor.is_floating_point())
        chosen = pick(self._name, backend, device, dtypes)
        if chosen not in self._overloads:
            return NotImplemented
        op = self._overloads[chosen]
        library = loader.python_library()
        candidates = get(self._name).candidates(backend)
        if library is None or chosen != next(candidate.name for candidate in candidates if candidate.runs_on(device)):
            return _call_overload(op, tensors, arguments)
        if not isinstance(self.run, library.DirectCalls):
            self.run = library.DirectCalls(self._choose_and_call, self._autocasts)
        self.run.settle(backend, device.type, op._schema.name, op._schema.overload_name)
        return self.run(backend, *arguments)


def _call_overload(op: OpOverload, tensors: Sequence[Tensor], arguments: Sequence[Any]) -> Any:
    """Does in Python what `DirectCalls` of the library for Python does in C++."""
    if needs_autograd(*tensors):
        return NotImplemented
    try:
        return op._op(*arguments)
    except RuntimeError:
        return NotImplemented


def pick_without_gradient(
    name: str, backend: str, dtypes: tuple[torch.dtype | None, ...], *tensors: Tensor | None
) -> str:
    """`pick` for an op whose kernels have no gradient; the device is that of the first of `tensors`.

    If a gradient may be needed, or inside a torch.func transform, "auto" means the reference.

    Raises:
        BackendError: such a call names another backend.
    """
    if not needs_autograd(*tensors):
        assert tensors[0] is not None
        return pick(name, backend, tensors[0].device, dtypes)
    if backend in ("auto", "reference"):
        return "reference"
    raise BackendError(f"{name}: {backend!r} takes no part in autograd or torch.func transforms; use 'reference'")


# The mark that torch.compiler.assume_constant_result sets; calling that would import torch._dynamo and triton.
_chosen._dynamo_marked_constant = True  # type: ignore[attr-defined]


def register(op: Op) -> Op:
    """Adds an op, from this package or from outside it, and returns it.

    Raises:
        ValueError: an op of this name exists.
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
