"""The output head of a language model: FusedLinearCrossEntropy in training, FusedLMHead in inference."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fuseopt.models import Rule, full_name
from fuseopt.modules import FusedLinearCrossEntropy, FusedLMHead, FusedModule
from fuseopt.plan import Replacement, Skip
from fuseopt.strategies.context import ProposalContext
from fuseopt.strategies.propose import runs_on_gpu, weight_reasons

_LINEAR = full_name(nn.Linear)


def propose_loss(context: ProposalContext) -> Iterator[Replacement | Skip]:
    """The head of each model that the policy names, by FusedLinearCrossEntropy."""
    root = context.index.model
    for model, rule in _models(context):
        options = {**{key: value for key, value in rule.options.items() if key != "head"}, "backend": context.wanted}
        if model is not root and not hasattr(root, "get_base_model"):
            # A module around the model, unless it is a peft model, may compute another loss.
            options["traces"] = False
        yield _propose(context, model, rule, FusedLinearCrossEntropy, options, "passes its logits to the loss only")


def propose_inference(context: ProposalContext) -> Iterator[Replacement | Skip]:
    """The head of each model that the policy names, by FusedLMHead; on a GPU only."""
    for model, rule in _models(context):
        proposal = _propose(context, model, rule, FusedLMHead, {}, "has logits with unaligned rows")
        if not runs_on_gpu(context.index):
            reason = "the model is on a CPU, where matmuls do not depend on the alignment of rows"
            proposal = context.skip(proposal.sites, proposal.source, proposal.target, reason)
        yield proposal


def _models(context: ProposalContext) -> Iterator[tuple[nn.Module, Rule]]:
    """The models with a head that the policy names: the root, or a module in it, such as a peft model's base model."""
    rules = {rule.source: rule for rule in context.policy.heads}
    for model in (context.index.model, *(candidate.module for candidate in context.index.candidates)):
        for cls in type(model).__mro__:
            rule = rules.get(full_name(cls))
            if rule is not None:
                if _has_head(model, rule):
                    yield model, rule
                break


def _has_head(model: nn.Module, rule: Rule) -> bool:
    """True if the head is still where the model's class puts it."""
    try:
        model.get_submodule(rule.options["head"])
    except AttributeError:
        return False
    return True


def _propose(
    context: ProposalContext,
    model: nn.Module,
    rule: Rule,
    target: type[FusedModule],
    options: Mapping[str, Any],
    reason: str,
) -> Replacement | Skip:
    candidate = context.index.candidate(model.get_submodule(rule.options["head"]))
    head, reasons = candidate.module, candidate.blocked_reasons()
    if not rule.names(type(model)):
        reasons.append(f"its model is a subclass of {rule.source.rpartition('.')[2]}, so its forward may differ")
    if not candidate.is_exactly(_LINEAR):
        reasons.append("it is not a torch.nn.Linear")
    reasons = reasons or weight_reasons(head) or target.not_supported_reasons(head)
    if reasons:
        return context.skip(candidate.sites, candidate.class_name, target.__name__, "; ".join(reasons))
    reason = f"{type(model).__name__} {reason}"
    build = functools.partial(target.from_module, head, **options)
    return context.replacement(candidate.sites, candidate.class_name, target.__name__, reason, build)
