"""T5's attentions on `ops.relative_attention`, with the position bias as one number a distance and head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseopt import ops
from fuseopt.modules.base import FusedModule, source_class
from fuseopt.ops.philox import draw_seed
from fuseopt.runtime.references import code_of_forward, weak_attribute

_IMPLEMENTATIONS = ("eager", "sdpa")


class SeenKeys(NamedTuple):
    """The attention masks of a stack: [batch, length], 0 for masked keys; None if no key is masked.

    A mask with other than two dimensions reaches the attentions unchanged as their own argument.
    """

    own: Tensor | None
    encoder: Tensor | None


class RelativeStackForward:
    """Forward of a T5 stack, which also passes its masks to the attentions, as `seen_keys`.

    The class's own forward expands them to a mask [batch, 1, length, length], in a trace even if there are none. With
    that mask no kernel can skip future keys. Attentions other than `FusedRelativeAttention` still get it.

    `seen_keys` is passed only while the stack consists of the classes that it had at construction: others may not
    accept the argument, or the other form of position bias.

    Belongs to one stack, and is copied and pickled with it.
    """

    stack = weak_attribute("stack")
    __code__ = code_of_forward("stack")

    def __init__(self, stack: nn.Module) -> None:
        self.stack, self._classes = stack, _classes_inside(stack)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stack: Any = self.stack
        masks = SeenKeys(kwargs.get("attention_mask"), kwargs.get("encoder_attention_mask"))
        # The second positional argument may be a mask; the first is not.
        known = len(args) < 2 and stack.config._attn_implementation in _IMPLEMENTATIONS
        if known and _classes_inside(stack) <= self._classes and _are_alike(stack):
            kwargs["seen_keys"] = masks
        return type(stack).forward(stack, *args, **kwargs)


class FusedRelativeAttention(FusedModule):
    """Self- or cross-attention of T5 and mT5 on `ops.relative_attention`.

    The first layer of a stack computes the position bias and returns it for the others. Here it has the shape
    [heads, 2 * max_distance + 1], by the distance of key and query; the source's has [1, heads, length, length]. So all
    self-attentions of a stack are replaced together. Cross-attention has no bias; the source's is a matrix of zeros.

    The source's own forward runs

    - if the stack passes no `seen_keys`, or the position bias is a matrix;
    - if attention weights are asked for;
    - with a static cache, or a cache that holds tokens;
    - with an attention implementation other than "eager" and "sdpa", or a mask that is not a tensor;
    - in eval mode, with `training_only`.

    forward: `hidden_states` [batch, length, hidden] -> (the same shape, position bias or None, None).
    """

    def _configure(self, *, backend: str = "auto", training_only: bool = False) -> None:  # type: ignore[override]
        self.backend, self.training_only = backend, training_only

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        seen_keys: SeenKeys | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        crosses = key_value_states is not None
        cache = getattr(
            past_key_values, "cross_attention_cache" if crosses else "self_attention_cache", past_key_values
        )
        states = hidden_states if key_value_states is None else key_value_states
        falls_back = seen_keys is None or (self.training_only and not self.training) or hidden_states.dim() != 3
        if falls_back or not self._is_plain(mask, crosses, position_bias, cache, kwargs):
            if position_bias is not None and position_bias.dim() == 2:
                position_bias = _matrix(position_bias, hidden_states.shape[1])
            return self._source_forward(hidden_states, mask, key_value_states, position_bias, past_key_values, **kwargs)
        query, key, value = self._heads(self.q(hidden_states)), self._heads(self.k(states)), self._heads(self.v(states))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
            if crosses:
                past_key_values.is_updated[self.layer_idx] = True
        if position_bias is None and not crosses:
            position_bias = distance_bias(self, distance_buckets(self, hidden_states.device))
        p = self.dropout if self.training else 0.0
        mask, causal = self._mask_and_causal(mask, crosses, seen_keys, key)
        output = ops.relative_attention(
            query,
            key,
            value,
            position_bias,
            mask=mask,
            seed=draw_seed(query.device) if p > 0.0 else None,
            scale=self.scaling,
            p=p,
            causal=causal,
            backend=self.backend,
        )
        return self.o(output.transpose(1, 2).flatten(2)), position_bias, None

    def _mask_and_causal(
        self, mask: Tensor | None, crosses: bool, seen_keys: SeenKeys | None, key: Tensor
    ) -> tuple[Tensor | None, bool]:
        """The mask for the op, and whether it masks future keys in addition."""
        if seen_keys is not None:
            seen = seen_keys.encoder if crosses else seen_keys.own
            if seen is None or seen.shape == (len(key), key.shape[2]):
                return None if seen is None else seen.bool()[:, None, None, :], self.is_causal
        # Without a mask, transformers' SDPA masks the future and eager attention does not.
        return mask, mask is None and self.is_causal and self.config._attn_implementation == "sdpa"

    def _is_plain(
        self, mask: Any, crosses: bool, position_bias: Tensor | None, cache: Any, kwargs: dict[str, Any]
    ) -> bool:
        implementation = self.config._attn_implementation
        if implementation not in _IMPLEMENTATIONS or kwargs.get("is_causal") is not None:
            return False
        if kwargs.get("output_attentions", getattr(self.config, "output_attentions", False)):
            return False
        if mask is not None and not (
            isinstance(mask, Tensor) and (mask.is_floating_point() or implementation == "sdpa")
        ):
            return False
        if cache is not None and (cache.is_compileable or cache.get_seq_length(self.layer_idx) != 0):
            return False
        if position_bias is None:
            return crosses or self.has_relative_attention_bias
        return not crosses and position_bias.dim() == 2

    def _heads(self, projected: Tensor) -> Tensor:
        """[batch, length, heads * size] -> [batch, heads, length, size], a view."""
        return projected.view(*projected.shape[:-1], -1, self.key_value_proj_dim).transpose(1, 2)


def _classes_inside(stack: Any) -> set[type[nn.Module]]:
    """The classes of the stack's blocks, layers and attentions, which pass its arguments on."""
    classes: set[type[nn.Module]] = set()
    for block in stack.block:
        layers = list(getattr(block, "layer", ()))
        classes.update(map(type, (block, *layers)))
        attentions = (layer._modules.get(name) for layer in layers for name in ("SelfAttention", "EncDecAttention"))
        classes.update(source_class(attention) for attention in attentions if attention is not None)
    return classes


