"""Which tier serves a call of generate(), decided before anything runs, on exact types, and the reason."""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from fuseopt.generation.families.step_interface import DecodeStep
from fuseopt.generation.hf.caching_proxy import RememberingModel
from fuseopt.modules.base import full_name
from fuseopt.ops.library import Observer


class Tier(enum.Enum):
    """How a call was served; the value is how reports name it."""

    DEVICE_LOOP = "T0"
    FAST_FORWARD = "T1"
    STOCK = "T2"


@dataclass(frozen=True)
class Call:
    """What is kept of a call of generate().

    Attributes:
        tier: which loop ran.
        reason: why not a faster one; empty for the fastest.
        steps: "graph" where steps were captured in a CUDA graph, "eager" where they were launched one operation at a
            time, "" in stock transformers.
        note: what else happened, such as a capture that ran out of memory.
    """

    tier: Tier
    reason: str = ""
    steps: str = ""
    note: str = ""

    def __str__(self) -> str:
        names = {Tier.DEVICE_LOOP: "device loop", Tier.FAST_FORWARD: "fast forward", Tier.STOCK: "stock transformers"}
        details = "; ".join(filter(None, (self.steps and f"{self.steps} steps", self.reason, self.note)))
        return f"{self.tier.value} {names[self.tier]}" + (f": {details}" if details else "")


# Arguments of generate(), or settings of a GenerationConfig, that choose another decoding method than the loop's own.
_OTHER_METHODS = {
    "prompt_lookup_num_tokens": "assisted decoding",
    "assistant_early_exit": "assisted decoding",
    "use_mtp": "assisted decoding",
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa decoding",
    "constraints": "constrained beam search",
    "force_words_ids": "constrained beam search",
}
# What the fast tiers do in place of the model, or take from its class.
_METHODS = (
    "prepare_inputs_for_generation",
    "_prefill",
    "_update_model_kwargs_for_generation",
    "_reorder_cache",
)
# What transformers passes prompts through; of the last two, each version has one.
_PREPARATIONS = (
    "get_encoder",
    "_prepare_model_inputs",
    "_prepare_position_ids_for_generation",
    "_prepare_decoder_input_ids_for_generation",
    "_expand_inputs_for_generation",
    "_prepare_encoder_decoder_kwargs_for_generation",
    "_maybe_prepare_encoder_kwargs_for_generation",
)
_NOT_AHEAD = ("prefill_chunk_size", "token_healing")
_COPIES = ("num_beams", "num_return_sequences")
_KNOWN_AHEAD = frozenset(("input_ids", "attention_mask", "stop_strings", "tokenizer"))
_KNOWN_TO_ENCODE = _KNOWN_AHEAD | {"past_key_values"}
_ATTENTIONS = ("eager", "sdpa")
_MODEL_KWARGS = frozenset(
    (
        "attention_mask",
        "decoder_attention_mask",
        "encoder_outputs",
        "inputs_embeds",
        "logits_to_keep",
        "past_key_values",
        "position_ids",
        "use_cache",
    )
)
_TOKEN_DTYPES = (torch.int64, torch.int32)  # that an embedding looks up
# Of what has a row for each of the prompt's; positions may be the same in all.
_DIMENSIONS = {"attention_mask": 2, "decoder_attention_mask": 2, "position_ids": 2, "inputs_embeds": 3}


