"""FusedRelativeAttention: T5's self-attention, whose bias is handed from layer to layer as a number a distance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fuseopt import ops
from fuseopt.modules.base import FusedModule


class FusedRelativeAttention(FusedModule):
    """Self-attention of T5 and mT5, encoder or decoder, on `ops.relative_attention`.

    The first layer of a stack makes the position bias and returns it for the others. Here that is a vector a head,
    [heads, 2 * length - 1] by the distance of key from query, in the place of the source's matrix [1, heads, length,
    length]. So all self-attentions of a stack are exchanged together. Anything that a matrix was given to falls back.

    The source's own forward runs where attentions are asked for, with a static cache or one that holds tokens, with an
    attention implementation other than "eager" and "sdpa", and for masks that are no tensors.

    forward: `hidden_states` [batch, length, hidden] -> (the same shape, position bias, None).
    """

    @classmethod
    def not_supported_reasons(cls, source: nn.Module) -> list[str]:
        if source.is_decoder and not source.is_causal:
            return ["it attends to an encoder, without a bias of the distance"]
        return []

    def _configure(self, *, backend: str = "auto") -> None:  # type: ignore[override]
        self.backend = backend

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        length = hidden_states.shape[1]
        own = _self_attention_cache(past_key_values)
        if key_value_states is not None or not self._is_plain(mask, position_bias, own, kwargs):
            if position_bias is not None and position_bias.dim() == 2:
                position_bias = _matrix(position_bias, length)
            return self._source_forward(hidden_states, mask, key_value_states, position_bias, past_key_values, **kwargs)
        query, key, value = (self._heads(project(hidden_states)) for project in (self.q, self.k, self.v))
        if own is not None:
            key, value = own.update(key, value, self.layer_idx)
        if position_bias is None:
            position_bias = self._distance_bias(length, hidden_states.device)
        p = self.dropout if self.training else 0.0
        output = ops.relative_attention(
            query,
            key,
            value,
            position_bias,
            mask=mask,
            seed=torch.randint(2**62, (1,), device=query.device) if p > 0.0 else None,
            scale=self.scaling,
            p=p,
            # Without a mask SDPA makes the causal one, and eager attention none.
            causal=mask is None and length > 1 and self.is_causal and self.config._attn_implementation == "sdpa",
            backend=self.backend,
        )
        return self.o(output.transpose(1, 2).flatten(2)), position_bias, None

    def compute_bias(self, *args: Any, **kwargs: Any) -> Tensor:
        """The source's matrix, for its own forward."""
        return self._source_class.compute_bias(self, *args, **kwargs)

    def _relative_position_bucket(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._source_class._relative_position_bucket(*args, **kwargs)

    def _is_plain(self, mask: Any, position_bias: Tensor | None, own: Any, kwargs: dict[str, Any]) -> bool:
        implementation = self.config._attn_implementation
        if implementation not in ("eager", "sdpa") or kwargs.get("is_causal") is not None:
            return False
        if kwargs.get("output_attentions", getattr(self.config, "output_attentions", False)):
            return False
        if mask is not None and not (
            isinstance(mask, Tensor) and (mask.is_floating_point() or implementation == "sdpa")
        ):
            return False
        if own is not None and (own.is_compileable or own.get_seq_length(self.layer_idx) != 0):
            return False
        return self.has_relative_attention_bias if position_bias is None else position_bias.dim() == 2

    def _heads(self, projected: Tensor) -> Tensor:
        """[batch, length, heads * size] -> [batch, heads, length, size], a view."""
        return projected.view(*projected.shape[:-1], -1, self.key_value_proj_dim).transpose(1, 2)

    def _distance_bias(self, length: int, device: torch.device) -> Tensor:
        """[heads, 2 * length - 1], from the key farthest behind its query to the one farthest ahead."""
        bucket = self._relative_position_bucket(
            torch.arange(1 - length, length, device=device),
            bidirectional=not self.is_decoder,
            num_buckets=self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
        )
        bias = self.relative_attention_bias(bucket).t()
        # Gradients of half precision are added up in float32.
        return bias.to(torch.promote_types(bias.dtype, torch.float32))


def _self_attention_cache(past_key_values: Any) -> Any:
    return getattr(past_key_values, "self_attention_cache", past_key_values)


def _matrix(bias: Tensor, length: int) -> Tensor:
    """[heads, 2 * length - 1] -> [1, heads, length, length]"""
    position = torch.arange(length, device=bias.device)
    return bias[:, position - position[:, None] + length - 1][None]
