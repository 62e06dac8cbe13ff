"""Survey: what a decode step stands on, looked at in every call: modules that it knows, and where weights are."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from fuseopt.modules.base import FusedModule, has_hooks
from fuseopt.modules.relative_attention import RelativeStackForward
from fuseopt.modules.residual import GPT2BlockForward, T5BlockForward
from fuseopt.modules.training_forward import TrainingForward

# Plain attributes of modules that a step reads as constants.
_CONSTANTS = ("eps", "variance_epsilon", "scaling")
# fuseopt's own, which compute what the class's forward does.
_FORWARDS = (TrainingForward, GPT2BlockForward, RelativeStackForward, T5BlockForward)
_special = operator.itemgetter(
    "training", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")


@dataclass(frozen=True)
class Survey:
    """One walk over modules.

    Attributes:
        reason: why a decode step would not compute what they do, or None.
        key: changes when a module or a constant is another, or a weight has another address, dtype or layout. Values
            are read in place and take no part.
        watch: tells whether another walk would find the same, unless something needed a closer look.
    """

    reason: str | None
    key: tuple[Hashable, ...] = ()
    watch: Watch | None = None

    def is_in_place(self) -> bool:
        """Whether weights are still where they were: what reads them can run, though what comes of it may be void."""
        return self.watch is not None and self.watch.is_in_place()


class Watch:
    """Compares what there is of some plain modules with what there was, in a few passes at the speed of C.

    Args:
        modules: all of a tree, and those that its roots are children of.
        parameters: theirs, without None.
    """

    def __init__(self, modules: list[nn.Module], parameters: list[nn.Parameter]) -> None:
        self.modules, self.states = modules, [module.__dict__ for module in modules]
        # What has none makes no use of one that is added.
        self.children_of = [state["_modules"] for state in self.states if state["_modules"]]
        self.parameters_of = [state["_parameters"] for state in self.states if state["_parameters"]]
        self.constants_of = [(state, name) for state in self.states for name in _CONSTANTS if name in state]
        self.parameters, self.device_type = parameters, parameters[0].device.type
        self.seen, self.places = self._look(), self._places()

    def is_in_place(self) -> bool:
        return self._places() == self.places

    def is_unchanged(self) -> bool:
        special = any(chain.from_iterable(map(_special, self.states))) or any("forward" in s for s in self.states)
        return not special and not torch.is_autocast_enabled(self.device_type) and self._look() == self.seen

    def _places(self) -> list[tuple[int, int]]:
        return list(
            zip(map(torch.Tensor.data_ptr, self.parameters), map(torch.Tensor.numel, self.parameters), strict=True)
        )

    def _look(self) -> tuple[list[Any], ...]:
        # Parameters by identity, as tensors compare themselves element by element.
        held = chain.from_iterable(map(dict.values, self.parameters_of))
        return (
            list(map(type, self.modules)),
            list(chain.from_iterable(map(dict.values, self.children_of))),
            [state.get(name) for state, name in self.constants_of],
            list(map(id, held)),
            list(map(torch.Tensor.data_ptr, self.parameters)),
            [(parameter.dtype, parameter.shape, parameter.stride()) for parameter in self.parameters],
        )


def survey(
    model: nn.Module, roots: Iterable[nn.Module], classes: tuple[type[nn.Module], ...], before: Survey | None = None
) -> Survey:
    """Looks at `model` itself and at the trees below `roots`, which are to consist of exactly `classes`.

    Written for speed: transformers' models have hundreds of modules.

    Args:
        before: of an earlier call with the same arguments.
    """
    if before is not None and before.watch is not None and before.watch.is_unchanged():
        return before
    known = frozenset(classes)
    key: list[Hashable] = []
    modules, stack, special = [model], list(roots), False
    while stack:
        module = stack.pop()
        modules.append(module)
        stack += [child for child in module._modules.values() if child is not None]
    parameters = []
    for module in modules:
        state = module.__dict__
        if type(module) not in known or any(_special(state)) or "forward" in state:
            reason = _module_reason(module, known)
            if reason:
                path = next(path for path, other in model.named_modules() if other is module)
                return Survey(f"{path or 'the model'} {reason}")
            special = special or any(_special(state)) or "forward" in state
        key.append((id(module), type(module), *map(state.get, _CONSTANTS)))
        parameters += [parameter for parameter in state["_parameters"].values() if parameter is not None]
    for parameter in parameters:
        if type(parameter) is not nn.Parameter:
            return Survey("it has parameters of a tensor subclass, such as sharded or quantised ones")
        key.append((parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride()))
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        return Survey("its parameters are on several devices")
    (device,) = devices
    if device.type not in ("cpu", "cuda"):
        return Survey(f"it is on {device}")
    if torch.is_autocast_enabled(device.type):
        return Survey("autocast is on")
    return Survey(None, (device, *key), None if special else Watch(modules, parameters))


def _module_reason(module: nn.Module, classes: frozenset[type[nn.Module]]) -> str | None:
    if module.training:
        return "is in training mode"
    if has_hooks(module) and not _only_captures_outputs(module):
        return "carries hooks"
    if "_hf_hook" in module.__dict__:
        return "is dispatched or offloaded by accelerate"
    if "forward" in module.__dict__ and type(module.__dict__["forward"]) not in _FORWARDS:
        return "has had its forward replaced"
    stands_for = module._source_class if isinstance(module, FusedModule) else type(module)
    if stands_for in classes or stands_for.__module__ in _ACTIVATIONS:
        return None
    return f"is a {type(module).__name__}, which the decode step does not know"


def _only_captures_outputs(module: nn.Module) -> bool:
    """Whether its hooks are those that transformers leaves behind once it was asked for hidden states or attentions."""
    others = (module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    hooks = module._forward_hooks.values()
    captures = "transformers.utils.output_capturing"
    return not any(others) and all(getattr(hook, "__module__", None) == captures for hook in hooks)
