"""Base classes of drop-in modules (FusedModule) and block forwards (BlockForward), and checks on modules.

`runs_untouched` (in each call) and `untouched_reasons` (for plans) say whether bypassing a module is safe.
"""

from __future__ import annotations

import types
from collections.abc import Collection
from typing import Any, ClassVar, SupportsIndex, TypeGuard
from weakref import WeakValueDictionary

from torch import Tensor, nn

from fuseopt.errors import BackendError
from fuseopt.runtime.references import code_of_forward, weak_attribute

RECORD = "_fuseopt"
"""Attribute that holds the record of what `initialize` applied to a module. A drop-in and its source have one each."""

REFUSALS = (BackendError, IndexError, TypeError, ValueError)
"""Exceptions by which an op refuses its arguments, raised before it computes anything."""


class FusedModule(nn.Module):
    """Replaces another module, the source, and shares its state.

    `from_module` takes over the source's `_parameters`, `_buffers`, `_modules` and hook dictionaries by reference. So
    Parameters, state_dict keys, tied weights and hooks are the source's own. A change to one module (`.to()`,
    `load_state_dict(assign=True)`, a hook, an adapter on a child) changes both, and restoring the source copies
    nothing. deepcopy and pickle copy both together.

    The drop-in's class inherits from the fused class and from the source's class, and has the latter's name and module.
    So code that selects modules by class treats it as the source: optimizers, `_init_weights`, `reset_parameters`,
    adapters, torch.fx.
    Its `repr` shows the fused class and the source's `extra_repr`.

    Attributes:
        _fused_class, _source_class: the two bases of the drop-in's class.
        _stand_in: the drop-in's class itself. A subclass inherits the attribute and so differs from its `_stand_in`.
        _own: names of the attributes that the source does not have.
    """

    _fused_class: ClassVar[type[FusedModule]]
    _source_class: ClassVar[type[nn.Module]]
    _stand_in: ClassVar[type[FusedModule]]
    _own: frozenset[str]

    @classmethod
    def from_module(cls, source: nn.Module, **options: Any) -> FusedModule:
        """Makes the drop-in for `source`; `options` are the keyword arguments of `_configure`.

        Raises:
            ValueError: if `not_supported_reasons(source)` is not empty.
        """
        reasons = cls.not_supported_reasons(source)
        if reasons:
            raise ValueError(f"{cls.__name__} cannot stand in for {type(source).__name__}: {'; '.join(reasons)}")
        fused = _new(cls, type(source))
        fused.__dict__.update(source.__dict__)
        fused.__dict__.pop(RECORD, None)
        fused._configure(**options)
        fused._own = frozenset((*fused.__dict__.keys() - source.__dict__.keys(), "_own", RECORD))
        return fused

    def is_exchangeable(self, source: nn.Module) -> bool:
        """Whether the drop-in and its source can still be swapped.

        False if the class of one was changed, as by a parametrization, or a method was set on one of them.
        """
        cls = type(self)
        return (
            _is_stand_in(cls)
            and type(source) is cls._source_class
            and not self._sets_method(self, source)
            and not self._sets_method(source, self)
        )

    def shared_attributes(self, one: nn.Module, other: nn.Module) -> dict[str, Any]:
        """The attributes that `other` gets from `one` when it takes its place, such as the training flag.

        Args:
            one, other: the drop-in and its source, in either order.
        """
        shared = ((name, value) for name, value in one.__dict__.items() if name not in self._own)
        return {
            name: getattr(type(other), name).__get__(other) if is_own_method(one, name) else value
            for name, value in shared
        }

    def _sets_method(self, one: nn.Module, other: nn.Module) -> bool:
        return any(
            callable(value)
            and name not in self._own
            and hasattr(type(one), name)
            and value is not other.__dict__.get(name)
            and not is_own_method(one, name)
            for name, value in one.__dict__.items()
        )

    @classmethod
    def not_supported_reasons(cls, source: nn.Module) -> list[str]:
        """Why this class cannot replace `source`; empty if it can."""
        return []

    def _configure(self, **options: Any) -> None:
        """Sets the drop-in's own attributes from the policy's options."""
        if options:
            raise TypeError(f"{type(self).__name__} takes no options, got {sorted(options)}")

    def _source_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the source class's own forward, for inputs that the fused one does not support."""
        return self._source_class.forward(self, *args, **kwargs)

    def _get_name(self) -> str:
        return fused_class(self).__name__

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        reduced = super().__reduce_ex__(max(int(protocol), 2))
        cls = type(self)
        if not _is_stand_in(cls):
            return reduced
        # The class cannot be imported by name.
        return _new, (cls._fused_class, cls._source_class), *reduced[2:]


_STAND_INS: WeakValueDictionary[tuple[type, type], type[FusedModule]] = WeakValueDictionary()


def _new(fused: type[FusedModule], source: type[nn.Module]) -> FusedModule:
    """An empty drop-in. Its class inherits from `fused` and `source`, and is created once per pair."""
    cls = _STAND_INS.get((fused, source))
    if cls is None:
        body = {
            "__doc__": fused.__doc__,
            "__module__": source.__module__,
            "__qualname__": f"{fused.__qualname__}[{source.__name__}]",
            "_fused_class": fused,
            "_source_class": source,
        }
        made: Any = types.new_class(
            source.__name__, (fused, source), exec_body=lambda namespace: namespace.update(body)
        )
        made._stand_in = made
        cls = _STAND_INS.setdefault((fused, source), made)
    return cls.__new__(cls)


