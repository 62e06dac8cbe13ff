"""transformers' logits processors for static tensors: what they need of a sequence's length is read on the device.

A processor here is called with a DecodeState and scores [rows, vocab] and returns new scores. `key` tells whether a
captured step with another of the same class serves this one as well, once `tensors` have been copied over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.generation import logits_process

from fuseopt.generation.logits_processors import FusedEncoderNoRepeatNGram, FusedNoRepeatNGram
from fuseopt.generation.state import DecodeState, to_device

_ALWAYS = 2**62


class DeviceProcessor(Protocol):
    @property
    def key(self) -> Hashable: ...

    @property
    def tensors(self) -> tuple[Tensor, ...]: ...

    def __call__(self, state: DecodeState, scores: Tensor) -> Tensor: ...


class WithoutSequence:
    """A processor of transformers that looks at scores only."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.key = (type(processor), *sorted(vars(processor).items()))
        self.tensors = ()

    def __call__(self, state: DecodeState, scores: Tensor) -> Tensor:
        return self.processor(None, scores)


class SetTokens:
    """While sequences are `first` to `end - 1` long: -inf for `tokens`; with `force` for all others, and 0 for them."""

    def __init__(self, tokens: Tensor, first: int, end: int, vocab: int, *, force: bool = False) -> None:
        self.key, self.force = (SetTokens, force), force
        chosen = torch.isin(torch.arange(vocab, device=tokens.device), tokens)
        self.tensors = (chosen, to_device(torch.tensor([first, end], device="cpu"), tokens.device))

    def __call__(self, state: DecodeState, scores: Tensor) -> Tensor:
        chosen, bounds = self.tensors
        now = (state.length >= bounds[0]) & (state.length < bounds[1])
        if self.force:
            forced = torch.full_like(scores, -math.inf).masked_fill_(chosen, 0.0)
            return torch.where(now, forced, scores)
        return scores.masked_fill(now & chosen, -math.inf)


class RepetitionPenalty:
    """Upstream: `RepetitionPenaltyLogitsProcessor`; `ignored` [rows] leading tokens do not count."""

    def __init__(self, penalty: float, ignored: Tensor) -> None:
        self.key, self.penalty = (RepetitionPenalty, penalty), penalty
        self.tensors = (ignored,)

    def __call__(self, state: DecodeState, scores: Tensor) -> Tensor:
        vocab = scores.shape[1]
        positions = torch.arange(state.ids.shape[1], device=scores.device)
        counts = (positions < state.length) & (positions >= self.tensors[0][:, None])
        # A spare column takes the writes that stand for no token.
        tokens = state.ids.masked_fill(~counts, vocab).clamp(max=vocab)
        scores = F.pad(scores, (0, 1))
        penalised = torch.gather(scores, 1, tokens)
        penalised = torch.where(penalised < 0, penalised * self.penalty, penalised / self.penalty)
        return scores.scatter(1, tokens, penalised)[:, :vocab]


class NoRepeatNGram:
    """Upstream: `NoRepeatNGramLogitsProcessor`."""

    def __init__(self, size: int) -> None:
        self.key, self.size = (NoRepeatNGram, size), size
        self.tensors = ()

    def __call__(self, state: DecodeState, scores: Tensor) -> Tensor:
        windows = state.ids.unfold(1, self.size, 1)
        ends = torch.arange(self.size, state.ids.shape[1] + 1, device=scores.device)
        counts = (ends <= state.length) & (state.length >= self.size)
        return _ban_matches(windows, counts, _last_tokens(state, self.size - 1), scores)


