"""Repetition penalty, banned tokens and temperature in one pass over the scores: a chain of logits processors.

Upstream's, in the order in which `generate()` applies them: `RepetitionPenaltyLogitsProcessor`
(Keskar et al. 2019, arXiv 1909.05858), `NoRepeatNGramLogitsProcessor`, `EncoderNoRepeatNGramLogitsProcessor`,
`MinLengthLogitsProcessor`, `MinNewTokensLengthLogitsProcessor`, `SuppressTokensLogitsProcessor`,
`SuppressTokensAtBeginLogitsProcessor`, `TemperatureLogitsWarper`.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fuseopt.ops import registry
from fuseopt.ops.library import define, no_result

# Most common options first: a call may leave out trailing ones, and each given one takes host time.
_ARGUMENTS = (
    "Tensor input_ids, {scores}, int no_repeat_ngram_size=0, float repetition_penalty=1.0, float temperature=1.0,"
    " Tensor? suppress_tokens=None, Tensor? encoder_input_ids=None, int encoder_no_repeat_ngram_size=0,"
    " Tensor? prompt_ignore_length=None"
)


def _fake(input_ids: Tensor, scores: Tensor, *edits: object) -> Tensor:
    return scores.new_empty(scores.shape)


RAW = define(f"process_logits({_ARGUMENTS.format(scores='Tensor scores')}) -> Tensor", _fake)
RAW_IN_PLACE = define(f"process_logits_({_ARGUMENTS.format(scores='Tensor(a!) scores')}) -> ()", no_result)
_DIRECT = {
    (name, inplace): registry.Direct(name, RAW_IN_PLACE if inplace else RAW)
    for name in ("process_logits", "encoder_no_repeat_ngram")
    for inplace in (False, True)
}


def run(name: str, backend: str, inplace: bool, input_ids: Tensor, scores: Tensor, *edits: Any) -> Tensor:
    """Computes what the op registered as `name` computes.

    Args:
        edits: the arguments of the raw op from its third on; those that are left out mean no edit.

    Raises:
        ValueError: rows do not fit each other, or `scores` cannot be written to.
    """
    if not is_dynamo_compiling():
        output = _DIRECT[name, inplace].run(backend, input_ids, scores, *edits)
        if output is not NotImplemented:
            return scores if inplace else output
    return run_checked(name, backend, inplace, input_ids, scores, *edits)


def run_checked(name: str, backend: str, inplace: bool, input_ids: Tensor, scores: Tensor, *edits: Any) -> Tensor:
    """`run` for calls that the shortcut refuses."""
    check_rows(input_ids, scores, edits[4] if len(edits) > 4 else None, inplace)
    chosen = registry.pick_without_gradient(name, backend, (scores.dtype,), scores)
    if chosen == "reference":
        output = _reference(input_ids, scores, *edits)
        return scores.copy_(output) if inplace else output
    if not inplace:
        return RAW[chosen](input_ids, scores, *edits)
    RAW_IN_PLACE[chosen](input_ids, scores, *edits)
    return scores


def _reference(
    input_ids: Tensor,
    scores: Tensor,
    no_repeat_ngram_size: int = 0,
    repetition_penalty: float = 1.0,
    temperature: float = 1.0,
    suppress_tokens: Tensor | None = None,
    encoder_input_ids: Tensor | None = None,
    encoder_no_repeat_ngram_size: int = 0,
    prompt_ignore_length: Tensor | None = None,
) -> Tensor:
    output = scores
    if repetition_penalty != 1:
        is_ignored = None
        if prompt_ignore_length is not None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
            is_ignored = positions < prompt_ignore_length.unsqueeze(1)
        penalised = torch.where(output < 0, output * repetition_penalty, output / repetition_penalty)
        output = torch.where(_named(input_ids, scores, is_ignored), penalised, output)
    if no_repeat_ngram_size > 0:
        banned = _continuations(input_ids, input_ids, scores, no_repeat_ngram_size)
        output = output.masked_fill(banned, float("-inf"))
    if encoder_input_ids is not None and encoder_no_repeat_ngram_size > 0:
        history = encoder_input_ids.repeat_interleave(scores.shape[0] // max(encoder_input_ids.shape[0], 1), 0)
        banned = _continuations(history, input_ids, scores, encoder_no_repeat_ngram_size)
        output = output.masked_fill(banned, float("-inf"))
    if suppress_tokens is not None:
        banned = torch.isin(torch.arange(scores.shape[1], device=scores.device), suppress_tokens)
        output = output.masked_fill(banned, float("-inf"))
    if temperature != 1:
        output = output / temperature
    return scores.clone(memory_format=torch.contiguous_format) if output is scores else output


def _named(tokens: Tensor, scores: Tensor, is_left_out: Tensor | None) -> Tensor:
    """[rows, V], bool: the vocabulary's tokens that occur in each row of `tokens`, except where `is_left_out`."""
    vocab_size = scores.shape[1]
    is_writable = tokens < vocab_size
    if scores.is_cuda:  # a negative index is an error on CPU; on CUDA it would be a device-side assertion
        is_writable = is_writable & (tokens >= 0)
    if is_left_out is not None:
        is_writable = is_writable & ~is_left_out
    # Left-out tokens go to a spare column after the vocabulary.
    named = scores.new_zeros((scores.shape[0], vocab_size + 1), dtype=torch.bool)
    return named.scatter(1, torch.where(is_writable, tokens.long(), vocab_size), True)[:, :vocab_size]


