"""Causal attention of a prompt, which also writes its keys and values to a cache.

One kernel, after FlashAttention (Dao et al. 2022, arXiv 2205.14135). For prompts of some hundred tokens, a copy and
PyTorch's attention would mostly be launch time.
"""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseopt.errors import BackendError
from fuseopt.ops import registry
from fuseopt.ops.decode.attention_checks import VECTOR_BYTES, is_aligned, kernel_refusal
from fuseopt.ops.library import check_shape, define, without_autocast
from fuseopt.tuning import tuned

MAX_HEAD_DIM = 128
_HEAD_DIM_MULTIPLE = 16


def _fake(qkv: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float, pdl: bool) -> Tensor:
    rows, length, _, heads, head_dim = qkv.shape
    return qkv.new_empty((rows, length, heads * head_dim))


RAW = define(
    "prompt_attention_(Tensor qkv, Tensor(a!) key_cache, Tensor(b!) value_cache, float scale, bool pdl) -> Tensor",
    _fake,
)


def _check(qkv: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv must be [rows, length, 3, heads, head_dim], not {tuple(qkv.shape)}")
    rows, length, _, heads, head_dim = qkv.shape
    if key_cache.dim() != 4 or key_cache.shape[2] < length:
        raise ValueError(
            f"key_cache must be [rows, heads, capacity, head_dim] with room for {length} tokens, not"
            f" {tuple(key_cache.shape)}"
        )
    check_shape("key_cache", key_cache, torch.Size((rows, heads, key_cache.shape[2], head_dim)))
    check_shape("value_cache", value_cache, key_cache.shape)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dtype != qkv.dtype:
            raise ValueError(f"{name} must have qkv's dtype {qkv.dtype}, not {cache.dtype}")
        if cache.stride(3) != 1:
            raise ValueError(f"{name} must have neighbouring elements in its last dimension")


def _reference(qkv: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
    for cache, vectors in ((key_cache, key), (value_cache, value)):
        cache[:, :, : qkv.shape[1]] = vectors
    if qkv.numel() == 0:
        return qkv.new_empty(*qkv.shape[:2], query.shape[1] * query.shape[3])  # torch 2.11 returns None for it
    with without_autocast(qkv):
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return attended.transpose(1, 2).flatten(2)


def _refusal(qkv: Tensor, *caches: Tensor) -> str:
    """Why the CUDA kernel, which must exist, does not take such tensors; empty if it does."""
    if refusal := kernel_refusal(qkv.shape[-1], _HEAD_DIM_MULTIPLE, MAX_HEAD_DIM):
        return refusal
    # If qkv is not contiguous the kernel gets a copy.
    if not all(map(is_aligned, (qkv, *caches) if qkv.is_contiguous() else caches)):
        return f"takes vectors that are aligned to {VECTOR_BYTES} bytes"
    return ""


def is_fast(qkv: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool:
    """True if the CUDA kernel runs for tensors like these and is faster than a copy and PyTorch's attention.

    If it does not run, `prompt_attention_` is slower than these, because it copies keys and values separately.

    Args:
        qkv, key_cache, value_cache: as `prompt_attention_` takes them.
    """
    if qkv.shape[1] > tuned("prompt_attention_max_length", qkv.device):
        return False
    tensors = qkv, key_cache, value_cache
    chosen = registry.pick_without_gradient("prompt_attention_", "auto", (qkv.dtype,), *tensors)
    return chosen == "cuda" and not _refusal(*tensors)


def prompt_attention_(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: float,
    *,
    pdl: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Writes keys and values to the first slots of the caches, and attends from each token to itself and earlier ones.

    Equals `F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)`. For 16-bit dtypes scores,
    softmax and sums are float32, and weights are rounded before the product with the values. In the CUDA kernel,
    infinite or NaN values of later tokens do not affect a token's result.

    For heads that share keys, or are rotated or normalised, `decode_rotary_store_` fills the caches, and
    `F.scaled_dot_product_attention(..., enable_gqa=True)` reads them.

    Args:
        qkv: [rows, length, 3, heads, head_dim], the output of a projection to query, key and value; any strides,
            float32, float16, bfloat16 or float64. The CUDA kernel takes float16 and bfloat16, and a head_dim that is a
            multiple of 16, 128 at most.
        key_cache, value_cache: [rows, heads, capacity, head_dim], `qkv`'s dtype, unit stride in the last dimension and
            any other strides, which the CUDA kernel needs to be multiples of 16 bytes. Written to: slots [0, length).
        scale: multiplies the scores.
        pdl: launch the CUDA kernel programmatically dependent on its predecessor on the stream. It reads and writes
            nothing before that has ended.
        backend: "auto", "cuda" or "reference". "auto" takes the reference for tensors that the kernel does not take,
            for tensors that require a gradient under grad mode, and under torch.func transforms.

    Returns:
        [rows, length, heads * head_dim], contiguous, `qkv`'s dtype.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit together.
        BackendError: the named backend cannot run here, or does not take such tensors; the message says why.
    """
    _check(qkv, key_cache, value_cache)
    tensors = qkv, key_cache, value_cache
    chosen = registry.pick_without_gradient("prompt_attention_", backend, (qkv.dtype,), *tensors)
    if chosen == "reference":
        return _reference(*tensors, scale)
    refusal = _refusal(*tensors)
    if not refusal:
        return RAW[chosen](*tensors, scale, pdl)
    if backend == "auto":
        return _reference(*tensors, scale)
    raise BackendError(f"prompt_attention_: {backend!r} {refusal}")


prompt_attention_reference = partial(prompt_attention_, backend="reference")


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(rows: int, length: int, heads: int, head_dim: int, capacity: int) -> registry.SampleInput:
        qkv = torch.randn(rows, length, 3, heads, head_dim, device=device, dtype=dtype)
        caches = torch.zeros(2, rows, heads, capacity, head_dim, device=device, dtype=dtype)
        return registry.SampleInput((qkv, *caches, head_dim**-0.5))

    yield make(2, 17, 3, 64, 20)
    yield make(1, 130, 2, 16, 130)
    yield make(1, 1, 1, 128, 5)
    yield make(0, 4, 2, 64, 8)


registry.register(
    registry.Op(
        name="prompt_attention_",
        function=prompt_attention_,
        reference=prompt_attention_reference,
        sample_inputs=sample_inputs,
        backends=(
            registry.NativeBackend("cuda", (torch.float16, torch.bfloat16), capability=(8, 0)),
            registry.REFERENCE,
        ),
        in_place=True,
    )
)
