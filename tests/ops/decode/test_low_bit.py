"""decode_low_bit_linear's CUDA kernels against float64, at the sizes they are for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fuseopt.ops import decode_low_bit_linear
from fuseopt.ops.decode.low_bit_linear import MAX_ROWS, decode_low_bit_linear_reference
from fuseopt.ops.low_bit import LowBitWeight
from tests.ops.cases import error, examples, launched_kernels, to_float64

pytestmark = pytest.mark.gpu

HALVES = (torch.bfloat16, torch.float16)
KINDS = [(8, 0, False), (4, 32, False), (4, 64, True), (4, 128, False), (4, 128, True)]


def random_weight(outputs: int, inputs: int, bits: int, group: int, zeros: bool, dtype: torch.dtype) -> LowBitWeight:
    """All values and zero points that the format has, and scales of both signs."""
    if bits == 8:
        values = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device="cuda")
        return LowBitWeight(values, torch.rand(outputs, 1, device="cuda") / 64, None, 8, inputs)
    values = torch.randint(-(2**31), 2**31, (outputs, inputs // 8), dtype=torch.int32, device="cuda")
    scales = (torch.randn(outputs, inputs // group, device="cuda") / 8).to(dtype)
    return LowBitWeight(values, scales, torch.randint_like(scales, 16).byte() if zeros else None, 4, group)


def layer_error(input: Tensor, weights: list[LowBitWeight], **options) -> float:
    """The kernels' largest error over the largest output, in units of the input dtype's eps."""
    actual = decode_low_bit_linear(input, weights, **options, backend="cuda")
    exact = {name: tree_map_only(Tensor, to_float64, option) for name, option in options.items()}
    expected = decode_low_bit_linear_reference(to_float64(input), weights, **exact)
    return error([actual], [expected]) / torch.finfo(input.dtype).eps


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize(("bits", "group", "zeros"), KINDS)
@given(data=st.data())
@settings(max_examples=examples(40), deadline=None)
def test_layers_of_any_size(bits: int, group: int, zeros: bool, dtype: torch.dtype, data: st.DataObject) -> None:
    step = group or data.draw(st.sampled_from([1, 16]))
    inputs = step * data.draw(st.integers(1, 4096 // max(step, 16)))
    rows = data.draw(st.integers(1, 20) | st.just(MAX_ROWS))
    gated = data.draw(st.booleans())
    outputs = data.draw(st.lists(st.integers(17, 300), min_size=1, max_size=3))
    outputs = outputs[:1] * 2 if gated else outputs
    norm = data.draw(st.sampled_from([None, "layer_norm", "rms_norm", "gemma_rms_norm"]))
    torch.manual_seed(data.draw(st.integers(0, 2**31)))

    def make(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device="cuda").to(of)

    options = {
        "norm": norm,
        "gated": gated,
        "activation": "silu" if gated else data.draw(st.sampled_from([None, "gelu"])),
    }
    if norm is not None:
        options |= {
            "norm_weight": make(inputs),
            "eps": 1e-6,
            "norm_bias": make(inputs) if norm == "layer_norm" else None,
        }
    if data.draw(st.booleans()):
        options["bias"] = [make(n) for n in outputs]
    if data.draw(st.booleans()):
        wide = data.draw(st.sampled_from([dtype, torch.float32]))
        options["residual"] = make(rows, outputs[0] if gated else sum(outputs), of=wide)
    weights = [random_weight(n, inputs, bits, group, zeros, dtype) for n in outputs]
    assert layer_error(make(rows, inputs), weights, **options) <= 16


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("bits", "group", "outputs", "inputs", "rows"),
    [
        (8, 0, 2048, 8192, 1),  # a warp's part of K takes two passes
        (8, 0, 2048, 8192, 16),  # rows that do not fit together
        (4, 128, 20_000, 512, 1),  # several strips a block
        (4, 128, 20_000, 512, 8),
        (4, 128, 4096, 14_336, 2),
        (4, 64, 4800, 1600, 3),
        (4, 32, 4800, 1600, 9),
    ],
)
def test_layers_of_models(bits: int, group: int, outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = random_weight(outputs, inputs, bits, group, False, dtype)
    x, norm_weight = torch.randn(rows, inputs, device="cuda", dtype=dtype), torch.rand(inputs, device="cuda").to(dtype)
    options = {"norm": "rms_norm", "norm_weight": norm_weight, "pdl": True}
    assert layer_error(x, [weight], **options) <= 8
    names = launched_kernels(lambda: decode_low_bit_linear(x, weight, **options))
    assert names and all("decode_low_bit_linear_kernel" in name for name in names)


@pytest.mark.parametrize(("bits", "group", "zeros"), KINDS)
def test_which_kernel_runs(bits: int, group: int, zeros: bool) -> None:
    """float32, and rows of values that are no multiple of 16 bytes, are left to plain multiply-adds."""
    for dtype, inputs, kernel in [
        (torch.bfloat16, 256, "low_bit"),
        (torch.float16, 256, "low_bit"),
        (torch.float32, 256, "plain"),
        *([(torch.bfloat16, 250, "plain")] if bits == 8 else []),
    ]:
        x, weight = (
            torch.randn(2, inputs, device="cuda", dtype=dtype),
            random_weight(24, inputs, bits, group, zeros, dtype),
        )
        names = launched_kernels(lambda x=x, weight=weight: decode_low_bit_linear(x, weight, backend="cuda"))
        assert len(names) == 1 and kernel in names[0].split("(")[0].split("<")[0]


@pytest.mark.parametrize("bits", [8, 4])
def test_strided_inputs_and_values_that_are_not_aligned(bits: int) -> None:
    torch.manual_seed(0)
    weight = random_weight(40, 256, bits, 64, bits == 4, torch.bfloat16)
    x = torch.randn(256, 3, device="cuda", dtype=torch.bfloat16).T
    expected = decode_low_bit_linear(x.contiguous(), weight, backend="cuda")
    assert torch.equal(decode_low_bit_linear(x, weight, backend="cuda"), expected)
    elsewhere = torch.cat([weight.values.flatten()[:1], weight.values.flatten()])[1:].view_as(weight.values)
    for values in (elsewhere, weight.values.T.contiguous().T):
        assert layer_error(x, [weight._replace(values=values)]) <= 8


@pytest.mark.parametrize("bits", [8, 4])
def test_values_that_are_not_finite_stay_in_their_row(bits: int) -> None:
    torch.manual_seed(0)
    weight = random_weight(100, 512, bits, 128, False, torch.bfloat16)
    x = torch.randn(5, 512, device="cuda", dtype=torch.bfloat16)
    expected = decode_low_bit_linear(x, weight, backend="cuda")
    x[2, 7], x[4, 500] = torch.nan, torch.inf
    actual = decode_low_bit_linear(x, weight, backend="cuda")
    assert torch.equal(actual[[0, 1, 3]], expected[[0, 1, 3]])
    assert actual[2].isnan().all() and not actual[4].isfinite().any()


def test_a_chain_of_dependent_launches() -> None:
    """Each layer reads what the one before has written, with programmatic dependent launch, in a graph."""
    torch.manual_seed(0)
    weights = [random_weight(1024, 1024, (8, 4)[i % 2], 128, False, torch.bfloat16) for i in range(12)]
    x = torch.randn(2, 1024, device="cuda", dtype=torch.bfloat16)
    norm = {"norm": "rms_norm", "norm_weight": torch.ones(1024, device="cuda", dtype=torch.bfloat16)}

    def chain(pdl: bool) -> Tensor:
        y = x
        for weight in weights:
            y = decode_low_bit_linear(y, weight, residual=y, pdl=pdl, backend="cuda", **norm)
        return y

    expected = chain(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = chain(True)
    for _ in range(5):
        graph.replay()
        assert torch.equal(actual, expected)
