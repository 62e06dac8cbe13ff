"""LoRA adapters of random weights for benchmarks, by peft."""

from __future__ import annotations

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from fuseopt.errors import ConfigError


def with_lora(model: nn.Module, rank: int, *, merged: bool) -> nn.Module:
    """The model with an adapter on each linear layer but the head, or with these merged into its weights.

    Raises:
        ConfigError: peft is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError("LoRA adapters need peft: pip install peft") from error
    head = model.get_output_embeddings()  # type: ignore[operator]
    modules = [(path, module) for path, module in model.named_modules() if module is not head]
    targets = [path for path, module in modules if isinstance(module, (nn.Linear, Conv1D))]
    is_conv1d = any(isinstance(module, Conv1D) for _, module in modules)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=rank, target_modules=targets, init_lora_weights=False, fan_in_fan_out=is_conv1d)
    adapted = peft.LoraModel(model, config, "default").to(next(model.parameters()).dtype).eval()
    return adapted.merge_and_unload() if merged else model
