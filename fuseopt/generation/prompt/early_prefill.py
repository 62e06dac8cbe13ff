"""HeadStart: a GPU works on the prompt, and on first tokens, while the host is in transformers' preparation."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from fuseopt.generation import tiers
from fuseopt.generation.engine.decode_run import DecodeRun
from fuseopt.generation.engine.graphs import StepGraphs
from fuseopt.generation.engine.layers import has_kernel
from fuseopt.generation.engine.state import DecodeState, Sizes, prompt_length_for
from fuseopt.generation.families.step_interface import DecodeStep, EncoderStep
from fuseopt.generation.hf.fingerprint import Survey, survey
from fuseopt.generation.hf.prepared_configs import PLAIN
from fuseopt.generation.prompt.prompts import run_encoded, run_forward
from fuseopt.runtime.references import weak_attribute

# Of keys and values of a prompt that may have to be kept twice: what a few of this size take is not missed elsewhere.
_MOST_BYTES = 64 * 2**20
# For as long as transformers prepares a call on a slow host.
_STEPS = 12
_PLANS_KEPT = 16


class Plan(NamedTuple):
    """What a call came to whose prompt ran ahead; one that looks the same is expected to come to it again.

    Attributes:
        is_whole: its prompts had no token masked.
        key: of the step of its tokens, which may go; None if only its prompt is to be expected again.
        pad: the id that finished rows were given, [] int64, or None.
        tokens: how many a row came to. Steps behind the end would be in vain.
    """

    is_whole: bool
    key: Hashable = None
    pad: Tensor | None = None
    tokens: int = 0


class _Expected(NamedTuple):
    """Of a call, as far as its arguments tell.

    Attributes:
        sizes: of the state that it is going to decode in.
        steps: that it takes at most.
    """

    sizes: Sizes
    steps: int


class _Call(NamedTuple):
    """What a call's arguments tell.

    Attributes:
        ids: the prompts [items, length] int64.
        mask: of the same shape, or None.
        others: the arguments that generate() passes on to whom they may concern.
        expected: None where they do not tell.
        first: what a decoder behind an encoder begins with, likewise.
        likeness: None where it can have no plan.
    """

    ids: Tensor
    mask: Tensor | None
    others: Mapping[str, Any]
    expected: _Expected | None
    first: int | None
    likeness: Hashable


@dataclass(frozen=True)
class Ahead:
    """A prompt that has been queued already, for a call that is as plain as it looks.

    Attributes:
        inputs: what stands for it in the prepared call: the caller's own input_ids [rows, length], or an encoder's
            output that transformers has been given.
        attention_mask: of the prompt's shape, the caller's own, or None.
        state: as a prefill leaves it; with room for the prompt alone if it is not the one that the call decodes in.
        note: why it could not be captured, or nothing.
        first: what the decoder behind an encoder has been given to begin with, in all rows.
        run: the call's steps, of which the first are queued behind the prompt, or None.
    """

    inputs: Any
    attention_mask: Tensor | None
    state: DecodeState
    note: str
    first: int | None = None
    run: DecodeRun | None = None

    def stands_for(self, mask: Tensor | None, first: Any) -> bool:
        """Whether an encoder's output went on to what a call turns out to begin with."""
        return self.first == first and (self.attention_mask is None) == (mask is None)

    def load(self, state: DecodeState) -> None:
        """Gives another state the keys, values and logits of a decoder's prompt."""
        length = self.inputs.shape[1]
        state.cache[:, :, :, :, :length] = self.state.cache[:, :, :, :, :length]
        state.logits.copy_(self.state.logits)


class Started(NamedTuple):
    """What a call has been relieved of.

    Attributes:
        others: the arguments that generate() passes on to whom they may concern, with the output of an encoder.
        ahead: for the decode loop.
        note: for the report.
        held: what the device may still use until it has been waited for.
        is_whole: no token of the prompts is masked.
        encoded: the prompts [items, length] that an encoder has been given, and their mask of this shape, or None.
        likeness: what the call looks like, for `HeadStart.remember`; None where it can have no plan.
    """

    others: Mapping[str, Any]
    ahead: Ahead | None = None
    note: str = ""
    held: Any = None
    is_whole: bool = False
    encoded: tuple[Tensor, Tensor | None] | None = None
    likeness: Hashable = None


