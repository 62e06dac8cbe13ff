"""Which tier serves a call of generate(), and why: decided on exact types, before anything observable runs."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache
from transformers.generation import utils
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from fuseopt.generation.engine.state import Sizes
from fuseopt.generation.families.step_interface import DecodeStep
from fuseopt.generation.hf.caching_proxy import CachingModelProxy
from fuseopt.generation.prepared_call import PreparedCall, length_limit
from fuseopt.modules.base import full_name
from fuseopt.ops.library import Observer


class Tier(enum.Enum):
    """How a call was served; the value is its name in reports."""

    DEVICE_LOOP = "T0"
    FAST_FORWARD = "T1"
    STOCK = "T2"


@dataclass(frozen=True)
class CallRecord:
    """How one call of generate() was served, for the report.

    Attributes:
        tier: which loop ran.
        reason: why not a faster one; empty for the fastest.
        steps: "graph" if steps were replayed from a CUDA graph, "recorded" if they were replayed on a CPU without
            Python, "eager" if their kernels were launched one by one, "" in stock transformers.
        note: what else happened, such as a capture that ran out of memory.
        cache: size of the static cache; "" in stock transformers.
        cache_dtype: how keys and values were quantised, "int8" or "fp8"; "" if they were not.
        unquantised_prompt: the prompt ran with unquantised weights, though steps read quantised ones.
    """

    tier: Tier
    reason: str = ""
    steps: str = ""
    note: str = ""
    cache: str = ""
    cache_dtype: str = ""
    unquantised_prompt: bool = False

    def __str__(self) -> str:
        names = {Tier.DEVICE_LOOP: "device loop", Tier.FAST_FORWARD: "fast forward", Tier.STOCK: "stock transformers"}
        details = "; ".join(filter(None, (self.steps and f"{self.steps} steps", self.reason, self.note)))
        return f"{self.tier.value} {names[self.tier]}" + (f": {details}" if details else "")


# Arguments or settings of generate() that select a decoding method which the loop does not implement.
_OTHER_METHODS = {
    "prompt_lookup_num_tokens": "assisted decoding",
    "assistant_early_exit": "assisted decoding",
    "use_mtp": "assisted decoding",
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa decoding",
    "constraints": "constrained beam search",
    "force_words_ids": "constrained beam search",
}
# Methods of the model that the fast tiers replace, or call on its class.
_METHODS = (
    "prepare_inputs_for_generation",
    "_prefill",
    "_update_model_kwargs_for_generation",
    "_reorder_cache",
)
# Methods that transformers prepares prompts with. Each version has one of the last two.
_PREPARATIONS = (
    "get_encoder",
    "_prepare_model_inputs",
    "_prepare_position_ids_for_generation",
    "_prepare_decoder_input_ids_for_generation",
    "_expand_inputs_for_generation",
    "_prepare_encoder_decoder_kwargs_for_generation",
    "_maybe_prepare_encoder_kwargs_for_generation",
)
# Names of `cache_implementation` for the cache that transformers makes without one.
_PLAIN_CACHES = (None, "dynamic")
_NOT_EARLY = ("prefill_chunk_size", "token_healing")
_COPIES = ("num_beams", "num_return_sequences")
# A Seq2SeqTrainer passes labels, which transformers drops before the forward.
_KNOWN_EARLY = frozenset(("input_ids", "attention_mask", "labels", "logits_to_keep", "stop_strings", "tokenizer"))
_KNOWN_TO_ENCODE = _KNOWN_EARLY | {"past_key_values"}
_ATTENTIONS = ("eager", "sdpa")
_MODEL_KWARGS = frozenset(
    (
        "attention_mask",
        "decoder_attention_mask",
        "encoder_outputs",
        "inputs_embeds",
        "labels",
        "logits_to_keep",
        "past_key_values",
        "position_ids",
        "use_cache",
    )
)
_TOKEN_DTYPES = (torch.int64, torch.int32)  # that nn.Embedding accepts
# Dimensions of the arguments that have one row per prompt. Positions may have a single row for all.
_DIMENSIONS = {"attention_mask": 2, "decoder_attention_mask": 2, "position_ids": 2, "inputs_embeds": 3}


def argument_reasons(model: nn.Module, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Reasons for T2 that the caller's arguments tell, before transformers prepares them."""
    setting = functools.partial(setting_of, model, arguments)
    if arguments.get("custom_generate") is not None:
        yield "custom_generate replaces the decoding method"
    if arguments.get("assistant_model") is not None:
        yield "assistant_model asks for assisted decoding"
    for name, method in _OTHER_METHODS.items():
        if setting(name) is not None and setting(name) is not False:
            yield f"{name} asks for {method}"
    if setting("num_beam_groups") not in (None, 1):
        yield "num_beam_groups asks for group beam search"
    if arguments.get("streamer") is not None and setting("num_beams") not in (None, 1):
        yield "beam search takes no streamer"
    if setting("stop_strings") is not None and not CachingModelProxy.stands_in_for(model):
        yield "the model overrides preparation methods, which may need the tokenizer of stop_strings"
    if arguments.get("synced_gpus"):
        yield "synced_gpus synchronises several processes"
    if setting("cache_implementation") not in _PLAIN_CACHES:
        yield "cache_implementation selects a class of caches"
    if torch.compiler.is_compiling():
        yield "torch.compile is tracing the call"
    if _has_modes():
        yield "a torch dispatch or function mode is active and has to see every operation"
    if _is_sharded(model, arguments.get("synced_gpus")):
        yield "FSDP or DeepSpeed ZeRO-3 shards the model over several processes"


