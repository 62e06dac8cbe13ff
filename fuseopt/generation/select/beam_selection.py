"""BeamSelection: from logits to the beams of the next step and the best finished beams, on the device."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.generation.stopping_criteria import EosTokenCriteria

from fuseopt import ops
from fuseopt.generation.engine.beam_state import BeamState
from fuseopt.generation.engine.device_constants import DeviceConstantCache
from fuseopt.generation.engine.layers import has_cuda_kernel
from fuseopt.generation.engine.state import DecodeState
from fuseopt.generation.prepared_call import PreparedCall
from fuseopt.generation.select.device_processors import DeviceProcessor
from fuseopt.generation.select.selection import Selection
from fuseopt.ops.decode.beam_candidates import MAX_COUNT
from fuseopt.ops.decode.torch_draw import MOST_NUMBERS


class BeamSelection(Selection):
    """Call: a DecodeState and logits [rows, vocab] -> nothing; writes the state's beams, tokens, ids and flags.

    Upstream: the loop of `GenerationMixin._beam_search` from the logits on; among equal candidates the same one wins.
    Steps after the end of the search change nothing that is returned.

    Args:
        processors, eos, keep_logits, keep_scores: as for Selection.
        config: the call's GenerationConfig.
        length: of the prompts.
        limit: the length at which all sequences end.
        state: the one that this selection will be called with.
        constants: cache of host constants on the device.
    """

    _draws_tokens = False  # but continuations, from the scores of all beams of an item

    def __init__(
        self,
        processors: tuple[DeviceProcessor, ...],
        config: Any,
        eos: Tensor | None,
        length: int,
        limit: int,
        state: DecodeState,
        constants: DeviceConstantCache,
        *,
        keep_logits: bool = False,
        keep_scores: bool = False,
    ) -> None:
        super().__init__(processors, bool(config.do_sample), eos, keep_logits=keep_logits, keep_scores=keep_scores)
        self._takes_likeliest = False
        self.candidates = candidates(config)
        # Other values of early_stopping differ only in the length penalties.
        self.stops_when_full = config.early_stopping is True
        self.key = ("beams", self.candidates, self.stops_when_full, self.key)
        device = state.ids.device
        self.limit = constants.to_device(torch.tensor([limit], device="cpu"), device)
        # With "never", a running beam is rated with the penalty of the maximal length, the best that it can reach.
        longest = config.max_length - length if config.early_stopping == "never" else None
        penalties = _penalties(config.length_penalty, longest, state.sizes.capacity + 2)
        self.penalties = constants.to_device(penalties, device)

    @property
    def not_captured(self) -> str:
        if self.candidates <= MAX_COUNT:
            return ""
        return f"the beam search kernels take up to {MAX_COUNT} candidates an item, not {self.candidates}"

    @property
    def may_end_early(self) -> bool:
        return True

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors, self.limit, self.penalties)

    def _clone_tensors(self) -> None:
        super()._clone_tensors()
        self.limit, self.penalties = self.limit.clone(), self.penalties.clone()

    def _kernel_draws(self, state: DecodeState) -> bool:
        on_gpu = has_cuda_kernel("beam_candidates", state.logits)
        return on_gpu and self.candidates <= MAX_COUNT and state.logits.numel() <= MOST_NUMBERS

    def begin(self, state: DecodeState, input_ids: Tensor, pad: Tensor | None, has_ids: bool = False) -> None:
        super().begin(state, input_ids, pad, has_ids=True)
        _beams_of(state).begin(input_ids)

    def __call__(self, state: DecodeState, logits: Tensor, *, advance: bool = True) -> None:
        beams = _beams_of(state)
        if self.keep_logits:
            state.logits.copy_(logits)
        values, places = self._continuations(state, beams, logits)
        ops.decode_beams_(
            values,
            places,
            beams.running_scores,
            beams.scores,
            beams.is_finished,
            beams.lengths,
            beams.improvable,
            beams.ids,
            beams.ancestry,
            state.tokens,
            state.going,
            state.length,
            beams.generated,
            state.counters,
            beams.arrived,
            self.limit,
            self.penalties,
            self.eos,
            vocabulary=logits.shape[1],
            stops_when_full=self.stops_when_full,
            advance=advance,
            pdl=True,
        )

    def _continuations(self, state: DecodeState, beams: BeamState, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Accumulated scores of each item's candidates and their index in [beams * vocab], both [items, candidates]."""
        fuses_softmax = not (self.do_sample or self.keep_scores or self._processors_before)
        scores = logits
        if not fuses_softmax:
            scores = self._processed(state, F.log_softmax(logits, dim=-1, dtype=torch.float32))
        if not self.do_sample:
            edits, running_scores = self._edits_left(state), beams.running_scores
            return ops.beam_candidates(
                scores, running_scores, self.candidates, log_softmax=fuses_softmax, edits=edits, pdl=True
            )
        scores, highest = ops.filter_scores(scores, filters=self._filters, edits=self._edits_left(state), pdl=True)
        if self._op_keeps_scores:
            state.scores.copy_(scores)
        if self.offset_of_draw(state):
            return ops.drawn_continuations(scores, beams.running_scores, self.candidates, state.random, highest=highest)
        accumulated = scores.unflatten(0, beams.shape) + beams.running_scores[:, :, None]
        accumulated = accumulated.flatten(1)
        places = torch.multinomial(nn.functional.softmax(accumulated, dim=-1), num_samples=self.candidates)
        return torch.gather(accumulated, 1, places), places


