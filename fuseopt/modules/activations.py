"""FusedGELU and FusedSoftmax on fuseopt's ops, and FusedActivation on a compiled region."""

from __future__ import annotations

import inspect

from torch import Tensor, nn

from fuseopt import ops
from fuseopt.modules.base import REFUSALS, FusedModule
from fuseopt.modules.regions import Region
from fuseopt.ops.library import autocast_dtype


class FusedGELU(FusedModule):
    """GELU (Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415), erf or tanh form.

    forward: `input` of any shape and floating dtype -> the same shape and dtype. For other dtypes the source's own
    forward runs, and raises its errors. Exception: transformers' tanh classes that are written in Python (`torch.pow`)
    return float32 under CUDA's autocast, and so does the drop-in for them (`float32_under_autocast`). Without
    `approximate`, the source's attribute of that name decides (torch.nn.GELU has one).
    """

    approximate: str

    @classmethod
    def not_supported_reasons(cls, source: nn.Module) -> list[str]:
        return python_formula_reasons(source)

    def _configure(  # type: ignore[override]
        self, *, approximate: str | None = None, float32_under_autocast: bool = False, backend: str = "auto"
    ) -> None:
        if approximate is not None:
            self.approximate = approximate
        self.float32_under_autocast = float32_under_autocast
        self.backend = backend

    def forward(self, input: Tensor) -> Tensor:
        output_dtype = autocast_dtype(input) if self.float32_under_autocast else None
        try:
            return ops.gelu(input, approximate=self.approximate, output_dtype=output_dtype, backend=self.backend)
        except REFUSALS:
            return self._source_forward(input)


class FusedSoftmax(FusedModule):
    """Softmax over one dimension; stands in for torch.nn.Softmax.

    forward: `input` of any shape and floating dtype -> the same shape and dtype (float32 under autocast, as torch's).
    """

    @classmethod
    def not_supported_reasons(cls, source: nn.Module) -> list[str]:
        return ["it has no dim, so torch guesses one from the input"] if getattr(source, "dim", None) is None else []

    def _configure(self, *, backend: str = "auto") -> None:  # type: ignore[override]
        self.backend = backend

    def forward(self, input: Tensor) -> Tensor:
        try:
            return ops.softmax(input, dim=self.dim, backend=self.backend)
        except REFUSALS:
            return self._source_forward(input)


class FusedActivation(FusedModule):
    """An elementwise activation run as one compiled region; see `fuseopt.modules.regions`.

    forward: `input` of any shape and floating dtype -> the same shape, in the dtype the source would return.
    """

    @classmethod
    def not_supported_reasons(cls, source: nn.Module) -> list[str]:
        return python_formula_reasons(source)

    def _configure(self, *, region: Region, float32_under_autocast: bool = False) -> None:  # type: ignore[override]
        self.region, self.float32_under_autocast = region, float32_under_autocast

    def forward(self, input: Tensor) -> Tensor:
        if not input.is_floating_point():
            return self._source_forward(input)
        dtype = autocast_dtype(input) if self.float32_under_autocast else None
        return self.region(input if dtype is None else input.to(dtype))


def python_formula_reasons(source: nn.Module) -> list[str]:
    """transformers' `gelu_python` and `gelu_python_tanh` promise the formula op by op, roundings included."""
    if inspect.ismethod(getattr(source, "act", None)):
        return ["it was asked for as the formula spelled out in Python, whose roundings it keeps"]
    return []
