"""decode_attention against transformers' attention modules, and the CUDA kernels against float64."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, GPT2Config, T5Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.t5.modeling_t5 import T5Attention

from fuseopt.bench.suites.kernels import launches_of
from fuseopt.errors import BackendError
from fuseopt.ops import decode_attention, decode_attention_
from fuseopt.ops.decode.attention import decode_attention_reference
from tests.ops.cases import DTYPES, RawCalls, error, examples, to_float64

CAPACITY = 12


def static_caches(rows: int, heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Places that were never written hold what must not be read."""
    shape = (rows, heads, CAPACITY, head_dim)
    return torch.full(shape, torch.nan), torch.full(shape, torch.nan)


@torch.no_grad()
def test_gpt2_attention_step_by_step_with_left_padding() -> None:
    torch.manual_seed(0)
    heads, head_dim, width = 3, 8, 24
    config = GPT2Config(n_embd=width, n_head=heads, attn_pdrop=0.0, resid_pdrop=0.0)
    config._attn_implementation = "eager"
    module = GPT2Attention(config, layer_idx=0).eval()
    cache, starts = DynamicCache(), torch.tensor([0, 2])
    key_cache, value_cache = static_caches(2, heads, head_dim)
    for position in range(9):
        x = torch.randn(2, 1, width)
        allowed = torch.arange(position + 1) >= starts.unsqueeze(1)
        mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)[:, None, None]
        expected, _ = module(x, past_key_values=cache, attention_mask=mask)
        query, key, value = module.c_attn(x[:, 0]).view(2, 3, heads, head_dim).unbind(1)
        attended = decode_attention_(
            query, key, value, key_cache, value_cache, torch.tensor([position]), starts=starts, scale=head_dim**-0.5
        )
        row_attends = allowed.any(1)
        output = module.c_proj(attended)
        torch.testing.assert_close(output[row_attends], expected[:, 0][row_attends])


@torch.no_grad()
def test_t5_attention_with_its_relative_bias() -> None:
    torch.manual_seed(0)
    heads, head_dim, width = 3, 8, 24
    config = T5Config(d_model=width, d_kv=head_dim, num_heads=heads, is_decoder=True, relative_attention_num_buckets=8)
    config._attn_implementation = "eager"
    module = T5Attention(config, has_relative_attention_bias=True, layer_idx=0, is_causal=True).eval()
    # Of the query at the last place: the bias by distance is its row, from right to left.
    bias = module.compute_bias(1, CAPACITY, past_seen_tokens=CAPACITY - 1)[0, :, 0].flip(-1)
    cache = DynamicCache()
    key_cache, value_cache = static_caches(2, heads, head_dim)
    for position in range(CAPACITY):
        x = torch.randn(2, 1, width)
        expected, _, _ = module(x, past_key_values=cache)
        query, key, value = (layer(x).view(2, heads, head_dim) for layer in (module.q, module.k, module.v))
        attended = decode_attention_(
            query, key, value, key_cache, value_cache, torch.tensor([position], dtype=torch.int32), bias=bias
        )
        torch.testing.assert_close(module.o(attended), expected[:, 0])


