"""`decode_linear_low_rank`: against float64, for any ranks, norms, gates and rows; and what it refuses."""

import math

import pytest
import torch
from torch.testing import assert_close

from fuseopt import ops
from fuseopt.errors import BackendError
from fuseopt.ops.decode.low_rank import KERNEL_ROWS, RAW_TAKES, exchange_size, updates
from tests.ops.cases import launched_kernels

RMS, LAYER = "rms_norm", "layer_norm"
# K, N of each weight, rank of each, norm, activation, gated, [K, N], residual.
LAYERS = {
    "query and value of a decoder": (64, (64, 32, 32), (8, 0, 16), RMS, None, False, False, False),
    "output": (96, (40,), (3,), None, None, False, False, True),
    "gate and up": (64, (48, 48), (16, 8), "gemma_rms_norm", "silu", True, False, False),
    "Conv1D": (48, (104,), (64,), LAYER, "gelu_tanh", False, True, False),
    "more ranks than outputs": (33, (7,), (40,), None, "relu", False, True, True),
}
# Sizes of models, each of another kernel or shape of it on an H200, with ranks that are multiples of 8.
LAYERS_OF_MODELS = {
    "Llama-3.2-1B, query, key, value": (2048, (2048, 512, 512), (16, 0, 16), RMS, None, False, False, False),
    "Llama-3.2-1B, output": (2048, (2048,), (16,), None, None, False, False, True),
    "Llama-3.2-1B, gate and up": (2048, (8192, 8192), (16, 24), RMS, "silu", True, False, False),
    "Llama-3.2-1B, down": (8192, (2048,), (16,), None, None, False, False, True),
    "Qwen3-0.6B, query, key, value": (1024, (2048, 1024, 1024), (8, 8, 8), RMS, None, False, False, False),
    "Qwen3-0.6B, down": (3072, (1024,), (256,), None, None, False, False, True),
    "T5-base, gate and up": (768, (2048, 2048), (8, 16), RMS, "gelu_tanh", True, False, False),
    "GPT-2, query, key, value": (768, (2304,), (16,), LAYER, None, False, True, False),
    "GPT-2, up": (768, (3072,), (64,), LAYER, "gelu_tanh", False, True, False),
    "GPT-2, down": (3072, (768,), (16,), None, None, False, True, True),
}


def arguments(layer, rows, dtype, device="cpu"):
    k, widths, ranks, norm, activation, gated, is_kn, has_residual = layer

    def make(*shape):
        return torch.randn(shape, device=device, dtype=dtype)

    weights = [make(k, n).T / math.sqrt(k) if is_kn else make(n, k) / math.sqrt(k) for n in widths]
    a = make(sum(ranks), k) / math.sqrt(k)
    b = [make(n, rank) / math.sqrt(max(rank, 1)) for n, rank in zip(widths, ranks, strict=True)]
    options = {"norm": norm, "activation": activation, "gated": gated}
    if norm is not None:
        options["norm_weight"] = 1 + make(k) / 4
    if norm == LAYER:
        options["norm_bias"] = make(k) / 4
    if has_residual:
        options["residual"] = make(rows, sum(widths))
    return (make(rows, k) + 1, weights, a, b, [make(n) for n in widths]), options


def widened(value):
    if isinstance(value, list):
        return [widened(part) for part in value]
    return value.double() if isinstance(value, torch.Tensor) else value


def exact(positional, options):
    """In float64, with the update added to the weights."""
    input, weights, a, b, biases = widened(list(positional))
    parts = a.split([factor.shape[1] for factor in b])
    sums = [weight + factor @ part for weight, factor, part in zip(weights, b, parts, strict=True)]
    return ops.decode_linear(input, sums, biases, **{n: widened(v) for n, v in options.items()}, backend="reference")


def distance(result, wanted):
    return (result.double() - wanted).norm() / wanted.norm()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_is_a_layer_whose_weights_are_updated(layer, rows, backend):
    torch.manual_seed(rows)
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float64, 1e-14)):
        positional, options = arguments(layer, rows, dtype)
        result = ops.decode_linear_low_rank(*positional, **options, backend=backend)
        assert result.dtype is dtype
        assert distance(result, exact(positional, options)) < tolerance
        plain = ops.decode_linear(*positional[:2], positional[4], **options, backend=backend)
        assert distance(plain, exact(positional, options)) > 0.1


