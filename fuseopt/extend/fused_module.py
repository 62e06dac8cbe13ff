"""`fuseopt.FusedModule`, and the subclass of it whose forward is a user's op."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

from fuseopt.extend.own_op import Op, registered
from fuseopt.modules import base


class FusedModule(base.FusedModule):
    """Base of a user's module that stands in for another: it has that module's parameters, buffers and attributes.

    A subclass defines `forward`, with the signature of the class that it replaces, and no `__init__`, which would not
    be called. State of its own is an attribute of the class, or one that `forward` sets when it is missing; `restore`
    hands the latter to the original module. `self.backend` is the config's: a forward that passes it on, as
    `op(x, backend=self.backend)`, obeys `"backend": "triton"` and the like.
    """

    backend: str

    def _configure(self, **options: Any) -> None:
        self.backend = options.pop("backend", "auto")
        super()._configure(**options)

    @classmethod
    def not_supported_reasons(cls, source: nn.Module) -> list[str]:
        return ["it has an attribute `backend` of its own"] if hasattr(source, "backend") else []


@functools.cache
def module_of(op: Op) -> type[FusedModule]:
    """The FusedModule class, named by the op's short name, whose forward passes its arguments to the op."""

    def forward(self: FusedModule, *args: Any, **kwargs: Any) -> Any:
        return op(*args, backend=self.backend, **kwargs)

    own = inspect.signature(op.function)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = own.replace(parameters=[itself, *own.parameters.values()])  # type: ignore[attr-defined]

    def reduce(self: FusedModule, protocol: Any) -> tuple[Any, ...]:
        return _module_of_name, (op.name,), self.__dict__  # pickle finds no class of this name

    return type(op.name.partition("::")[2], (FusedModule,), {"forward": forward, "__reduce_ex__": reduce})


def _module_of_name(name: str) -> FusedModule:
    cls = module_of(registered()[name])
    return cls.__new__(cls)
