"""The first linear layer of a decoding step, which looks up its input itself: one launch less, and one wait."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fuseopt.ops import registry
from fuseopt.ops.decode.embedding import check_embedding, decode_embedding
from fuseopt.ops.decode.linear import check_layer, decode_linear
from fuseopt.ops.decode.linear_partials import is_at_an_address
from fuseopt.ops.library import define


def _fake(
    tokens: Tensor,
    token_weight: Tensor,
    positions: Tensor,
    position_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: str,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    pdl: bool,
    prefetch: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    sum = token_weight.new_empty((*tokens.shape, token_weight.shape[1]))
    return weight.new_empty((*tokens.shape, weight.shape[0])), sum


_TABLES = "Tensor tokens, Tensor token_weight, Tensor positions, Tensor position_weight"
_LAYER = "Tensor weight, Tensor? bias, str norm, Tensor? norm_weight, Tensor? norm_bias"
RAW = define(
    f"decode_linear_of_embeddings({_TABLES}, {_LAYER}, float eps, bool pdl, Tensor[] prefetch) -> (Tensor, Tensor)",
    _fake,
)
# Of tensors without an address nobody knows.
RAW_TAKES = define(f"takes_embeddings({_TABLES}, {_LAYER}) -> bool", lambda *arguments: False)


def takes_embeddings(
    tokens: Tensor,
    token_weight: Tensor,
    positions: Tensor,
    position_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: str,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
) -> bool:
    """Whether the CUDA kernel of `decode_linear_of_embeddings`, which must be there, takes such a layer, of int64
    tokens and a weight that lies as [K, N]: one of few rows, and a short K with many outputs, or of one row and a
    weight too large to wait in registers, as GPT-2 XL's is."""
    embedding = (tokens, token_weight, positions, position_weight)
    lies_dense = all(tensor.is_contiguous() for tensor in embedding)
    layer = (weight, bias, norm, norm_weight, norm_bias)
    return is_at_an_address(tokens) and lies_dense and RAW_TAKES["cuda"](*embedding, *layer)


def decode_linear_of_embeddings_reference(
    tokens: Tensor,
    token_weight: Tensor,
    positions: Tensor,
    position_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    **norm: Any,
) -> tuple[Tensor, Tensor]:
    """`decode_linear_of_embeddings` in plain PyTorch, for any number of rows."""
    embedding = (tokens, token_weight, positions, position_weight)
    return decode_linear_of_embeddings(*embedding, weight, bias, **norm, backend="reference")


def decode_linear_of_embeddings(
    tokens: Tensor,
    token_weight: Tensor,
    positions: Tensor,
    position_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: str,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    pdl: bool = False,
    prefetch: Sequence[Tensor] = (),
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`decode_linear(sum, weight, bias, norm=norm, ...)`, and `sum`, which is
    `decode_embedding(tokens, token_weight, positions, position_weight)`.

    Args:
        tokens, positions: of one shape [...], int32 or int64. An index outside its table fails a device-side assertion
            on a GPU, and raises IndexError on a CPU.
        token_weight, position_weight: [vocabulary, K] and [positions, K].
        weight, bias, norm, norm_weight, norm_bias, eps, pdl, prefetch: as `decode_linear` takes them, one weight.
        backend: "auto", "cuda" or "reference". Layers that the kernel does not take (`takes_embeddings`) are left to
            `decode_embedding` and `decode_linear`. Tensors that require a gradient under grad mode, and torch.func
            transforms, need the reference, which "auto" then takes.

    Returns:
        [..., N] of `weight`'s dtype, and [..., K] of the tables'.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        TypeError: tokens or positions that are no int32 or int64.
        BackendError: the backend named cannot run here; the message says why.
    """
    embedding = (tokens, token_weight, positions, position_weight)
    check_embedding(*embedding)
    biases = [] if bias is None else [bias]
    check_layer(token_weight[:0], [weight], biases, None, norm, norm_weight, norm_bias, None, False)
    parameters = (token_weight, position_weight, weight, bias, norm_weight, norm_bias)
    dtypes = (token_weight.dtype, weight.dtype)
    chosen = registry.pick_without_gradient("decode_linear_of_embeddings", backend, dtypes, *parameters)
    of_norm: dict[str, Any] = {"norm": norm, "norm_weight": norm_weight, "norm_bias": norm_bias}
    if chosen != "reference" and takes_embeddings(*embedding, weight, bias, **of_norm):
        of_layer = (weight, bias, norm, norm_weight, norm_bias, eps, pdl, list(prefetch))
        return RAW[chosen](*embedding, *of_layer)
    each = "reference" if chosen == "reference" else backend
    sum = decode_embedding(*embedding, pdl=pdl, backend=each)
    return decode_linear(sum, weight, bias, **of_norm, eps=eps, pdl=pdl, prefetch=prefetch, backend=each), sum


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    for rows, columns, outputs in ((1, 96, 1536), (3, 40, 24), (0, 8, 4)):
        norm = {"norm": "layer_norm", "norm_weight": make(columns), "norm_bias": make(columns)}
        tokens, positions = (torch.randint(0, count, (rows,), device=device) for count in (7, 5))
        embedding = (tokens, make(7, columns), positions, make(5, columns))
        yield registry.SampleInput((*embedding, make(columns, outputs).T, make(outputs)), norm)


registry.register(
    registry.Op(
        name="decode_linear_of_embeddings",
        raw=("decode_linear_of_embeddings", "takes_embeddings"),
        function=decode_linear_of_embeddings,
        reference=decode_linear_of_embeddings_reference,
        sample_inputs=sample_inputs,
        backends=(registry.CUDA, registry.REFERENCE),
    )
)
