"""Checks that modules, hooks and weight addresses have not changed, for code that bypasses the modules' forwards.

A captured CUDA graph or a decode step reads weights by address. `ModuleWatch` is compared with the model in every call,
so its checks are a few C-level passes over lists.
"""

from __future__ import annotations

import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from fuseopt.build import loader

CONSTANTS = (
    *("eps", "variance_epsilon", "scaling", "is_causal", "max_norm", "attention_scaling", "rope_type", "use_rope"),
    *("full_attention_attention_scaling", "sliding_attention_attention_scaling", "sliding_window", "scale_attn"),
    *("attn_logit_softcapping", "embed_scale", "embedding_multiplier", "do_layer_norm_before", "offset"),
    "logit_scale",
)
"""Plain attributes of modules that bypassing code reads."""

REDUNDANT = (
    *("layer_idx", "num_heads", "head_dim", "split_size", "nf", "normalized_shape", "n_heads", "key_value_proj_dim"),
    *("is_decoder", "has_relative_attention_bias", "relative_attention_num_buckets", "num_key_value_groups"),
    *("num_key_value_heads", "head_size", "embed_dim", "num_attention_heads", "is_causal", "has_sliding_layers"),
    *("use_parallel_residual", "rotary_dim", "residual_multiplier", "qk_layernorm", "rotary_ndims"),
    "use_qk_norm",
)
"""Plain attributes that forwards read and bypassing code takes from elsewhere, such as from the shapes of weights."""

