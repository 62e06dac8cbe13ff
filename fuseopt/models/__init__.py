"""Model families: WHAT may be replaced. A family is a policy (data) in a file of its own; see README.md."""

from fuseopt.models.common import COMMON
from fuseopt.models.gpt2 import GPT2
from fuseopt.models.policy import ModelPolicy, Rule, full_name
from fuseopt.models.registration import (
    PolicyExtension,
    extend_policy,
    policy_for,
    register_policy,
    unknown_names,
)
from fuseopt.models.t5 import T5

__all__ = [
    "COMMON",
    "GPT2",
    "T5",
    "ModelPolicy",
    "PolicyExtension",
    "Rule",
    "extend_policy",
    "full_name",
    "policy_for",
    "register_policy",
    "unknown_names",
]
