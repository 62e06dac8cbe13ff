"""Every raw CPU op against float64, over shapes, strides, dtypes and values that break kernels."""

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuseopt.ops.rms_norm import CAST_ORDERS, cast_dtypes

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SIZES = (0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 100, 257, 1023, 1025, 2500, 5000)
LAYOUTS = ("contiguous", "sliced", "transposed", "broadcast", "shifted")

many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from(FLOATS)
layouts = st.sampled_from(LAYOUTS)
shapes = st.one_of(
    st.tuples(st.sampled_from(SIZES)),
    st.tuples(st.integers(0, 40), st.sampled_from(SIZES)),
    st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(1, 5), st.integers(0, 70)),
)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same shape in another memory layout; the same values, but for "broadcast", which repeats the first slice."""
    if layout == "sliced":
        wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), math.nan)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "broadcast":
        return tensor[:1].expand(tensor.shape)
    if layout == "shifted":
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)
    return tensor


def normal(shape, dtype: torch.dtype, seed: int, layout: str = "contiguous", scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return laid_out((torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype), layout)


def assert_near(
    actual: Tensor, expected: Tensor, *, roundings: float = 8, floor: float = 1.0, maths: torch.dtype | None = None
) -> None:
    """Shape, layout, and |actual - expected| within so many roundings of `maths`, and one of actual's own dtype.

    Args:
        floor: a smaller expected value may be off by as much as one of this size.
        maths: what the op computes in; float64 for a float64 result and float32 for all others unless given.
    """
    assert actual.is_contiguous()
    assert actual.shape == expected.shape
    expected = expected.detach()
    maths = maths or (torch.float64 if actual.dtype == torch.float64 else torch.float32)
    unit = roundings * torch.finfo(maths).eps + 0.51 * torch.finfo(actual.dtype).eps
    tolerance = unit * expected.abs().clamp_min(floor) + torch.finfo(actual.dtype).tiny
    torch.testing.assert_close(actual.isnan(), expected.isnan(), rtol=0, atol=0)
    error = (actual.double() - expected).abs()
    assert not (error > tolerance).any(), f"{(error / tolerance).nan_to_num().max():.3g} times the tolerance"


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * (weight + offset)


def gelu_reference(x: Tensor, approximate: str) -> Tensor:
    if approximate == "none":
        return 0.5 * x * torch.erfc(-x * math.sqrt(0.5))
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def largest_term(g: Tensor, factor: Tensor | None, rstd: Tensor) -> float:
    """How large the terms are that cancel in a norm's gradient: what its rounding errors are proportional to."""
    terms = g.double() * rstd.double().unsqueeze(-1) * (1 if factor is None else factor.detach().double().abs() + 1)
    return terms.abs().max().item() if terms.numel() else 1.0


def gradients(output: Tensor, inputs: list[Tensor], grad_output: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(output, inputs, grad_output))


@many
@given(shapes, dtypes, dtypes, layouts, st.booleans(), st.sampled_from([0.0, 1.0]), seeds)
def test_rms_norm_and_its_gradients_against_float64_in_any_layout(
    cpu_ops, shape, dtype, weight_dtype, layout, has_weight, offset, seed
):
    x = normal(shape, dtype, seed, layout)
    weight = normal(shape[-1:], weight_dtype, seed + 1, layout) if has_weight else None
    before = x.clone()
    output, rstd = cpu_ops.rms_norm_fwd(x, weight, 1e-6, CAST_ORDERS["input"], offset)
    assert output.dtype == dtype

    x64 = x.double().requires_grad_()
    weight64 = weight.double().requires_grad_() if has_weight else None
    expected = rms_norm_reference(x64, weight64, 1e-6, offset)
    assert_near(output, expected)
    assert rstd.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    if shape[-1]:
        assert_near(rstd, torch.rsqrt(x.double().square().mean(-1) + 1e-6))

    g = normal(shape, dtype, seed + 2, layout)
    grad_input, grad_weight = cpu_ops.rms_norm_bwd(g, x, weight, rstd, offset, has_weight)
    inputs = [x64, weight64] if has_weight else [x64]
    expected_grads = gradients(expected, inputs, g.double())
    assert grad_input.dtype == dtype
    assert_near(grad_input, expected_grads[0], floor=largest_term(g, weight64, rstd), maths=rstd.dtype)
    if has_weight:
        assert grad_weight.dtype == weight_dtype
        assert_near(grad_weight, expected_grads[1], floor=largest_term(g, x64, rstd), maths=rstd.dtype)
    else:
        assert grad_weight.shape == (0,)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 63, 768, 3001])
