"""short_attention: torch's own attention is what it computes, and its error in float64's eyes the measure."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fuseopt.errors import BackendError
from fuseopt.ops import registry, short_attention
from fuseopt.ops.short_attention import MAX_HEAD_DIM, MAX_LENGTH, is_fast
from tests.ops.cases import DTYPES, RawCalls, error, examples
from tests.ops.variations import LAYOUTS, poisoned_allocations

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Of torch's own error, which is none in float64, the judge's own dtype; and rounding steps beside it.
FACTOR, STEPS = 1.5, {torch.float64: 256}


def attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None = None) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale).transpose(1, 2)


def assert_no_worse_than_torch(tensors: list[Tensor], causal: bool, scale: float | None = None) -> None:
    # Kernels of torch 2.11's attention take it for granted that tensors begin at multiples of 16 bytes
    # (https://github.com/pytorch/pytorch/issues/183484).
    aligned = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    expected = attention(*(tensor.double() for tensor in aligned), causal, scale)
    with poisoned_allocations():
        output = short_attention(*tensors, causal=causal, scale=scale)
    assert output.is_contiguous() and output.dtype is tensors[0].dtype and output.shape == expected.shape
    query, key, _ = aligned
    # What rounding takes off a score is a share of its weight; far apart, none but the largest counts.
    scores = query.double() @ key.double().mT * (scale or query.shape[-1] ** -0.5)
    steps = STEPS.get(output.dtype, 4) + (scores.abs().amax().clamp(max=100).item() / 4 if scores.numel() else 0)
    allowed = FACTOR * error([attention(*aligned, causal, scale)], [expected])
    assert error([output], [expected]) <= allowed + steps * torch.finfo(output.dtype).eps


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=examples(60), deadline=None)
@given(
    batch=st.integers(1, 5),
    heads=st.integers(1, 4),
    length=st.integers(1, MAX_LENGTH),
    head_dim=st.one_of(st.sampled_from([8, 16, 64, 80, 96, 128]), st.integers(1, MAX_HEAD_DIM)),
    dtype=st.sampled_from(DTYPES),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.2, 3.0]),
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=3, max_size=3),
    seed=st.integers(0, 2**31),
)
def test_any_size_and_layout(device, batch, heads, length, head_dim, dtype, causal, scale, layouts, seed) -> None:
    generator = torch.Generator(device).manual_seed(seed)
    shape = batch, heads, length, head_dim
    tensors = [torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(3)]
    assert_no_worse_than_torch([layout(tensor) for layout, tensor in zip(layouts, tensors, strict=True)], causal, scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("batch", [1, 8, 300])
def test_packed_projections_are_no_worse_than_torch(batch: int, dtype: torch.dtype, head_dim: int) -> None:
    """Of few heads, which several warps share, and of many."""
    torch.manual_seed(0)
    for length, causal in itertools.product((1, 9, 16, 17, 32), (False, True)):
        packed = torch.randn(batch, length, 3, 12, head_dim, device="cuda", dtype=dtype)
        assert_no_worse_than_torch(list(packed.permute(2, 0, 3, 1, 4).unbind()), causal)


@pytest.mark.parametrize("device", DEVICES)
def test_scores_far_apart_and_not_finite(device: str) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, 20, 16, device=device) for _ in range(3))
    assert_no_worse_than_torch([100 * query, 100 * key, value], True)
    query[0, 1, 3] = torch.nan
    key[1, 0, 4] = torch.nan
    output = short_attention(query, key, value, causal=True)
    expected = attention(query, key, value, True)
    assert torch.equal(output.isnan(), expected.isnan()) and output.isnan().any() and not output.isnan().all()
    torch.testing.assert_close(output, expected, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_the_kernel_runs_and_repeats_to_the_bit() -> None:
    tensors = [torch.randn(5, 3, 23, 40, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    with RawCalls() as raw:
        first = short_attention(*tensors, causal=True)
    assert raw.names() == ["short_attention.default"]
    assert all(torch.equal(short_attention(*tensors, causal=True), first) for _ in range(20))


def test_what_it_is_fast_for(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = "cuda"
    monkeypatch.setattr(registry, "pick", lambda *_: chosen)

    def is_fast_for(length: int, head_dim: int, is_cuda: bool = True) -> bool:
        query = SimpleNamespace(shape=(2, 12, length, head_dim), dtype=torch.float32, is_cuda=is_cuda, device="cuda")
        return is_fast(query)  # type: ignore[arg-type]

    assert is_fast_for(MAX_LENGTH, MAX_HEAD_DIM)
    assert not is_fast_for(MAX_LENGTH + 1, 64)
    assert not is_fast_for(16, MAX_HEAD_DIM + 1)
    assert not is_fast_for(16, 64, is_cuda=False)
    chosen = "reference"
    assert not is_fast_for(16, 64)


def test_what_is_refused() -> None:
    tensors = [torch.randn(1, 2, 4, 8) for _ in range(3)]
    for wrong, message in (
        ([tensors[0][0], *tensors[1:]], "must be \\[batch"),
        ([torch.randn(1, 2, MAX_LENGTH + 1, 8)] * 3, "at most"),
        ([torch.randn(1, 2, 4, MAX_HEAD_DIM + 1)] * 3, "scaled_dot_product_attention"),
        ([tensors[0], tensors[1][:, :1], tensors[2]], "key must have shape"),
        ([*tensors[:2], tensors[2].double()], "query's dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            short_attention(*wrong)
    with pytest.raises(BackendError, match="takes no part in autograd"):
        short_attention(tensors[0].requires_grad_(), *tensors[1:], backend="cuda")
