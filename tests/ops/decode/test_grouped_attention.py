"""decode_attention_ with grouped heads, rotation, norms, windows and soft caps: against transformers, and the kernels
against float64."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as rotated_pairs
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotated_halves
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from fuseopt.ops import decode_attention, decode_attention_, registry
from tests.ops.cases import DTYPES, RawCalls, error, examples, to_float64

ROWS, HEADS, KV_HEADS, CAPACITY = 3, 6, 2, 20


def rotary_table(positions: int, rotated: int, device: str = "cpu") -> Tensor:
    """[positions, rotated] float32: cosines, then sines."""
    frequencies = 100.0 ** -(torch.arange(0, rotated, 2, device=device) / rotated)
    angles = torch.arange(positions, device=device).unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), 1)


def upstream_rotation(x: Tensor, table: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """[rows, heads, head_dim] by transformers' functions."""
    cos, sin = table[positions].chunk(2, -1)  # [rows, rotated / 2]
    rotated, passed = x.tensor_split([table.shape[1]], -1)
    if interleaved:
        rotated = rotated_pairs(rotated.unsqueeze(1), sin.unsqueeze(1), cos.unsqueeze(1)).squeeze(1)
    else:
        both = [torch.cat((part, part), -1).unsqueeze(1) for part in (cos, sin)]
        rotated = rotated_halves(rotated.unsqueeze(2), rotated.unsqueeze(2), *both)[0].squeeze(2)
    return torch.cat((rotated, passed), -1)


