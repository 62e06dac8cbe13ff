"""The likeliest continuations of each item's beams, from logits to the best tokens of all beams.

Upstream: `GenerationMixin._beam_search` of transformers from the logits to the candidates and their places in
`_get_top_k_continuations`.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fuseopt.ops import registry
from fuseopt.ops.decode.edit_logits import OPTIONAL_EDITS, LogitsEdits, check_edits, edited, for_kernel
from fuseopt.ops.decode.torch_draw import check_random, drawn
from fuseopt.ops.library import define

# One warp sorts the candidates of an item.
MAX_COUNT = 32
_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _fake(
    scores: Tensor,
    running_scores: Tensor,
    count: int,
    log_softmax: bool,
    highest: Tensor | None,
    random: Tensor | None,
    pdl: bool,
    *edits: object,
) -> tuple[Tensor, Tensor]:
    values = running_scores.new_empty((running_scores.shape[0], count))
    return values, values.new_empty(values.shape, dtype=torch.int64)


RAW = define(
    "beam_candidates(Tensor scores, Tensor running_scores, int count, bool log_softmax, Tensor? highest,"
    f" Tensor? random, bool pdl, {OPTIONAL_EDITS}) -> (Tensor, Tensor)",
    _fake,
)


def _reference(
    scores: Tensor, running_scores: Tensor, count: int, log_softmax: bool, edits: LogitsEdits | None
) -> tuple[Tensor, Tensor]:
    scores = F.log_softmax(scores, dim=-1, dtype=torch.float32) if log_softmax else scores.float()
    if edits is not None:
        scores = edited(scores, edits)
    accumulated = scores.unflatten(0, running_scores.shape) + running_scores.float()[:, :, None]
    return torch.topk(accumulated.flatten(1), count)


def _check(scores: Tensor, running_scores: Tensor, count: int, edits: LogitsEdits | None) -> None:
    if running_scores.dim() != 2 or scores.dim() != 2 or scores.shape[0] != running_scores.numel():
        raise ValueError(
            "running_scores must be [items, beams] and scores [items * beams, vocabulary], not"
            f" {tuple(running_scores.shape)} and {tuple(scores.shape)}"
        )
    continuations = running_scores.shape[1] * scores.shape[1]
    if not 0 < count <= continuations:
        raise ValueError(f"count must be between 1 and the {continuations} continuations of an item, not {count}")
    if edits is not None:
        check_edits(edits, *scores.shape)


def beam_candidates(
    scores: Tensor,
    running_scores: Tensor,
    count: int,
    *,
    log_softmax: bool = False,
    edits: LogitsEdits | None = None,
    pdl: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`torch.topk` of each item's `scores + running_scores` over its beams and the vocabulary, in float32.

    Args:
        scores: [items * beams, V], log-probabilities, any strides; float32, or another dtype that is converted to it.
        log_softmax: `scores` are logits; their log-softmax in float32 is taken first.
        edits: applied to the log-probabilities before `running_scores` are added; or None.
        running_scores: [items, beams], the scores of the beams so far.
        count: how many continuations per item; "auto" takes the reference above 32.
        pdl: launch the CUDA kernels programmatically dependent on their predecessors on the stream. The first one's
            predecessor must not write the tensors of `edits`.
        backend: "auto", "cuda" or "reference". Tensors that require a gradient under grad mode, and torch.func
            transforms, need the reference, which "auto" then takes.

    Returns:
        Values [items, count] float32 in descending order, and places [items, count] int64 in beams x V. NaN is the
        highest. Among equal scores the choice and the order are those of torch.topk on the device.

    Raises:
        ValueError: shapes that do not fit together, or a `count` above the number of continuations.
        BackendError: the named backend cannot run here; the message says why.
    """
    _check(scores, running_scores, count, edits)
    if backend == "auto" and count > MAX_COUNT:
        backend = "reference"
    dtypes = (scores.dtype, running_scores.dtype)
    chosen = registry.pick_without_gradient("beam_candidates", backend, dtypes, scores, running_scores)
    if chosen == "reference":
        return _reference(scores, running_scores, count, log_softmax, edits)
    logits = scores if scores.dtype in _KERNEL_DTYPES else scores.float()
    running = running_scores.float()
    pdl = pdl and logits is scores and running is running_scores  # otherwise the previous kernel is a cast
    return RAW[chosen](logits, running, count, log_softmax, None, None, pdl, *for_kernel(edits))


