"""The signature of a user's op: its schema, read from a function's annotations, and the tensors among its arguments."""

from __future__ import annotations

import contextlib
import inspect
import keyword
import numbers
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import _OpNamespace
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fuseopt.errors import OpError, shown
from fuseopt.ops.library import Observer, in_forward_mode, without_autocast

_NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*", re.ASCII)
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
# The other namespaces of torch's own are of another class than a user's.
_NAMESPACES_OF_TORCH = (
    *(
        "aten",
        "c10d",
        "_c10d_functional",
        "debugprims",
        "inductor",
        "inductor_prims",
        "mkldnn",
        "onnx",
        "prim",
        "prims",
    ),
    *("profiler", "quantized", "rngprims", "sparse", "torch", "torchvision", "fuseopt"),
)
_ATTRIBUTES_OF_NAMESPACES = ("name", "_dir")


_PLAIN_NUMBERS: dict[str, tuple[type, ...]] = {
    "SymInt": (int, torch.SymInt),
    "int": (int, torch.SymInt),
    "float": (float, int, torch.SymFloat, torch.SymInt),
    "bool": (bool, torch.SymBool),
    "str": (str,),
}
# What else is converted, as the scalars of NumPy are.
_NUMBERS: dict[str, type] = {"SymInt": numbers.Integral, "int": numbers.Integral, "float": numbers.Real}


