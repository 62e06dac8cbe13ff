"""`fuse_residual` and `FusedDropoutAdd`: a block's residual adds, fused with the norm after and the dropout before."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from fuseopt.blocks.dropout_add import DeferredDropout, DropoutAddForward
from fuseopt.blocks.residual import ResidualForward
from fuseopt.model_index import Candidate, Site
from fuseopt.models import Rule
from fuseopt.plan import Replacement, Skip
from fuseopt.strategies.context import ProposalContext
from fuseopt.strategies.propose import (
    EXACT_MATCH,
    forward_name,
    forward_sites,
    subclass_reason,
    touched,
    weight_reasons,
)


def propose(context: ProposalContext) -> Iterator[Replacement | Skip]:
    """The `forward` of each block. The norms inside are proposed by their own rules."""
    rules = [rule for rule in context.policy.residual_blocks if rule.target_class.norm.__name__ == context.request]
    yield from _propose_blocks(context, rules, context.wanted, f"{EXACT_MATCH}; its norms are fused")


def propose_dropout_add(context: ProposalContext) -> Iterator[Replacement | Skip]:
    """The `forward` of each block, and the dropouts inside that it defers. The norms stay, fused or not."""
    # With "auto", rows that are too long for the kernel run on the reference.
    rules = context.policy.dropout_add_blocks
    targets: dict[str, type[DropoutAddForward]] = {rule.target_name: rule.target_class for rule in rules}
    for proposal in _propose_blocks(context, rules, "auto", f"{EXACT_MATCH}; in training, with dropout"):
        yield proposal
        if isinstance(proposal, Replacement):
            block = proposal.sites[0].owner
            target = targets[proposal.target]
            for dropout in target.dropouts(block) if target.dropout is DeferredDropout else ():
                inner = context.index.candidate(dropout)
                reason = f"{proposal.target} does its work"
                build = functools.partial(DeferredDropout.from_module, dropout)
                yield context.replacement(
                    inner.sites, inner.class_name, "DeferredDropout", reason, build, requires=proposal.sites
                )


def _propose_blocks(
    context: ProposalContext, rules: Sequence[Rule], backend: str, reason: str
) -> Iterator[Replacement | Skip]:
    found = False
    for rule in rules:
        target: type[ResidualForward] = rule.target_class
        for candidate in context.index.of_class(rule.source):
            found = True
            if candidate.is_exactly(rule.source):
                yield _propose(context, candidate, rule, backend, reason)
            else:
                subclass = subclass_reason(rule.source)
                yield context.skip(forward_sites(candidate), forward_name(candidate), target.__name__, subclass)
    if not found:
        model, policy = context.index.model, context.policy.name
        unknown = f"policy {policy!r} names no block in this model whose residual adds {context.request} could fuse"
        yield context.skip((Site(model, "forward", "forward"),), type(model).__name__, "ResidualForward", unknown)


def _propose(
    context: ProposalContext, candidate: Candidate, rule: Rule, backend: str, reason: str
) -> Replacement | Skip:
    block, sites = candidate.module, forward_sites(candidate)
    target: type[ResidualForward] = rule.target_class
    reasons = candidate.forward_blocked_reasons()
    reasons += [f"its {path}: {why}" for path, why in touched(candidate, rule)]
    # The next checks read modules that only a block of the expected classes has.
    reasons = reasons or target.not_supported_reasons(block)
    for norm in () if reasons else target.norms(block):
        inner = context.index.candidate(norm)
        rules = (rule for rule in context.policy.kernels if rule.target_name == target.norm.__name__)
        if not any(rule.names(type(norm)) for rule in rules):
            reasons.append(f"its {inner.sites[0].name} is a {inner.class_name}, which the policy does not name")
        blocked = inner.blocked_reasons() + weight_reasons(norm) + target.norm.not_supported_reasons(norm)
        reasons += [f"its {inner.sites[0].name}: {of_norm}" for of_norm in blocked]
    if reasons:
        return context.skip(sites, forward_name(candidate), target.__name__, "; ".join(reasons))
    build = functools.partial(target, block, backend)
    return context.replacement(sites, forward_name(candidate), target.__name__, reason, build)
