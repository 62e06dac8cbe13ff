"""The end of a decode step that samples: logits processors, filters, a token drawn for each row, and `decode_select_`.

Upstream, in the order in which `generate()` applies them: those of `edit_logits`, then `TopKLogitsWarper` (Fan et al.
2018, arXiv 1805.04833), `TopPLogitsWarper` (Holtzman et al. 2020, arXiv 1904.09751), `MinPLogitsWarper` (Nguyen et al.
2024, arXiv 2407.01082), `TypicalLogitsWarper` (Meister et al. 2023, arXiv 2202.00666), and `torch.multinomial`.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fuseopt.ops import registry
from fuseopt.ops.decode.edit_logits import OPTIONAL_EDITS, LogitsEdits, check_edits, edit_logits, for_kernel
from fuseopt.ops.decode.select import STATE_SCHEMA, check_state, decode_select_
from fuseopt.ops.decode.torch_draw import MOST_NUMBERS, check_random, drawn
from fuseopt.ops.library import check_shape, define, no_result

# Tokens that a block of the kernel can have, and blocks that share a row: 16 on GPUs with clusters of blocks.
_TOKENS_OF_BLOCK, _BLOCKS_OF_CLUSTER = 2**16 - 8, 16
_MOST_MIN_TOKENS = 128
# TUNED: `random` is faster for 8 rows and slower for 64; a top-k up to 128 is gathered by one block.
_MOST_ROWS_TO_DRAW, _MOST_GATHERED = 16, 128


class SamplingFilters(NamedTuple):
    """Filters of scores [rows, V], applied in this order; what a filter removes has a probability of 0 in the next.

    Attributes:
        top_k: keeps this many of the highest scores, and those equal to the lowest of these; 0 for all.
        top_p: keeps the likeliest tokens whose probabilities add up to this much; 1 for all. Of equal scores the last
            come first.
        min_p: keeps tokens that are at least this many times as likely as the likeliest; 0 for all.
        typical_p: keeps tokens whose information is nearest to the entropy, and whose probabilities add up to this
            much; 1 for all.
        min_tokens: `top_p` and `min_p` keep at least this many of the likeliest tokens, `typical_p` of those whose
            information is nearest to the entropy.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    min_tokens: int = 1


NO_FILTERS = SamplingFilters()


RAW = define(
    "decode_sample_(Tensor logits, Tensor? divisors, Tensor? random, int top_k, float top_p, float min_p,"
    f" float typical_p, int min_tokens, {STATE_SCHEMA}, Tensor(g!)[] kept, bool pdl, {OPTIONAL_EDITS}) -> ()",
    no_result,
)


def filtered(scores: Tensor, filters: SamplingFilters) -> Tensor:
    """Scores [rows, V] with -inf for tokens that `filters` remove, in plain PyTorch, with upstream's roundings."""
    if 0 < filters.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < torch.topk(scores, filters.top_k)[0][..., -1, None], -math.inf)
    if filters.top_p < 1:
        ascending, order = torch.sort(scores, descending=False)
        is_removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= (1 - filters.top_p)
        is_removed[..., -filters.min_tokens :].fill_(False)  # an assigned number would be a new tensor, never recorded
        scores = scores.masked_fill(is_removed.scatter(1, order, is_removed), -math.inf)
    if filters.min_p > 0:
        probabilities = scores.softmax(dim=-1)
        is_removed = probabilities < filters.min_p * probabilities.amax(dim=-1, keepdim=True)
        if filters.min_tokens > 1:
            likeliest = torch.topk(probabilities, min(filters.min_tokens, scores.shape[-1]), dim=-1).indices
            is_removed = is_removed.scatter(-1, likeliest, False)
        scores = scores.masked_fill(is_removed, -math.inf)
    if filters.typical_p < 1:
        scores = _typical(scores, filters.typical_p, filters.min_tokens)
    return scores


def _typical(scores: Tensor, mass: float, min_tokens: int) -> Tensor:
    information = -scores.log_softmax(dim=-1)
    entropy = (information * torch.exp(-information)).nansum(-1, keepdim=True)
    distances, order = torch.sort(torch.abs(information - entropy), descending=False)
    cumulative = scores.gather(-1, order).softmax(dim=-1).cumsum(dim=-1)
    last = (cumulative < mass).sum(dim=1, keepdim=True).clamp_(max=scores.shape[-1] - 1)
    is_removed = distances > distances.gather(1, last)
    is_removed[..., :min_tokens].fill_(False)
    return scores.masked_fill(is_removed.scatter(1, order, is_removed), -math.inf)


def _has_kernel(logits: Tensor) -> bool:
    """Whether the CUDA kernel takes so many tokens."""
    blocks = _BLOCKS_OF_CLUSTER if torch.cuda.get_device_capability(logits.device)[0] >= 9 else 1
    return logits.shape[1] <= blocks * _TOKENS_OF_BLOCK


