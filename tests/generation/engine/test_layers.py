"""What decode steps are made of."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fuseopt import ops
from fuseopt.bench.harness.architectures import random_model
from fuseopt.generation.engine import attention, layers, library_products, residual_stream
from fuseopt.generation.engine.attention import StepAttention
from fuseopt.generation.engine.l2_prefetch import plan_l2_prefetch
from fuseopt.generation.engine.layers import (
    Linear,
    Norm,
    linear,
    linear_of,
)
from fuseopt.generation.engine.residual_stream import ResidualStream
from fuseopt.generation.engine.state import DecodeState, Sizes
from fuseopt.generation.families import spec_step
from fuseopt.generation.families.decoder_spec import RelativeBias, SelfAttention
from fuseopt.generation.families.gpt2 import GPT2Step
from fuseopt.generation.families.t5 import T5Step
from fuseopt.ops.decode.linear import MAX_ROWS, decode_linear_reference
from fuseopt.ops.low_bit import dequantize, quantize
from fuseopt.ops.packed_weight import pack_for_cuda
from tests.ops.cases import RawCalls, error, needs_sm90, to_float64


class AtenCalls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).removeprefix("aten."))
        return func(*args, **(kwargs or {}))


def test_a_layer_brings_in_the_one_after_the_next() -> None:
    body = [linear_of(nn.Linear(2, 3)) for _ in range(4)]
    head = linear_of(nn.Linear(2, 5))
    plan_l2_prefetch(body, head)
    assert [layer.prefetch for layer in body] == [body[2].weights, body[3].weights, head.weights, head.weights]
    assert head.prefetch == body[0].weights


def test_a_large_layer_brings_in_a_part_of_a_large_one_behind_it() -> None:
    def layer(columns: int, outputs: int) -> Linear:  # of a Conv1D
        return Linear((torch.empty(columns, outputs, dtype=torch.bfloat16, device="meta").T,))

    qkv, out, up, down = layer(1600, 4800), layer(1600, 1600), layer(1600, 6400), layer(6400, 1600)
    last = layer(1600, 4800)
    head = Linear((torch.empty(50257, 1600, dtype=torch.bfloat16, device="meta"),))
    plan_l2_prefetch([qkv, out, up, down, last], head)
    assert (qkv.prefetch, out.prefetch, last.prefetch, head.prefetch) == ((), down.weights, (), qkv.weights)
    for large, behind in ((up, down), (down, last)):
        (part,) = large.prefetch
        lines = behind.weights[0].T
        assert part.shape == (len(lines) // 4, lines.shape[1]) and part.is_contiguous() and part._base is lines._base


@pytest.mark.parametrize(
    ("name", "step_class", "modules"),
    [("gpt2-tiny", GPT2Step, (residual_stream,)), ("t5-tiny", T5Step, (spec_step, residual_stream))],
)
def test_steps_read_ahead_in_the_order_they_run_in(
    name: str, step_class: type, modules: tuple[ModuleType, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a layer brings in is what the layer after the next reads."""
    model = random_model(name, torch.device("cpu"), torch.float32)
    step = step_class(model)
    ran: list[Linear] = []

    def recorded(input: torch.Tensor, layer: Linear, **options: object) -> torch.Tensor:
        ran.append(layer)
        return linear(input, layer, **options)

    for module in modules:
        monkeypatch.setattr(module, "linear", recorded)
    state = DecodeState(Sizes(1, 8, 8 if name.startswith("t5") else 0), step.shape, step.vocab)
    state.begin(0, None, None)
    state.load_cross(state.sizes.cross_capacity, None)
    with torch.no_grad():
        step(state).logits()
    assert len(ran) > 4
    *body, head = ran
    for layer, later in zip(body, body[2:], strict=False):
        assert layer.prefetch is later.weights
    assert head.prefetch is body[0].weights


