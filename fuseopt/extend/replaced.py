"""`fuseopt.replaces` and `fuseopt.replaces_function`: a user's module or function, put in by `fuseopt.initialize`."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from fuseopt.errors import OpError, user_stack_level
from fuseopt.extend.backends import noting, refusal
from fuseopt.extend.exchange import Exchange, codes_of, globals_of, not_exchanged_reason
from fuseopt.extend.fused_module import FusedModule, module_of
from fuseopt.extend.own_op import Op, registered, unregister_op
from fuseopt.extend.signature import can_take, signature_of, source_of
from fuseopt.kernel_table import CUSTOM, TRITON, Kernel, register_kernel, unregister_kernel
from fuseopt.model_index import Candidate
from fuseopt.models import PolicyExtension, Rule, extend_policy, full_name
from fuseopt.modules import base
from fuseopt.plan import RaisedReason, Replacement, Skip
from fuseopt.runtime.module_watch import config_of
from fuseopt.strategies.context import ProposalContext
from fuseopt.strategies.propose import forward_name, forward_sites, propose_rule

ClassT = TypeVar("ClassT", bound="type | Op")
FunctionT = TypeVar("FunctionT", bound=Callable)

_PRESETS: dict[str, dict[str, Any]] = {"inference": {}, "reference": {}, "training": {}}


@dataclass(frozen=True)
class _Registration:
    """What `replaces` or `replaces_function` did.

    Attributes:
        kernel: the entry in the kernel table.
        path: full name of what is replaced.
        rules: those behind the entry, if there are any.
    """

    kernel: Kernel
    path: str
    rules: PolicyExtension | None = None


_registered: dict[str, _Registration] = {}  # by the name of the class or function decorated


def replaces(
    source: type[nn.Module] | str,
    *,
    when: Callable[[nn.Module], bool | str] | None = None,
    model_types: Iterable[str] | None = None,
    op: Op | None = None,
) -> Callable[[ClassT], ClassT]:
    """Decorator for a `FusedModule` that stands in for modules of exactly one class, in any model.

    It also takes an op, as `replaces(Class)(op)`: a module of the op's short name, whose forward calls the op with its
    own arguments, then stands in. The class name is the kernel's: `custom_cuda_kernels` and `triton_kernels` take it,
    and every preset has it. Decorating a class of the same name again replaces it, with a warning. Of two for the same
    class the newer is asked first. `fuseopt.unregister(name)` takes it back.

    Args:
        source: the class, or its full name as "package.module.Class".
        when: called with each module: True, or False or a reason to leave it.
        model_types: `config.model_type` values of the models that it is for; by default all, also without a config.
        op: the op that its forward calls, whose backend plans and reports show; by default the one that it names.

    Raises:
        OpError: the class is no FusedModule, has an `__init__`, has no forward or one that takes other arguments, or
            has the name of one of fuseopt's own kernels; or `source` is no class of modules.
    """
    is_name = isinstance(source, str) and "." in source.strip(".")
    if not (is_name or (isinstance(source, type) and issubclass(source, nn.Module))):
        raise OpError(
            f"fuseopt.replaces takes a class of modules, or its full name as 'package.module.Class', not {source!r}"
        )
    path = source if isinstance(source, str) else full_name(source)
    replaced = _found(source) if isinstance(source, str) else source

    def register(given: ClassT) -> ClassT:
        cls: Any = module_of(given) if isinstance(given, Op) else given
        if not (isinstance(cls, type) and issubclass(cls, FusedModule)):
            raise OpError(f"{getattr(cls, '__name__', cls)} must be a subclass of fuseopt.FusedModule, or an op")
        if cls.forward is FusedModule.forward:
            raise OpError(f"{cls.__name__} defines no forward; give it one that takes the arguments of {path}'s")
        if any("__init__" in vars(base) for base in cls.__mro__[: cls.__mro__.index(FusedModule)]):
            raise OpError(
                f"{cls.__name__}.__init__{source_of(cls.__init__)} would not be called, as the module takes over the "
                "state of the one that it replaces; keep state of its own in an attribute of the class, or let forward "
                "set it when it is missing"
            )
        if replaced is not None and replaced.forward is not nn.Module.forward:
            fix = "; call the op in the forward of a FusedModule, which has the module's parameters"
            fix = fix if isinstance(given, Op) else ""
            _check_same_arguments(f"{cls.__name__}.forward", cls.forward, f"{path}.forward", replaced.forward, fix)
        called = given if isinstance(given, Op) else op or _op_called_by(cls)
        propose = functools.partial(_propose, path, cls, when, None if called is None else called.name)
        lists: dict[str, dict[str, type]] = {CUSTOM: {}} if called is None else {CUSTOM: {}, TRITON: {}}
        # Without its op, which may be unregistered meanwhile.
        kernel = Kernel(cls.__name__, propose, None, lists, _PRESETS)
        _put_in(kernel, path, is_for_all=when is None and model_types is None)
        rules = extend_policy(model_types or "all", kernels=[Rule(path, cls)])
        _registered[kernel.name] = _Registration(kernel, path, rules)
        return given

    return register


def replaces_function(
    path: str, *, when: Callable[[nn.Module], bool | str] | None = None, model_types: Iterable[str] | None = None
) -> Callable[[FunctionT], FunctionT]:
    """Decorator for a function that modules call in the place of another, in models that `initialize` is given.

    A module whose class calls the function in `forward` has its own `forward` set on the instance: a copy that reads
    another function by the name that its file imported, through an imported module, from a closure or from a default
    argument. The function's package stays as it is, and so does every other caller. Modules that call it in another
    way, as in a helper of their file, are left, with the reason in the plan. `fuseopt.unregister(name)` takes it back.

    Args:
        path: full name of the function, as "package.module.function".
        when, model_types: as those of `replaces`.

    Raises:
        OpError: there is no such function, or the one decorated takes other arguments.
    """
    module, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise OpError(f"no function {path!r} to replace: {error}") from error
    types_ = None if model_types is None else tuple(model_types)

    def register(replacement: FunctionT) -> FunctionT:
        _check_same_arguments(replacement.__name__, replacement, path, function)
        propose = functools.partial(_propose_function, path, function, replacement, when, types_)
        kernel = Kernel(replacement.__name__, propose, None, {CUSTOM: {}}, _PRESETS)
        _put_in(kernel, path, is_for_all=when is None and model_types is None)
        return replacement

    return register


def unregister(name: str) -> None:
    """Remove what has this name: an op, or a class or function under `replaces` or `replaces_function`.

    Models that it was put into are not changed.

    Raises:
        KeyError: there is none of that name.
    """
    if name in _registered:
        unreplace(name)
    elif name in registered():
        unregister_op(name)
    else:
        known = ", ".join(sorted((*registered(), *_registered)))
        raise KeyError(f"no op {name!r} and no replacement of that name; there are {known or 'none'}")


def unreplace(name: str) -> None:
    """Take back what `replaces` or `replaces_function` did, by the name of the class or function decorated.

    Raises:
        KeyError: there is none of that name.
    """
    registration = _registered.pop(name)
    if registration.rules is not None:
        registration.rules.remove()
    unregister_kernel(name)


def _put_in(kernel: Kernel, path: str, *, is_for_all: bool) -> None:
    """Put a kernel into the table, before those that are there for the same class or function."""
    if kernel.name in _registered:
        message = f"fuseopt: {kernel.name} is registered again and replaces the one before"
        warnings.warn(message, stacklevel=user_stack_level())
        unreplace(kernel.name)
    try:
        register_kernel(kernel)
    except ValueError as error:
        raise OpError(f"{error}; give the class or function another name") from error
    older = [each.kernel for each in _registered.values() if each.path == path]
    for each in older:
        unregister_kernel(each.name)
        register_kernel(each)
    if older and is_for_all:
        names = ", ".join(each.name for each in older)
        message = f"fuseopt: {kernel.name} is tried before {names} for {path}; fuseopt.unregister(name) removes one"
        warnings.warn(message, stacklevel=user_stack_level())
    _registered[kernel.name] = _Registration(kernel, path)


def _found(path: str) -> Any:
    """The class at a path, if its module is imported already.

    Raises:
        OpError: its package can be imported, and has no such module or class.
    """
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        try:
            is_there = name in sys.modules or importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):  # of a part that is no package
            is_there = False
        if is_there:
            break
    else:
        return None
    found = sys.modules.get(name)
    if found is None and end == len(parts) - 1:
        return None
    for part in parts[end:] if "<locals>" not in parts else ():
        found = getattr(found, part, None)
        if found is None:
            raise OpError(f"there is no class {path!r} to replace: {name} has no {'.'.join(parts[end:])}")
    return found


def _check_same_arguments(name: str, function: Any, source: str, replaced: Any, fix: str = "") -> None:
    """Raise OpError unless a function takes as many positional arguments as the one that it stands in for.

    Args:
        fix: the end of the message.
    """
    own, other = signature_of(function), signature_of(replaced)
    if own is None or other is None or not isinstance(inspect.unwrap(function), types.FunctionType):
        return
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [parameter for parameter in other.parameters.values() if parameter.kind in kinds]
    required = sum(parameter.default is inspect.Parameter.empty for parameter in positional)
    if not all(can_take(own, count) for count in (required, len(positional))):
        takes = f"{name}{source_of(function)} takes {own}; {source} takes {other}"
        raise OpError(f"{takes}, and it must take the same{fix}")


def _op_called_by(cls: type[FusedModule]) -> Op | None:
    """The op that the class's forward names, if it names exactly one."""
    ops = [value for value in globals_of(inspect.unwrap(cls.forward)).values() if isinstance(value, Op)]
    return ops[0] if len(ops) == 1 else None


