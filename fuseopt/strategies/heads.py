"""The head of a language model: FusedLinearCrossEntropy for its training loss, FusedLMHead for its logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from fuseopt.models import ModelPolicy, Rule, full_name
from fuseopt.modules import FusedLinearCrossEntropy, FusedLMHead, FusedModule
from fuseopt.plan import ModelIndex, Replacement, Skip
from fuseopt.strategies.propose import Offer, replacement, skip

_LINEAR = full_name(nn.Linear)
# Builds the stand-in for a head, by the rule of its model.
_Build = Callable[[Rule, nn.Module], FusedModule]


def propose_loss(index: ModelIndex, policy: ModelPolicy, offer: Offer, backend: str) -> Iterator[Replacement | Skip]:
    """FusedLinearCrossEntropy: one replacement a model that the policy names."""

    def build(rule: Rule, head: nn.Module) -> FusedModule:
        options = {key: value for key, value in rule.options.items() if key != "head"}
        return FusedLinearCrossEntropy.from_module(head, **options, backend=backend)

    yield from _propose(index, policy, offer, FusedLinearCrossEntropy, "takes its logits straight to the loss", build)


def propose_inference(index: ModelIndex, policy: ModelPolicy, offer: Offer) -> Iterator[Replacement | Skip]:
    """FusedLMHead: one replacement a model that the policy names."""
    reasons = []
    if not any(device.type in ("cuda", "meta") for device in index.devices):
        reasons.append("the model is on a CPU, whose products are as fast for any number of columns")
    yield from _propose(
        index,
        policy,
        offer,
        FusedLMHead,
        "has logits whose rows begin anywhere",
        lambda rule, head: FusedLMHead.from_module(head),
        reasons,
    )


def _propose(
    index: ModelIndex,
    policy: ModelPolicy,
    offer: Offer,
    target: type[FusedModule],
    reason: str,
    build: _Build,
    reasons: Sequence[str] = (),
) -> Iterator[Replacement | Skip]:
    """The model may be the root or, as in an adapter's, inside."""
    rules = {rule.source: rule for rule in policy.heads}
    for model in (index.model, *(candidate.module for candidate in index.candidates)):
        for cls in type(model).__mro__:
            rule = rules.get(full_name(cls))
            if rule is not None:
                yield _propose_head(index, model, rule, offer, target, reason, build, reasons)
                break


def _propose_head(
    index: ModelIndex,
    model: nn.Module,
    rule: Rule,
    offer: Offer,
    target: type[FusedModule],
    reason: str,
    build: _Build,
    reasons: Sequence[str],
) -> Replacement | Skip:
    candidate = index.candidate(getattr(model, rule.options["head"]))
    head, reasons = candidate.module, [*reasons, *candidate.blocked_reasons()]
    if not rule.names(type(model)):
        reasons.append(f"its model is a subclass of {rule.source.rpartition('.')[2]}, so its forward may differ")
    if not candidate.is_exactly(_LINEAR):
        reasons.append("it is no torch.nn.Linear")
    reasons = reasons or target.not_supported_reasons(head)
    if reasons:
        return skip(candidate.sites, candidate.class_name, target.__name__, offer, "; ".join(reasons))
    reason = f"{type(model).__name__} {reason}"
    build_head = functools.partial(build, rule, head)
    return replacement(candidate.sites, candidate.class_name, target.__name__, offer, reason, build_head)
