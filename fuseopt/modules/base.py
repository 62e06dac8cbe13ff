"""FusedModule and BlockForward: what every drop-in module, or forward of a block, shares with what it stands in for."""

from __future__ import annotations

import types
from collections.abc import Collection
from typing import Any, ClassVar, SupportsIndex, TypeGuard
from weakref import WeakValueDictionary

from torch import Tensor, nn

from fuseopt.errors import BackendError
from fuseopt.references import weak_attribute

REFUSALS = (BackendError, IndexError, TypeError, ValueError)
"""What an op raises, before it computes anything, for arguments that it does not take."""


class FusedModule(nn.Module):
    """A drop-in for another module, holding that module's own state rather than a copy of it.

    `from_module` shares the source's `_parameters`, `_buffers`, `_modules` and hook dictionaries by reference. So
    Parameter objects, state_dict keys, tied weights and hooks are the source's own; whatever is done to one (`.to()`,
    `load_state_dict(assign=True)`, a hook, an adapter put on a child) is done to both; and giving the source back later
    loses nothing. Both are copied together by deepcopy and pickle.

    The drop-in's class inherits from the fused class and from the source's class, and has the name of the latter. So
    `isinstance`, class names, methods and class attributes are the source's for whatever asks by class: optimizers that
    group parameters, `_init_weights`, `reset_parameters`, adapters. Its `repr` names the fused class, in front of the
    source's `extra_repr`.

    Attributes:
        _fused_class, _source_class: these two, of the drop-in's class.
        _stand_in: the drop-in's class itself, which a subclass of it is not.
    """

    _fused_class: ClassVar[type[FusedModule]]
    _source_class: ClassVar[type[nn.Module]]
    _stand_in: ClassVar[type[FusedModule]]

    @classmethod
    def from_module(cls, source: nn.Module, **options: Any) -> FusedModule:
        """Builds the drop-in for `source`; `options` are the keyword arguments of `_configure`.

        Raises:
            ValueError: when `not_supported_reasons(source)` is not empty.
        """
        reasons = cls.not_supported_reasons(source)
        if reasons:
            raise ValueError(f"{cls.__name__} cannot stand in for {type(source).__name__}: {'; '.join(reasons)}")
        fused = _new(cls, type(source))
        fused.__dict__.update(source.__dict__)
        fused._configure(**options)
        fused._own = frozenset(fused.__dict__.keys() - source.__dict__.keys())
        return fused

    def handed_back(self, source: nn.Module) -> dict[str, Any]:
        """What `source` is to have of the drop-in's plain attributes, such as the training flag and those set since.

        Not new ones that can be called: they may be bound to the drop-in.
        """
        return {
            name: value
            for name, value in self.__dict__.items()
            if name in source.__dict__ or not (name in self._own or name == "_own" or callable(value))
        }

    @classmethod
    def not_supported_reasons(cls, source: nn.Module) -> list[str]:
        """Why this class cannot stand in for `source`; empty when it can."""
        return []

    def _configure(self, **options: Any) -> None:
        """Reads what forward needs from the shared state and from the policy's options."""
        if options:
            raise TypeError(f"{type(self).__name__} takes no options, got {sorted(options)}")

    def _source_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The source class's own forward over the shared state: for inputs the fused path would not be exact on."""
        return self._source_class.forward(self, *args, **kwargs)

    def _get_name(self) -> str:
        return fused_class(self).__name__

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        reduced = super().__reduce_ex__(max(int(protocol), 2))
        cls = type(self)
        if not _is_stand_in(cls):
            return reduced
        # The class has no name to be imported by.
        return _new, (cls._fused_class, cls._source_class), *reduced[2:]


_STAND_INS: WeakValueDictionary[tuple[type, type], type[FusedModule]] = WeakValueDictionary()