_COMPARED_BUFFERS = ("inv_freq", "embed_scale")
_DELETED = object()
_SPECIAL = ("training", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


# Python versions of the functions `has_true` and `places` of the native library `csrc/python`.
def _has_true(states: Sequence[dict[str, Any]], names: tuple[str, ...]) -> bool:
    return any(chain.from_iterable(map(operator.itemgetter(*names), states)))


def _places(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]


def _are_the_same(those: Sequence[Any], others: Sequence[Any]) -> bool:
    """Element-wise `is`: `==` on tensors would compare their elements."""
    return len(those) == len(others) and all(map(operator.is_, those, others))


class ModuleSnapshot:
    """Classes, children and instance-level forwards of modules, and a check that they are still the same.

    References to the first module and to its instance-level forward are weak: that module owns this object.

    Args:
        modules: all modules of one or more trees; the first must not be a descendant of another.

    Attributes:
        states: the `__dict__` of each module but the first.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        top, *self._others = modules
        self._top, self.states = weakref.ref(top), [module.__dict__ for module in self._others]
        children = (top._modules, *(state["_modules"] for state in self.states))
        # A leaf module would not call a child that is added to it.
        self._children_of = [those for those in children if those]
        self._has_true = getattr(loader.python_library(), "has_true", _has_true)
        self._seen, self._forward = self._look(), _weakly(top.__dict__.get("forward"))

    @property
    def top(self) -> nn.Module:
        """The first module, which must still exist."""
        module = self._top()
        assert module is not None
        return module

    def is_unchanged(self) -> bool:
        """Whether classes, children and instance-level forwards are the same as at construction."""
        return self._look() == self._seen and self.top.__dict__.get("forward") is self._forward()

    def trains_or_has_hooks(self) -> bool:
        """Whether any module is in training mode or has hooks."""
        return self.inner_trains_or_has_hooks() or trains_or_has_hooks(self.top)

    def inner_trains_or_has_hooks(self) -> bool:
        """Whether any module except the first is in training mode or has hooks."""
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
    except TypeError:  # None, or an object without weak references
        return lambda: forward


class ModuleWatch:
    """Modules and parameters of a captured step, and a check that they are still the same.

    Args:
        modules: a module, referenced weakly, and all modules of the trees below some of its children.
        parameters: the parameters of `modules`, without None; at least one.
        constants: names of plain attributes that must keep their values, besides `CONSTANTS` and `REDUNDANT`.
        buffers: the buffers of some modules by name, and the attributes of Parameters of a subclass, which must stay
            the same objects too. `parameters` then includes these buffers, and the tensors inside such Parameters.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        parameters: Sequence[torch.Tensor],
        constants: Sequence[str] = (),
        buffers: Sequence[dict[str, torch.Tensor | None]] = (),
    ) -> None:
        self.snapshot = ModuleSnapshot(modules)
        states, top = self.snapshot.states, modules[0].__dict__
        # A module without parameters would not read one that is added to it.
        held_by = (top["_parameters"], *(state["_parameters"] for state in states), *buffers)
        self.parameters_of = [held for held in held_by if held]
        names = dict.fromkeys((*CONSTANTS, *REDUNDANT, *constants))
        self.constants_of_top = [name for name in names if name in top]
        # By the names that a module has, as one C call reads several attributes.
        states_with = defaultdict(list)
        for state in states:
            states_with[tuple(name for name in names if name in state)].append(state)
        states_with.pop((), None)
        self.constants_of = [(operator.itemgetter(*names), those) for names, those in states_with.items()]
        self.parameters, self.device_type = parameters, parameters[0].device.type
        self._places_of: Callable[[Sequence[torch.Tensor]], Any] = getattr(loader.python_library(), "places", _places)
        self.seen_constants, self.seen_parameters = self._constants(), self._held()
        self.places = self._places_of(parameters)

    def is_in_place(self) -> bool:
        """Whether the addresses, dtypes, shapes and strides of all parameters are the same as at construction."""
        return bool(self._places_of(self.parameters) == self.places)

    def is_unchanged(self) -> bool:
        """Whether a captured step is still valid; False in training mode, with hooks and under autocast."""
        return (
            not self.snapshot.trains_or_has_hooks()
            and not torch.is_autocast_enabled(self.device_type)
            and self.snapshot.is_unchanged()
            and self._constants() == self.seen_constants
            and _are_the_same(self._held(), self.seen_parameters)
            and self.is_in_place()
        )

    def _constants(self) -> list[Any]:
        top = self.snapshot.top.__dict__
        found = [top.get(name) for name in self.constants_of_top]
        try:
            for getter, states in self.constants_of:
                found += map(getter, states)
        except KeyError:
            found.append(_DELETED)
        return found

    def _held(self) -> list[torch.Tensor | None]:
        return list(chain.from_iterable(map(dict.values, self.parameters_of)))


def modules_below(*roots: nn.Module) -> list[nn.Module]:
    """The roots and all their descendants, each once."""
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
    """Parameters of the roots and their descendants, each once; takes less than half the time of `parameters()`."""
    held = chain.from_iterable(module._parameters.values() for module in modules_below(*roots) if module._parameters)
    # Keyed by id, because hashing a tensor is a slow Python call.
    return list({id(parameter): parameter for parameter in held if parameter is not None}.values())


def trains_or_has_hooks(module: nn.Module) -> bool:
    """Whether `module` is in training mode or has hooks."""
    return _has_true([module.__dict__], _SPECIAL)


def has_other_weights(module: nn.Module) -> bool:
    """Whether a leaf module has weights outside of its Parameters, or renormalises them (an Embedding's `max_norm`).

    Not counted are buffers that `DecodeStep.constants` compares.
    """
    state = module.__dict__
    if state["_modules"]:
        return False
    has_buffers = not all(name.endswith(_COMPARED_BUFFERS) for name in state["_buffers"])
    return has_buffers or "weight" in state or state.get("max_norm") is not None


def only_captures_outputs(module: nn.Module) -> bool:
    """Whether the only hooks are those of transformers that record outputs (hidden states, attentions)."""
    others = (module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    hooks = module._forward_hooks.values()
    captures = "transformers.utils.output_capturing"
    return not any(others) and all(getattr(hook, "__module__", None) == captures for hook in hooks)
