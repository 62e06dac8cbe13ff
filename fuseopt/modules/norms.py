"""Drop-ins for normalisation on fuseopt's ops: FusedRMSNorm and FusedLayerNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fuseopt import ops
from fuseopt.modules.base import REFUSALS, FusedModule, is_plain_tensor, parameter
from fuseopt.ops.library import is_autocast

# Dtypes of input and weight, in any combination, for which RMSNorm's op rounds as the sources do.
_UP_TO_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)


class FusedRMSNorm(FusedModule):
    """Root mean square layer normalisation (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467).

    Replaces T5LayerNorm, LlamaRMSNorm, GemmaRMSNorm, torch.nn.RMSNorm and similar classes. They differ in cast order
    and in an offset on the weight, which are arguments of `fuseopt.ops.rms_norm`.

    forward: `hidden_states` [..., hidden] of any floating dtype -> [..., hidden], in the dtype the source would return.
    For inputs that the op refuses, the source's own forward runs, and raises its errors.

    Options:
        cast_order, offset: arguments of the op.
        eps: name of the source's attribute.
        autocasts: run the source's own forward under autocast, which has a rule for it (torch.nn.RMSNorm).
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
            reasons.append("with eps=None torch chooses the epsilon by dtype; set one")
        return reasons

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = parameter(self, "weight")
        fits = weight is not None and hidden_states.dtype is weight.dtype and not self.autocasts
        if not is_plain_tensor(weight) or not (fits or self._takes(hidden_states, weight)):
            return self._source_forward(hidden_states)
        try:
            return ops.rms_norm(
                hidden_states,
                weight,
                getattr(self, self._eps_name),
                offset=self.offset,
                cast_order=self.cast_order,
                backend=self.backend,
            )
        except REFUSALS:
            return self._source_forward(hidden_states)

    def add(self, input: Tensor, residual: Tensor, backend: str) -> tuple[Tensor, Tensor]:
        """`sum = input + residual` and `forward(sum)` in one pass: (norm, sum); see `fuseopt.ops.add_rms_norm`."""
        weight = self.weight
        if input.shape != residual.shape or not self._takes(input, weight) or not self._takes(residual, weight):
            sum = input + residual
            return self(sum), sum
        return ops.add_rms_norm(
            input,
            residual,
            weight,
            getattr(self, self._eps_name),
            offset=self.offset,
            cast_order=self.cast_order,
            backend=backend,
        )

    def _takes(self, input: Tensor, weight: Tensor | None) -> bool:
        """Whether the op returns the source's values and dtype for an `input` of valid shape."""
        if self.autocasts and is_autocast(input):
            return False
        if weight is None:  # torch.nn.RMSNorm only; the op cannot check the norm's size without a weight
            return input.shape[-1:] == self.normalized_shape
        if input.dtype is weight.dtype:
            return True
        return input.dtype in _UP_TO_FLOAT32 and weight.dtype in _UP_TO_FLOAT32


class FusedLayerNorm(FusedModule):
    """Layer normalisation (Ba et al. 2016, https://arxiv.org/abs/1607.06450); replaces torch.nn.LayerNorm.

    forward: `input` [..., *normalized_shape] -> the same shape; dtype as torch.nn.functional.layer_norm, which is
    float32 under autocast. If the input's dtype differs from the weight's, or the op refuses the input, the source's
    own forward runs, and raises its errors.
    """

    def _configure(self, *, backend: str = "auto") -> None:  # type: ignore[override]
        self.backend = backend

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = parameter(self, "weight"), parameter(self, "bias")
        if not (is_plain_tensor(weight) and is_plain_tensor(bias)):
            return self._source_forward(input)
        if weight is not None and input.dtype is not weight.dtype and not _is_autocast_on_gpu(input):
            return self._source_forward(input)
        try:
            return ops.layer_norm(input, self.normalized_shape, weight, bias, self.eps, backend=self.backend)
        except REFUSALS:
            return self._source_forward(input)

    def add(self, input: Tensor, residual: Tensor, backend: str) -> tuple[Tensor, Tensor]:
        """`sum = input + residual` and `forward(sum)` in one pass: (norm, sum); see `fuseopt.ops.add_layer_norm`.

        Only for norms over one dimension.
        """
        dtype = torch.promote_types(input.dtype, residual.dtype)
        fits = input.shape == residual.shape and (self.weight is None or dtype is self.weight.dtype)
        if not fits and not _is_autocast_on_gpu(input):
            sum = input + residual
            return self(sum), sum
        return ops.add_layer_norm(input, residual, self.weight, self.bias, self.eps, backend=backend)


def _is_autocast_on_gpu(input: Tensor) -> bool:
    """Whether autocast is on, which on a GPU casts all arguments of a LayerNorm to float32."""
    return input.is_cuda and torch.is_autocast_enabled("cuda")
