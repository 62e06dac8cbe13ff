"""Banning tokens that would repeat an n-gram while decoding, as transformers' two NoRepeatNGram logits processors.

Paulus, Xiong and Socher 2017 (arXiv 1705.04304) forbid a trigram twice in one beam; the encoder variant forbids the
n-grams of the encoder's input. Both are `process_logits` with nothing but a ban.
"""

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fuseopt.ops import registry
from fuseopt.ops.process_logits import BACKENDS, RAW, RAW_IN_PLACE, check_rows, run, run_checked

_ANEW, _IN_PLACE = (registry.Direct("no_repeat_ngram", overloads) for overloads in (RAW, RAW_IN_PLACE))
_NOT_POSITIVE = "ngram_size must be a positive integer, not {}"


def no_repeat_ngram(
    input_ids: Tensor, scores: Tensor, ngram_size: int, *, inplace: bool = False, backend: str = "auto"
) -> Tensor:
    """`scores` with -inf for every token that would complete an n-gram which its row of `input_ids` has already.

    Left padding counts as tokens. Token ids at or past the vocabulary are never written.

    Args:
        input_ids: [rows, L], int64 or int32, any strides.
        scores: [rows, V], any strides; float32, float16, bfloat16 or float64.
        ngram_size: n, positive.
        inplace: write to `scores` and return it, instead of a new tensor.
        backend: "auto", "cuda", "cpu" or "reference". Scores that require a gradient, and
            torch.func transforms, need the reference, which "auto" then takes.

    Returns:
        [rows, V]: a new tensor, or `scores` itself with `inplace` and where L < n.

    Raises:
        ValueError: `ngram_size` is not positive, the numbers of rows differ, or expanded `scores` are to be written to.
        RuntimeError: on CPU, a negative token id would be banned. (On CUDA it is never written.)
        BackendError: the backend named cannot run here; the message says why.
    """
    if ngram_size <= 0:
        raise ValueError(_NOT_POSITIVE.format(ngram_size))
    # In place, a kernel ignores rows that are too short. A check before the launch would take host time.
    if not is_dynamo_compiling() and (inplace or input_ids.size(-1) >= ngram_size):
        output = (_IN_PLACE if inplace else _ANEW).run(backend, input_ids, scores, ngram_size)
        if output is not NotImplemented:
            return scores if inplace else output
    if input_ids.size(-1) < ngram_size:
        check_rows(input_ids, scores, None, inplace)
        return scores
    return run_checked("no_repeat_ngram", backend, inplace, input_ids, scores, ngram_size)


def encoder_no_repeat_ngram(
    encoder_input_ids: Tensor,
    input_ids: Tensor,
    scores: Tensor,
    ngram_size: int,
    *,
    inplace: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`scores` with -inf for every token that would complete an n-gram of the encoder's input.

    Args:
        encoder_input_ids: [batch, L_encoder], int64 or int32, any strides. Row i of `scores` (a beam) belongs to row
            `i // (rows // batch)` of it.
        input_ids: [rows, L], like `encoder_input_ids`.
        scores: [rows, V], any strides; float32, float16, bfloat16 or float64.
        ngram_size: n, positive.
        inplace: write to `scores` and return it, instead of a new tensor.
        backend: "auto", "cuda", "cpu" or "reference". Scores that require a gradient, and
            torch.func transforms, need the reference, which "auto" then takes.

    Returns:
        [rows, V]: a new tensor, or with `inplace` `scores` itself.

    Raises:
        ValueError: `ngram_size` is not positive, the numbers of rows do not fit, or expanded `scores` are to be written
            to.
        RuntimeError: on CPU, a negative token id would be banned. (On CUDA it is never written.)
        BackendError: the backend named cannot run here; the message says why.
    """
    if ngram_size <= 0:
        raise ValueError(_NOT_POSITIVE.format(ngram_size))
    edits = (0, 1.0, 1.0, None, encoder_input_ids, ngram_size)
    return run("encoder_no_repeat_ngram", backend, inplace, input_ids, scores, *edits)


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
    # Few distinct tokens, so that about one is banned in each row.
    input_ids = torch.randint(32, (rows, length), device=device)
    return registry.SampleInput((input_ids, torch.randn(rows, vocab_size, device=device, dtype=dtype), 3))


def inplace_bench_input(device: torch.device, dtype: torch.dtype, *sizes: int) -> registry.SampleInput:
    return registry.SampleInput(bench_input(device, dtype, *sizes).args, {"inplace": True})


def encoder_bench_input(
    device: torch.device, dtype: torch.dtype, batch: int, length: int, beams: int, vocab_size: int
) -> registry.SampleInput:
    encoder_input_ids = torch.randint(32, (batch, length), device=device)
    sample = bench_input(device, dtype, batch * beams, length, vocab_size)
    return registry.SampleInput((encoder_input_ids, *sample.args))


def _processor(
    processor_class: Any, input_ids: Tensor, scores: Tensor, ngram_size: int, *, inplace: bool = False
) -> Tensor:
    return processor_class(ngram_size)(input_ids, scores)


@lru_cache(maxsize=64)
def _encoder_processor(processor_class: Any, encoder_input_ids: Tensor, ngram_size: int) -> Any:
    """Made once for each `generate()`; it tabulates the encoder's n-grams."""
    return processor_class(ngram_size, encoder_input_ids)


def _encoder(
    processor_class: Any, encoder_input_ids: Tensor, input_ids: Tensor, scores: Tensor, ngram_size: int
) -> Tensor:
    return _encoder_processor(processor_class, encoder_input_ids, ngram_size)(input_ids, scores)


registry.register(
    registry.Op(
        "no_repeat_ngram",
        no_repeat_ngram,
        partial(no_repeat_ngram, backend="reference"),
        sample_inputs,
        BACKENDS,
        raw=("process_logits", "process_logits_"),
        benchmarks=(
            registry.Benchmark(
                bench_input,
                shapes=("256x1024x32128", "1024x1024x32128", "8x1024x50257"),
                eager=registry.Upstream("transformers.NoRepeatNGramLogitsProcessor", _processor),
            ),
            registry.Benchmark(
                inplace_bench_input,
                shapes=("256x1024x32128", "1024x1024x32128", "8x1024x50257"),
                variant="in place",
                eager=registry.Upstream("transformers.NoRepeatNGramLogitsProcessor", _processor),
                compiles=False,
            ),
        ),
    )
)
registry.register(
    registry.Op(
        "encoder_no_repeat_ngram",
        encoder_no_repeat_ngram,
        partial(encoder_no_repeat_ngram, backend="reference"),
        encoder_sample_inputs,
        BACKENDS,
        raw=("process_logits", "process_logits_"),
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
