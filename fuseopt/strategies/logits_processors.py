"""FusedNoRepeatNGram: the logits processors of one model instance's `generate()`, several of them as one op."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from fuseopt.model_index import ModelIndex, Site
from fuseopt.plan import Replacement, Skip
from fuseopt.strategies.context import ProposalContext

_METHOD = "_get_logits_processor"


def propose(context: ProposalContext) -> Iterator[Replacement | Skip]:
    """The method that builds the model's logits processors, set on the instance."""
    model = context.index.model
    sites = (Site(model, _METHOD, _METHOD),)
    source, target, reason = "GenerationMixin", "FusedNoRepeatNGram", None
    if not hasattr(type(model), _METHOD):
        source = type(model).__name__
        reason = f"{source} has no generate() of transformers"
    elif _METHOD in model.__dict__:
        reason = f"{_METHOD} has been set on the instance"
    if reason is not None:
        yield context.skip(sites, source, target, reason)
        return
    why = "generate() runs its n-gram bans and adjacent logits processors as one op"
    yield context.replacement(sites, source, target, why, functools.partial(_build, context.index, context.wanted))


def _build(index: ModelIndex, backend: str) -> object:
    from fuseopt.generation.select.logits_processors import FusedLogitsProcessors

    return FusedLogitsProcessors(index.model, backend)
