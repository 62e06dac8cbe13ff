"""Norm and rotation of a prompt's queries and keys, with the store of its keys and values to a cache.

One kernel before `F.scaled_dot_product_attention(..., enable_gqa=True)`, which reads keys and values from the cache.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from fuseopt.ops import registry
from fuseopt.ops.decode.head_rotation import HeadRotation
from fuseopt.ops.library import check_shape, define


def _fake(qkv: Tensor, key_cache: Tensor, value_cache: Tensor, *further: object) -> Tensor:
    rows, length, heads, head_dim = qkv.shape
    return qkv.new_empty((rows, length, heads - 2 * key_cache.shape[1], head_dim))


RAW = define(
    "decode_rotary_store_(Tensor qkv, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor? slot, Tensor? rotary,"
    " Tensor? row_positions, bool interleaved, Tensor? q_norm, Tensor? k_norm, float norm_eps, float norm_offset,"
    " bool pdl) -> Tensor",
    _fake,
)


def _check(qkv: Tensor, key_cache: Tensor, value_cache: Tensor, slot: Tensor | None) -> None:
    if qkv.dim() != 4 or key_cache.dim() != 4:
        raise ValueError(
            "qkv must be [rows, length, heads + 2 * kv_heads, head_dim] and key_cache [rows, kv_heads, capacity,"
            f" head_dim], not {tuple(qkv.shape)} and {tuple(key_cache.shape)}"
        )
    rows, length, heads, head_dim = qkv.shape
    kv_heads, capacity = key_cache.shape[1:3]
    check_shape("key_cache", key_cache, torch.Size((rows, kv_heads, capacity, head_dim)))
    check_shape("value_cache", value_cache, key_cache.shape)
    if capacity < length:
        raise ValueError(f"key_cache has {capacity} slots for a prompt of {length} tokens")
    if heads < 2 * kv_heads:
        raise ValueError(f"qkv has {heads} heads, but key_cache {kv_heads}, for keys and for values")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dtype != qkv.dtype:
            raise ValueError(f"{name} must have qkv's dtype {qkv.dtype}, not {cache.dtype}")
        if cache.stride(3) != 1:
            raise ValueError(f"{name} must have neighbouring elements in its last dimension")
    if slot is not None and (slot.dtype != torch.int64 or slot.shape != (1,)):
        raise ValueError(f"slot must be [1] int64, not {tuple(slot.shape)} {slot.dtype}")


def decode_rotary_store_(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    slot: Tensor | None = None,
    rotary: Tensor | None = None,
    row_positions: Tensor | None = None,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    pdl: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Normalises and rotates queries and keys, and writes keys and values to neighbouring slots of the caches.

    In float32, as `decode_attention_` does for one token; the result is rounded to `qkv`'s dtype.

    Args:
        qkv: [rows, length, heads + 2 * kv_heads, head_dim], any strides: heads of queries, of keys, then of values;
            float32, float16, bfloat16 or float64.
        key_cache, value_cache: [rows, kv_heads, capacity, head_dim], `qkv`'s dtype, unit stride in the last dimension
            and any other strides. Written to: slots [slot, slot + length).
        slot: [1] int64, the first slot to write, at most capacity - length (not checked on a GPU); None for slot 0.
        rotary, interleaved, q_norm, k_norm, norm_eps, norm_offset: as in `decode_attention_`.
        row_positions: [rows, length], int32 or int64, each token's position in `rotary`.
        pdl: launch the CUDA kernel programmatically dependent on its predecessor on the stream. It reads and writes
            nothing before that has ended.
        backend: "auto", "cuda" or "reference". Tensors that require a gradient under grad mode, and torch.func
            transforms, need the reference, which "auto" then takes.

    Returns:
        The queries, [rows, length, heads, head_dim], `qkv`'s dtype; contiguous, but for those of the reference.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit together.
        TypeError: a rotary that is not float32, or row_positions that are not integers.
        BackendError: the named backend cannot run here; the message says why.
    """
    _check(qkv, key_cache, value_cache, slot)
    rotation = HeadRotation(rotary, row_positions, interleaved, q_norm, k_norm, norm_eps, norm_offset)
    rotation.check(qkv.shape[3], tuple(qkv.shape[:2]))
    chosen = registry.pick_without_gradient(
        "decode_rotary_store_", backend, (qkv.dtype,), qkv, key_cache, value_cache, slot, q_norm, k_norm
    )
    if chosen != "reference":
        return RAW[chosen](qkv, key_cache, value_cache, slot, *rotation, pdl)
    kv_heads = key_cache.shape[1]
    query, key, value = qkv.split((qkv.shape[2] - 2 * kv_heads, kv_heads, kv_heads), 2)
    for cache, vectors in ((key_cache, rotation.of_keys(key)), (value_cache, value)):
        if slot is None:
            cache[:, :, : qkv.shape[1]] = vectors.transpose(1, 2)
        else:
            cache.index_copy_(2, slot + torch.arange(qkv.shape[1], device=slot.device), vectors.transpose(1, 2))
    return rotation.of_queries(query).contiguous()


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    for rows, length, heads, kv_heads, head_dim, rotated, normed in (
        (2, 5, 4, 2, 16, 16, False),
        (1, 3, 6, 1, 80, 20, True),
        (3, 1, 2, 2, 7, 0, True),
        (0, 4, 2, 1, 8, 8, False),
    ):
        qkv = make(rows, length, heads + 2 * kv_heads, head_dim)
        caches = make(2, rows, kv_heads, length + 2, head_dim).unbind()
        options = {"q_norm": make(head_dim), "k_norm": make(head_dim), "norm_offset": 1.0} if normed else {}
        if rotated:
            options["rotary"] = torch.randn(9, rotated, device=device)
            options["row_positions"] = torch.randint(0, 9, (rows, length), device=device)
        if rows == 2:
            options["slot"] = torch.tensor([2], device=device)
        yield registry.SampleInput((qkv, *caches), {**options, "interleaved": length == 3})


registry.register(
    registry.Op(
        name="decode_rotary_store_",
        function=decode_rotary_store_,
        reference=partial(decode_rotary_store_, backend="reference"),
        sample_inputs=sample_inputs,
        backends=(registry.CUDA, registry.REFERENCE),
        in_place=True,
    )
)
