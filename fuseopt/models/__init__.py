"""Model families: WHAT may be replaced. A family is a policy (data) in a file of its own and a line here."""

from __future__ import annotations

from torch import nn

from fuseopt.models.common import COMMON
from fuseopt.models.gpt2 import GPT2
from fuseopt.models.policy import ModelPolicy, Rule, full_name
from fuseopt.models.t5 import T5

_POLICIES: dict[str, ModelPolicy] = {}


def register_policy(policy: ModelPolicy) -> None:
    """Makes `policy` the one for its model types, from inside the package or outside it.

    Raises:
        ValueError: when it names no model type, or one that another policy covers.
    """
    if not policy.model_types:
        raise ValueError(f"policy {policy.name!r} names no model type, so no model would ever be given it")
    for model_type in policy.model_types:
        other = _POLICIES.get(model_type)
        if other is not None and other != policy:
            raise ValueError(f"model type {model_type!r} is covered by policy {other.name!r} already")
    _POLICIES.update(dict.fromkeys(policy.model_types, policy))


def policy_for(model: nn.Module) -> ModelPolicy:
    """The policy of the model's `config.model_type`, or the common one."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return _POLICIES.get(model_type, COMMON) if isinstance(model_type, str) else COMMON


for _policy in (GPT2, T5):
    register_policy(_policy)

__all__ = ["COMMON", "ModelPolicy", "Rule", "full_name", "policy_for", "register_policy"]
