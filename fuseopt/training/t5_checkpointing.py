"""Makes T5's attentions traceable by Dynamo under gradient checkpointing.

A T5 attention without a position bias of its own sets `requires_grad` on its zero bias under gradient checkpointing.
Dynamo cannot trace that, and nothing reads the gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn


def attentions(model: nn.Module) -> list[Any]:
    """The attentions in `model` that may do so: those of T5 and of models written like it."""
    names = {"has_relative_attention_bias", "gradient_checkpointing"}
    return [module for module in model.modules() if names <= module.__dict__.keys()]


@contextlib.contextmanager
def without_bias_gradients(attentions: Sequence[Any]) -> Iterator[None]:
    """Clears `gradient_checkpointing` on the attentions; checkpointing itself follows the blocks' attribute."""
    asking = [attention for attention in attentions if attention.gradient_checkpointing]
    for attention in asking:
        attention.gradient_checkpointing = False
    try:
        yield
    finally:
        for attention in asking:
            attention.gradient_checkpointing = True
