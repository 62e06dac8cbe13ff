"""prefix_attention against float64 attention to the slots that each token sees."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuseopt.errors import BackendError
from fuseopt.ops import decode_rotary_store_, prefix_attention
from fuseopt.ops.decode.prefix_attention import is_fast
from fuseopt.tuning import tuned
from tests.ops.cases import RawCalls, error, examples
from tests.ops.variations import poisoned_allocations

HALVES = [torch.float16, torch.bfloat16]
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)


def attended(query: Tensor, cache: Tensor, scale: float, start: int, window: int = 0) -> Tensor:
    """In float64, one token at a time."""
    length, heads = query.shape[1:3]
    keys, values = cache.double().repeat_interleave(heads // cache.shape[2], dim=2)
    found = torch.empty_like(query, dtype=torch.float64)
    for token in range(length):
        end = start + token + 1
        seen = slice(max(0, end - window) if window else 0, end)
        scores = torch.einsum("rhd,rhsd->rhs", query[:, token].double(), keys[:, :, seen]) * scale
        found[:, token] = torch.einsum("rhs,rhsd->rhd", scores.softmax(-1), values[:, :, seen])
    return found.flatten(2)


def numbers(device: torch.device, **values: int | None) -> dict[str, Tensor]:
    return {name: torch.tensor([value], device=device) for name, value in values.items() if value is not None}


def check(
    query: Tensor, cache: Tensor, start: int, filled: int | None = None, window: int = 0, **options: Any
) -> Tensor:
    """The output, which is as exact as its dtype allows; slots that nothing sees are NaN."""
    rows, length, heads, head_dim = query.shape
    ends = start + length if filled is None else min(filled, start + length)
    cache[:, :, :, ends:] = torch.nan
    with poisoned_allocations():
        output = prefix_attention(
            query, *cache, head_dim**-0.5, **numbers(query.device, start=start, filled=filled), window=window, **options
        )
    assert output.shape == (rows, length, heads * head_dim) and output.dtype is query.dtype and output.is_contiguous()
    assert output.isfinite().all(), "padding is zeros"
    right = attended(query[:, : ends - start], cache, head_dim**-0.5, start, window)
    own = output[:, : ends - start]
    # The rounding of weights and that of the result.
    assert own.numel() == 0 or error([own], [right]) <= 8 * torch.finfo(query.dtype).eps
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("start", "filled", "window"), [(0, None, 0), (9, None, 4), (9, 12, 0), (30, 31, 2)])
def test_the_reference(dtype: torch.dtype, start: int, filled: int | None, window: int) -> None:
    torch.manual_seed(0)
    query, cache = torch.randn(2, 5, 6, 12).to(dtype), torch.randn(2, 2, 3, start + 7, 12).to(dtype)
    check(query, cache, start, filled, window, backend="reference")


def test_a_start_of_none_is_0() -> None:
    torch.manual_seed(0)
    query, cache = torch.randn(1, 4, 2, 8), torch.randn(2, 1, 1, 9, 8)
    assert torch.equal(
        prefix_attention(query, *cache, 0.5), prefix_attention(query, *cache, 0.5, start=torch.tensor([0]))
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": torch.zeros(1, 4, 8)}, "query must be"),
        ({"query": torch.zeros(1, 6, 4, 8)}, "5 slots for 6 tokens"),
        ({"query": torch.zeros(1, 4, 3, 8)}, "query has 3 heads"),
        ({"key_cache": torch.zeros(2, 2, 5, 8)}, "key_cache must have shape"),
        ({"value_cache": torch.zeros(1, 2, 6, 8)}, "value_cache must have shape"),
        ({"value_cache": torch.zeros(1, 2, 5, 8).half()}, "value_cache must have query's dtype"),
        ({"start": torch.zeros(1)}, r"start must be \[1\] int64"),
        ({"filled": torch.zeros(2).long()}, r"filled must be \[1\] int64"),
        ({"window": -1}, "window must be positive"),
    ],
)
def test_wrong_arguments_are_refused_by_name(changed: dict[str, Any], message: str) -> None:
    cache = torch.ones(1, 2, 5, 8)
    arguments = {"query": torch.zeros(1, 4, 4, 8), "key_cache": cache, "value_cache": cache, "scale": 1.0, **changed}
    with pytest.raises(ValueError, match=message):
        prefix_attention(**arguments)


@pytest.mark.gpu
@settings(max_examples=examples(150), deadline=None)
@given(
    dtype=st.sampled_from(HALVES),
    rows=st.integers(0, 4),
    length=st.one_of(st.integers(1, 40), st.sampled_from([64, 127, 128])),
    kv_heads=st.integers(1, 9),
    group=st.sampled_from([1, 2, 3, 4, 7]),
    head_dim=st.one_of(st.sampled_from([64, 80, 96, 128, 256]), st.integers(1, 32).map(lambda eighth: 8 * eighth)),
    start=st.one_of(st.integers(0, 200), st.sampled_from([511, 512, 1000, 2048, 5000])),
    padding=st.integers(0, 20),
    window=st.sampled_from([0, 1, 16, 100, 1024]),
    pdl=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_kernel_against_float64(
    dtype: torch.dtype,
    rows: int,
    length: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    start: int,
    padding: int,
    window: int,
    pdl: bool,
    seed: int,
) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    query, cache = (
        torch.randn(size, device="cuda", generator=generator).to(dtype)
        for size in ((rows, length, kv_heads * group, head_dim), (2, rows, kv_heads, start + length + 5, head_dim))
    )
    filled = start + max(1, length - padding) if padding else None
    with RawCalls() as raw:
        check(query, cache, start, filled, window, pdl=pdl, backend="cuda")
    assert raw.names() == ["prefix_attention.default"]


@pytest.mark.gpu
@every_half
def test_scores_far_apart(dtype: torch.dtype) -> None:
    """A token has no weight left for any but itself, or for any but the first."""
    query = torch.ones(1, 33, 4, 64, device="cuda", dtype=dtype)
    cache = torch.randn(2, 1, 2, 600, 64, device="cuda").to(dtype)
    slots = torch.arange(600, device="cuda", dtype=dtype)[:, None] / 2
    for keys in (slots, -slots):
        cache[0] = keys
        check(query, cache, 500, backend="cuda")


@pytest.mark.gpu
@every_half
@torch.no_grad()
def test_one_graph_serves_any_start_and_waits_for_each_predecessor(dtype: torch.dtype) -> None:
    """A chain of stores to the cache and attentions, each of which has the previous one's output as its input."""
    torch.manual_seed(0)
    heads, kv_heads, length, layers = 8, 2, 17, 12
    start, filled = torch.zeros(1, device="cuda").long(), torch.zeros(1, device="cuda").long()
    qkv = torch.randn(1, length, heads + 2 * kv_heads, 64, device="cuda").to(dtype)
    prefixes = torch.randn(layers, 2, 1, kv_heads, 900, 64, device="cuda").to(dtype)

    def chain(caches: Tensor, pdl: bool) -> list[Tensor]:
        outputs, input = [], qkv
        for cache in caches:
            query = decode_rotary_store_(input, *cache, slot=start, pdl=pdl)
            arguments = {"start": start, "filled": filled, "window": 300, "pdl": pdl, "backend": "cuda"}
            outputs.append(prefix_attention(query, *cache, 0.125, **arguments))
            input = torch.cat((outputs[-1].view_as(query), qkv[:, :, heads:] + outputs[-1].mean()), 2)
        return outputs

    caches, graph = prefixes.clone(), torch.cuda.CUDAGraph()
    chain(caches, True)
    torch.cuda.synchronize()
    with RawCalls() as raw, torch.cuda.graph(graph):
        outputs = chain(caches, True)
    assert raw.names() == ["decode_rotary_store_.default", "prefix_attention.default"] * layers
    for number, count in ((800, 17), (5, 9), (64, 17), (0, 1), (321, 16)):
        start.fill_(number)
        filled.fill_(number + count)
        caches.copy_(prefixes)
        wanted = chain(prefixes.clone(), False)
        graph.replay()
        assert all(output.isfinite().all() for output in wanted)
        assert all(map(torch.equal, outputs, wanted))


