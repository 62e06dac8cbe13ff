"""A function's own copy that calls one function in place of another; whatever else calls that one is not affected."""

from __future__ import annotations

import dis
import functools
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

# The attributes that code reads one after another, as ("part", "function") of `package.part.function(...)`.
Chain = tuple[str, ...]


@dataclass(frozen=True)
class Exchange:
    """Calls of `replacement` in place of `function`, which code reads by a global name, through imported modules, from
    its closure or from its defaults."""

    function: Callable
    replacement: Callable

    def within(self, method: Any, outer: tuple[Any, ...] = ()) -> Any:
        """The function `method` that calls the replacement; `method` itself if it does not read the function.

        Args:
            outer: functions whose closures led here.
        """
        if not isinstance(method, types.FunctionType) or method in outer:
            return method
        chains, free = chains_of(method.__code__), method.__code__.co_freevars
        known = {name: method.__globals__[name] for name in chains if name in method.__globals__ and name not in free}
        globals_ = {name: new for name, old in known.items() if (new := self._read(old, chains[name])) is not old}
        cells = dict(zip(free, method.__closure__ or (), strict=True))
        closure = [self._in_cell(cell, chains.get(name, frozenset()), (*outer, method)) for name, cell in cells.items()]
        defaults = [self._read(value) for value in method.__defaults__ or ()]
        keyword = {name: self._read(value) for name, value in (method.__kwdefaults__ or {}).items()}
        old = (*cells.values(), *(method.__defaults__ or ()), *(method.__kwdefaults__ or {}).values())
        if not globals_ and all(a is b for a, b in zip((*closure, *defaults, *keyword.values()), old, strict=True)):
            return method
        # Dynamo takes globals that have a `__name__` for those of the module of that name.
        others = {name: value for name, value in method.__globals__.items() if name != "__name__"} | globals_
        made = types.FunctionType(method.__code__, others, method.__name__, None, tuple(closure) or None)
        made.__defaults__, made.__kwdefaults__ = tuple(defaults) or None, keyword or None
        made.__qualname__, made.__module__ = method.__qualname__, method.__module__
        made.__dict__.update(method.__dict__)
        return made

    def _in_cell(self, cell: Any, chains: Set[Chain], outer: tuple[Any, ...]) -> Any:
        try:
            held = cell.cell_contents
        except ValueError:  # it is empty
            return cell
        new = self._read(held, chains)
        new = self.within(held, outer) if new is held else new
        return cell if new is held else types.CellType(new)

    def _read(self, value: Any, chains: Set[Chain] = frozenset()) -> Any:
        """What code reads in the place of a value, of which it goes on to read these attributes."""
        if value is self.function:
            return self.replacement
        if not isinstance(value, types.ModuleType):
            return value
        following = defaultdict(set)
        for name, *rest in filter(None, chains):
            following[name].add(tuple(rest))
        there = {name: vars(value)[name] for name in following if name in vars(value)}
        others = {name: new for name, old in there.items() if (new := self._read(old, following[name])) is not old}
        if not others:
            return value
        view = types.ModuleType(value.__name__)
        # Whatever else is read of it is the module's.
        vars(view).update(others, __getattr__=functools.partial(getattr, value))
        return view


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object, and those of the functions, lambdas and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


@functools.lru_cache(maxsize=4096)
def chains_of(code: types.CodeType) -> Mapping[str, Set[Chain]]:
    """The globals and the closure's variables that code reads, each with the attributes that are read of it at once."""
    found: dict[str, set[Chain]] = defaultdict(set)
    for each in codes_of(code):
        name: str | None = None
        chain: Chain = ()
        for step in dis.get_instructions(each):
            if name is not None and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                chain = (*chain, step.argval)
                continue
            if name is not None:
                found[name].add(chain)
            name, chain = step.argval if step.opname in ("LOAD_GLOBAL", "LOAD_DEREF") else None, ()
    return found


def globals_of(method: Any) -> dict[str, Any]:
    """The globals that a function reads, by name."""
    if not isinstance(method, types.FunctionType):
        return {}
    return {name: method.__globals__[name] for name in chains_of(method.__code__) if name in method.__globals__}


def not_exchanged_reason(method: types.FunctionType, function: Callable) -> str | None:
    """Why a copy of a function cannot call another in place of `function`; None if nothing is in the way."""
    for code in codes_of(method.__code__):
        for step in dis.get_instructions(code):
            if step.opname == "IMPORT_FROM" and step.argval == function.__name__:
                return f"it imports {function.__name__} inside {method.__name__}; import it at the top of its file"
            if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                return f"its {method.__name__} assigns to the global {step.argval}"
    return None
