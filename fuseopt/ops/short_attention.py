"""`F.scaled_dot_product_attention` for sequences so short that one warp holds all scores of its queries."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fuseopt.ops import registry
from fuseopt.ops.library import check_shape, compute_dtype, define, without_autocast

MAX_LENGTH = 32
MAX_HEAD_DIM = 128


def _fake(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
    batch, heads, length, head_dim = query.shape
    return query.new_empty((batch, length, heads, head_dim))


RAW = define("short_attention(Tensor query, Tensor key, Tensor value, bool causal, float scale) -> Tensor", _fake)

RAW_TAKES = define("takes_short_attention(Tensor query) -> bool", lambda query: True)


def _reference(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
    dtype, length = compute_dtype(query), query.shape[2]
    with without_autocast(query):
        scores = query.to(dtype) @ key.to(dtype).transpose(-1, -2) * scale
        if causal:
            behind = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
            scores = scores.masked_fill(behind, -torch.inf)
        attended = scores.softmax(-1) @ value.to(dtype)
    return attended.transpose(1, 2).contiguous().to(query.dtype)


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.dim() != 4:
        raise ValueError(f"query must be [batch, heads, length, head_dim], not {tuple(query.shape)}")
    if query.shape[2] > MAX_LENGTH or query.shape[3] > MAX_HEAD_DIM:
        raise ValueError(
            f"query may have a length of {MAX_LENGTH} and a head_dim of {MAX_HEAD_DIM} at most, not "
            f"{query.shape[2]} and {query.shape[3]}; use torch.nn.functional.scaled_dot_product_attention"
        )
    for name, tensor in (("key", key), ("value", value)):
        check_shape(name, tensor, query.shape)
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name} must have query's dtype {query.dtype}, not {tensor.dtype}")


def short_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """`F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)`, heads behind positions.

    Args:
        query, key, value: [batch, heads, length, head_dim], any strides, one dtype: float32, float16, bfloat16 or
            float64. At most 32 positions and a head_dim of 128. Scores and sums are in float32, or float64.
        causal: whether a query sees no key behind it.
        scale: of the scores; by default head_dim ** -0.5.
        backend: "auto", "cuda" or "reference". Inputs that require a gradient under grad mode, and torch.func
            transforms, need the reference, which "auto" then takes. The reference also computes float64 heads that do
            not fit a GPU's shared memory: on compute capability 7.5, more than 16 positions with a head_dim above 80.

    Returns:
        [batch, length, heads, head_dim], contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or longer sequences.
        BackendError: the backend named cannot run here; the message says why.
    """
    _check(query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    chosen = registry.pick_without_gradient("short_attention", backend, (query.dtype,), query, key, value)
    is_large = query.dtype is torch.float64 and not is_dynamo_compiling()
    if chosen == "reference" or (is_large and not RAW_TAKES[chosen](query)):
        return _reference(query, key, value, causal, scale)
    return RAW[chosen](query, key, value, causal, scale)


def is_fast(query: Tensor) -> bool:
    """Whether the CUDA kernel takes such queries. It is then faster than PyTorch's attention."""
    _, _, length, head_dim = query.shape
    if length > MAX_LENGTH or head_dim > MAX_HEAD_DIM or not query.is_cuda:
        return False
    return registry.pick("short_attention", "auto", query.device, (query.dtype,)) == "cuda"


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(*shape: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(3))

    yield registry.SampleInput(make(2, 3, 16, 64), {"causal": True})
    yield registry.SampleInput(make(2, 1, 7, 24), {"scale": 0.3})
    yield registry.SampleInput(make(1, 2, 31, 5), {"causal": True})
    yield registry.SampleInput(make(3, 2, 32, 72))
    yield registry.SampleInput(make(1, 1, 1, 128), {"causal": True})
    packed = torch.randn(2, 17, 3, 2, 16, device=device, dtype=dtype)
    yield registry.SampleInput(packed.permute(2, 0, 3, 1, 4).unbind(), {"causal": True})
    yield registry.SampleInput(make(0, 2, 4, 8))


def _bench_input(device: torch.device, dtype: torch.dtype, batch: int, length: int) -> registry.SampleInput:
    packed = torch.randn(batch, length, 3, 12, 64, device=device, dtype=dtype)
    return registry.SampleInput(packed.permute(2, 0, 3, 1, 4).unbind(), {"causal": True})


def _torch_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal).transpose(1, 2)


registry.register(
    registry.Op(
        name="short_attention",
        function=short_attention,
        reference=partial(short_attention, backend="reference"),
        sample_inputs=sample_inputs,
        backends=(registry.CUDA, registry.REFERENCE),
        benchmarks=(
            registry.Benchmark(_bench_input, shapes=("256x16", "1024x16", "256x32", "8x16"), torch=_torch_attention),
        ),
    )
)
