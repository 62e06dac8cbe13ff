"""Prefill: fills the static cache and the first logits from the prompt; `store_cache` copies the cache back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer, EncoderDecoderCache

from fuseopt.generation.engine.beam_state import along_ancestry
from fuseopt.generation.engine.graphs import StepGraphs
from fuseopt.generation.engine.quantised_cache import LayerCache, fill, filled
from fuseopt.generation.engine.state import DecodeState, prompt_length_for
from fuseopt.generation.families.step_interface import DecodeStep
from fuseopt.generation.hf.saved_cache import SavedCache
from fuseopt.generation.prompt.early_work import EarlyPrompt
from fuseopt.generation.prompt.prompts import joined_notes, run_encoded, run_tokens

UNQUANTISED_PROMPT = "the prompt ran with unquantised weights"


@dataclass(frozen=True)
class Prefilled:
    """What a prefill left in a DecodeState.

    Attributes:
        slots: filled slots of the cache once the first logits exist.
        cross_slots: filled slots of the cross-attention cache.
        pending: the first logits do not exist yet; a step on the prompt's only token has to compute them.
        has_ids: `state.ids` contains the prompt.
        was_early: the early prefill did all of this.
        is_unquantised: the step's weights are quantised, but the prompt ran with the unquantised weights.
        note: for the report: why the prompt was not captured in a CUDA graph, `UNQUANTISED_PROMPT` if the prompt was
            run so, and what the prefix cache did.
    """

    slots: int
    cross_slots: int = 0
    pending: bool = False
    has_ids: bool = False
    was_early: bool = False
    is_unquantised: bool = False
    note: str = ""


def prefill(
    step: DecodeStep,
    model: nn.Module,
    graphs: StepGraphs,
    state: DecodeState,
    input_ids: Tensor,
    config: Any,
    model_kwargs: dict[str, Any],
    early: EarlyPrompt | None = None,
) -> Prefilled:
    """Fills `state` by the decode step's prefill if `is_token_prompt`, else by the model's forward.

    Args:
        step: a decode step built on `model`.
        graphs: where captured prompts are kept.
        input_ids: [rows, length].
        config, model_kwargs: as transformers prepared them; the model's forward updates `model_kwargs`.
        early: the prompt, if it was queued early.
    """
    prefilled = _prefill(step, model, graphs, state, input_ids, config, model_kwargs, early)
    is_unquantised = prefilled.is_unquantised or reads_unquantised(step, graphs, *input_ids.shape)
    note = joined_notes(UNQUANTISED_PROMPT if is_unquantised else "", prefilled.note)
    return replace(prefilled, is_unquantised=is_unquantised, note=note)


def reads_unquantised(step: DecodeStep, graphs: StepGraphs, rows: int, length: int) -> bool:
    """Whether products of prompts of this size, padded if they are captured, read the unquantised weights."""
    most = step.most_quantised_rows
    if not step.is_quantised or most is None or length == 1:
        return False
    padded = prompt_length_for(rows, length, step.shape.device) if graphs.max_graphs else None
    return rows * (padded or length) > most


def _prefill(
    step: DecodeStep,
    model: nn.Module,
    graphs: StepGraphs,
    state: DecodeState,
    input_ids: Tensor,
    config: Any,
    model_kwargs: dict[str, Any],
    early: EarlyPrompt | None,
) -> Prefilled:
    """`prefill` without the note on unquantised weights that the step has read."""
    length = input_ids.shape[1]
    encodes = model.config.is_encoder_decoder
    keep = None if encodes else model_kwargs.get("attention_mask")
    is_early_mask = early is not None and keep is not None and keep is early.attention_mask
    if not is_early_mask and keep is not None and keep.shape == input_ids.shape and bool(keep.all()):
        keep = None
    if not is_token_prompt(step, model, input_ids, config, model_kwargs) or (keep is not None and length == 1):
        step.begin()
        no_prefix = "the prefix cache was not used: the model's own forward ran the prompt"
        prefilled = _by_the_model(model, state, input_ids, config, model_kwargs)
        note = no_prefix if graphs.prefixes is not None and not encodes else ""
        step.cross_cache_filled(state)
        return replace(prefilled, is_unquantised=step.is_quantised, note=note)
    if encodes:
        encoded, mask = model_kwargs["encoder_outputs"], model_kwargs.get("attention_mask")
        has_run = early is not None and early.state is state and early.inputs is encoded
        if early is not None and has_run and early.matches(mask, config.decoder_start_token_id):
            return Prefilled(1, encoded[0].shape[1], was_early=True, note=early.note)
        per_item = slice(None, None, state.sizes.queries_per_kv)
        mask = None if mask is None else mask[per_item]
        note = run_encoded(step, graphs, state, encoded[0][per_item], mask, input_ids[:, 0])
        return Prefilled(1, encoded[0].shape[1], note=note)
    model.warn_if_padding_and_no_attention_mask(input_ids, model_kwargs.get("attention_mask"))
    step.begin()
    has_run = early is not None and early.inputs is input_ids and (keep is None or is_early_mask)
    if early is not None and has_run and state is early.state:
        return Prefilled(length, has_ids=True, was_early=True, note=early.note)
    positions = model_kwargs.get("position_ids")
    positions = None if positions is None else positions[:, -length:]
    if length == 1:
        state.tokens.copy_(input_ids[:, 0])
        state.begin(0, None, None if positions is None else positions[:, -1])
        return Prefilled(1, pending=True)
    if early is not None and has_run:
        state.begin(length, keep, None if positions is None else positions[:, -1] + 1)
        early.copy_to(state)
        return Prefilled(length, note=early.note)
    note = run_tokens(step, graphs, state, input_ids, keep, positions)
    return Prefilled(length, has_ids=True, note=note)


def store_cache(state: DecodeState, past_key_values: Any, slots: int, cross_slots: int) -> None:
    """Copies the first `slots` and `cross_slots` of the static caches to transformers' cache, in place.

    If that raises an error, the cache has what it had before.
    """
    saved = SavedCache(past_key_values)
    try:
        _store_all(state, past_key_values, slots, cross_slots)
    except BaseException:
        saved.restore()
        raise


def is_token_prompt(
    step: DecodeStep, model: nn.Module, input_ids: Tensor, config: Any, model_kwargs: Mapping[str, Any]
) -> bool:
    """Whether the step's prefill can run the prompt: tokens, an empty cache, and masks and positions that fit them."""
    cache, mask = model_kwargs["past_key_values"], model_kwargs.get("attention_mask")
    masked, positions = input_ids, model_kwargs.get("position_ids")
    if model.config.is_encoder_decoder:
        masked = model_kwargs["encoder_outputs"][0][..., 0]
        masked_too = model_kwargs.get("decoder_attention_mask") is not None
        if input_ids.shape[1] != 1 or masked_too or cache.cross_attention_cache.get_seq_length():
            return False
    elif model.config._attn_implementation not in step.prompt_attentions:
        return False
    elif model.config._attn_implementation == "eager" and mask is not None and not bool(mask.all()):
        return False  # there a query without keys attends to all, in PyTorch's attention to none
    return (
        input_ids.shape[1] > 0
        and (mask is None or mask.shape == masked.shape)
        and (positions is None or _fit(positions, input_ids))
        and model_kwargs.get("inputs_embeds") is None
        and cache.get_seq_length() == 0
        and config.prefill_chunk_size is None
    )


