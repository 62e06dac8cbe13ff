"""decode_packed_linear's CUDA kernels against float64, at the sizes they are for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fuseopt.ops import decode_packed_linear, pack_for_cuda
from fuseopt.ops.decode.packed_linear import decode_packed_linear_reference
from fuseopt.ops.dequantize_packed import dequantize_packed
from fuseopt.ops.low_bit import MAX_ROWS, LowBitWeight, dequantize
from fuseopt.ops.packed_weight import DTYPES, PackedWeight, unpacked
from tests.ops.cases import SANITIZED, error, examples, launched_kernels, to_float64

pytestmark = pytest.mark.gpu

KINDS = [(8, 0, False), (4, 32, False), (4, 64, True), (4, 128, False), (4, 128, True)]


def random_weight(outputs: int, inputs: int, bits: int, group: int, zeros: bool, dtype: torch.dtype) -> PackedWeight:
    """All values and zero points that the format has, and scales of both signs."""
    if bits == 8:
        values = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device="cuda")
        weight = LowBitWeight(values, torch.rand(outputs, 1, device="cuda") / 64, None, 8, inputs)
    else:
        values = torch.randint(-(2**31), 2**31, (outputs, inputs // 8), dtype=torch.int32, device="cuda")
        scales = (torch.randn(outputs, inputs // group, device="cuda") / 8).to(dtype)
        weight = LowBitWeight(values, scales, torch.randint_like(scales, 16).byte() if zeros else None, 4, group)
    return pack_for_cuda(weight, dtype)


def layer_error(input: Tensor, weights: list[PackedWeight], **options) -> float:
    """The kernels' largest error over the largest output, in units of the input dtype's eps."""
    actual = decode_packed_linear(input, weights, **options, backend="cuda")
    exact = {name: tree_map_only(Tensor, to_float64, option) for name, option in options.items()}
    expected = decode_packed_linear_reference(to_float64(input), weights, **exact)
    return error([actual], [expected]) / torch.finfo(input.dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "group", "zeros"), KINDS)
@given(data=st.data())
@settings(max_examples=examples(40), deadline=None)
def test_layers_of_any_size(bits: int, group: int, zeros: bool, dtype: torch.dtype, data: st.DataObject) -> None:
    step = group or 8
    inputs = step * data.draw(st.integers(1, 4096 // max(step, 16)))
    rows = data.draw(st.integers(1, 20) | st.integers(17, MAX_ROWS))
    gated = data.draw(st.booleans())
    outputs = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=3))
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


MODEL_LAYERS = [
    (8, 0, 2048, 8192, 1),
    (8, 0, 2048, 8192, 16),  # rows that do not fit together
    (8, 0, 2048, 2048, 1),
    (4, 128, 20_000, 512, 1),  # several strips a block
    (4, 128, 20_000, 512, 8),
    (4, 128, 4096, 14_336, 2),
    (4, 64, 4800, 1600, 3),
    (4, 32, 4800, 1600, 9),
]
of_models = pytest.mark.parametrize(("bits", "group", "outputs", "inputs", "rows"), MODEL_LAYERS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@of_models
def test_layers_of_models(bits: int, group: int, outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = random_weight(outputs, inputs, bits, group, False, dtype)
    x, norm_weight = torch.randn(rows, inputs, device="cuda", dtype=dtype), torch.rand(inputs, device="cuda").to(dtype)
    for options in ({"norm": "rms_norm", "norm_weight": norm_weight}, {}):
        assert layer_error(x, [weight], **options, pdl=True) <= 8


@of_models
def test_kernels_that_run(bits: int, group: int, outputs: int, inputs: int, rows: int) -> None:
    """Apart from the test above, which compute-sanitizer runs: it keeps the profiler from seeing kernels."""
    weight = random_weight(outputs, inputs, bits, group, False, torch.bfloat16)
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    for options in ({"norm": "rms_norm", "norm_weight": x[0]}, {}):
        names = launched_kernels(lambda o=options: decode_packed_linear(x, weight, **o, pdl=True, backend="cuda"))
        assert (names or SANITIZED) and all("decode_packed_" in name or "skinny_mma" in name for name in names)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("bits", "group", "outputs", "inputs", "rows"),
    [
        (8, 0, (2048, 512, 512), 2048, 17),
        (8, 0, (1600,), 6400, 64),
        (8, 0, (20_000,), 520, 33),
        (4, 128, (4096,), 14_336, 32),  # blocks of a cluster share K
        (4, 128, (20_000,), 512, 48),  # a block has all of K
        (4, 64, (4800,), 1600, 31),
    ],
)
def test_many_rows(bits: int, group: int, outputs: tuple[int, ...], inputs: int, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = [random_weight(n, inputs, bits, group, False, dtype) for n in outputs]
    # Products of the gate and the other half stay below float16's largest value.
    x = torch.randn(rows, inputs, device="cuda", dtype=dtype) / 16
    biases = [torch.randn(n, device="cuda").to(dtype) for n in outputs]
    residual = torch.randn(rows, sum(outputs), device="cuda")
    gated = {"gated": True, "activation": "silu", "bias": [biases[0]] * 2}
    calls = [(weights, {"bias": biases, "residual": residual}), ([weights[0], weights[0]], gated)]
    for read, options in calls:
        assert layer_error(x, read, **options, pdl=True) <= 8
        names = launched_kernels(lambda w=read, o=options: decode_packed_linear(x, w, **o, pdl=True, backend="cuda"))
        assert len(names) == 1 and "decode_packed_tiles_kernel" in names[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "group", "zeros"), KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 128), (40, 384), (300, 4096)])
def test_dequantised_weights(bits: int, group: int, zeros: bool, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = random_weight(outputs, inputs, bits, group, zeros, dtype)
    expected = dequantize(unpacked(weight), dtype)
    assert launched_kernels(lambda: dequantize_packed(weight))
    assert torch.equal(dequantize_packed(weight), expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_strided_inputs_and_data_that_is_not_aligned(bits: int) -> None:
    torch.manual_seed(0)
    weight = random_weight(40, 256, bits, 64, bits == 4, torch.bfloat16)
    x = torch.randn(256, 3, device="cuda", dtype=torch.bfloat16).T
    expected = decode_packed_linear(x.contiguous(), weight, backend="cuda")
    assert torch.equal(decode_packed_linear(x, weight, backend="cuda"), expected)
    elsewhere = torch.cat([weight.data.flatten()[:1], weight.data.flatten()])[1:].view_as(weight.data)
    for data in (elsewhere, weight.data.T.contiguous().T):
        assert torch.equal(decode_packed_linear(x, weight._replace(data=data), backend="cuda"), expected)
    shifted = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(3, 256)
    assert torch.equal(decode_packed_linear(shifted, weight, backend="cuda"), expected)


@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("bits", [8, 4])
def test_values_that_are_not_finite_stay_in_their_row(bits: int, rows: int) -> None:
    torch.manual_seed(0)
    weight = random_weight(100, 512, bits, 128, False, torch.bfloat16)
    x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
    expected = decode_packed_linear(x, weight, backend="cuda")
    x[2, 7], x[4, 500] = torch.nan, torch.inf
    actual = decode_packed_linear(x, weight, backend="cuda")
    others = [row for row in range(rows) if row not in (2, 4)]
    assert torch.equal(actual[others], expected[others])
    assert actual[2].isnan().all() and not actual[4].isfinite().any()


def test_a_chain_of_dependent_launches() -> None:
    """Each layer reads what the one before has written, with programmatic dependent launch, in a graph."""
    torch.manual_seed(0)
    weights = [random_weight(1024, 1024, (8, 4)[i % 2], 128, False, torch.bfloat16) for i in range(12)]
    x = torch.randn(2, 1024, device="cuda", dtype=torch.bfloat16)
    norm = {"norm": "rms_norm", "norm_weight": torch.ones(1024, device="cuda", dtype=torch.bfloat16)}

    def chain(pdl: bool) -> Tensor:
        y = x
        for i, weight in enumerate(weights):
            prefetch = [weights[(i + 2) % 12].data] if pdl else []
            y = decode_packed_linear(y, weight, residual=y, pdl=pdl, prefetch=prefetch, backend="cuda", **norm)
        return y

    expected = chain(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = chain(True)
    for _ in range(5):
        graph.replay()
        assert torch.equal(actual, expected)


@pytest.mark.skipif("torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0)", reason="needs sm_90")
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("bits", "norm", "gated", "outputs", "inputs"),
    [
        (8, "rms_norm", False, 3080, 2048),
        (4, "layer_norm", False, 4805, 1600),
        (8, None, False, 1600, 6400),
        (4, None, False, 2040, 8192),
        (8, None, False, 4096, 4096),
        (4, "rms_norm", False, 6144, 4096),
        (4, "gemma_rms_norm", True, 8190, 2048),
        (8, None, True, 3000, 1024),
        (8, "layer_norm", False, 2500, 5120),
        (8, "rms_norm", False, 40_000, 1024),
        (8, "rms_norm", False, 6144, 4096),  # through rings
        (8, "rms_norm", True, 8200, 2048),
        (8, None, False, 4090, 14_336),
    ],
)
def test_one_row(bits: int, norm: str | None, gated: bool, outputs: int, inputs: int, zeros: bool) -> None:
    if bits == 8 and zeros:
        pytest.skip("8 bits have no zero points")
    torch.manual_seed(0)
    dtype = torch.bfloat16
    group = 128 if inputs % 128 == 0 else 64
    weights = [random_weight(outputs, inputs, bits, group, zeros, dtype) for _ in range(1 + gated)]
    x, of_norm = torch.randn(3, 1, inputs, device="cuda", dtype=dtype), {}
    if norm is not None:
        of_norm = {"norm": norm, "norm_weight": torch.randn(inputs, device="cuda", dtype=dtype)}
    if norm == "layer_norm":
        of_norm["norm_bias"] = torch.randn(inputs, device="cuda", dtype=dtype)
        x[1] += 40  # far from zero: sums of squares say little of the deviations
    options = of_norm | {"gated": gated, "activation": "silu" if gated else None}
    options["residual"] = torch.randn(1, outputs, device="cuda", dtype=dtype)
    for row in x:
        assert layer_error(row, weights, **options, pdl=True) <= 8
    names = launched_kernels(lambda: decode_packed_linear(x[0], weights, **options, pdl=True, backend="cuda"))
    assert len(names) == 1 and "decode_packed_row_kernel" in names[0]


@pytest.mark.skipif("torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0)", reason="needs sm_90")
@pytest.mark.parametrize("norm", [None, "rms_norm", "layer_norm"])
@pytest.mark.parametrize(("bits", "group"), [(8, 0), (4, 128)])
def test_small_values_of_one_row_beside_large_ones(bits: int, group: int, norm: str | None) -> None:
    """Products with digits are exact: a float32 residual shows more than 16 bits of them."""
    torch.manual_seed(0)
    dtype, outputs, inputs = torch.bfloat16, 6100, 2048
    low = unpacked(random_weight(outputs, inputs, bits, group, False, dtype))
    low.values[:, : 8 if bits == 8 else 1] = 0 if bits == 8 else -2004318072  # the first 8 inputs count as nothing
    x, of_norm = torch.randn(1, inputs, device="cuda", dtype=dtype), {}
    x[0, 3] = 10_000
    if norm is not None:
        of_norm = {"norm": norm, "norm_weight": torch.randn(inputs, device="cuda", dtype=dtype)}
    residual = torch.zeros(1, outputs, device="cuda")
    assert layer_error(x, [pack_for_cuda(low, dtype)], **of_norm, residual=residual) <= 0.1


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_one_row_that_is_not_finite(bits: int, value: float) -> None:
    torch.manual_seed(0)
    weight = random_weight(6100, 2048, bits, 128, False, torch.bfloat16)
    x = torch.randn(1, 2048, device="cuda", dtype=torch.bfloat16)
    x[0, 1500] = value
    assert not decode_packed_linear(x, weight, backend="cuda").isfinite().any()
