"""What `fuseopt.check` finds, and how close to float64 a result must be."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuseopt.errors import shown
from fuseopt.extend.signature import kind_of

# A kernel may be this many times as far from float64 as the reference in the same dtype is, and some roundings beside.
# In half types these are few: 16 roundings of bfloat16 would be 12% of a value.
_LENIENCE, _ROUNDINGS, _HALF_ROUNDINGS = 4, 16, 2

# Frames of these packages, and of code without a file, are not the user's.
_TORCH = Path(torch.__file__).parent
_OTHERS = ("<", *map(str, (Path(__file__).parents[1], _TORCH, _TORCH.parent / "triton")))


@dataclass(frozen=True)
class Row:
    """One check of one backend; its `status` is "ok", "FAIL", or "-" where it does not apply, as `detail` says."""

    backend: str
    check: str
    status: str
    detail: str = ""


@dataclass(frozen=True)
class CheckReport:
    """What `check` found. `print(report)` is a table that ends with what failed; as a bool, it is `ok`."""

    name: str
    device: str
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[Row, ...]:
        """The rows that failed."""
        return tuple(row for row in self.rows if row.status == "FAIL")

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        widths = [max(len(getattr(row, field)) for row in self.rows) for field in ("backend", "check", "status")]
        lines = [
            "  ".join(
                text.ljust(width) for text, width in zip((row.backend, row.check, row.status), widths, strict=True)
            )
            + f"  {row.detail}"
            for row in sorted(self.rows, key=lambda row: row.status == "FAIL")
        ]
        verdict = "ok" if self.ok else f"{len(self.failures)} of {len(self.rows)} checks FAIL"
        return "\n".join([f"{self.name} on {self.device}: {verdict}", *(line.rstrip() for line in lines)])


class Wrong(Exception):
    """A check found the op wrong; the message says how."""


def check_close(found: Tensor, reference: Tensor, exact: Tensor, what: str) -> None:
    """Raise Wrong where `found` is further from float64 than the reference in the same dtype explains."""
    if found.shape != reference.shape:
        raise Wrong(f"{what} has the shape {tuple(found.shape)}, the function's has {tuple(reference.shape)}")
    if not found.is_floating_point():
        if not torch.equal(found, reference):
            raise Wrong(f"{what} differs from the function's")
        return
    given, own, exact = found.detach().double().cpu(), reference.detach().double().cpu(), exact.detach().double()
    counts = own.isfinite() & exact.isfinite()
    if not torch.equal(given.isfinite() | ~counts, torch.ones_like(counts)):
        raise Wrong(f"{what} is not finite where the function's is")
    if not counts.any():
        return
    error, own_error = (given - exact).abs()[counts], (own - exact).abs()[counts]
    eps = torch.finfo(found.dtype).eps
    roundings = _ROUNDINGS if found.element_size() >= 4 else _HALF_ROUNDINGS
    allowed = _LENIENCE * own_error.max() + roundings * eps * exact.abs()[counts].clamp_min(eps) + eps * eps
    worst = (error / allowed).argmax()
    if error[worst] > allowed[worst]:
        place = counts.nonzero()[worst].tolist()
        raise Wrong(
            f"{what} is off by {error[worst]:.2e} at {place}, where {allowed[worst]:.2e} is allowed "
            f"(the function in this dtype: {own_error.max():.2e})"
        )


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether the values are the same, NaN too."""
    return torch.equal(one.detach().nan_to_num(), other.nan_to_num())


def with_strides(tensor: Tensor) -> str:
    """Dtype, shape and strides."""
    return f"{kind_of(tensor)} with strides {tensor.stride()}"


def described(arguments: Iterable[Any]) -> str:
    """Arguments in short: of a tensor its shape, and its strides where it is not contiguous."""
    return ", ".join(map(_described, arguments))


def _described(argument: Any) -> str:
    if isinstance(argument, (list, tuple)):
        return f"[{described(argument)}]"
    if not isinstance(argument, Tensor):
        return shown(argument)
    return f"{tuple(argument.shape)}" + ("" if argument.is_contiguous() else f" with strides {argument.stride()}")


def place_of(error: BaseException) -> str:
    """The file and line, in parentheses, of the user's code that an error comes from; "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_OTHERS)]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


def first_line(error: object) -> str:
    """The first line of an error that has something in it, in short."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
