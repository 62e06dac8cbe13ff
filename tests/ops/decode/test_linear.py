"""decode_linear against transformers' own layers, and the CUDA kernels against float64 at the sizes they are for."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from transformers import GPT2Config, T5Config
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.t5.modeling_t5 import T5LayerFF, T5LayerNorm
from transformers.pytorch_utils import Conv1D

from fuseopt.errors import BackendError
from fuseopt.ops import decode_linear
from fuseopt.ops.decode import linear
from fuseopt.ops.decode.linear import ACTIVATIONS, FEW_ROWS, MAX_ROWS, NORMS, decode_linear_reference, is_fast
from tests.ops.cases import RawCalls, error, needs_sm90, to_float64

HALVES = (torch.bfloat16, torch.float16)


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5 + (parameter.dim() == 1))
    return module.requires_grad_(False)


def test_gpt2_feed_forward() -> None:
    torch.manual_seed(0)
    mlp = randomised(GPT2MLP(40, GPT2Config(n_embd=24, resid_pdrop=0.0)))
    norm = randomised(nn.LayerNorm(24))
    x = torch.randn(3, 24)
    hidden = decode_linear(
        x,
        mlp.c_fc.weight.T,
        mlp.c_fc.bias,
        norm="layer_norm",
        norm_weight=norm.weight,
        norm_bias=norm.bias,
        eps=norm.eps,
        activation="gelu_tanh",
    )
    output = decode_linear(hidden, mlp.c_proj.weight.T, mlp.c_proj.bias, residual=x)
    torch.testing.assert_close(output, x + mlp(norm(x)))


@pytest.mark.parametrize("feed_forward", ["relu", "gated-gelu"])
def test_t5_feed_forward(feed_forward: str) -> None:
    torch.manual_seed(0)
    layer = randomised(T5LayerFF(T5Config(d_model=24, d_ff=40, feed_forward_proj=feed_forward, dropout_rate=0.0)))
    dense, x = layer.DenseReluDense, torch.randn(3, 24)
    gated = feed_forward != "relu"
    hidden = decode_linear(
        x,
        [dense.wi_0.weight, dense.wi_1.weight] if gated else dense.wi.weight,
        norm="rms_norm",
        norm_weight=layer.layer_norm.weight,
        eps=layer.layer_norm.variance_epsilon,
        activation="gelu_tanh" if gated else "relu",
        gated=gated,
    )
    torch.testing.assert_close(decode_linear(hidden, dense.wo.weight, residual=x), layer(x))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_t5_norm_keeps_its_cast_order(dtype: torch.dtype) -> None:
    """An identity for a weight lets the norm's own result through: to the bit, also from a float32 residual stream."""
    torch.manual_seed(0)
    norm = randomised(T5LayerNorm(64)).to(dtype)
    for x in (torch.randn(5, 64, dtype=dtype), torch.randn(5, 64)):
        output = decode_linear(x, torch.eye(64, dtype=dtype), norm="rms_norm", norm_weight=norm.weight, eps=1e-6)
        assert torch.equal(output, norm(x))


def test_several_weights_stand_side_by_side() -> None:
    torch.manual_seed(0)
    x, weights, biases = torch.randn(2, 1, 8), [torch.randn(5, 8) for _ in range(3)], [torch.randn(5) for _ in range(3)]
    expected = torch.cat([F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)], -1)
    torch.testing.assert_close(decode_linear(x, weights, biases), expected)


def test_a_float32_residual_stream_stays_float32() -> None:
    x, weight = torch.randn(2, 8).half(), torch.randn(4, 8).half()
    assert decode_linear(x, weight).dtype == torch.float16
    assert decode_linear(x, weight, residual=torch.randn(2, 4)).dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ({"weight": torch.zeros(3, 5)}, {}, r"weight must have shape \(3, 4\)"),
        ({"weight": [torch.zeros(3, 4), torch.zeros(2, 5)]}, {}, "weight must have shape"),
        ({"weight": [torch.zeros(3, 4), torch.zeros(2, 4)]}, {"activation": "silu", "gated": True}, "have shape"),
        ({"weight": [torch.zeros(3, 4), torch.zeros(2, 4)], "bias": [torch.zeros(3)] * 2}, {}, "bias must have shape"),
        ({"weight": [torch.zeros(3, 4), torch.zeros(3, 4).half()]}, {}, "one dtype"),
        ({"weight": []}, {}, "one to three weights"),
        ({"bias": torch.zeros(2)}, {}, "bias must have shape"),
        ({"bias": [torch.zeros(3)] * 2}, {}, "2 biases for 1 weights"),
        ({}, {"residual": torch.zeros(2, 4)}, "residual must have shape"),
        ({}, {"norm": "batch_norm"}, "norm must be None"),
        ({}, {"norm_weight": torch.zeros(4)}, "need a norm"),
        ({}, {"norm": "layer_norm", "norm_weight": torch.zeros(3)}, "norm_weight must have shape"),
        ({}, {"norm": "rms_norm", "norm_bias": torch.zeros(4)}, "no bias"),
        ({}, {"norm": "gemma_rms_norm", "norm_bias": torch.zeros(4)}, "gemma_rms_norm has no bias"),
        ({}, {"activation": "tanh"}, "activation must be None"),
        ({}, {"gated": True}, "gated takes two weights"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict, options: dict, message: str) -> None:
    arguments = {"input": torch.zeros(2, 4), "weight": torch.zeros(3, 4), **arguments}
    with pytest.raises(ValueError, match=message):
        decode_linear(**arguments, **options)


