"""FusedRMSNorm and FusedLayerNorm: normalisation modules on fuseopt's ops."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fuseopt import ops
from fuseopt.modules.base import FusedModule, is_plain


class FusedRMSNorm(FusedModule):
    """Root mean square layer normalisation (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467).

    Stands in for T5LayerNorm, LlamaRMSNorm, GemmaRMSNorm, torch.nn.RMSNorm and their like. They differ in when they
    cast and in an offset on the weight, which are arguments of the op: see `fuseopt.ops.rms_norm`.

    With `autocasts` the source's own forward runs under autocast, whose casts are its own (torch.nn.RMSNorm).

    forward: `hidden_states` [..., hidden] of any floating dtype -> [..., hidden], in the dtype the source would return.
    """

    def _configure(  # type: ignore[override]
        self, *, cast_order: str, eps: str, offset: float = 0.0, autocasts: bool = False, backend: str = "auto"
    ) -> None:
        self.cast_order, self.offset, self.backend = cast_order, offset, backend
        self.autocasts = autocasts
        self._eps_name = eps

    @classmethod
    def not_supported_reasons(cls, source: nn.Module) -> list[str]:
        reasons = []
        shape = getattr(source, "normalized_shape", None)
        if shape is not None and len(shape) != 1:
            reasons.append(f"it normalises over {len(shape)} dimensions; the op normalises over the last one")
        if isinstance(source, nn.RMSNorm) and source.eps is None:
            reasons.append("eps=None leaves the epsilon to torch's choice of dtype; set one")
        return reasons

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        if not is_plain(weight) or (self.autocasts and torch.is_autocast_enabled(hidden_states.device.type)):
            return self._source_forward(hidden_states)
        return ops.rms_norm(
            hidden_states,
            weight,
            getattr(self, self._eps_name),
            offset=self.offset,
            cast_order=self.cast_order,
            backend=self.backend,
        )

    def add(self, input: Tensor, residual: Tensor, backend: str) -> tuple[Tensor, Tensor]:
        """`sum = input + residual` and `forward(sum)` in one pass: (norm, sum); see `fuseopt.ops.add_rms_norm`."""
        if self.autocasts and torch.is_autocast_enabled(input.device.type):
            sum = input + residual
            return self._source_forward(sum), sum
        return ops.add_rms_norm(
            input,
            residual,
            self.weight,
            getattr(self, self._eps_name),
            offset=self.offset,
            cast_order=self.cast_order,
            backend=backend,
        )


class FusedLayerNorm(FusedModule):
    """Layer normalisation (Ba et al. 2016, https://arxiv.org/abs/1607.06450); stands in for torch.nn.LayerNorm.

    forward: `input` [..., *normalized_shape] -> the same shape; dtype as torch.nn.functional.layer_norm, float32 under
    autocast included.
    """

    def _configure(self, *, backend: str = "auto") -> None:  # type: ignore[override]
        self.backend = backend

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if not (is_plain(weight) and is_plain(bias)):
            return self._source_forward(input)
        return ops.layer_norm(input, self.normalized_shape, weight, bias, self.eps, backend=self.backend)

    def add(self, input: Tensor, residual: Tensor, backend: str) -> tuple[Tensor, Tensor]:
        """`sum = input + residual` and `forward(sum)` in one pass: (norm, sum); see `fuseopt.ops.add_layer_norm`.

        For a norm over one dimension.
        """
        return ops.add_layer_norm(input, residual, self.weight, self.bias, self.eps, backend=backend)
