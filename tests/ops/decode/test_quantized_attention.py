"""Attention over caches of 8 bits: the rounding, the reference, and the kernels against float64."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuseopt import ops
from fuseopt.ops import (
    decode_attention,
    decode_attention_,
    dequantize_heads,
    quantize_heads,
    registry,
)
from fuseopt.ops.decode.head_rotation import HeadRotation
from fuseopt.ops.decode.quantized_heads import EIGHT_BIT_ATTENTION, LARGEST
from tests.ops.cases import RawCalls, error, examples, to_float64
from tests.ops.decode.test_grouped_attention import rotary_table

STORED = tuple(LARGEST)


def quantized_caches(keys: Tensor, values: Tensor, stored: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (keys, key_scales), (values, value_scales) = (quantize_heads(part, stored) for part in (keys, values))
    return keys, values, key_scales, value_scales


def of_op(caches: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """As decode_attention and decode_attention_ take them."""
    return dict(zip(("key_cache", "value_cache", "key_scales", "value_scales"), caches, strict=True))


def in_float64(caches: tuple[Tensor, ...]) -> list[Tensor]:
    return [
        dequantize_heads(cache, scales, torch.float64) for cache, scales in zip(caches[:2], caches[2:], strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("stored", STORED)
def test_the_error_of_rounding_is_bounded(stored: torch.dtype, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    vectors = torch.randn(3, 5, 48, dtype=torch.float64) * torch.logspace(-4, 3, 15).view(3, 5, 1)
    vectors[0, 0] = 0
    vectors = vectors.to(dtype)
    quantized, scales = quantize_heads(vectors, stored)
    assert (quantized.dtype, scales.dtype, scales.shape) == (stored, torch.float32, (3, 5))
    assert scales[0, 0] == 0 and (quantized[0, 0].float() == 0).all()
    torch.testing.assert_close(scales.double(), vectors.double().abs().amax(-1) / LARGEST[stored], rtol=1e-6, atol=0)
    off = (dequantize_heads(quantized, scales, torch.float64) - vectors.double()).abs()
    bound = scales.double()[..., None] * (0.5 if stored == torch.int8 else 2**-10) * (1 + 1e-5)
    if stored != torch.int8:
        bound = torch.maximum(bound, vectors.double().abs() * (2**-4 * (1 + 1e-5)))
    assert (off <= bound).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("stored", STORED)
def test_a_vector_that_is_not_finite_stays_so(stored: torch.dtype, bad: float) -> None:
    vectors = torch.ones(2, 16)
    vectors[0, 3] = bad
    quantized, scales = quantize_heads(vectors, stored)
    assert not dequantize_heads(quantized, scales, torch.float32)[0].isfinite().any()
    assert (dequantize_heads(quantized, scales, torch.float32)[1] == 1).all()


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("beams", [1, 2])
def test_a_step_is_that_of_the_dequantised_cache(stored: torch.dtype, beams: int) -> None:
    """The result is that of decode_attention_ with the rounded key and value, and only their slot changes."""
    torch.manual_seed(0)
    rows, heads, kv_heads, head_dim, capacity, slot = 4, 6, 2, 20, 9, 5
    query, key, value = (torch.randn(rows, count, head_dim) for count in (heads, kv_heads, kv_heads))
    caches = quantized_caches(*torch.randn(2, rows, kv_heads, capacity, head_dim), stored)
    before = [cache.clone() for cache in caches]
    options: dict[str, Any] = {"mask": torch.rand(rows, capacity) > 0.3, "scale": 0.3, "window": 4, "softcap": 2.0}
    if beams > 1:
        options["ancestry"] = torch.randint(0, rows, (rows, capacity), dtype=torch.int32)
    places = torch.tensor([slot])
    plain = in_float64(caches)
    rounded = [dequantize_heads(*quantize_heads(part, stored), torch.float64) for part in (key, value)]
    expected = decode_attention_(query.double(), *rounded, *plain, places, **options, backend="reference")
    output = decode_attention_(query, key, value, **of_op(caches), positions=places, **options)
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
    for cache, plain_cache in zip(in_float64(caches), plain, strict=True):
        torch.testing.assert_close(cache, plain_cache)
    for cache, old in zip(caches, before, strict=True):
        others = torch.arange(capacity) != slot
        assert torch.equal(cache[:, :, others].view(torch.uint8), old[:, :, others].view(torch.uint8))


def test_an_encoders_cache() -> None:
    torch.manual_seed(0)
    query, lengths = torch.randn(4, 6, 16), torch.tensor([9, 4])
    caches = quantized_caches(*torch.randn(2, 2, 3, 9, 16), torch.int8)
    options = {"starts": torch.tensor([2, 0]), "bias": torch.randn(6, 4), "scale": 0.5}
    output = decode_attention(query, **of_op(caches), lengths=lengths, **options)
    expected = decode_attention(query.double(), *in_float64(caches), lengths, **options, backend="reference")
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"key_cache": torch.zeros(1, 2, 5, 16)}, "key_cache must be torch.int8 or torch.float8_e4m3fn"),
        ({"value_cache": torch.zeros(1, 2, 5, 16).to(torch.float8_e4m3fn)}, "value_cache must be .* like key_cache"),
        ({"key_scales": torch.zeros(1, 2, 4)}, "key_scales must have shape"),
        ({"value_scales": torch.zeros(1, 2, 5).half()}, "value_scales must be float32"),
        ({"key_scales": torch.zeros(1, 5, 2).mT}, "key_scales must be contiguous"),
        ({"softcap": -1.0}, "softcap"),
    ],
)
def test_wrong_arguments_are_refused_by_name(changed: dict[str, Any], message: str) -> None:
    cache, scales = torch.ones(1, 2, 5, 16).to(torch.int8), torch.ones(1, 2, 5)
    arguments = {"key_cache": cache, "value_cache": cache.clone(), "key_scales": scales, "value_scales": scales.clone()}
    heads = {"query": torch.zeros(1, 4, 16), "key": torch.zeros(1, 2, 16), "value": torch.zeros(1, 2, 16)}
    with pytest.raises(ValueError, match=message):
        decode_attention_(**heads, **{**arguments, **changed}, positions=torch.tensor([1]))
    assert (cache == 1).all() and (scales == 1).all()


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def backend_of(device: torch.device) -> str:
    """The backend with a kernel on the device; skips the test without one."""
    if registry.pick(EIGHT_BIT_ATTENTION, "auto", device, (torch.bfloat16,)) != device.type:
        pytest.skip(f"the {device.type} library is not loaded")
    return device.type


@pytest.fixture
def kernel(each_device: torch.device) -> str:
    """`backend_of` a device, on which tensors are made."""
    return backend_of(each_device)


# What the kernel of a device is tested with.
DTYPES = {"cpu": [torch.float32, torch.float16, torch.bfloat16], "cuda": [torch.float16, torch.bfloat16]}
HEAD_DIMS = {"cpu": [20, 64, 128, 256], "cuda": [64, 128, 256]}
KV_HEADS = {"cpu": [1, 2, 3], "cuda": [1, 2, 3, 8]}
GROUPS = {"cpu": [1, 2, 4], "cuda": [1, 2, 4, 7, 9]}
HEAD_DIMS = {"cpu": [1, 5, 16, 64, 71, 80, 128, 256], "cuda": [16, 64, 80, 96, 128, 160, 256]}
CAPACITIES = {"cpu": [1, 15, 33, 130, 512], "cuda": [1, 33, 130, 512, 4096, 9000]}


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    stored=st.sampled_from(STORED),
    rows=st.integers(1, 5),
    filled=st.floats(0, 1),
    window=st.sampled_from([0, 1, 40]),
    softcap=st.sampled_from([0.0, 5.0]),
    rotated=st.sampled_from([0.0, 0.5, 1.0]),
    masked=st.booleans(),
    beams=st.booleans(),
    spread=st.sampled_from([0.0, 2.0]),
    threads=st.sampled_from([1, 8]),
    seed=st.integers(0, 2**31),
)
def test_kernel_against_float64(
    kernel: str,
    data: st.DataObject,
    stored: torch.dtype,
    rows: int,
    filled: float,
    window: int,
    softcap: float,
    rotated: float,
    masked: bool,
    beams: bool,
    spread: float,
    threads: int,
    seed: int,
) -> None:
    """`spread`: of the logarithms of the vectors' magnitudes, so that scales differ.

    On a CPU, heads that share keys are taken together or not, by the number of `threads`.
    """
    dtype, kv_heads, group, head_dim, capacity = (
        data.draw(st.sampled_from(values[kernel])) for values in (DTYPES, KV_HEADS, GROUPS, HEAD_DIMS, CAPACITIES)
    )
    generator = torch.Generator(kernel).manual_seed(seed)

    def make(*shape: int) -> Tensor:
        magnitude = torch.randn((*shape[:-1], 1), generator=generator).mul(spread).exp()
        return (torch.randn(shape, generator=generator) * magnitude).to(dtype)

    heads, slot = kv_heads * group, min(int(filled * capacity), capacity - 1)
    qkv = make(rows, heads + 2 * kv_heads, head_dim)
    step = qkv.split((heads, kv_heads, kv_heads), 1)
    caches = quantized_caches(*(make(rows, kv_heads, capacity, head_dim) for _ in range(2)), stored)
    caches[2][:, :, slot + 1 :] = torch.nan  # what no step has written is not read
    options: dict[str, Any] = {"scale": head_dim**-0.5, "window": window, "softcap": softcap}
    if masked:
        options["mask"] = torch.rand(rows, capacity, generator=generator) > 0.3
    if beams:
        options["ancestry"] = torch.randint(0, rows, (rows, capacity), generator=generator, dtype=torch.int32)
    if rotation := int(rotated * head_dim) // 2 * 2:
        options["rotary"] = rotary_table(50, rotation, kernel)
        options["row_positions"] = torch.randint(0, 50, (rows,), generator=generator)
    places = torch.tensor([slot])
    plain_caches = [cache.clone() for cache in caches]
    plain = decode_attention_(*step, **of_op(plain_caches), positions=places, **options, backend="reference")
    with RawCalls() as raw, _threads(threads):
        output = decode_attention_(*step, **of_op(caches), positions=places, **options, backend=kernel)
    assert raw.names() == ["decode_attention_.default"]
    # The float64 reference reads the cache that the kernel wrote: a rotated key may round to a neighbouring value.
    for mine, reference in zip(in_float64(caches), in_float64(tuple(plain_caches)), strict=True):
        new = mine[:, :, slot], reference[:, :, slot]
        torch.testing.assert_close(*new, rtol=0.14, atol=float(new[1].abs().max()) * 0.02)
        assert torch.equal(mine[:, :, :slot], reference[:, :, :slot])
    exact = _float64_attention(to_float64(step[0]), caches, slot, options)
    # A score's error is up to 3 roundings of the cap, and the exponential makes it a relative error.
    of_scores = 3 * softcap if dtype == torch.float32 else 0
    assert error([output], [exact]) <= 2 * error([plain], [exact]) + (8 + of_scores) * torch.finfo(dtype).eps


def _float64_attention(query: Tensor, caches: tuple[Tensor, ...], slot: int, options: dict[str, Any]) -> Tensor:
    """decode_attention_ in float64 over the dequantised `caches`, whose slot is already written."""
    keys, values = (part.nan_to_num(0.0) for part in in_float64(caches))
    written = keys[:, :, slot].clone(), values[:, :, slot].clone()
    rotation = {name: options[name] for name in ("rotary", "row_positions") if name in options}
    others = {name: value for name, value in options.items() if name not in rotation}
    if rotation:
        query = HeadRotation(rotation["rotary"], rotation["row_positions"]).of_queries(query)
    places = torch.tensor([slot], device=query.device)
    return decode_attention_(query, *written, keys, values, places, **others, backend="reference")


@pytest.mark.parametrize("stored", STORED)
def test_kernel_of_an_encoders_cache(stored: torch.dtype, kernel: str) -> None:
    for head_dim in HEAD_DIMS[kernel]:
        torch.manual_seed(0)
        dtype = DTYPES[kernel][0]
        query, lengths = torch.randn(6, 4, head_dim, dtype=dtype), torch.tensor([300, 41])
        caches = quantized_caches(*torch.randn(2, 2, 4, 300, head_dim), stored)
        for scales in caches[2:]:
            scales[1, :, 41:] = torch.nan
        options: dict[str, Any] = {"bias": torch.randn(4, 30), "scale": 0.1, "starts": torch.tensor([7, 0])}
        output = decode_attention(query, **of_op(caches), lengths=lengths, **options, backend=kernel)
        plain = decode_attention(query, **of_op(caches), lengths=lengths, **options, backend="reference")
        keys, values = (part.nan_to_num(0.0) for part in in_float64(caches))
        exact = decode_attention(query.double(), keys, values, lengths, **options, backend="reference")
        assert error([output], [exact]) <= 2 * error([plain], [exact]) + 4 * torch.finfo(dtype).eps


@pytest.mark.gpu
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("rows", "capacity"), [(16, 2100), (20, 300), (40, 300), (80, 300), (80, 20)])
def test_kernel_of_many_heads(rows: int, capacity: int, head_dim: int, stored: torch.dtype) -> None:
    """On an H200: clusters of two blocks a head, then one block of 8, 4 or 2 warps."""
    torch.manual_seed(0)
    qkv = torch.randn(rows, 16 + 2 * 8, head_dim, device="cuda", dtype=torch.bfloat16)
    step, slot = qkv.split((16, 8, 8), 1), capacity - 1
    caches = quantized_caches(*torch.randn(2, rows, 8, capacity, head_dim, device="cuda"), stored)
    options: dict[str, Any] = {"scale": head_dim**-0.5}
    places = torch.tensor([slot], device="cuda")
    plain_caches = tuple(cache.clone() for cache in caches)
    plain = decode_attention_(*step, **of_op(plain_caches), positions=places, **options, backend="reference")
    output = decode_attention_(*step, **of_op(caches), positions=places, **options, backend="cuda")
    exact = _float64_attention(to_float64(step[0]), caches, slot, options)
    assert error([output], [exact]) <= 2 * error([plain], [exact]) + 8 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_rounds_as_pytorch_does(dtype: torch.dtype, stored: torch.dtype) -> None:
    """Bitwise equal, also for zeros, subnormal numbers, NaN and infinity."""
    torch.manual_seed(0)
    rows, heads, head_dim = 61, 3, 40
    key, value = (torch.randn(2, rows, heads, head_dim) * torch.logspace(-44, 37, rows)[:, None, None]).to(dtype)
    key[3], key[5, 1, 7], value[7, 0, 0], value[9, 2, 39] = 0, torch.nan, torch.inf, -torch.inf
    caches = quantized_caches(*torch.randn(2, rows, heads, 2, head_dim), stored)
    decode_attention_(key, key, value, **of_op(caches), positions=torch.tensor([1]), backend=backend_of(key.device))
    for vectors, elements, scales in ((key, *caches[::2]), (value, *caches[1::2])):
        expected, expected_scales = quantize_heads(vectors, stored)
        torch.testing.assert_close(scales[:, :, 1], expected_scales, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(elements[:, :, 1].view(torch.uint8), expected.view(torch.uint8))


def test_the_earlier_names_warn() -> None:
    torch.manual_seed(0)
    step, places = torch.randn(3, 2, 4, 16), torch.tensor([3, 8])
    first, second, third = (quantized_caches(*torch.full((2, 2, 4, 9, 16), 0.5), torch.int8) for _ in range(3))
    with pytest.warns(DeprecationWarning, match="decode_quantized_attention_ is called decode_attention_, which takes"):
        found = ops.decode_quantized_attention_(*step, *first, places, scale=0.5)
    assert torch.equal(found, decode_attention_(*step, **of_op(second), positions=places, scale=0.5))
    with pytest.warns(DeprecationWarning, match="decode_quantized_attention is called decode_attention, which takes"):
        found = ops.decode_quantized_attention(step[0], **of_op(third), lengths=places)
    assert torch.equal(found, decode_attention(step[0], **of_op(third), lengths=places))
