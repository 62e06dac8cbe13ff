"""Block forwards for training that run dropout, residual add and norm as one op, which stores no mask."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fuseopt import ops
from fuseopt.blocks.residual import GPT2BlockForward, ResidualForward, T5BlockForward
from fuseopt.modules.base import FusedModule, runs_untouched, source_class
from fuseopt.ops.philox import draw_seed


class DeferredDropout(FusedModule):
    """Stands in for the nn.Dropout at the end of an attention, so that the block can apply the dropout itself.

    forward: `input` of any shape and floating dtype -> `input` while `is_deferred`, else its dropout.
    """

    def _configure(self) -> None:  # type: ignore[override]
        self.is_deferred = False

    def forward(self, input: Tensor) -> Tensor:
        return input if self.is_deferred else self._source_forward(input)


class DropoutAddForward(ResidualForward):
    """Forward that runs dropout, inner residual add and the norm after it as one op, in training.

    The mask is computed from a seed drawn from torch's generator, so it differs from that of torch's dropout. The
    class's own forward also runs if a dropout or norm has hooks or has changed its class, and if nothing is dropped.
    """

    dropout: type[nn.Module] = nn.Dropout

    def __init__(self, block: nn.Module, backend: str = "auto") -> None:
        super().__init__(block, backend)
        self._norm_classes = [source_class(norm) for norm in self.norms(block)]

    @classmethod
    def dropouts(cls, block: nn.Module) -> list[nn.Module]:
        """The dropout before each of `norms(block)`."""
        raise NotImplementedError

    @classmethod
    def not_supported_reasons(cls, block: nn.Module) -> list[str]:
        reasons = super().not_supported_reasons(block)
        dropouts = cls.dropouts(block)
        if not all(runs_untouched(dropout, nn.Dropout) for dropout in dropouts):
            reasons.append("one of its dropouts has hooks, or is not a torch.nn.Dropout")
        elif all(dropout.p == 0.0 for dropout in dropouts):
            reasons.append("its dropouts drop nothing")
        return reasons

    def _is_plain(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> bool:
        return super()._is_plain(hidden_states, *args, **kwargs) and all(
            runs_untouched(dropout, self.dropout) and dropout.training and 0.0 < dropout.p < 1.0
            for dropout in self.dropouts(self.block)
        )

    def _options(self, dropout: nn.Module, added: Tensor) -> dict[str, Any]:
        """The arguments that both ops have, for a call in this training step."""
        return {"seed": draw_seed(added.device), "p": dropout.p, "backend": self.backend}

    def _has_plain_norms(self) -> bool:
        return all(
            source_class(norm) is expected and runs_untouched(norm, type(norm))
            for norm, expected in zip(self.norms(self.block), self._norm_classes, strict=True)
        )


class GPT2DropoutAddForward(DropoutAddForward, GPT2BlockForward):
    """GPT2Block: dropout and add after each attention with ln_cross_attn or ln_2. Returns [batch, length, hidden].

    The attention's dropout is deferred until the attention has returned, which is correct only if dropout is its last
    operation. So the class's own forward runs if an attention has hooks or another class.
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
        weights = added, residual, norm.weight, norm.bias
        return ops.dropout_add_layer_norm(*weights, eps=norm.eps, **self._options(dropout, added))


class T5DropoutAddForward(DropoutAddForward, T5BlockForward):
    """T5Block: dropout and add of each attention layer with the norm at the start of the next layer.

    Returns hidden states [batch, length, hidden] and the position biases of self- and cross-attention, or None.
    """

    @classmethod
    def dropouts(cls, block: nn.Module) -> list[nn.Module]:
        return [layer.dropout for layer in block.layer[:-1]]

    def _add(self, dropout: nn.Module, norm: nn.Module, added: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        options = self._options(dropout, added)
        return ops.dropout_add_rms_norm(
            added, residual, norm.weight, eps=norm.variance_epsilon, cast_order="t5", **options
        )
