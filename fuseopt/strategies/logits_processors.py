"""FusedNoRepeatNGram: the logits processors of one model instance's `generate()`, several of them as one op."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch import nn

from fuseopt.plan import Replacement, Skip
from fuseopt.strategies.context import ProposalContext, generating_site

_METHOD = "_get_logits_processor"


def propose(context: ProposalContext) -> Iterator[Replacement | Skip]:
    """The method that builds the model's logits processors, set on the instance."""
    site = generating_site(context.index, _METHOD)
    model, source, target, reason = site.owner, "GenerationMixin", "FusedNoRepeatNGram", None
    if not hasattr(type(model), _METHOD):
        source = type(model).__name__
        reason = f"{source} has no generate() of transformers"
    elif _METHOD in model.__dict__:
        reason = f"{_METHOD} has been set on the instance"
    if reason is not None:
        yield context.skip((site,), source, target, reason)
        return
    why = "generate() runs its n-gram bans and adjacent logits processors as one op"
    yield context.replacement((site,), source, target, why, functools.partial(_build, model, context.wanted))


def _build(model: nn.Module, backend: str) -> object:
    from fuseopt.generation.select.logits_processors import FusedLogitsProcessors

    return FusedLogitsProcessors(model, backend)