@pytest.mark.gpu
def test_any_strides() -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 3, 21, 72, device="cuda").bfloat16()[..., :64].transpose(1, 2)
    cache = torch.randn(2, 2, 300, 3, 64, device="cuda").bfloat16().transpose(2, 3)
    wanted = check(query.contiguous(), cache.contiguous(), 200, backend="cuda")
    assert torch.equal(check(query, cache, 200, backend="cuda"), wanted)
    shifted = torch.empty(query.numel() + 1, device="cuda", dtype=query.dtype)[1:].view(query.shape).copy_(query)
    assert torch.equal(check(shifted, cache, 200, backend="cuda", pdl=True), wanted)
    apart = torch.empty(*cache.shape[:-1], 68, device="cuda", dtype=cache.dtype)[..., :64].copy_(cache)
    assert torch.equal(check(query, apart, 200, backend="cuda", pdl=True), wanted)


@pytest.mark.gpu
def test_what_the_kernel_does_not_take() -> None:
    def make(head_dim: int, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
        return torch.randn(1, 9, 2, head_dim, device="cuda").to(dtype), torch.randn(
            2, 1, 2, 12, head_dim, device="cuda"
        ).to(dtype)

    for refused, cache, message in (
        (*make(12), "head_dim that is a multiple of 8, 256 at most, not 12"),
        (*make(264), "not 264"),
        (*make(64, torch.float32), "does not take torch.float32"),
    ):
        with pytest.raises(BackendError, match=message):
            prefix_attention(refused, *cache, 0.125, backend="cuda")
        with RawCalls() as raw:
            prefix_attention(refused, *cache, 0.125)
        assert not raw.names()
        assert not is_fast(9, *cache)


@pytest.mark.gpu
def test_long_prompts_are_left_to_torch() -> None:
    cache = torch.zeros(2, 1, 2, 4096, 64, device="cuda").bfloat16()
    most = tuned("prefix_attention_max_length", cache.device)
    assert is_fast(most, *cache) and not is_fast(most + 1, *cache)
