"""Logits of a decode step after a chain of logits processors; everything length-dependent is read on the device.

Upstream, in the order in which `generate()` applies them: `RepetitionPenaltyLogitsProcessor`
(Keskar et al. 2019, arXiv 1909.05858), `NoRepeatNGramLogitsProcessor`, `EncoderNoRepeatNGramLogitsProcessor`,
`MinLengthLogitsProcessor`, `MinNewTokensLengthLogitsProcessor`, `ForcedBOSTokenLogitsProcessor`,
`ForcedEOSTokenLogitsProcessor`, `SuppressTokensLogitsProcessor`, `SuppressTokensAtBeginLogitsProcessor`,
`TemperatureLogitsWarper`. `process_logits` is for sequences whose length the host knows.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fuseopt.ops import registry
from fuseopt.ops.library import check_shape, define

# The bits of a byte.
MAX_RULES = 8


class LogitsEdits(NamedTuple):
    """Edits of scores [rows, V] in float32, applied in this order.

    Attributes:
        ids: [rows, C] int64, any strides. Ids outside the vocabulary have no effect.
        length: one element, int64, on the device: how many columns of `ids` are the sequences.
        repetition_penalty: divides the score of each token of a sequence, or multiplies it if it is negative; 1 for
            none.
        prompt_ignore_length: [rows] int64: how many leading ids of a row the penalty ignores; or None.
        no_repeat_ngram_size: n of the n-grams that must not repeat; 0 for no ban.
        encoder_ids: [items, any] int64 for `encoder_no_repeat_ngram_size`; `rows` is a multiple of items. No n-gram
            contains an id of -1.
        encoder_no_repeat_ngram_size: n of the n-grams of `encoder_ids` that must not occur; 0 for no ban.
        token_rules: [V] uint8: bit i of a token's byte says that rule i names it; or None.
        rule_bounds: [rules, 2] int64, up to 8 rules: rule i holds for lengths from the first number to below the
            second.
        forcing_rules: if bit i is set, rule i sets its tokens to 0 and bans all others, and overrides earlier edits;
            otherwise it bans its tokens.
        temperature: divides all scores; 1 for none.
    """

    ids: Tensor
    length: Tensor
    repetition_penalty: float = 1.0
    prompt_ignore_length: Tensor | None = None
    no_repeat_ngram_size: int = 0
    encoder_ids: Tensor | None = None
    encoder_no_repeat_ngram_size: int = 0
    token_rules: Tensor | None = None
    rule_bounds: Tensor | None = None
    forcing_rules: int = 0
    temperature: float = 1.0


_ARGUMENTS = (
    "{ids}, {length}, float repetition_penalty=1.0, Tensor? prompt_ignore_length=None,"
    " int no_repeat_ngram_size=0, Tensor? encoder_ids=None, int encoder_no_repeat_ngram_size=0,"
    " Tensor? token_rules=None, Tensor? rule_bounds=None, int forcing_rules=0, float temperature=1.0"
)
OPTIONAL_EDITS = _ARGUMENTS.format(ids="Tensor? edited_ids=None", length="Tensor? edited_length=None")
"""LogitsEdits, or nothing, at the end of a raw op's schema."""


def _fake(logits: Tensor, *arguments: object) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


RAW = define(f"edit_logits(Tensor logits, bool pdl, {OPTIONAL_EDITS}) -> Tensor", _fake)


