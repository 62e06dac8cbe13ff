"""Batches whose every row is one sequence without padding, told to transformers so that a trace knows it too.

In eager mode transformers looks into `attention_mask` and `position_ids`, finds nothing to mask but the future, and
attention runs as a flash kernel. In a trace it cannot look, and makes a mask [batch, 1, length, length] that rules out
flash. No attention mask, and a cache, where transformers expects no packed sequences, say the same without a look.
Without the cache, for versions that make a mask whatever they are told, it is one that `causal_masks` can see through.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from fuseopt.runtime.module_watch import config_of

# Decoders that take `NoCache`, and to which an attention mask of ones says nothing.
# fmt: off
_FAMILIES = (
    "apertus", "arcee", "bitnet", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "gemma3_text", "glm",
    "glm4", "gpt2", "gpt_neox", "granite", "helium", "hunyuan_v1_dense", "jais2", "llama", "ministral",
    "ministral3", "mistral", "nemotron", "olmo", "olmo2", "olmo3", "persimmon", "phi", "phi3", "qwen2", "qwen3",
    "seed_oss", "smollm3", "stablelm", "starcoder2",
)
# fmt: on


class NoCache:
    """A key-value cache that holds nothing; methods as transformers.Cache has them."""

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def get_query_offset(self, *_: Any) -> int:
        return 0

    def get_mask_sizes(self, query: int | Tensor, *_: Any) -> tuple[int, int]:
        return query if isinstance(query, int) else query.shape[0], 0

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return keys, values


@functools.cache
def takes_no_cache() -> bool:
    """Whether transformers leaves out a causal mask in a trace at all; before 5.18 it makes one whatever it is told."""
    return TorchVersion(torch.__version__) >= (2, 13) and TorchVersion(version("transformers")) >= (5, 18)


def arguments(model: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """What to call the forward of `model` with instead, where `given` is a batch of whole rows; else nothing.

    An attention mask is looked at, for which the host waits, as it does in eager mode.
    """
    if getattr(config_of(model), "model_type", None) not in _FAMILIES:
        return {}
    if any(given.get(name) is not None for name in ("position_ids", "encoder_hidden_states")):
        return {}
    mask = given.get("attention_mask")
    if mask is not None and (mask.dim() != 2 or not mask.all()):
        return {}
    # Checkpointed layers warn when they are given a cache, which breaks the graph.
    checkpoints = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if checkpoints or not takes_no_cache():
        return {"attention_mask": None}
    return {"attention_mask": None, "past_key_values": NoCache()}


def without_cache(outputs: Any) -> Any:
    """`outputs` as the class's own forward returns them: some families hand back the cache they were given."""
    if type(outputs) is tuple:
        return tuple(value for value in outputs if not isinstance(value, NoCache))
    if isinstance(outputs, Mapping) and isinstance(outputs.get("past_key_values"), NoCache):
        return type(outputs)(**{name: value for name, value in outputs.items() if not isinstance(value, NoCache)})
    return outputs
