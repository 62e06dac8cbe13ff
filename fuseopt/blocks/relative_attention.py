"""T5's attentions on one op: its position bias is handed from layer to layer as a number a distance."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseopt import ops
from fuseopt.modules.base import FusedModule, source_class
from fuseopt.ops.philox import draw_seed
from fuseopt.runtime.references import weak_attribute

_IMPLEMENTATIONS = ("eager", "sdpa")


class SeenKeys(NamedTuple):
    """Attention masks that a stack was given: [batch, length], 0 for masked keys; None if no key is masked.

    A mask that is not two-dimensional reaches the attentions unchanged, as an argument.
    """

    own: Tensor | None
    encoder: Tensor | None


class RelativeStackForward:
    """The `forward` of a T5 stack, which also hands its attentions the masks that it was given.

    The class's own makes a mask [batch, 1, length, length] of them, or for a trace even of none. That rules out leaving
    the future out; attentions that are not `FusedRelativeAttention` still get it.

    The masks are passed on only while the stack consists of the classes that it had when this was made: others may take
    no further arguments, or no position bias of another form.

    It belongs to one stack and is copied and pickled with it.
    """

    stack = weak_attribute("stack")

    def __init__(self, stack: nn.Module) -> None:
        self.stack, self._classes = stack, _classes_inside(stack)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stack: Any = self.stack
        masks = SeenKeys(kwargs.get("attention_mask"), kwargs.get("encoder_attention_mask"))
        # Of arguments by position only the first is known to be no mask.
        known = len(args) < 2 and stack.config._attn_implementation in _IMPLEMENTATIONS
        if known and _classes_inside(stack) <= self._classes and _are_alike(stack):
            kwargs["seen_keys"] = masks
        return type(stack).forward(stack, *args, **kwargs)


class FusedRelativeAttention(FusedModule):
    """Attention of T5 and mT5, of any kind, on `ops.relative_attention`.

    The first layer of a stack makes the position bias and returns it for the others. Here that is a vector a head,
    [heads, 2 * max_distance + 1] by the distance of key from query, beyond which buckets do not change, in the place of
    the source's matrix [1, heads, length, length]. So all self-attentions of a stack are exchanged together. Anything
    that a matrix was given to falls back. Cross-attention has no bias, where the source makes a matrix of zeros.

    The source's own forward runs if the stack passes no `seen_keys`; if attentions are asked for; with a static cache
    or one that holds tokens; with an attention implementation other than "eager" and "sdpa"; for masks that are no
    tensors; with `training_only` in eval mode too.

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
        is_left = seen_keys is None or (self.training_only and not self.training) or hidden_states.dim() != 3
        if is_left or not self._is_plain(mask, crosses, position_bias, cache, kwargs):
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
        mask, causal = self._told(mask, crosses, seen_keys, key)
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

    def _told(
        self, mask: Tensor | None, crosses: bool, seen_keys: SeenKeys | None, key: Tensor
    ) -> tuple[Tensor | None, bool]:
        """The mask that is left, and whether the future is masked beside."""
        if seen_keys is not None:
            seen = seen_keys.encoder if crosses else seen_keys.own
            if seen is None or seen.shape == (len(key), key.shape[2]):
                return None if seen is None else seen.bool()[:, None, None, :], self.is_causal
        # Without a mask SDPA makes the causal one, and eager attention none.
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
    """The classes of the stack's blocks, layers and attentions, which its arguments pass through."""
    classes: set[type[nn.Module]] = set()
    for block in stack.block:
        layers = list(getattr(block, "layer", ()))
        classes.update(map(type, (block, *layers)))
        attentions = (layer._modules.get(name) for layer in layers for name in ("SelfAttention", "EncDecAttention"))
        classes.update(source_class(attention) for attention in attentions if attention is not None)
    return classes


def _are_alike(stack: Any) -> bool:
    """Whether all self-attentions have one class, and so pass on a position bias of one form."""
    return len({type(block.layer[0].SelfAttention) for block in stack.block}) == 1


def distance_buckets(attention: Any, device: torch.device) -> Tensor:
    """[2 * max_distance + 1] int64, from the key farthest behind its query to the one farthest ahead."""
    reach = attention.relative_attention_max_distance
    return attention._relative_position_bucket(
        torch.arange(-reach, reach + 1, device=device),
        bidirectional=not attention.is_decoder,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=reach,
    )


def distance_bias(attention: Any, buckets: Tensor) -> Tensor:
    """[heads, 2 * max_distance + 1]: the bias of a T5Attention that has one, for its `distance_buckets`."""
    # Contiguous as the kernel that draws it out takes it: a compiled step writes it so, and else no layer copies it.
    bias = attention.relative_attention_bias(buckets).t().contiguous()
    # Gradients of half precision are added up in float32.
    return bias.to(torch.promote_types(bias.dtype, torch.float32))


def _matrix(bias: Tensor, length: int) -> Tensor:
    """[heads, 2 * reach + 1] -> [1, heads, length, length]"""
    reach, position = bias.shape[1] // 2, torch.arange(length, device=bias.device)
    return bias[:, (position - position[:, None]).clamp(-reach, reach) + reach][None]
