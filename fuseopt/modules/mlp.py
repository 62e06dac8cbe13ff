"""Feed-forward blocks whose elementwise middle runs as one region or op: bias + activation, and gated activation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fuseopt.modules.activations import python_formula_reasons
from fuseopt.modules.base import FusedModule, runs_untouched


class FusedMLP(FusedModule):
    """GPT-2's feed-forward: c_fc, activation, c_proj, dropout, with c_fc's bias added inside the activation.

    The bias is folded in float32 only: in half precision the product would be rounded once more than in the source,
    before the bias is added. A child that is not the plain class it was (an adapter, a quantised leaf) or that carries
    hooks is called as the source calls it.

    forward: `hidden_states` [..., hidden] of any floating dtype -> [..., hidden], same dtype.
    """

    @classmethod
    def not_supported_reasons(cls, source: nn.Module) -> list[str]:
        return python_formula_reasons(source.act)

    def _configure(  # type: ignore[override]
        self, *, activation: Callable[[Tensor], Tensor], bias_activation: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        self.activation, self.bias_activation = activation, bias_activation
        self._linear_class, self._activation_class = type(self.c_fc), type(self.act)

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not runs_untouched(self.act, self._activation_class):
            return self._source_forward(hidden_states)
        if self._folds_bias(hidden_states):
            hidden_states = self.bias_activation(torch.matmul(hidden_states, self.c_fc.weight), self.c_fc.bias)
        else:
            hidden_states = self.activation(self.c_fc(hidden_states))
        return self.dropout(self.c_proj(hidden_states))

    def _folds_bias(self, hidden_states: Tensor) -> bool:
        return (
            hidden_states.dtype is torch.float32
            and not torch.is_autocast_enabled(hidden_states.device.type)
            and runs_untouched(self.c_fc, self._linear_class)
            and self.c_fc.weight.dtype is torch.float32
        )


class FusedGatedMLP(FusedModule):
    """T5 v1.1's gated feed-forward: act(wi_0 x) * (wi_1 x), dropout, wo (Shazeer 2020, https://arxiv.org/abs/2002.05202).

    forward: `hidden_states` [..., hidden] of any floating dtype -> [..., hidden], in wo's dtype.
    """

    @classmethod
    def not_supported_reasons(cls, source: nn.Module) -> list[str]:
        return python_formula_reasons(source.act)

    def _configure(  # type: ignore[override]
        self, *, gated_activation: Callable[[Tensor, Tensor], Tensor], float32_under_autocast: bool = False
    ) -> None:
        self.gated_activation, self.float32_under_autocast = gated_activation, float32_under_autocast
        self._activation_class = type(self.act)

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not runs_untouched(self.act, self._activation_class):
            return self._source_forward(hidden_states)
        gate = self.wi_0(hidden_states)
        if self.float32_under_autocast and torch.is_autocast_enabled(gate.device.type):
            gate = gate.to(torch.promote_types(gate.dtype, torch.float32))
        hidden_states = self.dropout(self.gated_activation(gate, self.wi_1(hidden_states)))
        weight = self.wo.weight
        if isinstance(weight, Tensor) and weight.dtype not in (hidden_states.dtype, torch.int8):
            hidden_states = hidden_states.to(weight.dtype)
        return self.wo(hidden_states)