def test_a_gradient_comes_from_the_reference() -> None:
    x, weight = torch.randn(2, 4), torch.randn(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(decode_linear(x, weight).sum(), weight)
    torch.testing.assert_close(gradient, x.sum(0).expand(3, 4))


@pytest.mark.gpu
def test_the_kernels_refuse_gradients_and_many_rows() -> None:
    weight = torch.randn(3, 4, device="cuda")
    with pytest.raises(BackendError, match="autograd"):
        decode_linear(torch.randn(2, 4, device="cuda"), weight.clone().requires_grad_(), backend="cuda")
    many = torch.randn(MAX_ROWS + 1, 4, device="cuda")
    with pytest.raises(BackendError, match="rows at most"):
        decode_linear(many, weight, backend="cuda")
    with RawCalls() as raw:
        decode_linear(many, weight)
        decode_linear(many[: FEW_ROWS + 1], weight)
        assert raw.names() == []
        decode_linear(many[:FEW_ROWS], weight)
        decode_linear(many[:MAX_ROWS], weight, backend="cuda")
        assert raw.names() == ["decode_linear.default"] * 2


SM80, SM90, SM120 = (8, 0), (9, 0), (12, 0)


@pytest.mark.parametrize(
    ("columns", "outputs", "weights", "norm", "capability", "most_rows"),
    [
        pytest.param(768, 768, 3, "rms_norm", SM90, MAX_ROWS, id="T5's query, key and value"),
        pytest.param(768, 768, 1, None, SM90, MAX_ROWS, id="attention's output"),
        pytest.param(768, 3072, 1, "rms_norm", SM90, 67, id="T5's wi"),
        pytest.param(3072, 768, 1, None, SM90, MAX_ROWS, id="T5's wo"),
        pytest.param(3072, 768, 1, None, SM120, 67, id="T5's wo without room for tiles"),
        pytest.param(3072, 768, 1, None, SM80, FEW_ROWS, id="T5's wo before sm_90"),
        pytest.param(768, 2304, 1, "layer_norm", SM90, 90, id="GPT-2's query, key and value"),
        pytest.param(4096, 1024, 1, None, SM90, 152, id="as much as a library does well"),
        pytest.param(1536, 768, 1, None, SM90, MAX_ROWS, id="just long"),
        pytest.param(1528, 768, 1, None, SM90, 136, id="not quite long"),
        pytest.param(3072, 768, 1, "rms_norm", SM90, FEW_ROWS, id="long and normalised"),
        pytest.param(3072, 768, 2, None, SM90, 67, id="several long ones"),
        pytest.param(6152, 768, 1, None, SM90, FEW_ROWS, id="too long"),
        pytest.param(768, 32128, 1, "rms_norm", SM90, FEW_ROWS, id="T5's vocabulary"),
        pytest.param(768, 50257, 1, None, SM90, FEW_ROWS, id="GPT-2's vocabulary"),
    ],
)
def test_rows_with_which_a_layer_is_fast(
    columns: int,
    outputs: int,
    weights: int,
    norm: str | None,
    capability: tuple[int, int],
    most_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        layer = [torch.empty(columns, outputs, device="cuda", dtype=torch.bfloat16).T for _ in range(weights)]
        inputs = [torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16) for rows in range(1, MAX_ROWS + 2)]
        assert [len(x) for x in inputs if is_fast(x, layer, norm=norm)] == list(range(1, most_rows + 1))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("residual", [None, *HALVES, torch.float32], ids=str)
def test_many_rows_are_fast_in_one_dtype(
    dtype: torch.dtype, residual: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: SM90)
    monkeypatch.setattr(linear, "_has_tiles", lambda device: True)
    with FakeTensorMode():
        few, many = (torch.empty(rows, 3072, device="cuda", dtype=dtype) for rows in (FEW_ROWS, MAX_ROWS))
        layer = [torch.empty(768, 3072, device="cuda", dtype=dtype)]
        added = None if residual is None else torch.empty(MAX_ROWS, 768, device="cuda", dtype=residual)
        assert is_fast(few, layer)
        assert is_fast(many, layer, added) == (residual in (None, dtype))


@pytest.mark.parametrize(
    ("norm", "gated", "outputs", "has_tiles", "expected"),
    [
        (None, False, 768, True, True),
        ("rms_norm", False, 768, True, True),
        ("layer_norm", False, 768, True, False),
        (None, True, 768, True, False),
        (None, False, 772, True, False),
        (None, False, 768, False, False),
    ],
)
def test_many_rows_of_float32_are_fast_on_tiles(
    norm: str | None, gated: bool, outputs: int, has_tiles: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_has_tiles", lambda device: has_tiles)
    with FakeTensorMode():
        few, many = (torch.empty(rows, 768, device="cuda") for rows in (FEW_ROWS, MAX_ROWS))
        layer = [torch.empty(outputs, 768, device="cuda")] * (2 if gated else 1)
        assert is_fast(few, layer, norm=norm, gated=gated)
        assert is_fast(many, layer, norm=norm, gated=gated) == expected


LOW_TILES, HIGH_TILES = (f"decode_linear_tiles_kernel<[^>]*, {n}>" for n in (2, 4))


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "outputs", "weights", "norm", "kernel"),
    [
        (FEW_ROWS + 1, 768, 64, 1, "layer_norm", "decode_linear_many_rows_kernel"),
        (FEW_ROWS + 1, 3072, 64, 1, None, "decode_linear_many_rows_kernel"),
        (64, 768, 768, 3, "rms_norm", "decode_linear_many_rows_kernel"),
        (128, 768, 768, 3, "rms_norm", LOW_TILES),
        (129, 768, 768, 3, "rms_norm", HIGH_TILES),
        (MAX_ROWS, 768, 768, 3, None, HIGH_TILES),
        (MAX_ROWS, 768, 768, 3, "layer_norm", "decode_linear_many_rows_kernel"),
        (MAX_ROWS, 768, 768, 1, None, "decode_linear_many_rows_kernel"),
        (MAX_ROWS, 768, 768, 1, "rms_norm", "decode_linear_many_rows_kernel"),
        (59, 3072, 768, 1, None, "decode_linear_many_rows_kernel"),
        (60, 3072, 768, 1, None, LOW_TILES),
        (MAX_ROWS, 3072, 768, 1, None, LOW_TILES),
        (MAX_ROWS, 768, 3072, 1, "rms_norm", None),
    ],
)
@torch.no_grad()
def test_many_rows_have_kernels_of_their_own(
    rows: int, columns: int, outputs: int, weights: int, norm: str | None, kernel: str | None, transposed: bool
) -> None:
    x, *layer = (torch.randn(n, columns, device="cuda", dtype=torch.bfloat16) for n in (rows, *[outputs] * weights))
    if transposed:
        layer = [weight.T.contiguous().T for weight in layer]
    ran = kernels_of(lambda: decode_linear(x, layer, norm=norm))
    assert ran.count("decode_linear") == (kernel is not None)
    assert kernel is None or re.search(kernel, ran)


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "norm", "kernel"),
    [
        (1, 768, "layer_norm", "fma"),
        (8, 3072, None, "fma"),
        (FEW_ROWS, 772, "rms_norm", "fma"),
        (1, 770, None, "plain"),
        (FEW_ROWS + 1, 768, "rms_norm", "tiles"),
        (MAX_ROWS, 3072, None, "tiles"),
    ],
)
@torch.no_grad()
def test_float32_has_kernels_of_its_own(
    rows: int, columns: int, norm: str | None, kernel: str, transposed: bool
) -> None:
    x, weight = torch.randn(rows, columns, device="cuda"), torch.randn(776, columns, device="cuda")
    weight = weight.T.contiguous().T if transposed else weight
    ran = kernels_of(lambda: decode_linear(x, weight, norm=norm, backend="cuda"))
    assert re.findall(r"decode_linear_(\w+)_kernel", ran) == [kernel]


