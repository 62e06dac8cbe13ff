"""`fuse_residual` and `FusedDropoutAdd`: a block's residual adds, and dropouts before them, with the norms after."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from fuseopt.blocks.dropout_add import DeferredDropout, DropoutAddForward
from fuseopt.blocks.residual import ResidualForward
from fuseopt.models import ModelPolicy, Rule
from fuseopt.plan import Candidate, ModelIndex, Replacement, Site, Skip
from fuseopt.strategies.propose import Offer, forward_name, forward_sites, replacement, skip, touched, weight_reasons

_NAMED = "exactly the class that the policy names"


def propose(index: ModelIndex, policy: ModelPolicy, offer: Offer, backend: str) -> Iterator[Replacement | Skip]:
    """One site a block: its `forward`. The norms inside are proposed by their own rules, and used as they are."""
    rules = [rule for rule in policy.residual_blocks if rule.target_class.norm.__name__ == offer.request]
    yield from _propose_blocks(index, policy, rules, offer, backend, f"{_NAMED}; its norms are fused")


def propose_dropout_add(
    index: ModelIndex, policy: ModelPolicy, offer: Offer, backend: str
) -> Iterator[Replacement | Skip]:
    """The `forward` of each block, and the dropouts inside that it defers; norms stay whatever they are."""
    # "auto" leaves rows that are too long for the kernel to the reference.
    rules = policy.dropout_add_blocks
    targets: dict[str, type[DropoutAddForward]] = {rule.target_name: rule.target_class for rule in rules}
    for proposal in _propose_blocks(index, policy, rules, offer, "auto", f"{_NAMED}; in training, with dropout"):
        yield proposal
        if isinstance(proposal, Replacement):
            block = proposal.sites[0].owner
            target = targets[proposal.target]
            for dropout in target.dropouts(block) if target.dropout is DeferredDropout else ():
                inner = index.candidate(dropout)
                reason, build = f"{proposal.target} does it", functools.partial(DeferredDropout.from_module, dropout)
                yield replacement(
                    inner.sites, inner.class_name, "DeferredDropout", offer, reason, build, needs=proposal.sites
                )


def _propose_blocks(
    index: ModelIndex, policy: ModelPolicy, rules: Sequence[Rule], offer: Offer, backend: str, reason: str
) -> Iterator[Replacement | Skip]:
    found = False
    for rule in rules:
        target: type[ResidualForward] = rule.target_class
        for candidate in index.of_class(rule.source):
            found = True
            if candidate.is_exactly(rule.source):
                yield _propose(index, policy, candidate, rule, offer, backend, reason)
            else:
                subclass = f"it is a subclass of {rule.source.rpartition('.')[2]}, so its forward may differ"
                yield skip(forward_sites(candidate), forward_name(candidate), target.__name__, offer, subclass)
    if not found:
        site = Site(index.model, "forward", "forward")
        unknown = f"policy {policy.name!r} knows no block in it whose residual adds {offer.request} could take in"
        yield skip((site,), type(index.model).__name__, "ResidualForward", offer, unknown)


def _propose(
    index: ModelIndex,
    policy: ModelPolicy,
    candidate: Candidate,
    rule: Rule,
    offer: Offer,
    backend: str,
    reason: str,
) -> Replacement | Skip:
    block, sites = candidate.module, forward_sites(candidate)
    target: type[ResidualForward] = rule.target_class
    # Hooks on the block itself run around its forward, whichever that is.
    reasons = ["its forward has been replaced on the instance"] if "forward" in block.__dict__ else []
    reasons += [f"its {path}: {why}" for path, why in touched(candidate, rule)]
    # Only with the expected classes does the block have the modules that the next checks read.
    reasons = reasons or target.not_supported_reasons(block)
    for norm in () if reasons else target.norms(block):
        inner = index.candidate(norm)
        if not any(rule.target_name == target.norm.__name__ and rule.names(type(norm)) for rule in policy.kernels):
            reasons.append(f"its {inner.sites[0].name} is a {inner.class_name}, which the policy does not name")
        blocked = inner.blocked_reasons() + weight_reasons(norm) + target.norm.not_supported_reasons(norm)
        reasons += [f"its {inner.sites[0].name}: {of_norm}" for of_norm in blocked]
    if reasons:
        return skip(sites, forward_name(candidate), target.__name__, offer, "; ".join(reasons))
    build = functools.partial(target, block, backend)
    return replacement(sites, forward_name(candidate), target.__name__, offer, reason, build)
