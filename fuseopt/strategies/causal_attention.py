"""FusedAttention: causal attention in training on padded batches, by an op that is given the padding mask."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from fuseopt.blocks.causal_attention import CausalStackForward, fused_attention
from fuseopt.model_index import Candidate, Site
from fuseopt.models import Rule
from fuseopt.ops.relative_attention import MOST_DIM
from fuseopt.plan import Replacement, Skip
from fuseopt.runtime.references import refer
from fuseopt.strategies.attention_config import AttentionConfig
from fuseopt.strategies.context import ProposalContext
from fuseopt.strategies.propose import (
    PAYS_ON_GPU,
    forward_name,
    forward_sites,
    runs_on_gpu,
    stacks_of,
    subclass_reason,
)

_TARGET = "FusedAttention"


def propose(context: ProposalContext) -> Iterator[Replacement | Skip]:
    """The `config` that each attention reads its implementation from, and the `forward` of the stack around them.

    The option `where_it_pays` limits it to models on a GPU.
    """
    for stack, rule in stacks_of(context.index, context.policy.causal_attention):
        if context.options.get("where_it_pays") and not runs_on_gpu(context.index):
            yield context.skip(forward_sites(stack), forward_name(stack), _TARGET, PAYS_ON_GPU)
        else:
            yield from _propose_stack(context, stack, rule)


class FusedAttentionConfig(AttentionConfig):
    """The config of one attention, in which "sdpa" reads as `fused_attention` while that is in training mode."""

    stands_for, name = "sdpa", "fuseopt_attention"
    function = staticmethod(fused_attention)

    def __init__(self, attention: nn.Module, config: Any, backend: str) -> None:
        super().__init__(config, backend)
        self._attention = refer(attention)

    @property
    def attention(self) -> nn.Module | None:
        """The attention module; None after it was freed, as when another module has taken over its attributes."""
        module: nn.Module | None = self._attention()
        return module

    def _is_wanted(self) -> bool:
        return self.attention is not None and bool(self.attention.training)


def _propose_stack(context: ProposalContext, stack: Candidate, rule: Rule) -> Iterator[Replacement | Skip]:
    sites, name, any_replaced = forward_sites(stack), forward_name(stack), False
    reason = "; ".join(stack.forward_blocked_reasons())
    if not stack.is_exactly(rule.source):
        reason = subclass_reason(rule.source)
    within = {id(module) for module in stack.module.modules()}
    for attention in context.index.of_class(rule.options["attention"]):
        if id(attention.module) not in within:
            continue
        reasons = ["its stack cannot pass the padding mask on"] if reason else _not_supported_reasons(attention, rule)
        if reasons:
            yield context.skip(attention.sites, attention.class_name, _TARGET, "; ".join(reasons))
            continue
        any_replaced = True
        config = Site(attention.module, "config", f"{attention.sites[0].path}.config")
        build = functools.partial(FusedAttentionConfig, attention.module, attention.module.config, context.wanted)
        why = "attention runs as SDPA, which cannot use a flash kernel with a padding mask"
        yield context.replacement((config,), attention.class_name, _TARGET, why, build)
    if reason:
        yield context.skip(sites, name, rule.target_name, reason)
    elif any_replaced:
        forward = functools.partial(CausalStackForward, stack.module)
        yield context.replacement(
            sites, name, rule.target_name, "passes its padding mask on to its attentions", forward
        )


def _not_supported_reasons(attention: Candidate, rule: Rule) -> list[str]:
    if not attention.is_exactly(rule.options["attention"]):
        return [subclass_reason(rule.options["attention"])]
    if getattr(attention.module, "is_cross_attention", False):
        return ["cross-attention is not causal"]
    if attention.left_out_reasons():
        return attention.left_out_reasons()
    if attention.module.head_dim > MOST_DIM:
        return [f"its head size is {attention.module.head_dim}, and the kernel takes at most {MOST_DIM}"]
    implementation = attention.module.config._attn_implementation
    if implementation != "sdpa":
        return [f"attention runs as {implementation!r}; after model.set_attn_implementation('sdpa') it can be replaced"]
    return []