def model_reasons(model: nn.Module, step_class: type[DecodeStep]) -> Iterator[str]:
    """Reasons for T2 in the model's own attributes; the `fingerprint` of its modules may find more."""
    if full_name(type(model)) != step_class.model_class:
        yield f"{type(model).__name__} is not exactly {step_class.model_class.rpartition('.')[2]}"
        return
    yield from step_class.not_supported_reasons(model)
    for name in _METHODS:
        if name in model.__dict__:
            yield f"the model's {name} has been replaced"
    attention = model.config._attn_implementation
    if attention not in _ATTENTIONS:
        yield f"attn_implementation is {attention!r}"
    if model._compiled_call_impl is not None:
        yield "the model is compiled by model.compile()"
    if nn.modules.module._has_any_global_hook():
        yield "global module hooks are registered"


def early_prefill_reasons(
    model: nn.Module, device: torch.device, arguments: Mapping[str, Any], names: Iterable[str]
) -> Iterator[str]:
    """Reasons against running the prompt, or its encoder if there is one, before transformers prepares the call.

    Args:
        device: of the model, since `model.device` searches the modules.
        arguments: of generate(), by name.
        names: those of them that are not parameters of generate().
    """
    encodes = model.config.is_encoder_decoder
    inputs = [arguments[name] for name in ("inputs", "input_ids") if arguments.get(name) is not None]
    if model.config._attn_implementation != "sdpa":
        yield f"attn_implementation is {model.config._attn_implementation!r}"
    if len(inputs) != 1 or not is_token_ids(inputs[0], device):
        yield "the prompt is not one tensor of token ids on the model's device"
        return
    mask = arguments.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and (mask.shape, mask.device) == (inputs[0].shape, device)):
        yield "the attention mask does not have the prompt's shape, or is on another device"
    for name in ("output_attentions", "output_hidden_states", *(() if encodes else _NOT_EARLY)):
        if setting_of(model, arguments, name):
            yield f"{name} is set"
    for name in () if encodes else _COPIES:
        if (setting_of(model, arguments, name) or 1) != 1:
            yield f"{name} repeats the prompts"
    known = _KNOWN_TO_ENCODE if encodes else _KNOWN_EARLY
    for name in names:
        decodes = name in known or hasattr(model.generation_config, name) or (encodes and name.startswith("decoder_"))
        if not decodes and arguments[name] is not None:
            yield f"{name} may be an argument of its forward"
    for name in _PREPARATIONS:
        if name in model.__dict__:
            yield f"the model's {name} has been replaced"


