"""Weak references between the modules of a model and what fuseopt has set on them.

A forward that is set on a block knows the block; if it held it, only the garbage collector would free the two. So it
refers to it weakly, and a model is freed with its last user, as stock's is.
"""

from __future__ import annotations

import weakref
from typing import Any


class Reference:
    """Call: what it refers to, or None once that is gone. Deepcopy and pickle make of it one to the copy of that.

    Not a subclass of `weakref.ref`, which Dynamo does not trace.
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
    """A reference to `to`; of None, one whose referent is gone."""
    return Reference(_Nothing() if to is None else to)


def weak_attribute(name: str) -> Any:
    """A property `name` that refers weakly to what it is set to.

    Raises:
        ReferenceError: on reading, when that is gone.
    """
    key = f"_{name}_reference"

    def get(self: Any) -> Any:
        referent = getattr(self, key).ref()
        if referent is None:
            raise ReferenceError(
                f"{type(self).__name__} was set on a module that is gone; keep a reference to the model, not only to "
                "a method of it"
            )
        return referent

    def put(self: Any, referent: Any) -> None:
        self.__dict__[key] = Reference(referent)

    return property(get, put)
