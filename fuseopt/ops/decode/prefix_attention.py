"""Causal attention of a prompt's tokens to a cache that has their keys and values, and those of a prefix.

One kernel that splits the keys among blocks and reads their number from the device, after Flash-Decoding (Dao 2023).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fuseopt.errors import BackendError
from fuseopt.ops import registry
from fuseopt.ops.decode.attention_checks import is_aligned, kernel_refusal
from fuseopt.ops.library import check_shape, define, without_autocast
from fuseopt.tuning import tuned

MAX_HEAD_DIM = 256
_HEAD_DIM_MULTIPLE = 8


def _fake(query: Tensor, *further: object) -> Tensor:
    return query.new_empty((*query.shape[:2], query.shape[2] * query.shape[3]))


RAW = define(
    "prefix_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor? start, Tensor? filled, float scale,"
    " int window, bool pdl) -> Tensor",
    _fake,
)


def _check(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, start: Tensor | None, filled: Tensor | None, window: int
) -> None:
    if query.dim() != 4 or key_cache.dim() != 4:
        raise ValueError(
            "query must be [rows, length, heads, head_dim] and key_cache [rows, kv_heads, capacity, head_dim], not"
            f" {tuple(query.shape)} and {tuple(key_cache.shape)}"
        )
    rows, length, heads, head_dim = query.shape
    kv_heads, capacity = key_cache.shape[1:3]
    check_shape("key_cache", key_cache, torch.Size((rows, kv_heads, capacity, head_dim)))
    check_shape("value_cache", value_cache, key_cache.shape)
    if capacity < length:
        raise ValueError(f"key_cache has {capacity} slots for {length} tokens")
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"query has {heads} heads, which must be a multiple of key_cache's {kv_heads}")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dtype != query.dtype:
            raise ValueError(f"{name} must have query's dtype {query.dtype}, not {cache.dtype}")
    for name, number in (("start", start), ("filled", filled)):
        if number is not None and (number.dtype != torch.int64 or number.shape != (1,)):
            raise ValueError(f"{name} must be [1] int64, not {tuple(number.shape)} {number.dtype}")
    if window < 0:
        raise ValueError(f"window must be positive, or 0 for none, not {window}")


def _reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    start: Tensor | None,
    filled: Tensor | None,
    scale: float,
    window: int,
) -> Tensor:
    length, heads = query.shape[1:3]
    slots = torch.arange(key_cache.shape[2], device=query.device)
    tokens = slots[:length] if start is None else slots[:length] + start
    seen = slots <= tokens[:, None]
    if window:
        seen &= slots > tokens[:, None] - window
    is_filled = slots <= tokens[-1:] if filled is None else (slots <= tokens[-1:]) & (slots < filled)
    keys, values = (torch.where(is_filled[:, None], cache, 0) for cache in (key_cache, value_cache))
    acc = torch.promote_types(query.dtype, torch.float32)
    grouped = query.transpose(1, 2).unflatten(1, (keys.shape[1], heads // keys.shape[1])).to(acc)
    with without_autocast(query):
        scores = grouped @ keys.unsqueeze(2).mT.to(acc) * scale
        attended = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values.unsqueeze(2).to(acc)
    return attended.to(query.dtype).flatten(1, 2).transpose(1, 2).flatten(2)


def _refusal(head_dim: int) -> str:
    """Why the CUDA kernel, which must exist, does not take a call; empty if it does."""
    return kernel_refusal(head_dim, _HEAD_DIM_MULTIPLE, MAX_HEAD_DIM)


def is_fast(length: int, key_cache: Tensor, value_cache: Tensor) -> bool:
    """True if the CUDA kernel runs for tensors like these and is faster than PyTorch's attention.

    Args:
        length: tokens a row.
        key_cache, value_cache: as `prefix_attention` takes them.
    """
    if length > tuned("prefix_attention_max_length", key_cache.device):
        return False
    chosen = registry.pick_without_gradient("prefix_attention", "auto", (key_cache.dtype,), key_cache, value_cache)
    return chosen == "cuda" and not _refusal(key_cache.shape[-1]) and all(map(is_aligned, (key_cache, value_cache)))


def prefix_attention_reference(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float, **options: Any
) -> Tensor:
    """`prefix_attention` in plain PyTorch."""
    return prefix_attention(query, key_cache, value_cache, scale, **options, backend="reference")


def prefix_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: float,
    *,
    start: Tensor | None = None,
    filled: Tensor | None = None,
    window: int = 0,
    pdl: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Attention from each of a prompt's tokens to its own slot and those before it.

    Token i of a row is in slot `start` + i. Slots after the last token are not read. For 16-bit dtypes scores, softmax
    and sums are float32, and weights are rounded before the product with the values.

    Args:
        query: [rows, length, heads, head_dim], any strides, float32, float16, bfloat16 or float64. The CUDA kernel
            takes float16 and bfloat16, and a head_dim that is a multiple of 8, 256 at most.
        key_cache, value_cache: [rows, kv_heads, capacity, head_dim], `query`'s dtype, any strides. The CUDA
            kernel works on copies if strides are no multiples of 16 bytes. Neighbouring heads of queries share a head
            of keys.
        scale: multiplies the scores.
        start: [1] int64, the slot of the first token, from 0 to capacity - length (not checked); None for 0.
        filled: [1] int64: keys and values from this slot on count as zeros, as they belong to padding; None without
            padding.
        window: a token attends to its own slot and the `window` - 1 slots before it; 0: to all.
        pdl: launch the CUDA kernel programmatically dependent on its predecessor on the stream. Before that has ended
            it reads `start`, `filled` and the slots before `start`, and writes nothing.
        backend: "auto", "cuda" or "reference". "auto" takes the reference for tensors that the kernel does not take,
            for tensors that require a gradient under grad mode, and under torch.func transforms.

    Returns:
        [rows, length, heads * head_dim], contiguous, `query`'s dtype.

    Raises:
        ValueError: shapes, dtypes or a window that do not fit together.
        BackendError: the named backend cannot run here, or does not take such tensors; the message says why.
    """
    _check(query, key_cache, value_cache, start, filled, window)
    tensors = query, key_cache, value_cache
    chosen = registry.pick_without_gradient("prefix_attention", backend, (query.dtype,), *tensors, start, filled)
    if chosen != "reference":
        refusal = _refusal(query.shape[-1])
        if not refusal:
            caches = key_cache, value_cache
            if not all(map(is_aligned, caches)):
                caches = tuple(cache.clone(memory_format=torch.contiguous_format) for cache in caches)
                pdl = False  # the kernel would read the copies before they are written
            return RAW[chosen](query, *caches, start, filled, scale, window, pdl)
        if backend != "auto":
            raise BackendError(f"prefix_attention: {backend!r} {refusal}")
    return _reference(*tensors, start, filled, scale, window)


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    for rows, length, heads, kv_heads, head_dim, start, options in (
        (2, 5, 4, 2, 64, 130, {"window": 40}),
        (1, 20, 3, 3, 80, 7, {"filled": 20}),
        (1, 3, 8, 1, 256, None, {}),
        (0, 2, 2, 1, 8, 1, {}),
    ):
        query = torch.randn(rows, length, heads, head_dim, device=device, dtype=dtype)
        capacity = (start or 0) + length + 3
        caches = torch.randn(2, rows, kv_heads, capacity, head_dim, device=device, dtype=dtype)
        numbers = {"start": start, "filled": options.get("filled")}
        tensors = {
            name: torch.tensor([number], device=device) for name, number in numbers.items() if number is not None
        }
        yield registry.SampleInput((query, *caches, head_dim**-0.5), {**options, **tensors})


registry.register(
    registry.Op(
        name="prefix_attention",
        function=prefix_attention,
        reference=prefix_attention_reference,
        sample_inputs=sample_inputs,
        backends=(
            registry.NativeBackend("cuda", (torch.float16, torch.bfloat16), capability=(8, 0)),
            registry.REFERENCE,
        ),
    )
)