def call_reasons(
    config: Any, input_ids: Tensor, criteria: Sequence[Any], model_kwargs: Mapping[str, Any]
) -> Iterator[str]:
    """Reasons for T2 in the arguments that transformers prepared."""
    if config.output_attentions:
        yield "output_attentions is set"
    if config.output_hidden_states:
        yield "output_hidden_states is set"
    if config.is_assistant:
        yield "is_assistant is set"
    if config.num_beams is not None and config.num_beams < 1:
        yield f"num_beams is {config.num_beams}"
    if config.use_cache is False:
        yield from _uncached_reasons(config, input_ids, model_kwargs)
    elif not config.use_cache:
        yield f"use_cache is {config.use_cache}"
    elif not _is_plain_cache(model_kwargs.get("past_key_values"), model_kwargs.get("encoder_outputs") is not None):
        kind = type(model_kwargs.get("past_key_values")).__name__
        yield f"the cache is a {kind}, not the one that transformers makes"
    for name, value in model_kwargs.items():
        if name not in _MODEL_KWARGS and value is not None:
            yield f"{name} is passed to the model's forward"
    if not isinstance(model_kwargs.get("logits_to_keep", 1), int):
        yield "logits_to_keep is not an int"
    rows = input_ids.shape[0]
    for name, dimensions in _DIMENSIONS.items():
        value = model_kwargs.get(name)
        if value is not None and value.dim() != dimensions:
            yield f"{name} has {value.dim()} dimensions"
        elif value is not None and value.shape[0] != rows and (name, value.shape[0]) != ("position_ids", 1):
            yield f"{name} has {value.shape[0]} rows, the prompt {rows}"
    if length_limit(criteria) is None:
        yield "no integer maximal length bounds the cache"
    if input_ids.dtype not in _TOKEN_DTYPES:
        yield f"input_ids are {input_ids.dtype}"


def size_reasons(
    prepared: PreparedCall,
    sizes: Sizes,
    step: DecodeStep,
    max_batch: int,
    max_length: int | None,
    positions: Tensor | None = None,
) -> Iterator[str]:
    """Reasons for T2 in the sizes of a prepared call.

    Args:
        sizes: of `prepared`.
        step: the decode step.
        max_batch, max_length: rows, and slots of the cache, up to which the fast tiers serve; None for any number.
        positions: `position_ids` of the caller's, whose values are read; transformers' own are all within the cache.
    """
    longest, device = step.max_length, prepared.input_ids.device
    if device != step.shape.device:
        yield f"the inputs are on {device}, the model on {step.shape.device}"
    if sizes.rows > max_batch:
        yield f"{sizes.rows} rows are more than max_batch, {max_batch}"
    if max_length is not None and max(sizes.capacity, sizes.cross_capacity) > max_length:
        yield f"{max(sizes.capacity, sizes.cross_capacity)} cache slots are more than max_length, {max_length}"
    if longest is not None and sizes.capacity > longest:
        yield f"{sizes.capacity} tokens are more than the model's {longest} positions"
    if not sizes.rows:
        yield "the batch is empty"
    encoded = prepared.model_kwargs.get("encoder_outputs")
    if encoded is not None and encoded[0].shape[0] != sizes.rows:
        yield f"the encoder's output has {encoded[0].shape[0]} rows, the decoder {sizes.rows}"
    cache = prepared.decoder_cache
    if 0 < len(cache.layers) < step.shape.layers:
        yield f"the cache has {len(cache.layers)} layers, the decoder {step.shape.layers}"
    for layer, window in zip(cache.layers, step.windows, strict=False):
        if type(layer) is DynamicSlidingWindowLayer and (
            layer.sliding_window != window or getattr(layer, "record_past", False)
        ):
            yield f"a layer of the cache keeps {layer.sliding_window} slots, attention sees {window or 'all'}"
            return
    if positions is not None and step.bounds_positions and positions.numel():
        (length, limit), slots = prepared.bounds, sizes.rounded_up().capacity
        first, last = int(positions.min()), int(positions.max()) + max(0, limit - length)
        if first < 0 or last >= slots:
            yield f"positions {first} to {last} are not all within a cache of {slots} slots"


