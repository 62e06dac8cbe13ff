"""transformers' logits processors on static tensors: they read the length of the sequences on the device.

Neighbouring processors become one `Edits`, which one op applies; a processor that reads no sequences stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.generation import logits_process

from fuseopt import ops
from fuseopt.generation.engine.device_constants import DeviceConstantCache, to_device
from fuseopt.generation.engine.state import DecodeState
from fuseopt.generation.select.logits_processors import FusedEncoderNoRepeatNGram, FusedNoRepeatNGram
from fuseopt.ops.decode.edit_logits import MAX_RULES
from fuseopt.ops.decode.sample import are_in_range

_ALWAYS = 2**62  # longer than any sequence
# The encoder's ids are padded to a multiple of this, so that prompts of similar length share a captured step.
_PADDED_TO = 64


class DeviceProcessor(Protocol):
    """Call: a DecodeState and scores [rows, vocab] -> new scores [rows, vocab] float32."""

    @property
    def key(self) -> Hashable:
        """Equal for processors that one captured step can serve after the values of `tensors` have been copied."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors whose values a captured step reads."""

    def own_tensors(self) -> None:
        """Replaces `tensors` by copies before a capture."""

    def __call__(self, state: DecodeState, scores: Tensor) -> Tensor: ...


class WithoutSequence:
    """A processor of transformers that reads scores only."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.key = (type(processor), *sorted(vars(processor).items()))
        self.tensors = ()

    def own_tensors(self) -> None:
        pass

    def __call__(self, state: DecodeState, scores: Tensor) -> Tensor:
        return self.processor(None, scores.float())


class Rule(NamedTuple):
    """For lengths `first` to `end - 1`: -inf for `tokens`; with `force`, 0 for `tokens` and -inf for all others."""

    tokens: Tensor
    first: int
    end: int
    force: bool = False


class Edit(NamedTuple):
    """A processor as part of `ops.LogitsEdits`: field values, or a rule about tokens."""

    fields: Mapping[str, Any] = {}
    rule: Rule | None = None


class Edits:
    """Neighbouring processors, in the order of `ops.LogitsEdits`, applied by one op."""

    def __init__(self, chain: Iterable[Edit], vocab: int, constants: DeviceConstantCache) -> None:
        self.fields: dict[str, Any] = {}
        rules = []
        for edit in chain:
            self.fields.update(edit.fields)
            if edit.rule is not None:
                rules.append(edit.rule)
        if rules:
            self.fields |= _table(rules, vocab, constants)
        values = sorted(self.fields.items())
        self.key = (Edits, *((name, value.shape if isinstance(value, Tensor) else value) for name, value in values))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(value for _, value in sorted(self.fields.items()) if isinstance(value, Tensor))

    def own_tensors(self) -> None:
        for name, value in self.fields.items():
            self.fields[name] = value.clone() if isinstance(value, Tensor) else value

    def of(self, state: DecodeState) -> ops.LogitsEdits:
        """The op's argument for the sequences in `state`."""
        return ops.LogitsEdits(state.ids, state.length, **self.fields)

    def __call__(self, state: DecodeState, scores: Tensor) -> Tensor:
        return ops.edit_logits(scores, self.of(state), pdl=True)


def _table(rules: list[Rule], vocab: int, constants: DeviceConstantCache) -> dict[str, Any]:
    table = constants.members([rule.tokens for rule in rules], vocab)
    bounds = torch.tensor([[rule.first, rule.end] for rule in rules], device="cpu")
    return {
        "token_rules": table,
        "rule_bounds": constants.to_device(bounds, table.device),
        "forcing_rules": sum(1 << i for i, rule in enumerate(rules) if rule.force),
    }


def chained(
    processors: Iterable[Edit | WithoutSequence], vocab: int, constants: DeviceConstantCache
) -> tuple[DeviceProcessor, ...]:
    """The same processors, with as many neighbours as possible merged into one op."""
    chains: list[list[Edit] | WithoutSequence] = []
    for processor in processors:
        if isinstance(processor, WithoutSequence):
            chains.append(processor)
        elif chains and isinstance(chains[-1], list) and _may_follow(chains[-1], processor):
            chains[-1].append(processor)
        else:
            chains.append([processor])
    return tuple(Edits(chain, vocab, constants) if isinstance(chain, list) else chain for chain in chains)


def _may_follow(chain: list[Edit], edit: Edit) -> bool:
    """Whether `ops.LogitsEdits` applies all of `chain` before `edit`, or the order makes no difference."""
    done = {name for other in chain for name in other.fields}
    rules = [other.rule for other in chain if other.rule is not None]
    if "temperature" in done or "repetition_penalty" in edit.fields:
        return False
    if edit.rule is not None:
        return len(rules) < MAX_RULES
    # Bans may come in any order.
    return not done & set(edit.fields) and ("temperature" in edit.fields or not any(rule.force for rule in rules))


# In the order of generate(). Where a token is drawn, nothing follows from normalising scores once more.
_FILTERS: Mapping[type, Callable[[Any], Mapping[str, Any]]] = {
    logits_process.TopKLogitsWarper: lambda warper: {"top_k": warper.top_k},
    logits_process.TopPLogitsWarper: lambda warper: {"top_p": warper.top_p, "min_tokens": warper.min_tokens_to_keep},
    logits_process.MinPLogitsWarper: lambda warper: {
        "min_p": float(warper.min_p),
        "min_tokens": warper.min_tokens_to_keep,
    },
    logits_process.TypicalLogitsWarper: lambda warper: {
        "typical_p": warper.mass,
        "min_tokens": warper.min_tokens_to_keep,
    },
    logits_process.LogitNormalization: lambda normalization: {},
}


