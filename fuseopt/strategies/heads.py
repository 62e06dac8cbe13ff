"""The head of a language model: FusedLinearCrossEntropy for its training loss, FusedLMHead for its logits."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fuseopt.models import ModelPolicy, Rule, full_name
from fuseopt.modules import FusedLinearCrossEntropy, FusedLMHead, FusedModule
from fuseopt.plan import ModelIndex, Replacement, Skip
from fuseopt.strategies.propose import Offer, replacement, skip, weight_reasons

_LINEAR = full_name(nn.Linear)


def propose_loss(index: ModelIndex, policy: ModelPolicy, offer: Offer, backend: str) -> Iterator[Replacement | Skip]:
    """FusedLinearCrossEntropy: one replacement a model that the policy names."""
    reason = "takes its logits straight to the loss"
    for model, rule in _models(index, policy):
        options = {**{key: value for key, value in rule.options.items() if key != "head"}, "backend": backend}
        if model is not index.model and not hasattr(index.model, "get_base_model"):
            # What is around it, unless it is one of peft's, may have a loss of its own.
            options["traces"] = False
        yield _propose(index, model, rule, offer, FusedLinearCrossEntropy, options, reason)


def propose_inference(index: ModelIndex, policy: ModelPolicy, offer: Offer) -> Iterator[Replacement | Skip]:
    """FusedLMHead: one replacement a model that the policy names, where it is on a GPU."""
    reason = "has logits whose rows begin anywhere"
    for model, rule in _models(index, policy):
        proposal = _propose(index, model, rule, offer, FusedLMHead, {}, reason)
        if not any(device.type in ("cuda", "meta") for device in index.devices):
            reason = "the model is on a CPU, whose products are as fast for any number of columns"
            proposal = skip(proposal.sites, proposal.source, proposal.target, offer, reason)
        yield proposal


def _models(index: ModelIndex, policy: ModelPolicy) -> Iterator[tuple[nn.Module, Rule]]:
    """The models with a head that the policy names: the root or, as in an adapter's, inside."""
    rules = {rule.source: rule for rule in policy.heads}
    for model in (index.model, *(candidate.module for candidate in index.candidates)):
        for cls in type(model).__mro__:
            rule = rules.get(full_name(cls))
            if rule is not None:
                if _has_head(model, rule):
                    yield model, rule
                break


def _has_head(model: nn.Module, rule: Rule) -> bool:
    """Whether it is where the class puts it, and nobody has taken it away."""
    try:
        model.get_submodule(rule.options["head"])
    except AttributeError:
        return False
    return True


def _propose(
    index: ModelIndex,
    model: nn.Module,
    rule: Rule,
    offer: Offer,
    target: type[FusedModule],
    options: Mapping[str, Any],
    reason: str,
) -> Replacement | Skip:
    candidate = index.candidate(model.get_submodule(rule.options["head"]))
    head, reasons = candidate.module, candidate.blocked_reasons()
    if not rule.names(type(model)):
        reasons.append(f"its model is a subclass of {rule.source.rpartition('.')[2]}, so its forward may differ")
    if not candidate.is_exactly(_LINEAR):
        reasons.append("it is no torch.nn.Linear")
    reasons = reasons or weight_reasons(head) or target.not_supported_reasons(head)
    if reasons:
        return skip(candidate.sites, candidate.class_name, target.__name__, offer, "; ".join(reasons))
    reason = f"{type(model).__name__} {reason}"
    build = functools.partial(target.from_module, head, **options)
    return replacement(candidate.sites, candidate.class_name, target.__name__, offer, reason, build)
