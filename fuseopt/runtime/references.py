"""Weak references from what fuseopt sets on a module back to that module.

A forward that is set on a block refers to that block. A strong reference would form a cycle, which only the garbage
collector frees. With a weak one, a fused model is freed with its last reference, as a stock model is.
"""

from __future__ import annotations

import weakref
from typing import Any


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


def weak_attribute(name: str) -> Any:
    """A property `name` that holds a weak reference to the object it is set to.

    Raises:
        ReferenceError: on reading, if the object has been freed.
    """
    key = f"_{name}_reference"

    def get(self: Any) -> Any:
        referent = getattr(self, key).ref()
        if referent is None:
            raise ReferenceError(
                f"the module that {type(self).__name__} was set on has been freed; keep a reference to the model, not "
                "only to one of its methods"
            )
        return referent

    def put(self: Any, referent: Any) -> None:
        self.__dict__[key] = Reference(referent)

    return property(get, put)
