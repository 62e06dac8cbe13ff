"""Which policy a model gets: registered policies, extensions of them, and the checks before either is accepted."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fuseopt import modules
from fuseopt.generation.families.step_interface import unknown_step
from fuseopt.kernel_table import kernels
from fuseopt.models.common import COMMON
from fuseopt.models.gpt2 import GPT2
from fuseopt.models.policy import REGION_TARGETS, ModelPolicy, Rule
from fuseopt.models.t5 import T5
from fuseopt.modules.regions import REGIONS
from fuseopt.ops.rms_norm import CAST_ORDERS
from fuseopt.runtime.module_watch import config_of

_MODULES = ", ".join(modules.__all__)
# Options that a rule must have: by the field that it is in, or by the name of its target.
_REQUIRED_OPTIONS = {
    "causal_attention": ("attention",),
    "heads": ("head",),
    "relative_attention": ("attention",),
    "stacks": ("blocks",),
    "FusedActivation": ("region",),
    "FusedGatedMLP": ("act", "gate", "down"),
}
# (target name, option) -> the values that the option may have.
_OPTION_VALUES: dict[tuple[str, str], Collection[str | None]] = {
    ("FusedActivation", "region"): REGIONS,
    ("FusedGELU", "approximate"): ("none", "tanh"),
    ("FusedRMSNorm", "cast_order"): CAST_ORDERS,
    ("RotaryAttentionForward", "norms"): (None, "heads", "projections"),
}
_NO_RULES = ("name", "model_types", "eager_attention", "decode_steps")

_policies: dict[str, ModelPolicy] = {model_type: policy for policy in (GPT2, T5) for model_type in policy.model_types}
_extensions: list[PolicyExtension] = []


def register_policy(policy: ModelPolicy) -> None:
    """Makes `policy` the one for its model types.

    Raises:
        ValueError: it names no model type, one that another policy covers, or a target, kernel, option or decode step
            that does not exist.
    """
    if not policy.model_types:
        raise ValueError(
            f"policy {policy.name!r} names no model type, so no model would get it; "
            'extend_policy("all", ...) adds rules for every model'
        )
    for model_type in policy.model_types:
        other = _policies.get(model_type)
        if other is not None and other != policy:
            raise ValueError(
                f"model type {model_type!r} is covered by policy {other.name!r} already; extend_policy adds rules to it"
            )
    _check(f"policy {policy.name!r}", policy)
    _policies.update(dict.fromkeys(policy.model_types, policy))


@dataclass(frozen=True, eq=False)
class PolicyExtension:
    """Rules that were added to policies. `remove()` takes them back.

    Attributes:
        model_types: the `config.model_type` values of the models that get them; None for every model.
        additions: field of ModelPolicy -> what is added to it.
    """

    model_types: tuple[str, ...] | None
    additions: Mapping[str, Any]

    def remove(self) -> None:
        """Takes the rules back. Models that were fused by them stay fused. A second call does nothing."""
        if self in _extensions:
            _extensions.remove(self)

    def covers(self, model_type: object) -> bool:
        return self.model_types is None or model_type in self.model_types

    def applied_to(self, policy: ModelPolicy) -> ModelPolicy:
        """`policy` with the additions, which replace what it has for the same class."""
        changes: dict[str, Any] = {}
        for name, added in self.additions.items():
            present = getattr(policy, name)
            if isinstance(added, Mapping):
                changes[name] = {**present, **added}
            else:
                replaced = {_key(name, entry) for entry in added}
                changes[name] = (*added, *(entry for entry in present if _key(name, entry) not in replaced))
        return dataclasses.replace(policy, **changes)


def extend_policy(model_types: str | Iterable[str], **additions: Any) -> PolicyExtension:
    """Adds rules to the policies of some models, or of every model.

    `extend_policy("all", kernels=[Rule("my_package.Norm", MyFusedNorm)])`. A rule replaces the one that a policy has
    for the same class in the same field; in `kernels`, for the same class and target name. Of two extensions the later
    one counts. Models that are fused already do not change.

    Args:
        model_types: `config.model_type` values, one of them, or "all", which covers models without a config too.
        additions: by field of ModelPolicy: rules, class names for `eager_attention`, a dict for `decode_steps`.

    Returns:
        The extension, whose `remove()` undoes the call.

    Raises:
        ValueError: it names a field, target, kernel, option or decode step that does not exist.
    """
    names = (model_types,) if isinstance(model_types, str) else tuple(model_types)
    fields = [field.name for field in dataclasses.fields(ModelPolicy) if field.name not in ("name", "model_types")]
    unknown = next((name for name in additions if name not in fields), None)
    if unknown is not None:
        raise ValueError(f"extend_policy: ModelPolicy has no rules {unknown!r}; known are {', '.join(fields)}")
    given: dict[str, Any] = {}
    for name, value in additions.items():
        kind = Mapping if name == "decode_steps" else Iterable
        if not isinstance(value, kind) or isinstance(value, str):
            raise ValueError(f"extend_policy: {name} takes a {'dict' if kind is Mapping else 'list'}, got {value!r}")
        given[name] = dict(value) if isinstance(value, Mapping) else tuple(value)
    if not names or not any(given.values()):
        raise ValueError("extend_policy: give at least one model type and one rule")
    _check("extend_policy", ModelPolicy("", names, **{"kernels": (), "regions": (), **given}))
    extension = PolicyExtension(None if "all" in names else names, given)
    _extensions.append(extension)
    return extension


def policy_for(model: nn.Module) -> ModelPolicy:
    """The policy of the model's `config.model_type`, or the common one, with its extensions."""
    model_type = getattr(config_of(model), "model_type", None)
    policy = _policies.get(model_type, COMMON) if isinstance(model_type, str) else COMMON
    for extension in tuple(_extensions):
        if extension.covers(model_type):
            policy = extension.applied_to(policy)
    return policy