def _propose(
    path: str, cls: type[FusedModule], when: Callable | None, op: str | None, context: ProposalContext
) -> Iterator[Replacement | Skip]:
    is_there = op is None or op in registered()
    if op is not None and is_there:
        context = context.for_op(op)
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    passes_backend = code is not None and "backend" in code.co_names

    def options(candidate: Candidate) -> dict[str, str] | str:
        reason = _refusal(cls.__name__, when, candidate.module)
        if not is_there:
            return f"its op {op} is not registered any more"
        if reason is None and context.configured != "auto" and not passes_backend:
            reason = f"backend {context.configured!r} does not reach its op: pass backend=self.backend in its forward"
        return {"backend": context.wanted} if reason is None else reason

    for rule in context.policy.kernels:
        if rule.target is cls and rule.source == path:
            yield from propose_rule(context, rule, options)
    package = path.partition(".")[0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        reason = f"no module of class {path}: there is no package {package}"
        root = context.index.root
        yield context.skip(forward_sites(root), root.class_name, cls.__name__, reason)


def _refusal(name: str, when: Callable | None, module: nn.Module) -> str | None:
    if when is None:
        return None
    try:
        with noting(f"`when` of {name}"):
            return refusal(when(module), "its `when` says no to this module")
    except Exception as error:  # of the user's own code: the module stays as it is, and `strict` raises
        return RaisedReason.of("its `when`", error)


def _propose_function(
    path: str,
    function: Callable,
    replacement: Callable,
    when: Callable | None,
    model_types: tuple[str, ...] | None,
    context: ProposalContext,
) -> Iterator[Replacement | Skip]:
    model_type = getattr(config_of(context.index.model), "model_type", None)
    if model_types is not None and model_type not in model_types:
        return
    exchange, by_class = Exchange(function, replacement), dict[type, "str | None"]()
    for candidate in (context.index.root, *context.index.candidates):
        module, cls = candidate.module, type(candidate.module)
        if cls not in by_class:
            by_class[cls] = _how_called(cls, exchange)
        how = by_class[cls]
        held = next((name for name, value in vars(module).items() if value is function), None)
        if how is None and held is not None:
            how = f"it is the module's attribute {held}; set that to {replacement.__name__}"
        if how is None:
            continue
        reason = how or _refusal(replacement.__name__, when, module) or "; ".join(candidate.forward_blocked_reasons())
        sites, source = forward_sites(candidate), forward_name(candidate)
        if reason:
            yield context.skip(sites, source, replacement.__name__, reason)
        else:
            build = functools.partial(CallsOther, module, path, replacement)
            yield context.replacement(sites, source, replacement.__name__, f"its forward calls {path}", build)


def _how_called(cls: type[nn.Module], exchange: Exchange) -> str | None:
    """Empty if a copy of the class's forward can call the other function; else why not, or None if none is called."""
    function = exchange.function
    # Forward first; `__init__` has run.
    methods = {name: getattr(cls, name, None) for name in ("forward", *dir(cls)) if name != "__init__"}
    for name, method in methods.items():
        if method is function:
            return f"it is the attribute {name} of its class, for every instance; call it by its own name"
        if not isinstance(method, types.FunctionType) or method.__module__.startswith("torch."):
            continue
        if exchange.within(method) is not method:
            if name != "forward":
                return f"it is called in {name}, not in forward; call it in forward"
            return not_exchanged_reason(method, function) or ""
        if name == "forward" and any(function.__name__ in code.co_names for code in codes_of(method.__code__)):
            reason = not_exchanged_reason(method, function)
            if reason is not None and "imports" in reason:
                return reason
    return _helper_reason(cls.forward, exchange)


def _helper_reason(method: Any, exchange: Exchange) -> str | None:
    """The function of the forward's own file through which it calls the function; None if there is none."""
    asked, seen = [inspect.unwrap(method)], {exchange.replacement}
    while asked:
        caller = asked.pop()
        for name, helper in globals_of(caller).items():
            if getattr(helper, "__globals__", None) is not caller.__globals__ or helper in seen:
                continue
            if exchange.within(helper) is not helper:
                return f"it is called in {name}(), which forward calls; call it in forward"
            seen.add(helper)
            asked.append(helper)
    return None


class CallsOther(base.BlockForward):
    """The `forward` of a module's class, in which one function is another.

    Args:
        block: the module.
        path: full name of the function.
        replacement: what is called instead.
    """

    def __init__(self, block: nn.Module, path: str, replacement: Callable) -> None:
        super().__init__(block)
        self.path, self.replacement = path, replacement

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _with_other(type(self.block).forward, self.path, self.replacement)(self.block, *args, **kwargs)


@functools.cache
def _with_other(forward: Any, path: str, replacement: Callable) -> Callable:
    """The function `forward`, which calls `replacement` where it calls the function at `path`."""
    module, _, name = path.rpartition(".")
    made: Callable = Exchange(getattr(importlib.import_module(module), name), replacement).within(forward)
    return made
