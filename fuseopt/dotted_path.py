"""Objects named by a dotted path, so that a table can name code without importing it."""

from __future__ import annotations

import importlib
from typing import Any


def imported(path: str) -> Any:
    """The object at a dotted path, such as "fuseopt.modules.FusedRMSNorm". Its module is imported on first use.

    Raises:
        ImportError: there is no such module, or the path names none.
        AttributeError: the module has no such attribute.
    """
    module, _, name = path.rpartition(".")
    if not module:
        raise ImportError(f"{path!r} is not a dotted path")
    return getattr(importlib.import_module(module), name)
