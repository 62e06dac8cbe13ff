"""FusedSoftmax inside attention: transformers' eager attention with scale, bias, mask and softmax as one op."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fuseopt import ops
from fuseopt.model_index import Site
from fuseopt.plan import Replacement, Skip
from fuseopt.strategies.attention_config import AttentionConfig
from fuseopt.strategies.context import ProposalContext

_TARGET = "FusedSoftmax"


def propose(context: ProposalContext) -> Iterator[Replacement | Skip]:
    """The `config` that each attention module reads its attention implementation from."""
    for candidate in context.index.candidates:
        if not any(candidate.is_exactly(name) for name in context.policy.eager_attention):
            continue
        reasons = _not_supported_reasons(candidate.module)
        if reasons:
            yield context.skip(candidate.sites, candidate.class_name, _TARGET, "; ".join(reasons))
            continue
        site = Site(candidate.module, "config", f"{candidate.sites[0].path}.config")
        build = functools.partial(FusedSoftmaxConfig, candidate.module.config, context.wanted)
        yield context.replacement((site,), candidate.class_name, _TARGET, "attention runs as 'eager'", build)


def fused_softmax_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """transformers' `eager_attention_forward` of GPT-2 and T5, with one op between the two matmuls.

    Args:
        module: the attention module; its config is a `FusedSoftmaxConfig`.
        query, key, value: [batch, heads, length, head size], any floating dtype.
        attention_mask: additive, broadcastable to [batch, heads, query length, key length], or None.
        position_bias: T5's bias by relative position, with the same shape rule, or None.

    Returns:
        [batch, query length, heads, head size] and the attention weights [batch, heads, query length, key length].
    """
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    mask = attention_mask
    if position_bias is not None:
        mask = position_bias if mask is None else position_bias + mask
    scores = torch.matmul(query, key.transpose(-1, -2))
    weights = ops.softmax(scores, mask, scale=scale, backend=module.config.backend)
    if position_bias is None:
        # GPT-2 casts the weights to value's dtype, which differs under autocast; T5 does not.
        weights = weights.type(value.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class FusedSoftmaxConfig(AttentionConfig):
    """The config of one attention, in which "eager" reads as `fused_softmax_attention`."""

    stands_for, name = "eager", "fuseopt_softmax"
    function = staticmethod(fused_softmax_attention)


def _not_supported_reasons(attention: nn.Module) -> list[str]:
    implementation = attention.config._attn_implementation
    if implementation != "eager":
        return [
            f"attention runs as {implementation!r}, whose softmax cannot be replaced; "
            "after model.set_attn_implementation('eager') it can"
        ]
    if getattr(attention, "reorder_and_upcast_attn", False):
        return ["reorder_and_upcast_attn computes attention in another order and in float32"]
    return []
