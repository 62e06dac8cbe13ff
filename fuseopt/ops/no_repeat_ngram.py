"""Banning tokens that would repeat an n-gram while decoding, as transformers' two NoRepeatNGram logits processors.

Paulus, Xiong and Socher 2017 (arXiv 1705.04304) forbid a trigram twice in one beam; the encoder variant forbids the
n-grams of the encoder's input.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fuseopt.errors import BackendError
from fuseopt.ops import registry
from fuseopt.ops.library import define, needs_autograd


def _fake(input_ids: Tensor, scores: Tensor, ngram_size: int) -> Tensor:
    return scores.new_empty(scores.shape)


def _encoder_fake(encoder_input_ids: Tensor, input_ids: Tensor, scores: Tensor, ngram_size: int) -> Tensor:
    return scores.new_empty(scores.shape)


RAW = define("no_repeat_ngram(Tensor input_ids, Tensor scores, int ngram_size) -> Tensor", _fake)
ENCODER_RAW = define(
    "encoder_no_repeat_ngram(Tensor encoder_input_ids, Tensor input_ids, Tensor scores, int ngram_size) -> Tensor",
    _encoder_fake,
)


def _ban(history: Tensor, input_ids: Tensor, scores: Tensor, ngram_size: int) -> Tensor:
    """`scores` with -inf for each token that ends an n-gram of `history` begun by the last tokens of `input_ids`."""
    length = input_ids.shape[1]
    if length < ngram_size - 1 or history.shape[1] < ngram_size:
        return scores.clone(memory_format=torch.contiguous_format)
    prefix = input_ids[:, length + 1 - ngram_size :]
    ngrams = history.unfold(1, ngram_size, 1)
    begins_alike = (ngrams[..., :-1] == prefix.unsqueeze(1)).all(-1)
    tokens = ngrams[..., -1].long()
    vocab_size = scores.shape[1]
    writable = tokens < vocab_size
    if scores.is_cuda:  # a negative index is an error on CPU; on CUDA it would be a device-side assertion
        writable &= tokens >= 0
    # Whatever is not to be banned goes to a spare column past the vocabulary.
    banned = scores.new_zeros((scores.shape[0], vocab_size + 1), dtype=torch.bool)
    banned = banned.scatter(1, torch.where(begins_alike & writable, tokens, vocab_size), True)
    return scores.masked_fill(banned[:, :vocab_size], float("-inf"))


def no_repeat_ngram_reference(input_ids: Tensor, scores: Tensor, ngram_size: int) -> Tensor:
    """`no_repeat_ngram` in plain PyTorch."""
    _check(ngram_size, input_ids, scores)
    if input_ids.shape[1] < ngram_size:
        return scores
    return _ban(input_ids, input_ids, scores, ngram_size)


def encoder_no_repeat_ngram_reference(
    encoder_input_ids: Tensor, input_ids: Tensor, scores: Tensor, ngram_size: int
) -> Tensor:
    """`encoder_no_repeat_ngram` in plain PyTorch."""
    beams = _beams(encoder_input_ids, input_ids, scores, ngram_size)
    return _ban(encoder_input_ids.repeat_interleave(beams, 0), input_ids, scores, ngram_size)


def _check(ngram_size: int, input_ids: Tensor, scores: Tensor) -> None:
    if ngram_size <= 0:
        raise ValueError(f"ngram_size must be a positive integer, not {ngram_size}")
    if input_ids.shape[0] != scores.shape[0]:
        raise ValueError(f"input_ids has {input_ids.shape[0]} rows, scores has {scores.shape[0]}")


def _beams(encoder_input_ids: Tensor, input_ids: Tensor, scores: Tensor, ngram_size: int) -> int:
    """Rows of `scores` for each row of `encoder_input_ids`."""
    _check(ngram_size, input_ids, scores)
    rows, batch = scores.shape[0], encoder_input_ids.shape[0]
    if rows % max(batch, 1) != 0 or (batch == 0 and rows > 0):
        raise ValueError(f"scores has {rows} rows, which is no multiple of the {batch} rows of encoder_input_ids")
    return rows // max(batch, 1)


def _pick(name: str, backend: str, scores: Tensor) -> str:
    if not needs_autograd(scores):
        return registry.pick(name, backend, scores.device, (scores.dtype,))
    if backend in ("auto", "reference"):
        return "reference"
    raise BackendError(f"{name}: {backend!r} takes no part in autograd or torch.func transforms; use 'reference'")


def no_repeat_ngram(input_ids: Tensor, scores: Tensor, ngram_size: int, *, backend: str = "auto") -> Tensor:
    """`scores` with -inf for every token that would complete an n-gram which its row of `input_ids` has already.

    Left padding counts as tokens. Token ids at or past the vocabulary are never written.

    Args:
        input_ids: [rows, L], int64 or int32, any strides.
        scores: [rows, V], any strides; float32, float16, bfloat16 or float64. Never written to.
        ngram_size: n, positive.
        backend: "auto", "cuda", "cpu" or "reference". Scores that require a gradient, and
            torch.func transforms, need the reference, which "auto" then takes.

    Returns:
        [rows, V]: a new tensor, or `scores` itself where L < n.

    Raises:
        ValueError: `ngram_size` is not positive, or the numbers of rows differ.
        RuntimeError: on CPU, a negative token id would be banned. (On CUDA it is never written.)
        BackendError: the backend named cannot run here; the message says why.
    """
    _check(ngram_size, input_ids, scores)
    chosen = _pick("no_repeat_ngram", backend, scores)
    if input_ids.shape[1] < ngram_size:
        return scores
    if chosen == "reference":
        return _ban(input_ids, input_ids, scores, ngram_size)
    return RAW[chosen](input_ids, scores, ngram_size)


def encoder_no_repeat_ngram(
    encoder_input_ids: Tensor, input_ids: Tensor, scores: Tensor, ngram_size: int, *, backend: str = "auto"
) -> Tensor:
    """`scores` with -inf for every token that would complete an n-gram of the encoder's input.

    Args:
        encoder_input_ids: [batch, L_encoder], int64 or int32, any strides. Row i of `scores` (a beam) belongs to row
            `i // (rows // batch)` of it.
        input_ids: [rows, L], like `encoder_input_ids`.
        scores: [rows, V], any strides; float32, float16, bfloat16 or float64. Never written to.
        ngram_size: n, positive.
        backend: "auto", "cuda", "cpu" or "reference". Scores that require a gradient, and
            torch.func transforms, need the reference, which "auto" then takes.

    Returns:
        [rows, V], a new tensor.

    Raises:
        ValueError: `ngram_size` is not positive, or the numbers of rows do not fit.
        RuntimeError: on CPU, a negative token id would be banned. (On CUDA it is never written.)
        BackendError: the backend named cannot run here; the message says why.
    """
    beams = _beams(encoder_input_ids, input_ids, scores, ngram_size)
    chosen = _pick("encoder_no_repeat_ngram", backend, scores)
    if chosen == "reference":
        return _ban(encoder_input_ids.repeat_interleave(beams, 0), input_ids, scores, ngram_size)
    return ENCODER_RAW[chosen](encoder_input_ids, input_ids, scores, ngram_size)


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    for rows, length, vocab_size, ngram_size in (
        (3, 40, 7, 2),
        (4, 30, 5, 3),
        (2, 9, 11, 1),
        (2, 2, 5, 3),
        (0, 4, 5, 2),
    ):
        input_ids = torch.randint(vocab_size, (rows, length), device=device)
        yield registry.SampleInput((input_ids, torch.randn(rows, vocab_size, device=device, dtype=dtype), ngram_size))


def encoder_sample_inputs(
    device: torch.device, dtype: torch.dtype, requires_grad: bool
) -> Iterator[registry.SampleInput]:
    for sample in sample_inputs(device, dtype, requires_grad):
        input_ids, scores, ngram_size = sample.args
        for batch in {scores.shape[0], 1} - {0}:
            encoder_input_ids = torch.randint(scores.shape[1], (batch, 20), device=device)
            yield registry.SampleInput((encoder_input_ids, input_ids, scores, ngram_size))


def bench_input(
    device: torch.device, dtype: torch.dtype, rows: int, length: int, vocab_size: int
) -> registry.SampleInput:
    # Of few tokens, so that about one is banned in each row.
    input_ids = torch.randint(32, (rows, length), device=device)
    return registry.SampleInput((input_ids, torch.randn(rows, vocab_size, device=device, dtype=dtype), 3))


def encoder_bench_input(
    device: torch.device, dtype: torch.dtype, batch: int, length: int, beams: int, vocab_size: int
) -> registry.SampleInput:
    encoder_input_ids = torch.randint(32, (batch, length), device=device)
    sample = bench_input(device, dtype, batch * beams, length, vocab_size)
    return registry.SampleInput((encoder_input_ids, *sample.args))


def _processor(processor_class: Any, input_ids: Tensor, scores: Tensor, ngram_size: int) -> Tensor:
    return processor_class(ngram_size)(input_ids, scores)


@lru_cache(maxsize=64)
def _encoder_processor(processor_class: Any, encoder_input_ids: Tensor, ngram_size: int) -> Any:
    """Made once for each `generate()`; it tabulates the encoder's n-grams."""
    return processor_class(ngram_size, encoder_input_ids)


