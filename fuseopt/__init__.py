"""fuseopt: one line makes a Hugging Face model fast, and one line undoes it to the bit.

model = fuseopt.initialize(model, {"kernel_fusion": {"enable": True, "custom_cuda_kernels": ["FusedRMSNorm"]}})
print(fuseopt.report(model))
fuseopt.restore(model)

`api` has these functions. Names that need torch are imported when they are first used, so that the command line answers
`--help` and wrong arguments at once.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fuseopt import moved_modules
from fuseopt._version import __version__

if TYPE_CHECKING:
    from fuseopt.api import Config, Plan, Report, Verification, fused, initialize, plan, report, restore, verify
    from fuseopt.extend import (
        FusedModule,
        Op,
        check,
        elementwise,
        op,
        register_decode_step,
        replaces,
        replaces_function,
        unregister,
    )

__all__ = [
    "Config",
    "FusedModule",
    "Op",
    "Plan",
    "Report",
    "Verification",
    "__version__",
    "check",
    "elementwise",
    "fused",
    "initialize",
    "op",
    "plan",
    "register_decode_step",
    "replaces",
    "replaces_function",
    "report",
    "restore",
    "unregister",
    "verify",
]

_OF_EXTEND = (
    "FusedModule",
    "Op",
    "check",
    "elementwise",
    "op",
    "register_decode_step",
    "replaces",
    "replaces_function",
    "unregister",
)
_OF_API = ("Config", "Plan", "Report", "Verification", "fused", "initialize", "plan", "report", "restore", "verify")


class _Package(ModuleType):
    """Keeps the functions `plan`, `report` and `verify` when the modules of the same names are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OF_API or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


# Hidden from type checkers, for which any misspelt name would exist.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _OF_EXTEND:
            return getattr(importlib.import_module("fuseopt.extend"), name)
        if name in _OF_API:
            return globals().setdefault(name, getattr(importlib.import_module("fuseopt.api"), name))
        if not name.startswith("_") and importlib.util.find_spec(f"fuseopt.{name}") is not None:
            return importlib.import_module(f"fuseopt.{name}")
        raise AttributeError(f"module 'fuseopt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
moved_modules.install()
