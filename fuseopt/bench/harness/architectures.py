"""Models with random weights or none: architectures by name, or the config.json of a folder or model id."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from fuseopt.bench.harness.model_names import config_folder
from fuseopt.bench.harness.sizes import ARCHITECTURES
from fuseopt.errors import ConfigError

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"t5": {"decoder_start_token_id": 0}}
# Names of dropout rates in the configs of the families.
_DROPOUT_RATES = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate", "attention_dropout", "hidden_dropout")


def dropout_rates(source: str, rate: float) -> dict[str, float]:
    """Overrides for `load_config` and `random_model` that set every dropout rate of the model to `rate`."""
    config = load_config(source)
    return {name: rate for name in _DROPOUT_RATES if hasattr(config, name)}


def load_config(source: str, **overrides: Any) -> PreTrainedConfig:
    """The transformers config of an architecture by name, of a folder with a config.json, or of a model id.

    The config of an id, "owner/name", must be in transformers' cache: nothing is downloaded.

    Raises:
        ConfigError: it is none of these, and the message names the nearest name; or transformers cannot read it.
    """
    if source in ARCHITECTURES:
        model_type, sizes = ARCHITECTURES[source]
        return AutoConfig.for_model(model_type, **{**_DEFAULTS.get(model_type, {}), **sizes, **overrides})
    folder = config_folder(source)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, **overrides)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the config.json of {source}: transformers cannot read it: {error}") from error


def weightless(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    """A model to plan for: its parameters are on `device` but take no memory.

    Raises:
        ConfigError: transformers has no model class for it.
    """
    with torch.device("meta"):
        model = _build(config, config.dtype)

    def placeholder(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty((), dtype=tensor.dtype, device=device).expand(tensor.shape)

    return model._apply(placeholder)


def random_model(name: str, device: torch.device, dtype: torch.dtype, **overrides: Any) -> PreTrainedModel:
    """An architecture by name with random weights, in eval mode. Without an EOS token, generate() never ends early."""
    config = load_config(name, **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, **overrides})
    with torch.device(device), no_init_weights():
        model = _build(config, dtype)
    model.tie_weights()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0 if path.endswith("weight") else 0.0)
    return model.eval()


def random_inputs(model: PreTrainedModel, batch: int, length: int, new: int | None) -> dict[str, torch.Tensor]:
    """Random token ids [batch, length], the same in every run, and a mask of ones.

    Raises:
        ConfigError: the model's table of positions ends before `length` and `new` tokens.
    """
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tables = {module.num_embeddings for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    # The tables of OPT and BART have two rows before the first position.
    if isinstance(most, int) and tables & {most, most + 2} and length + (new or 0) > most:
        asked = f"{length} tokens" + (f" and {new} new ones" if new else "")
        raise ConfigError(f"--length: {asked} are more than the {most} positions of {type(model).__name__}")
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(1, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0)).to(model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def has_weights(folder: Path) -> bool:
    """Whether a folder has files of weights; loads none."""
    return any(found for end in _WEIGHTS for found in folder.glob(end))


def saved_model(source: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel | None:
    """The model of a folder or a model id in transformers' cache with its weights, in eval mode; None if it has none.

    Raises:
        ConfigError: as `load_config`.
    """
    config = load_config(source)
    folder = Path(config._name_or_path)
    if not config._name_or_path or not has_weights(folder):
        return None
    name = next((name for name in config.architectures or () if hasattr(transformers, name)), None)
    model_class = getattr(transformers, name) if name else _auto_class(config)
    try:
        return model_class.from_pretrained(folder, dtype=dtype, local_files_only=True).to(device).eval()
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"the weights of {source} cannot be loaded: {error}; download them again") from error


def _auto_class(config: PreTrainedConfig) -> Any:
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def _build(config: PreTrainedConfig, dtype: torch.dtype | None) -> PreTrainedModel:
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)._from_config(config, dtype=dtype)
    try:
        return _auto_class(config).from_config(config, dtype=dtype)
    except ValueError as error:
        raise ConfigError(f"config.json names no class of transformers under 'architectures': {error}") from error
