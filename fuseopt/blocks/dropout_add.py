"""Blocks that train with dropout, residual add and the norm after them as one op, which keeps no mask."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fuseopt import ops
from fuseopt.blocks.residual import GPT2BlockForward, ResidualForward, T5BlockForward
from fuseopt.modules.base import FusedModule, runs_untouched, source_class
from fuseopt.ops.philox import draw_seed


class DeferredDropout(FusedModule):
    """The dropout at the end of an attention, which the forward of the block may take over; stands in for nn.Dropout.

    forward: `input` of any shape and floating dtype -> itself while `is_deferred`, else its dropout.
    """

    def _configure(self) -> None:  # type: ignore[override]
        self.is_deferred = False

    def forward(self, input: Tensor) -> Tensor:
        return input if self.is_deferred else self._source_forward(input)


class DropoutAddForward(ResidualForward):
    """Runs each dropout in front of an inner residual add, the add and the norm after it as one op, in training.

    Which elements are dropped follows from a seed that torch's generator gives, so other ones than torch's dropout
    drops. Not plain, beside what `ResidualForward` names: a dropout or norm with hooks or of another class than the
    model was made with, no dropout at all.
    """

    dropout: type[nn.Module] = nn.Dropout

    def __init__(self, block: nn.Module, backend: str = "auto") -> None:
        super().__init__(block, backend)
        self._norm_classes = [source_class(norm) for norm in self.norms(block)]

    @classmethod
    def dropouts(cls, block: nn.Module) -> list[nn.Module]:
        """The dropout before each of `norms`."""
        raise NotImplementedError

    @classmethod
    def not_supported_reasons(cls, block: nn.Module) -> list[str]:
        reasons = super().not_supported_reasons(block)
        dropouts = cls.dropouts(block)
        if not all(runs_untouched(dropout, nn.Dropout) for dropout in dropouts):
            reasons.append("one of its dropouts carries hooks, or is another class than torch.nn.Dropout")
        elif all(dropout.p == 0.0 for dropout in dropouts):
            reasons.append("its dropouts drop nothing")
        return reasons

    def _is_plain(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> bool:
        return super()._is_plain(hidden_states, *args, **kwargs) and all(
            runs_untouched(dropout, self.dropout) and dropout.training and 0.0 < dropout.p < 1.0
            for dropout in self.dropouts(self.block)
        )

    def _has_plain_norms(self) -> bool:
        return all(
            source_class(norm) is expected and runs_untouched(norm, type(norm))
            for norm, expected in zip(self.norms(self.block), self._norm_classes, strict=True)
        )


class GPT2DropoutAddForward(DropoutAddForward, GPT2BlockForward):
    """GPT2Block: dropout and add of each attention with ln_cross_attn or ln_2. Returns [batch, length, hidden].

    The class's own forward runs if an attention has hooks or another class: the attention's dropout is deferred until
    after it returns, which is only right if dropout is the last thing it does.
    """

    dropout = DeferredDropout

    def __init__(self, block: nn.Module, backend: str = "auto") -> None:
        super().__init__(block, backend)
        self._attention_class = type(block.attn)

    @classmethod
    def dropouts(cls, block: nn.Module) -> list[nn.Module]:
        return [attention.resid_dropout for attention in cls._attentions(block)]

    @classmethod
    def _attentions(cls, block: Any) -> list[nn.Module]:
        return [block.attn, block.crossattention] if hasattr(block, "crossattention") else [block.attn]

    def _is_plain(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> bool:
        untouched = all(runs_untouched(each, self._attention_class) for each in self._attentions(self.block))
        return untouched and super()._is_plain(hidden_states, *args, **kwargs)

    def _attend(
        self, attention: nn.Module, norm: nn.Module, residual: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        dropout = attention.resid_dropout
        dropout.is_deferred = True
        try:
            added, _ = attention(*args, **kwargs)
        finally:
            dropout.is_deferred = False
        return ops.dropout_add_layer_norm(
            added,
            residual,
            norm.weight,
            norm.bias,
            seed=draw_seed(added.device),
            p=dropout.p,
            eps=norm.eps,
            backend=self.backend,
        )


class T5DropoutAddForward(DropoutAddForward, T5BlockForward):
    """T5Block: dropout and add of each attention layer with the norm at the start of the layer after it.

    Returns hidden states [batch, length, hidden] and the position biases of self- and cross-attention, or None.
    """

    @classmethod
    def dropouts(cls, block: nn.Module) -> list[nn.Module]:
        return [layer.dropout for layer in block.layer[:-1]]

    def _add(self, dropout: nn.Module, norm: nn.Module, added: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return ops.dropout_add_rms_norm(
            added,
            residual,
            norm.weight,
            seed=draw_seed(added.device),
            p=dropout.p,
            eps=norm.variance_epsilon,
            cast_order="t5",
            backend=self.backend,
        )
