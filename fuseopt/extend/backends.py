"""The backends of a user's op: in which order they are asked, and why one cannot run."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import linecache
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch._ops import OpOverload

from fuseopt.errors import BackendError
from fuseopt.ops import registry
from fuseopt.runtime import donated_buffers

REFERENCE, COMPILE = "reference", "compile"
PLAIN = (COMPILE, REFERENCE)
"""Those that compute the function itself: autograd and torch.compile see through them."""

KERNELS = ("cuda", "cpu", "triton", COMPILE)
"""Those that a kernel can be given for."""

_ORDER = ("cuda", "cpu", "triton", COMPILE, REFERENCE)


def refusal(answer: Any, without_reason: str) -> str | None:
    """Why a user's predicate refuses: what it says, `without_reason` if that is false; None if it is true."""
    if isinstance(answer, str):
        return answer or without_reason
    return None if answer else without_reason


@contextlib.contextmanager
def noting(what: str) -> Iterator[None]:
    """A context that adds to what is raised in it, as a note, where it comes from."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "add_note"):  # of Python 3.11
            error.add_note(f"fuseopt: raised by {what}")
        raise


@dataclass(frozen=True, eq=False)
class Kernel:
    """One way to compute an op.

    Attributes:
        backend: its name.
        function: with the op's signature.
        supports: called with the arguments of a call: True, or False or a reason for the next backend to run it.
        missing: why it cannot run at all, as a library that could not be built; None if it can.
        in_eager: for a kernel that "auto" takes in eager calls only, as torch.compile writes the same kernel from the
            function: asked before `supports`, and where it refuses, `supports` is not called.
        raw: the overload that `function` calls, if a library has registered it with the op's schema.
        launches: csrc/python -> a `Launches` that runs calls in place of `function`, or None.
        name: in messages.
    """

    backend: str
    function: Callable
    supports: Callable | None = None
    missing: str | None = None
    in_eager: Callable | None = None
    raw: OpOverload | None = None
    launches: Callable[[Any], Any] | None = None
    name: str = ""

    def compute(self, arguments: Sequence[Any]) -> Any:
        """What its function gives."""
        with noting(f"the {self.name}"):
            return self.function(*arguments)

    def refuses(self, arguments: Sequence[Any]) -> str | None:
        """Why it does not take a call; None if it does."""
        if self.supports is None:
            return None
        with noting(f"`supports` of the {self.name}"):
            answer = self.supports(*arguments)
        return None if answer is None else refusal(answer, "its `supports` says no to these arguments")

    def supporting(self, predicate: Callable) -> Kernel:
        """The kernel with `predicate` to be asked as well."""
        return replace(self, supports=predicate if self.supports is None else both(self.supports, predicate))

    def as_asked(self, *, by_name: bool) -> Kernel:
        """The kernel as a call asks it that names its backend, or leaves it to "auto"."""
        if self.in_eager is None:
            return self
        if by_name:
            return replace(self, in_eager=None)
        return replace(self, supports=self.in_eager if self.supports is None else both(self.in_eager, self.supports))

    def not_supported_reasons(self, device: str, *, by_name: bool) -> list[str]:
        """Why it cannot run on a type of device; empty if it can.

        Args:
            by_name: whether the backend was named: torch.compile takes seconds on a CPU, where "auto" leaves it.
        """
        if self.missing is not None:
            return [self.missing]
        if self.backend == "triton":
            return registry.TRITON.not_supported_reasons(torch.device(device), [])
        if self.backend in ("cuda", "cpu") and device != self.backend:
            return [f"runs on {self.backend} tensors, not on {device}"]
        if self.backend == COMPILE and device != "cuda" and not by_name:
            return ["on a CPU only when it is named, as compiling takes seconds"]
        return []

    def as_backend(self) -> registry.Backend:
        """The kernel as the registry of ops knows backends."""
        return OwnBackend(self.backend, kernel=self)


def both(first: Callable, second: Callable) -> Callable:
    """A predicate that asks the second where the first does not refuse."""

    def asked(*arguments: Any) -> Any:
        answer = first(*arguments)
        return second(*arguments) if answer is None or refusal(answer, "") is None else answer

    return asked


@dataclass(frozen=True)
class OwnBackend(registry.Backend):
    """A backend of a user's op, for plans and reports: of any dtype, which only a call can tell."""

    kernel: Kernel | None = None

    def runs_on(self, device: torch.device) -> bool:
        return not self.not_supported_reasons(device, ())

    def not_supported_reasons(
        self, device: torch.device, dtypes: Sequence[torch.dtype], *, may_build: bool = False
    ) -> list[str]:
        assert self.kernel is not None
        return self.kernel.not_supported_reasons(device.type, by_name=False)


