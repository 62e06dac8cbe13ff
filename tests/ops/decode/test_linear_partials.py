"""A linear layer that leaves a sum in parts, and one that takes it, against decode_linear and float64."""

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fuseopt import ops
from fuseopt.bench.suites.kernels import launches_of
from fuseopt.ops import decode_linear, decode_linear_of_sum, decode_linear_partials
from fuseopt.ops.decode.linear_partials import (
    accepts_partials,
    decode_linear_partials_reference,
    emits_partials,
)
from tests.ops.cases import error, examples, to_float64
from tests.ops.variations import poisoned_allocations

MOST_ROWS = 8
HALVES = (torch.bfloat16, torch.float16)
LAYER_NORM, RMS_NORM = "layer_norm", "rms_norm"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM])
def test_both_are_a_layer_a_residual_and_the_next_layer(
    each_device: torch.device, dtype: torch.dtype, norm: str
) -> None:
    torch.manual_seed(0)
    inner, down, bias = (torch.randn(size).to(dtype) for size in ((3, 40), (24, 40), (24,)))
    stream, weight, next_bias = (torch.randn(size).to(dtype) for size in ((3, 24), (16, 24), (16,)))
    parameters = {"norm": norm, "norm_weight": torch.randn(24).to(dtype), "eps": 1e-5}
    addends = decode_linear_partials(inner, down, bias)
    assert addends.shape == (2, 3, 24) and addends.dtype == torch.float32
    output, sum = decode_linear_of_sum(stream, addends, weight, next_bias, **parameters)
    expected_sum = decode_linear(inner, down, bias, residual=stream)
    torch.testing.assert_close(sum, expected_sum)
    torch.testing.assert_close(output, decode_linear(sum, weight, next_bias, **parameters))


def test_wrong_addends_and_weights_are_refused_by_name() -> None:
    input, weight = torch.randn(2, 12), torch.randn(5, 12)
    addends = torch.randn(2, 2, 12)
    for arguments, exception, words in (
        ((input, addends[:1], weight), ValueError, "split_k_partials"),
        ((input, torch.randn(2, 12), weight), ValueError, "split_k_partials"),
        ((input, addends.double(), weight), TypeError, "split_k_partials must be torch.float32, not torch.float64"),
        ((input, addends, torch.randn(5, 13)), ValueError, "weight"),
    ):
        with pytest.raises(exception, match=re.escape(words)):
            decode_linear_of_sum(*arguments, norm=LAYER_NORM)
    with pytest.raises(ValueError, match="weight"):
        decode_linear_partials(input, torch.randn(5, 13))