def selection_of(
    prepared: PreparedCall,
    processors: tuple[DeviceProcessor, ...],
    state: DecodeState,
    constants: DeviceConstantCache,
    *,
    keep_scores: bool,
    keep_logits: bool,
) -> Selection:
    """The selection that transformers' decoding method would make in a prepared call.

    Args:
        state: that the call decodes in.
        keep_scores, keep_logits: as for Selection.
    """
    config = prepared.config
    eos = next((c.eos_token_id for c in prepared.criteria if type(c) is EosTokenCriteria), None)
    eos = None if eos is None else eos.to(prepared.input_ids.device)
    keep = {"keep_logits": keep_logits, "keep_scores": keep_scores}
    if state.beams is None:
        return Selection(processors, bool(config.do_sample), eos, **keep)
    return BeamSelection(processors, config, eos, *prepared.bounds, state, constants, **keep)


def candidates(config: Any) -> int:
    """How many candidates an item has: enough that one per beam does not end with EOS."""
    eos = config._eos_token_tensor
    return max(2, 1 + (0 if eos is None else eos.shape[0])) * config.num_beams


def not_on_device(config: Any, vocab: int, named_vocab: int, length: int, limit: int) -> Iterator[str]:
    """Reasons for T1 in the settings of beam search, most of which make transformers raise."""
    penalty, eos, pad = config.length_penalty, config._eos_token_tensor, config._pad_token_tensor
    if config.low_memory:
        yield "low_memory is refused by beam search"
    if eos is not None and not eos.shape[0] and (pad is None or pad == 0):
        yield "eos_token_id is empty and there is no pad token other than 0"
    if vocab != named_vocab:
        yield f"the logits have {vocab} tokens, the model's config says {named_vocab}"
    if candidates(config) > config.num_beams * vocab:
        yield f"an item has fewer than {candidates(config)} candidates"
    if type(config.max_length) is not int:
        yield f"max_length is a {type(config.max_length).__name__}"
    elif config.max_length <= length:
        yield f"max_length, {config.max_length}, does not exceed the prompt's length"
    elif limit > config.max_length:
        yield f"the stopping criteria allow sequences longer than max_length, {config.max_length}"
    elif not isinstance(penalty, int | float):
        yield f"length_penalty is a {type(penalty).__name__}"
    elif not abs(penalty) * (max(limit, config.max_length) - length).bit_length() < 62:
        yield f"length_penalty {penalty} leads to numbers out of range"


def fill_of(config: Any) -> Tensor:
    """The id [] after the end of sequences that end early."""
    pad, eos = config._pad_token_tensor, config._eos_token_tensor
    if eos is None:
        return torch.tensor(-1)
    if pad is None or not eos.shape[0]:
        return eos[0] if pad is None else pad
    return torch.where(pad != 0, pad, eos[0])


@functools.lru_cache(maxsize=16)
def _penalties(penalty: float, longest: int | None, count: int) -> Tensor:
    """[2, count] float64, by tokens generated: divisors of the scores of finished beams and of running beams.

    Args:
        longest: length at which running beams are rated; None for their current length.
    """
    own = [float(max(1, generated) ** penalty) for generated in range(count)]
    best = own if longest is None or penalty <= 0.0 else [float(longest**penalty)] * count
    return torch.tensor([own, best], dtype=torch.float64, device="cpu")


def _beams_of(state: DecodeState) -> BeamState:
    assert state.beams is not None
    return state.beams
