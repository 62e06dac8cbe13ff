"""decode_low_bit_linear on a CPU at sizes that are no multiple of any vector, and on several threads."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fuseopt.errors import BackendError
from fuseopt.ops import decode_low_bit_linear, low_bit_linear, registry
from fuseopt.ops.decode.low_bit_linear import MAX_ROWS
from fuseopt.ops.low_bit import LowBitWeight, dequantize, quantize
from fuseopt.runtime.recorded_runs import RecordedRun
from tests.ops.cases import RawCalls, error

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = {
    "int8": {"bits": 8},
    "int4": {"bits": 4, "group": 128},
    "int4, groups of 64": {"bits": 4, "group": 64},
    "int4, groups of 32": {"bits": 4, "group": 32},
    "int4, zeros": {"bits": 4, "group": 128, "symmetric": False},
    "int4, groups of 32, zeros": {"bits": 4, "group": 32, "symmetric": False},
}


@pytest.fixture(autouse=True)
def needs_the_library() -> None:
    reasons = registry.CPU.not_supported_reasons(torch.device("cpu"), ())
    if reasons:
        pytest.skip(reasons[0])


@pytest.fixture(params=[1, 11])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def quantized(kind: str, outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> LowBitWeight:
    """Of which no nibble of a word is like another, and whose scales have both signs."""
    return quantize((torch.randn(outputs, inputs) / inputs**0.5).to(dtype), **KINDS[kind])


def expected(x: Tensor, weights: list[LowBitWeight], *args: Any, **options: Any) -> Tensor:
    args, options = tree_map_only(Tensor, lambda t: t.double(), (args, options))
    return decode_low_bit_linear(x.double(), weights, *args, **options, backend="reference")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 64])
def test_a_layer_that_threads_share(rows: int, kind: str, dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(rows)
    inputs = {"int8": 331}.get(kind, 384)
    weights = [quantized(kind, n, inputs, dtype) for n in (277, 130)]
    x, residual = torch.randn(rows, inputs).to(dtype), torch.randn(rows, 407)
    biases = [torch.randn(277), torch.randn(130)]
    options = {"residual": residual, "activation": "gelu_tanh", "norm": "layer_norm", "eps": 1e-3}
    with RawCalls() as raw:
        output = decode_low_bit_linear(x, weights, biases, **options, backend="cpu")
    assert "decode_low_bit_linear.default" in raw.names()
    bound = 8 * torch.finfo(dtype if dtype.itemsize == 2 else torch.float32).eps
    assert error([output], [expected(x, weights, biases, **options)]) <= bound


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", ["rms_norm", "gemma_rms_norm"])
def test_a_gated_pair(norm: str, kind: str) -> None:
    torch.manual_seed(0)
    weights = [quantized(kind, 70, 256) for _ in range(2)]
    x = torch.randn(3, 2, 256)[:, 1]
    options = {"gated": True, "activation": "silu", "norm": norm, "norm_weight": torch.rand(256)}
    output = decode_low_bit_linear(x, weights, **options, backend="cpu")
    assert error([output], [expected(x, weights, **options)]) <= 8 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("outputs", [1, 2, 5, 15, 17, 33, 81])
@pytest.mark.parametrize(
    ("kind", "inputs"),
    [("int8", k) for k in (1, 3, 4, 63, 65, 130)]
    + [("int4, groups of 32", k) for k in (32, 96, 160)]
    + [("int4, groups of 64, zeros", k) for k in (64, 192)]
    + [("int4, zeros", 128)],
)
def test_odd_sizes(kind: str, inputs: int, outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products are exact: whole numbers below 2**24, and scales that are powers of two."""
    monkeypatch.setitem(KINDS, "int4, groups of 64, zeros", {"bits": 4, "group": 64, "symmetric": False})
    torch.manual_seed(outputs)
    weight = quantized(kind, outputs, inputs)
    weight = weight._replace(scales=torch.exp2(torch.randint(-2, 3, weight.scales.shape)))
    x = torch.randint(-8, 9, (10, inputs)).float()
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 2, 5, 10):
            output = decode_low_bit_linear(x[:rows].to(dtype), weight, backend="cpu")
            assert torch.equal(output, (x[:rows] @ dequantize(weight).T).to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_each_value_is_widened_exactly(kind: str) -> None:
    """Row k of the input picks column k of the weight."""
    inputs, outputs = 128, 257
    weight = quantized(kind, outputs, inputs)
    if kind == "int8":
        values = (torch.arange(outputs)[:, None] + torch.arange(inputs)) % 255 - 127
        weight = weight._replace(values=values.to(torch.int8))
    eye = torch.eye(inputs)
    for dtype in (torch.float32, torch.bfloat16):
        for rows in eye.split(MAX_ROWS) + eye[:9].split(1):
            output = decode_low_bit_linear(rows.to(dtype), weight, backend="cpu")
            assert torch.equal(output, (rows @ dequantize(weight).T).to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_not_finite_stay_in_their_rows_and_outputs(kind: str) -> None:
    weight = quantized(kind, 40, 256)
    weight.scales[7, 0], weight.scales[9, -1] = torch.nan, torch.inf
    for rows in (2, 5):
        x = torch.rand(rows, 256) + 1
        x[1, 0] = torch.nan
        output = decode_low_bit_linear(x, weight, backend="cpu")
        assert output[1].isnan().all()
        finite = torch.ones(40, dtype=torch.bool)
        finite[[7, 9]] = False
        assert output[0].isfinite().equal(finite)


@pytest.mark.parametrize("kind", KINDS)
def test_strides(kind: str) -> None:
    """Inputs of any strides; a part of the weight's outputs is copied if it lies apart."""
    torch.manual_seed(0)
    weight = quantized(kind, 66, 256)
    every_other = weight._replace(
        values=weight.values[::2], scales=weight.scales[::2], zeros=None if weight.zeros is None else weight.zeros[::2]
    )
    x = torch.randn(256, 6).T[::2]
    output = decode_low_bit_linear(x, every_other, backend="cpu")
    assert error([output], [expected(x, [every_other])]) <= 8 * torch.finfo(torch.float32).eps


def test_what_the_kernel_does_not_take() -> None:
    weight = quantized("int4", 5, 128)
    for x, message in (
        (torch.randn(MAX_ROWS + 1, 128), f"takes {MAX_ROWS} rows at most"),
        (torch.randn(1, 128).double(), "does not take torch.float64"),
    ):
        with pytest.raises(BackendError, match=message):
            decode_low_bit_linear(x, weight, backend="cpu")
        with RawCalls() as raw:
            low_bit_linear(x, weight)
        assert "decode_low_bit_linear.default" not in raw.names()


def bad_calls() -> dict[str, Callable[[LowBitWeight], list[Any]]]:
    return {
        "values must be": lambda w: [[w.values[:, :-1]], [w.scales], []],
        "needs scales for each weight": lambda w: [[w.values], [], []],
        "groups must be of 8, 16, 32": lambda w: [[w.values], [w.scales[:, :3]], []],
        "zeros must be": lambda w: [[w.values], [w.scales], [w.zeros[:, :1]]],
    }


@pytest.mark.parametrize("message", bad_calls())
def test_the_raw_op_refuses_what_does_not_fit(message: str) -> None:
    weight = quantized("int4, groups of 32, zeros", 5, 256)
    arguments = bad_calls()[message](weight)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.fuseopt.decode_low_bit_linear(
            torch.randn(1, 256), *arguments, [], None, "", None, None, 1e-5, "", False, False, []
        )


class Step:
    """A step whose linear layers are quantised."""

    def __init__(self) -> None:
        self.x, self.result = torch.randn(1, 128), torch.zeros(1, 128)
        self.weights = [quantized(kind, 128, 128) for kind in ("int8", "int4", "int4, zeros")]

    @torch.no_grad()
    def run(self) -> None:
        x = self.x
        for weight in self.weights:
            x = decode_low_bit_linear(x, weight, norm="layer_norm", residual=x)
        self.result.copy_(x)


def test_recorded_steps_replay_it() -> None:
    step = Step()
    recorded = RecordedRun(step.run)
    for _ in range(5):
        step.x.normal_()
        recorded.replay()
    assert recorded.replays >= 2
    replayed = step.result.clone()
    step.run()
    assert torch.equal(step.result, replayed) and not recorded.refused
