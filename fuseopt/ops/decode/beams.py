"""The end of a beam search step in one launch: from candidates to the running beams and the best finished ones.

Upstream: the loop of transformers' `GenerationMixin._beam_search` from the candidates on. Only the cache differs: a
table of the rows that each beam's ancestors wrote is reordered, not the cache's rows.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fuseopt.ops import registry
from fuseopt.ops.decode.select import write_flag
from fuseopt.ops.library import check_shape, define, no_result

# One warp sorts the candidates of an item.
MAX_CANDIDATES = 32
# transformers' penalty for the score of a beam that is excluded.
_OUT = -1e9

_TENSORS = (
    "Tensor values, Tensor places, Tensor(a!) running_scores, Tensor(b!) scores, Tensor(c!) is_finished,"
    " Tensor(d!) lengths, Tensor(e!) improvable, Tensor(f!) ids, Tensor(g!) ancestry, Tensor(h!) tokens,"
    " Tensor(i!) going, Tensor(j!) length, Tensor(k!) generated, Tensor(l!) counters, Tensor(m!) arrived, Tensor limit,"
    " Tensor penalties, Tensor? eos"
)


RAW = define(
    f"decode_beams_({_TENSORS}, int vocabulary, bool stops_when_full, bool advance, bool pdl) -> ()", no_result
)


def _reference(
    values: Tensor,
    places: Tensor,
    running_scores: Tensor,
    scores: Tensor,
    is_finished: Tensor,
    lengths: Tensor,
    improvable: Tensor,
    ids: Tensor,
    ancestry: Tensor,
    tokens: Tensor,
    going: Tensor,
    length: Tensor,
    generated: Tensor,
    counters: Tensor,
    limit: Tensor,
    penalties: Tensor,
    eos: Tensor | None,
    vocabulary: int,
    stops_when_full: bool,
    advance: bool,
) -> None:
    items, count = running_scores.shape
    was_going = going.view(-1).index_select(0, (length.view(1) - 1).clamp(0, going.numel() - 1))
    if advance:
        counters += 1
    generated += 1
    parents, next_tokens = places // vocabulary, places % vocabulary
    ends = (length + 1 >= limit).expand_as(places)
    if eos is not None:
        ends = ends | (next_tokens[..., None] == eos).any(-1)
    penalty, best_penalty = penalties.index_select(1, generated)
    new_running_scores, running = torch.topk(values + ends.float() * _OUT, count)

    # Candidates after the first `count` may only become running beams.
    finish = torch.cat((ends[:, :count], torch.zeros_like(ends[:, count:])), dim=1)
    values = _divide(values, penalty)
    if stops_when_full:
        values = values + is_finished.all(1, keepdim=True).float() * _OUT
    values = values + (~improvable[:, None]).float() * _OUT + (~finish).float() * _OUT
    new_scores, kept = torch.topk(torch.cat((scores, values), dim=1), count)

    # Finished and running beams are both chosen from the old finished beams, which need no token, and the candidates.
    own = torch.arange(2 * items * count, device=values.device).unflatten(0, (2, items, count))
    chosen = torch.cat((running + count, kept), dim=1)
    sources = torch.cat((own[1], own[0, :, :1] + parents), dim=1).gather(1, chosen)
    sources = torch.where(was_going, sources.unflatten(1, (2, count)).transpose(0, 1), own).flatten()
    next_tokens = F.pad(next_tokens, (count, 0)).gather(1, chosen).unflatten(1, (2, count)).transpose(0, 1).flatten()
    new_lengths = torch.cat((lengths, generated.expand_as(places)), dim=1).gather(1, kept)
    is_finished.copy_(torch.cat((is_finished, finish), dim=1).gather(1, kept))
    torch.where(was_going, new_scores, scores, out=scores)
    torch.where(was_going, new_lengths, lengths, out=lengths)
    running_scores.copy_(new_running_scores)
    flat_ids = ids.flatten(0, 1)
    flat_ids.copy_(flat_ids.index_select(0, sources))
    flat_ids.index_copy_(1, length, next_tokens[:, None])
    follow(ancestry, sources, counters[:1])
    tokens.copy_(next_tokens[: items * count])

    worst = torch.where(is_finished, new_scores.amin(1, keepdim=True), _OUT)
    improvable &= (_divide(new_running_scores[:, :1], best_penalty) > worst).any(1)
    goes_on = improvable.any() & ~ends.all()
    if stops_when_full:
        goes_on &= ~is_finished.all()
    write_flag(going, length, was_going & goes_on)
    length += 1


def _divide(values: Tensor, penalty: Tensor) -> Tensor:
    """Divides as PyTorch does by a number: on a GPU by multiplying with the reciprocal, which may round differently."""
    return values * penalty.reciprocal().float() if values.is_cuda else values / penalty.float()


def follow(ancestry: Tensor, sources: Tensor, slot: Tensor) -> None:
    """Makes rows continue from other rows: they inherit the ancestry before `slot`, and own the slots from it on.

    Args:
        ancestry: [copies, rows, capacity] int32. The first `len(sources)` rows of all copies are written.
        sources: [any] int64 or int32, among the rows of all copies.
        slot: [1] int64.
    """
    copies, rows, capacity = ancestry.shape
    flat, count = ancestry.flatten(0, 1), sources.shape[0]
    own = torch.arange(rows, dtype=torch.int32, device=ancestry.device).repeat(copies)[:count, None]
    is_inherited = torch.arange(capacity, device=ancestry.device) < slot
    torch.where(is_inherited, flat.index_select(0, sources), own, out=flat[:count])


def _check(
    values: Tensor,
    places: Tensor,
    running_scores: Tensor,
    scores: Tensor,
    is_finished: Tensor,
    lengths: Tensor,
    improvable: Tensor,
    ids: Tensor,
    ancestry: Tensor,
    tokens: Tensor,
    counters: Tensor,
    penalties: Tensor,
) -> None:
    items, beams = running_scores.shape
    rows = items * beams
    if values.dim() != 2 or values.shape[0] != items or values.shape[1] < beams:
        raise ValueError(f"values must be [{items}, {beams} or more], not {tuple(values.shape)}")
    check_shape("places", places, values.shape)
    for name, tensor in (("scores", scores), ("is_finished", is_finished), ("lengths", lengths)):
        check_shape(name, tensor, running_scores.shape)
    check_shape("improvable", improvable, torch.Size((items,)))
    check_shape("tokens", tokens, torch.Size((rows,)))
    check_shape("counters", counters, torch.Size((rows + 1,)))
    for name, tensor in (("ids", ids), ("ancestry", ancestry)):
        if tensor.dim() != 3 or tensor.shape[:2] != (2, rows) or not tensor.is_contiguous():
            raise ValueError(f"{name} must be [2, {rows}, any] and contiguous, not {tuple(tensor.shape)}")
    if penalties.dim() != 2 or penalties.shape[0] != 2:
        raise ValueError(f"penalties must be [2, steps], not {tuple(penalties.shape)}")
    for name, tensor, dtype in (
        ("values", values, torch.float32),
        ("places", places, torch.int64),
        ("running_scores", running_scores, torch.float32),
        ("scores", scores, torch.float32),
        ("is_finished", is_finished, torch.bool),
        ("lengths", lengths, torch.int64),
        ("improvable", improvable, torch.bool),
        ("ids", ids, torch.int64),
        ("ancestry", ancestry, torch.int32),
        ("tokens", tokens, torch.int64),
        ("counters", counters, torch.int64),
        ("penalties", penalties, torch.float64),
    ):
        if tensor.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, not {tensor.dtype}")


def decode_beams_(
    values: Tensor,
    places: Tensor,
    running_scores: Tensor,
    scores: Tensor,
    is_finished: Tensor,
    lengths: Tensor,
    improvable: Tensor,
    ids: Tensor,
    ancestry: Tensor,
    tokens: Tensor,
    going: Tensor,
    length: Tensor,
    generated: Tensor,
    counters: Tensor,
    arrived: Tensor,
    limit: Tensor,
    penalties: Tensor,
    eos: Tensor | None = None,
    *,
    vocabulary: int,
    stops_when_full: bool = False,
    advance: bool = True,
    pdl: bool = False,
    backend: str = "auto",
) -> None:
    """One step of beam search. `ids` and `ancestry` have the running beams first, then the best finished ones.

    `going` says for each `length` whether the search continues; its last element serves all greater lengths. After the
    end of the search the finished beams do not change, and every beam continues from itself.

    Args:
        values, places: [items, candidates] float32 and int64, as `beam_candidates` gives them.
        running_scores, scores: [items, beams] float32, of running and of finished beams. Written to.
        is_finished: [items, beams] bool: which finished beams exist. Written to.
        lengths: [items, beams] int64: how many tokens these have generated. Written to.
        improvable: [items] bool: whether a running beam may still become one of them. Written to.
        ids: [2, items * beams, C] int64, contiguous. Written to.
        ancestry: [2, items * beams, capacity] int32, contiguous: the rows that wrote the slots of the cache. Written
            to.
        tokens: [items * beams] int64: the next tokens of the running beams. Written to.
        going: [any number] bool, contiguous. Read at the previous length. Written to.
        length: one element, int64: the column of `ids` that is filled. Written to.
        generated: one element, int64: the number of steps so far. Written to.
        counters: [1 + items * beams] int64: the next slot of the cache, then counters that `advance` increments too.
            Beams inherit the slots before the next one, as it is after `advance`. Written to.
        arrived: [2] int32, zeros before and after: where the kernel's blocks synchronise.
        limit: one element, int64: the length of `ids` at which all candidates end.
        penalties: [2, steps + 1] float64, by tokens generated: divisors of the scores of finished beams, and of those
            of running beams for an upper estimate of their final scores.
        eos: [any number] int64: tokens that end a candidate, or None.
        vocabulary: `places` are beam * vocabulary + token.
        stops_when_full: transformers' `early_stopping=True`.
        pdl: launch the CUDA kernel programmatically dependent on its predecessor on the stream.
        backend: "auto", "cuda" or "reference"; "auto" takes the reference for more than 32 candidates.

    Raises:
        ValueError: shapes that do not fit together.
        TypeError: dtypes other than these.
        BackendError: the named backend cannot run here, or values require a gradient under grad mode.
    """
    tensors = (running_scores, scores, is_finished, lengths, improvable, ids, ancestry, tokens)
    _check(values, places, *tensors, counters, penalties)
    if backend == "auto" and values.shape[1] > MAX_CANDIDATES:
        backend = "reference"
    chosen = registry.pick_without_gradient("decode_beams_", backend, (values.dtype,), values)
    one_each = (going, length, generated, counters)
    options = (vocabulary, stops_when_full, advance)
    if chosen == "reference":
        _reference(values, places, *tensors, *one_each, limit, penalties, eos, *options)
    else:
        RAW[chosen](values, places, *tensors, *one_each, arrived, limit, penalties, eos, *options, pdl)


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def integers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    vocabulary = 11
    for items, beams, eos in ((1, 2, None), (3, 4, integers(3, 7))):
        rows, candidates = items * beams, 3 * beams
        values = torch.randn(items, candidates, device=device).sort(dim=1, descending=True).values
        sequences = torch.randint(vocabulary, (2, rows, 9), device=device)
        tables = (sequences, torch.zeros(2, rows, 8, dtype=torch.int32, device=device))
        yield registry.SampleInput(
            (
                values,
                torch.stack([torch.randperm(beams * vocabulary, device=device)[:candidates] for _ in range(items)]),
                torch.zeros(items, beams, device=device),
                torch.full((items, beams), _OUT, device=device),
                torch.zeros(items, beams, dtype=torch.bool, device=device),
                torch.zeros(items, beams, dtype=torch.int64, device=device),
                torch.ones(items, dtype=torch.bool, device=device),
                *tables,
                sequences[0, :, 0].clone(),
                torch.ones((), dtype=torch.bool, device=device),
                integers(4),
                integers(1),
                integers(5, *range(rows)),
                torch.zeros(2, dtype=torch.int32, device=device),
                integers(8),
                torch.arange(1.0, 19.0, dtype=torch.float64, device=device).view(2, 9),
                eos,
            ),
            {"vocabulary": vocabulary, "stops_when_full": eos is not None},
        )


registry.register(
    registry.Op(
        name="decode_beams_",
        function=decode_beams_,
        reference=partial(decode_beams_, backend="reference"),
        sample_inputs=sample_inputs,
        backends=(registry.CUDA, registry.REFERENCE),
        in_place=True,
    )
)
