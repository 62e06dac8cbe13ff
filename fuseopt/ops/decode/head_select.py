"""The end of a greedy decode step whose scores nothing else reads: the head, then each row's likeliest token."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fuseopt.ops import registry
from fuseopt.ops.decode.edit_logits import OPTIONAL_EDITS, LogitsEdits, check_edits, for_kernel
from fuseopt.ops.decode.linear import FEW_ROWS, LayerOptions, check_layer, decode_linear
from fuseopt.ops.decode.linear_partials import SPLIT_K, accepts_partials, check_partials, summed
from fuseopt.ops.decode.select import STATE_SCHEMA, check_state, decode_select_
from fuseopt.ops.library import define, no_result

RAW = define(
    "decode_head_select_(Tensor input, Tensor? split_k_partials, Tensor weight, str norm, Tensor? norm_weight,"
    f" Tensor? norm_bias, float eps, Tensor[] prefetch, {STATE_SCHEMA}, bool pdl, {OPTIONAL_EDITS}) -> ()",
    no_result,
)


def decode_head_select_(
    input: Tensor,
    weight: Tensor,
    tokens: Tensor,
    ids: Tensor,
    length: Tensor,
    unfinished: Tensor,
    going: Tensor,
    pad: Tensor,
    eos: Tensor | None = None,
    *,
    split_k_partials: Tensor | None = None,
    norm: str | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    counters: Sequence[Tensor] = (),
    edits: LogitsEdits | None = None,
    pdl: bool = False,
    prefetch: Sequence[Tensor] = (),
    backend: str = "auto",
) -> None:
    """Bitwise the same as `decode_select_(decode_linear(input, weight, norm=norm, ...), tokens, ids, ...)`.

    Saves the launch that searches the scores if edits are token rules only and the linear layer's CUDA kernel streams
    its weight after a norm: a large 16-bit weight with at most 8 rows, or a float32 weight. The kernel's blocks then
    keep their highest scores.

    For more than `FEW_ROWS` rows it calls those two ops.

    Args:
        input: [rows, K], as `decode_linear` takes it.
        split_k_partials: [2, rows, K], added to `input` as in `decode_linear_of_sum`; needs a norm.
        weight: [V, K] with V > 0, as `decode_linear` takes it.
        tokens, ids, length, unfinished, going, pad, eos, counters, edits: as `decode_select_` takes them.
        norm, norm_weight, norm_bias, eps, prefetch: as `decode_linear` takes them.
        pdl: as in both. The predecessor on the stream must not write parameters, or tensors of the edits other than
            `length`.
        backend: "auto", "cuda" or "reference".

    Raises:
        ValueError: shapes or options that do not fit together.
        TypeError: dtypes other than these.
        BackendError: the named backend cannot run here, or tensors require a gradient under grad mode.
    """
    if input.dim() != 2 or len(weight) == 0:
        raise ValueError(
            f"input must be [rows, K] and weight [V, K] with V > 0, not {tuple(input.shape)} and {tuple(weight.shape)}"
        )
    check_layer(input, [weight], options=LayerOptions(None, norm or "", norm_weight, norm_bias))
    check_state(len(input), tokens, ids, length, unfinished, going, pad)
    if edits is not None:
        check_edits(edits, len(input), len(weight))
    if split_k_partials is not None:
        check_partials(input, split_k_partials, norm)
    state = (tokens, ids, length, unfinished, going, pad, eos)
    dtypes, tensors = (input.dtype, weight.dtype), (input, split_k_partials, weight, norm_weight, norm_bias)
    chosen = registry.pick_without_gradient("decode_head_select_", backend, dtypes, *tensors)
    if split_k_partials is not None and norm is not None:
        of_norm: dict[str, Any] = {"norm": norm, "norm_weight": norm_weight, "norm_bias": norm_bias}
        if chosen == "reference" or len(input) > FEW_ROWS or not accepts_partials(input, weight, **of_norm):
            input, split_k_partials = summed(input, split_k_partials), None
    if chosen == "reference" or len(input) > FEW_ROWS:
        each = "reference" if chosen == "reference" else backend
        scores = decode_linear(
            input,
            weight,
            norm=norm,
            norm_weight=norm_weight,
            norm_bias=norm_bias,
            eps=eps,
            pdl=pdl,
            prefetch=prefetch,
            backend=each,
        )
        decode_select_(scores, *state, counters=counters, edits=edits, pdl=pdl, backend=each)
    else:
        head = (input, split_k_partials, weight, norm or "", norm_weight, norm_bias, eps, list(prefetch))
        RAW[chosen](*head, *state, list(counters), pdl, *for_kernel(edits))


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def integers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    for rows, vocabulary, eos in ((1, 40, None), (3, 300, integers(2, 5))):
        input = torch.randn(rows, 48, device=device, dtype=dtype)
        weight = torch.randn(vocabulary, 48, device=device, dtype=dtype)
        unfinished = torch.arange(rows, device=device) != 1
        ids = torch.zeros(rows, 6, dtype=torch.int64, device=device)
        going = torch.ones((), dtype=torch.bool, device=device)
        norm = {"norm": "rms_norm", "norm_weight": torch.randn(48, device=device, dtype=dtype)}
        counters = (integers(4), integers(*range(rows)))
        written = (ids[:, 0].clone(), ids, integers(4), unfinished, going)
        yield registry.SampleInput((input, weight, *written, integers(0), eos), {**norm, "counters": counters})
        partials = torch.randn(SPLIT_K, rows, 48, device=device, dtype=torch.promote_types(dtype, torch.float32))
        copies = tuple(tensor.clone() for tensor in written)
        yield registry.SampleInput((input, weight, *copies, integers(0), eos), {**norm, "split_k_partials": partials})


registry.register(
    registry.Op(
        name="decode_head_select_",
        function=decode_head_select_,
        reference=partial(decode_head_select_, backend="reference"),
        sample_inputs=sample_inputs,
        backends=(registry.CUDA, registry.REFERENCE),
        in_place=True,
    )
)
