"""FusedAttention: causal attention of padded batches in training, told which keys are padding."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from fuseopt.blocks.causal_attention import CausalStackForward, fused_attention
from fuseopt.models import ModelPolicy, Rule
from fuseopt.ops.relative_attention import MOST_DIM
from fuseopt.plan import Candidate, ModelIndex, Replacement, Site, Skip
from fuseopt.runtime.references import refer
from fuseopt.strategies.attention_config import AttentionConfig
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

_TARGET = "FusedAttention"


def propose(
    index: ModelIndex, policy: ModelPolicy, offer: Offer, backend: str, where_it_pays: bool
) -> Iterator[Replacement | Skip]:
    """One site an attention, the `config` that it reads its implementation from, and the `forward` of their stack.

    Args:
        where_it_pays: on a GPU alone.
    """
    for stack, rule in stacks_of(index, policy.causal_attention):
        if where_it_pays and not runs_on_gpu(index):
            yield skip(forward_sites(stack), forward_name(stack), _TARGET, offer, PAYS_ON_GPU)
        else:
            yield from _propose_stack(index, stack, rule, offer, backend)


class FusedAttentionConfig(AttentionConfig):
    """In which "sdpa" reads as `fused_attention` while the attention is in training mode."""

    stands_for, name = "sdpa", "fuseopt_attention"
    function = staticmethod(fused_attention)

    def __init__(self, attention: nn.Module, config: Any, backend: str) -> None:
        super().__init__(config, backend)
        self._attention = refer(attention)

    @property
    def attention(self) -> nn.Module | None:
        """The module; None once it is freed, when another module may have taken over its attributes."""
        module: nn.Module | None = self._attention()
        return module

    def _is_wanted(self) -> bool:
        return self.attention is not None and bool(self.attention.training)


def _propose_stack(
    index: ModelIndex, stack: Candidate, rule: Rule, offer: Offer, backend: str
) -> Iterator[Replacement | Skip]:
    sites, name, told = forward_sites(stack), forward_name(stack), False
    reason = None
    if not stack.is_exactly(rule.source):
        reason = f"it is a subclass of {rule.source.rpartition('.')[2]}, so its forward may differ"
    elif "forward" in stack.module.__dict__:
        reason = "its forward has been replaced on the instance"
    within = {id(module) for module in stack.module.modules()}
    for attention in index.of_class(rule.options["attention"]):
        if id(attention.module) not in within:
            continue
        reasons = ["its stack cannot tell it of padding"] if reason else _not_supported_reasons(attention, rule)
        if reasons:
            yield skip(attention.sites, attention.class_name, _TARGET, offer, "; ".join(reasons))
            continue
        told = True
        config = Site(attention.module, "config", f"{attention.sites[0].path}.config")
        build = functools.partial(FusedAttentionConfig, attention.module, attention.module.config, backend)
        why = "attention runs as SDPA, which padding costs its flash kernel"
        yield replacement((config,), attention.class_name, _TARGET, offer, why, build)
    if reason:
        yield skip(sites, name, rule.target_name, offer, reason)
    elif told:
        tell = functools.partial(CausalStackForward, stack.module)
        yield replacement(
            sites, name, rule.target_name, offer, "hands its attentions the padding that it is told of", tell
        )


def _not_supported_reasons(attention: Candidate, rule: Rule) -> list[str]:
    if not attention.is_exactly(rule.options["attention"]):
        return [f"it is a subclass of {rule.options['attention'].rpartition('.')[2]}, so its forward may differ"]
    if getattr(attention.module, "is_cross_attention", False):
        return ["cross-attention is not causal"]
    if attention.module.head_dim > MOST_DIM:
        return [f"its heads have {attention.module.head_dim} elements, and the kernel takes at most {MOST_DIM}"]
    implementation = attention.module.config._attn_implementation
    if implementation != "sdpa":
        return [
            f"attention runs as {implementation!r}; model.set_attn_implementation('sdpa') would let it be exchanged"
        ]
    return []
