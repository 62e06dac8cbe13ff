"""Attention of a decode step over a cache of keys and values in 8 bits, with a scale for each head and token.

At long contexts attention is bound by reading the cache. With a scale for each token, and not for each channel, a step
can quantise its own key and value without knowing others (Liu et al. 2024, arXiv 2402.02750, compare both).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fuseopt.ops import registry
from fuseopt.ops.decode.attention import attend_reference, check, check_options, check_update, gathered
from fuseopt.ops.decode.head_rotation import HeadRotation
from fuseopt.ops.library import check_shape, compute_dtype, define

_PIECE = 16  # head sizes of the CUDA kernel are multiples of it

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Dtype of a quantised cache -> the largest number that `quantize_heads` stores."""


def _fake(query: Tensor, *further: object) -> Tensor:
    return query.new_empty((query.shape[0], query.shape[1] * query.shape[2]))


# Caches are passed as bytes.
RAW = define(
    "decode_quantized_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor key_scales,"
    " Tensor value_scales, Tensor lengths, Tensor? starts, Tensor? mask, Tensor? bias, float scale, bool is_fp8,"
    " bool pdl) -> Tensor",
    _fake,
)
UPDATE_RAW = define(
    "decode_quantized_attention_(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,"
    " Tensor(c!) key_scales, Tensor(d!) value_scales, Tensor positions, Tensor? starts, Tensor? mask, Tensor? bias,"
    " Tensor? ancestry, float scale, Tensor? rotary, Tensor? row_positions, bool interleaved, Tensor? q_norm,"
    " Tensor? k_norm, float norm_eps, float norm_offset, int window, float softcap, bool is_fp8, bool pdl) -> Tensor",
    _fake,
)


