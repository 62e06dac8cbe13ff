"""Whether modules, and their weights, are what they were: for whatever goes past the modules' own forwards."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from fuseopt.build import loader

CONSTANTS = ("eps", "variance_epsilon", "scaling", "is_causal", "max_norm")
"""Plain attributes of modules that are read when their forwards are bypassed."""

_SPECIAL = ("training", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


# What the library for Python has functions of these names for.
def _has_true(states: Sequence[dict[str, Any]], names: tuple[str, ...]) -> bool:
    return any(chain.from_iterable(map(operator.itemgetter(*names), states)))


def _places(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]


def _are_the_same(those: Sequence[Any], others: Sequence[Any]) -> bool:
    """By identity: tensors compare themselves element by element."""
    return len(those) == len(others) and all(map(operator.is_, those, others))


class Structure:
    """Compares modules with what they were, in a few passes at the speed of C.

    It refers weakly to the first module, which indirectly holds this, and to the forward that was set on that module.

    Args:
        modules: all modules of one or more trees; the first must not be below another.

    Attributes:
        states: the `__dict__` of each module but the first.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        top, *self._others = modules
        self._top, self.states = weakref.ref(top), [module.__dict__ for module in self._others]
        children = (top._modules, *(state["_modules"] for state in self.states))
        # What has none makes no use of one that is added.
        self._children_of = [those for those in children if those]
        self._has_true = getattr(loader.python_library(), "has_true", _has_true)
        self._seen, self._forward = self._look(), _weakly(top.__dict__.get("forward"))

    @property
    def top(self) -> nn.Module:
        """The first module, which must not have been freed."""
        module = self._top()
        assert module is not None
        return module

    def is_unchanged(self) -> bool:
        """Whether classes, children and forwards that were set on instances are the same."""
        return self._look() == self._seen and self.top.__dict__.get("forward") is self._forward()

    def is_special(self) -> bool:
        """Whether any module is in training mode or carries hooks."""
        return self.is_special_inside() or is_special(self.top)

    def is_special_inside(self) -> bool:
        """Whether any module but the first is in training mode or carries hooks."""
        return bool(self._has_true(self.states, _SPECIAL))

    def _look(self) -> tuple[list[Any], ...]:
        return (
            [type(self.top), *map(type, self._others)],
            list(chain.from_iterable(map(dict.values, self._children_of))),
            [state.get("forward") for state in self.states],
        )


def _weakly(forward: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(forward)
    except TypeError:  # None, and what cannot be referred to weakly
        return lambda: forward


class Watch:
    """Compares what there is of some plain modules, and of their parameters, with what there was.

    Args:
        modules: a module, referred to weakly, and all modules of the trees below some of its children.
        parameters: theirs, without None.
        constants: names of plain attributes that are to stay.
    """

    def __init__(
        self, modules: list[nn.Module], parameters: list[nn.Parameter], constants: Sequence[str] = CONSTANTS
    ) -> None:
        self.structure = Structure(modules)
        states, top = self.structure.states, modules[0].__dict__
        # What has none makes no use of one that is added.
        self.parameters_of = [held for held in (top["_parameters"], *(s["_parameters"] for s in states)) if held]
        self.constants_of = [(state, name) for state in states for name in constants if name in state]
        self.constants_of_top = [name for name in constants if name in top]
        self.parameters, self.device_type = parameters, parameters[0].device.type
        self._places_of: Callable[[list[nn.Parameter]], Any] = getattr(loader.python_library(), "places", _places)
        self.seen_constants, self.seen_parameters = self._constants(), self._held()
        self.places = self._places_of(parameters)

    def is_in_place(self) -> bool:
        """Whether parameters have the addresses, dtypes and layouts that they had."""
        return bool(self._places_of(self.parameters) == self.places)

    def is_unchanged(self) -> bool:
        return (
            not self.structure.is_special()
            and not torch.is_autocast_enabled(self.device_type)
            and self.structure.is_unchanged()
            and self._constants() == self.seen_constants
            and _are_the_same(self._held(), self.seen_parameters)
            and self.is_in_place()
        )

    def _constants(self) -> list[Any]:
        top = self.structure.top.__dict__
        return [top.get(name) for name in self.constants_of_top] + [s.get(name) for s, name in self.constants_of]

    def _held(self) -> list[nn.Parameter | None]:
        return list(chain.from_iterable(map(dict.values, self.parameters_of)))


def modules_below(*roots: nn.Module) -> list[nn.Module]:
    """The roots and everything below them, each once."""
    modules, stack = {}, list(roots)
    while stack:
        module = stack.pop()
        if module is not None and id(module) not in modules:
            modules[id(module)] = module
            stack += module._modules.values()
    return list(modules.values())


def config_of(module: nn.Module) -> Any:
    """The module's `config`; None if it has none, or if that is a property that raises."""
    try:
        return getattr(module, "config", None)
    except Exception:
        return None


def parameters_below(*roots: nn.Module) -> list[nn.Parameter]:
    """Those of the roots and everything below them, each once; in less than half of the time of `parameters()`."""
    held = chain.from_iterable(module._parameters.values() for module in modules_below(*roots) if module._parameters)
    # By identity: to hash a tensor is a call of Python's.
    return list({id(parameter): parameter for parameter in held if parameter is not None}.values())


def is_special(module: nn.Module) -> bool:
    """Whether `module` is in training mode or carries hooks."""
    return _has_true([module.__dict__], _SPECIAL)


def is_without_parameters(module: nn.Module) -> bool:
    """Whether a leaf module keeps weights outside its Parameters, or renormalises them (an Embedding's `max_norm`)."""
    state = module.__dict__
    if state["_modules"]:
        return False
    return bool(state["_buffers"]) or "weight" in state or state.get("max_norm") is not None


def only_captures_outputs(module: nn.Module) -> bool:
    """Whether its hooks are those that transformers leaves behind once it was asked for hidden states or attentions."""
    others = (module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    hooks = module._forward_hooks.values()
    captures = "transformers.utils.output_capturing"
    return not any(others) and all(getattr(hook, "__module__", None) == captures for hook in hooks)
