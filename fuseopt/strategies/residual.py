"""`fuse_residual`: a block's residual adds inside the norms that follow them."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from fuseopt import modules
from fuseopt.models import ModelPolicy
from fuseopt.modules.residual import ResidualForward
from fuseopt.plan import Candidate, ModelIndex, Replacement, Site, Skip
from fuseopt.strategies.propose import Offer, forward_name, forward_sites, replacement, skip

_REASON = "exactly the class that the policy names; its norms are fused"


def propose(index: ModelIndex, policy: ModelPolicy, offer: Offer, backend: str) -> Iterator[Replacement | Skip]:
    """One site a block: its `forward`. The norms inside are proposed by their own rules, and used as they are."""
    targets = {rule.source: getattr(modules, rule.target) for rule in policy.residual_blocks}
    targets = {source: target for source, target in targets.items() if target.norm.__name__ == offer.request}
    found = False
    for source, target in targets.items():
        for candidate in index.of_class(source):
            found = True
            if candidate.is_exactly(source):
                yield _propose(index, policy, candidate, target, offer, backend)
            else:
                reason = f"it is a subclass of {source.rpartition('.')[2]}, so its forward may differ"
                yield skip(forward_sites(candidate), forward_name(candidate), target.__name__, offer, reason)
    if not found:
        site = Site(index.model, "forward", "forward")
        reason = f"policy {policy.name!r} knows no block in it whose residual adds {offer.request} could take in"
        yield skip((site,), type(index.model).__name__, "ResidualForward", offer, reason)


def _propose(
    index: ModelIndex,
    policy: ModelPolicy,
    candidate: Candidate,
    target: type[ResidualForward],
    offer: Offer,
    backend: str,
) -> Replacement | Skip:
    block, sites = candidate.module, forward_sites(candidate)
    # Hooks on the block itself run around its forward, whichever that is.
    reasons = ["its forward has been replaced on the instance"] if "forward" in block.__dict__ else []
    reasons += target.not_supported_reasons(block)
    for norm in target.norms(block):
        inner = index.candidate(norm)
        if not any(rule.target == offer.request and rule.names(type(norm)) for rule in policy.kernels):
            reasons.append(f"its {inner.sites[0].name} is a {inner.class_name}, which the policy does not name")
        blocked = inner.blocked_reasons() + target.norm.not_supported_reasons(norm)
        reasons += [f"its {inner.sites[0].name}: {reason}" for reason in blocked]
    if reasons:
        return skip(sites, forward_name(candidate), target.__name__, offer, "; ".join(reasons))
    build = functools.partial(target, block, backend)
    return replacement(sites, forward_name(candidate), target.__name__, offer, _REASON, build)
