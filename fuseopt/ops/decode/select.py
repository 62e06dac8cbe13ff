"""The end of a decode step: logits processors, each row's likeliest or sampled token, end of sequence, counters.

Upstream: the loop of transformers' `GenerationMixin._sample` from the logits on.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from fuseopt.ops import registry
from fuseopt.ops.decode.edit_logits import OPTIONAL_EDITS, LogitsEdits, check_edits, edited, for_kernel
from fuseopt.ops.library import check_shape, define, no_result

STATE_SCHEMA = (
    "Tensor(a!) tokens, Tensor(b!) ids, Tensor(c!) length, Tensor(d!) unfinished, Tensor(e!) going, Tensor pad,"
    " Tensor? eos, Tensor(f!)[] counters"
)
"""What raw ops that select the next tokens read and write."""

RAW = define(
    f"decode_select_(Tensor scores, {STATE_SCHEMA}, Tensor? divisors, bool pdl, {OPTIONAL_EDITS}) -> ()", no_result
)


def _reference(
    scores: Tensor,
    tokens: Tensor,
    ids: Tensor,
    length: Tensor,
    unfinished: Tensor,
    going: Tensor,
    pad: Tensor,
    eos: Tensor | None,
    counters: Sequence[Tensor],
    divisors: Tensor | None,
    edits: LogitsEdits | None,
) -> None:
    if divisors is not None:
        is_valid = ((scores >= 0) & (scores < torch.inf)).all()
        torch._assert_async(is_valid, "probability tensor contains either `inf`, `nan` or element < 0")
        scores = scores / divisors
    elif edits is not None:
        scores = edited(scores, edits)
    torch.where(unfinished, torch.argmax(scores, -1), pad, out=tokens)
    if eos is not None:
        unfinished &= (tokens[:, None] != eos).all(1)
    write_flag(going, length, unfinished.any())
    ids.index_copy_(1, length, tokens[:, None])
    for counter in (length, *counters):
        counter += 1


def write_flag(flags: Tensor, length: Tensor, flag: Tensor) -> None:
    """Writes a flag [] to the element of `flags` for a length [1], or to the last one if there is none."""
    flags.view(-1).index_copy_(0, length.view(1).clamp(max=flags.numel() - 1), flag.view(1))


def check_state(
    rows: int, tokens: Tensor, ids: Tensor, length: Tensor, unfinished: Tensor, going: Tensor, pad: Tensor
) -> None:
    """Raises ValueError or TypeError unless a step's state fits `rows` rows."""
    check_shape("tokens", tokens, torch.Size((rows,)))
    check_shape("unfinished", unfinished, torch.Size((rows,)))
    if ids.dim() != 2 or ids.shape[0] != rows:
        raise ValueError(f"ids must be [{rows}, length], not {tuple(ids.shape)}")
    for name, tensor in (("length", length), ("pad", pad)):
        if tensor.numel() != 1:
            raise ValueError(f"{name} must have one element, not {tensor.numel()}")
    if not going.numel():
        raise ValueError("going must have an element at least")
    for name, tensor in (("tokens", tokens), ("ids", ids), ("length", length), ("pad", pad)):
        if tensor.dtype != torch.int64:
            raise TypeError(f"{name} must be int64, not {tensor.dtype}")
    for name, tensor in (("unfinished", unfinished), ("going", going)):
        if tensor.dtype != torch.bool:
            raise TypeError(f"{name} must be bool, not {tensor.dtype}")


def _check_scores(scores: Tensor, divisors: Tensor | None, edits: LogitsEdits | None) -> None:
    if scores.dim() != 2 or scores.shape[1] == 0:
        raise ValueError(f"scores must be [rows, vocabulary], not {tuple(scores.shape)}")
    if edits is not None:
        check_edits(edits, *scores.shape)
    if divisors is not None:
        check_shape("divisors", divisors, scores.shape)
        if edits is not None:
            raise ValueError("divisors are for probabilities, which edits are not")
        if (divisors.dtype, scores.dtype) != (torch.float32, torch.float32):
            raise TypeError(f"scores and divisors must be torch.float32, not {scores.dtype} and {divisors.dtype}")


def decode_select_(
    scores: Tensor,
    tokens: Tensor,
    ids: Tensor,
    length: Tensor,
    unfinished: Tensor,
    going: Tensor,
    pad: Tensor,
    eos: Tensor | None = None,
    *,
    counters: Sequence[Tensor] = (),
    divisors: Tensor | None = None,
    edits: LogitsEdits | None = None,
    pdl: bool = False,
    backend: str = "auto",
) -> None:
    """Writes `torch.argmax(scores, -1)`, or `pad` in finished rows, to `tokens` and column `length` of `ids`.

    Then it marks rows as finished whose token is one of `eos`. It writes whether any row is unfinished to element
    `length` of `going`, or to the last one, and adds 1 to `length` and the counters. Of equal scores the first wins;
    NaN is the highest.

    Args:
        scores: [rows, V], columns of unit stride; float32, float16, bfloat16 or float64.
        tokens: [rows] int64. Written to.
        ids: [rows, C] int64, any strides. Written to.
        length: one element, int64, on the device. The CUDA kernel writes no id unless it is below C.
        unfinished: [rows] bool. Read and written to.
        going: [any number] bool, contiguous. Written to.
        pad: one element, int64.
        eos: [any number] int64, or None.
        counters: int64 tensors of any shape, contiguous. Read and written to.
        divisors: [rows, V] float32, contiguous: exponentially distributed numbers by which the scores, here float32
            probabilities, are divided; or None. The tokens are then samples. If `exponential_()` has drawn the numbers,
            they are those that `torch.multinomial(scores, 1)` would have drawn.
        edits: applied first to the scores in float32; or None.
        pdl: launch the CUDA kernel programmatically dependent on its predecessor on the stream, which must not write
            the tensors of `edits`.
        backend: "auto", "cuda" or "reference".

    Raises:
        ValueError: shapes that do not fit together, or both divisors and edits.
        TypeError: dtypes other than these.
        RuntimeError: with `divisors`, scores that are negative, infinite or NaN; on a GPU a device-side assertion.
        BackendError: the named backend cannot run here, or scores require a gradient under grad mode.
    """
    _check_scores(scores, divisors, edits)
    check_state(len(scores), tokens, ids, length, unfinished, going, pad)
    chosen = registry.pick_without_gradient("decode_select_", backend, (scores.dtype,), scores)
    tensors = (scores, tokens, ids, length, unfinished, going, pad, eos)
    if chosen == "reference":
        _reference(*tensors, counters, divisors, edits)
    else:
        RAW[chosen](*tensors, list(counters), divisors, pdl, *for_kernel(edits))


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def integers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    for rows, vocabulary, eos in ((1, 7, None), (3, 300, integers(2, 5)), (2, 5, integers(0, 1, 2))):
        scores = torch.randn(rows, vocabulary, device=device, dtype=dtype)
        unfinished = torch.arange(rows, device=device) != 1
        ids = torch.zeros(rows, 6, dtype=torch.int64, device=device)
        going = torch.ones((), dtype=torch.bool, device=device)
        counters = (integers(4), integers(*range(rows)))
        yield registry.SampleInput(
            (scores, ids[:, 0].clone(), ids, integers(4), unfinished, going, integers(0), eos), {"counters": counters}
        )


registry.register(
    registry.Op(
        name="decode_select_",
        function=decode_select_,
        reference=partial(decode_select_, backend="reference"),
        sample_inputs=sample_inputs,
        backends=(registry.CUDA, registry.REFERENCE),
        in_place=True,
    )
)
