"""prompt_attention_ against float64, torch's own attention being the measure; its cache to the bit."""

import contextlib

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fuseopt.build import loader
from fuseopt.errors import BackendError
from fuseopt.ops import prompt_attention_, registry
from fuseopt.ops.decode.prompt_attention import is_fast, sample_inputs
from tests.ops.cases import DTYPES, Case, RawCalls, cases, error
from tests.ops.variations import poisoned_allocations

HALVES = [torch.float16, torch.bfloat16]
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 333)
KERNEL = Case(registry.get("prompt_attention_"), "cuda", torch.device("cuda"))
every_case = pytest.mark.parametrize("case", cases("prompt_attention_"))
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)


def attention(qkv: Tensor, scale: float) -> Tensor:
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
    # torch 2.11's faster ones make NaN where the scale is not above 0, and of no rows None.
    plain = scale <= 0 or qkv.numel() == 0
    with sdpa_kernel(SDPBackend.MATH) if plain else contextlib.nullcontext():
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return attended.transpose(1, 2).flatten(2)


def caches_for(qkv: Tensor, spare: int = 3) -> Tensor:
    """[2, rows, heads, capacity, head_dim], of which slots behind the prompt hold what must stay."""
    rows, length, _, heads, head_dim = qkv.shape
    return torch.randn(2, rows, heads, length + spare, head_dim).to(qkv)


def check(case: Case, qkv: Tensor, scale: float, caches: Tensor | None = None, **options: bool) -> Tensor:
    """Its output, which is no worse than torch's; NaN and infinities are for the caller to look at."""
    caches = caches_for(qkv) if caches is None else caches
    expected_caches, length = caches.clone(), qkv.shape[1]
    expected_caches[:, :, :, :length] = qkv.permute(2, 0, 3, 1, 4)[1:]
    before = qkv.clone()
    with poisoned_allocations():
        output = case(qkv, *caches, scale, **options)
    assert output.is_contiguous() and output.dtype is qkv.dtype
    assert output.shape == (*qkv.shape[:2], qkv.shape[3] * qkv.shape[4])
    for tensor, expected in ((caches, expected_caches), (qkv, before)):
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)
    if qkv.isfinite().all():
        judge = attention(qkv.double(), scale)
        # Of float64 there is none better. What rounding takes off a score is a share of its weight.
        steps = {torch.float64: 256}.get(qkv.dtype, 4)
        allowed = 1.5 * error([attention(qkv, scale)], [judge]) + steps * torch.finfo(qkv.dtype).eps
        assert error([output], [judge]) <= allowed
    return output


@every_case
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_and_what_they_leave_in_the_cache(case: Case, dtype: torch.dtype) -> None:
    for sample in case.samples(dtype):
        qkv, *caches, scale = sample.args
        check(case, qkv, scale, torch.stack(caches))


@pytest.mark.parametrize("length", [1, 9, 70])
def test_the_reference_with_strides(length: int) -> None:
    torch.manual_seed(0)
    case = Case(registry.get("prompt_attention_"), "reference", torch.device("cpu"))
    qkv = torch.randn(2, length, 3, 2, 24)[..., ::2]
    cache = torch.randn(2, length + 4, 2, 2, 12).permute(0, 2, 3, 1, 4)
    check(case, qkv, 0.3, cache)


@pytest.mark.gpu
@every_half
@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 96, 112, 128])
@pytest.mark.parametrize("rows", [1, 3])
def test_kernel_against_float64(dtype: torch.dtype, head_dim: int, rows: int) -> None:
    torch.manual_seed(0)
    for length in LENGTHS:
        qkv = torch.randn(rows, length, 3, 3, head_dim, device="cuda", dtype=dtype)
        output = check(KERNEL, qkv, head_dim**-0.5)
        assert torch.equal(check(KERNEL, qkv, head_dim**-0.5, pdl=True), output)


@pytest.mark.gpu
@every_half
@pytest.mark.parametrize(("rows", "heads", "head_dim"), [(1, 25, 64), (2, 25, 64), (16, 25, 64), (9, 20, 128)])
def test_kernel_for_few_blocks_and_for_many(dtype: torch.dtype, rows: int, heads: int, head_dim: int) -> None:
    """Two warps share the keys of a query, or none do."""
    torch.manual_seed(0)
    for length in (17, 128, 200):
        check(KERNEL, torch.randn(rows, length, 3, heads, head_dim, device="cuda", dtype=dtype), head_dim**-0.5)