def test_rms_norm_rounds_between_norm_and_weight_as_t5_does(cpu_ops, input_dtype, dtype, columns):
    x = normal((40, columns), input_dtype, 0)
    weight = normal((columns,), dtype, 1)
    output, rstd = cpu_ops.rms_norm_fwd(x, weight, 1e-6, CAST_ORDERS["t5"])
    expected = weight * (x.float() * rstd.unsqueeze(-1)).to(dtype)
    assert output.dtype == dtype
    assert torch.equal(output, expected)


def test_rms_norm_of_values_whose_squares_overflow_half(cpu_ops):
    x = torch.full((2, 64), 7e4)
    output, _ = cpu_ops.rms_norm_fwd(x, torch.ones(64, dtype=torch.float16), 1e-6, CAST_ORDERS["t5"])
    assert torch.equal(output, torch.ones(2, 64, dtype=torch.float16))


@many
@given(shapes, dtypes, dtypes, layouts, st.booleans(), st.booleans(), seeds)
def test_layer_norm_and_its_gradients_against_float64_in_any_layout(
    cpu_ops, shape, dtype, weight_dtype, layout, has_weight, has_bias, seed
):
    x = normal(shape, dtype, seed, layout)
    weight = normal(shape[-1:], weight_dtype, seed + 1, layout) if has_weight else None
    bias = normal(shape[-1:], weight_dtype, seed + 2, layout) if has_bias else None
    output, mean, rstd = cpu_ops.layer_norm_fwd(x, weight, bias, 1e-5, dtype)

    parameters = [None if p is None else p.double().requires_grad_() for p in (weight, bias)]
    x64 = x.double().requires_grad_()
    from_first = x64 - x64.detach()[..., :1]  # so that the reference is exact for constant rows too
    centred = from_first - from_first.mean(-1, keepdim=True)
    expected = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    if has_weight:
        expected = expected * parameters[0]
    if has_bias:
        expected = expected + parameters[1]
    # A column or two of nearly equal values: the variance cancels, which eps only partly covers.
    roundings = 16 if shape[-1] > 7 else 4096
    assert_near(output, expected, roundings=roundings, floor=4.0)
    if shape[-1]:
        assert_near(mean, x.double().mean(-1), floor=x.double().abs().max().item() if x.numel() else 1.0)

    g = normal(shape, dtype, seed + 3, layout)
    results = cpu_ops.layer_norm_bwd(g, x, weight, mean, rstd, has_weight, has_bias)
    inputs = [x64, *(p for p in parameters if p is not None)]
    expected_grads = iter(gradients(expected, inputs, g.double()))
    parameter_dtype = weight_dtype if has_weight else dtype
    wanted = (dtype, weight_dtype if has_weight else None, parameter_dtype if has_bias else None)
    factors = (parameters[0], x64, x64)
    for actual, needed, factor in zip(results, wanted, factors, strict=True):
        if needed is None:
            assert actual.shape == (0,)
            continue
        assert actual.dtype == needed
        floor = max(largest_term(g, factor, rstd), 1.0)
        assert_near(actual, next(expected_grads), roundings=4 * roundings, floor=floor, maths=rstd.dtype)


