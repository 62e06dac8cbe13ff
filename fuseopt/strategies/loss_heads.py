"""FusedLinearCrossEntropy: the head of a language model, where the model takes its logits straight to the loss."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch import nn

from fuseopt.models import ModelPolicy, Rule, full_name
from fuseopt.modules import FusedLinearCrossEntropy
from fuseopt.plan import ModelIndex, Replacement, Skip
from fuseopt.strategies.propose import Offer, replacement, skip

_LINEAR = full_name(nn.Linear)
_TARGET = FusedLinearCrossEntropy.__name__


def propose(index: ModelIndex, policy: ModelPolicy, offer: Offer, backend: str) -> Iterator[Replacement | Skip]:
    """One replacement a model that the policy names; the model may be the root or, as in an adapter's, inside."""
    rules = {rule.source: rule for rule in policy.heads}
    for model in (index.model, *(candidate.module for candidate in index.candidates)):
        for cls in type(model).__mro__:
            rule = rules.get(full_name(cls))
            if rule is not None:
                yield _propose(index, model, rule, offer, backend)
                break


def _propose(index: ModelIndex, model: nn.Module, rule: Rule, offer: Offer, backend: str) -> Replacement | Skip:
    options = {key: value for key, value in rule.options.items() if key != "head"}
    candidate = index.candidate(getattr(model, rule.options["head"]))
    head, reasons = candidate.module, candidate.blocked_reasons()
    if not rule.names(type(model)):
        reasons.append(f"its model is a subclass of {rule.source.rpartition('.')[2]}, so its forward may differ")
    if not candidate.is_exactly(_LINEAR):
        reasons.append("it is no torch.nn.Linear")
    reasons = reasons or FusedLinearCrossEntropy.not_supported_reasons(head)
    if reasons:
        return skip(candidate.sites, candidate.class_name, _TARGET, offer, "; ".join(reasons))
    reason = f"{type(model).__name__} takes its logits straight to the loss"
    build = functools.partial(FusedLinearCrossEntropy.from_module, head, **options, backend=backend)
    return replacement(candidate.sites, candidate.class_name, _TARGET, offer, reason, build)
