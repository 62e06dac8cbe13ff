"""Block forwards that fuse each inner residual add with the norm after it, which belongs to the next sublayer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fuseopt.modules.base import BlockForward, FusedModule, runs_untouched
from fuseopt.modules.norms import FusedLayerNorm, FusedRMSNorm


class ResidualForward(BlockForward):
    """Forward that runs each inner residual add of a block and the norm after it as one op.

    Calls the same modules in the same order as the class's own forward. That one runs if an inner norm is no longer the
    fused module or has hooks, because its own call is bypassed; and under gradient checkpointing, which some versions
    of transformers implement inside of the class's forward.
    """

    norm: type[FusedModule]

    @classmethod
    def norms(cls, block: nn.Module) -> list[nn.Module]:
        """The norms of `block` that are fused with a residual add."""
        raise NotImplementedError

    def _is_plain(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> bool:
        checkpointed = getattr(self.block, "gradient_checkpointing", False) and self.block.training
        return not checkpointed and self._has_plain_norms()

    def _has_plain_norms(self) -> bool:
        return all(runs_untouched(norm, self.norm) for norm in self.norms(self.block))


class GPT2BlockForward(ResidualForward):
    """GPT2Block: the add after each attention is fused with ln_cross_attn or ln_2. Returns [batch, length, hidden].

    The add after the feed-forward is not: its norm belongs to the next block, and the block has to return the sum.
    """

    norm = FusedLayerNorm

    @classmethod
    def norms(cls, block: nn.Module) -> list[nn.Module]:
        return [block.ln_2, block.ln_cross_attn] if hasattr(block, "crossattention") else [block.ln_2]

    def _is_plain(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> bool:
        if encoder_hidden_states is not None and not hasattr(self.block, "crossattention"):
            return False  # the class's forward raises its error
        return super()._is_plain(hidden_states)

    def _forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = False,
        **kwargs: Any,
    ) -> Tensor:
        block = self.block
        shared = {"past_key_values": past_key_values, "attention_mask": attention_mask}
        norm = block.ln_2 if encoder_hidden_states is None else block.ln_cross_attn
        normed, hidden_states = self._attend(
            block.attn, norm, hidden_states, block.ln_1(hidden_states), use_cache=use_cache, **shared, **kwargs
        )
        if encoder_hidden_states is not None:
            normed, hidden_states = self._attend(
                block.crossattention,
                block.ln_2,
                hidden_states,
                normed,
                encoder_hidden_states=encoder_hidden_states,
                encoder_attention_mask=encoder_attention_mask,
                **shared,
            )
        return hidden_states + block.mlp(normed)

    def _attend(
        self, attention: nn.Module, norm: nn.Module, residual: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """`sum = attention(...) + residual`: (norm(sum), sum)."""
        added, _ = attention(*args, **kwargs)
        return norm.add(added, residual, self.backend)


class T5BlockForward(ResidualForward):
    """T5Block: the add at the end of an attention layer is fused with the norm at the start of the next layer.

    The class's own forward runs if a layer has hooks, because the layers' forwards are bypassed, and for a float16
    residual, which T5 clamps between add and norm.

    Returns hidden states [batch, length, hidden] and the position biases of self- and cross-attention, or None.
    """

    norm = FusedRMSNorm

    def __init__(self, block: nn.Module, backend: str = "auto") -> None:
        super().__init__(block, backend)
        self._layer_classes = tuple(type(layer) for layer in block.layer)

    @classmethod
    def norms(cls, block: nn.Module) -> list[nn.Module]:
        return [layer.layer_norm for layer in block.layer[1:]]

    def _is_plain(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> bool:
        layers = self.block.layer
        return (
            hidden_states.dtype is not torch.float16
            and len(layers) == len(self._layer_classes)
            and all(map(runs_untouched, layers, self._layer_classes))
            and super()._is_plain(hidden_states)
        )

    def _forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        encoder_decoder_position_bias: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        block = self.block
        layer = block.layer[0]
        added, self_bias, _ = layer.SelfAttention(
            layer.layer_norm(hidden_states),
            mask=attention_mask,
            position_bias=position_bias,
            past_key_values=past_key_values,
            **kwargs,
        )
        cross_bias = None
        if block.is_decoder and encoder_hidden_states is not None:
            dropout, layer = layer.dropout, block.layer[1]
            normed, hidden_states = self._add(dropout, layer.layer_norm, added, hidden_states)
            added, cross_bias, _ = layer.EncDecAttention(
                normed,
                mask=encoder_attention_mask,
                key_value_states=encoder_hidden_states,
                position_bias=encoder_decoder_position_bias,
                past_key_values=past_key_values,
                **kwargs,
            )
        dropout, layer = layer.dropout, block.layer[-1]
        normed, hidden_states = self._add(dropout, layer.layer_norm, added, hidden_states)
        return hidden_states + layer.dropout(layer.DenseReluDense(normed)), self_bias, cross_bias

    def _add(self, dropout: nn.Module, norm: nn.Module, added: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """`sum = dropout(added) + residual`: (norm(sum), sum)."""
        return norm.add(dropout(added), residual, self.backend)