@pytest.mark.gpu
@every_half
@pytest.mark.parametrize("scale", [0.0, -0.125, 4.0])
def test_scores_far_apart(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    for rows in (1, 30):
        qkv = torch.randn(rows, 130, 3, 10, 64, device="cuda", dtype=dtype)
        check(KERNEL, qkv, scale)
        # A token has no weight left for any but itself.
        qkv[:, :, 0] = 1
        qkv[:, :, 1] = torch.arange(130, device="cuda", dtype=dtype)[:, None, None] / 2
        check(KERNEL, qkv, 1.0)


@pytest.mark.gpu
@every_half
@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 6e4])
def test_later_tokens_have_no_part(dtype: torch.dtype, rows: int, head_dim: int, number: float) -> None:
    torch.manual_seed(0)
    for length, changed in ((20, 5), (64, 40), (130, 63), (130, 64), (130, 129), (200, 17)):
        qkv = torch.randn(rows, length, 3, 10, head_dim, device="cuda", dtype=dtype)
        before = check(KERNEL, qkv, head_dim**-0.5)
        qkv[:, changed, 1:] = number
        after = check(KERNEL, qkv, head_dim**-0.5, pdl=True)
        assert after[:, :changed].isfinite().all()
        torch.testing.assert_close(after[:, :changed], before[:, :changed], rtol=0, atol=0)