def _new(fused: type[FusedModule], source: type[nn.Module]) -> FusedModule:
    """A drop-in without state, by `fused` for a module of the class `source`."""
    cls = _STAND_INS.get((fused, source))
    if cls is None:
        body = {
            "__doc__": fused.__doc__,
            "__module__": fused.__module__,
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
    """`getattr(module, name)` of what usually is a parameter: 0.1 us, where `nn.Module.__getattr__` takes 0.7."""
    found = module._parameters.get(name)
    return getattr(module, name) if found is None else found


class BlockForward:
    """The `forward` of one block of a model, which otherwise stays the module it is.

    transformers records hidden states and finds layers by class, so only `forward` is set on the instance. The class's
    own runs instead wherever something is not plain.

    It belongs to one block, to which it refers weakly, and is copied and pickled with it. torch.nn.DataParallel copies
    otherwise: its replicas keep the first device's forward, and raise.

    Args:
        block: a module of the class that the subclass is written for.
        backend: of the op with the residual add and the norm after it.
    """

    block = weak_attribute("block")

    def __init__(self, block: nn.Module, backend: str = "auto") -> None:
        self.block, self.backend = block, backend
        # A class set since may have another forward. FSDP sets one that inherits it.
        self._source = type(block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if type(self.block).forward is self._source.forward and self._is_plain(*args, **kwargs):
            return self._forward(*args, **kwargs)
        return type(self.block).forward(self.block, *args, **kwargs)

    @classmethod
    def not_supported_reasons(cls, block: nn.Module) -> list[str]:
        """Why this cannot be the forward of `block`, apart from its children; empty when it can."""
        return []

    def _is_plain(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> bool:
        raise NotImplementedError

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


_PLAIN = frozenset((nn.Parameter, Tensor, type(None)))


def fused_class(module: nn.Module) -> type[nn.Module]:
    """The fused class of a drop-in, such as FusedLayerNorm; of any other module, and of one by a subclass, its own."""
    cls = type(module)
    return cls._fused_class if _is_stand_in(cls) else cls


def source_class(module: nn.Module) -> type[nn.Module]:
    """The class of what a drop-in stands in for; of any other module, and of one by a subclass, its own."""
    cls = type(module)
    return cls._source_class if _is_stand_in(cls) else cls


def _is_stand_in(cls: type[nn.Module]) -> TypeGuard[type[FusedModule]]:
    return getattr(cls, "_stand_in", None) is cls


def full_name(cls: type) -> str:
    """ "transformers.models.t5.modeling_t5.T5LayerNorm", say: how a class is named without importing it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def runs_untouched(module: nn.Module, expected: type[nn.Module]) -> bool:
    """Whether calling `module` means no more than `expected.forward` on plain tensors.

    Asked in each call by whatever reads the weights of a module inside it, or does not call it. False when the module
    is of another class (an adapter, a subclass, a quantised or parametrised leaf); when it carries forward or backward
    hooks, or every module does; when its forward has been replaced on the instance (as accelerate's offloading does);
    when its weights are of a subclass of Tensor. `expected` may be a drop-in's fused class.
    """
    return (
        (type(module) is expected or fused_class(module) is expected)
        and not has_hooks(module)
        and "forward" not in module.__dict__
        and has_plain_weights(module)
        and not nn.modules.module._has_any_global_hook()
    )


def untouched_reasons(module: Any, names: Collection[str]) -> list[str]:
    """Why calling `module` means more than the forward of a class, for a plan; see `runs_untouched`.

    Args:
        names: full names of the classes that it may have itself, or that it may stand in for.
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
    """Whether the module's own tensors are of no subclass of Tensor, which kernels could not read."""
    state = module.__dict__
    if "weight" in state:
        return False  # beside the parameters, where nothing follows it
    return _PLAIN.issuperset(map(type, state["_parameters"].values())) and _PLAIN.issuperset(
        map(type, state["_buffers"].values())
    )


def is_plain(tensor: Tensor | None) -> bool:
    """Whether it is of no subclass of Tensor but Parameter."""
    return type(tensor) in _PLAIN


def has_hooks(module: nn.Module) -> bool:
    """Whether anything is registered to run around `module`'s forward or backward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
