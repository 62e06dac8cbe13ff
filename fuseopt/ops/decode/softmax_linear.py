"""A linear layer of the softmax of scores: the second half of absorbed cross-attention in a decode step.

In cross-attention no step changes the keys and values. So the query projection can be multiplied with the keys once,
and the output projection with the values. What remains of the attention is `decode_linear`, which gives the scores,
then this op.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseopt.errors import BackendError
from fuseopt.ops import registry
from fuseopt.ops.decode.linear import FEW_ROWS, MAX_ROWS, output_dtype
from fuseopt.ops.library import check_shape, compute_dtype, define, without_autocast

GROUP = 128
"""Scores in a group of the tensor core kernel; other sizes run as a softmax and a `decode_linear`."""

MOST_GROUPS = 16
"""The most groups of the tensor core kernel."""


def _fake(
    scores: Tensor, weight: Tensor, residual: Tensor | None, groups: int, pdl: bool, prefetch: Sequence[Tensor]
) -> Tensor:
    return scores.new_empty((*scores.shape[:-1], weight.shape[0]), dtype=output_dtype(weight.dtype, residual))


RAW = define(
    "decode_softmax_linear(Tensor scores, Tensor weight, Tensor? residual, int groups, bool pdl, Tensor[] prefetch)"
    " -> Tensor",
    _fake,
)


def decode_softmax_linear_reference(
    scores: Tensor,
    weight: Tensor,
    groups: int,
    *,
    residual: Tensor | None = None,
    pdl: bool = False,
    prefetch: Sequence[Tensor] = (),
) -> Tensor:
    """`decode_softmax_linear` in plain PyTorch, for any number of rows."""
    _check(scores, weight, groups, residual)
    with without_autocast(scores):
        dtype = compute_dtype(scores, weight)
        each = scores.to(dtype).unflatten(-1, (groups, scores.shape[-1] // groups))
        probabilities = F.softmax(each, dim=-1).flatten(-2).to(weight.dtype)
        output = F.linear(probabilities.to(dtype), weight.to(dtype))
        if residual is not None:
            output = output + residual.to(torch.promote_types(dtype, residual.dtype))
        return output.to(output_dtype(weight.dtype, residual))


def _check(scores: Tensor, weight: Tensor, groups: int, residual: Tensor | None) -> None:
    if weight.dim() != 2:
        raise ValueError(f"weight must be [N, K], not {tuple(weight.shape)}")
    check_shape("scores", scores, torch.Size((*scores.shape[:-1], weight.shape[1])))
    if groups < 1 or scores.shape[-1] % groups:
        raise ValueError(f"{scores.shape[-1]} scores are no {groups} groups of one size")
    if residual is not None:
        check_shape("residual", residual, torch.Size((*scores.shape[:-1], weight.shape[0])))


def decode_softmax_linear(
    scores: Tensor,
    weight: Tensor,
    groups: int,
    *,
    residual: Tensor | None = None,
    pdl: bool = False,
    prefetch: Sequence[Tensor] = (),
    backend: str = "auto",
) -> Tensor:
    """`residual + F.linear(softmax of each group of scores, weight)`, for the few rows of a decode step.

    The softmax is computed in float32 (float64 if a tensor is float64) and rounded to the weight's dtype, as
    transformers rounds attention probabilities. Everything else is rounded once, at the end. Autocast has no effect.

    Args:
        scores: [..., K], any strides; float32, float16, bfloat16 or float64. The softmax of a group of
            -inf only is NaN, as in PyTorch. More than `MAX_ROWS` rows go to the reference; with "auto" more than
            `FEW_ROWS`.
        weight: [N, K], as `decode_linear` takes it.
        groups: how many equal neighbouring parts a row of scores has, each with its own softmax. From sm_80 on it is
            one launch for up to 16 rows of up to `MOST_GROUPS` groups of `GROUP` float32 scores, with a 16-bit or
            float32 weight whose first dimension has unit stride.
        residual: [..., N], added at the end; any dtype; or None.
        pdl, prefetch: as in `decode_linear`.
        backend: "auto", "cuda" or "reference". Tensors that require a gradient under grad mode, and torch.func
            transforms, need the reference, which "auto" then takes.

    Returns:
        [..., N], contiguous, in `weight`'s dtype, or in what that and `residual`'s promote to.

    Raises:
        ValueError: shapes that do not fit together.
        BackendError: the named backend cannot run here; the message says why.
    """
    _check(scores, weight, groups, residual)
    rows = scores.shape[:-1].numel()
    if rows > MAX_ROWS and backend == "cuda":
        raise BackendError(f"decode_softmax_linear: 'cuda' takes {MAX_ROWS} rows at most, not {rows}")
    if rows > (FEW_ROWS if backend == "auto" else MAX_ROWS):
        chosen = "reference"
    else:
        dtypes = (scores.dtype, weight.dtype)
        chosen = registry.pick_without_gradient("decode_softmax_linear", backend, dtypes, scores, weight, residual)
    if chosen == "reference":
        return decode_softmax_linear_reference(scores, weight, groups, residual=residual)
    return RAW[chosen](scores, weight, residual, groups, pdl, list(prefetch))


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    wide = torch.promote_types(dtype, torch.float32)
    yield registry.SampleInput((make(1, 2 * GROUP, dtype=wide), make(2 * GROUP, 40).T, 2), {"residual": make(1, 40)})
    yield registry.SampleInput((make(9, 3 * GROUP, dtype=wide), make(3 * GROUP, 24).T, 3))
    yield registry.SampleInput((make(2, 2, 33), make(7, 33), 3), {"residual": make(2, 2, 7, dtype=wide)})
    yield registry.SampleInput((make(3, 12), make(5, 12), 1))
    yield registry.SampleInput((make(0, 8), make(4, 8), 2))


registry.register(
    registry.Op(
        name="decode_softmax_linear",
        function=decode_softmax_linear,
        reference=decode_softmax_linear_reference,
        sample_inputs=sample_inputs,
        backends=(registry.CUDA, registry.REFERENCE),
    )
)
