"""DecodeLoop: what happens in generate() between transformers' preparation of a call and its result."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.generation.utils import (
    GENERATION_MODES_MAPPING,
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)

from fuseopt.generation import beam_selection, device_loop, tiers
from fuseopt.generation.ahead import Ahead
from fuseopt.generation.beam_selection import BeamSelection
from fuseopt.generation.device_processors import DeviceProcessor, chained, device_processor
from fuseopt.generation.fast_model import FastModel
from fuseopt.generation.graphs import Step, StepGraphs
from fuseopt.generation.kept_tensors import KeptTensors
from fuseopt.generation.layers import has_kernel
from fuseopt.generation.prefill import prefill, store_cache
from fuseopt.generation.selection import Selection
from fuseopt.generation.state import DecodeState, Sizes
from fuseopt.generation.tiers import Call, Tier

# By whether there is an encoder, and whether there are beams.
_OUTPUTS: Mapping[tuple[bool, bool], Any] = {
    (False, False): GenerateDecoderOnlyOutput,
    (False, True): GenerateBeamDecoderOnlyOutput,
    (True, False): GenerateEncoderDecoderOutput,
    (True, True): GenerateBeamEncoderDecoderOutput,
}


class _PreparedCall(NamedTuple):
    """What `GenerationMixin.generate` hands to a decoding method."""

    input_ids: Tensor
    processors: Any
    criteria: Any
    config: Any
    model_kwargs: dict[str, Any]


class DecodeLoop:
    """Call: what `GenerationMixin.generate` hands to a `custom_generate` -> what generate() returns.

    `served` says afterwards which tier it was. Upstream: `GenerationMixin._sample`.

    Args:
        model: what generate() is called on, whatever passes for it there.
        step: a decode step built on the model.
        graphs: where captured steps are kept.
        kept: what earlier calls have put on the device.
        max_batch, max_length: rows, and slots of the cache, up to which the fast tiers are taken.
        streamer: the caller's, which transformers does not hand on.
        ahead: the caller's prompt, if it has run already.
    """

    # transformers looks at it twice a call.
    __signature__: inspect.Signature

    def __init__(
        self,
        model: nn.Module,
        step: Any,
        graphs: StepGraphs,
        kept: KeptTensors,
        max_batch: int,
        max_length: int,
        streamer: Any = None,
        ahead: Ahead | None = None,
    ) -> None:
        self.model, self.step, self.graphs, self.streamer, self.ahead = model, step, graphs, streamer, ahead
        self.kept, self.max_batch, self.max_length = kept, max_batch, max_length
        self.served = Call(Tier.STOCK, "it raised before decoding began")

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        model = self.model
        call = _PreparedCall(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        reason = next(tiers.call_reasons(generation_config, input_ids, stopping_criteria, model_kwargs), None)
        sizes = None if reason else _sizes(call)
        reason = reason or next(self._size_reasons(model, sizes, call), None)
        if sizes is not None and reason is None:
            with self.graphs.in_stream_order(input_ids.device):
                try:
                    state = self._state(sizes.of_class())
                except torch.OutOfMemoryError:
                    reason = f"there was no memory for a cache of {sizes.rows} rows and {sizes.capacity} slots"
                else:
                    return self._decode(model, state, call)
        self.served = Call(Tier.STOCK, reason or "")
        self.graphs.join(self.step.shape.device)
        return self._by_transformers(model, model, call)

    def _state(self, sizes: Sizes) -> DecodeState:
        if self.ahead is not None and self.ahead.state.sizes == sizes:
            return self.ahead.state
        return self.graphs.state(sizes, lambda: DecodeState(sizes, self.step.shape, self.step.vocab))

    def _size_reasons(self, model: nn.Module, sizes: Sizes | None, call: _PreparedCall) -> Iterator[str]:
        if sizes is None:
            return
        longest = self.step.max_length(model)
        if call.input_ids.device != self.step.shape.device:
            yield f"the inputs are on {call.input_ids.device}, the model on {self.step.shape.device}"
        if sizes.rows > self.max_batch:
            yield f"{sizes.rows} rows are more than max_batch, {self.max_batch}"
        if max(sizes.capacity, sizes.cross_capacity) > self.max_length:
            yield f"{max(sizes.capacity, sizes.cross_capacity)} cache slots are more than max_length, {self.max_length}"
        if longest is not None and sizes.capacity > longest:
            yield f"{sizes.capacity} tokens are more than the model's {longest} positions"
        if not sizes.rows:
            yield "the batch is empty"
        encoded = call.model_kwargs.get("encoder_outputs")
        if encoded is not None and encoded[0].shape[0] != sizes.rows:
            yield f"the encoder's output has {encoded[0].shape[0]} rows, the decoder {sizes.rows}"

    def _decode(self, model: nn.Module, state: DecodeState, call: _PreparedCall) -> Any:
        config = call.config
        on_device = [
            device_processor(processor, state.sizes.rows, self.step.vocab, self.step.shape.device, self.kept)
            for processor in call.processors
        ]
        reason = next(tiers.device_loop_reasons(config, call.processors, on_device, call.criteria, self.streamer), None)
        if reason is None and state.beams is not None:
            vocabs = self.step.vocab, model.config.vocab_size
            reason = next(beam_selection.not_on_device(config, *vocabs, *_bounds(call)), None)
        tier = Tier.DEVICE_LOOP if reason is None else Tier.FAST_FORWARD
        self.served = Call(tier, reason or "", note="it raised")
        if not has_kernel("decode_attention", state.cache):
            state.forget()
        if reason is None:
            output, step, slots, cross_slots, note = self._on_device(
                model, state, call, chained(filter(None, on_device), self.step.vocab, self.kept)
            )
        else:
            step = self.graphs.step(self.step, state, None)
            fast = FastModel(model, self.graphs, step, self.ahead)
            output = self._by_transformers(fast, model, call)
            slots, cross_slots, note = fast.slots, fast.prefilled.cross_slots, fast.note
        self.served = Call(tier, reason or "", "eager" if step.graph is None else "graph", note)
        cache = call.model_kwargs["past_key_values"]
        if config.return_dict_in_generate or getattr(cache, "_is_user_defined", False):
            store_cache(state, cache, slots, cross_slots)
        return output

    def _on_device(
        self, model: nn.Module, state: DecodeState, call: _PreparedCall, processors: tuple[DeviceProcessor, ...]
    ) -> tuple[Any, Step, int, int, str]:
        """The output, the step that ran, how many slots of the caches are filled, and a note."""
        config, (length, limit) = call.config, _bounds(call)
        detailed = config.return_dict_in_generate
        scores: list[Tensor] | None = [] if detailed and config.output_scores else None
        logits: list[Tensor] | None = [] if detailed and config.output_logits else None
        eos = next((c.eos_token_id for c in call.criteria if type(c) is EosTokenCriteria), None)
        eos = None if eos is None else eos.to(call.input_ids.device)
        keep = {"keep_logits": logits is not None, "keep_scores": scores is not None}
        if state.beams is None:
            selection = Selection(processors, bool(config.do_sample), eos, **keep)
        else:
            selection = BeamSelection(processors, config, eos, length, limit, state, self.kept, **keep)
        step = self.graphs.step(self.step, state, selection)
        prefilled = prefill(self.step, model, self.graphs, state, call.input_ids, config, call.model_kwargs, self.ahead)
        steps, note = device_loop.run(
            self.graphs,
            step,
            call.input_ids,
            config._pad_token_tensor,
            max(1, limit - length),
            prefilled,
            scores,
            logits,
        )
        of_beams: dict[str, Any] = {}
        if state.beams is None:
            sequences = state.ids[:, : length + steps].clone()
        else:
            fill = beam_selection.fill_of(config)
            sequences, beam_scores, beam_indices = state.beams.best(
                config.num_return_sequences, length, prefilled.slots, fill
            )
            of_beams = {"sequences_scores": beam_scores if config.output_scores else None, "beam_indices": beam_indices}
        output: Any = sequences
        if detailed:
            output_class = _OUTPUTS[bool(model.config.is_encoder_decoder), state.beams is not None]
            output = output_class(
                sequences=sequences,
                scores=None if scores is None else tuple(scores),
                logits=None if logits is None else tuple(logits),
                past_key_values=call.model_kwargs["past_key_values"],
                **of_beams,
            )
        return output, step, prefilled.slots + steps - 1, prefilled.cross_slots, prefilled.note or note

    def _by_transformers(self, model: Any, owner: nn.Module, call: _PreparedCall) -> Any:
        """The decoding method of `owner`'s class that transformers would have called, with `model` for self."""
        mode = call.config.get_generation_mode(None)
        streamer = {} if self.streamer is None else {"streamer": self.streamer}
        return getattr(type(owner), GENERATION_MODES_MAPPING[mode])(
            model,
            call.input_ids,
            logits_processor=call.processors,
            stopping_criteria=call.criteria,
            generation_config=call.config,
            synced_gpus=False,
            **streamer,
            **call.model_kwargs,
        )


