"""FusedRelativeAttention: the attentions of a T5 stack, whose layers hand one position bias on and so go together."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fuseopt.blocks.relative_attention import FusedRelativeAttention, RelativeStackForward
from fuseopt.models import ModelPolicy, Rule
from fuseopt.modules.children import unexpected_modules
from fuseopt.plan import Candidate, ModelIndex, Replacement, Site, Skip
from fuseopt.strategies.propose import (
    PAYS_ON_GPU,
    Offer,
    forward_name,
    forward_sites,
    replacement,
    runs_on_gpu,
    skip,
    stacks_of,
)

_TARGET = FusedRelativeAttention.__name__


def propose(
    index: ModelIndex, policy: ModelPolicy, offer: Offer, backend: str, where_it_pays: bool
) -> Iterator[Replacement | Skip]:
    """The attentions of each stack that the policy names, and what hands them its masks, or why not.

    Args:
        where_it_pays: in training on a GPU alone.
    """
    options = {"backend": backend, "training_only": where_it_pays}
    for stack, rule in stacks_of(index, policy.relative_attention):
        if where_it_pays and not runs_on_gpu(index):
            yield skip(forward_sites(stack), forward_name(stack), _TARGET, offer, PAYS_ON_GPU)
        else:
            yield from _propose_stack(index, stack, rule, offer, options)


def _propose_stack(
    index: ModelIndex, stack: Candidate, rule: Rule, offer: Offer, options: Mapping[str, Any]
) -> Iterator[Replacement | Skip]:
    reason = _stack_reason(stack, rule)
    if reason is not None:
        yield skip(forward_sites(stack), forward_name(stack), _TARGET, offer, reason)
        return
    attentions = [index.candidate(block.layer[0].SelfAttention) for block in stack.module.block]
    reasons = [_not_supported_reasons(attention, rule) for attention in attentions]
    crossing = stack.module.block if stack.module.is_decoder else ()
    others = [index.candidate(block.layer[1].EncDecAttention) for block in crossing]
    blocked = next((a.sites[0].path for a, found in zip(attentions, reasons, strict=True) if found), None)
    for attention, found in zip(attentions, reasons, strict=True):
        if blocked is None:
            yield _replace(attention, offer, options, "as all self-attentions of its stack")
        else:
            reason = "; ".join(found) or f"{blocked} stays as it is, and hands a matrix on"
            yield skip(attention.sites, attention.class_name, _TARGET, offer, reason)
    replaced = blocked is None
    for attention in others:
        found = _not_supported_reasons(attention, rule)
        replaced = replaced or not found
        if found:
            yield skip(attention.sites, attention.class_name, _TARGET, offer, "; ".join(found))
        else:
            yield _replace(attention, offer, options, "cross-attention, which has no bias")
    if replaced:
        yield _tell(stack, offer)


def _stack_reason(stack: Candidate, rule: Rule) -> str | None:
    """Why the stack cannot pass its masks to its attentions; None if it can."""
    if not stack.is_exactly(rule.source):
        return f"it is a subclass of {rule.source.rpartition('.')[2]}, so its forward may differ"
    if "forward" in stack.module.__dict__:
        return "its forward has been replaced on the instance"
    if "children" not in rule.options:
        return "its policy does not name the classes of its children"
    # Modules inside the attentions or beside them do not get the masks, so their classes do not matter.
    others = [found for found in unexpected_modules(stack.module, rule.options["children"]) if _is_on_the_way(found[0])]
    return f"its {others[0][0]} is a {type(others[0][1]).__name__}" if others else None


def _is_on_the_way(path: str) -> bool:
    """Whether the arguments of a stack's blocks pass through the module at `path`."""
    return path.split(".")[0] == "block" and len(path.split(".")) <= 4


def _tell(stack: Candidate, offer: Offer) -> Replacement:
    sites, name, target = forward_sites(stack), forward_name(stack), RelativeStackForward.__name__
    build = functools.partial(RelativeStackForward, stack.module)
    return replacement(sites, name, target, offer, "hands its attentions the masks that it is given", build)


def _not_supported_reasons(attention: Candidate, rule: Rule) -> list[str]:
    if not attention.is_exactly(rule.options["attention"]):
        return [f"it is no {rule.options['attention'].rpartition('.')[2]}, so its forward may differ"]
    return attention.blocked_reasons() + FusedRelativeAttention.not_supported_reasons(attention.module)


def _replace(attention: Candidate, offer: Offer, options: Mapping[str, Any], reason: str) -> Replacement:
    module: nn.Module = attention.module
    if options["training_only"]:
        reason += ", in training"
    # Where a fused softmax inside eager attention would be put.
    config = Site(module, "config", f"{attention.sites[0].path}.config")
    build = functools.partial(FusedRelativeAttention.from_module, module, **options)
    return replacement(attention.sites, attention.class_name, _TARGET, offer, reason, build, absorbs=(config,))