def test_beams_read_the_cache_of_their_item() -> None:
    torch.manual_seed(0)
    query, keys, values = torch.randn(6, 3, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    lengths, mask = torch.tensor([7, 4]), torch.rand(2, 7) > 0.3
    output = decode_attention(query, keys, values, lengths, mask=mask)
    repeated = [tensor.repeat_interleave(3, 0) for tensor in (keys, values, lengths)]
    torch.testing.assert_close(output, decode_attention(query, *repeated, mask=mask.repeat_interleave(3, 0)))


@torch.no_grad()
def test_ancestry_stands_in_for_moving_the_rows_of_the_cache() -> None:
    """Beams that change places at every step: their caches copied, or their ancestry."""
    generator = torch.Generator().manual_seed(0)
    rows, heads, head_dim = 4, 3, 8
    copied, kept = static_caches(rows, heads, head_dim), static_caches(rows, heads, head_dim)
    # What lies past the position is never looked at.
    ancestry = torch.full((rows, CAPACITY), 2**30, dtype=torch.int32)
    for position in range(CAPACITY):
        query, key, value = torch.randn(rows, 3, heads, head_dim, generator=generator).unbind(1)
        parents, positions = torch.randint(0, rows, (rows,), generator=generator), torch.tensor([position])
        for cache in copied:
            cache.copy_(cache[parents])
        ancestry.copy_(ancestry[parents])
        expected = decode_attention_(query, key, value, *copied, positions)
        output = decode_attention_(query, key, value, *kept, positions, ancestry=ancestry)
        assert torch.equal(output, expected)
        assert torch.equal(kept[0][:, :, position], key) and torch.equal(kept[1][:, :, position], value)
        ancestry[:, position] = torch.arange(rows)


def test_a_row_that_attends_to_nothing_is_zero() -> None:
    query, cache = torch.randn(2, 1, 8), torch.randn(2, 1, 4, 8)
    output = decode_attention(query, cache, cache, torch.tensor([0, 3]), starts=torch.tensor([0, 2]))
    assert output[0].count_nonzero() == 0
    assert torch.equal(output[1], cache[1, 0, 2])


@pytest.mark.parametrize(
    ("changed", "exception", "message"),
    [
        ({"query": torch.zeros(2, 8)}, ValueError, "query must be"),
        ({"query": torch.zeros(3, 1, 8)}, ValueError, "no multiple"),
        ({"query": torch.zeros(2, 1, 6)}, ValueError, "key_cache must have shape"),
        ({"value_cache": torch.zeros(2, 1, 5, 8)}, ValueError, "value_cache must have shape"),
        ({"key_cache": torch.zeros(2, 1, 4, 8).half()}, ValueError, "must have query's dtype"),
        ({"lengths": torch.zeros(3, dtype=torch.int64)}, ValueError, "one element, or 2"),
        ({"lengths": torch.zeros(2)}, TypeError, "int32 or int64"),
        ({"starts": torch.zeros(1, dtype=torch.int64)}, ValueError, "starts must have shape"),
        ({"mask": torch.zeros(2, 4)}, TypeError, "bool"),
        ({"bias": torch.zeros(2, 4)}, ValueError, "bias must be"),
    ],
)
def test_wrong_arguments_are_refused_by_name(changed: dict, exception: type[Exception], message: str) -> None:
    cache = torch.zeros(2, 1, 4, 8)
    arguments = {
        "query": torch.zeros(2, 1, 8),
        "key_cache": cache,
        "value_cache": cache,
        "lengths": torch.tensor([1, 2]),
        **changed,
    }
    with pytest.raises(exception, match=message):
        decode_attention(**arguments)


def test_only_a_contiguous_cache_with_a_row_each_is_written() -> None:
    token, position = torch.zeros(2, 1, 8), torch.tensor([0])
    for cache in (torch.zeros(1, 1, 4, 8), torch.zeros(2, 1, 8, 8)[:, :, ::2]):
        with pytest.raises(ValueError, match="key_cache must be contiguous"):
            decode_attention_(token, token, token, cache, cache, position)


@pytest.mark.parametrize(
    ("ancestry", "positions", "exception", "message"),
    [
        (torch.zeros(2, 4, dtype=torch.int64), [0], TypeError, "ancestry must be int32"),
        (torch.zeros(2, 3, dtype=torch.int32), [0], ValueError, "ancestry must have shape"),
        (torch.zeros(2, 4, dtype=torch.int32), [0, 1], ValueError, "positions must have one element"),
    ],
)
def test_wrong_ancestry_changes_nothing(
    ancestry: Tensor, positions: list[int], exception: type[Exception], message: str
) -> None:
    token, cache = torch.ones(2, 1, 8), torch.zeros(2, 1, 4, 8)
    with pytest.raises(exception, match=message):
        decode_attention_(token, token, token, cache, cache, torch.tensor(positions), ancestry=ancestry)
    assert cache.count_nonzero() == 0


@pytest.mark.gpu
def test_the_kernel_refuses_gradients() -> None:
    cache, lengths = torch.zeros(1, 1, 4, 8, device="cuda"), torch.tensor([4], device="cuda")
    with pytest.raises(BackendError, match="autograd"):
        decode_attention(torch.zeros(1, 1, 8, device="cuda").requires_grad_(), cache, cache, lengths, backend="cuda")


@torch.no_grad()
def assert_kernel_is_accurate(
    batch: int,
    beams: int,
    heads: int,
    head_dim: int,
    capacity: int,
    dtype: torch.dtype,
    padded: bool,
    masked: bool,
    biased: bool,
    related: bool,
    seed: int,
) -> None:
    """Both ops against float64; places that are not attended to hold NaN, and the caches are looked at."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    def integers(most: int, size: int) -> Tensor:
        return torch.randint(0, most + 1, (size,), device="cuda", generator=generator)

    key_cache, value_cache = make(batch, heads, capacity, head_dim), make(batch, heads, capacity, head_dim)
    options = {
        "scale": head_dim**-0.5,
        "starts": integers(capacity // 2, batch).int() if padded else None,
        "mask": torch.rand(batch, capacity, device="cuda", generator=generator) > 0.3 if masked else None,
        "bias": make(heads, capacity // 2 + 1) if biased else None,
    }
    exact = {name: to_float64(value) if isinstance(value, Tensor) else value for name, value in options.items()}

    def unwritten(cache: Tensor, lengths: Tensor) -> Tensor:
        """Places that are not attended to hold what must not be read."""
        places = torch.arange(capacity, device="cuda")
        attended = places < lengths.unsqueeze(1)
        if options["starts"] is not None:
            attended = attended & (places >= options["starts"].unsqueeze(1))
        if options["mask"] is not None:
            attended = attended & options["mask"]
        return cache.masked_fill(~attended[:, None, :, None], torch.nan)

    def assert_accurate(output: Tensor, query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> None:
        plain = decode_attention_reference(query, keys, values, lengths, **options)
        judge = decode_attention_reference(*map(to_float64, (query, keys, values)), lengths, **exact)
        # In float64 the judge is no better than the judged; in float32 exp2 of the device counts beside rounding.
        slack = {torch.float64: 64, torch.float32: 16}.get(dtype, 8)
        assert error([output], [judge]) <= 2 * error([plain], [judge]) + slack * torch.finfo(dtype).eps

    query, lengths = make(batch * beams, heads, head_dim), integers(capacity, batch)
    keys, values = unwritten(key_cache, lengths), unwritten(value_cache, lengths)
    output = decode_attention(query, keys, values, lengths, **options, backend="cuda")
    assert_accurate(output, query, keys, values, lengths)
    overlapping = decode_attention(query, keys, values, lengths, **options, pdl=True, backend="cuda")
    assert torch.equal(output, overlapping)

    query, key, value = make(batch, 3, heads, head_dim).unbind(1)
    positions = integers(capacity - 1, 1 if related else batch)
    ancestry = integers(batch - 1, batch * capacity).view(batch, capacity).int() if related else None
    if ancestry is None:
        key_cache, value_cache = unwritten(key_cache, positions), unwritten(value_cache, positions)
    rows = torch.arange(batch, device="cuda")
    expected_keys = key_cache.index_put((rows[:, None], torch.arange(heads, device="cuda"), positions[:, None]), key)
    expected_values = value_cache.index_put(
        (rows[:, None], torch.arange(heads, device="cuda"), positions[:, None]), value
    )
    output = decode_attention_(
        query, key, value, key_cache, value_cache, positions, ancestry=ancestry, **options, pdl=True, backend="cuda"
    )
    for cache, expected in ((key_cache, expected_keys), (value_cache, expected_values)):
        torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)
    if ancestry is not None:
        places = torch.arange(capacity, device="cuda")
        sources = torch.where(places < positions, ancestry.long(), rows[:, None])
        key_cache, value_cache = (cache[sources, :, places].transpose(1, 2) for cache in (key_cache, value_cache))
    assert_accurate(output, query, key_cache, value_cache, positions + 1)


VARIED = {
    "padded": st.booleans(),
    "masked": st.booleans(),
    "biased": st.booleans(),
    "related": st.booleans(),
    "seed": st.integers(0, 2**31),
}


@pytest.mark.gpu
@settings(max_examples=examples(200), deadline=None)
@given(
    batch=st.integers(1, 8),
    beams=st.integers(1, 10),
    heads=st.integers(1, 25),
    head_dim=st.one_of(st.sampled_from([32, 64, 80, 96, 128]), st.integers(1, 256)),
    capacity=st.one_of(st.integers(1, 1031), st.integers(1, 40)),
    dtype=st.sampled_from(DTYPES),
    **VARIED,
)
def test_kernel_against_float64(**case: Any) -> None:
    assert_kernel_is_accurate(**case)


@pytest.mark.gpu
@settings(max_examples=examples(60), deadline=None)
@given(
    # (row, head)s a multiprocessor: four warps each, two, one, one with a single stage, more than there is room for.
    fill=st.sampled_from([1, 3, 6, 12, 24, 30]),
    beams=st.sampled_from([1, 1, 3, 10]),
    heads=st.integers(1, 13),
    head_dim=st.sampled_from([64, 128]),
    capacity=st.one_of(st.integers(1, 150), st.integers(1, 40)),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    **VARIED,
)
def test_kernel_for_many_rows_against_float64(fill: int, heads: int, **case: Any) -> None:
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    assert_kernel_is_accurate(batch=-(-fill * multiprocessors // heads), heads=heads, **case)


@pytest.mark.gpu
@settings(max_examples=examples(60), deadline=None)
@given(
    heads=st.integers(24, 40),
    head_dim=st.sampled_from([64, 128]),
    capacity=st.integers(1, 300),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    **VARIED,
)
def test_kernel_for_many_heads_of_one_row(**case: Any) -> None:
    """Each has two blocks, of which one may have nothing to do."""
    assert_kernel_is_accurate(batch=1, beams=1, **case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("beams", "head_dim", "kernel"),
    [
        (1, 64, "decode_attention_float32_kernel"),
        (3, 128, "decode_attention_float32_kernel"),
        (1, 80, "decode_attention_kernel"),
    ],
)
def test_which_kernel_takes_float32(beams: int, head_dim: int, kernel: str) -> None:
    query, cache = (torch.randn(2 * n, 3, *of, device="cuda") for n, of in ((beams, (head_dim,)), (1, (90, head_dim))))
    lengths = torch.tensor([90, 17], device="cuda")
    launches = launches_of(lambda: decode_attention(query, cache, cache, lengths, backend="cuda"))
    assert [kernel in launch.name for launch in launches] == [True]
    unaligned = torch.randn(cache.numel() + 1, device="cuda")[1:].view_as(cache)
    launches = launches_of(lambda: decode_attention(query, unaligned, unaligned, lengths, backend="cuda"))
    assert ["decode_attention_kernel" in launch.name for launch in launches] == [True]


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [40, 1031])  # places of one block, and of several
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@torch.no_grad()
def test_a_new_key_that_is_masked_is_written_and_not_attended_to(
    capacity: int, head_dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": dtype}
    query, key, value = torch.randn(2, 3, 3, head_dim, **options).unbind(1)
    caches = torch.randn(2, 2, 3, capacity, head_dim, **options)
    position, mask = 21, torch.ones(2, capacity, dtype=torch.bool, device="cuda")
    mask[1, position] = False
    key[1], value[1] = torch.nan, torch.nan
    kept = caches.clone()
    positions = torch.tensor([position], device="cuda")
    output = decode_attention_(query, key, value, *caches, positions, mask=mask, scale=0.1, backend="cuda")
    plain = decode_attention_(query, key, value, *kept, positions, mask=mask, scale=0.1, backend="reference")
    torch.testing.assert_close(caches, kept, rtol=0, atol=0, equal_nan=True)
    assert caches[:, 1, :, position].isnan().all() and output.isfinite().all()
    assert error([output], [plain]) <= 4 * torch.finfo(dtype).eps


@pytest.mark.gpu
@torch.no_grad()
def test_a_graph_serves_every_length() -> None:
    """Captured once; replayed while the position, which is on the device, grows past the end of the cache."""
    torch.manual_seed(0)
    rows, heads, head_dim, capacity = 2, 3, 64, 150
    keys = torch.zeros(rows, heads, capacity, head_dim, device="cuda", dtype=torch.bfloat16)
    values, position = torch.zeros_like(keys), torch.zeros(1, dtype=torch.int64, device="cuda")
    qkv = torch.zeros(rows, 3, heads, head_dim, device="cuda", dtype=torch.bfloat16)

    def step() -> Tensor:
        output = decode_attention_(*qkv.unbind(1), keys, values, position, scale=0.125, pdl=True)
        position.add_(1)
        return output

    step()
    graph = torch.cuda.CUDAGraph()
    with RawCalls() as raw, torch.cuda.graph(graph):
        output = step()
    assert raw.names() == ["decode_attention_.default"]
    position.zero_()
    for length in range(1, capacity + 1):
        qkv.normal_()
        graph.replay()
        expected = decode_attention_reference(
            qkv[:, 0], keys, values, torch.tensor([length], device="cuda"), scale=0.125
        )
        assert error([output], [expected]) <= 8 * torch.finfo(torch.bfloat16).eps
        assert torch.equal(keys[:, :, length - 1], qkv[:, 1]) and keys[:, :, length:].count_nonzero() == 0
    before = keys.clone()
    graph.replay()
    assert torch.equal(keys, before)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize(("rows", "beams"), [(1, 1), (2, 3), (32, 1), (11, 4), (150, 1)])
@torch.no_grad()
def test_scores_that_are_no_numbers_make_outputs_that_are_none(
    rows: int, beams: int, head_dim: int, dtype: torch.dtype
) -> None:
    """As softmax's, in each kernel that merges parts: for a NaN query, a NaN key, and infinite scores."""
    torch.manual_seed(0)
    heads, capacity = 12, 90
    query = torch.randn(rows * beams, heads, head_dim, device="cuda", dtype=dtype)
    keys, values = torch.randn(2, rows, heads, capacity, head_dim, device="cuda", dtype=dtype).unbind()
    query[0] = torch.nan
    query[-1, 0] = torch.inf  # infinite scores of both signs
    keys[rows // 2, 3, 17, 5] = torch.nan
    keys[rows // 2, 4, :60] = 0
    keys[rows // 2, 4, :60, 0] = -torch.inf  # scores of 0 beside -inf, or +inf, or NaN, by the sign of the query
    lengths = torch.full((1,), 85, device="cuda")
    scale = head_dim**-0.5
    output = decode_attention(query, keys, values, lengths, scale=scale, backend="cuda").view(-1, heads, head_dim)
    expected = decode_attention_reference(query, keys, values, lengths, scale=scale).view_as(output)
    assert expected[0].isnan().all() and expected.isnan().any(-1).sum() < 0.5 * expected[..., 0].numel() + heads
    assert torch.equal(output.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert error([output[numbers]], [expected[numbers]]) <= 64 * torch.finfo(dtype).eps