def draws_numbers(logits: Tensor, filters: SamplingFilters) -> bool:
    """Whether `decode_sample_` is faster with `random` than with numbers that torch draws first.

    It computes each number on its own, where torch gets four at a time. So with many rows it does so only for the few
    tokens that a small top-k leaves.
    """
    on_gpu = registry.pick("decode_sample_", "auto", logits.device, (logits.dtype,)) != "reference"
    are_few = len(logits) <= _MOST_ROWS_TO_DRAW or 0 < filters.top_k <= _MOST_GATHERED
    return on_gpu and are_few and _has_kernel(logits) and logits.numel() <= MOST_NUMBERS


def _check(
    logits: Tensor,
    divisors: Tensor | None,
    random: Tensor | None,
    filters: SamplingFilters,
    edits: LogitsEdits | None,
    kept: Tensor | None,
) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits must be [rows, vocabulary], not {tuple(logits.shape)}")
    if (divisors is None) == (random is None):
        raise ValueError("give either divisors or random")
    if divisors is not None:
        check_shape("divisors", divisors, logits.shape)
        if divisors.dtype != torch.float32:
            raise TypeError(f"divisors must be torch.float32, not {divisors.dtype}")
    if random is not None:
        check_random(random, logits)
    if kept is not None:
        check_shape("kept", kept, logits.shape)
        if kept.dtype != torch.float32:
            raise TypeError(f"kept must be torch.float32, not {kept.dtype}")
    _check_filters(logits, filters, edits)


def are_in_range(filters: SamplingFilters) -> bool:
    """Whether the ops keep so many tokens at least."""
    return 1 <= filters.min_tokens <= _MOST_MIN_TOKENS


def _check_filters(scores: Tensor, filters: SamplingFilters, edits: LogitsEdits | None) -> None:
    if edits is not None:
        check_edits(edits, *scores.shape)
    if filters.top_k < 0:
        raise ValueError(f"filters.top_k must be positive, or 0 for all tokens, not {filters.top_k}")
    if not are_in_range(filters):
        raise ValueError(f"filters.min_tokens must be between 1 and {_MOST_MIN_TOKENS}, not {filters.min_tokens}")
    for name in ("top_p", "min_p", "typical_p"):
        value = getattr(filters, name)
        if not 0 <= value <= 1:
            raise ValueError(f"filters.{name} must be in [0, 1], not {value}")


def decode_sample_(
    logits: Tensor,
    divisors: Tensor | None,
    tokens: Tensor,
    ids: Tensor,
    length: Tensor,
    unfinished: Tensor,
    going: Tensor,
    pad: Tensor,
    eos: Tensor | None = None,
    *,
    random: Tensor | None = None,
    filters: SamplingFilters = NO_FILTERS,
    counters: Sequence[Tensor] = (),
    edits: LogitsEdits | None = None,
    kept: Tensor | None = None,
    pdl: bool = False,
    backend: str = "auto",
) -> None:
    """Draws a token for each row; then as `decode_select_`, which has the other arguments.

    The same as `decode_select_(softmax(filtered(edited(logits))), ..., divisors=divisors)`. On a GPU no score is
    sorted. Against the reference the kernel rounds differently where probabilities are summed up: a token whose
    cumulative probability is at the cut of top-p or typical-p to within rounding may be kept by one only.

    Args:
        logits: [rows, V], columns of unit stride; float32, float16, bfloat16 or float64.
        divisors: [rows, V] float32, exponentially distributed numbers. If `exponential_()` has drawn them, the tokens
            are those that `torch.multinomial` would have drawn. Or None.
        random: instead of `divisors`, [3] int64 on a GPU: the seed and offset of a torch.Generator, and how many calls
            drew from there before this one, to which 1 is added. The numbers are those that `exponential_()` would draw
            for [rows, V]; each call takes `offset_of_draw` of the offset. With `pdl`, the predecessor must not write
            it. The reference waits for the device.
        filters: applied to the edited scores.
        edits: applied first to the logits in float32; or None.
        kept: [rows, V] float32, contiguous. Written to: the edited scores, -inf where a filter removed one; or None.
        pdl: launch the CUDA kernel programmatically dependent on its predecessor on the stream, which must not write
            the tensors of `edits`.
        backend: "auto", "cuda" or "reference". On a GPU "auto" is the reference above 65,528 tokens, or from sm_90 on
            524,224.

    Raises:
        ValueError: shapes that do not fit together, or filters out of range.
        TypeError: dtypes other than these.
        RuntimeError: a row without a finite score, or with infinity or NaN; on a GPU a device-side assertion.
        BackendError: the named backend cannot run here, or logits require a gradient under grad mode.
    """
    _check(logits, divisors, random, filters, edits, kept)
    if random is not None:
        counters = (*counters, random[2:])
    check_state(len(logits), tokens, ids, length, unfinished, going, pad)
    chosen = registry.pick_without_gradient("decode_sample_", backend, (logits.dtype,), logits)
    state = (tokens, ids, length, unfinished, going, pad, eos)
    if chosen == "reference" or (backend == "auto" and not _has_kernel(logits)):
        scores = logits.float() if edits is None else edit_logits(logits, edits, backend=backend)
        scores = filtered(scores, filters)
        if kept is not None:
            kept.copy_(scores)
        if random is not None:
            divisors = drawn(random, logits.shape)
        decode_select_(scores.softmax(dim=-1), *state, counters=counters, divisors=divisors, backend=backend)
    else:
        if logits.dtype == torch.float64:
            logits = logits.float()
        returned = [] if kept is None else [kept]
        RAW[chosen](logits, divisors, random, *filters, *state, list(counters), returned, pdl, *for_kernel(edits))


