"""FusedLogitsProcessorList: transformers' own logits processors, with neighbours run as one op."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
)

from fuseopt import ops
from fuseopt.ops.registry import FLOATING

_STAGES: dict[type, int] = {
    RepetitionPenaltyLogitsProcessor: 0,
    NoRepeatNGramLogitsProcessor: 1,
    EncoderNoRepeatNGramLogitsProcessor: 1,
    MinLengthLogitsProcessor: 1,
    MinNewTokensLengthLogitsProcessor: 1,
    SuppressTokensLogitsProcessor: 1,
    SuppressTokensAtBeginLogitsProcessor: 1,
    TemperatureLogitsWarper: 2,
}
"""The processors that `ops.process_logits` implements, and its order: bans, stage 1, may come in any order."""

_RETURN_SCORES_WHEN_IDLE = {NoRepeatNGramLogitsProcessor, SuppressTokensAtBeginLogitsProcessor}

_KEEP_NOTHING = {
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SequenceBiasLogitsProcessor,
}
"""Processors that return their scores or new ones, and keep a reference to neither."""


class ProcessorGroup:
    """Neighbouring processors of a list as one `ops.process_logits`, with bitwise the same result.

    Their attributes are read in each call. Inputs that the op does not support (three dimensions, sizes that do not
    fit) go to the processors themselves.
    """

    def __init__(self, processors: Sequence[LogitsProcessor], encoder_input_ids: Tensor | None, backend: str) -> None:
        self.processors, self.encoder_input_ids, self.backend = processors, encoder_input_ids, backend
        of_class: dict[type, Any] = {type(processor): processor for processor in processors}
        self._penalty = of_class.get(RepetitionPenaltyLogitsProcessor)
        self._ngram = of_class.get(NoRepeatNGramLogitsProcessor)
        self._encoder_ngram = of_class.get(EncoderNoRepeatNGramLogitsProcessor)
        self._minimum = of_class.get(MinLengthLogitsProcessor)
        self._new_minimum = of_class.get(MinNewTokensLengthLogitsProcessor)
        self._suppress = of_class.get(SuppressTokensLogitsProcessor)
        self._suppress_at_begin = of_class.get(SuppressTokensAtBeginLogitsProcessor)
        self._warper = of_class.get(TemperatureLogitsWarper)
        self._returns_scores_when_idle = of_class.keys() <= _RETURN_SCORES_WHEN_IDLE
        self._suppressed_parts: list[Tensor] = []
        self._suppressed: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor, inplace: bool) -> Tensor:
        """`input_ids` [rows, length], `scores` [rows, vocab] -> processed scores; `inplace` writes them to `scores`."""
        if not self._is_supported(input_ids, scores):
            for processor in self.processors:
                scores = processor(input_ids, scores)
            return scores
        length = input_ids.shape[1]
        options: dict[str, Any] = {}
        penalty, ngram, encoder_ngram, warper = self._penalty, self._ngram, self._encoder_ngram, self._warper
        if penalty is not None:
            options["repetition_penalty"] = penalty.penalty
            if penalty.prompt_ignore_length is not None:
                penalty.prompt_ignore_length = penalty.prompt_ignore_length.to(scores.device)  # as upstream does
                options["prompt_ignore_length"] = penalty.prompt_ignore_length
        if ngram is not None and length >= ngram.ngram_size:
            options["no_repeat_ngram_size"] = ngram.ngram_size
        if encoder_ngram is not None:
            options["encoder_no_repeat_ngram_size"] = encoder_ngram.ngram_size
            options["encoder_input_ids"] = self.encoder_input_ids
        suppress_tokens = self._suppress_tokens(length, scores.device)
        if suppress_tokens is not None:
            options["suppress_tokens"] = suppress_tokens
        if warper is not None:
            options["temperature"] = warper.temperature
        if not options:
            return scores if inplace or self._returns_scores_when_idle else scores.clone()
        return ops.process_logits(input_ids, scores, inplace=inplace, backend=self.backend, **options)

    def _is_supported(self, input_ids: Tensor, scores: Tensor) -> bool:
        if scores.dim() != 2 or input_ids.dim() != 2 or scores.shape[0] != input_ids.shape[0]:
            return False
        if scores.dtype not in FLOATING or input_ids.dtype not in (torch.int64, torch.int32):
            return False
        rows = scores.shape[0]
        ignored = None if self._penalty is None else self._penalty.prompt_ignore_length
        if ignored is not None and (not isinstance(ignored, Tensor) or ignored.shape != (rows,)):
            return False
        if self._encoder_ngram is None:
            return True
        return self.encoder_input_ids is not None and rows % self.encoder_input_ids.shape[0] == 0

    def _suppress_tokens(self, length: int, device: torch.device) -> Tensor | None:
        """The ids that are banned in all rows at this length; None if none are."""
        minimum, new_minimum, begin = self._minimum, self._new_minimum, self._suppress_at_begin
        parts: list[Tensor] = []
        if minimum is not None and length < minimum.min_length:
            parts.append(minimum.eos_token_id)
        if new_minimum is not None and length - new_minimum.prompt_length_to_skip < new_minimum.min_new_tokens:
            parts.append(new_minimum.eos_token_id)
        if self._suppress is not None:
            parts.append(self._suppress.suppress_tokens)
        if begin is not None and length == begin.begin_index:
            parts.append(begin.begin_suppress_tokens)
        if not parts:
            return None
        joined, known = self._suppressed, self._suppressed_parts
        is_known = len(parts) == len(known) and all(map(operator.is_, parts, known))
        if joined is None or not is_known or joined.device != device:
            joined = torch.cat([part.to(device, torch.int64).reshape(-1) for part in parts])
            self._suppressed_parts, self._suppressed = parts, joined
        return joined


class FusedLogitsProcessorList(LogitsProcessorList):
    """A LogitsProcessorList with the elements that transformers put into it; calls neighbours among them as one op.

    One op runs neighbours that transformers itself made, of the exact classes that `ops.process_logits` implements. A
    user's processors are called unchanged, in their place. The elements stay transformers' own objects for code that
    reads, filters or changes the list.

    Scores are edited in place if nothing else can read them afterwards:

    - when called directly from `GenerationMixin._sample` or `_beam_search`, which do not reuse them: `_sample` copies
      the model's logits and keeps the copy for `output_logits` only; `_beam_search` keeps clones. Any other caller
      (assisted decoding, prompt lookup, `custom_generate`) may read them again.
    - after another processor of this list that made them and keeps no reference.
    """

    def __init__(
        self,
        processors: Iterable[LogitsProcessor],
        passed: Iterable[LogitsProcessor],
        generation_config: Any,
        encoder_input_ids: Tensor | None,
        backend: str,
    ) -> None:
        super().__init__(processors)
        self._passed = list(passed)
        self._made = [processor for processor in self if not _contains(self._passed, processor)]
        self._generation_config, self._encoder_input_ids = generation_config, encoder_input_ids
        self._backend = backend
        self._grouped: list[LogitsProcessor] = []
        self._groups: list[ProcessorGroup | LogitsProcessor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """As upstream's: `input_ids` [rows, length], `scores` [rows, vocab] -> processed scores [rows, vocab]."""
        if self._grouped != self:
            self._grouped, self._groups = list(self), list(self._group())
        is_free = self._is_disposable_for(sys._getframe(1).f_code, scores)
        for part in self._groups:
            if isinstance(part, ProcessorGroup):
                processed = part(input_ids, scores, is_free)
                is_free = is_free or processed is not scores
            else:
                processed = LogitsProcessorList([part])(input_ids, scores, **kwargs)
                keeps_nothing = type(part) in _KEEP_NOTHING and _contains(self._made, part)
                is_free = keeps_nothing and (is_free or processed is not scores)
            scores = processed
        return scores

    def _is_disposable_for(self, caller: CodeType, scores: Tensor) -> bool:
        """Whether the calling code will not read `scores` again."""
        if scores._is_view():
            return False
        if caller is GenerationMixin._beam_search.__code__:
            return True
        config = self._generation_config
        is_kept = config.return_dict_in_generate and config.output_logits
        return caller is GenerationMixin._sample.__code__ and not is_kept

    def _group(self) -> Iterable[ProcessorGroup | LogitsProcessor]:
        run: list[LogitsProcessor] = []
        for processor in self:
            stage = _STAGES.get(type(processor)) if _contains(self._made, processor) else None
            continues = stage is not None and (not run or _STAGES[type(run[-1])] <= stage)
            if run and (not continues or any(type(processor) is type(other) for other in run)):
                yield ProcessorGroup(run, self._encoder_input_ids, self._backend)
                run = []
            if stage is not None:
                run.append(processor)
            else:
                yield processor
        if run:
            yield ProcessorGroup(run, self._encoder_input_ids, self._backend)


def _contains(processors: Iterable[LogitsProcessor], processor: LogitsProcessor) -> bool:
    return any(other is processor for other in processors)