def unknown_names(policy: ModelPolicy) -> Iterator[str]:
    """A message for each source, target, kernel, option and decode step of a policy that does not exist."""
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        for rule in () if field.name in _NO_RULES else value:
            found = _unknown_in(rule, field.name) if isinstance(rule, Rule) else f"has {rule!r}, which is not a Rule"
            if found is not None:
                yield f"{field.name} {found}"
    for model_class, step in policy.decode_steps.items():
        unknown = unknown_step(model_class, step)
        if unknown is not None:
            yield f"decode_steps names {unknown}"


def _check(what: str, policy: ModelPolicy) -> None:
    unknown = next(unknown_names(policy), None)
    if unknown is not None:
        raise ValueError(f"{what}: {unknown}")


def _unknown_in(rule: Rule, field: str) -> str | None:
    """What the rule names that does not exist; None if all does."""
    if "." not in rule.source:
        return f"names the source {rule.source!r}; give the full name of the class, such as 'my_package.nets.MyNorm'"
    names = f"names the target {rule.target!r} for {rule.source}"
    if field == "regions" and rule.target_name not in REGION_TARGETS:
        return f"{names}; known are {', '.join(REGION_TARGETS)}"
    try:
        target = rule.target_class
    except (ImportError, AttributeError) as error:
        return f"{names}; give a class, its dotted path, or one of fuseopt.modules: {_MODULES} ({error})"
    if not isinstance(target, type):
        return f"{names}, which is not a class; give a class, its dotted path, or one of fuseopt.modules: {_MODULES}"
    if field in ("kernels", "regions") and not issubclass(target, modules.FusedModule):
        return f"{names}, which is not a fuseopt.modules.FusedModule"
    if field == "kernels" and rule.target_name not in kernels():
        return f"{names}, but no kernel has that name, so no config could ask for it; register_kernel adds one"
    return _wrong_option(rule, field)


def _wrong_option(rule: Rule, field: str) -> str | None:
    """Which option of the rule is missing, unknown or has a value that it cannot have; None if all are right."""
    required = (*_REQUIRED_OPTIONS.get(field, ()), *_REQUIRED_OPTIONS.get(rule.target_name, ()))
    missing = next((name for name in required if name not in rule.options), None)
    if missing is not None:
        return f"has a rule for {rule.source} without the option {missing!r}"
    if field in ("kernels", "regions"):
        try:
            inspect.signature(rule.target_class._configure).bind_partial(None, **rule.options)
        except TypeError as error:
            return f"has a rule for {rule.source} whose options {rule.target_name} does not take: {error}"
    for name, value in rule.options.items():
        values = _OPTION_VALUES.get((rule.target_name, name))
        if values is not None and value not in values:
            known = ", ".join(map(repr, values))
            return f"has a rule for {rule.source} with the option {name}={value!r}; known are {known}"
    return None


def _key(field: str, entry: Rule | str) -> object:
    """What a new entry must have in common with an old one to replace it."""
    if isinstance(entry, str):
        return entry
    return (entry.source, entry.target_name) if field == "kernels" else entry.source