def _fake_filter(scores: Tensor, *arguments: object) -> tuple[Tensor, Tensor]:
    kept = scores.new_empty(scores.shape, dtype=torch.float32)
    return kept, kept.new_empty(len(kept))


RAW_FILTER = define(
    "filter_scores(Tensor scores, int top_k, float top_p, float min_p, float typical_p, int min_tokens, bool pdl,"
    f" {OPTIONAL_EDITS}) -> (Tensor, Tensor)",
    _fake_filter,
)


def filter_scores(
    scores: Tensor,
    *,
    filters: SamplingFilters = NO_FILTERS,
    edits: LogitsEdits | None = None,
    pdl: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The scores that `decode_sample_` would draw from.

    Args:
        scores: [rows, V], any strides; float32, float16, bfloat16 or float64.
        filters, edits, pdl, backend: as for `decode_sample_`.

    Returns:
        [rows, V] float32, the edited scores, -inf where a filter removed one; and the highest score of each row, [rows]
        float32.

    Raises:
        ValueError: shapes that do not fit together, or filters out of range.
        RuntimeError: a row without a finite score, or with infinity or NaN: a device-side assertion, on a GPU only.
        BackendError: the named backend cannot run here, or scores require a gradient under grad mode.
    """
    if scores.dim() != 2 or scores.shape[1] == 0:
        raise ValueError(f"scores must be [rows, vocabulary], not {tuple(scores.shape)}")
    _check_filters(scores, filters, edits)
    chosen = registry.pick_without_gradient("filter_scores", backend, (scores.dtype,), scores)
    if chosen == "reference" or (backend == "auto" and not _has_kernel(scores)):
        kept = filtered(scores.float() if edits is None else edit_logits(scores, edits, backend=backend), filters)
        return kept, kept.amax(dim=-1)
    if scores.dtype == torch.float64:
        scores, pdl = scores.float(), False
    kept, highest = RAW_FILTER[chosen](scores, *filters, pdl, *for_kernel(edits))
    # The likeliest token may be far from typical.
    return kept, highest if filters.typical_p == 1 else kept.amax(dim=-1)


def filter_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    for rows, vocabulary, filters in (
        (1, 7, SamplingFilters(top_k=3)),
        (3, 300, SamplingFilters(top_k=20, min_p=0.05, min_tokens=2)),
        (2, 50, SamplingFilters(top_p=0.9)),
        (0, 5, NO_FILTERS),
    ):
        yield registry.SampleInput((torch.randn(rows, vocabulary, device=device, dtype=dtype),), {"filters": filters})


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def integers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    for rows, vocabulary, filters in (
        (1, 7, SamplingFilters()),
        (3, 300, SamplingFilters(top_k=20, min_p=0.05)),
        (2, 50, SamplingFilters(top_p=0.9, typical_p=0.8)),
    ):
        logits = torch.randn(rows, vocabulary, device=device, dtype=dtype)
        divisors = torch.rand(rows, vocabulary, device=device) + 0.5
        unfinished = torch.arange(rows, device=device) != 1
        ids = torch.zeros(rows, 6, dtype=torch.int64, device=device)
        going = torch.ones((), dtype=torch.bool, device=device)
        written = (ids[:, 0].clone(), ids, integers(4), unfinished, going)
        options = {"filters": filters, "counters": (integers(4), integers(*range(rows)))}
        yield registry.SampleInput((logits, divisors, *written, integers(0), integers(2, 5)), options)


registry.register(
    registry.Op(
        name="decode_sample_",
        function=decode_sample_,
        reference=partial(decode_sample_, backend="reference"),
        sample_inputs=sample_inputs,
        backends=(registry.CUDA, registry.REFERENCE),
        in_place=True,
    )
)
registry.register(
    registry.Op(
        name="filter_scores",
        function=filter_scores,
        reference=partial(filter_scores, backend="reference"),
        sample_inputs=filter_inputs,
        backends=(registry.CUDA, registry.REFERENCE),
    )
)