def _store_all(state: DecodeState, past_key_values: Any, slots: int, cross_slots: int) -> None:
    if isinstance(past_key_values, EncoderDecoderCache):
        cross = past_key_values.cross_attention_cache
        if not cross.get_seq_length():
            _store(state.cross_caches, state.dtype, cross, cross_slots, state.sizes.queries_per_kv)
            past_key_values.is_updated.update(dict.fromkeys(range(len(state.cross_cache)), True))
        past_key_values = past_key_values.self_attention_cache
    ancestry = None if state.beams is None else state.beams.ancestry[0, :, :slots]
    _store(state.layer_caches, state.dtype, past_key_values, slots, ancestry=ancestry)


def _fit(positions: Tensor, input_ids: Tensor) -> bool:
    """Whether there is an integer position for each token."""
    rows, length = positions.shape
    return rows in (1, input_ids.shape[0]) and length >= input_ids.shape[1] and not positions.is_floating_point()


def _by_the_model(
    model: nn.Module, state: DecodeState, input_ids: Tensor, config: Any, model_kwargs: dict[str, Any]
) -> Prefilled:
    encodes = model.config.is_encoder_decoder
    outputs = model._prefill(input_ids, config, model_kwargs, is_first_iteration=True)
    model_kwargs.update(model._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder=encodes))
    cache, cross_slots = model_kwargs["past_key_values"], 0
    if encodes:
        cross_slots = _load(state.cross_caches, cache.cross_attention_cache, state.sizes.queries_per_kv)
        mask = model_kwargs.get("attention_mask")
        state.load_cross(cross_slots, None if mask is None else mask[:: state.sizes.queries_per_kv])
        cache = cache.self_attention_cache
    slots = _load(state.layer_caches, cache)
    keep = model_kwargs.get("decoder_attention_mask" if encodes else "attention_mask")
    positions = model_kwargs.get("position_ids")
    state.begin(slots, keep, None if positions is None else positions[:, -1])
    state.logits.copy_(outputs.logits[:, -1])
    return Prefilled(slots, cross_slots)


def _load(static: Sequence[LayerCache], cache: DynamicCache, queries_per_kv: int = 1) -> int:
    """Copies keys and values into the caches of all layers; returns how many slots they fill.

    A layer of a sliding window holds the last slots only, and no step attends to others.
    """
    slots = cache.get_seq_length()
    # transformers makes as many layers as the encoder has, which may be more.
    for target, layer in zip(static, cache.layers[: len(static)], strict=True):
        held = slots - layer.keys.shape[2]
        fill(target, held, layer.keys[::queries_per_kv], 0)
        fill(target, held, layer.values[::queries_per_kv], 1)
    return slots


def _store(
    static: Sequence[LayerCache],
    dtype: torch.dtype,
    cache: DynamicCache,
    slots: int,
    queries_per_kv: int = 1,
    ancestry: Tensor | None = None,
) -> None:
    empty = not cache.get_seq_length()
    for index, layer_cache in enumerate(static):
        source = filled(layer_cache, slots, dtype)
        if ancestry is not None:
            source = along_ancestry(source, ancestry)
        keys, values = source.repeat_interleave(queries_per_kv, dim=1)
        if empty:
            cache.update(keys, values, index)
            continue
        layer = cache.layers[index]
        if isinstance(layer, DynamicSlidingWindowLayer):
            keys, values = (part[:, :, -layer.sliding_window + 1 :] for part in (keys, values))
            layer.cumulative_length = slots
        layer.keys, layer.values = keys, values
