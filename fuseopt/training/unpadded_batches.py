"""Keeps transformers from building an attention mask for batches without padding, so that flash attention can run.

In eager mode transformers reads the values of `attention_mask` and `position_ids`, finds that only the future is
masked, and runs a flash kernel. In a trace it cannot read values, and builds a mask [batch, 1, length, length] that
rules out flash. Two arguments have the same effect without reading values: no `attention_mask`, and a key-value cache,
with which transformers assumes that no row holds several sequences. transformers before 5.18 builds a mask regardless;
then only the attention mask is dropped, and `passes/causal_masks.py` recognises the mask that is built.
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

# Model types that accept `NoCache`, and for which an attention mask of ones is the same as none.
# fmt: off
_FAMILIES = (
    "apertus", "arcee", "bitnet", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "gemma3_text", "glm",
    "glm4", "gpt2", "gpt_neox", "granite", "helium", "hunyuan_v1_dense", "jais2", "llama", "ministral",
    "ministral3", "mistral", "nemotron", "olmo", "olmo2", "olmo3", "persimmon", "phi", "phi3", "qwen2", "qwen3",
    "seed_oss", "smollm3", "stablelm", "starcoder2",
)
# fmt: on


class NoCache:
    """A key-value cache that stores nothing, with the methods of transformers.Cache."""

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def get_query_offset(self, *_: Any) -> int:
        return 0

    def get_mask_sizes(self, query: int | Tensor, *_: Any) -> tuple[int, int]:
        return query if isinstance(query, int) else query.shape[0], 0

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return keys, values


@functools.cache
def can_skip_mask() -> bool:
    """Whether transformers can be kept from building a causal mask in a trace; before 5.18 it cannot."""
    return TorchVersion(torch.__version__) >= (2, 13) and TorchVersion(version("transformers")) >= (5, 18)


def arguments(model: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that replace those of the call if the batch has no padding; {} if it has, or may have.

    Reads the attention mask's values, so the host waits for the GPU, as it does in eager mode.
    """
    if getattr(config_of(model), "model_type", None) not in _FAMILIES:
        return {}
    if any(given.get(name) is not None for name in ("position_ids", "encoder_hidden_states")):
        return {}
    mask = given.get("attention_mask")
    if mask is not None and (mask.dim() != 2 or not mask.all()):
        return {}
    # Checkpointed layers warn about a cache, and the warning breaks the graph.
    checkpoints = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if checkpoints or not can_skip_mask():
        return {"attention_mask": None}
    return {"attention_mask": None, "past_key_values": NoCache()}


def without_cache(outputs: Any) -> Any:
    """`outputs` without the `NoCache`, which some families return."""
    if type(outputs) is tuple:
        return tuple(value for value in outputs if not isinstance(value, NoCache))
    if isinstance(outputs, Mapping) and isinstance(outputs.get("past_key_values"), NoCache):
        return type(outputs)(**{name: value for name, value in outputs.items() if not isinstance(value, NoCache)})
    return outputs