def mask_reasons(prepared: PreparedCall, *, encoder_mask_is_known: bool) -> Iterator[str]:
    """Reasons for T2 in the masks of a prepared call.

    Args:
        encoder_mask_is_known: early prefill has checked the encoder's mask; checking it waits for the device.
    """
    length, past = prepared.input_ids.shape[1], prepared.decoder_cache.get_seq_length()
    mask, encoded = prepared.model_kwargs.get("attention_mask"), prepared.model_kwargs.get("encoder_outputs")
    own = mask if encoded is None else prepared.model_kwargs.get("decoder_attention_mask")
    embeds = prepared.model_kwargs.get("inputs_embeds")
    length = length if embeds is None else max(length, embeds.shape[1])
    if own is not None and own.shape[1] != length and own.shape[1] < past + length:
        yield f"a mask of {own.shape[1]} tokens is shorter than the prompt"
    if own is not None and own.shape[1] > past + length and not own[:, : past + length].any(dim=1).all():
        yield "the attention mask excludes a whole prompt and is longer than the prompt"
    if encoded is not None and mask is not None and not encoder_mask_is_known:
        if mask.shape != encoded[0].shape[:2]:
            yield "the attention mask does not have the shape of the encoder's output"
        elif not mask.any(dim=1).all():
            yield "the attention mask excludes a whole prompt of the encoder"


def device_loop_reasons(
    config: Any, processors: Sequence[Any], device_processors: Sequence[Any], criteria: Sequence[Any]
) -> Iterator[str]:
    """Reasons for T1: what has to run on the host between steps."""
    for processor, on_device in zip(processors, device_processors, strict=True):
        if on_device is None:
            yield f"{type(processor).__name__} runs on the host"
    stops = [criterion for criterion in criteria if type(criterion) is not MaxLengthCriteria]
    for criterion in stops:
        if type(criterion) is not EosTokenCriteria:
            yield f"{type(criterion).__name__} runs on the host"
    if len(stops) > 1:
        yield "there are several stopping criteria besides the length"
    pad = config._pad_token_tensor
    if stops and pad is None and (config.num_beams or 1) == 1:
        yield "there is no pad token"
    if pad is not None and pad.dim():
        yield "pad_token_id is not a single id"


def setting_of(model: nn.Module, arguments: Mapping[str, Any], name: str) -> Any:
    """A setting: as an argument of generate(), else from its `generation_config`, else from the model's."""
    if name in arguments:
        return arguments[name]
    value = getattr(arguments.get("generation_config"), name, None)
    return getattr(getattr(model, "generation_config", None), name, None) if value is None else value


def is_unobserved() -> bool:
    """True if no dispatch mode, function mode or compiler is observing."""
    return not torch.compiler.is_compiling() and not _has_modes()


def is_token_ids(value: Any, device: torch.device) -> bool:
    """Whether `value` is a prompt [rows, length], not empty, of int64 ids on this device."""
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


def _is_sharded(model: nn.Module, synced_gpus: bool | None) -> bool:
    """Whether processes share the model's weights, so that each has to run the forwards that the others run.

    Upstream: `GenerationMixin._extract_generation_mode_kwargs`, where this is the default of `synced_gpus`.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    # ZeRO-3 is a setting of the process; weights that it shards are found by the fingerprint too.
    is_zero3 = synced_gpus is None and utils.is_deepspeed_zero3_enabled()
    return torch.distributed.get_world_size() > 1 and (is_zero3 or utils.is_fsdp_managed_module(model))


def _uncached_reasons(config: Any, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Reasons for which a call with `use_cache=False` has other tokens than with a cache."""
    if model_kwargs.get("past_key_values") is not None:
        yield "use_cache is False, and a cache is passed"
    if config.prefill_chunk_size is not None:
        yield "use_cache is False, and prefill_chunk_size is set"
    encodes = model_kwargs.get("encoder_outputs") is not None
    for name in ("decoder_attention_mask",) if encodes else ("attention_mask", "position_ids"):
        value = model_kwargs.get(name)
        if value is not None and value.shape != input_ids.shape:
            yield f"use_cache is False, and {name} does not have the shape of the prompt"


def _is_plain_cache(cache: Any, encodes: bool = False) -> bool:
    if encodes:
        return type(cache) is EncoderDecoderCache and all(
            map(_is_plain_cache, (cache.self_attention_cache, cache.cross_attention_cache))
        )
    return (
        type(cache) is DynamicCache
        and not cache.offloading
        and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    )