@pytest.mark.gpu
@every_half
def test_values_that_are_no_numbers_where_they_are_seen(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(1, 100, 3, 4, 64, device="cuda", dtype=dtype)
    qkv[0, 70, 2, 1, 3], qkv[0, 71, 2, 2, 5] = torch.nan, torch.inf
    output = check(KERNEL, qkv, 0.125).view(100, 4, 64)
    expected = torch.zeros_like(output)
    expected[70:, 1, 3], expected[71:, 2, 5] = torch.nan, torch.inf
    torch.testing.assert_close(output - output.nan_to_num(posinf=0), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@every_half
@torch.no_grad()
def test_a_chain_in_a_graph_waits_for_each_predecessor(dtype: torch.dtype) -> None:
    """The output of a launch is the next one's input, as it is or behind a kernel of torch's."""
    torch.manual_seed(0)
    qkv = torch.randn(1, 162, 3, 25, 64, device="cuda", dtype=dtype)
    short = qkv.new_empty(1, 54, 3, 25, 64)
    caches = [(caches_for(qkv), caches_for(short)) for _ in range(8)]

    def chain(overlap: bool) -> list[Tensor]:
        outputs, input = [], qkv
        for longer, shorter in caches:
            first = prompt_attention_(input, *longer, 0.125, pdl=overlap, backend="cuda")
            second = prompt_attention_(first.view_as(short), *shorter, 0.125, pdl=overlap, backend="cuda")
            outputs += first, second
            input = input + second.flatten()[0]
        return outputs

    wanted, wanted_caches = chain(False), [cache.clone() for both in caches for cache in both]
    graph = torch.cuda.CUDAGraph()
    with RawCalls() as raw, torch.cuda.graph(graph):
        outputs = chain(True)
    assert raw.names() == ["prompt_attention_.default"] * len(wanted)
    for _ in range(20):
        for (longer, shorter), expected in zip(caches, wanted_caches[::2], strict=True):
            longer[:, :, :, :162].zero_(), shorter[:, :, :, :54].zero_()
            assert not torch.equal(longer, expected)
        graph.replay()
        assert all(map(torch.equal, outputs, wanted))
        assert all(map(torch.equal, (cache for both in caches for cache in both), wanted_caches))


@pytest.mark.gpu
def test_any_strides_of_the_cache() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(2, 65, 3, 3, 64, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(2, 70, 2, 3, 72, device="cuda", dtype=torch.bfloat16)
    kept = cache.clone()
    check(KERNEL, qkv, 0.125, cache[..., :64].permute(0, 2, 3, 1, 4))
    assert torch.equal(cache[..., 64:], kept[..., 64:])
    check(KERNEL, qkv.transpose(1, 3).contiguous().transpose(1, 3), 0.125)


@pytest.mark.gpu
def test_what_the_kernel_does_not_take() -> None:
    def make(head_dim: int, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
        qkv = torch.randn(1, 9, 3, 2, head_dim, device="cuda", dtype=dtype)
        return qkv, caches_for(qkv)

    qkv, caches = make(64)
    shifted = torch.empty(qkv.numel() + 1, device="cuda", dtype=qkv.dtype)[1:].view_as(qkv).copy_(qkv)
    apart = torch.randn(2, 1, 2, 12, 68, device="cuda", dtype=qkv.dtype)[..., :64]
    for refused, cache, message in (
        (*make(24), "head_dim that is a multiple of 16, 128 at most, not 24"),
        (*make(144), "not 144"),
        (*make(64, torch.float32), "does not take torch.float32"),
        (shifted, caches, "aligned to 16 bytes"),
        (qkv, apart, "aligned to 16 bytes"),
    ):
        with pytest.raises(BackendError, match=message):
            prompt_attention_(refused, *cache, 0.125, backend="cuda")
        with RawCalls() as raw:
            check(Case(KERNEL.op, "auto", KERNEL.device), refused, 0.125, cache)
        assert raw.names() == [] and not is_fast(refused, *cache)
    assert is_fast(qkv, *caches)


def test_what_it_is_fast_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(length: int, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
        qkv = torch.zeros(2, length, 3, 2, head_dim, dtype=dtype)
        return qkv, caches_for(qkv)

    def is_fast_for(qkv: Tensor, caches: Tensor) -> bool:
        return is_fast(qkv, *caches)

    assert not is_fast_for(*make(9, 64))  # on a CPU

    def pick(name: str, backend: str, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> str:
        assert (name, backend) == ("prompt_attention_", "auto")
        return "cuda" if dtypes[0] in HALVES else "reference"

    monkeypatch.setattr(registry, "pick", pick)
    head_dims = 8, 16, 24, 64, 128, 144
    assert [head_dim for head_dim in head_dims if is_fast_for(*make(9, head_dim))] == [16, 64, 128]
    assert [length for length in (1, 256, 257) if is_fast_for(*make(length, 64))] == [1, 256]
    assert {dtype for dtype in DTYPES if is_fast_for(*make(9, 64, dtype))} == set(HALVES)

    qkv, caches = make(9, 64)
    shifted = torch.zeros(qkv.numel() + 1, dtype=qkv.dtype)[1:].view_as(qkv)
    key_cache, value_cache = caches
    odd_cache = key_cache.new_zeros(*key_cache.shape[:-1], 68)[..., :64]
    assert not is_fast(shifted, key_cache, value_cache)
    assert not is_fast(qkv, odd_cache, value_cache)
    assert not is_fast(qkv, key_cache, odd_cache)
    assert not is_fast(qkv.requires_grad_(), key_cache, value_cache)


def test_wrong_arguments_change_nothing() -> None:
    qkv, cache = torch.ones(2, 4, 3, 1, 8), torch.zeros(2, 1, 6, 8)
    for wrong, message in (
        ((qkv[0], cache, cache), "qkv must be"),
        ((qkv[:, :, :2], cache, cache), "qkv must be"),
        ((qkv, cache[:, :, :3], cache), "room for 4 tokens"),
        ((qkv, cache[:1], cache), "key_cache must have shape"),
        ((qkv, cache, cache[:, :, :5]), "value_cache must have shape"),
        ((qkv, cache, cache.half()), "value_cache must have qkv's dtype"),
        ((qkv, torch.zeros(2, 1, 6, 16)[..., ::2], cache), "key_cache must have neighbouring"),
    ):
        with pytest.raises(ValueError, match=message):
            prompt_attention_(*wrong, 1.0)
    with pytest.raises(BackendError, match="takes no part in autograd"):
        prompt_attention_(qkv.requires_grad_(), cache, cache, 1.0, backend="cuda")
    assert cache.count_nonzero() == 0


def test_the_meta_device() -> None:
    for sample in sample_inputs(torch.device("meta"), torch.bfloat16, False):
        rows, length, _, heads, head_dim = sample.args[0].shape
        assert prompt_attention_(*sample.args).shape == (rows, length, heads * head_dim)


def test_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, _ = KERNEL.op.backends
    loaded = loader.LibraryState("cuda", "loaded", None, None, None, 0.0)
    monkeypatch.setattr(loader, "load", lambda kind, *, build=True: loaded)
    for capability, reasons in (
        ((7, 5), ["needs a GPU of compute capability 8.0, not 7.5"]),
        ((8, 0), []),
        ((10, 0), []),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert kernel.not_supported_reasons(torch.device("cuda"), [torch.float16]) == reasons
