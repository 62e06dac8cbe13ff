"""Survey: what a decode step stands on, looked at in every call: modules that it knows, and where weights are."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fuseopt.modules.base import FusedModule, has_hooks
from fuseopt.modules.residual import GPT2BlockForward, T5BlockForward
from fuseopt.modules.training_forward import TrainingForward

# Plain attributes of modules that a step reads as constants.
_CONSTANTS = ("eps", "variance_epsilon", "scaling")
# fuseopt's own, which compute what the class's forward does.
_FORWARDS = (TrainingForward, GPT2BlockForward, T5BlockForward)
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
    """

    reason: str | None
    key: tuple[Hashable, ...]


def survey(model: nn.Module, roots: Iterable[nn.Module], classes: tuple[type[nn.Module], ...]) -> Survey:
    """Looks at `model` itself and at the trees below `roots`, which are to consist of exactly `classes`.

    Written for speed: transformers' models have hundreds of modules.
    """
    known = frozenset(classes)
    key: list[Hashable] = []
    modules, stack, parameters = [model], list(roots), []
    while stack:
        module = stack.pop()
        if module is not None:
            modules.append(module)
            stack += module._modules.values()
    for module in modules:
        state, kind = module.__dict__, type(module)
        if kind not in known or any(_special(state)) or "forward" in state:
            reason = _module_reason(module, known)
            if reason:
                path = next(path for path, other in model.named_modules() if other is module)
                return Survey(f"{path or 'the model'} {reason}", ())
        key.append((id(module), kind))
        for name in _CONSTANTS:
            if name in state:
                key.append(state[name])
        parameters += state["_parameters"].values()
    devices = set()
    for parameter in parameters:
        if parameter is None:
            continue
        if type(parameter) is not nn.Parameter:
            return Survey("it has parameters of a tensor subclass, such as sharded or quantised ones", ())
        devices.add(parameter.device)
        key.append((parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride()))
    if len(devices) > 1:
        return Survey("its parameters are on several devices", ())
    (device,) = devices
    if device.type not in ("cpu", "cuda"):
        return Survey(f"it is on {device}", ())
    if torch.is_autocast_enabled(device.type):
        return Survey("autocast is on", ())
    return Survey(None, (device, *key))


def _module_reason(module: nn.Module, classes: frozenset[type[nn.Module]]) -> str | None:
    if module.training:
        return "is in training mode"
    if has_hooks(module) and not _only_captures_outputs(module):
        return "carries hooks"
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
