"""The CUDA kernel of attention over caches of 8 bits against float64."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuseopt.ops import decode_attention, decode_attention_
from fuseopt.ops.decode.head_rotation import HeadRotation
from tests.ops.cases import RawCalls, error, examples, to_float64
from tests.ops.decode.test_grouped_attention import rotary_table
from tests.ops.decode.test_quantized_attention import STORED, in_float64, of_op, quantized_caches


@pytest.mark.gpu
@settings(max_examples=examples(150), deadline=None)
@given(
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    stored=st.sampled_from(STORED),
    rows=st.integers(1, 5),
    kv_heads=st.sampled_from([1, 2, 3, 8]),
    group=st.sampled_from([1, 2, 4, 7, 9]),
    head_dim=st.sampled_from([16, 64, 80, 96, 128, 160, 256]),
    capacity=st.sampled_from([1, 33, 130, 512, 4096, 9000]),
    filled=st.floats(0, 1),
    window=st.sampled_from([0, 1, 40]),
    softcap=st.sampled_from([0.0, 5.0]),
    rotated=st.sampled_from([0.0, 0.5, 1.0]),
    masked=st.booleans(),
    beams=st.booleans(),
    spread=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 2**31),
)
def test_kernel_against_float64(
    dtype: torch.dtype,
    stored: torch.dtype,
    rows: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    capacity: int,
    filled: float,
    window: int,
    softcap: float,
    rotated: float,
    masked: bool,
    beams: bool,
    spread: float,
    seed: int,
) -> None:
    """`spread`: of the logarithms of the vectors' magnitudes, from which the values' scales differ."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def make(*shape: int) -> Tensor:
        magnitude = torch.randn((*shape[:-1], 1), device="cuda", generator=generator).mul(spread).exp()
        return (torch.randn(shape, device="cuda", generator=generator) * magnitude).to(dtype)

    heads, slot = kv_heads * group, min(int(filled * capacity), capacity - 1)
    qkv = make(rows, heads + 2 * kv_heads, head_dim)
    step = qkv.split((heads, kv_heads, kv_heads), 1)
    caches = quantized_caches(*(make(rows, kv_heads, capacity, head_dim) for _ in range(2)), stored)
    caches[2][:, :, slot + 1 :] = torch.nan  # what no step has written is not read
    options: dict[str, Any] = {"scale": head_dim**-0.5, "window": window, "softcap": softcap}
    if masked:
        options["mask"] = torch.rand(rows, capacity, device="cuda", generator=generator) > 0.3
    if beams:
        options["ancestry"] = torch.randint(
            0, rows, (rows, capacity), device="cuda", generator=generator, dtype=torch.int32
        )
    if rotation := int(rotated * head_dim) // 2 * 2:
        options["rotary"] = rotary_table(50, rotation, "cuda")
        options["row_positions"] = torch.randint(0, 50, (rows,), device="cuda", generator=generator)
    places = torch.tensor([slot], device="cuda")
    plain_caches = [cache.clone() for cache in caches]
    plain = decode_attention_(*step, **of_op(plain_caches), positions=places, **options, backend="reference")
    with RawCalls() as raw:
        output = decode_attention_(*step, **of_op(caches), positions=places, **options, backend="cuda")
    assert raw.names() == ["decode_attention_.default"]
    # float64 attends to what the kernel wrote: a rotated key may be rounded to a neighbouring number of 8 bits.
    for mine, reference in zip(in_float64(caches), in_float64(tuple(plain_caches)), strict=True):
        new = mine[:, :, slot], reference[:, :, slot]
        torch.testing.assert_close(*new, rtol=0.14, atol=float(new[1].abs().max()) * 0.02)
        assert torch.equal(mine[:, :, :slot], reference[:, :, :slot])
    exact = _float64_attention(to_float64(step[0]), caches, slot, options)
    assert error([output], [exact]) <= 2 * error([plain], [exact]) + 8 * torch.finfo(dtype).eps


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


@pytest.mark.gpu
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_kernel_of_an_encoders_cache(stored: torch.dtype, head_dim: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(6, 4, head_dim, device="cuda", dtype=torch.bfloat16)
    caches = quantized_caches(*torch.randn(2, 2, 4, 300, head_dim, device="cuda"), stored)
    lengths, bias = torch.tensor([300, 41], device="cuda"), torch.randn(4, 30, device="cuda")
    output = decode_attention(query, **of_op(caches), lengths=lengths, bias=bias, scale=0.1, backend="cuda")
    plain = decode_attention(query, **of_op(caches), lengths=lengths, bias=bias, scale=0.1, backend="reference")
    exact = decode_attention(query.double(), *in_float64(caches), lengths, bias=bias, scale=0.1, backend="reference")
    assert error([output], [exact]) <= 2 * error([plain], [exact]) + 4 * torch.finfo(torch.bfloat16).eps


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
