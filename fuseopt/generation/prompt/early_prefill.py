"""EarlyPrefill: a GPU works on the prompt, and on first tokens, while transformers prepares the call on the host."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from fuseopt.generation import tiers
from fuseopt.generation.engine.decode_run import DecodeRun
from fuseopt.generation.engine.graphs import StepGraphs
from fuseopt.generation.engine.layers import has_cuda_kernel
from fuseopt.generation.engine.state import DecodeState, Sizes, prompt_length_for
from fuseopt.generation.families.step_interface import DecodeStep
from fuseopt.generation.hf.checked_step import CheckedStep
from fuseopt.generation.prompt.call_outcomes import CallOutcomes, call_key
from fuseopt.generation.prompt.early_work import EarlyPrompt, EarlyWork
from fuseopt.generation.prompt.prompts import run_encoded, run_tokens
from fuseopt.runtime.memory import is_out_of_memory
from fuseopt.runtime.references import weak_attribute

# A prompt whose final cache size is unknown gets a state of its own, up to this many bytes of keys and values.
_MAX_PROMPT_BYTES = 64 * 2**20
# Steps queued speculatively after a prompt: about what a GPU runs while a slow host prepares a call. 0: none.
# TUNED: measurement not recorded; `fuseopt bench generate` measures it again.
_MAX_QUEUED_STEPS = 12


class _Request(NamedTuple):
    """What can be read from the arguments of a call before transformers prepares them.

    Attributes:
        ids: prompts [items, length] int64.
        mask: attention mask of the same shape, or None.
        extra: the arguments that are not parameters of generate().
        sizes: of the state that the call will decode in; None if the arguments do not determine them.
        max_steps: tokens a row to generate at most; 0 if unknown.
        first_token: the decoder's first input token; None if unknown, and for decoder-only models.
        key: in `CallOutcomes`; None if `sizes` are unknown.
    """

    ids: Tensor
    mask: Tensor | None
    extra: Mapping[str, Any]
    sizes: Sizes | None
    max_steps: int
    first_token: int | None
    key: Any


class EarlyPrefill:
    """Queues the prompt of a call on a stream of its own, before transformers prepares the call.

    The side stream matters because transformers waits for the current stream several times in its preparation. The
    output of an encoder is handed to transformers as `encoder_outputs`. A decoder's prompt is handed to the decode
    loop, which takes it if the prepared call contains the caller's own tensors.

    `start` speculates, before it is known who serves the call: it queues a prompt, and first steps if an earlier call
    with the same arguments ended in the device loop. `take` keeps that work or discards it, and without any queues the
    prompt. `StepGraphs.join` makes the current stream wait for all of it.

    Args:
        checked: the model's decode step.
        graphs: where captured prompts are kept.
        max_batch, max_length: rows, and slots of the cache, up to which calls are served; None for any number.

    Attributes:
        outcomes: how earlier calls ended; the caller records them.
    """

    model = weak_attribute("model")

    def __init__(self, checked: CheckedStep, graphs: StepGraphs, max_batch: int, max_length: int | None) -> None:
        self.model = checked.model
        self.checked, self.graphs, self.max_batch, self.max_length = checked, graphs, max_batch, max_length
        self.outcomes = CallOutcomes()

    def start(self, arguments: Mapping[str, Any], extra: Mapping[str, Any]) -> EarlyWork | None:
        """Queues the prompt of a call that looks like an earlier one whose prompt had no token masked.

        Reads neither the mask nor the reasons against the fast tiers, since both take longer than queuing. Call it only
        if `checked.is_in_place()`.

        Args:
            arguments: all arguments of generate(), by name.
            extra: those of them that are not parameters of generate().

        Returns:
            None if there is no such earlier call, or no memory.
        """
        step, ids = self.checked.step, prompt_of(arguments)
        if "encoder_outputs" in extra or not tiers.is_token_ids(ids, step.shape.device):
            return None
        if self._runs_no_encoder(step):
            return None
        if step.encoder_class is not None and not self.checked.is_encoder_in_place():
            return None
        request = self._request(arguments, extra, ids)
        outcome = self.outcomes.get(request.key)
        if outcome is None or not outcome.is_unmasked:
            return None
        try:
            with torch.no_grad():
                return self._queue(request, None)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        return None

    def take(
        self,
        arguments: Mapping[str, Any],
        extra: Mapping[str, Any],
        speculated: EarlyWork | None,
        *,
        check_encoder: bool,
    ) -> EarlyWork:
        """Returns `speculated` if the call is as expected; discards it otherwise, and queues the prompt if possible.

        Waits for the device once, if there is a mask, to see whether it excludes a token.

        Args:
            arguments, extra: as for `start`.
            speculated: what `start` returned for this call.
            check_encoder: check the modules of the encoder now. Otherwise the work is valid only once
                `checked.confirm` has returned.
        """
        step = self.checked.step
        encodes = step.encoder_class is not None
        # Some versions of transformers do not run the encoder if encoder_outputs=None is passed.
        captures = self.graphs.max_graphs and has_cuda_kernel("decode_attention", step.token_embedding)
        if "encoder_outputs" in extra or not captures or self._runs_no_encoder(step):
            return EarlyWork(extra)
        reason = next(tiers.early_prefill_reasons(self.model, step.shape.device, arguments, extra), None)
        if reason is None and encodes:
            reason = self.checked.use_encoder(check_now=check_encoder)
        if reason is not None:
            return EarlyWork(extra, note=f"transformers ran the encoder: {reason}" if encodes else "")
        ids, mask = prompt_of(arguments), arguments.get("attention_mask")
        try:
            with torch.no_grad():
                # Worth the wait: attention without a mask is faster, and needs one captured prompt instead of two.
                fewest = None if mask is None else int((mask == 1).sum(dim=1).min())
                keep = None if fewest in (None, ids.shape[1]) else mask
                if encodes and fewest == 0:
                    return EarlyWork(extra)  # the decode loop may not serve such a call
                if speculated is not None and keep is None:
                    return speculated
                return self._queue(self._request(arguments, extra, ids), keep)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return EarlyWork(extra, note="there was no memory to queue the prompt early")

    def _runs_no_encoder(self, step: DecodeStep) -> bool:
        """Whether the prompt belongs to an encoder that only transformers runs."""
        return bool(self.model.config.is_encoder_decoder) and step.encoder_class is None

    def _request(self, arguments: Mapping[str, Any], extra: Mapping[str, Any], ids: Tensor) -> _Request:
        sizes, max_steps = self._expected_sizes(arguments, ids) or (None, 0)
        first_token = None
        if self.checked.step.encoder_class is not None:
            first_token = _first_token(self.model, arguments)
        key = None if sizes is None else call_key(sizes, arguments)
        return _Request(ids, arguments.get("attention_mask"), extra, sizes, max_steps, first_token, key)

    def _expected_sizes(self, arguments: Mapping[str, Any], ids: Tensor) -> tuple[Sizes, int] | None:
        """Sizes of the call's state and its number of steps; None if unknown or beyond what the loop serves."""
        step, (items, length) = self.checked.step, ids.shape
        encodes = step.encoder_class is not None
        setting = functools.partial(tiers.setting_of, self.model, arguments)
        new, limit = setting("max_new_tokens"), setting("max_length")
        beams, sequences = setting("num_beams") or 1, setting("num_return_sequences") or 1
        prompt = 1 if encodes else length
        if isinstance(new, int):
            limit = prompt + new
        if not all(isinstance(number, int) and number > 0 for number in (limit, beams, sequences)) or limit <= prompt:
            return None
        if 1 < beams < sequences:
            return None  # transformers raises for it
        rows, capacity, longest = items * max(beams, sequences), limit - 1, step.max_length
        if rows > self.max_batch or (self.max_length is not None and max(capacity, length) > self.max_length):
            return None
        if longest is not None and capacity > longest:
            return None
        sizes = Sizes(rows, capacity, length if encodes else 0, rows // items, beams).rounded_up()
        return sizes, limit - prompt

    def _queue(self, request: _Request, keep: Tensor | None) -> EarlyWork:
        """Queues the prompt. `keep`: attention mask [items, length], or None if it excludes nothing."""
        if self.checked.step.encoder_class is not None:
            return self._queue_encoder(request, keep)
        prompt = self._queue_prompt(request, keep)
        return EarlyWork(request.extra, prompt, is_unmasked=keep is None, call_key=request.key)

    def _queue_encoder(self, request: _Request, keep: Tensor | None) -> EarlyWork:
        step, encoder, ids, first_token = self.checked.step, self.checked.encoder, request.ids, request.first_token
        assert encoder is not None, "start and take have prepared it"
        buffers = encoder.state_for(self.graphs, *ids.shape)
        if buffers is None:
            return EarlyWork(request.extra)
        state = None if request.sizes is None or first_token is None else self._state(request.sizes)
        prompt = None
        with self.graphs.on_side_stream(ids.device):
            encoded, note = encoder(self.graphs, buffers, ids, keep)
            output = BaseModelOutput(encoded)
            if state is not None and first_token is not None:
                decoder_note = run_encoded(step, self.graphs, state, encoded, keep, first_token)
                run = self._queue_steps(request, state, state.tokens.unsqueeze(1))
                prompt = EarlyPrompt(output, request.mask, state, decoder_note, first_token, run)
        if state is None or state.sizes.queries_per_kv > 1:
            # transformers goes on to copy the output, on the current stream.
            self.graphs.join(ids.device)
        extra = {**request.extra, "encoder_outputs": output}
        return EarlyWork(extra, prompt, note, buffers, keep is None, (ids, request.mask), request.key)

    def _queue_prompt(self, request: _Request, keep: Tensor | None) -> EarlyPrompt | None:
        step, input_ids, sizes = self.checked.step, request.ids, request.sizes
        rows, length = input_ids.shape
        padded, longest = prompt_length_for(rows, length, input_ids.device), step.max_length
        if length == 1:
            return None
        if sizes is None:
            if padded is None or (longest is not None and length > longest):
                return None
            if self.max_length is not None and padded > self.max_length:
                return None
            if rows * padded * step.shape.bytes_per_slot > _MAX_PROMPT_BYTES:
                return None
            sizes = Sizes(rows, padded)
        state = self._state(sizes)
        with self.graphs.on_side_stream(input_ids.device):
            positions = None
            if keep is not None:
                given = {"attention_mask": keep}
                positions = type(self.model)._prepare_position_ids_for_generation(self.model, input_ids, given)
            step.begin()
            note = run_tokens(step, self.graphs, state, input_ids, keep, positions)
            run = self._queue_steps(request, state, input_ids, has_ids=True)
        return EarlyPrompt(input_ids, request.mask, state, note, run=run)

    def _queue_steps(
        self, request: _Request, state: DecodeState, input_ids: Tensor, *, has_ids: bool = False
    ) -> DecodeRun | None:
        """Queues the first steps of a call like which an earlier one ended in the device loop, by a captured step."""
        outcome = self.outcomes.get(request.key)
        work = None if outcome is None else self.graphs.captured(outcome.step_key)
        if outcome is None or work is None or work.state is not state or not _MAX_QUEUED_STEPS:
            return None
        run = DecodeRun(work, input_ids, outcome.pad, request.max_steps, has_ids=has_ids)
        count = min(_MAX_QUEUED_STEPS, request.max_steps, outcome.steps)
        while run.queued < count:
            run.queue_next(count - run.queued)
        return run

    def _state(self, sizes: Sizes) -> DecodeState:
        step = self.checked.step
        return self.graphs.state(sizes, lambda: step.new_state(sizes))


def prompt_of(arguments: Mapping[str, Any]) -> Any:
    """The prompt given to generate(), as `inputs` or as `input_ids`."""
    inputs = arguments.get("inputs")
    return arguments.get("input_ids") if inputs is None else inputs


def _first_token(model: nn.Module, arguments: Mapping[str, Any]) -> int | None:
    """The id with which `_prepare_decoder_input_ids_for_generation` will begin; None if it may be another."""
    first = tiers.setting_of(model, arguments, "decoder_start_token_id")
    return first if type(first) is int and arguments.get("decoder_input_ids") is None else None