def parameter(module: nn.Module, name: str) -> Tensor | None:
    """`getattr(module, name)` for a name that is usually a parameter: 0.1 us instead of nn.Module's 0.7 us."""
    found = module._parameters.get(name)
    return getattr(module, name) if found is None else found


class BlockForward:
    """A `forward` that is set on one block instance; the block keeps its class.

    transformers records hidden states and finds layers by class, so the block cannot be replaced. The class's own
    forward runs if `_is_plain` is False.

    Refers weakly to its block, and is copied and pickled with it. Does not work with torch.nn.DataParallel, whose
    replicas keep the first device's forward, and raise.

    Args:
        block: a module of the class that the subclass is written for.
        backend: backend of the fused op.
    """

    block = weak_attribute("block")
    __code__ = code_of_forward("block")

    def __init__(self, block: nn.Module, backend: str = "auto") -> None:
        self.block, self.backend = block, backend
        # `block.__class__` may change: FSDP sets a subclass with the same forward, other code may change the forward.
        self._source = type(block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if type(self.block).forward is self._source.forward and self._is_plain(*args, **kwargs):
            return self._forward(*args, **kwargs)
        return type(self.block).forward(self.block, *args, **kwargs)

    @classmethod
    def not_supported_reasons(cls, block: nn.Module) -> list[str]:
        """Why this cannot be the forward of `block`, apart from its children; empty if it can."""
        return []

    def _is_plain(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> bool:
        """Whether `_forward` computes what the class's own forward would, for these arguments."""
        raise NotImplementedError

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


_PLAIN = frozenset((nn.Parameter, Tensor, type(None)))


def fused_class(module: nn.Module) -> type[nn.Module]:
    """The fused class of a drop-in, such as FusedLayerNorm; the module's own class for anything else."""
    cls = type(module)
    return cls._fused_class if _is_stand_in(cls) else cls


def source_class(module: nn.Module) -> type[nn.Module]:
    """The class that a drop-in replaces; the module's own class for anything else."""
    cls = type(module)
    return cls._source_class if _is_stand_in(cls) else cls


def is_drop_in(module: nn.Module) -> bool:
    """Whether `module` was made by `FusedModule.from_module`."""
    return _is_stand_in(type(module))


def is_own_method(module: nn.Module, name: str) -> bool:
    """Whether the instance attribute is just the class's own bound method, which accelerate leaves behind."""
    value = module.__dict__[name]
    return (
        isinstance(value, types.MethodType)
        and value.__self__ is module
        and value.__func__ is getattr(type(module), name, None)
    )


def _is_stand_in(cls: type[nn.Module]) -> TypeGuard[type[FusedModule]]:
    return getattr(cls, "_stand_in", None) is cls


def full_name(cls: type) -> str:
    """Module and qualified name of a class, such as "transformers.models.t5.modeling_t5.T5LayerNorm"."""
    return f"{cls.__module__}.{cls.__qualname__}"


def runs_untouched(module: nn.Module, expected: type[nn.Module]) -> bool:
    """Whether calling `module` does exactly what `expected.forward` does on plain tensors.

    Checked in each call before code reads a child's weights or bypasses its forward. False if

    - the module has another class: an adapter, a subclass, a quantised or parametrised layer;
    - it has forward or backward hooks, or there are global module hooks;
    - its forward has been replaced on the instance, as accelerate's offloading does;
    - its weights are instances of a Tensor subclass.

    Args:
        expected: the exact class, or the fused class of a drop-in.
    """
    return (
        (type(module) is expected or fused_class(module) is expected)
        and not has_hooks(module)
        and "forward" not in module.__dict__
        and has_plain_weights(module)
        and not nn.modules.module._has_any_global_hook()
    )


def untouched_reasons(module: Any, names: Collection[str]) -> list[str]:
    """Why calling `module` does more than its class's forward; empty if it does not. `runs_untouched` for plans.

    Args:
        names: full names of the allowed classes; for a drop-in, of its source's class.
    """
    if not isinstance(module, nn.Module) or full_name(source_class(module)) not in names:
        return [f"it is a {full_name(type(module))}"]
    reasons = []
    if has_hooks(module):
        reasons.append("it carries hooks")
    if "forward" in module.__dict__:
        reasons.append("its forward has been replaced on the instance")
    if not has_plain_weights(module):
        reasons.append("its weights are of a tensor subclass, such as sharded or quantised ones")
    return reasons


def has_plain_weights(module: nn.Module) -> bool:
    """Whether the module's own tensors are plain ones; kernels cannot read Tensor subclasses."""
    state = module.__dict__
    if "weight" in state:
        return False  # torch.nn.utils.weight_norm sets a plain attribute in place of the parameter
    return _PLAIN.issuperset(map(type, state["_parameters"].values())) and _PLAIN.issuperset(
        map(type, state["_buffers"].values())
    )


def is_plain_tensor(tensor: Tensor | None) -> bool:
    """Whether `tensor` is None, or exactly a Tensor or a Parameter."""
    return type(tensor) in _PLAIN


def has_hooks(module: nn.Module) -> bool:
    """Whether anything is registered to run around `module`'s forward or backward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
