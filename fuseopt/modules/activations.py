"""Drop-ins for activations: FusedGELU and FusedSoftmax on fuseopt's ops, FusedActivation on a compiled function."""

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
    forward runs, and raises its errors.

    Options:
        approximate: "none" or "tanh"; by default the source's attribute of that name (torch.nn.GELU has one).
        float32_under_autocast: return float32 under CUDA's autocast, as transformers' tanh classes written in Python do
            (`torch.pow`).
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
        return (
            ["it has no dim, so torch picks one by the input's shape"] if getattr(source, "dim", None) is None else []
        )

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
    """Refuses transformers' `gelu_python` and `gelu_python_tanh`, which promise the rounding of each operation."""
    if inspect.ismethod(getattr(source, "act", None)):
        return ["the config asks for the formula in Python, with its roundings"]
    return []