def _are_alike(stack: Any) -> bool:
    """Whether all self-attentions have the same class, and so the same form of position bias."""
    return len({type(block.layer[0].SelfAttention) for block in stack.block}) == 1


def distance_buckets(attention: Any, device: torch.device) -> Tensor:
    """Bucket of each distance of key from query, -max_distance to max_distance: [2 * max_distance + 1] int64."""
    reach = attention.relative_attention_max_distance
    return attention._relative_position_bucket(
        torch.arange(-reach, reach + 1, device=device),
        bidirectional=not attention.is_decoder,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=reach,
    )


def distance_bias(attention: Any, buckets: Tensor) -> Tensor:
    """[heads, 2 * max_distance + 1]: the bias of a T5Attention that has one, for its `distance_buckets`."""
    # Made contiguous once here; otherwise the kernel would copy it in every layer.
    bias = attention.relative_attention_bias(buckets).t().contiguous()
    # float32, so that the bias's gradient is summed in float32.
    return bias.to(torch.promote_types(bias.dtype, torch.float32))


def _matrix(bias: Tensor, length: int) -> Tensor:
    """[heads, 2 * reach + 1] -> [1, heads, length, length]"""
    reach, position = bias.shape[1] // 2, torch.arange(length, device=bias.device)
    return bias[:, (position - position[:, None]).clamp(-reach, reach) + reach][None]
