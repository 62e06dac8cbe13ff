"""The start of a decode step in one launch: the embedding of each row's token, plus that of its position."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseopt.ops import registry
from fuseopt.ops.library import check_shape, define


def _fake(
    tokens: Tensor, weight: Tensor, positions: Tensor | None, position_weight: Tensor | None, pdl: bool
) -> Tensor:
    return weight.new_empty((*tokens.shape, weight.shape[1]))


RAW = define(
    "decode_embedding(Tensor tokens, Tensor weight, Tensor? positions, Tensor? position_weight, bool pdl) -> Tensor",
    _fake,
)


def _reference(tokens: Tensor, weight: Tensor, positions: Tensor | None, position_weight: Tensor | None) -> Tensor:
    embedded = F.embedding(tokens, weight)
    if positions is None or position_weight is None:
        return embedded
    return embedded + F.embedding(positions, position_weight)


def check_embedding(tokens: Tensor, weight: Tensor, positions: Tensor | None, position_weight: Tensor | None) -> None:
    if (positions is None) != (position_weight is None):
        raise ValueError("positions and position_weight go together")
    if weight.dim() != 2:
        raise ValueError(f"weight must be [vocabulary, H], not {tuple(weight.shape)}")
    if tokens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"tokens must be int32 or int64, not {tokens.dtype}")
    if positions is not None and position_weight is not None:
        check_shape("positions", positions, tokens.shape)
        check_shape("position_weight", position_weight, torch.Size((*position_weight.shape[:1], weight.shape[1])))
        if positions.dtype != tokens.dtype:
            raise TypeError(f"positions must be {tokens.dtype} as tokens are, not {positions.dtype}")
        if position_weight.dtype != weight.dtype:
            raise ValueError(f"position_weight must have weight's dtype {weight.dtype}, not {position_weight.dtype}")


def decode_embedding(
    tokens: Tensor,
    weight: Tensor,
    positions: Tensor | None = None,
    position_weight: Tensor | None = None,
    *,
    pdl: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`F.embedding(tokens, weight) + F.embedding(positions, position_weight)`, with the same roundings.

    Args:
        tokens: any shape, int32 or int64. A token outside the vocabulary fails a device-side assertion on a GPU and
            raises IndexError on a CPU, as in `F.embedding`.
        weight: [vocabulary, H]; float32, float16, bfloat16 or float64.
        positions: like `tokens`, or None for no position embedding.
        position_weight: [positions, H], of `weight`'s dtype, or None.
        pdl: launch the CUDA kernel programmatically dependent on its predecessor on the stream.
        backend: "auto", "cuda" or "reference". Weights that require a gradient under grad mode, and torch.func
            transforms, need the reference, which "auto" then takes.

    Returns:
        [*tokens.shape, H], contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        TypeError: tokens or positions that are not int32 or int64.
        BackendError: the named backend cannot run here; the message says why.
    """
    check_embedding(tokens, weight, positions, position_weight)
    chosen = registry.pick_without_gradient("decode_embedding", backend, (weight.dtype,), weight, position_weight)
    if chosen == "reference":
        return _reference(tokens, weight, positions, position_weight)
    return RAW[chosen](tokens, weight, positions, position_weight, pdl)


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    tokens = torch.tensor([4, 0, 6, 6], device=device)
    yield registry.SampleInput((tokens, make(7, 24)))
    yield registry.SampleInput((tokens.view(2, 2).int(), make(7, 24), tokens.view(2, 2).int() // 2, make(4, 24)))
    yield registry.SampleInput((tokens, make(7, 5), tokens, make(7, 5)))
    yield registry.SampleInput((tokens, make(7, 2056), tokens, make(7, 2056)))
    yield registry.SampleInput((tokens[:0], make(7, 8)))


registry.register(
    registry.Op(
        name="decode_embedding",
        function=decode_embedding,
        reference=partial(decode_embedding, backend="reference"),
        sample_inputs=sample_inputs,
        backends=(registry.CUDA, registry.REFERENCE),
    )
)