class HeadStart:
    """Call: the arguments of a generate() -> what it has been relieved of.

    What runs does so beside the current stream, where transformers' preparation waits for the device every so often.
    An encoder's output goes to transformers as one of the arguments. What has become of a prompt goes to the decode
    loop, which takes it if it finds the call prepared as expected. So do the first steps behind a prompt, which are
    queued where a call with the same arguments has been served before.

    Args:
        model: an instance of the step's `model_class`; referred to weakly.
        graphs: where captured prompts are kept.
        max_batch, max_length: rows, and slots of the cache, up to which calls are served.
    """

    model = weak_attribute("model")

    def __init__(self, model: nn.Module, graphs: StepGraphs, max_batch: int, max_length: int) -> None:
        self.model, self.graphs, self.max_batch, self.max_length = model, graphs, max_batch, max_length
        self._encoder: EncoderStep | None = None
        self._key: tuple[Hashable, ...] = ()
        self._survey: Survey | None = None
        self._has_looked = True
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()

    def guess(self, step: DecodeStep, arguments: Mapping[str, Any], others: Mapping[str, Any]) -> Started | None:
        """What a call comes to that looks like one with a plan, if nothing speaks against it and no token is masked.

        That is queued before any of it is asked, which takes the host longer than all this. Where it turns out
        otherwise what is queued counts for nothing.

        Args:
            step: of `model`, whose weights are where they were.
            arguments, others: as in a call.
        """
        ids = prompt_of(arguments)
        if not self._plans or "encoder_outputs" in others or not tiers.is_token_ids(ids, step.shape.device):
            return None
        if step.encoder_class is not None and (self._survey is None or not self._survey.is_in_place()):
            return None
        call = self._call_of(step, arguments, others, ids)
        plan = self._plans.get(call.likeness)
        if plan is None or not plan.is_whole:
            return None
        with suppress(torch.OutOfMemoryError), torch.no_grad():
            return self._start(step, call, None)
        return None

    def __call__(
        self,
        step: DecodeStep,
        arguments: Mapping[str, Any],
        others: Mapping[str, Any],
        guess: Started | None = None,
        *,
        looks: bool = False,
    ) -> Started:
        """Queues what it can, for `graphs.join` to wait for.

        What stands on an encoder whose weights are where they were counts only if `is_confirmed`.

        Args:
            step: of `model`.
            arguments: all, by name.
            others: those of them that generate() passes on to whom they may concern.
            guess: of this call.
            looks: at all that an encoder stands on, first.
        """
        # Some versions of transformers run no encoder where None is given.
        encodes, encoded = step.encoder_class is not None, "encoder_outputs" in others
        captures = self.graphs.max_graphs and has_kernel("decode_attention", step.token_embedding)
        self._has_looked = True
        if encoded or not captures:
            return Started(others)
        reason = next(tiers.ahead_reasons(self.model, step.shape.device, arguments, others), None)
        if reason is None and encodes:
            self._has_looked = looks or self._survey is None or not self._survey.is_in_place()
            reason = self._prepare_encoder(step) if self._has_looked else None
        if reason is not None:
            return Started(others, note=f"transformers ran the encoder: {reason}" if encodes else "")
        ids, mask = prompt_of(arguments), arguments.get("attention_mask")
        try:
            with torch.no_grad():
                # Worth a wait: without a mask, attention is faster, and there is one kind of prompts to capture.
                fewest = None if mask is None else int((mask == 1).sum(dim=1).min())
                keep = None if fewest in (None, ids.shape[1]) else mask
                if encodes and fewest == 0:
                    return Started(others)  # to a call that the loop may not serve
                if guess is not None and keep is None:
                    return guess
                return self._start(step, self._call_of(step, arguments, others, ids), keep)
        except torch.OutOfMemoryError:
            return Started(others, note="there was no memory to run the prompt ahead")

    def _call_of(self, step: DecodeStep, arguments: Mapping[str, Any], others: Mapping[str, Any], ids: Tensor) -> _Call:
        expected, first = self._expected(step, arguments, ids), None
        if step.encoder_class is not None:
            first = _first_token(self.model, arguments)
        likeness = None if expected is None else (expected.sizes, *map(_likeness, sorted(arguments.items())))
        return _Call(ids, arguments.get("attention_mask"), others, expected, first, likeness)

    def _start(self, step: DecodeStep, call: _Call, keep: Tensor | None) -> Started:
        if step.encoder_class is not None:
            return self._encode(step, call, keep)
        ahead = self._prefill(step, call, keep)
        return Started(call.others, ahead, is_whole=keep is None, likeness=call.likeness)

    def remember(self, likeness: Hashable, plan: Plan | None) -> None:
        """Expects calls that look like this to come to this plan, or to none."""
        self._plans.pop(likeness, None)
        if likeness is not None and plan is not None:
            self._plans[likeness] = plan
            if len(self._plans) > _PLANS_KEPT:
                self._plans.popitem(last=False)

    def is_confirmed(self, step: DecodeStep) -> bool:
        """Whether a look at all that the encoder stands on finds it as it was when a call began."""
        before = self._encoder
        return self._has_looked or (self._prepare_encoder(step) is None and self._encoder is before)

    def _prepare_encoder(self, step: DecodeStep) -> str | None:
        """Makes the encoder, anew where what it stands on has changed, or says why it has to be transformers' own."""
        found = self._survey = survey(self.model, (self.model.encoder,), step.children, self._survey)
        if found.reason is not None:
            return found.reason
        encoder_class = step.encoder_class
        assert encoder_class is not None
        key = (*found.key, *encoder_class.constants(self.model))
        if self._encoder is None or key != self._key:
            self.graphs.clear()
            self._encoder, self._key = encoder_class(self.model), key
        return None

    def _expected(self, step: DecodeStep, arguments: Mapping[str, Any], ids: Tensor) -> _Expected | None:
        """None where the arguments do not tell, or the loop is not going to serve the call."""
        encodes, (items, length) = step.encoder_class is not None, ids.shape
        setting = functools.partial(tiers.setting_of, self.model, arguments)
        new, limit = setting("max_new_tokens"), setting("max_length")
        beams, sequences = setting("num_beams") or 1, setting("num_return_sequences") or 1
        prompt = 1 if encodes else length
        if isinstance(new, int):
            limit = prompt + new
        if not all(isinstance(number, int) and number > 0 for number in (limit, beams, sequences)) or limit <= prompt:
            return None
        if 1 < beams < sequences:
            return None  # which transformers is going to refuse
        rows, capacity, longest = items * max(beams, sequences), limit - 1, step.max_length
        if rows > self.max_batch or max(capacity, length) > self.max_length:
            return None
        if longest is not None and capacity > longest:
            return None
        sizes = Sizes(rows, capacity, length if encodes else 0, rows // items, beams).of_class()
        return _Expected(sizes, limit - prompt)

    def _state(self, step: DecodeStep, sizes: Sizes) -> DecodeState:
        return self.graphs.state(sizes, lambda: DecodeState(sizes, step.shape, step.vocab))

    def _encode(self, step: DecodeStep, call: _Call, keep: Tensor | None) -> Started:
        ids, expected, first, encoder = call.ids, call.expected, call.first, self._encoder
        assert encoder is not None, "guess and __call__ have prepared it"
        own = encoder.state_for(self.graphs, *ids.shape)
        if own is None:
            return Started(call.others)
        state = None if expected is None or first is None else self._state(step, expected.sizes)
        ahead = None
        with self.graphs.beside(ids.device):
            encoded, note = encoder(self.graphs, own, ids, keep)
            output = BaseModelOutput(encoded)
            if state is not None and first is not None and expected is not None:
                ran = run_encoded(step, self.graphs, state, encoded, keep, first)
                run = self._queued(call.likeness, state, state.tokens.unsqueeze(1), expected.steps)
                ahead = Ahead(output, call.mask, state, ran, first, run)
        if state is None or state.sizes.queries_per_kv > 1:
            # transformers goes on to copy it.
            self.graphs.join(ids.device)
        others = {**call.others, "encoder_outputs": output}
        return Started(others, ahead, note, own, keep is None, (ids, call.mask), call.likeness)

    def _prefill(self, step: DecodeStep, call: _Call, keep: Tensor | None) -> Ahead | None:
        input_ids, expected = call.ids, call.expected
        rows, length = input_ids.shape
        padded, longest = prompt_length_for(rows, length), step.max_length
        if length == 1:
            return None
        if expected is not None:
            sizes = expected.sizes
        elif padded is None or padded > self.max_length or (longest is not None and length > longest):
            return None
        else:
            sizes = Sizes(rows, padded)
            if rows * padded * step.shape.bytes_per_slot > _MOST_BYTES:
                return None
        state = self._state(step, sizes)
        with self.graphs.beside(input_ids.device):
            positions = None
            if keep is not None:
                given = {"attention_mask": keep}
                positions = type(self.model)._prepare_position_ids_for_generation(self.model, input_ids, given)
            state.load_prompt(input_ids, keep, positions)
            note = run_forward(step.prefill, self.graphs, state, rows, length, keep is not None)
            run = None
            if expected is not None:
                run = self._queued(call.likeness, state, input_ids, expected.steps, has_ids=True)
        return Ahead(input_ids, call.mask, state, note, run=run)

    def _queued(
        self, likeness: Hashable, state: DecodeState, input_ids: Tensor, steps: int, *, has_ids: bool = False
    ) -> DecodeRun | None:
        """The first steps of a call that looks like one with a plan."""
        plan = self._plans.get(likeness)
        step = None if plan is None else self.graphs.captured(plan.key)
        if plan is None or step is None or step.state is not state:
            return None
        run = DecodeRun(step, input_ids, plan.pad, steps, has_ids=has_ids)
        most = min(_STEPS, steps, plan.tokens)
        while run.taken < most:
            run.take(most - run.taken)
        return run


def prompt_of(arguments: Mapping[str, Any]) -> Any:
    """What generate() has been given as a prompt, by either name."""
    inputs = arguments.get("inputs")
    return arguments.get("input_ids") if inputs is None else inputs


def _likeness(argument: tuple[Hashable, Any]) -> Hashable:
    """A name with its value where that is plain, or which object that is; of tensors, dicts and a streamer the kind."""
    name, value = argument
    if isinstance(value, (list, tuple)):
        return name, type(value), *map(_likeness, enumerate(value))
    if isinstance(value, (Tensor, dict)) or name == "streamer":
        return name, type(value)
    return name, type(value), value if type(value) in PLAIN else id(value)


def _first_token(model: nn.Module, arguments: Mapping[str, Any]) -> int | None:
    """What `_prepare_decoder_input_ids_for_generation` is going to begin with, where that can be told."""
    first = tiers.setting_of(model, arguments, "decoder_start_token_id")
    return first if type(first) is int and arguments.get("decoder_input_ids") is None else None