def drawn_continuations(
    scores: Tensor,
    running_scores: Tensor,
    count: int,
    random: Tensor,
    *,
    highest: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`torch.multinomial` of each item's `softmax(scores + running_scores)` over its beams and the vocabulary.

    Args:
        scores: [items * beams, V] float32 on a GPU, any strides; no NaN, and a finite one for each item.
        running_scores: [items, beams] float32.
        count: how many continuations per item, without replacement; "auto" takes the reference above 32.
        random: as for `decode_sample_`, of `exponential_()` for [items, beams * V]; 1 is added to its last element.
        highest: [items * beams] float32, the highest of each row of `scores`, if the caller knows them.
        backend: "auto", "cuda" or "reference".

    Returns:
        `scores + running_scores` [items, count] float32 in the order of the draw, and places [items, count] int64 in
        beams x V.

    Raises:
        ValueError: shapes that do not fit together, or a `count` above the number of continuations.
        BackendError: the named backend cannot run here; the message says why.
    """
    _check(scores, running_scores, count, None)
    check_random(random, scores)
    if backend == "auto" and count > MAX_COUNT:
        backend = "reference"
    dtypes = (scores.dtype, running_scores.dtype)
    chosen = registry.pick_without_gradient("beam_candidates", backend, dtypes, scores, running_scores)
    if chosen == "reference":
        accumulated = (scores.unflatten(0, running_scores.shape) + running_scores[:, :, None]).flatten(1)
        numbers = drawn(random, accumulated.shape)
        places = torch.topk(accumulated.softmax(dim=-1) / numbers, count).indices
        values = torch.gather(accumulated, 1, places)
    else:
        highest = scores.amax(dim=1) if highest is None else highest
        values, places = RAW[chosen](scores, running_scores, count, False, highest, random, False, *for_kernel(None))
    random[2:] += 1
    return values, places


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    for items, beams, vocabulary, count in ((2, 3, 11, 6), (1, 1, 5, 5), (3, 4, 1030, 12), (0, 2, 5, 4)):
        # The best scores differ in every dtype, because each device orders equal ones differently.
        rows = torch.arange(items * beams, device=device)[:, None]
        best = torch.arange(min(count, vocabulary), device=device) + rows % beams / 8
        scores = -20 - torch.rand(items * beams, vocabulary, device=device)
        scores.scatter_(1, torch.rand_like(scores).argsort(1)[:, : best.shape[1]], best)
        running_scores = (-torch.arange(beams, device=device) / 32).repeat(items, 1)
        yield registry.SampleInput((scores.to(dtype), running_scores.to(dtype), count))


def bench_input(
    device: torch.device, dtype: torch.dtype, items: int, beams: int, vocabulary: int
) -> registry.SampleInput:
    scores = torch.randn(items * beams, vocabulary, device=device, dtype=dtype)
    return registry.SampleInput((scores, torch.randn(items, beams, device=device, dtype=dtype), 2 * beams))


def _two_operations(scores: Tensor, running_scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return _reference(scores, running_scores, count, False, None)


registry.register(
    registry.Op(
        name="beam_candidates",
        function=beam_candidates,
        reference=partial(beam_candidates, backend="reference"),
        sample_inputs=sample_inputs,
        backends=(registry.CUDA, registry.REFERENCE),
        benchmarks=(registry.Benchmark(bench_input, shapes=("32x4x32128", "8x4x50257"), eager=_two_operations),),
    )
)