class EncoderNoRepeatNGram:
    """Upstream: `EncoderNoRepeatNGramLogitsProcessor`; `windows` [items, n-grams, size] are the encoder's, -1: none."""

    # The n-grams are padded to a multiple of this, so that encoder inputs of similar length share a captured step.
    _PADDED_TO = 64

    def __init__(self, windows: Tensor) -> None:
        windows = F.pad(windows, (0, 0, 0, -windows.shape[1] % self._PADDED_TO), value=-1)
        self.size = windows.shape[2]
        self.key = (EncoderNoRepeatNGram, windows.shape)
        self.tensors = (windows,)

    def __call__(self, state: DecodeState, scores: Tensor) -> Tensor:
        windows = self.tensors[0].repeat_interleave(scores.shape[0] // self.tensors[0].shape[0], dim=0)
        counts = (windows[..., -1] >= 0) & (state.length >= self.size - 1)
        return _ban_matches(windows, counts, _last_tokens(state, self.size - 1), scores)


def _last_tokens(state: DecodeState, count: int) -> Tensor:
    """[rows, count] last tokens of the sequences; meaningless while there are fewer."""
    columns = state.length - count + torch.arange(count, device=state.ids.device)
    return state.ids.index_select(1, columns.clamp(min=0))


def _ban_matches(windows: Tensor, counts: Tensor, prefix: Tensor, scores: Tensor) -> Tensor:
    """-inf for the last token of n-grams in `windows` [rows, n-grams, size] that count and start with `prefix`."""
    vocab = scores.shape[1]
    matches = (windows[..., :-1] == prefix[:, None, :]).all(-1) & counts
    banned = torch.zeros(scores.shape[0], vocab + 1, dtype=torch.bool, device=scores.device)
    banned.scatter_(1, torch.where(matches, windows[..., -1].clamp(max=vocab), vocab), True)
    return scores.masked_fill(banned[:, :vocab], -math.inf)


class _Target(NamedTuple):
    rows: int
    vocab: int
    device: torch.device

    def set_tokens(self, tokens: Any, first: int, end: int, force: bool = False) -> SetTokens:
        if not isinstance(tokens, Tensor):
            tokens = to_device(torch.tensor(tokens, device="cpu"), self.device)
        return SetTokens(tokens.to(self.device), first, end, self.vocab, force=force)


def device_processor(processor: Any, rows: int, vocab: int, device: torch.device) -> DeviceProcessor | None:
    """The same as `processor` on static tensors, or None where there is no such thing; decided by exact type."""
    make = _MAKERS.get(type(processor))
    return None if make is None else make(processor, _Target(rows, vocab, device))


def _forced_bos(processor: Any, target: _Target) -> DeviceProcessor | None:
    if not 0 <= processor.bos_token_id < target.vocab:
        return None
    return target.set_tokens([processor.bos_token_id], 1, 2, force=True)


def _forced_eos(processor: Any, target: _Target) -> DeviceProcessor | None:
    if not all(token < target.vocab for token in processor.eos_token_id.tolist()):
        return None
    last = processor.max_length - 1
    return target.set_tokens(processor.eos_token_id, last, last + 1, force=True)


def _repetition_penalty(processor: Any, target: _Target) -> DeviceProcessor | None:
    ignored = processor.prompt_ignore_length
    if isinstance(ignored, Tensor):
        if ignored.shape[0] != target.rows:
            return None
        ignored = ignored.to(target.device)
    else:
        ignored = torch.full((target.rows,), ignored or 0, device=target.device)
    return RepetitionPenalty(processor.penalty, ignored)


def _encoder_no_repeat_ngram(processor: Any, target: _Target) -> DeviceProcessor | None:
    size, items = processor.ngram_size, processor.generated_ngrams
    ngrams = [[(*prefix, last) for prefix, lasts in item.items() for last in lasts] for item in items]
    if target.rows % len(ngrams) or any(min(ngram) < 0 for item in ngrams for ngram in item):
        return None
    windows = torch.full((len(ngrams), max(map(len, ngrams)), size), -1, device="cpu")
    for item, found in zip(windows, ngrams, strict=True):
        if found:
            item[: len(found)] = torch.tensor(found, device="cpu")
    return EncoderNoRepeatNGram(to_device(windows, target.device))


def _fused_encoder_no_repeat_ngram(processor: Any, target: _Target) -> DeviceProcessor | None:
    ids, size = processor.encoder_input_ids, processor.ngram_size
    if target.rows % ids.shape[0] or ids.device != target.device:
        return None
    return EncoderNoRepeatNGram(F.pad(ids, (0, max(0, size - ids.shape[1])), value=-1).unfold(1, size, 1))


def _without_sequence(processor: Any, target: _Target) -> DeviceProcessor:
    return WithoutSequence(processor)


def _no_repeat_ngram(processor: Any, target: _Target) -> DeviceProcessor:
    return NoRepeatNGram(processor.ngram_size)


_MAKERS: Mapping[type, Callable[[Any, _Target], DeviceProcessor | None]] = {
    logits_process.TemperatureLogitsWarper: _without_sequence,
    logits_process.TopKLogitsWarper: _without_sequence,
    logits_process.TopPLogitsWarper: _without_sequence,
    logits_process.MinPLogitsWarper: _without_sequence,
    logits_process.LogitNormalization: _without_sequence,
    logits_process.InfNanRemoveLogitsProcessor: _without_sequence,
    logits_process.MinLengthLogitsProcessor: lambda processor, target: target.set_tokens(
        processor.eos_token_id, 0, processor.min_length
    ),
    logits_process.MinNewTokensLengthLogitsProcessor: lambda processor, target: target.set_tokens(
        processor.eos_token_id, 0, processor.prompt_length_to_skip + processor.min_new_tokens
    ),
    logits_process.SuppressTokensLogitsProcessor: lambda processor, target: target.set_tokens(
        processor.suppress_tokens, 0, _ALWAYS
    ),
    logits_process.SuppressTokensAtBeginLogitsProcessor: lambda processor, target: target.set_tokens(
        processor.begin_suppress_tokens, processor.begin_index, processor.begin_index + 1
    ),
    logits_process.ForcedBOSTokenLogitsProcessor: _forced_bos,
    logits_process.ForcedEOSTokenLogitsProcessor: _forced_eos,
    logits_process.RepetitionPenaltyLogitsProcessor: _repetition_penalty,
    logits_process.NoRepeatNGramLogitsProcessor: _no_repeat_ngram,
    FusedNoRepeatNGram: _no_repeat_ngram,
    logits_process.EncoderNoRepeatNGramLogitsProcessor: _encoder_no_repeat_ngram,
    FusedEncoderNoRepeatNGram: _fused_encoder_no_repeat_ngram,
}