def argument_reasons(model: nn.Module, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Why generate() has to be transformers' own whatever its preparation comes to, from the arguments as given."""
    setting = functools.partial(setting_of, model, arguments)
    if arguments.get("custom_generate") is not None:
        yield "a custom_generate of the caller's decodes"
    if arguments.get("assistant_model") is not None:
        yield "assisted decoding runs another model beside this one"
    for name, method in _OTHER_METHODS.items():
        if setting(name) is not None and setting(name) is not False:
            yield f"{name} asks for {method}"
    if setting("num_beam_groups") not in (None, 1):
        yield "num_beam_groups asks for group beam search"
    if arguments.get("streamer") is not None and setting("num_beams") not in (None, 1):
        yield "beam search takes no streamer"
    if setting("stop_strings") is not None and not RememberingModel.METHODS.isdisjoint(vars(model)):
        yield "methods of its own prepare the call, and may want the tokenizer of stop_strings"
    if arguments.get("synced_gpus"):
        yield "synced_gpus keeps several processes in step"
    if setting("cache_implementation") is not None:
        yield "a cache_implementation is asked for by name"
    if torch.compiler.is_compiling():
        yield "torch.compile is tracing the call"
    if _has_modes():
        yield "a torch dispatch or function mode is active, which has to see every operation"
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        yield "several processes take part (torch.distributed)"


def model_reasons(model: nn.Module, step_class: type[DecodeStep]) -> Iterator[str]:
    """Why `step_class` would not compute what the model's forward does, but for what a survey of its modules finds."""
    if full_name(type(model)) != step_class.model_class:
        yield f"{type(model).__name__} is not exactly {step_class.model_class.rpartition('.')[2]}"
        return
    yield from step_class.not_supported_reasons(model)
    for name in _METHODS:
        if name in model.__dict__:
            yield f"its {name} has been replaced"
    attention = model.config._attn_implementation
    if attention not in _ATTENTIONS:
        yield f"attention is set to {attention!r}"
    if model._compiled_call_impl is not None:
        yield "it is compiled by model.compile()"
    if nn.modules.module._has_any_global_hook():
        yield "hooks are registered on every module"


def ahead_reasons(
    model: nn.Module, device: torch.device, arguments: Mapping[str, Any], names: Iterable[str]
) -> Iterator[str]:
    """Why the prompt, or the encoder of one that has it, cannot run before transformers has prepared the call.

    Args:
        device: the model's, which by itself looks for that through its modules.
        arguments: of generate(), as given.
        names: those of them that it passes on to whom they may concern.
    """
    encodes = model.config.is_encoder_decoder
    inputs = [arguments[name] for name in ("inputs", "input_ids") if arguments.get(name) is not None]
    if model.config._attn_implementation != "sdpa":
        yield f"attention is set to {model.config._attn_implementation!r}"
    if len(inputs) != 1 or not is_token_ids(inputs[0], device):
        yield "the prompt is not one tensor of token ids on the model's device"
        return
    mask = arguments.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and (mask.shape, mask.device) == (inputs[0].shape, device)):
        yield "the attention mask is not of the prompt's shape, or elsewhere"
    for name in ("output_attentions", "output_hidden_states", *(() if encodes else _NOT_AHEAD)):
        if setting_of(model, arguments, name):
            yield f"{name} is asked for"
    for name in () if encodes else _COPIES:
        if (setting_of(model, arguments, name) or 1) != 1:
            yield f"{name} multiplies the prompts"
    known = _KNOWN_TO_ENCODE if encodes else _KNOWN_AHEAD
    for name in names:
        decodes = name in known or hasattr(model.generation_config, name) or (encodes and name.startswith("decoder_"))
        if not decodes and arguments[name] is not None:
            yield f"{name} may be meant for it"
    for name in _PREPARATIONS:
        if name in model.__dict__:
            yield f"the model's {name} has been replaced"


