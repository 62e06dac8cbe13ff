"""DecodeLoop: what happens in generate() between transformers' preparation of a call and its result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
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

from fuseopt.generation import tiers
from fuseopt.generation.engine import device_loop
from fuseopt.generation.engine.decode_run import DecodeRun
from fuseopt.generation.engine.device_constants import KeptTensors
from fuseopt.generation.engine.graphs import Step, StepGraphs
from fuseopt.generation.engine.layers import has_kernel
from fuseopt.generation.engine.state import DecodeState, Sizes
from fuseopt.generation.families.step_interface import DecodeStep
from fuseopt.generation.hf.step_proxy import FastModel
from fuseopt.generation.prompt.early_prefill import Plan, Started
from fuseopt.generation.prompt.prefill import is_plain, prefill, store_cache
from fuseopt.generation.select import beam_selection
from fuseopt.generation.select.beam_selection import BeamSelection
from fuseopt.generation.select.device_processors import DeviceProcessor, chained, device_processor
from fuseopt.generation.select.selection import Selection
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


class Looked(NamedTuple):
    """What a look at the model comes to.

    Attributes:
        step: to decode with, where there is no reason not to.
        reason: why no step would compute what the model does, or nothing.
        is_as_before: all that has run of this call counts.
    """

    step: DecodeStep | None
    reason: str = ""
    is_as_before: bool = False


class _Changed(Exception):
    """What has run of this call stands on a model that is not the same any more."""


class DecodeLoop:
    """Call: what `GenerationMixin.generate` hands to a `custom_generate` -> what generate() returns.

    `served` says afterwards which tier it was, and `plan` what to expect of calls that look the same. Upstream:
    `GenerationMixin._sample`.

    The model is looked at before anything runs that can be seen from outside: code of the caller's or of transformers,
    random numbers, a capture. Where there is nothing of that kind steps are queued first, and the host looks while the
    device runs them. What transformers has prepared holds for any model, but for an encoder's output.

    Args:
        model: what generate() is called on, whatever passes for it there.
        step: a decode step built on the model.
        graphs: where captured steps are kept.
        kept: what earlier calls have put on the device.
        max_batch, max_length: rows, and slots of the cache, up to which the fast tiers are taken.
        streamer: the caller's, which transformers does not hand on.
        started: what the call has been relieved of.
        look: at the model, unless that has been done.
    """

    # transformers looks at it twice a call.
    __signature__: inspect.Signature

    def __init__(
        self,
        model: nn.Module,
        step: DecodeStep,
        graphs: StepGraphs,
        kept: KeptTensors,
        max_batch: int,
        max_length: int,
        streamer: Any,
        started: Started,
        look: Callable[[], Looked] | None,
    ) -> None:
        self.model, self.step, self.graphs, self.streamer, self.started = model, step, graphs, streamer, started
        self.kept, self.max_batch, self.max_length = kept, max_batch, max_length
        self._look, self._reason = look, ""
        self.served = Call(Tier.STOCK, "it raised before decoding began")
        self.plan: Plan | None = None

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """`tokenizer` is for transformers' preparation alone."""
        call = _PreparedCall(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        with suppress(_Changed):
            return self._serve(call)
        self._take_back(call)
        return self._serve(call)

    def _serve(self, call: _PreparedCall) -> Any:
        model = self.model
        reason = self._reason or next(
            tiers.call_reasons(call.config, call.input_ids, call.criteria, call.model_kwargs), None
        )
        sizes = None if reason else _sizes(call)
        reason = reason or next(self._size_reasons(model, sizes, call), None)
        if sizes is not None and reason is None:
            with self.graphs.in_stream_order(call.input_ids.device):
                try:
                    state = self._state(sizes.of_class())
                except torch.OutOfMemoryError:
                    reason = f"there was no memory for a cache of {sizes.rows} rows and {sizes.capacity} slots"
                else:
                    return self._decode(model, state, call)
        self.served = Call(Tier.STOCK, reason or "")
        self.graphs.join(self.step.shape.device)
        self._confirm()
        return self._by_transformers(model, model, call)

    def _confirm(self) -> None:
        """Looks at the model, unless that has been done.

        Raises:
            _Changed: the call has to be served anew.
        """
        look, self._look = self._look, None
        looked = None if look is None else look()
        if looked is not None and not looked.is_as_before:
            self.step, self._reason = looked.step or self.step, looked.reason
            raise _Changed

    def _take_back(self, call: _PreparedCall) -> None:
        """Lets the head start of a call count for nothing."""
        self.started = self.started._replace(ahead=None)
        if self.started.encoded is None:
            return
        ids, mask = self.started.encoded
        encoded = self.model.get_encoder()(
            input_ids=ids,
            attention_mask=mask,
            output_attentions=call.config.output_attentions,
            output_hidden_states=call.config.output_hidden_states,
            return_dict=True,
        )
        copies = call.input_ids.shape[0] // ids.shape[0]
        _, expanded = self.model._expand_inputs_for_generation(copies, True, encoder_outputs=encoded)
        call.model_kwargs.update(expanded)
        if not self._reason:
            self.started = self.started._replace(note="transformers ran the encoder: the model was not as before")

    def _take_back_steps(self) -> None:
        """Lets a prompt count for nothing behind which steps are queued that this call does not take."""
        if self.started.ahead is not None and self.started.ahead.run is not None:
            self.started = self.started._replace(ahead=None)

    def _state(self, sizes: Sizes) -> DecodeState:
        ahead = self.started.ahead
        if ahead is not None and ahead.state.sizes == sizes:
            return ahead.state
        return self.graphs.state(sizes, lambda: DecodeState(sizes, self.step.shape, self.step.vocab))

    def _size_reasons(self, model: nn.Module, sizes: Sizes | None, call: _PreparedCall) -> Iterator[str]:
        if sizes is None:
            return
        longest = self.step.max_length
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
        cache = _own_cache(call)
        if 0 < len(cache.layers) < self.step.shape.layers:
            yield f"the cache has {len(cache.layers)} layers, the decoder {self.step.shape.layers}"
        yield from self._mask_reasons(call)

    def _mask_reasons(self, call: _PreparedCall) -> Iterator[str]:
        length, past = call.input_ids.shape[1], _own_cache(call).get_seq_length()
        mask, encoded = call.model_kwargs.get("attention_mask"), call.model_kwargs.get("encoder_outputs")
        own = mask if encoded is None else call.model_kwargs.get("decoder_attention_mask")
        embeds = call.model_kwargs.get("inputs_embeds")
        length = length if embeds is None else max(length, embeds.shape[1])
        if own is not None and own.shape[1] != length and own.shape[1] < past + length:
            yield f"a mask of {own.shape[1]} tokens is shorter than the prompt"
        if own is not None and own.shape[1] > past + length and not own[:, : past + length].any(dim=1).all():
            yield "a prompt is masked as a whole, and perhaps what comes next"
        if encoded is not None and mask is not None and self.started.encoded is None:
            if mask.shape != encoded[0].shape[:2]:
                yield "the attention mask is not of the shape of the encoder's output"
            elif not mask.any(dim=1).all():
                yield "all of what the encoder says of a prompt is masked"

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
        if reason is not None:
            self._take_back_steps()
        tier = Tier.DEVICE_LOOP if reason is None else Tier.FAST_FORWARD
        self.served = Call(tier, reason or "", note="it raised")
        cache = call.model_kwargs["past_key_values"]
        is_the_callers = getattr(cache, "_is_user_defined", False)
        if reason is not None or not self._runs_unseen(state, call):
            self._confirm()
        if not has_kernel("decode_attention", state.cache):
            state.forget()
        if reason is None:
            output, step, slots, cross_slots, note = self._on_device(
                model, state, call, chained(filter(None, on_device), self.step.vocab, self.kept)
            )
        else:
            step = self.graphs.step(self.step, state, None)
            fast = FastModel(model, self.graphs, step, self.started.ahead)
            try:
                output = self._by_transformers(fast, model, call)
            except BaseException:
                if is_the_callers and fast.slots:
                    store_cache(state, cache, fast.slots, fast.prefilled.cross_slots)
                raise
            slots, cross_slots, note = fast.slots, fast.prefilled.cross_slots, fast.note
            if fast.prefilled.had_run:
                self.plan = Plan(self.started.is_whole)
        self.served = Call(tier, reason or "", "eager" if step.graph is None else "graph", note)
        if config.return_dict_in_generate or is_the_callers:
            store_cache(state, cache, slots, cross_slots)
        return output

    def _runs_unseen(self, state: DecodeState, call: _PreparedCall) -> bool:
        """Whether nothing tells that the device loop has run, and there is something for the device to do at once."""
        ahead = self.started.ahead
        if ahead is None or ahead.state is not state or call.config.do_sample or state.beams is not None:
            return False
        return is_plain(self.model, call.input_ids, call.config, call.model_kwargs)

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
        pad, most, ahead = config._pad_token_tensor, max(1, limit - length), self.started.ahead
        # Where there was something to load, a call like this one would have something of its own as well.
        is_like_others = ahead is not None and ahead.state is state and self.graphs.holds(state, selection)
        if ahead is not None and ahead.run is not None and not ahead.run.serves(state, selection, pad, most):
            self._take_back_steps()
            self._confirm()
        step, ahead = self.graphs.step(self.step, state, selection), self.started.ahead
        prefilled = prefill(self.step, model, self.graphs, state, call.input_ids, config, call.model_kwargs, ahead)
        run = ahead.run if ahead is not None and prefilled.had_run else None
        if run is None:
            ready = {"pending": prefilled.pending, "has_ids": prefilled.has_ids}
            run = DecodeRun(step, call.input_ids, pad, most, **ready)
        steps, note = device_loop.finish(self.graphs, run, scores, logits, self._confirm)
        if is_like_others and not (config.do_sample or detailed) and state.beams is None:
            self.plan = Plan(self.started.is_whole, step.key, pad, steps)
        elif prefilled.had_run:
            self.plan = Plan(self.started.is_whole)
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


def _own_cache(call: _PreparedCall) -> Any:
    """Of the decoder's own keys and values."""
    cache = call.model_kwargs["past_key_values"]
    return getattr(cache, "self_attention_cache", cache)


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
