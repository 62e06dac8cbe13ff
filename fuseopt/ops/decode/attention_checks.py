"""Checks of the arguments of `decode_attention` and `decode_attention_`."""

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fuseopt.ops.decode.quantized_heads import LARGEST
from fuseopt.ops.library import check_shape, compute_dtype

VECTOR_BYTES = 16  # of the kernels' loads

Caches = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Keys, values, and the scales of both or None, as `decode_attention` takes them."""


def check(
    query: Tensor,
    caches: Caches,
    lengths: Tensor,
    starts: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """Raises ValueError or TypeError unless these can be arguments of one call of `decode_attention`."""
    key_cache, value_cache, key_scales, value_scales = caches
    if query.dim() != 3 or key_cache.dim() != 4:
        raise ValueError(
            "query must be [rows, heads, head_dim] and key_cache [batch, kv_heads, capacity, head_dim], not"
            f" {tuple(query.shape)} and {tuple(key_cache.shape)}"
        )
    rows, heads, head_dim = query.shape
    batch, kv_heads, capacity, _ = key_cache.shape
    if heads % max(kv_heads, 1) != 0 or (kv_heads == 0 and heads > 0):
        raise ValueError(f"query has {heads} heads, which is no multiple of the {kv_heads} heads of key_cache")
    check_shape("key_cache", key_cache, torch.Size((batch, kv_heads, capacity, head_dim)))
    check_shape("value_cache", value_cache, key_cache.shape)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if key_scales is None and cache.dtype != query.dtype:
            raise ValueError(f"{name} must have query's dtype {query.dtype} without key_scales, not {cache.dtype}")
        if key_scales is not None and (cache.dtype not in LARGEST or cache.dtype != key_cache.dtype):
            names = " or ".join(map(str, LARGEST))
            raise ValueError(f"{name} must be {names}, and like key_cache, not {cache.dtype}")
    if (key_scales is None) != (value_scales is None):
        raise ValueError("key_scales and value_scales must be given together")
    for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        if scales is None:
            continue
        check_shape(name, scales, key_cache.shape[:3])
        if scales.dtype not in (torch.float32, compute_dtype(query)):
            raise ValueError(f"{name} must be float32, not {scales.dtype}")
    if rows % max(batch, 1) != 0 or (batch == 0 and rows > 0):
        raise ValueError(f"query has {rows} rows, which is no multiple of the {batch} rows of key_cache")
    if lengths.numel() not in (1, batch):
        raise ValueError(f"lengths or positions must have one element, or {batch}, not {lengths.numel()}")
    for name, integers in (("lengths or positions", lengths), ("starts", starts)):
        if integers is not None and integers.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, not {integers.dtype}")
    if starts is not None:
        check_shape("starts", starts, torch.Size((batch,)))
    if mask is not None:
        check_shape("mask", mask, torch.Size((batch, capacity)))
        if mask.dtype != torch.bool:
            raise TypeError(f"mask must be bool, True where a key is attended to, not {mask.dtype}")
    if bias is not None and (bias.dim() != 2 or bias.shape[0] != heads or bias.shape[1] == 0):
        raise ValueError(f"bias must be [{heads}, distances], not {tuple(bias.shape)}")


def check_update(query: Tensor, key: Tensor, value: Tensor, caches: Caches) -> None:
    """Raises ValueError unless a step can write `key` and `value` to caches that `check` has passed."""
    key_cache, value_cache, key_scales, value_scales = caches
    kv_shape = torch.Size((query.shape[0], key_cache.shape[1], query.shape[2]))
    for name, tensor in (("key", key), ("value", value)):
        check_shape(name, tensor, kv_shape)
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name} must have query's dtype {query.dtype}, not {tensor.dtype}")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.shape[0] != query.shape[0] or not cache.is_contiguous():
            raise ValueError(f"{name} must be contiguous, with a row for each of the {query.shape[0]} rows")
    for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        if scales is not None and not scales.is_contiguous():
            raise ValueError(f"{name} must be contiguous, as they are written to")


def check_options(
    query: Tensor, key_cache: Tensor, positions: Tensor, ancestry: Tensor | None, window: int, softcap: float
) -> None:
    """Raises ValueError or TypeError unless these can be options of `decode_attention_`."""
    if window < 0 or softcap < 0:
        raise ValueError(f"window and softcap must be positive, or 0 for none, not {window} and {softcap}")
    if ancestry is not None:
        check_shape("ancestry", ancestry, torch.Size((query.shape[0], key_cache.shape[2])))
        if ancestry.dtype != torch.int32:
            raise TypeError(f"ancestry must be int32, not {ancestry.dtype}")
        if positions.numel() != 1:
            raise ValueError(f"positions must have one element where there is an ancestry, not {positions.numel()}")


def kernel_refusal(head_dim: int, multiple: int, most: int) -> str:
    """Why a CUDA kernel for such head sizes does not take a call; empty if it does."""
    if is_dynamo_compiling():
        return "has to know tensors' addresses, which do not exist while they are traced"
    if head_dim % multiple or head_dim > most:
        return f"takes a head_dim that is a multiple of {multiple}, {most} at most, not {head_dim}"
    return ""


def is_aligned(tensor: Tensor) -> bool:
    """True if all vectors along the last dimension are contiguous and start at multiples of VECTOR_BYTES."""
    bytes_apart = (stride * tensor.itemsize for stride in tensor.stride()[:-1])
    return tensor.stride(-1) == 1 and not any(place % VECTOR_BYTES for place in (tensor.data_ptr(), *bytes_apart))