SPREAD, ADVERSE = "spread", "adverse"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 8, 16, 17, 40, 128, MAX_ROWS])
@pytest.mark.parametrize(("columns", "outputs"), [(768, 768), (3072, 768), (768, 3072)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("magnitudes", [None, SPREAD, ADVERSE])
@torch.no_grad()
def test_float32_is_no_less_accurate_than_a_library(
    rows: int, columns: int, outputs: int, transposed: bool, magnitudes: str | None
) -> None:
    """Errors relative to the sum of magnitudes, the largest and the mean of all outputs.

    `SPREAD` inputs differ by powers of two up to 2^40. `ADVERSE` values have ones in all bits that TF32 lacks.
    """
    torch.manual_seed(0)
    x, weight = torch.randn(rows, columns, device="cuda"), torch.randn(outputs, columns, device="cuda")
    if magnitudes == SPREAD:
        x = x * torch.exp2(torch.randint(-20, 21, x.shape, device="cuda").float())
    if magnitudes == ADVERSE:
        x, weight = ((t.view(torch.int32) | 0x0FFF).view(torch.float32) for t in (x, weight))
    weight = weight.T.contiguous().T if transposed else weight
    exact = F.linear(x.double(), weight.double())
    scale = F.linear(x.double().abs(), weight.double().abs())
    library, ours = ((y - exact).abs() / scale for y in (F.linear(x, weight), decode_linear(x, weight, backend="cuda")))
    assert ours.max() <= 1.25 * library.max() + 2.0**-24
    # Tiles cut off a bit of a low part: where each value has one, their mean error is larger.
    assert ours.mean() <= (1.5 if magnitudes == ADVERSE and rows > FEW_ROWS else 1.1) * library.mean() + 2.0**-26


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 17, 128])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3.4e38])
@torch.no_grad()
def test_float32_that_is_not_finite_or_nearly_so(rows: int, transposed: bool, value: float) -> None:
    """Infinite products are infinite, wherever they lie, and other outputs are not touched."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 776, device="cuda"), torch.rand(768, 776, device="cuda") + 0.5
    for k in (0, 300, 775):
        x[0, k] = value
        for factor in (weight, weight.round()):  # of whole numbers the low parts are zero
            read = factor.T.contiguous().T if transposed else factor
            output, expected = decode_linear(x, read, backend="cuda"), F.linear(x.double(), factor.double()).float()
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-3, equal_nan=True)
        x[0, k] = 1.0
    weight[5, 7] = value
    read = weight.T.contiguous().T if transposed else weight
    output, expected = decode_linear(x, read, backend="cuda"), F.linear(x.double(), weight.double()).float()
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-3, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("elsewhere", ["weights", "biases", "residual", "norm_weight"])
def test_tensors_on_another_device_are_refused(elsewhere: str) -> None:
    devices = {
        name: "cpu" if name == elsewhere else "cuda" for name in ("weights", "biases", "residual", "norm_weight")
    }
    with pytest.raises(RuntimeError, match=f"{elsewhere} must be .* on cuda:0, not float32 on cpu"):
        decode_linear(
            torch.randn(2, 4, device="cuda"),
            torch.randn(3, 4, device=devices["weights"]),
            torch.randn(3, device=devices["biases"]),
            residual=torch.randn(2, 3, device=devices["residual"]),
            norm="layer_norm",
            norm_weight=torch.randn(4, device=devices["norm_weight"]),
            backend="cuda",
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 33])
@torch.no_grad()
def test_a_float64_residual_is_added_in_float64(dtype: torch.dtype, transposed: bool, rows: int) -> None:
    """The kernels of the tensor cores have residuals of 16 and 32 bits only."""
    torch.manual_seed(0)
    weight = torch.randn(64, 128, device="cuda").to(dtype) / 16
    weight = weight.T.contiguous().T if transposed else weight
    x, residual = torch.randn(rows, 128, device="cuda").to(dtype), torch.randn(rows, 64, device="cuda").double()
    output = decode_linear(x, weight, residual=residual, backend="cuda")
    assert output.dtype == torch.float64
    product = decode_linear_reference(x.double(), weight.double())
    torch.testing.assert_close(output - residual, product, rtol=0, atol=1e-5)


def assert_kernel_is_accurate(*args: object, **kwargs: object) -> None:
    """Against float64, and the same to the bit with and without overlap."""

    def exact(value: object) -> object:
        if isinstance(value, list):
            return [to_float64(tensor) for tensor in value]
        return to_float64(value) if isinstance(value, Tensor) else value

    output = decode_linear(*args, **kwargs, backend="cuda")
    assert torch.equal(output, decode_linear(*args, **kwargs, pdl=True, backend="cuda"))
    plain = decode_linear_reference(*args, **kwargs)
    judge = decode_linear_reference(*map(exact, args), **{name: exact(value) for name, value in kwargs.items()})
    assert output.dtype == plain.dtype
    # In float64 the judge is no better than the judged.
    in_float64 = output.dtype == torch.float64
    rounding = 64 * torch.finfo(torch.float64).eps if in_float64 else 8 * torch.finfo(args[1][0].dtype).eps
    # Results are sums of products near one. Where there is but one, it may be anything down to zero.
    found, allowed = (error([result], [judge], least=1.0) for result in (output, plain))
    assert found <= 2 * allowed + rounding


def kernels_of(call: Callable[[], object]) -> str:
    """The names of what runs on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return " ".join(event.name for event in profile.events())