def sampling_filters(
    processors: tuple[DeviceProcessor, ...], keeps_scores: bool = False
) -> tuple[int, ops.SamplingFilters]:
    """How many of the last processors `ops.decode_sample_` or `ops.filter_scores` applies, and as which filters.

    Args:
        keeps_scores: processed scores are used, so normalising them makes a difference.
    """
    fields: dict[str, Any] = {}
    normalises = logits_process.LogitNormalization
    order, count = [kind for kind in _FILTERS if not (keeps_scores and kind is normalises)], 0
    for device_processor in reversed(processors):
        processor = getattr(device_processor, "processor", None)
        if type(processor) not in order or getattr(processor, "filter_value", -math.inf) != -math.inf:
            break
        merged = {**fields, **_FILTERS[type(processor)](processor)}
        if merged | fields != merged or not are_in_range(ops.SamplingFilters(**merged)):
            break  # filters that keep different numbers of tokens, or more than the op does
        order = order[: order.index(type(processor))]
        fields = merged
        count += 1
    return count, ops.SamplingFilters(**fields)


class _Target(NamedTuple):
    """What a processor is translated for: the sizes of the scores, and where they are."""

    rows: int
    vocab: int
    device: torch.device
    constants: DeviceConstantCache

    def rule(self, tokens: Any, first: int, end: int, force: bool = False) -> Edit:
        if not isinstance(tokens, Tensor):
            tokens = self.constants.to_device(torch.tensor(tokens, device="cpu"), self.device)
        return Edit(rule=Rule(tokens.to(self.device), first, end, force))


def device_processor(
    processor: Any, rows: int, vocab: int, device: torch.device, constants: DeviceConstantCache
) -> Edit | WithoutSequence | None:
    """`processor` for `chained`, by its exact class; None if it has to run on the host."""
    make = _MAKERS.get(type(processor))
    return None if make is None else make(processor, _Target(rows, vocab, device, constants))


def _forced_bos(processor: Any, target: _Target) -> Edit | None:
    if not 0 <= processor.bos_token_id < target.vocab:
        return None
    return target.rule([processor.bos_token_id], 1, 2, force=True)


def _forced_eos(processor: Any, target: _Target) -> Edit | None:
    if not all(token < target.vocab for token in processor.eos_token_id.tolist()):
        return None
    last = processor.max_length - 1
    return target.rule(processor.eos_token_id, last, last + 1, force=True)


def _repetition_penalty(processor: Any, target: _Target) -> Edit | None:
    fields, ignored = {"repetition_penalty": processor.penalty}, processor.prompt_ignore_length
    if isinstance(ignored, Tensor):
        if ignored.shape[0] != target.rows:
            return None
        fields["prompt_ignore_length"] = ignored.to(target.device, torch.int64)
    elif ignored:
        fields["prompt_ignore_length"] = torch.full((target.rows,), ignored, device=target.device)
    return Edit(fields)


def _encoder_no_repeat_ngram(processor: Any, target: _Target) -> Edit | None:
    size, items = processor.ngram_size, processor.generated_ngrams
    ngrams = [[(*prefix, last) for prefix, lasts in item.items() for last in lasts] for item in items]
    if target.rows % len(ngrams) or any(min(ngram) < 0 for item in ngrams for ngram in item):
        return None
    # Written as ids of an encoder input that contains exactly these n-grams, separated by -1.
    texts = [[token for ngram in item for token in (*ngram, -1)] for item in ngrams]
    longest = max(map(len, texts))
    ids = torch.tensor([text + [-1] * (longest - len(text)) for text in texts], dtype=torch.int64, device="cpu")
    return _encoder_edit(to_device(ids, target.device), size)


def _fused_encoder_no_repeat_ngram(processor: Any, target: _Target) -> Edit | None:
    ids = processor.encoder_input_ids
    if target.rows % ids.shape[0] or ids.device != target.device:
        return None
    return _encoder_edit(ids, processor.ngram_size)


def _encoder_edit(ids: Tensor, size: int) -> Edit:
    ids = F.pad(ids.long(), (0, -ids.shape[1] % _PADDED_TO), value=-1)
    return Edit({"encoder_ids": ids, "encoder_no_repeat_ngram_size": size})


def _without_sequence(processor: Any, target: _Target) -> WithoutSequence:
    return WithoutSequence(processor)


def _temperature(processor: Any, target: _Target) -> Edit:
    return Edit({"temperature": processor.temperature})


def _no_repeat_ngram(processor: Any, target: _Target) -> Edit:
    return Edit({"no_repeat_ngram_size": processor.ngram_size})


_MAKERS: Mapping[type, Callable[[Any, _Target], Edit | WithoutSequence | None]] = {
    logits_process.TemperatureLogitsWarper: _temperature,
    logits_process.TopKLogitsWarper: _without_sequence,
    logits_process.TopPLogitsWarper: _without_sequence,
    logits_process.MinPLogitsWarper: _without_sequence,
    logits_process.TypicalLogitsWarper: _without_sequence,
    logits_process.LogitNormalization: _without_sequence,
    logits_process.InfNanRemoveLogitsProcessor: _without_sequence,
    logits_process.MinLengthLogitsProcessor: lambda processor, target: target.rule(
        processor.eos_token_id, 0, processor.min_length
    ),
    logits_process.MinNewTokensLengthLogitsProcessor: lambda processor, target: target.rule(
        processor.eos_token_id, 0, processor.prompt_length_to_skip + processor.min_new_tokens
    ),
    logits_process.SuppressTokensLogitsProcessor: lambda processor, target: target.rule(
        processor.suppress_tokens, 0, _ALWAYS
    ),
    logits_process.SuppressTokensAtBeginLogitsProcessor: lambda processor, target: target.rule(
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