@dataclass(frozen=True)
class Signature:
    """What calls of an op look like.

    Attributes:
        schema: `(arguments) -> results`, as torch writes it.
        names: of the arguments, in order.
        defaults: by name, of the arguments that have one.
        has_lists: whether an argument is a list of tensors.
        are_tensors: whether all arguments are tensors, or None.
        numbers: (place, types) of the arguments that are a number, a bool or a str.
        results: how many tensors the op gives; None for a list of them, whose length is the function's.
    """

    schema: str
    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    has_lists: bool
    are_tensors: bool
    numbers: tuple[tuple[int, tuple[type, ...]], ...]
    results: int | None

    @classmethod
    def of(cls, name: str, function: Callable) -> Signature:
        """The signature of an annotated function.

        Raises:
            OpError: an annotation is missing, or of a type that no op takes.
        """
        if not (inspect.isfunction(function) or inspect.ismethod(function)):
            raise OpError(f"{name} is made of a Python function with annotations, not of a {type(function).__name__}")
        try:
            schema = torch.library.infer_schema(function, mutates_args=())
        except (ValueError, NameError) as error:
            raise OpError(_annotation_message(name, function, error)) from error
        parameters = inspect.signature(function).parameters
        foreign = next((key for key in parameters if not key.isascii()), None)
        if foreign is not None:
            raise OpError(f"{name}: torch takes no argument called {foreign!r}; give it a name in ASCII")
        if "Tensor?[]" in schema:
            raise OpError(f"{name}: autograd does not look into a list of optional tensors; take list[Tensor]")
        if "backend" in parameters:
            raise OpError(f"{name}: an argument cannot be called 'backend', by which a call names one; rename it")
        if any(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters.values()):
            raise OpError(
                f"{name}: keyword-only arguments have no place in an op's schema; leave out the * before them"
            )
        results = schema.partition(" -> ")[2]
        if "Tensor" not in results or results.replace("Tensor[]", "").replace("Tensor", "").strip("(), "):
            raise OpError(f"{name} must return a Tensor, a tuple of Tensors or a list of them, not {results or 'None'}")
        return cls(
            schema,
            tuple(parameters),
            {key: p.default for key, p in parameters.items() if p.default is not inspect.Parameter.empty},
            any(argument.startswith("Tensor[]") for argument in arguments_of(schema)),
            all(argument.startswith(("Tensor ", "Tensor? ")) for argument in arguments_of(schema)),
            tuple(
                (place, _PLAIN_NUMBERS[kind] + (type(None),) * is_optional)
                for place, (kind, is_optional) in enumerate(map(_kind_of, arguments_of(schema)))
                if kind in _PLAIN_NUMBERS
            ),
            None if results == "Tensor[]" else results.count("Tensor"),
        )

    def bind(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Every argument in order, defaults filled in.

        Raises:
            TypeError: as a call of the function with these arguments would.
        """
        if len(args) > len(self.names):
            raise TypeError(f"{name} takes {len(self.names)} arguments, got {len(args)}")
        bound, open_names = list(args), self.names[len(args) :]
        for key in kwargs:
            if key not in open_names:
                problem = "was given twice" if key in self.names else "is unknown"
                raise TypeError(f"{name}: the argument {key!r} {problem}; it takes {', '.join(self.names)}")
        for key in open_names:
            if key not in kwargs and key not in self.defaults:
                raise TypeError(f"{name} lacks the argument {key!r}; it takes {', '.join(self.names)}")
            bound.append(kwargs[key] if key in kwargs else self.defaults[key])
        return tuple(bound)

    def samples_hint(self, function: str) -> str:
        """Code that gives a function's op samples."""
        drawn = "torch.randn(8, 768, device=device, dtype=dtype)"
        values = {"Tensor": drawn, "Tensor[]": f"[{drawn}]", "float": "0.5", "bool": "True", "str": "'...'"}
        kinds = [_kind_of(argument)[0] for argument in arguments_of(self.schema)]
        arguments = ", ".join(values.get(kind, "1") for kind in kinds) + "," * (len(kinds) == 1)
        return f"    @{function}.samples\n    def _(device, dtype):\n        yield ({arguments})"

    def check_numbers(self, name: str, arguments: Sequence[Any]) -> None:
        """Raise TypeError where a number, a bool or a str of a call is of a type that torch does not convert to it."""
        kinds = arguments_of(self.schema)
        for place, plain in self.numbers:
            given = arguments[place]
            kind, _ = _kind_of(kinds[place])
            if not isinstance(given, plain) and not isinstance(given, _NUMBERS.get(kind, ())):
                expected = kind.replace("SymInt", "int") + " or None" * (type(None) in plain)
                raise TypeError(f"{name}: the argument {self.names[place]!r} must be {expected}, not {shown(given)}")


def check_takes(name: str, what: str, function: Any, *arguments: str) -> None:
    """Raise OpError unless a user's function can be called, with these positional arguments."""
    check_callable(name, what, function)
    signature = signature_of(function)
    if signature is not None and not can_take(signature, len(arguments)):
        raise OpError(
            f"{name}: its {what}{source_of(function)} takes {signature}, "
            f"but is called with {len(arguments)} arguments: {', '.join(arguments)}"
        )


def signature_of(function: Any) -> inspect.Signature | None:
    """The signature of a callable; None where it has none, as some that are written in C."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def can_take(signature: inspect.Signature, count: int) -> bool:
    """Whether a call with this many positional arguments is right."""
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def takes_argument(function: Any, name: str) -> bool:
    """Whether a callable has an argument of that name."""
    signature = signature_of(function)
    return signature is not None and name in signature.parameters


def source_of(function: Any) -> str:
    """ " (file:line)" of a Python function; empty for anything else."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


def check_name(name: str) -> None:
    """Raise OpError unless `name` is "namespace::op", in a namespace that is no package's own."""
    if not _NAME.fullmatch(name) or any(map(keyword.iskeyword, name.split("::"))):
        raise OpError(f"{name!r} is no name of an op; give one with a namespace of your own, such as 'mine::scale'")
    namespace, _, own = name.partition("::")
    if namespace in _NAMESPACES_OF_TORCH or type(getattr(torch.ops, namespace)) is not _OpNamespace:
        raise OpError(f"{name!r}: the namespace {namespace!r} is taken; use one of your own, such as 'mine'")
    if own.startswith("__") or own in _ATTRIBUTES_OF_NAMESPACES:
        raise OpError(f"{name!r}: `torch.ops.{namespace}.{own}` is an attribute of every namespace; use another name")


def check_callable(name: str, what: str, given: Any) -> None:
    """Raise OpError unless what a user gives an op as a function can be called."""
    if not callable(given):
        raise OpError(f"{name}: its {what} must be a function, not {shown(given)}")


def arguments_of(schema: str) -> list[str]:
    """The arguments of a schema without their defaults, as ["Tensor a", "float scale"]."""
    without_defaults = re.sub(r'="[^"]*"|=\[[^]]*\]|=[^,)]+', "", schema.partition(") -> ")[0][1:])
    return [argument for argument in without_defaults.split(", ") if argument]


def _kind_of(argument: str) -> tuple[str, bool]:
    """The type of an argument of a schema, and whether it may be None."""
    kind = argument.partition(" ")[0]
    return kind.rstrip("?"), kind.endswith("?")


def _annotation_message(name: str, function: Callable, error: Exception) -> str:
    file, line = inspect.getsourcefile(function), function.__code__.co_firstlineno
    takes = "Tensor, list[Tensor], Tensor | None, int, float, bool or str"
    if isinstance(error, NameError):
        return f"{name} ({file}:{line}): {error}; annotations must name what the file imports"
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.annotation is inspect.Parameter.empty:
            return f"{name} ({file}:{line}): the argument {key!r} has no annotation; give {takes}"
    if inspect.signature(function).return_annotation is inspect.Signature.empty:
        return f"{name} ({file}:{line}): the result has no annotation; give -> Tensor, or -> tuple[Tensor, Tensor]"
    # The first sentence: in the next ones torch lists its types.
    reason = re.split(r"\.\s", str(error).partition("): ")[2])[0]
    return f"{name} ({file}:{line}): {reason}; an op takes {takes}"


def tensors_of(arguments: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among arguments or results, those in lists too, in order."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from (item for item in argument if isinstance(item, Tensor))


def with_tensors(arguments: Sequence[Any], tensors: Sequence[Any]) -> tuple[Any, ...]:
    """`arguments` with each tensor, those in lists too, replaced by the next of `tensors`."""
    following = iter(tensors)

    def replaced(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return next(following)
        if isinstance(argument, (list, tuple)):
            return [next(following) if isinstance(item, Tensor) else item for item in argument]
        return argument

    return tuple(map(replaced, arguments))


def without_autocast_for(arguments: Sequence[Any]) -> contextlib.AbstractContextManager:
    """A context without autocast on the device of a call with these arguments, the CPU if it has no tensor."""
    first = next(tensors_of(arguments), None)
    return torch.autocast("cpu", enabled=False) if first is None else without_autocast(first)


def as_results(output: Any) -> tuple[Tensor, ...]:
    """An op's results as a tuple, of one where it gives one tensor."""
    return (output,) if isinstance(output, Tensor) else tuple(output)


def kind_of(tensor: Tensor) -> str:
    """Dtype and shape of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def is_lazy(tensor: Tensor) -> bool:
    """Whether a tensor's memory does not hold its values, as of `z.conj().imag`, whose sign is a bit of the tensor."""
    return tensor.is_neg() or tensor.is_conj() or torch._is_zerotensor(tensor)


def look_at(arguments: Sequence[Any]) -> tuple[Tensor | None, bool]:
    """The first tensor of a call and whether that needs autograd; None for it if torch has to see the call.

    So it has if there is none, if a mode, a transform, a tracer or the profiler observes it, or if a tensor is of a
    subclass, lazy, or on another device than a CPU or a GPU.
    """
    first, needs_grad = None, False
    for argument in arguments:
        if type(argument) in _PLAIN_TYPES:
            if not (argument.is_cuda or argument.is_cpu) or is_lazy(argument):
                return None, False
            if first is None:
                first = argument
            if argument.requires_grad:
                needs_grad = True
        elif isinstance(argument, Tensor):
            return None, False
        elif isinstance(argument, (list, tuple)):
            inner, needs = look_at(argument)
            if inner is None and any(True for _ in tensors_of((argument,))):
                return None, False
            first, needs_grad = inner if first is None else first, needs_grad or needs
    if (
        in_forward_mode()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or torch.autograd._profiler_enabled()
        or (
            torch._C._len_torch_dispatch_stack() > 0
            and not all(isinstance(mode, Observer) for mode in _get_current_dispatch_mode_stack())
        )
    ):
        return None, False
    return first, needs_grad and torch.is_grad_enabled()
