"""DecodeLoop: what happens in generate() between transformers' preparation of a call and its result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.generation.utils import (
    GENERATION_MODES_MAPPING,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)

from fuseopt.generation import device_loop, host_loop, tiers
from fuseopt.generation.device_processors import device_processor
from fuseopt.generation.graphs import StepGraphs
from fuseopt.generation.prefill import prefill, store_cache
from fuseopt.generation.selection import Selection
from fuseopt.generation.state import DecodeState, Sizes, capacity_for
from fuseopt.generation.tiers import Call, Tier


class DecodeLoop:
    """Call: what `GenerationMixin.generate` hands to a `custom_generate` -> what generate() returns.

    `served` says afterwards which tier it was. Upstream: `GenerationMixin._sample`.

    Args:
        step: a decode step built on the model.
        graphs: where captured steps are kept.
        max_batch, max_length: rows, and slots of the cache, up to which the fast tiers are taken.
        streamer: the caller's, which transformers does not hand on.
    """

    def __init__(self, step: Any, graphs: StepGraphs, max_batch: int, max_length: int, streamer: Any = None) -> None:
        self.step, self.graphs, self.streamer = step, graphs, streamer
        self.max_batch, self.max_length = max_batch, max_length
        self.served = Call(Tier.STOCK, "it raised before decoding began")

    def __call__(
        self,
        model: nn.Module,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        reason = next(tiers.call_reasons(generation_config, input_ids, stopping_criteria, model_kwargs), None)
        sizes = None if reason else _sizes(input_ids, stopping_criteria, model_kwargs)
        reason = reason or next(self._size_reasons(model, sizes, input_ids, model_kwargs), None)
        if sizes is not None and reason is None:
            with self.graphs.in_stream_order(input_ids.device):
                try:
                    state = self.graphs.state(_class_of(sizes), self.step.shape, self.step.vocab)
                except torch.OutOfMemoryError:
                    reason = f"there was no memory for a cache of {sizes.rows} rows and {sizes.capacity} slots"
                else:
                    arguments = (input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
                    return self._decode(model, state, *arguments)
        self.served = Call(Tier.STOCK, reason or "")
        method = getattr(type(model), GENERATION_MODES_MAPPING[generation_config.get_generation_mode(None)])
        if self.streamer is not None:
            model_kwargs["streamer"] = self.streamer
        return method(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=False,
            **model_kwargs,
        )

    def _size_reasons(
        self, model: nn.Module, sizes: Sizes | None, input_ids: Tensor, model_kwargs: Mapping[str, Any]
    ) -> Iterator[str]:
        if sizes is None:
            return
        longest = self.step.max_length(model)
        if input_ids.device != self.step.shape.device:
            yield f"the inputs are on {input_ids.device}, the model on {self.step.shape.device}"
        if sizes.rows > self.max_batch:
            yield f"{sizes.rows} rows are more than max_batch, {self.max_batch}"
        if max(sizes.capacity, sizes.cross_capacity) > self.max_length:
            yield f"{max(sizes.capacity, sizes.cross_capacity)} cache slots are more than max_length, {self.max_length}"
        if longest is not None and sizes.capacity > longest:
            yield f"{sizes.capacity} tokens are more than the model's {longest} positions"
        if not sizes.rows:
            yield "the batch is empty"

    def _decode(
        self,
        model: nn.Module,
        state: DecodeState,
        input_ids: Tensor,
        processors: Any,
        criteria: Any,
        config: Any,
        model_kwargs: dict[str, Any],
    ) -> Any:
        rows, length = input_ids.shape
        on_device = [device_processor(p, rows, self.step.vocab, self.step.shape.device) for p in processors]
        reasons = tiers.device_loop_reasons(processors, on_device, criteria, config._pad_token_tensor, self.streamer)
        reason = next(reasons, None)
        prefilled = prefill(self.step, model, state, input_ids, config, model_kwargs)
        records: tuple[list[Tensor] | None, list[Tensor] | None] = (
            [] if config.return_dict_in_generate and config.output_scores else None,
            [] if config.return_dict_in_generate and config.output_logits else None,
        )
        if reason is None:
            eos = next((c.eos_token_id for c in criteria if type(c) is EosTokenCriteria), None)
            selection = Selection(
                tuple(p for p in on_device if p is not None),
                bool(config.do_sample),
                None if eos is None else eos.to(input_ids.device),
                keep_scores=records[0] is not None,
            )
            steps = max(1, (tiers.length_limit(criteria) or 0) - length)
            step = self.graphs.step(self.step, state, selection)
            sequences, note = device_loop.run(
                self.graphs, step, input_ids, config._pad_token_tensor, steps, prefilled.pending, *records
            )
        else:
            step = self.graphs.step(self.step, state, None)
            sequences, note = host_loop.run(
                self.graphs, step, input_ids, processors, criteria, config, self.streamer, prefilled.pending, *records
            )
        tier = Tier.DEVICE_LOOP if reason is None else Tier.FAST_FORWARD
        self.served = Call(tier, reason or "", "eager" if step.graph is None else "graph", note)
        cache = model_kwargs["past_key_values"]
        if config.return_dict_in_generate or getattr(cache, "_is_user_defined", False):
            store_cache(state, cache, prefilled.slots + sequences.shape[1] - length - 1, prefilled.cross_slots)
        if not config.return_dict_in_generate:
            return sequences
        output = GenerateEncoderDecoderOutput if model.config.is_encoder_decoder else GenerateDecoderOnlyOutput
        scores, logits = (None if record is None else tuple(record) for record in records)
        return output(sequences=sequences, scores=scores, logits=logits, past_key_values=cache)


def _sizes(input_ids: Tensor, criteria: Any, model_kwargs: Mapping[str, Any]) -> Sizes:
    """Rows and slots that the call needs; the slots are an upper bound where a cache is passed along."""
    rows, length = input_ids.shape
    embeds, encoded = model_kwargs.get("inputs_embeds"), model_kwargs.get("encoder_outputs")
    prompt = length if embeds is None else max(length, embeds.shape[1])
    past = model_kwargs["past_key_values"].get_seq_length()
    forwards = max(0, (tiers.length_limit(criteria) or 0) - length - 1)
    return Sizes(rows, past + prompt + forwards, 0 if encoded is None else encoded[0].shape[1])


def _class_of(sizes: Sizes) -> Sizes:
    cross = sizes.cross_capacity
    return Sizes(sizes.rows, capacity_for(sizes.capacity), capacity_for(cross) if cross else 0)
