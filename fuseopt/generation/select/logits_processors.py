"""FusedNoRepeatNGram, its encoder variant, and FusedLogitsProcessors, which merges the processors of generate()."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
)

from fuseopt import ops
from fuseopt.generation.select.logits_processor_list import FusedLogitsProcessorList
from fuseopt.runtime.references import weak_attribute


class FusedNoRepeatNGram(NoRepeatNGramLogitsProcessor):
    """Bans tokens that would repeat an n-gram; upstream: `NoRepeatNGramLogitsProcessor`.

    Call: `input_ids` [rows, length] int32 or int64, `scores` [rows, vocab] floating -> scores [rows, vocab], a new
    tensor with -inf where banned (`scores` itself while there are fewer than `ngram_size` tokens). Token ids outside
    the vocabulary ban nothing; a negative one is refused on CPU.
    """

    def __init__(self, ngram_size: int, backend: str = "auto") -> None:
        super().__init__(ngram_size)
        self.backend = backend

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return ops.no_repeat_ngram(input_ids, scores, self.ngram_size, backend=self.backend)


class FusedEncoderNoRepeatNGram(EncoderNoRepeatNGramLogitsProcessor):
    """Bans tokens that would repeat an n-gram of the encoder's input; upstream: `EncoderNoRepeatNGramLogitsProcessor`.

    Call: as `FusedNoRepeatNGram`; `encoder_input_ids` is [batch, encoder length], and rows = batch x beams.
    """

    def __init__(self, encoder_ngram_size: int, encoder_input_ids: Tensor, backend: str = "auto") -> None:
        if encoder_input_ids.dim() == 1:
            encoder_input_ids = encoder_input_ids.unsqueeze(0)
        # Upstream's constructor validates the size, and would tabulate all n-grams of the ids, so none are passed.
        super().__init__(encoder_ngram_size, encoder_input_ids[:0])
        self.batch_size = encoder_input_ids.shape[0]
        self.encoder_input_ids = encoder_input_ids
        self.backend = backend

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return ops.encoder_no_repeat_ngram(
            self.encoder_input_ids, input_ids, scores, self.ngram_size, backend=self.backend
        )


class FusedLogitsProcessors:
    """Replaces `_get_logits_processor` on a model instance: transformers builds the list, fuseopt runs it.

    References the model weakly instead of holding a bound method, so that deepcopy and pickle rebind it to the copy.
    """

    model = weak_attribute("model")

    def __init__(self, model: nn.Module, backend: str = "auto") -> None:
        self.model, self.backend = model, backend

    def __call__(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        build = type(self.model)._get_logits_processor
        given = inspect.signature(build).bind(self.model, *args, **kwargs).arguments
        return FusedLogitsProcessorList(
            build(self.model, *args, **kwargs),
            given.get("logits_processor") or (),
            given["generation_config"],
            given.get("encoder_input_ids"),
            self.backend,
        )
