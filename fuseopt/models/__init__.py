"""Model families: WHAT may be replaced. A family is a policy (data) in a file of its own and a line here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import nn

from fuseopt import modules
from fuseopt.generation.families.step_interface import unknown_step
from fuseopt.models.common import COMMON
from fuseopt.models.gpt2 import GPT2
from fuseopt.models.policy import REGION_TARGETS, ModelPolicy, Rule, full_name
from fuseopt.models.t5 import T5
from fuseopt.runtime.module_watch import config_of

_POLICIES: dict[str, ModelPolicy] = {}


def register_policy(policy: ModelPolicy) -> None:
    """Makes `policy` the one for its model types, from inside the package or outside it.

    Raises:
        ValueError: when it names no model type, one that another policy covers, or a target or decode step that does
            not exist.
    """
    unknown = next(unknown_names(policy), None)
    if unknown is not None:
        raise ValueError(f"policy {policy.name!r}: {unknown}")
    _register(policy)


def unknown_names(policy: ModelPolicy) -> Iterator[str]:
    """A message for each target and decode step of a policy that does not exist."""
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        for rule in value if isinstance(value, tuple) else ():
            if isinstance(rule, Rule):
                yield from (f"{field.name} {message}" for message in _unknown_target(rule, field.name))
    for model_class, step in policy.decode_steps.items():
        unknown = unknown_step(model_class, step)
        if unknown is not None:
            yield f"decode_steps names {unknown}"


def _unknown_target(rule: Rule, field: str) -> Iterator[str]:
    names = f"names the target {rule.target!r} for {rule.source}"
    if field == "regions":
        if rule.target_name not in REGION_TARGETS:
            yield f"{names}; known are {', '.join(REGION_TARGETS)}"
        return
    try:
        is_class = isinstance(rule.target_class, type)
    except (ImportError, AttributeError):
        is_class = False
    if not is_class:
        known = ", ".join(modules.__all__)
        yield f"{names}; give a class, its dotted path, or one of fuseopt.modules: {known}"


def _register(policy: ModelPolicy) -> None:
    if not policy.model_types:
        raise ValueError(f"policy {policy.name!r} names no model type, so no model would ever be given it")
    for model_type in policy.model_types:
        other = _POLICIES.get(model_type)
        if other is not None and other != policy:
            raise ValueError(f"model type {model_type!r} is covered by policy {other.name!r} already")
    _POLICIES.update(dict.fromkeys(policy.model_types, policy))


def policy_for(model: nn.Module) -> ModelPolicy:
    """The policy of the model's `config.model_type`, or the common one."""
    model_type = getattr(config_of(model), "model_type", None)
    return _POLICIES.get(model_type, COMMON) if isinstance(model_type, str) else COMMON


for _policy in (GPT2, T5):
    _register(_policy)

__all__ = ["COMMON", "ModelPolicy", "Rule", "full_name", "policy_for", "register_policy", "unknown_names"]