@pytest.mark.gpu
@settings(max_examples=200, deadline=None)
@given(
    rows=st.one_of(st.integers(1, FEW_ROWS), st.integers(FEW_ROWS + 1, MAX_ROWS)),
    columns=st.one_of(st.sampled_from([512, 768, 1024, 1280, 1600, 4096, 5120]), st.integers(1, 400)),
    outputs=st.one_of(st.sampled_from([768, 1600, 2304, 5025]), st.integers(1, 100)),
    dtype=st.sampled_from([*HALVES, torch.float32, torch.float64]),
    wide_input=st.booleans(),
    transposed=st.booleans(),
    offset=st.booleans(),
    weights=st.integers(1, 3),
    biased=st.booleans(),
    residual=st.booleans(),
    norm=st.sampled_from([None, *NORMS]),
    activation=st.sampled_from([None, *ACTIVATIONS]),
    gated=st.booleans(),
    seed=st.integers(0, 2**31),
)
@torch.no_grad()
def test_kernels_against_float64(
    rows: int,
    columns: int,
    outputs: int,
    dtype: torch.dtype,
    wide_input: bool,
    transposed: bool,
    offset: bool,
    weights: int,
    biased: bool,
    residual: bool,
    norm: str | None,
    activation: str | None,
    gated: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    gated = gated and weights == 2 and activation is not None
    input_dtype = torch.promote_types(dtype, torch.float32) if wide_input else dtype

    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        # One element into its memory a tensor's address is not that of a 16-byte access.
        size = torch.Size(shape).numel() + offset
        return torch.randn(size, device="cuda").to(dtype)[int(offset) :].view(shape)

    def weight() -> Tensor:
        scaled = make(columns, outputs) if transposed else make(outputs, columns)
        return (scaled.T if transposed else scaled) / columns**0.5

    assert_kernel_is_accurate(
        make(rows, columns, dtype=input_dtype) + 1,
        [weight() for _ in range(weights)],
        [make(outputs) for _ in range(weights)] if biased else None,
        residual=make(rows, outputs * (1 if gated else weights), dtype=input_dtype) if residual else None,
        norm=norm,
        norm_weight=make(columns) if norm else None,
        norm_bias=make(columns) if norm == "layer_norm" else None,
        eps=1e-3,
        activation=activation,
        gated=gated,
    )


@pytest.mark.gpu
@needs_sm90
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(60, MAX_ROWS),
    columns=st.integers(64, 192),
    more=st.integers(0, 9),
    weights=st.integers(1, 3),
    dtype=st.sampled_from([*HALVES, torch.float32]),
    transposed=st.booleans(),
    strided=st.booleans(),
    biased=st.booleans(),
    residual=st.booleans(),
    norm=st.sampled_from([None, "rms_norm", "gemma_rms_norm"]),
    activation=st.sampled_from([None, *ACTIVATIONS]),
    seed=st.integers(0, 2**31),
)
@torch.no_grad()
def test_tiles_against_float64(
    rows: int,
    columns: int,
    more: int,
    weights: int,
    dtype: torch.dtype,
    transposed: bool,
    strided: bool,
    biased: bool,
    residual: bool,
    norm: str | None,
    activation: str | None,
    seed: int,
) -> None:
    """With as much work as it takes, or a little more: one weight of a long K, or several of a shorter one."""
    torch.manual_seed(seed)
    columns *= 8 * (5 if weights == 1 else 1)
    work = 140_000_000 if weights == 1 else 200_000_000
    outputs = 8 * (-(-work // (8 * rows * columns * weights)) + more)
    norm = norm if weights > 1 else None

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    def weight() -> Tensor:
        outer, inner = (columns, outputs) if transposed else (outputs, columns)
        scaled = make(outer, inner + 8 * strided)[:, :inner] / columns**0.5
        return scaled.T if transposed else scaled

    layer = [weight() for _ in range(weights)]
    biases = [make(outputs) for _ in range(weights)] if biased else None
    options = {
        "residual": make(rows, outputs * weights) if residual else None,
        "norm": norm,
        "norm_weight": make(columns) if norm else None,
        "activation": activation,
    }
    x = make(rows, columns)
    assert_kernel_is_accurate(x, layer, biases, **options)
    tiles = HIGH_TILES if weights > 1 and rows > 128 and dtype in HALVES else LOW_TILES
    assert re.search(
        tiles if dtype in HALVES else "decode_linear_tiles_kernel<float",
        kernels_of(lambda: decode_linear(x, layer, biases, **options, backend="cuda")),
    )


@pytest.mark.gpu
@needs_sm90
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(FEW_ROWS + 1, MAX_ROWS),
    columns=st.integers(1, 192),
    outputs=st.integers(1, 120),
    weights=st.integers(1, 3),
    transposed=st.booleans(),
    norm=st.sampled_from(["rms_norm", "gemma_rms_norm"]),
    seed=st.integers(0, 2**31),
)
@torch.no_grad()
def test_float32_tiles_of_any_parts_after_a_norm(
    rows: int, columns: int, outputs: int, weights: int, transposed: bool, norm: str, seed: int
) -> None:
    """K is split over 1 to 8 blocks, which exchange sums of squares."""
    torch.manual_seed(seed)
    columns, outputs = 8 * columns, 8 * outputs
    layer = [torch.randn(outputs, columns, device="cuda") / columns**0.5 for _ in range(weights)]
    layer = [weight.T.contiguous().T if transposed else weight for weight in layer]
    x, scale = torch.randn(rows, columns, device="cuda"), torch.randn(columns, device="cuda")
    assert_kernel_is_accurate(x, layer, None, norm=norm, norm_weight=scale)
    ran = kernels_of(lambda: decode_linear(x, layer, norm=norm, norm_weight=scale, backend="cuda"))
    assert "decode_linear_tiles_kernel<float" in ran


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("norm", [None, *NORMS])
@pytest.mark.parametrize(("rows", "columns"), [(1, 768), (2, 40), (3, 136), (2, 6080), (8, 1600), (9, 1096), (16, 512)])
@torch.no_grad()
def test_a_product_as_wide_as_a_vocabulary_is_accurate(
    rows: int, columns: int, norm: str | None, dtype: torch.dtype
) -> None:
    """So many columns that a block has several strips of them."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, columns, device="cuda"), torch.randn(30001, columns, device="cuda") / columns**0.5
    parameters = torch.randn(2, columns, device="cuda", dtype=dtype)
    assert_kernel_is_accurate(
        x.to(dtype),
        [weight.to(dtype)],
        norm=norm,
        norm_weight=parameters[0] if norm else None,
        norm_bias=parameters[1] if norm == "layer_norm" else None,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8, 13])
@pytest.mark.parametrize(
    ("columns", "outputs", "options"),
    [
        pytest.param(1600, 5128, {"transposed": True, "norm": "layer_norm"}, id="norm"),
        pytest.param(6408, 1600, {"transposed": True, "residual": torch.float32}, id="K shared out in clusters"),
        pytest.param(4104, 1032, {"transposed": True, "activation": "relu"}, id="a few K each"),
        pytest.param(5000, 1608, {"transposed": True, "norm": "layer_norm"}, id="norm and clusters"),
        pytest.param(1032, 2056, {"transposed": True, "weights": 3, "norm": "rms_norm"}, id="three of lines"),
        pytest.param(768, 33000, {"transposed": True}, id="more strips than multiprocessors"),
        pytest.param(5000, 1601, {"norm": "layer_norm", "activation": "gelu_tanh"}, id="norm over clusters"),
        pytest.param(1032, 3080, {"weights": 3, "norm": "rms_norm"}, id="three weights"),
        pytest.param(1024, 4003, {"gated": True, "norm": "rms_norm", "activation": "gelu"}, id="gated"),
        pytest.param(1024, 8003, {"norm": "rms_norm", "input": torch.float32}, id="float32 rows"),
        pytest.param(768, 32005, {"norm": "layer_norm"}, id="vocabulary"),
    ],
)
@torch.no_grad()
def test_a_layer_too_large_for_registers(
    rows: int, columns: int, outputs: int, options: dict, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    options = dict(options)
    count, transposed = options.pop("weights", 2 if options.get("gated") else 1), options.pop("transposed", False)

    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    # A stride of its own, and no multiple of a cache line.
    weights = [
        make(columns, outputs + 8)[:, :outputs].T if transposed else make(outputs, columns + 8)[:, :columns]
        for _ in range(count)
    ]
    x = make(rows, columns, dtype=options.pop("input", dtype)) / columns**0.5
    residual = options.pop("residual", None)
    parameters = {
        "residual": None if residual is None else make(rows, outputs, dtype=residual),
        "norm_weight": make(columns) if options.get("norm") else None,
        "norm_bias": make(columns) if options.get("norm") == "layer_norm" else None,
    }
    biases = [make(outputs) for _ in weights]
    assert_kernel_is_accurate(x, weights, biases, **parameters, **options)
    of_lines = "decode_linear_gemv_kernel" if rows == 1 else "decode_linear_streamed_kn_kernel"
    of_halves = of_lines if transposed else "decode_linear_streamed_nk_kernel"
    assert (of_halves if dtype in HALVES else "decode_linear_fma_kernel") in kernels_of(
        lambda: decode_linear(x, weights, biases, **parameters, **options, backend="cuda")
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("columns", [1288, 1600])
@torch.no_grad()
def test_an_output_projection_beside_large_layers(columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 1, columns, device="cuda", dtype=dtype)
    weight = torch.randn(columns, columns, device="cuda", dtype=dtype).T / columns**0.5
    bias = torch.randn(columns, device="cuda", dtype=dtype)
    assert_kernel_is_accurate(x, weight, bias, residual=residual)
    assert "decode_linear_gemv_kernel" in kernels_of(
        lambda: decode_linear(x, weight, bias, residual=residual, backend="cuda")
    )


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [5128, 6400])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@torch.no_grad()
def test_what_is_not_finite_stays_with_its_weights(value: float, columns: int) -> None:
    """Where warps have less of K than there is room for, what fills it up makes no NaN of an infinity."""
    x = torch.zeros(1, columns, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(columns, 1608, device="cuda", dtype=torch.bfloat16).T
    for k in (0, 207, columns // 2, columns - 1):
        x[0, k] = value
        output = decode_linear(x, weight, backend="cuda")
        torch.testing.assert_close(output, torch.full_like(output, value), equal_nan=True)
        x[0, k] = 0


@pytest.mark.gpu
@pytest.mark.parametrize("outputs", [64, 640])
@pytest.mark.parametrize("rows", [1, 8, 9])
@torch.no_grad()
def test_an_infinite_weight_is_counted_once(rows: int, outputs: int) -> None:
    """Where warps have less of K than they ask for, another part of the weight is loaded, and counts for nothing."""
    columns = 776
    x = torch.ones(rows, columns, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(columns, outputs, device="cuda", dtype=torch.bfloat16)
    weight[-8:, outputs // 2] = torch.inf
    expected = torch.full((rows, outputs), columns, device="cuda", dtype=torch.bfloat16)
    expected[:, outputs // 2] = torch.inf
    assert torch.equal(decode_linear(x, weight.T, backend="cuda"), expected)
    assert "decode_linear_skinny_mma_kernel" in kernels_of(lambda: decode_linear(x, weight.T, backend="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", [1, 20, 200])
@torch.no_grad()
def test_activations_far_out(rows: int, activation: str, dtype: torch.dtype) -> None:
    """Infinities, NaN and what exponentials cannot hold become what PyTorch's activations make of them."""
    edges = torch.tensor([0.0, -0.0, 1e-7, -3.0, 12.0, -12.0, 3e4, -3e4, torch.inf, -torch.inf, torch.nan, -1e-3])
    bias = edges.repeat(64)[:768].to("cuda", dtype)
    x, weight = torch.zeros(rows, 768, device="cuda", dtype=dtype), torch.ones(768, 768, device="cuda", dtype=dtype)
    options = {"norm": "layer_norm", "activation": activation}
    output = decode_linear(x, weight, bias, **options, backend="cuda")
    expected = decode_linear_reference(x, weight, bias, **options)
    torch.testing.assert_close(output, expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6, equal_nan=True)


@pytest.mark.gpu
@torch.no_grad()
def test_what_is_read_ahead_changes_nothing() -> None:
    x, weight, later = (torch.randn(n, 256, device="cuda", dtype=torch.bfloat16) for n in (2, 64, 512))
    expected = decode_linear(x, weight)
    for ahead in ([later], [later.T, weight, x.float()], [later[:, ::2], later], [later[:, 3]], [later[:0]]):
        assert torch.equal(decode_linear(x, weight, prefetch=ahead), expected)
    with pytest.raises(RuntimeError, match="at most three"):
        decode_linear(x, weight, prefetch=[later] * 4)


def large_lines(columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A weight [K, N] that is read by lines, and with one row has the norm folded in."""
    return (torch.randn(columns, 5128, device="cuda") / columns**0.5).to(dtype).T


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "columns", "is_large"),
    [
        (1, 1600, False),
        (1, 1600, True),
        (8, 1600, False),
        (8, 1600, True),
        (16, 1600, False),
        (40, 768, False),
        (33, 1536, False),
    ],
)
@pytest.mark.parametrize("mean", [1000, 5])
@torch.no_grad()
def test_a_norm_of_rows_far_from_zero(rows: int, columns: int, is_large: bool, mean: int) -> None:
    """The variance of a row is not lost in its mean."""
    torch.manual_seed(0)
    x = (torch.randn(rows, columns, device="cuda") + mean).bfloat16()
    weight = torch.randn(64, columns, device="cuda", dtype=torch.bfloat16) / columns**0.5
    assert_kernel_is_accurate(x, [large_lines(columns) if is_large else weight], norm="layer_norm")


@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize(("rows", "is_large"), [(1, False), (1, True), (8, False), (16, False)])
@torch.no_grad()
def test_a_norm_of_rows_that_start_with_an_outlier(rows: int, is_large: bool, norm: str) -> None:
    """Wherever sums are taken from, be it the first value of a row: it may be far from all others."""
    torch.manual_seed(0)
    x = torch.randn(rows, 1536, device="cuda", dtype=torch.bfloat16)
    x[:, 0] = 1000
    weight = torch.randn(2304, 1536, device="cuda", dtype=torch.bfloat16) / 40
    assert_kernel_is_accurate(x, [large_lines(1536) if is_large else weight], norm=norm)


@pytest.mark.gpu
@torch.no_grad()
def test_a_norm_whose_weight_takes_rows_out_of_range() -> None:
    """A row of float16, times the norm's weight, may be more than float16 can hold; normalised it is not."""
    torch.manual_seed(0)
    x = torch.randn(1, 1600, device="cuda", dtype=torch.float16) * 10000
    scale = torch.full((1600,), 8.0, device="cuda", dtype=torch.float16)
    assert_kernel_is_accurate(x, [large_lines(1600, torch.float16)], norm="layer_norm", norm_weight=scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17, 40, 64, 128, 200, 256])
@pytest.mark.parametrize(
    ("columns", "outputs", "weights", "options"),
    [
        (768, 2304, 1, {"norm": "layer_norm"}),
        (768, 768, 1, {"residual": True}),
        (768, 3072, 1, {"norm": "layer_norm", "activation": "gelu_tanh"}),
        (3072, 768, 1, {"residual": True}),
        (2184, 96, 1, {"residual": True}),
        (8192, 64, 2, {"activation": "relu"}),
        (8200, 64, 1, {"residual": True}),
        (5008, 1032, 1, {"activation": "gelu_tanh", "residual": True}),
        (2056, 776, 2, {"activation": "relu", "residual": True}),
        (768, 768, 3, {"norm": "rms_norm"}),
        (1496, 520, 3, {"norm": "rms_norm", "activation": "gelu", "residual": True}),
        (768, 768, 1, {"norm": "rms_norm"}),
        (1024, 1288, 1, {"norm": "layer_norm"}),
        (768, 2048, 2, {"norm": "rms_norm", "activation": "gelu_tanh", "gated": True}),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
@torch.no_grad()
def test_layers_of_models(
    columns: int, outputs: int, weights: int, options: dict, transposed: bool, rows: int, dtype: torch.dtype
) -> None:
    """GPT-2's, T5's and long ones, whose strips, passes, clusters and rows take each of the kernels."""
    torch.manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    options = dict(options)
    if "norm" in options:
        options |= {"norm_weight": make(columns) * 0.3 + 1}
    if options.get("norm") == "layer_norm":
        options |= {"norm_bias": make(columns)}
    if options.pop("residual", False):
        options |= {"residual": make(rows, outputs * weights)}
    parameters = [make(columns, outputs).T if transposed else make(outputs, columns) for _ in range(weights)]
    biases = [make(outputs) for _ in range(weights)] if transposed else None
    assert_kernel_is_accurate(make(rows, columns), [weight / columns**0.5 for weight in parameters], biases, **options)


@pytest.mark.gpu
@torch.no_grad()
def test_weights_are_read_in_place() -> None:
    """A captured graph sees an edit of the weight, in either layout, and no copy of it is made."""
    torch.manual_seed(0)
    conv = Conv1D(2048, 1024).to("cuda", torch.bfloat16)
    torch_linear = nn.Linear(1024, 2048, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 1024, device="cuda", dtype=torch.bfloat16)
    for read, edited in ((conv.weight.T, conv.weight), (torch_linear.weight, torch_linear.weight)):
        decode_linear(x, read)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        decode_linear(x, read)
        assert torch.cuda.max_memory_allocated() - before < read.numel()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = decode_linear(x, read, pdl=True)
        edited.mul_(2)
        graph.replay()
        torch.testing.assert_close(output, decode_linear_reference(x, read), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "width", "count", "norm"),
    [
        (4, 256, 1, "layer_norm"),
        (40, 256, 1, "layer_norm"),
        (40, 1024, 1, None),
        (100, 1536, 3, "rms_norm"),
        (100, 1536, 3, None),
        (200, 1536, 3, "rms_norm"),
        (200, 1536, 3, None),
    ],
)
@torch.no_grad()
def test_a_chain_in_a_graph_waits_for_each_predecessor(rows: int, width: int, count: int, norm: str | None) -> None:
    """Hundreds of dependent launches that overlap give what they give one at a time, replay after replay."""
    torch.manual_seed(0)
    size = width**0.5 * (16 if norm is None else 1)
    weights = [torch.randn(width, width, device="cuda", dtype=torch.bfloat16) / size for _ in range(8)]
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)

    def chain(overlap: bool) -> Tensor:
        y = x
        for i in range(200):
            weight = weights[i % 8]
            layer = (weight if i % 2 else weight.T).chunk(count)
            y = decode_linear(y, layer, norm=norm, residual=y, pdl=overlap)
        return y

    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = chain(True)
    for seed in range(5):
        torch.manual_seed(seed)
        x.normal_()
        graph.replay()
        assert torch.equal(output, chain(False))


def test_a_fake_keeps_symbolic_sizes():
    """A size that torch.compile leaves open would become a constant by `len`."""
    shapes = ShapeEnv()
    symbol = shapes.create_symbol(24, source=ConstantSource("outputs"), dynamic_dim=DimDynamic.DYNAMIC)
    outputs = shapes.create_symintnode(symbol, hint=24)
    with FakeTensorMode(shape_env=shapes):
        layer = (torch.empty(3, 16), [torch.empty(outputs, 16)], [])
        ending = (None, "", None, None, 0.0, "", False, False, [])
        plain = torch.ops.fuseopt.decode_linear(*layer, *ending)
        factors = (torch.empty(4, 16), [torch.empty(outputs, 4)], None)
        low_rank = torch.ops.fuseopt.decode_linear_low_rank(*layer, *factors, *ending)
        values = [torch.empty(outputs, 16, dtype=torch.int8)]
        low_bit = torch.ops.fuseopt.decode_low_bit_linear(torch.empty(3, 16), values, [], [], [], *ending)
    for output in (plain, low_rank, low_bit):
        assert isinstance(output.shape[1], torch.SymInt) and output.shape[1].node.expr == symbol