@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_norms_without_statistics_give_the_same_output(cpu_ops, dtype, weight_dtype):
    x, residual = normal((7, 33), dtype, 0), normal((7, 33), weight_dtype, 1, "transposed")
    weight, bias = normal((33,), weight_dtype, 2), normal((33,), weight_dtype, 3)
    for code in CAST_ORDERS.values():
        output = cpu_ops.rms_norm(x, weight, 1e-6, code, 1.0)
        assert output.dtype == cast_dtypes(code, dtype, weight_dtype)[1]
        assert torch.equal(output, cpu_ops.rms_norm_fwd(x, weight, 1e-6, code, 1.0)[0])
        pair = cpu_ops.add_rms_norm(x, residual, weight, 1e-6, code, 1.0)
        assert all(map(torch.equal, pair, cpu_ops.add_rms_norm_fwd(x, residual, weight, 1e-6, code, 1.0)))
        assert pair[0].dtype == cast_dtypes(code, pair[1].dtype, weight_dtype)[1]
    for output_dtype in (None, torch.float32):
        arguments = (weight, bias, 1e-5, output_dtype)
        output = cpu_ops.layer_norm(x, *arguments)
        assert output.dtype == (output_dtype or dtype)
        assert torch.equal(output, cpu_ops.layer_norm_fwd(x, *arguments)[0])
        pair = cpu_ops.add_layer_norm(x, residual, *arguments)
        assert all(map(torch.equal, pair, cpu_ops.add_layer_norm_fwd(x, residual, *arguments)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_layer_norm_of_constant_rows_is_the_bias(cpu_ops, dtype):
    x = normal((20, 1), dtype, 0).expand(20, 1003)
    bias = normal((1003,), dtype, 1)
    output, mean, _ = cpu_ops.layer_norm_fwd(x, None, bias, 1e-5, dtype)
    assert torch.equal(output, bias.expand(20, 1003))
    assert torch.equal(mean, x[:, 0].to(mean.dtype))


@many
@given(shapes, dtypes, layouts, st.sampled_from(["none", "tanh"]), st.sampled_from([None, *FLOATS]), seeds)
def test_gelu_and_its_gradient_against_float64_in_any_layout(
    cpu_ops, shape, dtype, layout, approximate, bias_dtype, seed
):
    x = normal(shape, dtype, seed, layout)
    bias = None if bias_dtype is None else normal(shape[-1:], bias_dtype, seed + 1, layout)
    x64 = (x.double() if bias is None else x.double() + bias.double()).requires_grad_()
    expected = gelu_reference(x64, approximate)
    assert_near(cpu_ops.gelu_fwd(x, approximate == "tanh", bias, dtype), expected, roundings=16, floor=0.05)

    g = normal(shape, dtype, seed + 2, layout)
    (expected_grad,) = gradients(expected, [x64], g.double())
    # The slope crosses zero near -0.75, so its error is measured against the gradient that comes in. The tanh form's
    # reference cancels in 1 - sigmoid, which float64 results are near enough to notice.
    roundings = 64 if torch.float64 in (dtype, bias_dtype) else 8
    assert_near(cpu_ops.gelu_bwd(g, x, approximate == "tanh", bias), expected_grad, roundings=roundings, floor=8.0)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gelu_keeps_its_relative_accuracy_for_negative_input(cpu_ops, approximate, dtype):
    x = torch.linspace(-8, -1, 20001, dtype=torch.float64).to(dtype)
    expected = gelu_reference(x.double(), approximate)
    relative = (cpu_ops.gelu_fwd(x, approximate == "tanh").double() / expected - 1).abs().max()
    assert relative < 200 * torch.finfo(dtype).eps


GATED = {
    "gelu": lambda x: gelu_reference(x, "none"),
    "gelu_tanh": lambda x: gelu_reference(x, "tanh"),
    "silu": lambda x: x * torch.sigmoid(x),
    "relu": torch.relu,
}
GATED_CODES = {name: code for code, name in enumerate(GATED)}


@many
@given(shapes, dtypes, dtypes, layouts, layouts, st.sampled_from(list(GATED)), seeds)
def test_gated_activation_and_its_gradients_against_float64_in_any_layout(
    cpu_ops, shape, dtype, up_dtype, layout, up_layout, activation, seed
):
    gate, up = normal(shape, dtype, seed, layout), normal(shape, up_dtype, seed + 1, up_layout)
    wide = torch.promote_types(torch.promote_types(dtype, up_dtype), torch.float32)
    gate64, up64 = gate.double().requires_grad_(), up.double().requires_grad_()
    expected = GATED[activation](gate64) * up64
    output = cpu_ops.gated_activation_fwd(gate, up, GATED_CODES[activation], wide)
    assert output.dtype == wide
    assert_near(output, expected, roundings=32)

    g = normal(shape, wide, seed + 2, layout)
    grads = cpu_ops.gated_activation_bwd(g, gate, up, GATED_CODES[activation], wide)
    assert (grads[0].dtype, grads[1].dtype) == (dtype, up_dtype)
    for grad, expected_grad in zip(grads, gradients(expected, [gate64, up64], g.double()), strict=True):
        # Slopes cross zero, and the tanh reference cancels in float64, as that of GELU does.
        assert_near(grad, expected_grad, roundings=64, floor=64.0, maths=wide)


@many
@given(shapes, st.sampled_from(FLOATS[1:3]), layouts, st.sampled_from(list(GATED)), seeds)
def test_gated_activation_rounds_before_the_product(cpu_ops, shape, dtype, layout, activation, seed):
    gate, up, g = (normal(shape, dtype, seed + i, layout) for i in range(3))
    code = GATED_CODES[activation]
    activated = cpu_ops.gated_activation_fwd(gate, torch.ones_like(gate), code)
    assert torch.equal(cpu_ops.gated_activation_fwd(gate, up, code), activated * up)
    grad_gate, grad_up = cpu_ops.gated_activation_bwd(g, gate, up, code)
    assert torch.equal(grad_up, g * activated)
    assert torch.equal(grad_gate, cpu_ops.gated_activation_bwd(g * up, gate, torch.ones_like(up), code)[0])


@many
@given(shapes, dtypes, layouts, st.sampled_from([None, *FLOATS]), st.sampled_from([1.0, 0.125]), st.data(), seeds)
def test_softmax_and_its_gradient_against_float64_with_any_mask(
    cpu_ops, shape, dtype, layout, mask_dtype, scale, data, seed
):
    x = normal(shape, dtype, seed, layout)
    mask = None
    if mask_dtype is not None:
        dims = data.draw(st.integers(1, len(shape)))
        mask_shape = [data.draw(st.sampled_from([1, size])) for size in shape[-dims:]]
        mask = normal(mask_shape, mask_dtype, seed + 1)
        mask[mask < -3] = -math.inf
    x64 = x.double().requires_grad_()
    logits = x64 * scale if mask is None else x64 * scale + mask.double()
    expected = torch.softmax(logits, -1)
    output = cpu_ops.softmax_fwd(x, mask, scale, dtype)
    # exp() turns the absolute rounding error of a logit, up to 20 here, into a relative one.
    assert_near(output, expected, roundings=40, floor=1e-4)

    g = normal(shape, dtype, seed + 2, layout)
    y = output.double()
    expected_grad = scale * y * (g.double() - (g.double() * y).sum(-1, keepdim=True))
    assert_near(cpu_ops.softmax_bwd(g, output, scale, dtype), expected_grad, floor=8.0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_softmax_of_rows_without_a_finite_value(cpu_ops, dtype):
    x = torch.zeros(6, 33, dtype=dtype)
    x[0] = -math.inf
    x[1, 5] = math.inf
    x[2, 7] = math.nan
    x[3, 1:] = -math.inf
    x[4] = torch.finfo(dtype).max
    x[5] = torch.finfo(dtype).min
    expected = torch.softmax(x.double(), -1)
    assert_near(cpu_ops.softmax_fwd(x, None, 1.0, dtype), expected)
    mask = torch.zeros(6, 1, dtype=dtype)
    mask[5] = -math.inf
    assert_near(cpu_ops.softmax_fwd(x, mask, 1.0, dtype), torch.softmax(x.double() + mask.double(), -1))


def test_softmax_of_a_very_long_row(cpu_ops):
    x = normal((2, 262_147), torch.float32, 0)
    assert_near(
        cpu_ops.softmax_fwd(x, None, 1.0, torch.float32), torch.softmax(x.double(), -1), roundings=40, floor=1e-9
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_special_values(cpu_ops, approximate, dtype):
    big = torch.finfo(dtype).max
    x = torch.tensor([math.nan, -math.inf, math.inf, big, -big, 0.0, -0.0, 1e-30, -1e-30] * 5, dtype=dtype)
    output = cpu_ops.gelu_fwd(x, approximate == "tanh").view(5, 9)
    assert (output[0].nan_to_num(1e9) == output.nan_to_num(1e9)).all()
    first = output[0]
    assert first[0].isnan()
    assert first[1].isnan()  # -inf * 0, as in torch
    assert first[2] == math.inf
    assert first[3] == big
    assert first[4:7].abs().max() == 0
    assert torch.equal(first[7:], (0.5 * x[7:9].double()).to(dtype))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS)
def test_norms_of_a_row_with_a_value_that_is_not_finite(cpu_ops, dtype, value):
    x = normal((3, 50), dtype, 0)
    x[1, 3] = value
    weight = normal((50,), dtype, 1)
    rms, _ = cpu_ops.rms_norm_fwd(x, weight, 1e-6)
    layer, _, _ = cpu_ops.layer_norm_fwd(x, weight, None, 1e-5, dtype)
    assert torch.equal(rms.isnan(), F.rms_norm(x, (50,), weight, 1e-6).isnan())
    assert torch.equal(layer.isnan(), F.layer_norm(x, (50,), weight).isnan())


@pytest.mark.parametrize("dtype", FLOATS)
def test_error_is_no_larger_than_torchs_own(cpu_ops, dtype):
    x = normal((512, 1000), dtype, 0)
    weight, bias = normal((1000,), dtype, 1), normal((1000,), dtype, 2)
    x64, weight64, bias64 = x.double(), weight.double(), bias.double()
    cases = {
        "rms_norm": (
            cpu_ops.rms_norm(x, weight, 1e-6),
            F.rms_norm(x, (1000,), weight, 1e-6),
            rms_norm_reference(x64, weight64, 1e-6, 0.0),
        ),
        "layer_norm": (
            cpu_ops.layer_norm(x, weight, bias, 1e-5),
            F.layer_norm(x, (1000,), weight, bias),
            F.layer_norm(x64, (1000,), weight64, bias64),
        ),
        "softmax": (cpu_ops.softmax_fwd(x), torch.softmax(x, -1), torch.softmax(x64, -1)),
        "gelu": (cpu_ops.gelu_fwd(x), F.gelu(x), gelu_reference(x64, "none")),
        "gelu_tanh": (
            cpu_ops.gelu_fwd(x, True),
            F.gelu(x, approximate="tanh"),
            gelu_reference(x64, "tanh"),
        ),
    }
    for name, (actual, theirs, exact) in cases.items():
        if dtype == torch.float64:
            torch.testing.assert_close(actual, exact, rtol=1e-13, atol=1e-14)
            continue
        error, their_error = ((y.double() - exact).abs().max().item() for y in (actual, theirs))
        assert error <= 1.05 * their_error, f"{name}: {error:.3g} against {their_error:.3g}"


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="needs what wheels are made for")
def test_the_library_of_a_wheel_is_as_exact(tmp_path):
    """Its vectors are half as long where the processor has AVX-512; and a loop without any adds up one by one."""
    code = (
        "import pathlib, sys\n"
        "import pytest\n"
        "from fuseopt.build import loader, make_prebuilt, prebuilt\n"
        "prebuilt.FOLDER = pathlib.Path(sys.argv[1])\n"
        "make_prebuilt.build(prebuilt.FOLDER, [])\n"
        "status = pytest.main(['-q', '-p', 'no:cacheprovider', '-k', 'torchs_own', sys.argv[2]])\n"
        "print(loader.load('cpu').origin)\n"
        "sys.exit(status)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "_lib"), __file__]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(FLOATS)} passed" in result.stdout
    assert result.stdout.splitlines()[-1] == "prebuilt"


def no_repeat_ngram(cpu_ops, input_ids: Tensor, scores: Tensor, n: int) -> Tensor:
    return cpu_ops.process_logits(input_ids, scores, n)


def encoder_no_repeat_ngram(cpu_ops, encoder_input_ids: Tensor, input_ids: Tensor, scores: Tensor, n: int) -> Tensor:
    return cpu_ops.process_logits(input_ids, scores, 0, 1.0, 1.0, None, encoder_input_ids, n)


def ngram_reference(source: Tensor, input_ids: Tensor, scores: Tensor, n: int) -> Tensor:
    """The rule in plain Python: ban what follows each place of `source` where the last n - 1 ids stand."""
    result = scores.clone()
    rows_per_source = max(1, scores.shape[0] // max(1, source.shape[0]))
    for row in range(scores.shape[0]):
        ids = source[row // rows_per_source].tolist()
        history = input_ids[row].tolist()
        if len(history) < n - 1:
            continue
        prefix = history[len(history) - (n - 1) :]
        for i in range(len(ids) - n + 1):
            token = ids[i + n - 1]
            if ids[i : i + n - 1] == prefix and 0 <= token < scores.shape[1]:
                result[row, token] = -math.inf
    return result


@many
@given(
    st.integers(0, 9),
    st.integers(0, 40),
    st.integers(1, 50),
    st.integers(1, 5),
    st.integers(1, 60),
    dtypes,
    layouts,
    st.sampled_from([torch.int32, torch.int64]),
    seeds,
)
def test_no_repeat_ngram(cpu_ops, rows, length, vocab, n, token_range, dtype, layout, id_dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    # Ids reach beyond the vocabulary: those are ignored, never written.
    ids = torch.randint(0, token_range, (rows, length), generator=generator).to(id_dtype)
    ids = ids if layout == "sliced" else laid_out(ids, layout)
    scores = normal((rows, vocab), dtype, seed, layout)
    before = scores.clone()
    output = no_repeat_ngram(cpu_ops, ids, scores, n)
    expected = ngram_reference(ids, ids, scores, n) if length >= n else scores
    assert torch.equal(output, expected)
    assert output.dtype == dtype
    assert torch.equal(scores, before)
    assert output.is_contiguous()
    assert output.data_ptr() != scores.data_ptr() or output.numel() == 0


@many
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 30),
    st.integers(0, 8),
    st.integers(1, 5),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([torch.int32, torch.int64]),
    seeds,
)
def test_encoder_no_repeat_ngram(cpu_ops, batch, beams, encoder_length, length, n, encoder_dtype, id_dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    encoder_ids = torch.randint(0, 6, (batch, encoder_length), generator=generator).to(encoder_dtype)
    ids = torch.randint(0, 6, (batch * beams, length), generator=generator).to(id_dtype)
    scores = normal((batch * beams, 5), torch.float32, seed)
    output = encoder_no_repeat_ngram(cpu_ops, encoder_ids, ids, scores, n)
    assert torch.equal(output, ngram_reference(encoder_ids, ids, scores, n))


@pytest.mark.parametrize("length", [1023, 1024, 1025, 1030, 4096])
def test_no_repeat_ngram_of_long_histories(cpu_ops, length):
    ids = torch.randint(0, 9, (3, length), generator=torch.Generator().manual_seed(length))
    scores = torch.zeros(3, 9)
    assert torch.equal(no_repeat_ngram(cpu_ops, ids, scores, 3), ngram_reference(ids, ids, scores, 3))


def test_no_repeat_ngram_can_ban_everything(cpu_ops):
    output = no_repeat_ngram(cpu_ops, torch.arange(7).expand(2, 7), torch.zeros(2, 7), 1)
    assert (output == -math.inf).all()


@pytest.mark.parametrize("ngram_size", [-1, -2])
def test_no_repeat_ngram_refuses_a_negative_size(cpu_ops, ngram_size):
    with pytest.raises(RuntimeError, match="must not be negative"):
        no_repeat_ngram(cpu_ops, torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3), ngram_size)


@pytest.mark.parametrize(
    ("input_ids", "scores", "message"),
    [
        (torch.tensor([[5, -2, 5]]), torch.zeros(1, 9), "token id -2 would be penalised or banned but is negative"),
        (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(1, 9), "2 rows of input_ids for 1 rows of scores"),
        (torch.zeros(1, 3), torch.zeros(1, 9), "input_ids must be int64 or int32 on cpu, not float32"),
        (
            torch.zeros(1, 3, dtype=torch.int64),
            torch.zeros(1, 9, dtype=torch.int64),
            "scores must be .* on cpu, not int64",
        ),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(1, 9), "two dimensions"),
    ],
)
def test_no_repeat_ngram_refuses_bad_input(cpu_ops, input_ids, scores, message):
    with pytest.raises(RuntimeError, match=message):
        no_repeat_ngram(cpu_ops, input_ids, scores, 2)


@pytest.mark.parametrize(("batch", "rows"), [(2, 3), (2, 1), (0, 1)])
def test_encoder_rows_must_divide_the_rows(cpu_ops, batch, rows):
    encoder_ids, ids = torch.zeros(batch, 4, dtype=torch.int64), torch.zeros(rows, 4, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="not a multiple"):
        encoder_no_repeat_ngram(cpu_ops, encoder_ids, ids, torch.zeros(rows, 5), 2)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("rms_norm_fwd", (torch.zeros(2, 3), torch.zeros(4), 1e-6), "weight has 4"),
        ("rms_norm_fwd", (torch.zeros(()), None, 1e-6), "no dimension"),
        ("rms_norm_fwd", (torch.zeros(2, 3, dtype=torch.int32), None, 1e-6), "input must be .* on cpu, not int32"),
        ("rms_norm", (torch.zeros(2, 3), torch.zeros(1, 3), 1e-6), "weight has 2 dimensions"),
        ("rms_norm", (torch.zeros(2, 3), None, 1e-6, 3), "cast_order must be 0, 1 or 2, not 3"),
        ("add_rms_norm", (torch.zeros(2, 3), torch.zeros(1, 3), None, 1e-6), "residual has not the shape of input"),
        ("layer_norm_fwd", (torch.zeros(2, 3), None, torch.zeros(2), 1e-6, torch.float32), "bias has 2"),
        ("gelu_fwd", (torch.zeros(2, 3), False, torch.zeros(2)), "bias has 2"),
        (
            "gated_activation_fwd",
            (torch.zeros(2, 3), torch.zeros(2, 3), 4),
            "activation must be from 0 to 3, got 4",
        ),
        (
            "gated_activation_fwd",
            (torch.zeros(2, 3), torch.zeros(3, 2), 2),
            "up has not the shape of gate",
        ),
        (
            "gated_activation_bwd",
            (torch.zeros(1, 3), torch.zeros(2, 3), torch.zeros(2, 3), 2),
            "grad_output has not the shape of gate",
        ),
        ("softmax_fwd", (torch.zeros(2, 3), torch.zeros(3, 1), 1.0, torch.float32), "does not broadcast"),
        ("softmax_fwd", (torch.zeros(2, 3), torch.zeros(1, 2, 3), 1.0, torch.float32), "does not broadcast"),
    ],
)
def test_mismatched_arguments_are_refused(cpu_ops, name, arguments, message):
    with pytest.raises(RuntimeError, match=message):
        getattr(cpu_ops, name)(*arguments)


def test_results_are_bitwise_the_same_for_any_number_of_threads(cpu_ops):
    x, g = normal((777, 513), torch.float32, 0), normal((777, 513), torch.float32, 1)
    weight = normal((513,), torch.float32, 2)
    ids = torch.randint(0, 20, (777, 30))

    def everything() -> list[Tensor]:
        _, rstd = rms = cpu_ops.rms_norm_fwd(x, weight, 1e-6)
        _, mean, layer_rstd = layer = cpu_ops.layer_norm_fwd(x, weight, weight, 1e-5, torch.float32)
        return [
            *rms,
            *layer,
            *cpu_ops.rms_norm_bwd(g, x, weight, rstd, 0.0, True),
            *cpu_ops.layer_norm_bwd(g, x, weight, mean, layer_rstd, True, True),
            cpu_ops.gelu_fwd(x, True, weight),
            cpu_ops.gelu_bwd(g, x, False, weight),
            cpu_ops.gated_activation_fwd(g, x, 2),
            *cpu_ops.gated_activation_bwd(g, x, x, 1),
            cpu_ops.softmax_fwd(x, weight, 0.5, torch.float32),
            cpu_ops.softmax_bwd(g, x, 0.5, torch.float32),
            cpu_ops.process_logits(ids, x, 2, 1.3, 0.7, ids[0], ids[:7], 1),
        ]

    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            results.append(everything())
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_the_library_does_not_depend_on_python(cpu_ops):
    from fuseopt.build import loader

    if sys.platform != "linux":
        pytest.skip("reads the library with readelf")
    dynamic = subprocess.run(
        ["readelf", "--dynamic", str(loader.state("cpu").path)], capture_output=True, text=True, check=True
    ).stdout
    assert "libtorch_cpu" in dynamic
    assert "python" not in dynamic