def quantize_heads(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rounds vectors to 8 bits: `vectors` is about `quantized * scales[..., None]`.

    A scale is the vector's largest magnitude divided by 127 (int8) or 448 (float8_e4m3fn), so no element is clipped.
    The error of an element is at most half a scale (int8), or the greater of 1/16 of the element and 2**-10 scales
    (float8_e4m3fn). A vector with NaN or infinity becomes zeros with a scale of NaN or
    infinity, which dequantise to NaN.

    Args:
        vectors: [..., head_dim], floating point.
        dtype: torch.int8 or torch.float8_e4m3fn.

    Returns:
        [..., head_dim] of `dtype`, and float32 scales [...].

    Raises:
        KeyError: another `dtype`.
    """
    largest = LARGEST[dtype]
    wide = vectors.float()
    scales = wide.abs().amax(-1) / largest
    has_elements = (scales > 0) & (scales < torch.inf)
    quotients = wide / torch.where(has_elements, scales, 1.0)[..., None]
    quotients = torch.where(has_elements[..., None], quotients, 0.0).clamp(-largest, largest)
    return (quotients.round() if dtype == torch.int8 else quotients).to(dtype), scales


def dequantize_heads(quantized: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `quantize_heads`, up to rounding.

    Args:
        quantized: [..., head_dim], int8 or float8_e4m3fn.
        scales: [...], float32.
        dtype: of the result. The product is computed in float32, or in float64 for float64.

    Returns:
        [..., head_dim] of `dtype`.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (quantized.to(wide) * scales[..., None]).to(dtype)


def decode_quantized_attention_reference(query: Tensor, *caches: Tensor, **options: Any) -> Tensor:
    """`decode_quantized_attention` in plain PyTorch."""
    return decode_quantized_attention(query, *caches, **options, backend="reference")


def decode_quantized_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    lengths: Tensor,
    *,
    starts: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    pdl: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`decode_attention` over a cache that `quantize_heads` has rounded to 8 bits.

    Args:
        query: [rows, heads, head_dim], as in `decode_attention`. The CUDA kernel takes float16 and bfloat16, from
            compute capability 8.0 on, a head_dim that is a multiple of 16, and tensors that begin at multiples of 16
            bytes. For another head_dim, and for float64, "auto" is the reference.
        key_cache, value_cache: [batch, kv_heads, capacity, head_dim], int8 or float8_e4m3fn.
        key_scales, value_scales: [batch, kv_heads, capacity], float32, not negative.
        lengths, starts, mask, bias, scale, pdl: as in `decode_attention`.
        backend: "auto", "cuda", "cpu" or "reference".

    Returns:
        [rows, heads * head_dim], contiguous, `query`'s dtype.

    Raises:
        ValueError, TypeError, BackendError: as in `decode_attention`; ValueError also for scales that do not fit.
    """
    check(query, key_cache, value_cache, lengths, starts, mask, bias, tuple(LARGEST))
    _check_scales(query, key_cache, key_scales, value_scales)
    caches = key_cache, value_cache, key_scales, value_scales
    floats = query, key_scales, value_scales, bias
    chosen = _backend(backend, *floats)
    if chosen != "reference":
        is_fp8 = key_cache.dtype == torch.float8_e4m3fn
        return RAW[chosen](query, *_as_bytes(*caches), lengths, starts, mask, bias, scale, is_fp8, pdl)
    keys, values = _dequantize(*caches, compute_dtype(query))
    return attend_reference(query, keys, values, lengths, starts, mask, bias, scale)


def decode_quantized_attention_(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    positions: Tensor,
    *,
    starts: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    ancestry: Tensor | None = None,
    scale: float = 1.0,
    rotary: Tensor | None = None,
    row_positions: Tensor | None = None,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    window: int = 0,
    softcap: float = 0.0,
    pdl: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`decode_attention_` with a cache in 8 bits.

    The new key and value are quantised, as by `quantize_heads`, after norm, rotation and rounding to their dtype. The
    query attends to the quantised ones.

    Args:
        query: [rows, heads, head_dim]; key, value: [rows, kv_heads, head_dim]; as in `decode_attention_`, any strides.
        key_cache, value_cache: [rows, kv_heads, capacity, head_dim], int8 or float8_e4m3fn, contiguous. Written to.
        key_scales, value_scales: [rows, kv_heads, capacity], float32, contiguous. Written to.
        positions and all options: as in `decode_attention_`.

    Returns:
        [rows, heads * head_dim], contiguous, `query`'s dtype.

    Raises:
        ValueError, TypeError, BackendError: as in `decode_attention_`; ValueError also for scales that do not fit.
    """
    check_update(query, key, value, key_cache, value_cache, positions, mask, starts, bias, tuple(LARGEST))
    _check_scales(query, key_cache, key_scales, value_scales, are_written=True)
    rotation = HeadRotation(rotary, row_positions, interleaved, q_norm, k_norm, norm_eps, norm_offset)
    rotation.check(query.shape[2], (query.shape[0],))
    check_options(query, key_cache, positions, ancestry, window, softcap)
    caches, step = (key_cache, value_cache, key_scales, value_scales), (query, key, value)
    floats = *step, key_scales, value_scales, bias, q_norm, k_norm
    chosen = _backend(backend, *floats)
    if chosen != "reference":
        places = (positions, starts, mask, bias, ancestry, scale)
        is_fp8 = key_cache.dtype == torch.float8_e4m3fn
        return UPDATE_RAW[chosen](*step, *_as_bytes(*caches), *places, *rotation, window, softcap, is_fp8, pdl)
    rows = torch.arange(query.shape[0], device=query.device)
    places_of_rows = positions.reshape(-1).expand(query.shape[0]).long()
    for vectors, cache, scales in ((rotation.of_keys(key), *caches[::2]), (value, *caches[1::2])):
        quantized, scales[rows, :, places_of_rows] = quantize_heads(vectors, cache.dtype)
        _as_bytes(cache)[0][rows, :, places_of_rows] = _as_bytes(quantized)[0]
    keys, values = _dequantize(*caches, compute_dtype(query))
    if ancestry is not None:
        keys, values = gathered((keys, values), ancestry, places_of_rows)
    query = rotation.of_queries(query)
    return attend_reference(query, keys, values, positions + 1, starts, mask, bias, scale, window, softcap)


def _backend(backend: str, query: Tensor, *others: Tensor | None) -> str:
    if backend == "auto" and query.is_cuda and query.shape[2] % _PIECE:
        return "reference"
    return registry.pick_without_gradient("decode_quantized_attention", backend, (query.dtype,), query, *others)


def _check_scales(
    query: Tensor, key_cache: Tensor, key_scales: Tensor, value_scales: Tensor, *, are_written: bool = False
) -> None:
    for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        check_shape(name, scales, key_cache.shape[:3])
        if scales.dtype not in (torch.float32, compute_dtype(query)):
            raise ValueError(f"{name} must be float32, not {scales.dtype}")
        if are_written and not scales.is_contiguous():
            raise ValueError(f"{name} must be contiguous, as they are written to")


def _as_bytes(*tensors: Tensor) -> list[Tensor]:
    """Tensors of 8 bits an element as uint8, others as they are."""
    return [tensor.view(torch.uint8) if tensor.dtype in LARGEST else tensor for tensor in tensors]


def _dequantize(
    key_cache: Tensor, value_cache: Tensor, key_scales: Tensor, value_scales: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return dequantize_heads(key_cache, key_scales, dtype), dequantize_heads(value_cache, value_scales, dtype)


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def caches(stored: torch.dtype, *shape: int) -> tuple[Tensor, ...]:
        (keys, key_scales), (values, value_scales) = (quantize_heads(make(*shape), stored) for _ in range(2))
        return keys, values, key_scales, value_scales

    def integers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    stored = torch.int8  # torch lacks operations on float8 that the tests of all ops use
    yield registry.SampleInput((make(4, 6, 64), *caches(stored, 4, 2, 37, 64), integers(37)), {"scale": 0.125})
    options = {"starts": integers(3, 0), "bias": make(2, 9)}
    yield registry.SampleInput((make(6, 2, 80), *caches(stored, 2, 2, 20, 80), integers(20, 0)), options)
    mask = torch.arange(50, device=device).expand(1, 50) % 3 > 0
    yield registry.SampleInput((make(1, 4, 16), *caches(stored, 1, 1, 50, 16), integers(41).int()), {"mask": mask})
    yield registry.SampleInput((make(0, 2, 16), *caches(stored, 0, 2, 4, 16), integers()))


registry.register(
    registry.Op(
        name="decode_quantized_attention",
        raw=("decode_quantized_attention", "decode_quantized_attention_"),
        function=decode_quantized_attention,
        reference=decode_quantized_attention_reference,
        sample_inputs=sample_inputs,
        backends=(
            registry.NativeBackend("cuda", (torch.float16, torch.bfloat16), capability=(8, 0)),
            registry.NativeBackend("cpu", (torch.float32, torch.bfloat16, torch.float16)),
            registry.REFERENCE,
        ),
    )
)