def in_order(kernels: Mapping[str, Kernel]) -> list[Kernel]:
    """The kernels in the order in which "auto" asks them."""
    return [kernels[backend] for backend in _ORDER if backend in kernels]


def order_on(
    name: str, kernels: Mapping[str, Kernel], backend: str, device: str
) -> tuple[tuple[Kernel, ...], dict[str, list[str]]]:
    """The kernels that can run on a type of device, in order, and the reasons of those that cannot.

    Raises:
        BackendError: `backend` names one that the op has not.
    """
    asked = [kernel for kernel in in_order(kernels) if backend in ("auto", kernel.backend)]
    if not asked:
        raise BackendError(f"{name} has no backend {backend!r}; it has auto, {', '.join(kernels)}")
    reasons = {k.backend: k.not_supported_reasons(device, by_name=backend != "auto") for k in asked}
    by_name = backend != "auto"
    able = tuple(kernel.as_asked(by_name=by_name) for kernel in asked if not reasons[kernel.backend])
    return able, {name: found for name, found in reasons.items() if found}


def with_reason(refused: Mapping[str, Sequence[str]]) -> str:
    """Lines of backends and why each does not run."""
    return "".join(f"\n  {backend}: {'; '.join(reasons)}" for backend, reasons in refused.items())


_COMPILER = contextvars.ContextVar("compiler", default="inductor")


@contextlib.contextmanager
def compiling_with(compiler: str) -> Iterator[None]:
    """A context in which the `compile` backend compiles with another of torch.compile's backends than Inductor."""
    token = _COMPILER.set(compiler)
    try:
        yield
    finally:
        _COMPILER.reset(token)


def compiled_on_first_call(function: Callable) -> Callable:
    """`torch.compile(function)`, made when it is first called: that imports Dynamo.

    Each kind of call has a copy of the function: Dynamo compiles a function 8 times (`recompile_limit`), then runs it
    eagerly.
    """

    @functools.cache
    def compiled(compiler: str, kind: Hashable) -> Callable:
        return torch.compile(_copy(function), backend=functools.partial(_compile_graph, compiler))

    return lambda *arguments: compiled(_COMPILER.get(), (torch.is_grad_enabled(), *map(_kind, arguments)))(*arguments)


def _compile_graph(compiler: str, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable:
    """A backend of Dynamo whose backward graphs can run twice, as `retain_graph=True` asks, where torch allows that."""
    from torch._dynamo.backends.registry import lookup_backend

    is_possible = not donated_buffers.missing_from_torch()
    with donated_buffers.no_donated_buffers() if is_possible else contextlib.nullcontext():
        return lookup_backend(compiler)(graph, inputs)


def _copy(function: Callable) -> Callable:
    """A function with code of its own, by which Dynamo counts; other callables as they are."""
    if not isinstance(function, FunctionType):
        return function
    code = function.__code__.replace()
    if inspect.getsourcefile(function) is None:
        # torch before 2.13 counts functions without a source file, as exec makes, as one (pytorch issue 124269).
        linecache.cache[code.co_filename] = (0, None, [], code.co_filename)
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _kind(argument: Any) -> Any:
    """What Dynamo compiles anew for: of sizes whether they are 0 or 1, as it lets others vary from the second on."""
    if isinstance(argument, torch.Tensor):
        sizes = tuple(min(size, 2) for size in argument.shape)
        return sizes, argument.dtype, argument.device, argument.requires_grad, argument.is_contiguous()
    if isinstance(argument, (list, tuple)):
        return tuple(map(_kind, argument))
    return argument if isinstance(argument, (bool, str)) else type(argument)