def _encoder(
    processor_class: Any, encoder_input_ids: Tensor, input_ids: Tensor, scores: Tensor, ngram_size: int
) -> Tensor:
    return _encoder_processor(processor_class, encoder_input_ids, ngram_size)(input_ids, scores)


_BACKENDS = (registry.CUDA, registry.CPU, registry.REFERENCE)

registry.register(
    registry.Op(
        "no_repeat_ngram",
        no_repeat_ngram,
        no_repeat_ngram_reference,
        sample_inputs,
        _BACKENDS,
        benchmarks=(
            registry.Benchmark(
                bench_input,
                shapes=("256x1024x32128", "1024x1024x32128", "8x1024x50257"),
                eager=registry.Upstream("transformers.NoRepeatNGramLogitsProcessor", _processor),
            ),
        ),
    )
)
registry.register(
    registry.Op(
        "encoder_no_repeat_ngram",
        encoder_no_repeat_ngram,
        encoder_no_repeat_ngram_reference,
        encoder_sample_inputs,
        _BACKENDS,
        benchmarks=(
            registry.Benchmark(
                encoder_bench_input,
                shapes=("64x128x4x32128",),
                eager=registry.Upstream("transformers.EncoderNoRepeatNGramLogitsProcessor", _encoder),
                compiles=False,
            ),
        ),
    )
)