def make(*size: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(size, device="cuda")).to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("name", ["input", "weight", "norm_weight", "norm_bias"])
def test_what_lies_askew_is_left_to_other_kernels(name: str, shift: int) -> None:
    """As parameters may that are views of one flat tensor."""
    sizes = {"input": (1, 768), "weight": (768, 2304), "norm_weight": (768,), "norm_bias": (768,)}
    tensors = {}
    for key, size in sizes.items():
        flat = make(math.prod(size) + 8, dtype=torch.bfloat16, scale=0.02)
        begin = shift if key == name else 0
        tensors[key] = flat[begin : begin + math.prod(size)].view(size)
    input, weight = tensors.pop("input"), tensors.pop("weight").T
    norm = {"norm": LAYER_NORM, **tensors}
    assert accepts_partials(input, weight, **norm) == (shift == 0)
    addends = make(2, 1, 768, dtype=torch.float32)
    output, sum = decode_linear_of_sum(input, addends, weight, **norm, backend="cuda")
    assert torch.equal(output, decode_linear(sum, weight, **norm, backend="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("other", [torch.float16, torch.float32])
def test_parameters_of_another_dtype_are_left_to_other_kernels(other: torch.dtype) -> None:
    input, weight = make(1, 3072, dtype=torch.bfloat16), make(3072, 768, dtype=torch.bfloat16).T
    assert emits_partials(input, weight, make(768, dtype=torch.bfloat16))
    assert not emits_partials(input, weight, make(768, dtype=other))
    stream, next_weight = make(1, 768, dtype=torch.bfloat16), make(768, 2304, dtype=torch.bfloat16).T
    assert not accepts_partials(stream, next_weight, make(2304, dtype=other), norm=RMS_NORM)
    assert not accepts_partials(stream, next_weight, norm=RMS_NORM, norm_weight=make(768, dtype=other))
    assert not accepts_partials(stream.to(other), next_weight, norm=RMS_NORM)


@pytest.mark.gpu
def test_only_what_narrows_leaves_addends() -> None:
    """Others with such a K have kernels of their own with one row, if they are large."""

    def leaves(columns: int, outputs: int, rows: int = 1) -> bool:
        return emits_partials(*(make(*size, dtype=torch.bfloat16).mT for size in ((columns, rows), (columns, outputs))))

    assert leaves(3072, 768) and leaves(2056, 2048) and leaves(3072, 768, MOST_ROWS)
    assert not leaves(2304, 2304) and not leaves(2048, 768) and not leaves(4104, 768)
    assert not leaves(3072, 768, MOST_ROWS + 1)
    assert not emits_partials(make(1, 3072, dtype=torch.float32), make(3072, 768, dtype=torch.float32).T)


@pytest.mark.parametrize("compiled", [False, True])
def test_of_tensors_without_addresses_nothing_is_known(compiled: bool) -> None:
    """They are traced to be left to PyTorch and `decode_linear`, whatever device they are said to be on."""
    with FakeTensorMode():
        input, weight = torch.empty(1, 3072, device="cuda"), torch.empty(768, 3072, device="cuda")

        def asked() -> bool:
            return emits_partials(input, weight) or accepts_partials(input, weight, norm=LAYER_NORM)

        assert (torch.compile(asked, backend="eager") if compiled else asked)() is False


def check_partials(rows: int, outputs: int, columns: int, dtype: torch.dtype, has_bias: bool) -> None:
    """Against float64, each addend's error is that of float32 sums; and what was not written is nowhere."""
    input, weight = make(rows, columns, dtype=dtype), make(columns, outputs, dtype=dtype).T
    bias = make(outputs, dtype=dtype) if has_bias else None
    assert emits_partials(input, weight)
    with poisoned_allocations():
        addends = decode_linear_partials(input, weight, bias, backend="cuda")
        overlapping = decode_linear_partials(input, weight, bias, pdl=True, backend="cuda")
    assert torch.equal(addends, overlapping)
    parameters = (input, weight, bias)
    exact = decode_linear_partials_reference(*(None if t is None else to_float64(t) for t in parameters))
    plain = decode_linear_partials_reference(*parameters)
    assert (
        error(list(addends), list(exact)) <= 2 * error(list(plain), list(exact)) + 16 * torch.finfo(torch.float32).eps
    )


@pytest.mark.gpu
@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.integers(1, MOST_ROWS),
    outputs=st.integers(1, 120).map(lambda eighths: 8 * eighths),
    columns=st.integers(257, 384).map(lambda eighths: 8 * eighths),
    dtype=st.sampled_from(HALVES),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_addends_against_float64(rows: int, outputs: int, columns: int, seed: int, **case: Any) -> None:
    torch.manual_seed(seed)
    check_partials(rows, outputs, columns, **case)


@pytest.mark.gpu
@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.integers(1, MOST_ROWS),
    outputs=st.integers(180, 300).map(lambda eighths: 8 * eighths) | st.integers(24_000, 26_000),
    columns=st.integers(1, 96).map(lambda eighths: 8 * eighths),
    dtype=st.sampled_from(HALVES),
    norm=st.sampled_from([LAYER_NORM, RMS_NORM]),
    shift=st.sampled_from([0.0, 0.0, 100.0]),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_of_sum_against_float64(
    rows: int, outputs: int, columns: int, dtype: torch.dtype, norm: str, shift: float, has_bias: bool, seed: int
) -> None:
    """A row far from zero takes another way to its deviation. What has so many outputs is a head."""
    is_head = outputs > 3000
    columns = 768 if is_head else columns
    torch.manual_seed(seed)
    input, addends = make(rows, columns, dtype=dtype), make(2, rows, columns, dtype=torch.float32)
    addends[1] += shift
    weight = make(columns, outputs, dtype=dtype, scale=columns**-0.5).T
    weight = weight.contiguous() if is_head else weight
    bias, norm_weight, norm_bias = (make(size, dtype=dtype) for size in (outputs, columns, columns))
    of_norm = {"norm": norm, "norm_weight": norm_weight, "norm_bias": norm_bias if norm == LAYER_NORM else None}
    arguments, options = (weight, bias if has_bias else None), {**of_norm, "eps": 1e-5}
    assert accepts_partials(input, *arguments, **of_norm)
    with poisoned_allocations():
        output, sum = decode_linear_of_sum(input, addends, *arguments, **options, backend="cuda")
        overlapping = decode_linear_of_sum(input, addends, *arguments, **options, pdl=True, backend="cuda")
    assert torch.equal(output, overlapping[0]) and torch.equal(sum, overlapping[1])
    expected_sum = (addends[0] + addends[1] + input.float()).to(dtype)
    assert torch.equal(sum, expected_sum)
    assert torch.equal(output, decode_linear(expected_sum, *arguments, **options, backend="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("dtype", HALVES)
def test_layers_of_gpt2_take_one_launch_each(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inner, down = make(rows, 3072, dtype=dtype), make(3072, 768, dtype=dtype, scale=0.02).T
    stream, weight = make(rows, 768, dtype=dtype), make(768, 2304, dtype=dtype, scale=0.02).T
    norm = {"norm": LAYER_NORM, "norm_weight": make(768, dtype=dtype), "norm_bias": make(768, dtype=dtype)}
    bias, next_bias = make(768, dtype=dtype), make(2304, dtype=dtype)

    def both() -> Tensor:
        addends = decode_linear_partials(inner, down, bias, pdl=True)
        return decode_linear_of_sum(stream, addends, weight, next_bias, **norm, pdl=True)[0]

    output = both()
    expected = decode_linear(decode_linear(inner, down, bias, residual=stream), weight, next_bias, **norm)
    # A sum of two parts may round the other way, which a norm passes on.
    torch.testing.assert_close(output, expected, rtol=0.05, atol=0.05)
    kernel = "decode_linear_skinny_mma_kernel"
    assert [launch.name.count(kernel) for launch in launches_of(both)] == [1, 1]


def test_the_earlier_name_warns() -> None:
    input, weight = torch.randn(2, 40), torch.randn(24, 40)
    with pytest.warns(DeprecationWarning, match="decode_linear_addends is called decode_linear_partials"):
        earlier = ops.decode_linear_addends(input, weight, overlap=True, ahead=[weight])
    assert torch.equal(earlier, decode_linear_partials(input, weight))
