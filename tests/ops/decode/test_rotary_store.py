"""decode_rotary_store_ against decode_attention_, which rotates one token at a time, and the kernel against float64."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuseopt.ops import decode_attention_, decode_rotary_store_
from tests.ops.cases import DTYPES, RawCalls, error, examples, to_float64
from tests.ops.decode.test_grouped_attention import rotary_table, upstream_rotation


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_prompt_is_stored_as_its_tokens_would_be(interleaved: bool) -> None:
    torch.manual_seed(0)
    rows, length, heads, kv_heads, head_dim = 2, 6, 4, 2, 20
    qkv, positions = torch.randn(rows, length, heads + 2 * kv_heads, head_dim), torch.randint(0, 30, (rows, length))
    rotary, caches = rotary_table(30, 12), torch.zeros(2, rows, kv_heads, length + 3, head_dim)
    options = {"q_norm": torch.randn(head_dim), "k_norm": torch.randn(head_dim), "norm_eps": 1e-2, "norm_offset": 1.0}
    options |= {"rotary": rotary, "interleaved": interleaved}
    stepped = caches.clone()
    for token in range(length):
        parts = qkv[:, token].split((heads, kv_heads, kv_heads), 1)
        decode_attention_(*parts, *stepped, torch.tensor([token]), row_positions=positions[:, token], **options)
    query = decode_rotary_store_(qkv, *caches, row_positions=positions, **options)
    torch.testing.assert_close(caches, stepped)
    heads_of_queries = qkv[:, :, :heads].flatten(0, 1)
    normed = torch.nn.functional.rms_norm(heads_of_queries, (head_dim,), 1 + options["q_norm"], 1e-2)
    torch.testing.assert_close(query.flatten(0, 1), upstream_rotation(normed, rotary, positions.flatten(), interleaved))
    assert query.is_contiguous()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"qkv": torch.zeros(1, 4, 8)}, "qkv must be"),
        ({"qkv": torch.zeros(1, 6, 4, 8)}, "5 slots for a prompt of 6 tokens"),
        ({"qkv": torch.zeros(1, 4, 3, 8)}, "qkv has 3 heads"),
        ({"key_cache": torch.zeros(2, 2, 5, 8)}, "key_cache must have shape"),
        ({"value_cache": torch.zeros(1, 2, 6, 8)}, "value_cache must have shape"),
        ({"value_cache": torch.zeros(1, 2, 5, 8).half()}, "value_cache must have qkv's dtype"),
        ({"key_cache": torch.zeros(1, 2, 8, 5).mT}, "neighbouring elements"),
        ({"rotary": torch.zeros(3, 4)}, "given together"),
        ({"rotary": torch.zeros(3, 4), "row_positions": torch.zeros(4).long()}, "row_positions must have shape"),
    ],
)
def test_wrong_arguments_are_refused_by_name(changed: dict[str, Tensor], message: str) -> None:
    cache = torch.ones(1, 2, 5, 8)
    arguments = {"qkv": torch.zeros(1, 4, 6, 8), "key_cache": cache, "value_cache": cache.clone(), **changed}
    with pytest.raises(ValueError, match=message):
        decode_rotary_store_(**arguments)
    assert (cache == 1).all()


@pytest.mark.gpu
@settings(max_examples=examples(100), deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(0, 4),
    length=st.one_of(st.integers(1, 9), st.sampled_from([130, 700])),
    heads=st.integers(0, 9),
    kv_heads=st.integers(1, 4),
    head_dim=st.one_of(st.sampled_from([64, 80, 128, 256]), st.integers(1, 256)),
    rotated=st.sampled_from([0.0, 0.5, 1.0]),
    interleaved=st.booleans(),
    norms=st.tuples(st.booleans(), st.booleans()),
    apart=st.sampled_from([0, 1, 8]),
    seed=st.integers(0, 2**31),
)
def test_kernel_against_float64(
    dtype: torch.dtype,
    rows: int,
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotated: float,
    interleaved: bool,
    norms: tuple[bool, bool],
    apart: int,
    seed: int,
) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    width = 2 * int(rotated * head_dim / 2)
    qkv = make(rows, length, heads + 2 * kv_heads, head_dim + apart)[..., :head_dim]
    caches = make(2, rows, kv_heads, length + 3, head_dim)
    options: dict[str, Any] = {
        "rotary": rotary_table(50, width, "cuda") if width else None,
        "row_positions": torch.randint(0, 50, (rows, length), device="cuda", generator=generator) if width else None,
        "q_norm": make(head_dim) if norms[0] else None,
        "k_norm": make(head_dim) if norms[1] else None,
        "interleaved": interleaved,
    }
    wide = {name: to_float64(options[name]) for name in ("q_norm", "k_norm") if options[name] is not None}
    plain, exact = caches.clone(), to_float64(caches)
    with RawCalls() as raw:
        output = decode_rotary_store_(qkv, *caches, **options, pdl=True, backend="cuda")
    assert raw.names() == ["decode_rotary_store_.default"]
    expected = decode_rotary_store_(qkv, *plain, **options, backend="reference")
    judge = decode_rotary_store_(to_float64(qkv), *exact, **{**options, **wide}, backend="reference")
    assert torch.equal(caches[1], plain[1]) and torch.equal(caches[0, :, :, length:], plain[0, :, :, length:])
    slack = {torch.float64: 64, torch.float32: 16}.get(dtype, 4) * torch.finfo(dtype).eps
    for own, by_torch, right in ((output, expected, judge), (caches[0], plain[0], exact[0])):
        assert own.numel() == 0 or error([own], [right]) <= 2 * error([by_torch], [right]) + slack