DecodeLoop.__signature__ = inspect.Signature(list(inspect.signature(DecodeLoop.__call__).parameters.values())[1:])


def _bounds(call: _PreparedCall) -> tuple[int, int]:
    """The length of the prompt, and the one at which all sequences end."""
    return call.input_ids.shape[1], tiers.length_limit(call.criteria) or 0


def _sizes(call: _PreparedCall) -> Sizes:
    """Rows and slots that the call needs; the slots are an upper bound where a cache is passed along."""
    rows, (length, limit) = call.input_ids.shape[0], _bounds(call)
    embeds, encoded = call.model_kwargs.get("inputs_embeds"), call.model_kwargs.get("encoder_outputs")
    prompt = length if embeds is None else max(length, embeds.shape[1])
    past = call.model_kwargs["past_key_values"].get_seq_length()
    forwards = max(0, limit - length - 1)
    capacity = past + prompt + forwards
    beams = call.config.num_beams or 1
    if encoded is None:
        return Sizes(rows, capacity, beams=beams)
    # transformers has repeated every item of the encoder's as often; a cache of the caller's may hold anything.
    repeated = max(beams, call.config.num_return_sequences or 1)
    cache = call.model_kwargs["past_key_values"].cross_attention_cache
    return Sizes(rows, capacity, encoded[0].shape[1], 1 if cache.get_seq_length() else repeated, beams)