def test_without_ranks_it_is_the_plain_layer():
    (input, weights, _, _, biases), options = arguments(LAYERS["gate and up"], 2, torch.float32)
    none = [torch.empty(len(weight), 0) for weight in weights]
    result = ops.decode_linear_low_rank(input, weights, torch.empty(0, 64), none, biases, **options)
    assert torch.equal(result, ops.decode_linear(input, weights, biases, **options))


def test_updates_of_each_weight():
    (input, _, a, b, _), _ = arguments(LAYERS["query and value of a decoder"], 3, torch.float64)
    first, none, last = updates(input, a, b)
    assert_close(first, input @ a[:8].T @ b[0].T)
    assert_close(last, input @ a[8:].T @ b[2].T)
    assert not none.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(5, 8)}, r"a has 5 rows, but the ranks of b are 2 \+ 2"),
        ({"a": torch.zeros(4, 9)}, "a must have shape"),
        ({"b": [torch.zeros(6, 2)]}, "1 factors b for 2 weights"),
        ({"b": [torch.zeros(5, 2), torch.zeros(6, 2)]}, "b must have shape"),
        ({"a": torch.zeros(4, 8).half()}, "must have the weights' dtype"),
        ({"exchange": torch.zeros(3, dtype=torch.int64)}, "exchange must have shape"),
    ],
)
def test_factors_that_do_not_fit(change, message):
    valid = {"a": torch.zeros(4, 8), "b": [torch.zeros(6, 2)] * 2, "weight": [torch.zeros(6, 8)] * 2}
    with pytest.raises(ValueError, match=message):
        ops.decode_linear_low_rank(torch.zeros(1, 8), **{**valid, **change})


def test_an_exchange_of_another_dtype_and_too_many_rows():
    layer = torch.zeros(6, 8), torch.zeros(2, 8), torch.zeros(6, 2)
    with pytest.raises(TypeError, match=r"exchange must be torch\.int64"):
        ops.decode_linear_low_rank(torch.zeros(1, 8), *layer, exchange=torch.zeros(18))
    with pytest.raises(BackendError, match="256 rows at most"):
        ops.decode_linear_low_rank(torch.zeros(257, 8), *layer, backend="cpu")
    assert ops.decode_linear_low_rank(torch.zeros(257, 8), *layer).shape == (257, 6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, KERNEL_ROWS])
@pytest.mark.parametrize("layer", LAYERS_OF_MODELS.values(), ids=LAYERS_OF_MODELS)
def test_the_kernels_against_float64(layer, rows, dtype):
    torch.manual_seed(rows)
    positional, options = arguments(layer, rows, dtype, "cuda")
    exchange = torch.zeros(exchange_size(positional[2]), dtype=torch.int64, device="cuda")
    wanted = exact(positional, options)
    composed = ops.decode_linear_low_rank(*positional, **options, backend="cuda")
    for _ in range(3):
        exchange[0] += 1
        result = ops.decode_linear_low_rank(*positional, exchange=exchange, pdl=True, **options, backend="cuda")
        assert distance(result, wanted) < 1.2 * distance(composed, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS_OF_MODELS.values(), ids=LAYERS_OF_MODELS)
def test_it_is_one_launch(layer):
    positional, options = arguments(layer, 1, torch.bfloat16, "cuda")
    exchange = torch.ones(exchange_size(positional[2]), dtype=torch.int64, device="cuda")
    kernels = launched_kernels(lambda: ops.decode_linear_low_rank(*positional, exchange=exchange, **options))
    assert len(kernels) == 1 and "decode_linear" in kernels[0]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [(3,), (16,)])
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_what_no_kernel_takes_is_composed(rows, ranks):
    k, n = 96, 40
    layer = (k, (n,), ranks, None, "relu", False, False, True)
    for dtype in (torch.float32, torch.bfloat16):
        positional, options = arguments(layer, rows, dtype, "cuda")
        exchange = torch.ones(exchange_size(positional[2]), dtype=torch.int64, device="cuda")
        input, weights, a, b, biases = positional
        ending = (options["residual"], "", None, None, 0.0, "relu", False, False, [])
        is_taken = RAW_TAKES["cuda"](input, weights, biases, a, b, exchange, *ending)
        assert is_taken == (dtype is torch.bfloat16 and rows == 1 and ranks == (16,))
        result = ops.decode_linear_low_rank(*positional, exchange=exchange, **options)
        assert distance(result, exact(positional, options)) < (1e-5 if dtype is torch.float32 else 1e-2)
