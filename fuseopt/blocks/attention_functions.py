"""transformers' attention functions, looked up without importing transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fuseopt.modules.base import source_class


def attention_function(module: nn.Module, config: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function that `config._attn_implementation` names, for a module of the model."""
    modeling: Any = sys.modules[source_class(module).__module__]
    return modeling.ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, modeling.eager_attention_forward)


def sdpa_attention_function() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """transformers' function for "sdpa"."""
    return sys.modules["transformers.integrations.sdpa_attention"].sdpa_attention_forward
