"""A stock model, and its fused copy."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

import fuseopt


def stock_and_fused(stock: nn.Module, config: Any, *, strict: bool = True) -> tuple[nn.Module, nn.Module]:
    """`stock` itself, and a copy of it that is initialised."""
    return stock, fuseopt.initialize(copy.deepcopy(stock), config, strict=strict)