def first_logits(step: GPT2Step, state: DecodeState) -> Tensor:
    state.begin(0, None, None)
    state.tokens.copy_(torch.tensor([3, 5]))
    with torch.no_grad():
        return step(state).logits()


def test_layers_hand_on_addends_where_both_have_kernels_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of GPT-2's, to the head at last."""
    torch.manual_seed(0)
    model = random_model("gpt2-tiny", torch.device("cpu"), torch.float32)
    step = GPT2Step(model)
    state = DecodeState(Sizes(2, 8), step.shape, step.vocab)
    expected = first_logits(step, state)
    for name in ("has_kernel", "emits_partials", "accepts_partials"):
        monkeypatch.setattr(residual_stream, name, lambda *_, **of_norm: True)
    handed_on = []
    leave = ops.decode_linear_partials

    def recorded(*arguments: Any, **options: Any) -> Tensor:
        handed_on.append(arguments[1])
        return leave(*arguments, **options)

    monkeypatch.setattr(ops, "decode_linear_partials", recorded)
    torch.testing.assert_close(first_logits(step, state), expected)
    assert len(step.layers) > 1
    assert all(
        a is b for a, b in zip(handed_on, [layer.feed_forward.down.weights[0] for layer in step.layers], strict=True)
    )


ROWS, WIDTH = MAX_ROWS + 3, 24


def gpt2_step(device: str, dtype: torch.dtype, **sizes: int) -> GPT2Step:
    """Whose attention shows in its logits."""
    model = random_model("gpt2-tiny", torch.device(device), dtype, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5)
    return GPT2Step(model)


def logits_of_steps(step: GPT2Step, state: DecodeState, keep: Tensor | None = None, count: int = 5) -> list[Tensor]:
    """Of steps on the same tokens from the first slot on."""
    state.begin(0, keep, None)
    logits = []
    for token in range(count):
        state.tokens.copy_(torch.arange(state.sizes.rows) + 3 * token)
        with torch.no_grad():
            logits.append(step(state).logits())
        state.counters += 1
    return logits


