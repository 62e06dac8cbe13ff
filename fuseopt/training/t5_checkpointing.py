"""T5's attentions under gradient checkpointing, kept from what Dynamo gives up on.

Those without a bias of their own then say of their zeros that they take a gradient, which nobody reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn


def attentions(model: nn.Module) -> list[Any]:
    """The attentions in `model` that may do so: T5's, and those written like them."""
    names = {"has_relative_attention_bias", "gradient_checkpointing"}
    return [module for module in model.modules() if names <= module.__dict__.keys()]


@contextlib.contextmanager
def left_out(attentions: Sequence[Any]) -> Iterator[None]:
    """Where the attentions do not do so; checkpointing itself goes by what their blocks are set to."""
    asking = [attention for attention in attentions if attention.gradient_checkpointing]
    for attention in asking:
        attention.gradient_checkpointing = False
    try:
        yield
    finally:
        for attention in asking:
            attention.gradient_checkpointing = True