def edited(scores: Tensor, edits: LogitsEdits) -> Tensor:
    """`edit_logits` in plain PyTorch."""
    scores = scores.float()
    if edits.repetition_penalty != 1:
        scores = _penalised(scores, edits)
    if edits.no_repeat_ngram_size > 0:
        scores = _without_repeats(scores, edits, edits.ids, edits.length, edits.no_repeat_ngram_size)
    if edits.encoder_ids is not None and edits.encoder_no_repeat_ngram_size > 0:
        encoder_ids = edits.encoder_ids.repeat_interleave(scores.shape[0] // max(1, edits.encoder_ids.shape[0]), dim=0)
        scores = _without_repeats(scores, edits, encoder_ids, None, edits.encoder_no_repeat_ngram_size)
    if edits.token_rules is not None and edits.rule_bounds is not None:
        for rule, (first, end) in enumerate(edits.rule_bounds.unbind()):
            chosen = (edits.token_rules & 1 << rule) != 0
            holds = (edits.length >= first) & (edits.length < end)
            if edits.forcing_rules & 1 << rule:
                forced = torch.full_like(scores, -math.inf).masked_fill(chosen, 0.0)
                scores = torch.where(holds, forced, scores)
            else:
                scores = scores.masked_fill(holds & chosen, -math.inf)
    return scores if edits.temperature == 1 else scores / edits.temperature


def _penalised(scores: Tensor, edits: LogitsEdits) -> Tensor:
    vocab, ids = scores.shape[1], edits.ids
    positions = torch.arange(ids.shape[1], device=scores.device)
    counts = positions < edits.length
    if edits.prompt_ignore_length is not None:
        counts = counts & (positions >= edits.prompt_ignore_length[:, None])
    # An extra column receives the writes for ids that are no tokens.
    tokens = torch.where(counts & (ids >= 0), ids, vocab).clamp(max=vocab)
    scores = F.pad(scores, (0, 1))
    penalised = torch.gather(scores, 1, tokens)
    penalised = torch.where(penalised < 0, penalised * edits.repetition_penalty, penalised / edits.repetition_penalty)
    return scores.scatter(1, tokens, penalised)[:, :vocab]


def _without_repeats(scores: Tensor, edits: LogitsEdits, ids: Tensor, length: Tensor | None, size: int) -> Tensor:
    """Sets to -inf the last token of each n-gram of `ids` [rows, any] whose first ids are the sequence's last ones.

    Args:
        length: how many columns of `ids` are used; None: all.
    """
    vocab = scores.shape[1]
    if ids.shape[1] < size:
        return scores
    windows = ids.unfold(1, size, 1)
    columns = edits.length - (size - 1) + torch.arange(size - 1, device=ids.device)
    # Meaningless while the sequences are shorter; then it has no effect.
    prefix = edits.ids.index_select(1, columns.clamp(min=0, max=edits.ids.shape[1] - 1))
    counts = edits.length >= size - 1
    if length is not None:
        counts = counts & (torch.arange(size, ids.shape[1] + 1, device=ids.device) <= length)
    last = windows[..., -1]
    matches = (windows[..., :-1] == prefix[:, None, :]).all(-1) & counts & (last >= 0)
    banned = torch.zeros(scores.shape[0], vocab + 1, dtype=torch.bool, device=scores.device)
    banned = banned.scatter(1, torch.where(matches, last.clamp(max=vocab), vocab), True)
    return scores.masked_fill(banned[:, :vocab], -math.inf)


def check_edits(edits: LogitsEdits, rows: int, vocab: int) -> None:
    """Raises ValueError or TypeError unless `edits` fit scores [rows, vocab]."""
    for name, tensor, dtype in (
        ("ids", edits.ids, torch.int64),
        ("length", edits.length, torch.int64),
        ("prompt_ignore_length", edits.prompt_ignore_length, torch.int64),
        ("encoder_ids", edits.encoder_ids, torch.int64),
        ("token_rules", edits.token_rules, torch.uint8),
        ("rule_bounds", edits.rule_bounds, torch.int64),
    ):
        if tensor is not None and tensor.dtype != dtype:
            raise TypeError(f"edits.{name} must be {dtype}, not {tensor.dtype}")
    if edits.ids.dim() != 2 or edits.ids.shape[0] != rows:
        raise ValueError(f"edits.ids must be [{rows}, any], not {list(edits.ids.shape)}")
    if edits.length.numel() != 1:
        raise ValueError(f"edits.length must have one element, not {edits.length.numel()}")
    if edits.prompt_ignore_length is not None:
        check_shape("edits.prompt_ignore_length", edits.prompt_ignore_length, torch.Size((rows,)))
    if edits.no_repeat_ngram_size < 0 or edits.encoder_no_repeat_ngram_size < 0:
        raise ValueError("no_repeat_ngram_size and encoder_no_repeat_ngram_size must be positive, or 0 for no ban")
    if edits.encoder_no_repeat_ngram_size > 0:
        items = None if edits.encoder_ids is None or edits.encoder_ids.dim() != 2 else edits.encoder_ids.shape[0]
        if items is None or rows % max(items, 1) != 0 or (items == 0 and rows > 0):
            raise ValueError(f"edits.encoder_ids must be [items, any], and {rows} rows a multiple of the items")
    if not (edits.repetition_penalty > 0 and edits.temperature > 0):
        values = edits.repetition_penalty, edits.temperature
        raise ValueError(f"repetition_penalty and temperature must be positive: {values[0]}, {values[1]}")
    if edits.token_rules is not None:
        check_shape("edits.token_rules", edits.token_rules, torch.Size((vocab,)))
        bounds = edits.rule_bounds
        if bounds is None or bounds.dim() != 2 or bounds.shape[1] != 2 or bounds.shape[0] > MAX_RULES:
            raise ValueError(f"edits.rule_bounds must be [rules, 2] of at most {MAX_RULES} rules")


def for_kernel(edits: LogitsEdits | None) -> tuple[object, ...]:
    """The arguments of OPTIONAL_EDITS."""
    return () if edits is None else tuple(edits)


def edit_logits(logits: Tensor, edits: LogitsEdits, *, pdl: bool = False, backend: str = "auto") -> Tensor:
    """`logits` in float32 after `edits`, with the roundings of upstream's chain.

    Args:
        logits: [rows, V], any strides; float32, float16, bfloat16 or float64.
        edits: with tensors on the same device.
        pdl: launch the CUDA kernel programmatically dependent on its predecessor on the stream, which must not write
            the tensors of `edits`.
        backend: "auto", "cuda" or "reference".

    Returns:
        [rows, V] float32, contiguous.

    Raises:
        ValueError: shapes that do not fit together, or numbers out of range.
        TypeError: dtypes other than these.
        BackendError: the named backend cannot run here, or logits require a gradient under grad mode.
    """
    if logits.dim() != 2:
        raise ValueError(f"logits must be [rows, vocabulary], not {list(logits.shape)}")
    check_edits(edits, *logits.shape)
    chosen = registry.pick_without_gradient("edit_logits", backend, (logits.dtype,), logits)
    if chosen == "reference":
        scores = edited(logits, edits)
        return scores.clone() if scores is logits else scores.contiguous()
    return RAW[chosen](logits, pdl, *for_kernel(edits))


def sample_edits(device: torch.device, rows: int, vocab: int) -> LogitsEdits:
    """Edits of every kind, for sequences of 7 to 9 ids from few tokens."""

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, device=device)

    return LogitsEdits(
        ids=integers(min(vocab, 4), rows, 12),
        length=7 + integers(3, 1),
        repetition_penalty=1.3,
        prompt_ignore_length=integers(9, rows),
        no_repeat_ngram_size=2,
        encoder_ids=integers(min(vocab, 4), 1, 20),
        encoder_no_repeat_ngram_size=3,
        token_rules=integers(4, vocab).to(torch.uint8),
        rule_bounds=torch.tensor([[0, 9], [20, 21]], device=device),
        forcing_rules=2,
        temperature=0.7,
    )


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    for rows, vocab in ((3, 17), (4, 5), (2, 4099), (0, 5)):
        logits = torch.randn(rows, vocab, device=device, dtype=dtype)
        edits = sample_edits(device, rows, vocab)
        yield registry.SampleInput((logits, edits))
        yield registry.SampleInput((logits, edits._replace(rule_bounds=torch.tensor([[0, 9], [3, 30]], device=device))))
        yield registry.SampleInput((logits, LogitsEdits(edits.ids, edits.length, no_repeat_ngram_size=2)))


def bench_input(device: torch.device, dtype: torch.dtype, rows: int, vocab: int) -> registry.SampleInput:
    edits = sample_edits(device, rows, vocab)
    return registry.SampleInput((torch.randn(rows, vocab, device=device, dtype=dtype), edits))


registry.register(
    registry.Op(
        name="edit_logits",
        function=edit_logits,
        reference=partial(edit_logits, backend="reference"),
        sample_inputs=sample_inputs,
        backends=(registry.CUDA, registry.REFERENCE),
        benchmarks=(registry.Benchmark(bench_input, shapes=("64x50257", "256x32128")),),
    )
)