def record_qkv_attention(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of each call of `ops.decode_qkv_attention_`."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    run = ops.decode_qkv_attention_

    def recorded(*arguments: Any, **options: Any) -> Tensor:
        calls.append((arguments, options))
        return run(*arguments, **options)

    monkeypatch.setattr(ops, "decode_qkv_attention_", recorded)
    return calls


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("is_fast", [False, True])
def test_layers_attend_where_they_project_if_that_is_fast(
    is_fast: bool, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first, which reads embeddings."""
    torch.manual_seed(0)
    step = gpt2_step("cpu", torch.float32, n_layer=4)
    keep = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    state, plain_state = (DecodeState(Sizes(2, 8), step.shape, step.vocab) for _ in range(2))
    expected = logits_of_steps(step, plain_state, keep)
    monkeypatch.setattr(layers, "has_kernel", lambda op, _: op == "decode_linear")
    monkeypatch.setattr(attention, "has_kernel", lambda op, _: is_there or op != "decode_qkv_attention_")
    monkeypatch.setattr(attention, "is_fast", lambda *_, **of_norm: is_fast)
    calls = record_qkv_attention(monkeypatch)
    logits = logits_of_steps(step, state, keep)
    # A row that attends to nothing has zeros from the kernels, and from PyTorch's attention the mean of all values.
    attends = keep.cumsum(1) > 0
    for place, (got, wanted) in enumerate(zip(logits, expected, strict=True)):
        torch.testing.assert_close(got[attends[:, place]], wanted[attends[:, place]])
    filled, wanted_filled = (each.cache[:, :, 0, :, : keep.shape[1]] for each in (state, plain_state))
    torch.testing.assert_close(filled, wanted_filled)
    wanted_calls = step.layers * len(logits) if is_fast and is_there else []
    assert len(calls) == len(wanted_calls)
    for ((_, weight, bias, *_), options), layer in zip(calls, wanted_calls, strict=True):
        own = layer.self_attention
        assert weight is own.qkv.weights[0] and bias is own.qkv.biases[0]
        assert options["pdl"] and options["eps"] == own.norm.eps


def test_a_stream_is_stored_once_it_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "has_kernel", lambda *_: False)
    stream, layer = ResidualStream(torch.randn(1, WIDTH)), Linear((torch.randn(WIDTH, WIDTH),), (torch.randn(WIDTH),))
    norm = Norm("layer_norm", torch.randn(WIDTH), torch.randn(WIDTH), 1e-3)
    assert stream.is_stored
    stream.add(torch.randn(1, WIDTH), layer)
    assert not stream.is_stored
    stream.linear(layer, norm)
    assert stream.is_stored
    for name in ("has_kernel", "emits_partials", "accepts_partials"):
        monkeypatch.setattr(residual_stream, name, lambda *_, **of_norm: True)
    stream.add(torch.randn(1, WIDTH), layer, (layer, norm))
    assert not stream.is_stored
    stream.linear(layer, norm)
    assert stream.is_stored


@pytest.mark.parametrize("against", ["", "bias", "beams", "several weights", "added up", "addends"])
@torch.no_grad()
def test_what_that_kernel_is_not_for(against: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias, T5's say, and an ancestry it does not know; and it reads a stream that is there."""
    torch.manual_seed(0)
    heads, head_dim, rows = 3, 8, 2
    bias = RelativeBias(torch.empty(2, heads), torch.zeros_like, 3) if against == "bias" else None
    shape = gpt2_step("cpu", torch.float32, n_embd=WIDTH, n_head=heads).shape
    weight, norm = torch.randn(3 * WIDTH, WIDTH) / 5, Norm("layer_norm", torch.randn(WIDTH), torch.randn(WIDTH), 1e-3)
    weights = weight.split(WIDTH) if against == "several weights" else (weight,)
    layer = Linear(tuple(weights), tuple(torch.randn(len(weight)) for weight in weights))
    out, hidden = Linear((torch.randn(WIDTH, WIDTH),), (torch.randn(WIDTH),)), torch.randn(2, rows, WIDTH)
    monkeypatch.setattr(attention, "has_kernel", lambda *_: True)
    monkeypatch.setattr(layers, "has_kernel", lambda *_: False)
    monkeypatch.setattr(attention, "is_fast", lambda *_, **of_norm: True)
    if against == "addends":
        for name in ("has_kernel", "emits_partials", "accepts_partials"):
            monkeypatch.setattr(residual_stream, name, lambda *_, **of_norm: True)

    def begun() -> tuple[StepAttention, ResidualStream, Tensor]:
        stream = ResidualStream(hidden[0].clone())
        if against in ("added up", "addends"):
            stream.add(hidden[1], out, (layer, norm))
        sizes = Sizes(rows, 8, queries_per_kv=2, beams=2) if against == "beams" else Sizes(rows, 8)
        state = DecodeState(sizes, shape, 9)
        state.begin(5)
        cache = torch.randn(state.cache[0].shape, generator=torch.Generator().manual_seed(1))
        return StepAttention(state, {id(bias): torch.ones(heads, 4)}, {}), stream, cache

    calls = record_qkv_attention(monkeypatch)
    slots, stream, cache = begun()
    own = SelfAttention(norm, layer, out, head_dim**-0.5, relative_bias=bias)
    output = slots.project_to_slots(stream, own, cache)
    assert len(calls) == (against == "")
    slots, stream, expected_cache = begun()
    monkeypatch.setattr(attention, "is_fast", lambda *_, **of_norm: False)
    torch.testing.assert_close(output, slots.project_to_slots(stream, own, expected_cache))
    torch.testing.assert_close(cache, expected_cache)


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize(("width", "heads", "rows", "taken"), [(1024, 16, 1, 4), (1600, 25, 1, 4), (1024, 16, 2, 0)])
def test_layers_of_models_attend_where_they_project(
    width: int, heads: int, rows: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    step = gpt2_step("cuda", torch.bfloat16, n_layer=4, n_embd=width, n_head=heads)
    state = DecodeState(Sizes(rows, 128), step.shape, step.vocab)
    with RawCalls() as raw:
        logits = logits_of_steps(step, state)
    assert raw.names().count("decode_qkv_attention_.default") == taken * len(logits)
    assert raw.names().count("decode_attention_.default") == (4 - taken) * len(logits)
    monkeypatch.setattr(attention, "is_fast", lambda *_, **of_norm: False)
    expected = logits_of_steps(step, DecodeState(Sizes(rows, 128), step.shape, step.vocab))
    assert error(logits, expected) <= 16 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [40, 37])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    ("weights", "activation", "gated"),
    [
        (1, None, False),
        (1, "relu", False),
        (1, "gelu_tanh", False),
        (3, None, False),
        (2, "relu", False),
        (2, "gelu_tanh", True),
    ],
)
@torch.no_grad()
def test_rows_for_the_blas_library(
    each_device: torch.device,
    weights: int,
    activation: str | None,
    gated: bool,
    residual: bool,
    biased: bool,
    columns: int,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    x = make(ROWS, WIDTH)
    matrices = [make(columns, WIDTH) / 4 if i % 2 else (make(WIDTH, columns) / 4).T for i in range(weights)]
    biases = [make(columns) for _ in range(weights if biased else 0)]
    norm = Norm("layer_norm", make(WIDTH), make(WIDTH), 1e-3)
    added = make(ROWS, columns * (1 if gated else weights)) if residual else None
    options = {"norm": norm.kind, "norm_weight": norm.weight, "norm_bias": norm.bias, "eps": norm.eps}
    options.update(activation=activation, gated=gated)

    plain = decode_linear_reference(x, matrices, biases or None, residual=added, **options)
    options.update(norm_weight=norm.weight.double(), norm_bias=norm.bias.double())
    judge = decode_linear_reference(
        to_float64(x),
        [to_float64(matrix) for matrix in matrices],
        [to_float64(bias) for bias in biases] or None,
        residual=None if added is None else to_float64(added),
        **options,
    )
    output = linear(
        x,
        Linear(tuple(matrices), tuple(biases)),
        norm=norm,
        activation=activation,
        gated=gated,
        residual=added,
    )
    assert output.dtype is dtype and output.stride(1) == 1
    assert error([output], [judge]) <= 2 * error([plain], [judge]) + 8 * torch.finfo(dtype).eps


@torch.no_grad()
def test_what_the_blas_library_leaves_no_launch_for(each_device: torch.device) -> None:
    """The product is added where the residual is; several products stand side by side from the start."""
    x, residual = torch.randn(ROWS, WIDTH), torch.randn(ROWS, 5)
    weight = torch.randn(5, WIDTH)
    expected = residual + x @ weight.T
    output = linear(x, Linear((weight,)), residual=residual)
    assert output.data_ptr() == residual.data_ptr()
    torch.testing.assert_close(output, expected)
    with AtenCalls() as aten:
        linear(x, Linear((weight,) * 3))
    assert aten.names.count("mm.out") == 3 and "cat.default" not in aten.names


@pytest.mark.parametrize("biased", [True, False])
@torch.no_grad()
def test_packed_weights_are_dequantised_a_part_at_a_time(each_device, biased, monkeypatch) -> None:
    monkeypatch.setattr(library_products, "PART_BYTES", 40 * 64 * 2)  # 32 outputs
    low = [quantize(torch.randn(n, 64).half(), 4, 32) for n in (100, 7)]
    packed = tuple(pack_for_cuda(weight, torch.float16) for weight in low)
    placeholders = tuple(torch.full(weight.shape, torch.nan).half() for weight in low)
    biases = tuple(torch.randn(n).half() for n in (100, 7)) if biased else ()
    x = torch.randn(MAX_ROWS + 1, 64).half()
    with AtenCalls() as aten:
        output = linear(x, Linear(placeholders, biases, low_bit=packed))
    assert aten.names.count("addmm.out" if biased else "mm.out") >= 5
    exact = torch.cat([dequantize(weight, torch.float64) for weight in low])
    expected = to_float64(x) @ exact.T + (torch.cat(biases).double() if biased else 0)
    assert error([output], [expected]) <= 4 * torch.finfo(torch.float16).eps


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [96, 128, 136])
@torch.no_grad()
def test_many_rows_are_normalised_first(rows: int, monkeypatch) -> None:
    norms, fused = [], ops.decode_linear
    monkeypatch.setattr(layers.ops, "decode_linear", lambda *a, **k: norms.append(k.get("norm")) or fused(*a, **k))
    x, weight = (torch.randn(n, 256, device="cuda", dtype=torch.bfloat16) for n in (rows, 192))
    norm = Norm("t5_rms_norm", torch.rand(256, device="cuda", dtype=torch.bfloat16), None, 1e-6)
    output = linear(x, Linear((weight,)), norm=norm)
    assert norms == ["rms_norm" if rows <= 128 else None]
    expected = layers.normalised(x.double(), norm._replace(weight=norm.weight.double())) @ weight.double().T
    assert (output - expected).norm() < 8e-3 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [3, ROWS])