def _continuations(history: Tensor, input_ids: Tensor, scores: Tensor, ngram_size: int) -> Tensor:
    """[rows, V], bool: the tokens that complete an n-gram of `history` begun by the last tokens of `input_ids`."""
    length = input_ids.shape[1]
    if length < ngram_size - 1 or history.shape[1] < ngram_size:
        return scores.new_zeros(scores.shape, dtype=torch.bool)
    prefix = input_ids[:, length + 1 - ngram_size :]
    ngrams = history.unfold(1, ngram_size, 1)
    begins_alike = (ngrams[..., :-1] == prefix.unsqueeze(1)).all(-1)
    return _named(ngrams[..., -1], scores, ~begins_alike)


def check_rows(input_ids: Tensor, scores: Tensor, encoder_input_ids: Tensor | None, inplace: bool) -> None:
    """Raises ValueError if numbers of rows differ, or if `scores` cannot be written to."""
    rows = scores.shape[0]
    if input_ids.shape[0] != rows:
        raise ValueError(f"input_ids has {input_ids.shape[0]} rows, scores has {rows}")
    if encoder_input_ids is not None:
        batch = encoder_input_ids.shape[0]
        if rows % max(batch, 1) != 0 or (batch == 0 and rows > 0):
            raise ValueError(f"scores has {rows} rows, which is no multiple of the {batch} rows of encoder_input_ids")
    if inplace and 0 in scores.stride() and any(scores.stride(d) == 0 and scores.size(d) > 1 for d in (0, 1)):
        raise ValueError("scores are expanded: several elements share one place, so inplace=True needs a clone() first")


