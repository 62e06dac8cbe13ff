"""Weak references from what fuseopt sets on a module back to that module.

A forward that is set on a block refers to that block. A strong reference would form a cycle, which only the garbage
collector frees. With a weak one, a fused model is freed with its last reference, as a stock model is.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

from torch import nn


class Reference:
    """A weak reference. Calling it returns the object, or None once that has been freed.

    A deepcopy or pickle of it refers to the copy of the object. It holds a `weakref.ref` instead of subclassing it,
    because Dynamo cannot trace a subclass.
    """

    def __init__(self, to: Any) -> None:
        self.ref = weakref.ref(to)

    def __call__(self) -> Any:
        return self.ref()

    def __reduce__(self) -> tuple[Any, ...]:
        return refer, (self(),)


class _Nothing:
    pass


def refer(to: Any) -> Reference:
    """A weak reference to `to`; for None, a reference that returns None."""
    return Reference(_Nothing() if to is None else to)


class Remembered:
    """Class and attributes of a module, and a module made of them once that one has been freed.

    A bound method keeps its module alive, and so does a `copy.copy`, which shares the forwards that fuseopt has set.
    What these hold of their module is this object. It has none of fuseopt's own objects, since those may hold it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._class = type(module)
        self._made: nn.Module | None = None
        self._attributes = {
            name: part for name, part in vars(module).items() if not type(part).__module__.startswith("fuseopt.")
        }

    def module(self) -> nn.Module:
        """A module of that class with those attributes, the same one in every call."""
        if self._made is None:
            self._made = object.__new__(self._class)
            vars(self._made).update(self._attributes)
        # Children are shared with copies of the module, which may have been set to another mode.
        modes = {child.training for child in self._made.children()} or {self._made.training}
        self._made.training = True in modes
        return self._made

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made": None}


def weak_attribute(name: str) -> Any:
    """A property `name` that holds a weak reference to the object it is set to.

    If that is a module and has been freed, it is a module of the same class with the same attributes (`Remembered`).

    Raises:
        ReferenceError: on reading, if another object has been freed, or a module that had no attributes yet.
    """
    key, remembered = f"_{name}_reference", f"_{name}_remembered"

    def get(self: Any) -> Any:
        referent = getattr(self, key).ref()
        if referent is not None:
            return referent
        if remembered not in self.__dict__:
            raise ReferenceError(
                f"the object that {type(self).__name__} was set on has been freed; keep a reference to the model, not "
                "only to one of its methods"
            )
        return self.__dict__[remembered].module()

    def put(self: Any, referent: Any) -> None:
        self.__dict__[key] = Reference(referent)
        # A module that is being copied or unpickled has no attributes yet.
        if isinstance(referent, nn.Module) and vars(referent):
            self.__dict__[remembered] = Remembered(referent)

    return property(get, put)


def code_of_forward(name: str) -> Any:
    """A property with the code of the forward of a module's class, for torch.export, which asks a `forward` for it.

    Args:
        name: the attribute that holds the module.
    """
    return property(lambda self: inspect.unwrap(type(getattr(self, name)).forward).__code__)
