"""FusedNoRepeatNGram: has one model instance run the logits processors of its own `generate()` fused."""

from __future__ import annotations

import functools

from fuseopt.plan import ModelIndex, Replacement, Site, Skip
from fuseopt.strategies.propose import Offer, replacement, skip

_METHOD = "_get_logits_processor"


def propose(index: ModelIndex, offer: Offer, backend: str) -> Replacement | Skip:
    """One site: the method by which a model builds its logits processors, on the instance."""
    sites = (Site(index.model, _METHOD, _METHOD),)
    source, target = "GenerationMixin", "FusedNoRepeatNGram"
    if not hasattr(type(index.model), _METHOD):
        reason = f"{type(index.model).__name__} has no generate() of transformers"
        return skip(sites, type(index.model).__name__, target, offer, reason)
    if _METHOD in index.model.__dict__:
        return skip(sites, source, target, offer, f"the instance has a {_METHOD} of its own already")
    return replacement(
        sites,
        source,
        target,
        offer,
        "generate() runs its n-gram bans and their neighbours as one op",
        functools.partial(_build, index, backend),
    )


def _build(index: ModelIndex, backend: str) -> object:
    from fuseopt.generation.select.logits_processors import FusedLogitsProcessors

    return FusedLogitsProcessors(index.model, backend)