@pytest.mark.parametrize("biased", [True, False])
@torch.no_grad()
def test_a_residual_stream_adds_every_sublayer_once(
    each_device: torch.device, biased: bool, rows: int, dtype: torch.dtype, monkeypatch
) -> None:
    """Sums of a few sublayers, of which a norm takes along those that a product with a bias cannot."""
    torch.manual_seed(0)
    taken = []
    together = ops.add_layer_norm
    monkeypatch.setattr(layers.ops, "add_layer_norm", lambda *pair: taken.append(pair) or together(*pair))

    def make(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    hidden, norm = make(rows, WIDTH), Norm("layer_norm", make(WIDTH), make(WIDTH), 1e-3)
    chain = [Linear((make(WIDTH, WIDTH) / 5,), (make(WIDTH),) if biased else ()) for _ in range(6)]

    def run(like: torch.dtype) -> Tensor:
        total = hidden.to(like)
        for read, added in zip(chain[::2], chain[1::2], strict=True):
            inner = torch.nn.functional.layer_norm(total, (WIDTH,), norm.weight.to(like), norm.bias.to(like), norm.eps)
            for layer in (read, added):
                bias = layer.biases[0].to(like) if biased else None
                inner = torch.nn.functional.linear(inner, layer.weights[0].to(like), bias)
            total = total + inner
        return total

    plain, judge = run(dtype), run(torch.float64)
    stream = ResidualStream(hidden.clone())
    for read, added in zip(chain[::2], chain[1::2], strict=True):
        stream.add(stream.linear(read, norm), added)
    output = stream.total()
    assert output.dtype is dtype and stream.total() is output
    assert error([output], [judge]) <= 2 * error([plain], [judge]) + 8 * torch.finfo(dtype).eps
    # On a GPU the decoding kernels run few rows; on a CPU norms are PyTorch's.
    by_library = each_device.type == "cuda" and rows == ROWS
    assert len(taken) == (2 if biased and by_library else 0)


@pytest.mark.gpu
@torch.no_grad()
def test_rows_of_an_odd_vocabulary_are_aligned() -> None:
    x, weight = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((ROWS, 64), (5025, 64)))
    output = linear(x, Linear((weight,)))
    assert output.shape == (ROWS, 5025) and output.stride() == (5032, 1)
    torch.testing.assert_close(output, x @ weight.T)