def grouped(cache: Tensor) -> Tensor:
    """Each head of keys repeated for its queries."""
    return cache.repeat_interleave(HEADS // KV_HEADS, 1)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotated"), [(16, 16), (20, 8), (80, 20)])
def test_rotation_and_grouped_heads_are_those_of_transformers(
    head_dim: int, rotated: int, interleaved: bool, backend: str
) -> None:
    torch.manual_seed(0)
    query = torch.randn(ROWS, HEADS, head_dim)
    key, value = torch.randn(2, ROWS, KV_HEADS, head_dim).unbind()
    caches = torch.randn(2, ROWS, KV_HEADS, CAPACITY, head_dim)
    table, positions, slot = rotary_table(30, rotated), torch.tensor([3, 29, 11]), 13
    expected_caches = caches.clone()
    expected_caches[0][:, :, slot] = upstream_rotation(key, table, positions, interleaved)
    expected_caches[1][:, :, slot] = value
    output = decode_attention_(
        query,
        key,
        value,
        *caches,
        torch.tensor([slot]),
        rotary=table,
        row_positions=positions,
        interleaved=interleaved,
        scale=0.3,
        backend=backend,
    )
    torch.testing.assert_close(caches, expected_caches)
    keys, values = (grouped(cache[:, :, : slot + 1]) for cache in expected_caches)
    query = upstream_rotation(query, table, positions, interleaved).unsqueeze(2)
    torch.testing.assert_close(output, F.scaled_dot_product_attention(query, keys, values, scale=0.3).flatten(1))


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize(("norm", "offset"), [(Qwen3RMSNorm, 0.0), (GemmaRMSNorm, 1.0)])
def test_norms_are_those_of_transformers(norm: type, offset: float, backend: str) -> None:
    torch.manual_seed(0)
    head_dim, slot = 24, 4
    norms = norm(head_dim, eps=1e-3), norm(head_dim, eps=1e-3)
    for module in norms:
        torch.nn.init.normal_(module.weight)
    query, key, value = (torch.randn(ROWS, heads, head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS))
    caches = torch.randn(2, ROWS, KV_HEADS, CAPACITY, head_dim)
    with torch.no_grad():
        output = decode_attention_(
            query,
            key,
            value,
            *caches,
            torch.tensor([slot]),
            q_norm=norms[0].weight,
            k_norm=norms[1].weight,
            norm_eps=1e-3,
            norm_offset=offset,
            backend=backend,
        )
        torch.testing.assert_close(caches[0][:, :, slot], norms[1](key))
        keys, values = (grouped(cache[:, :, : slot + 1]) for cache in caches)
        expected = F.scaled_dot_product_attention(norms[0](query).unsqueeze(2), keys, values, scale=1.0)
    torch.testing.assert_close(output, expected.flatten(1))


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("window", [0, 1, 5, 50])
def test_windows_soft_caps_and_biases(window: int, backend: str) -> None:
    """In the order of Gemma 2: scale, soft cap, bias; slots outside the window hold NaN."""
    torch.manual_seed(0)
    head_dim, slot = 8, 12
    query, key, value = (torch.randn(ROWS, heads, head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS))
    caches = torch.randn(2, ROWS, KV_HEADS, CAPACITY, head_dim)
    starts, bias = torch.tensor([0, 9, 3]), torch.randn(HEADS, CAPACITY)
    seen = torch.arange(CAPACITY) > slot - window if window else torch.ones(CAPACITY, dtype=torch.bool)
    caches.masked_fill_(~seen[:, None], torch.nan)
    options = {"window": window, "softcap": 1.5, "starts": starts, "bias": bias, "scale": 2.0}
    output = decode_attention_(query, key, value, *caches, torch.tensor([slot]), **options, backend=backend)
    scores = (query.unsqueeze(2) @ grouped(caches[0]).mT).squeeze(2)
    scores = 1.5 * torch.tanh(scores * 2 / 1.5) + bias[:, (slot - torch.arange(CAPACITY)).clamp(min=0)]
    attended = seen & (torch.arange(CAPACITY) <= slot) & (torch.arange(CAPACITY) >= starts.unsqueeze(1))
    weights = scores.masked_fill(~attended.unsqueeze(1), -torch.inf).softmax(-1)
    expected = weights.unsqueeze(2) @ grouped(caches[1].nan_to_num(0.0))
    torch.testing.assert_close(output, expected.flatten(1))


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_beams_share_the_grouped_heads_of_an_item(backend: str) -> None:
    torch.manual_seed(0)
    query, bias = torch.randn(4, HEADS, 8), torch.randn(HEADS, 7)
    caches, lengths = torch.randn(2, 2, KV_HEADS, 9, 8), torch.tensor([9, 4])
    output = decode_attention(query, *caches, lengths, bias=bias, backend=backend)
    plain = [grouped(cache.repeat_interleave(2, 0)) for cache in caches]
    expected = decode_attention(query, *plain, lengths.repeat_interleave(2), bias=bias, backend="reference")
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize(
    ("changed", "exception", "message"),
    [
        ({"query": torch.zeros(2, 3, 8)}, ValueError, "3 heads, which is no multiple of the 2 heads of key_cache"),
        ({"key": torch.zeros(2, 4, 8)}, ValueError, "key must have shape"),
        ({"rotary": torch.zeros(5, 8)}, ValueError, "given together"),
        ({"row_positions": torch.zeros(2, dtype=torch.int64)}, ValueError, "given together"),
        ({"rotary": torch.zeros(5, 10), "row_positions": torch.zeros(2, dtype=torch.int64)}, ValueError, "at most 8"),
        ({"rotary": torch.zeros(5, 7), "row_positions": torch.zeros(2, dtype=torch.int64)}, ValueError, "even"),
        ({"rotary": torch.zeros(5, 8).half(), "row_positions": torch.zeros(2).long()}, TypeError, "must be float32"),
        ({"rotary": torch.zeros(5, 8), "row_positions": torch.zeros(1).long()}, ValueError, "row_positions must have"),
        ({"rotary": torch.zeros(5, 8), "row_positions": torch.zeros(2)}, TypeError, "int32 or int64"),
        ({"q_norm": torch.zeros(7)}, ValueError, "q_norm must have shape"),
        ({"k_norm": torch.zeros(1, 8)}, ValueError, "k_norm must have shape"),
        ({"window": -1}, ValueError, "window and softcap must be positive"),
        ({"softcap": -0.5}, ValueError, "window and softcap must be positive"),
    ],
)
def test_wrong_arguments_are_refused_by_name(changed: dict, exception: type[Exception], message: str) -> None:
    arguments = {
        "query": torch.zeros(2, 4, 8),
        "key": torch.ones(2, 2, 8),
        "value": torch.ones(2, 2, 8),
        "key_cache": torch.zeros(2, 2, 5, 8),
        "value_cache": torch.zeros(2, 2, 5, 8),
        "positions": torch.tensor([1]),
        **changed,
    }
    with pytest.raises(exception, match=message):
        decode_attention_(**arguments)
    assert arguments["key_cache"].count_nonzero() == 0


@torch.no_grad()
def assert_step_is_accurate(
    backend: str,
    dtype: torch.dtype,
    rows: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    capacity: int,
    rotated: float,
    interleaved: bool,
    norms: tuple[bool, bool],
    window: int,
    softcap: bool,
    padded: bool,
    masked: bool,
    biased: bool,
    related: bool,
    pdl: bool,
    seed: int,
) -> None:
    """One step and its caches against float64; places that are not attended to hold NaN."""
    device = backend.replace("reference", "cpu")
    generator = torch.Generator(device).manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    def integers(most: int, size: int) -> Tensor:
        return torch.randint(0, most + 1, (size,), device=device, generator=generator)

    heads, width = kv_heads * group, 2 * int(rotated * head_dim / 2)
    packed = make(rows, heads + 2 * kv_heads, head_dim + 3 * (seed % 2))[..., :head_dim]
    positions = integers(capacity - 1, 1 if related else rows)
    query, key, value = packed.split((heads, kv_heads, kv_heads), 1)
    options: dict[str, Any] = {
        "scale": head_dim**-0.5,
        "starts": integers(capacity // 2, rows).int() if padded else None,
        "mask": torch.rand(rows, capacity, device=device, generator=generator) > 0.3 if masked else None,
        "bias": make(heads, capacity // 2 + 1) if biased else None,
        "ancestry": integers(rows - 1, rows * capacity).view(rows, capacity).int() if related else None,
        "rotary": rotary_table(70, width, device) if width else None,
        "row_positions": integers(69, rows) if width else None,
        "interleaved": interleaved,
        "q_norm": make(head_dim) if norms[0] else None,
        "k_norm": make(head_dim) if norms[1] else None,
        "norm_eps": 1e-3,
        "norm_offset": 1.0 if seed % 3 == 0 else 0.0,
        "window": window,
        "softcap": 0.7 if softcap else 0.0,
    }
    caches = make(2, rows, kv_heads, capacity, head_dim)
    if not related:
        places = torch.arange(capacity, device=device)
        unread = places >= positions.unsqueeze(1)
        if padded:
            unread = unread | (places < options["starts"].unsqueeze(1))
        if window:
            unread = unread | (places <= positions.unsqueeze(1) - window)
        if masked:
            unread = unread | ~options["mask"]
        caches.masked_fill_(unread[None, :, None, :, None], torch.nan)
    exact_options = {
        name: to_float64(x) if isinstance(x, Tensor) and x.is_floating_point() and name != "rotary" else x
        for name, x in options.items()
    }
    plain, exact = caches.clone(), to_float64(caches)
    arguments = query, key, value
    with RawCalls() as raw:
        output = decode_attention_(*arguments, *caches, positions, **options, pdl=pdl, backend=backend)
    assert raw.names() == ["decode_attention_.default"]
    expected = decode_attention_(*arguments, *plain, positions, **options, backend="reference")
    judge = decode_attention_(*map(to_float64, arguments), *exact, positions, **exact_options, backend="reference")
    slack = {torch.float64: 64, torch.float32: 16}.get(dtype, 8) * torch.finfo(dtype).eps
    assert error([output], [judge]) <= 2 * error([expected], [judge]) + slack
    assert torch.equal(caches[1].nan_to_num(7.0), plain[1].nan_to_num(7.0))
    written = torch.arange(capacity, device=device) == positions.reshape(-1, 1)
    written = written.expand(rows, -1)[:, None, :, None].expand(caches[0].shape)
    keys, exact_keys = (cache[0][written].double() for cache in (caches, exact))
    torch.testing.assert_close(keys, exact_keys, rtol=4 * torch.finfo(dtype).eps, atol=16 * torch.finfo(dtype).eps)
    for cache, before in zip(caches, plain, strict=True):
        assert torch.equal(cache.nan_to_num(7.0)[~written], before.nan_to_num(7.0)[~written])


STEPS = {
    "rows": st.integers(1, 5),
    "kv_heads": st.integers(1, 4),
    "group": st.one_of(st.sampled_from([1, 2, 4, 7, 8]), st.integers(1, 17)),
    "head_dim": st.one_of(st.sampled_from([64, 80, 96, 128, 256]), st.integers(1, 32).map(lambda n: 8 * n)),
    "capacity": st.one_of(st.integers(1, 40), st.integers(1, 700)),
    "rotated": st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    "interleaved": st.booleans(),
    "norms": st.tuples(st.booleans(), st.booleans()),
    "window": st.sampled_from([0, 0, 1, 5, 33, 2000]),
    "softcap": st.booleans(),
    "padded": st.booleans(),
    "masked": st.booleans(),
    "biased": st.booleans(),
    "related": st.booleans(),
    "pdl": st.booleans(),
    "seed": st.integers(0, 2**31),
}


@pytest.fixture
def cpu_library() -> Iterator[None]:
    if reasons := registry.CPU.not_supported_reasons(torch.device("cpu"), ()):
        pytest.skip(reasons[0])
    yield


@pytest.mark.usefixtures("cpu_library")
@settings(max_examples=examples(60), deadline=None)
@given(dtype=st.sampled_from(DTYPES), **{**STEPS, "head_dim": st.integers(1, 70), "capacity": st.integers(1, 90)})
def test_cpu_kernel_against_float64(**case: Any) -> None:
    assert_step_is_accurate("cpu", **case)


@pytest.mark.gpu
@settings(max_examples=examples(200), deadline=None)
@given(dtype=st.sampled_from([torch.float16, torch.bfloat16]), **STEPS)
def test_tensor_cores_against_float64(**case: Any) -> None:
    assert_step_is_accurate("cuda", **case)


@pytest.mark.gpu
@settings(max_examples=examples(100), deadline=None)
@given(dtype=st.sampled_from(DTYPES), **{**STEPS, "head_dim": st.integers(1, 256)})
def test_plain_kernel_against_float64(**case: Any) -> None:
    assert_step_is_accurate("cuda", **case)


@pytest.mark.gpu
@settings(max_examples=examples(30), deadline=None)
@given(
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    **{
        **STEPS,
        "rows": st.sampled_from([1, 16, 70, 300]),
        "kv_heads": st.sampled_from([2, 8]),
        "group": st.integers(1, 9),
        "capacity": st.integers(1, 90),
    },
)
def test_many_rows_against_float64(**case: Any) -> None:
    """Blocks of eight warps down to one."""
    assert_step_is_accurate("cuda", **case)


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [5000, 33000])
@pytest.mark.parametrize(
    ("rows", "kv_heads", "group", "head_dim"), [(1, 8, 4, 64), (1, 1, 12, 256), (3, 2, 1, 128), (1, 2, 3, 72)]
)
@torch.no_grad()
def test_long_caches(rows: int, kv_heads: int, group: int, head_dim: int, capacity: int) -> None:
    """Clusters of up to 16 blocks share a cache, more of it than their stages hold."""
    assert_step_is_accurate(
        "cuda",
        torch.bfloat16,
        rows,
        kv_heads,
        group,
        head_dim,
        capacity,
        1.0,
        False,
        (True, True),
        0,
        False,
        True,
        True,
        False,
        False,
        True,
        seed=capacity,
    )


@pytest.mark.gpu
@settings(max_examples=examples(60), deadline=None)
@given(
    batch=st.integers(1, 4),
    beams=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    group=st.integers(2, 6),
    head_dim=st.sampled_from([40, 64, 128, 256]),
    capacity=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
@torch.no_grad()
def test_grouped_heads_of_an_encoders_cache(
    batch: int,
    beams: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    capacity: int,
    dtype: torch.dtype,
    biased: bool,
    seed: int,
) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    heads = kv_heads * group

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    query, caches = make(batch * beams, heads, head_dim), make(2, batch, kv_heads, capacity, head_dim)
    lengths = torch.randint(0, capacity + 1, (batch,), device="cuda", generator=generator)
    options = {"scale": head_dim**-0.5, "bias": make(heads, 9) if biased else None}
    output = decode_attention(query, *caches, lengths, **options, backend="cuda")
    plain = decode_attention(query, *caches, lengths, **options, backend="reference")
    exact = {**options, "bias": None if options["bias"] is None else to_float64(options["bias"])}
    judge = decode_attention(*map(to_float64, (query, *caches)), lengths, **exact, backend="reference")
    slack = {torch.float64: 64, torch.float32: 16}.get(dtype, 8) * torch.finfo(dtype).eps
    assert error([output], [judge]) <= 2 * error([plain], [judge]) + slack


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "capacity"), [(1, 90), (1, 3000), (40, 90), (300, 90)])
@torch.no_grad()
def test_scores_that_are_no_numbers_stay_in_their_head(rows: int, capacity: int, dtype: torch.dtype) -> None:
    """Of a NaN query and a NaN key, wherever parts of the cache are merged."""
    torch.manual_seed(0)
    kv_heads, group, head_dim, slot = 2, 3, 64, capacity - 5
    query, value = torch.randn(rows, kv_heads * group, head_dim), torch.randn(rows, kv_heads, head_dim)
    query[0, 1] = torch.nan
    query, key, value = (x.to("cuda", dtype) for x in (query, value, value))
    caches = torch.randn(2, rows, kv_heads, capacity, head_dim, device="cuda").to(dtype)
    caches[0, rows // 2, 1, 17, 5] = torch.nan
    plain, positions = caches.clone(), torch.tensor([slot], device="cuda")
    output = decode_attention_(query, key, value, *caches, positions, scale=0.1, backend="cuda")
    expected = decode_attention_(query, key, value, *plain, positions, scale=0.1, backend="reference")
    assert torch.equal(output.isnan(), expected.isnan()) and 0 < expected.isnan().sum() <= (1 + group) * head_dim
    numbers = ~expected.isnan()
    assert error([output[numbers]], [expected[numbers]]) <= 64 * torch.finfo(dtype).eps
