"""One generate() call, top to bottom: fingerprint of the model, tier and reason, prompt, loop, output.

`FusedGenerate` in generate.py makes a `GenerateCall` for each call. Its methods are the stages in order; README.md in
this folder numbers them.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.utils import ModelOutput

from fuseopt.generation import tiers
from fuseopt.generation.engine.decode_run import DecodeRun
from fuseopt.generation.engine.device_loop import DeviceLoop
from fuseopt.generation.engine.layers import has_kernel
from fuseopt.generation.engine.state import DecodeState, Sizes
from fuseopt.generation.engine.token_stream import TokenStream
from fuseopt.generation.hf.caching_proxy import CachingModelProxy
from fuseopt.generation.hf.checked_step import ModelChanged
from fuseopt.generation.hf.step_proxy import StepModelProxy
from fuseopt.generation.output import Decoded, output_of, step_records
from fuseopt.generation.prepared_call import PreparedCall
from fuseopt.generation.prompt.call_outcomes import CallOutcome
from fuseopt.generation.prompt.early_work import EarlyWork
from fuseopt.generation.prompt.prefill import is_token_prompt, prefill, store_cache
from fuseopt.generation.prompt.prompts import joined_notes
from fuseopt.generation.rollback import Rollback
from fuseopt.generation.select import beam_selection
from fuseopt.generation.select.device_processors import DeviceProcessor, chained, device_processor
from fuseopt.generation.tiers import CallRecord, Tier

if TYPE_CHECKING:
    from fuseopt.generation.generate import FusedGenerate

_RAISED_EARLY = CallRecord(Tier.STOCK, "an error was raised before decoding began")


class GenerateCall:
    """One call of generate(). Call: what transformers hands to a decoding method -> what generate() returns.

    The model is checked for changes in every call, before anything runs that can be observed from outside: code of the
    caller's or of transformers, random numbers, a capture. If the first steps are none of these, they are queued first
    and the check runs on the host while the device works (`CheckedStep.confirm`). Upstream: `GenerationMixin._sample`
    and `_beam_search`.

    Args:
        fused: what is kept from call to call.
        arguments: of generate(), by name.
        extra: those of them that are not parameters of generate().

    Attributes:
        early: what was done for the call before transformers; set by `prepare`.
        rollback: for a decoding that runs out of memory.
        record: how the call was served.
        outcome: what a later call with the same key may queue before transformers prepares it; None if it may not.
    """

    # transformers inspects it twice a call.
    __signature__: inspect.Signature
    early: EarlyWork
    rollback: Rollback

    def __init__(
        self, fused: FusedGenerate, model: nn.Module, arguments: dict[str, Any], extra: dict[str, Any]
    ) -> None:
        self.fused, self.model, self.arguments, self.extra = fused, model, arguments, extra
        self.checked, self.graphs = fused.checked, fused.graphs
        self.record = _RAISED_EARLY
        self.outcome: CallOutcome | None = None

    def prepare(self, has_lock: bool) -> str | None:
        """Everything before transformers; returns why transformers has to serve the whole call, or None."""
        checked, early_prefill = self.checked, self.fused.early_prefill
        if has_lock and self.graphs.prefixes is not None:
            self.graphs.prefixes.begin_call()
        # 2. Speculation: queue the prompt, before it is known who serves the call, if an earlier call was like this.
        is_in_place = has_lock and checked.is_in_place()
        speculated = early_prefill.start(self.arguments, self.extra) if is_in_place else None
        # 3. Tier: reasons for T2 in the arguments and in the model's attributes.
        reason = next(tiers.argument_reasons(self.model, self.arguments), None)
        reason = reason or next(tiers.model_reasons(self.model, checked.step_class), None)
        if reason is None and not has_lock:
            reason = "another call of generate() was running on this model"
        # 4. Fingerprint: check the model now, or later if the step's weights are where they were.
        if reason is None and not is_in_place:
            reason = checked.check().reason
        if reason is not None:
            return reason
        if is_in_place:
            checked.defer()
        # 5. Prompt: keep or discard what was queued; without any, queue it now if the arguments allow.
        self.early = early_prefill.take(self.arguments, self.extra, speculated, check_encoder=not is_in_place)
        return None

    def run(self, stock: Any) -> Any:
        """transformers' generate(), which prepares the call and then calls this object as its decoding method."""
        # 6. Preparation, on a proxy that caches transformers' answers unless the model overrides the methods.
        proxy, model = self.fused.proxy, self.model
        proxy.full_mask = self.arguments.get("attention_mask") if self.early.is_unmasked else None
        proxy.device = self.checked.step.shape.device
        prepared_on = proxy if CachingModelProxy.stands_in_for(model) else model
        try:
            return stock(prepared_on, **{**self.arguments, **self.early.extra, "custom_generate": self})
        finally:
            # 13. Memory of the call: its outcome for the next one, its record for the report.
            self.fused.early_prefill.outcomes.record(self.early.call_key, self.outcome)
            proxy.full_mask = None
            if self.graphs.prefixes is not None and self.record.tier is not Tier.STOCK:
                self.graphs.prefixes.end_call()
            self.fused.calls.append(replace(self.record, note=self.record.note or self.early.note))

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
        """Decodes the prepared call. `model` and `tokenizer` are unused: only the preparation needs them."""
        streamer = self.arguments.get("streamer")
        prepared = PreparedCall(
            input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, streamer
        )
        try:
            return self._decode(prepared, None)
        except ModelChanged as change:
            reason = change.reason
        # Outside the handler, so that errors from here on have no context.
        self._discard_early_work(prepared, reason)
        return self._decode(prepared, reason)

    def _decode(self, prepared: PreparedCall, reason: str | None) -> Any:
        """Chooses between the fast tiers and T2, and gets the static tensors for the former."""
        graphs, options, device = self.graphs, self.fused.options, prepared.input_ids.device
        # 7. Tier: reasons for T2 in what transformers prepared.
        read = prepared.without_encoder_mask() if self.checked.step_class.ignores_encoder_mask else prepared
        reason = reason or next(tiers.call_reasons(read.config, read.input_ids, read.criteria, read.model_kwargs), None)
        if reason is None:
            cached, step = read.cached(), self.checked.step
            sizes, is_known = cached.sizes(), self.early.encoder_inputs is not None
            limits, positions = (options.max_batch, options.max_length), self.arguments.get("position_ids")
            reason = next(tiers.size_reasons(cached, sizes, step, *limits, positions), None)
            reason = reason or next(tiers.mask_reasons(cached, encoder_mask_is_known=is_known), None)
        if reason is None:
            self.rollback = Rollback(prepared, step.shape.device)
            try:
                # 8. State: the static tensors of this size.
                with graphs.in_stream_order(device):
                    return self._decode_in(self._state(sizes.rounded_up()), cached)
            except (RuntimeError, MemoryError) as error:
                if not self.rollback.undoes(error):
                    raise
            # Outside the handler, since the error references the static tensors.
            reason = f"there was no memory for a cache of {sizes} ({step.shape.bytes_of(sizes) / 2**20:.1f} MiB)"
            self.early, self.outcome = self.early._replace(prompt=None), None
            graphs.give_back()
            prepared = self.rollback.undo()
        self.record = CallRecord(Tier.STOCK, reason)
        graphs.join(self.checked.step.shape.device)
        self.checked.confirm()
        return prepared.run_decoding_method(type(self.model), self.model)

    def _decode_in(self, state: DecodeState, prepared: PreparedCall) -> Any:
        """Chooses between T0 and T1, and decodes."""
        # 9. Tier: reasons for T1, what has to run on the host between steps.
        config, step, constants = prepared.config, self.checked.step, self.fused.constants
        on_device = [
            device_processor(processor, state.sizes.rows, step.vocab, step.shape.device, constants)
            for processor in prepared.processors
        ]
        reason = next(tiers.device_loop_reasons(config, prepared.processors, on_device, prepared.criteria), None)
        if reason is None and state.beams is not None:
            vocabs = step.vocab, self.model.config.vocab_size
            reason = next(beam_selection.not_on_device(config, *vocabs, *prepared.bounds), None)
        tier = Tier.DEVICE_LOOP if reason is None else Tier.FAST_FORWARD
        self.record = CallRecord(tier, reason or "", note="an error was raised")
        if reason is not None:
            self._discard_queued_steps()
        if reason is not None or not self._may_start_unchecked(state, prepared):
            self.checked.confirm()
        if not has_kernel(state.attention_op, state.encoded):
            state.zero_caches()
        if reason is None:
            decoded = self._device_loop(state, prepared, chained(filter(None, on_device), step.vocab, constants))
        else:
            decoded = self._fast_forward(state, prepared)
        kept = (state.cache_size, "" if state.scales is None else self.fused.options.cache_dtype or "")
        is_unquantised = decoded.prefilled.is_unquantised
        self.record = CallRecord(tier, reason or "", decoded.work.how, decoded.note, *kept, is_unquantised)
        # 12. Cache: copied back to transformers' cache if anybody can read it.
        if (config.return_dict_in_generate and prepared.returns_cache) or prepared.has_user_cache:
            cache = prepared.model_kwargs["past_key_values"]
            self.graphs.retried(lambda: store_cache(state, cache, decoded.slots, decoded.prefilled.cross_slots))
        return decoded.output

    def _device_loop(
        self, state: DecodeState, prepared: PreparedCall, processors: tuple[DeviceProcessor, ...]
    ) -> Decoded:
        """Tier T0: processors and selection run inside the step."""
        graphs, config, (length, limit) = self.graphs, prepared.config, prepared.bounds
        records = step_records(config)
        keep = {"keep_scores": records.scores is not None, "keep_logits": records.logits is not None}
        selection = beam_selection.selection_of(prepared, processors, state, self.fused.constants, **keep)
        pad, max_steps, prompt = config._pad_token_tensor, max(1, limit - length), self.early.prompt
        # If the captured step lacks values of this call, steps queued for the next such call would be discarded too.
        is_repeatable = prompt is not None and prompt.state is state and graphs.holds(state, selection)
        if prompt is not None and prompt.run is not None and not prompt.run.matches(state, selection, pad, max_steps):
            self._discard_queued_steps()
            self.checked.confirm()
        # 10. Prompt: taken from the early prefill if it ran, else run now.
        work = graphs.step(self.checked.step, state, selection)
        called_with = prepared.input_ids, config, prepared.model_kwargs
        prefilled = prefill(self.checked.step, self.model, graphs, state, *called_with, self.early.prompt)
        run = self.early.prompt.run if self.early.prompt is not None and prefilled.was_early else None
        if run is None:
            ready = {"pending": prefilled.pending, "has_ids": prefilled.has_ids}
            run = DecodeRun(work, prepared.input_ids, pad, max_steps, **ready)
        # 11. Loop: first steps, the model's check while the device runs them, then the others.
        stream = None
        if prepared.streamer is not None:
            stream = self.rollback.stream = TokenStream(prepared.streamer, state.ids, length, max_steps)
        loop = DeviceLoop(graphs, run, *records, stream)
        loop.start()
        self.checked.confirm()
        try:
            steps, note = loop.finish()
        except BaseException:
            if stream is not None and stream.read and prepared.has_user_cache:
                cache = prepared.model_kwargs["past_key_values"]
                store_cache(state, cache, prefilled.slots + stream.read - 1, prefilled.cross_slots)
            raise
        if is_repeatable and state.beams is None and not (config.do_sample or config.return_dict_in_generate):
            self.outcome = CallOutcome(self.early.is_unmasked, work.key, pad, steps)
        elif prefilled.was_early:
            self.outcome = CallOutcome(self.early.is_unmasked)
        encodes = bool(self.model.config.is_encoder_decoder)
        output = output_of(prepared, state, steps, prefilled.slots, records, is_encoder_decoder=encodes)
        return Decoded(output, work, prefilled.slots + steps - 1, prefilled, joined_notes(prefilled.note, note))

    def _fast_forward(self, state: DecodeState, prepared: PreparedCall) -> Decoded:
        """Tier T1: transformers' decoding method, on a proxy of the model whose forward is the step."""
        work = self.graphs.step(self.checked.step, state, None)
        # 10. and 11.: the proxy's `_prefill`, then its call for each token.
        proxy = StepModelProxy(self.model, self.graphs, work, self.early.prompt)
        try:
            output = prepared.run_decoding_method(type(self.model), proxy)
        except BaseException:
            if prepared.has_user_cache and proxy.slots:
                cache = prepared.model_kwargs["past_key_values"]
                store_cache(state, cache, proxy.slots, proxy.prefilled.cross_slots)
            raise
        finally:
            # Processors and criteria of the caller's have seen tokens.
            self.rollback.is_possible = not proxy.slots
        if proxy.prefilled.was_early:
            self.outcome = CallOutcome(self.early.is_unmasked)
        if not prepared.returns_cache and isinstance(output, ModelOutput):
            output = type(output)(**{**output, "past_key_values": None})
        return Decoded(output, work, proxy.slots, proxy.prefilled, proxy.note)

    def _state(self, sizes: Sizes) -> DecodeState:
        early, step = self.early.prompt, self.checked.step
        if early is not None and early.state.sizes == sizes:
            return early.state
        return self.graphs.state(sizes, lambda: step.new_state(sizes))

    def _may_start_unchecked(self, state: DecodeState, prepared: PreparedCall) -> bool:
        """Whether first steps can run before the check: they cannot be observed, and their prompt is queued."""
        early = self.early.prompt
        if early is None or early.state is not state or prepared.config.do_sample or state.beams is not None:
            return False
        called_with = prepared.input_ids, prepared.config, prepared.model_kwargs
        return is_token_prompt(self.checked.step, self.model, *called_with)

    def _discard_queued_steps(self) -> None:
        """Discards the early prompt if steps are queued after it, since they have changed its state."""
        if self.early.prompt is not None and self.early.prompt.run is not None:
            self.early = self.early._replace(prompt=None)

    def _discard_early_work(self, prepared: PreparedCall, reason: str | None) -> None:
        """Discards the early prompt; an encoder's output is computed anew by the model."""
        self.early = self.early._replace(prompt=None)
        if self.early.encoder_inputs is None:
            return
        prepared.run_encoder(self.model, *self.early.encoder_inputs)
        if reason is None:
            self.early = self.early._replace(note="transformers ran the encoder: the model had changed")


GenerateCall.__signature__ = inspect.Signature(list(inspect.signature(GenerateCall.__call__).parameters.values())[1:])
