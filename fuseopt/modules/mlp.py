"""Drop-ins for feed-forward blocks that fuse the elementwise part: bias and activation, or gated activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fuseopt.modules.activations import python_formula_reasons
from fuseopt.modules.base import FusedModule, full_name, runs_untouched
from fuseopt.modules.children import CONV1D
from fuseopt.ops.library import float32_under_autocast, is_autocast


class FusedMLP(FusedModule):
    """GPT-2's feed-forward: c_fc, activation, c_proj, dropout; the bias of c_fc is added by the activation's kernel.

    The bias is fused in float32 only. In half precision the product would be rounded before the bias is added, which
    the source does not do. If `c_fc` is not a plain Conv1D (an adapter, quantised, with hooks), it is called as the
    source calls it. If the activation has hooks or has changed its class, the source's own forward runs.

    forward: `hidden_states` [..., hidden] of any floating dtype -> [..., hidden], same dtype.
    """

    @classmethod
    def not_supported_reasons(cls, source: nn.Module) -> list[str]:
        return python_formula_reasons(source.act)

    def _configure(  # type: ignore[override]
        self,
        *,
        activation: Callable[[Tensor], Tensor],
        bias_activation: Callable[[Tensor, Tensor], Tensor],
        reads: Mapping[str, type[nn.Module]] | None = None,
    ) -> None:
        self.activation, self.bias_activation = activation, bias_activation
        # A policy from outside of the package may have no `reads`; then `c_fc` must be a Conv1D now.
        known = type(self.c_fc) if full_name(type(self.c_fc)) == CONV1D else None
        self._linear_class = reads["c_fc"] if reads else known
        self._activation = _Activation(self.act)

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not self._activation.is_untouched(self.act):
            return self._source_forward(hidden_states)
        if self._folds_bias(hidden_states):
            hidden_states = self.bias_activation(torch.matmul(hidden_states, self.c_fc.weight), self.c_fc.bias)
        else:
            hidden_states = self.activation(self.c_fc(hidden_states))
        return self.dropout(self.c_proj(hidden_states))

    def _folds_bias(self, hidden_states: Tensor) -> bool:
        return (
            hidden_states.dtype is torch.float32
            and hidden_states.dim() > 0
            and not is_autocast(hidden_states)
            and self._linear_class is not None
            and runs_untouched(self.c_fc, self._linear_class)
            and self.c_fc.weight.dtype is torch.float32
        )


class FusedGatedMLP(FusedModule):
    """Gated feed-forward: down(act(gate(x)) * up(x)) (Shazeer 2020, https://arxiv.org/abs/2002.05202).

    Replaces T5DenseGatedActDense, LlamaMLP, Phi3MLP and similar classes. Linear layers are called as the source calls
    them, adapters and quantised ones included. If the activation has hooks or has changed its class, the source's own
    forward runs.

    forward: `hidden_states` [..., hidden] of any floating dtype -> [..., hidden], in the dtype the source would return.

    Options:
        act, gate, up, down, dropout: names of the source's children. Without `up`, the output of `gate` holds both
            halves, the gate first.
        gated_activation: computes `act(gate) * up`.
        keeps_down_dtype: cast the product to the dtype of `down`'s weight, as T5 does for a `wo` kept in float32.
        float32_under_autocast: compute the activation in float32 under CUDA's autocast.
    """

    @classmethod
    def not_supported_reasons(cls, source: nn.Module) -> list[str]:
        return [reason for child in source.children() for reason in python_formula_reasons(child)]

    def _configure(  # type: ignore[override]
        self,
        *,
        act: str,
        gate: str,
        up: str | None = None,
        down: str,
        gated_activation: Callable[..., Tensor],
        dropout: str | None = None,
        keeps_down_dtype: bool = False,
        float32_under_autocast: bool = False,
    ) -> None:
        self._act, self._gate, self._up, self._down, self._dropout = act, gate, up, down, dropout
        self._keeps_down_dtype, self.float32_under_autocast = keeps_down_dtype, float32_under_autocast
        self.gated_activation = gated_activation
        self._activation = _Activation(getattr(self, act))

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not self._activation.is_untouched(getattr(self, self._act)):
            return self._source_forward(hidden_states)
        gate = getattr(self, self._gate)(hidden_states)
        if self._up is None:
            gate, up = gate.chunk(2, dim=-1)
        else:
            up = getattr(self, self._up)(hidden_states)
        activation_dtype = float32_under_autocast(gate) if self.float32_under_autocast else gate.dtype
        hidden_states = self.gated_activation(gate, up, activation_dtype=activation_dtype)
        if self._dropout is not None:
            hidden_states = getattr(self, self._dropout)(hidden_states)
        down = getattr(self, self._down)
        if self._keeps_down_dtype:
            weight = down.weight
            if isinstance(weight, Tensor) and weight.dtype not in (hidden_states.dtype, torch.int8):
                hidden_states = hidden_states.to(weight.dtype)
        return down(hidden_states)


class _Activation:
    """Class and `approximate` of a bypassed activation, recorded when the module was fused."""

    def __init__(self, module: nn.Module) -> None:
        self._class, self._approximate = type(module), getattr(module, "approximate", None)

    def is_untouched(self, module: nn.Module) -> bool:
        return runs_untouched(module, self._class) and getattr(module, "approximate", None) == self._approximate
