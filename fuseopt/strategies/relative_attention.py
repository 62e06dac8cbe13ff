"""FusedRelativeAttention: the attentions of a T5 stack, whose self-attentions are replaced all or none.

The layers of a stack pass one position bias on, which the fused attention keeps as a vector per head and the stock one
as a matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fuseopt.blocks.relative_attention import FusedRelativeAttention, RelativeStackForward
from fuseopt.model_index import Candidate, Site
from fuseopt.models import Rule
from fuseopt.modules.children import unexpected_modules
from fuseopt.plan import Replacement, Skip
from fuseopt.strategies.context import ProposalContext
from fuseopt.strategies.propose import (
    PAYS_ON_GPU,
    forward_name,
    forward_sites,
    runs_on_gpu,
    stacks_of,
    subclass_reason,
)

_TARGET = FusedRelativeAttention.__name__


def propose(context: ProposalContext) -> Iterator[Replacement | Skip]:
    """The attentions of each stack that the policy names, and the `forward` of the stack, which passes its mask on.

    The option `where_it_pays` limits it to models on a GPU, and there to training.
    """
    where_it_pays = context.options.get("where_it_pays", False)
    options = {"backend": context.wanted, "training_only": where_it_pays}
    for stack, rule in stacks_of(context.index, context.policy.relative_attention):
        if where_it_pays and not runs_on_gpu(context.index):
            yield context.skip(forward_sites(stack), forward_name(stack), _TARGET, PAYS_ON_GPU)
        else:
            yield from _propose_stack(context, stack, rule, options)


def _propose_stack(
    context: ProposalContext, stack: Candidate, rule: Rule, options: Mapping[str, Any]
) -> Iterator[Replacement | Skip]:
    reason = _stack_reason(stack, rule)
    if reason is not None:
        yield context.skip(forward_sites(stack), forward_name(stack), _TARGET, reason)
        return
    attentions = [context.index.candidate(block.layer[0].SelfAttention) for block in stack.module.block]
    reasons = [_not_supported_reasons(attention, rule) for attention in attentions]
    decoder_blocks = stack.module.block if stack.module.is_decoder else ()
    cross_attentions = [context.index.candidate(block.layer[1].EncDecAttention) for block in decoder_blocks]
    blocked = next((a.sites[0].path for a, found in zip(attentions, reasons, strict=True) if found), None)
    for attention, found in zip(attentions, reasons, strict=True):
        if blocked is None:
            yield _replace(context, attention, options, "all self-attentions of its stack are replaced")
        else:
            reason = "; ".join(found) or f"{blocked} cannot be replaced, and passes the position bias on as a matrix"
            yield context.skip(attention.sites, attention.class_name, _TARGET, reason)
    replaced = blocked is None
    for attention in cross_attentions:
        found = _not_supported_reasons(attention, rule)
        replaced = replaced or not found
        if found:
            yield context.skip(attention.sites, attention.class_name, _TARGET, "; ".join(found))
        else:
            yield _replace(context, attention, options, "cross-attention, which has no bias")
    if replaced:
        build = functools.partial(RelativeStackForward, stack.module)
        why, target = "passes its masks on to its attentions", RelativeStackForward.__name__
        yield context.replacement(forward_sites(stack), forward_name(stack), target, why, build)


def _stack_reason(stack: Candidate, rule: Rule) -> str | None:
    """Why the stack cannot pass its masks to its attentions; None if it can."""
    if not stack.is_exactly(rule.source):
        return subclass_reason(rule.source)
    blocked = stack.forward_blocked_reasons()
    if blocked:
        return "; ".join(blocked)
    if "children" not in rule.options:
        return "its policy does not name the classes of its children"
    # The masks pass through these modules only, so the classes of the others do not matter.
    others = [found for found in unexpected_modules(stack.module, rule.options["children"]) if _is_on_the_way(found[0])]
    return f"its {others[0][0]} is a {type(others[0][1]).__name__}" if others else None


def _is_on_the_way(path: str) -> bool:
    """True if the arguments of a stack's blocks pass through the module at `path`."""
    return path.split(".")[0] == "block" and len(path.split(".")) <= 4


def _not_supported_reasons(attention: Candidate, rule: Rule) -> list[str]:
    if not attention.is_exactly(rule.options["attention"]):
        return [f"it is not a {rule.options['attention'].rpartition('.')[2]}, so its forward may differ"]
    return attention.blocked_reasons() + FusedRelativeAttention.not_supported_reasons(attention.module)


def _replace(context: ProposalContext, attention: Candidate, options: Mapping[str, Any], reason: str) -> Replacement:
    module: nn.Module = attention.module
    if options["training_only"]:
        reason += ", in training"
    # FusedSoftmax would be put there.
    config = Site(module, "config", f"{attention.sites[0].path}.config")
    build = functools.partial(FusedRelativeAttention.from_module, module, **options)
    return context.replacement(attention.sites, attention.class_name, _TARGET, reason, build, claims=(config,))