def call_reasons(
    config: Any, input_ids: Tensor, criteria: Sequence[Any], model_kwargs: Mapping[str, Any]
) -> Iterator[str]:
    """Why the prepared arguments of a call need transformers' own decoding method."""
    if config.output_attentions:
        yield "output_attentions is asked for"
    if config.output_hidden_states:
        yield "output_hidden_states is asked for"
    if config.is_assistant:
        yield "the model assists another one"
    if config.num_beams is not None and config.num_beams < 1:
        yield f"num_beams is {config.num_beams}"
    if not config.use_cache:
        yield "use_cache is off"
    elif not _is_plain_cache(model_kwargs.get("past_key_values"), model_kwargs.get("encoder_outputs") is not None):
        yield f"the cache is a {type(model_kwargs.get('past_key_values')).__name__} of its own kind"
    for name, value in model_kwargs.items():
        if name not in _MODEL_KWARGS and value is not None:
            yield f"{name} is passed to the model's forward"
    if not isinstance(model_kwargs.get("logits_to_keep", 1), int):
        yield "logits_to_keep is not one number"
    rows = input_ids.shape[0]
    for name, dimensions in _DIMENSIONS.items():
        value = model_kwargs.get(name)
        if value is not None and value.dim() != dimensions:
            yield f"{name} has {value.dim()} dimensions"
        elif value is not None and value.shape[0] != rows and (name, value.shape[0]) != ("position_ids", 1):
            yield f"{name} has {value.shape[0]} rows, the prompt {rows}"
    if length_limit(criteria) is None:
        yield "no maximal length, in whole tokens, bounds the cache"
    if input_ids.dtype not in _TOKEN_DTYPES:
        yield f"the tokens are {input_ids.dtype}"


def device_loop_reasons(
    config: Any, processors: Sequence[Any], device_processors: Sequence[Any], criteria: Sequence[Any], streamer: Any
) -> Iterator[str]:
    """Why transformers' own decoding method has to run on the host between steps."""
    if streamer is not None:
        yield "a streamer wants every token in time"
    for processor, on_device in zip(processors, device_processors, strict=True):
        if on_device is None:
            yield f"{type(processor).__name__} runs on the host"
    stops = [criterion for criterion in criteria if type(criterion) is not MaxLengthCriteria]
    for criterion in stops:
        if type(criterion) is not EosTokenCriteria:
            yield f"{type(criterion).__name__} runs on the host"
    if len(stops) > 1:
        yield "there are several criteria beside the length"
    pad = config._pad_token_tensor
    if stops and pad is None and (config.num_beams or 1) == 1:
        yield "there is no pad token"
    if pad is not None and pad.dim():
        yield "pad_token_id is not one number"


def length_limit(criteria: Sequence[Any]) -> int | None:
    """The length at which the sequences end at the latest, or None when no criterion says in whole tokens."""
    limits = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
    try:
        return min(map(operator.index, limits), default=None)
    except TypeError:
        return None


def setting_of(model: nn.Module, arguments: Mapping[str, Any], name: str) -> Any:
    """As given to generate(), or as its config or the model's has it."""
    if name in arguments:
        return arguments[name]
    value = getattr(arguments.get("generation_config"), name, None)
    return getattr(getattr(model, "generation_config", None), name, None) if value is None else value


def runs_unseen() -> bool:
    """Whether nothing looks on at what a call does before it is known who serves it."""
    return not torch.compiler.is_compiling() and not _has_modes()


def is_token_ids(value: Any, device: torch.device) -> bool:
    """Whether `value` is a prompt [rows, length] that can run ahead on this device."""
    return (
        isinstance(value, Tensor)
        and value.dtype is torch.int64
        and value.dim() == 2
        and value.device == device
        and value.numel() > 0
    )


def _has_modes() -> bool:
    dispatch_modes = _get_current_dispatch_mode_stack()
    function_modes = torch.overrides._get_current_function_mode_stack()
    # torch.set_default_device is a mode too, but only one that adds a device to factory functions.
    return not all(isinstance(mode, Observer) for mode in dispatch_modes) or any(
        type(mode) is not DeviceContext for mode in function_modes
    )


def _is_plain_cache(cache: Any, encodes: bool = False) -> bool:
    if encodes:
        return type(cache) is EncoderDecoderCache and all(
            map(_is_plain_cache, (cache.self_attention_cache, cache.cross_attention_cache))
        )
    return (
        type(cache) is DynamicCache
        and not cache.offloading
        and all(type(layer) is DynamicLayer for layer in cache.layers)
    )