def process_logits(
    input_ids: Tensor,
    scores: Tensor,
    *,
    repetition_penalty: float = 1.0,
    prompt_ignore_length: Tensor | None = None,
    no_repeat_ngram_size: int = 0,
    encoder_input_ids: Tensor | None = None,
    encoder_no_repeat_ngram_size: int = 0,
    suppress_tokens: Tensor | None = None,
    temperature: float = 1.0,
    inplace: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`scores` after repetition penalty, bans and temperature, in this order, with the roundings of upstream's chain.

    A minimum length is a ban of the end tokens for as long as `input_ids` is short: name them in `suppress_tokens`.

    Args:
        input_ids: [rows, L], int64 or int32, any strides. Left padding counts as tokens. Ids at or past the vocabulary
            have no effect.
        scores: [rows, V], any strides; float32, float16, bfloat16 or float64.
        repetition_penalty: what the score of each token in `input_ids` is divided by, or multiplied with where it is
            negative, once however often the token occurs; 1 for none.
        prompt_ignore_length: [rows], integer: so many leading ids of a row are left out by the penalty.
        no_repeat_ngram_size: n of `no_repeat_ngram`; 0 for no ban.
        encoder_input_ids: [batch, L_encoder] of `encoder_no_repeat_ngram`.
        encoder_no_repeat_ngram_size: n of `encoder_no_repeat_ngram`; 0 for no ban.
        suppress_tokens: [count], integer: ids banned in every row; those outside the vocabulary have no effect.
        temperature: what all scores are divided by; 1 for none.
        inplace: write to `scores` and return it, instead of a new tensor.
        backend: "auto", "cuda", "cpu" or "reference". Scores that require a gradient, and
            torch.func transforms, need the reference, which "auto" then takes.

    Returns:
        [rows, V]: a new tensor, or with `inplace` `scores` itself.

    Raises:
        ValueError: shapes do not fit, a size is negative, penalty or temperature is not positive, or expanded `scores`
            are to be written to.
        RuntimeError: on CPU, a negative token id would be penalised or banned. (On CUDA it is never written.)
        BackendError: the backend named cannot run here; the message says why.
    """
    if no_repeat_ngram_size < 0 or encoder_no_repeat_ngram_size < 0:
        raise ValueError("no_repeat_ngram_size and encoder_no_repeat_ngram_size must be positive, or 0 for no ban")
    if encoder_no_repeat_ngram_size > 0 and encoder_input_ids is None:
        raise ValueError("encoder_no_repeat_ngram_size needs encoder_input_ids")
    if not (repetition_penalty > 0 and temperature > 0):
        raise ValueError(f"repetition_penalty and temperature must be positive: {repetition_penalty}, {temperature}")
    if prompt_ignore_length is not None and prompt_ignore_length.shape != scores.shape[:1]:
        raise ValueError(f"prompt_ignore_length must be [{scores.shape[0]}], not {list(prompt_ignore_length.shape)}")
    if suppress_tokens is not None and suppress_tokens.dim() != 1:
        raise ValueError(f"suppress_tokens must have one dimension, not {suppress_tokens.dim()}")
    return run(
        "process_logits",
        backend,
        inplace,
        input_ids,
        scores,
        no_repeat_ngram_size,
        repetition_penalty,
        temperature,
        suppress_tokens,
        encoder_input_ids,
        encoder_no_repeat_ngram_size,
        prompt_ignore_length,
    )


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, device=device)

    for rows, length, vocab_size in ((3, 40, 17), (4, 30, 5), (2, 9, 133), (2, 0, 5), (0, 4, 5)):
        args = (integers(vocab_size, rows, length), torch.randn(rows, vocab_size, device=device, dtype=dtype))
        every_option = {
            "repetition_penalty": 1.3,
            "prompt_ignore_length": integers(length + 1, rows),
            "no_repeat_ngram_size": 2,
            "encoder_input_ids": integers(vocab_size, 1, 20),
            "encoder_no_repeat_ngram_size": 3,
            "suppress_tokens": torch.tensor([1, 0, vocab_size] * 2, device=device),  # not as many as rows
            "temperature": 0.7,
        }
        yield registry.SampleInput(args, every_option)
        for alone in ("repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "temperature"):
            yield registry.SampleInput(args, {alone: every_option[alone]})
        yield registry.SampleInput(args, every_option | {"temperature": 1.0})


def bench_input(
    device: torch.device, dtype: torch.dtype, rows: int, length: int, vocab_size: int
) -> registry.SampleInput:
    # Few distinct tokens, so that about one n-gram is banned in each row.
    input_ids = torch.randint(32, (rows, length), device=device)
    options = {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": torch.arange(2, device=device),
        "temperature": 0.7,
    }
    return registry.SampleInput((input_ids, torch.randn(rows, vocab_size, device=device, dtype=dtype)), options)


def _processors(
    logits_process: Any,
    input_ids: Tensor,
    scores: Tensor,
    *,
    repetition_penalty: float,
    no_repeat_ngram_size: int,
    suppress_tokens: Tensor,
    temperature: float,
) -> Tensor:
    for processor in (
        logits_process.RepetitionPenaltyLogitsProcessor(repetition_penalty),
        logits_process.NoRepeatNGramLogitsProcessor(no_repeat_ngram_size),
        logits_process.SuppressTokensLogitsProcessor(suppress_tokens, device=scores.device),
        logits_process.TemperatureLogitsWarper(temperature),
    ):
        scores = processor(input_ids, scores)
    return scores


BACKENDS = (registry.CUDA, registry.CPU, registry.REFERENCE)

registry.register(
    registry.Op(
        "process_logits",
        process_logits,
        functools.partial(process_logits, backend="reference"),
        sample_inputs,
        BACKENDS,
        raw=("process_logits", "process_logits_"),
        benchmarks=(
            registry.Benchmark(
                bench_input,
                shapes=("256x1024x32128", "8x1024x50257"),
                variant="penalty, n-gram ban, suppressed tokens, temperature",
                eager=registry.Upstream("transformers.generation.logits_process", _processors),
                compiles=False,
            ),
        ),
    )
)
