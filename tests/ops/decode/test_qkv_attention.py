"""Norm, projection and attention of a step, against the two ops that they are, transformers and float64."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from fuseopt.bench.suites.kernels import launches_of
from fuseopt.errors import BackendError
from fuseopt.ops import (
    decode_attention_,
    decode_embedding,
    decode_linear,
    decode_qkv_attention_,
    decode_select_,
)
from fuseopt.ops.decode.qkv_attention import RAW, is_fast, sample_inputs, takes_qkv_attention
from fuseopt.tuning import tuned
from tests.ops.cases import DTYPES, Case, RawCalls, cases, error, examples, needs_sm90, to_float64
from tests.ops.variations import poisoned_allocations

MOST_PLACES, MOST_COLUMNS, HEAD_DIM = 512, 1664, 64
HALVES = (torch.bfloat16, torch.float16)
LAYER_NORM, RMS_NORM = "layer_norm", "rms_norm"
EPS = 1e-3
# (K, heads) of layers that decode_linear's own kernel of one row multiplies in the same way: GPT-2 XL's, and of the
# longest K.
LARGE = ((1600, 25), (MOST_COLUMNS, 25))
# Of all that the kernel takes: GPT-2 medium's and large's as well, and two whose K ends within a stage of a warp.
LAYERS = (*LARGE, (1024, 16), (1280, 20), (1288, 5), (200, 3))
TWO_OPS = ["decode_linear.default", "decode_attention_.default"]
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
every_norm = pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM])

Layer = tuple[Tensor, Tensor, Tensor | None]


def layer_of(
    columns: int,
    heads: int,
    dtype: torch.dtype,
    device: str | torch.device,
    *,
    norm: str = LAYER_NORM,
    head_dim: int = HEAD_DIM,
    rows: int = 1,
    shift: float = 0.0,
    is_biased: bool = True,
) -> tuple[Layer, dict[str, Any]]:
    """Input, a weight [N, K] that lies as [K, N], and a bias; and a norm."""

    def make(*size: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return (scale * torch.randn(size, device=device) + shift).to(dtype)

    outputs = 3 * heads * head_dim
    of_norm = {"norm": norm, "norm_weight": make(columns), "norm_bias": make(columns) if norm == LAYER_NORM else None}
    weight = make(columns, outputs, scale=columns**-0.5).T
    return (make(rows, columns, shift=shift), weight, make(outputs) if is_biased else None), of_norm


def caches_of(rows: int, heads: int, capacity: int, head_dim: int, like: Tensor) -> Tensor:
    """[2, rows, heads, capacity, head_dim]: keys, then values."""
    return torch.randn(2, rows, heads, capacity, head_dim, device=like.device).to(like.dtype)


def two_ops(
    layer: Layer,
    of_norm: dict[str, Any],
    caches: Tensor | Sequence[Tensor],
    positions: Tensor,
    *,
    mask: Tensor | None,
    scale: float,
    eps: float,
    backend: str = "auto",
) -> Tensor:
    qkv = decode_linear(*layer, **of_norm, eps=eps, backend=backend)
    key_cache, value_cache = caches[0], caches[1]
    query, key, value = qkv.view(-1, 3, key_cache.shape[1], key_cache.shape[3]).unbind(1)
    return decode_attention_(
        query, key, value, key_cache, value_cache, positions, mask=mask, scale=scale, backend=backend
    )


def judged(
    layer: Layer,
    of_norm: dict[str, Any],
    caches: Tensor,
    positions: Tensor,
    *,
    mask: Tensor | None,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """In float64 by PyTorch's functions: the result, and the caches with the new keys and values."""
    input, weight, bias = (None if tensor is None else to_float64(tensor) for tensor in layer)
    norm, norm_weight, norm_bias = (to_float64(of) if isinstance(of, Tensor) else of for of in of_norm.values())
    if norm == LAYER_NORM:
        normed = F.layer_norm(input, input.shape[1:], norm_weight, norm_bias, eps)
    else:
        normed = F.rms_norm(input, input.shape[1:], norm_weight, eps)
    _, rows, heads, capacity, head_dim = caches.shape
    query, *new = F.linear(normed, weight, bias).view(rows, 3, heads, head_dim).unbind(1)
    caches, places = to_float64(caches).clone(), positions.long().expand(rows)
    for cache, vectors in zip(caches, new, strict=True):
        cache[torch.arange(rows, device=input.device), :, places] = vectors
    attended = torch.arange(capacity, device=input.device) <= places.unsqueeze(1)
    attended = (attended if mask is None else attended & mask)[:, None]
    keys, values = caches.masked_fill(~attended.unsqueeze(-1), 0.0)
    scores = (keys @ query.unsqueeze(-1)).squeeze(-1) * scale
    probabilities = scores.masked_fill(~attended, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (probabilities.unsqueeze(2) @ values).flatten(1), caches


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@torch.no_grad()
def test_gpt2_step_by_step_with_left_padding() -> None:
    torch.manual_seed(0)
    heads, head_dim, width, capacity = 3, 8, 24, 12
    config = GPT2Config(n_embd=width, n_head=heads, attn_pdrop=0.0, resid_pdrop=0.0)
    config._attn_implementation = "eager"
    norm, module, cache = nn.LayerNorm(width, eps=EPS), GPT2Attention(config, layer_idx=0).eval(), DynamicCache()
    for parameter in norm.parameters():
        parameter.normal_()
    of_norm = {"norm": LAYER_NORM, "norm_weight": norm.weight, "norm_bias": norm.bias, "eps": norm.eps}
    caches = torch.full((2, 2, heads, capacity, head_dim), torch.nan)
    keep = torch.arange(capacity) >= torch.tensor([[0], [2]])
    for position in range(9):
        x = torch.randn(2, 1, width)
        mask = torch.where(keep[:, : position + 1], 0.0, torch.finfo(torch.float32).min)[:, None, None]
        expected, _ = module(norm(x), past_key_values=cache, attention_mask=mask)
        attended = decode_qkv_attention_(
            x[:, 0],
            module.c_attn.weight.T,
            module.c_attn.bias,
            *caches,
            torch.tensor([position]),
            mask=keep,
            scale=module.scaling,
            **of_norm,
        )
        attends = keep[:, : position + 1].any(1)
        torch.testing.assert_close(module.c_proj(attended)[attends], expected[:, 0][attends])


@pytest.mark.parametrize("case", cases("decode_qkv_attention_"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_against_float64(case: Case, dtype: torch.dtype) -> None:
    for sample in case.samples(dtype):
        *layer, keys, values, positions = sample.args
        caches, options = torch.stack((keys, values)), dict(sample.kwargs)
        of_norm = {name: options.pop(name) for name in ("norm", "norm_weight", "norm_bias")}
        of_both = {"mask": None, "eps": 1e-5, **options}
        judge, expected_caches = judged(tuple(layer), of_norm, caches, positions, **of_both)
        with poisoned_allocations():
            output = case(*sample.args, **sample.kwargs)
        assert output.dtype is dtype and output.is_contiguous() and output.shape == judge.shape
        eps = torch.finfo(dtype).eps
        steps = {torch.float64: 256, torch.float32: 32}.get(dtype, 8)
        assert error([output], [judge]) <= steps * eps
        written = torch.stack((keys, values))
        assert error([written], [expected_caches], least=1.0) <= steps * eps
        others = torch.arange(caches.shape[3], device=case.device) != positions
        assert torch.equal(written[:, :, :, others], caches[:, :, :, others])


def lying_in_rows(weight: Tensor) -> Tensor:
    return weight.contiguous()


def lying_in_columns(weight: Tensor) -> Tensor:
    return weight.T.contiguous().T


def lying_apart(weight: Tensor) -> Tensor:
    return weight.repeat_interleave(2, 0).repeat_interleave(3, 1)[::2, ::3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("lay", [lying_in_rows, lying_in_columns, lying_apart])
@pytest.mark.parametrize(("rows", "is_biased", "masked"), [(1, True, False), (3, True, True), (20, False, True)])
@every_norm
@torch.no_grad()
def test_is_a_layer_and_its_attention(
    each_device: torch.device,
    norm: str,
    rows: int,
    is_biased: bool,
    masked: bool,
    lay: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
) -> None:
    """To the bit where the kernel takes no such heads: of one position for all rows, or one each, of either dtype.

    A CPU has kernels of the two ops but not of the layer, which there is the two ops' references.
    """
    torch.manual_seed(0)
    heads, head_dim, capacity = 2, 16, 9
    (input, weight, bias), of_norm = layer_of(
        40, heads, dtype, each_device, norm=norm, head_dim=head_dim, rows=rows, is_biased=is_biased
    )
    layer = (input, lay(weight), bias)
    options = {"mask": torch.rand(rows, capacity) > 0.3 if masked else None, "scale": 0.3, "eps": EPS}
    for positions in (torch.tensor([4]), torch.randint(0, capacity, (rows,), dtype=torch.int32)):
        caches = caches_of(rows, heads, capacity, head_dim, weight)
        expected_caches = caches.clone()
        backend = "reference" if each_device.type == "cpu" else "auto"
        expected = two_ops(layer, of_norm, expected_caches, positions, backend=backend, **options)
        output = decode_qkv_attention_(*layer, *caches, positions, **of_norm, **options)
        assert output.shape == (rows, heads * head_dim) and output.dtype is dtype and output.is_contiguous()
        assert torch.equal(output, expected) and torch.equal(caches, expected_caches)


WRONG = [
    ({"input": torch.zeros(12)}, ValueError, r"input must be \[rows, K\] and key_cache"),
    ({"key_cache": torch.zeros(2, 2, 9)}, ValueError, r"input must be \[rows, K\] and key_cache"),
    ({"input": torch.zeros(2, 12).half()}, ValueError, "weight must have input's dtype torch.float16"),
    ({"input": torch.zeros(2, 13)}, ValueError, r"weight must have shape \(24, 13\), not \(24, 12\)"),
    ({"weight": torch.zeros(16, 12), "bias": None}, ValueError, r"weight must have shape \(24, 12\), not \(16, 12\)"),
    ({"bias": torch.zeros(23)}, ValueError, "bias must have shape"),
    ({"norm": "batch_norm"}, ValueError, "norm must be 'layer_norm', 'rms_norm', 'gemma_rms_norm', not 'batch_norm'"),
    (
        {"norm": None, "norm_weight": None},
        ValueError,
        "norm must be 'layer_norm', 'rms_norm', 'gemma_rms_norm', not None",
    ),
    ({"norm_weight": torch.zeros(11)}, ValueError, "norm_weight must have shape"),
    ({"norm": RMS_NORM, "norm_bias": torch.zeros(12)}, ValueError, "rms_norm has no bias"),
    ({"value_cache": torch.zeros(2, 2, 8, 4)}, ValueError, "value_cache must have shape"),
    ({"key_cache": torch.zeros(2, 2, 9, 4).half()}, ValueError, "key_cache must have weight's dtype"),
    ({"key_cache": torch.zeros(2, 2, 4, 9).mT}, ValueError, "key_cache must be contiguous"),
    (
        {"key_cache": torch.zeros(1, 2, 9, 4), "value_cache": torch.zeros(1, 2, 9, 4)},
        ValueError,
        "with a row for each of the 2 rows",
    ),
    ({"positions": torch.zeros(3, dtype=torch.int64)}, ValueError, "positions must have one element, or 2, not 3"),
    ({"positions": torch.zeros(1)}, TypeError, "positions must be int32 or int64, not torch.float32"),
    ({"mask": torch.ones(2, 8, dtype=torch.bool)}, ValueError, "mask must have shape"),
    ({"mask": torch.ones(2, 9)}, TypeError, "mask must be bool"),
]


@pytest.mark.parametrize(("changed", "exception", "message"), WRONG)
def test_wrong_arguments_change_nothing(
    each_device: torch.device, changed: dict[str, Any], exception: type[Exception], message: str
) -> None:
    arguments = {
        "input": torch.ones(2, 12),
        "weight": torch.ones(24, 12),
        "bias": torch.ones(24),
        "key_cache": torch.zeros(2, 2, 9, 4),
        "value_cache": torch.zeros(2, 2, 9, 4),
        "positions": torch.tensor([3]),
        "norm": LAYER_NORM,
        "norm_weight": torch.ones(12),
    }
    arguments |= {name: of.to(each_device) if isinstance(of, Tensor) else of for name, of in changed.items()}
    with pytest.raises(exception, match=message):
        decode_qkv_attention_(**arguments)
    assert all(arguments[name].count_nonzero() == 0 for name in ("key_cache", "value_cache"))


def test_a_gradient_comes_from_the_reference(each_device: torch.device) -> None:
    torch.manual_seed(0)
    layer, of_norm = layer_of(1024, 3, torch.bfloat16, each_device)
    caches, positions = caches_of(1, 3, 9, HEAD_DIM, layer[0]), torch.tensor([5])
    before, options = caches.clone(), {"mask": None, "scale": 0.1, "eps": EPS}
    for parameter in (*layer, of_norm["norm_weight"], of_norm["norm_bias"]):
        parameter.requires_grad_()
        with pytest.raises(BackendError, match="decode_qkv_attention_: 'cuda' takes no part in autograd"):
            decode_qkv_attention_(*layer, *caches, positions, **of_norm, **options, backend="cuda")
        written, expected_caches = ([cache.clone() for cache in caches] for _ in range(2))
        with RawCalls() as raw:
            output = decode_qkv_attention_(*layer, *written, positions, **of_norm, **options)
        assert raw.calls == []
        expected = two_ops(layer, of_norm, expected_caches, positions, **options, backend="reference")
        gradient, expected_gradient = (
            torch.autograd.grad(of.float().square().sum(), parameter)[0] for of in (output, expected)
        )
        assert gradient.count_nonzero() > 0 and torch.equal(gradient, expected_gradient)
        parameter.requires_grad_(False)
    assert torch.equal(caches, before)


def test_the_meta_device() -> None:
    for sample in sample_inputs(torch.device("meta"), torch.bfloat16, False):
        rows, heads, _, head_dim = sample.args[3].shape
        assert decode_qkv_attention_(*sample.args, **sample.kwargs).shape == (rows, heads * head_dim)


@pytest.mark.parametrize("compiled", [False, True])
def test_of_tensors_without_addresses_nothing_is_known(compiled: bool) -> None:
    """They are traced to be left to two ops, whatever device they are said to be on."""
    with FakeTensorMode():
        layer, of_norm = layer_of(1024, 16, torch.bfloat16, "cuda")
        caches = [torch.empty(1, 16, 40, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)]

        def asked() -> bool:
            return is_fast(*layer, *caches, **of_norm) or takes_qkv_attention(*layer, *caches, **of_norm)

        assert (torch.compile(asked, backend="eager") if compiled else asked)() is False
        positions = torch.zeros(1, dtype=torch.int64, device="cuda")
        output = RAW["cuda"](*layer, *caches, positions, None, 1.0, *of_norm.values(), EPS, True)
        assert output.shape == (1, 16 * HEAD_DIM) and output.dtype is torch.bfloat16 and output.is_cuda


@pytest.mark.parametrize("columns", [24, 1024])
@torch.no_grad()
def test_compiles_into_one_graph(each_device: torch.device, columns: int) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if columns == 24 else torch.bfloat16
    layer, of_norm = layer_of(columns, 2, dtype, each_device)
    caches, positions = caches_of(1, 2, 40, HEAD_DIM, layer[0]), torch.tensor([33])
    before, expected_caches = caches.clone(), caches.clone()
    options = {"mask": torch.rand(1, 40) > 0.3, "scale": 0.125, "eps": EPS}
    expected = two_ops(layer, of_norm, expected_caches, positions, **options)
    torch._dynamo.reset()
    compiled = torch.compile(decode_qkv_attention_, fullgraph=True, backend="aot_eager")
    output = compiled(*layer, *caches, positions, **of_norm, **options)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(caches, expected_caches)
    assert (caches[:, :, :, 33] != before[:, :, :, 33]).any(-1).all()


def test_what_it_is_fast_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a K that is long enough, what the kernel takes."""
    taken: list[bool] = []
    monkeypatch.setattr("fuseopt.ops.decode.qkv_attention.takes_qkv_attention", lambda *_, **of_norm: taken[0])
    least = tuned("qkv_attention_min_columns", torch.device("cpu"))
    for columns in (least - 8, least):
        layer, of_norm = layer_of(columns, 2, torch.bfloat16, "cpu")
        for takes in (False, True):
            taken[:] = [takes]
            caches = caches_of(1, 2, 9, HEAD_DIM, layer[0])
            assert is_fast(*layer, *caches, **of_norm) == (takes and columns == least)
    monkeypatch.undo()
    assert not is_fast(*layer, *caches, **of_norm)  # on a CPU


@torch.no_grad()
def check(layer: Layer, of_norm: dict[str, Any], caches: Tensor, positions: Tensor, mask: Tensor | None) -> None:
    """By the kernel, against float64; the same bits with and without overlap; nothing else is written."""
    position, capacity = int(positions), caches.shape[3]
    options = {"mask": mask, "scale": HEAD_DIM**-0.5, "eps": EPS}
    assert takes_qkv_attention(*layer, *caches, **of_norm)
    written, overlapping, plain_caches = (caches.clone() for _ in range(3))
    with poisoned_allocations(), RawCalls() as raw:
        output = decode_qkv_attention_(*layer, *written, positions, **of_norm, **options, backend="cuda")
        again = decode_qkv_attention_(*layer, *overlapping, positions, **of_norm, **options, pdl=True, backend="cuda")
    assert raw.names() == ["decode_qkv_attention_.default"] * 2
    assert same_bits(again, output) and same_bits(overlapping, written)
    places = torch.arange(capacity, device=caches.device)
    assert same_bits(written[:, :, :, places != position], caches[:, :, :, places != position])
    if not 0 <= position < capacity:
        return
    plain = two_ops(layer, of_norm, plain_caches, positions, **options, backend="reference")
    judge, judged_caches = judged(layer, of_norm, caches, positions, **options)
    rounding = 8 * torch.finfo(output.dtype).eps
    assert error([output], [judge]) <= 2 * error([plain], [judge]) + rounding
    new, plain_new, judged_new = (of[:, :, :, position] for of in (written, plain_caches, judged_caches))
    assert error([new], [judged_new], least=1.0) <= 2 * error([plain_new], [judged_new], least=1.0) + rounding
    attended = places <= position
    if not (attended if mask is None else attended & mask).any():
        assert output.count_nonzero() == 0


@pytest.mark.gpu
@needs_sm90
@every_half
@every_norm
@pytest.mark.parametrize(("capacity", "position"), [(MOST_PLACES, MOST_PLACES - 1), (300, 257), (40, 3), (1, 0)])
@pytest.mark.parametrize(("columns", "heads"), LAYERS)
def test_layers_of_models(
    columns: int, heads: int, capacity: int, position: int, norm: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer, of_norm = layer_of(columns, heads, dtype, "cuda", norm=norm, is_biased=capacity != 300)
    caches = caches_of(1, heads, capacity, HEAD_DIM, layer[0])
    check(layer, of_norm, caches, torch.tensor([position], device="cuda"), None)


def holes(places: Tensor, position: int) -> Tensor:
    return torch.rand(len(places), device=places.device) > 0.3


def no_new_token(places: Tensor, position: int) -> Tensor:
    return places != position


def the_new_token_alone(places: Tensor, position: int) -> Tensor:
    return places == position


def nothing(places: Tensor, position: int) -> Tensor:
    return places < 0


MASKS = (None, holes, no_new_token, the_new_token_alone, nothing)


@pytest.mark.gpu
@needs_sm90
@settings(max_examples=examples(200), deadline=None)
@given(
    sizes=st.sampled_from(LAYERS),
    # Of 512 places a warp has two pieces of 32, of 256 one.
    capacity=st.one_of(st.integers(1, MOST_PLACES), st.sampled_from([1, 31, 32, 33, 256, 257, MOST_PLACES])),
    place=st.one_of(st.integers(0, MOST_PLACES - 1), st.just(-1)),
    of_mask=st.sampled_from(MASKS),
    hidden=st.sampled_from([None, torch.nan, torch.inf, -torch.inf]),
    indices=st.sampled_from([torch.int32, torch.int64]),
    dtype=st.sampled_from(HALVES),
    norm=st.sampled_from([LAYER_NORM, RMS_NORM]),
    shift=st.sampled_from([0.0, 0.0, 100.0]),
    is_biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
@torch.no_grad()
def test_kernel_against_float64(
    sizes: tuple[int, int],
    capacity: int,
    place: int,
    of_mask: Callable[[Tensor, int], Tensor] | None,
    hidden: float | None,
    indices: torch.dtype,
    dtype: torch.dtype,
    norm: str,
    shift: float,
    is_biased: bool,
    seed: int,
) -> None:
    """A row far from zero takes another way to its deviation; what places hold that are not attended to is nowhere."""
    torch.manual_seed(seed)
    (columns, heads), position = sizes, place % capacity
    layer, of_norm = layer_of(columns, heads, dtype, "cuda", norm=norm, shift=shift, is_biased=is_biased)
    caches, places = caches_of(1, heads, capacity, HEAD_DIM, layer[0]), torch.arange(capacity, device="cuda")
    mask = None if of_mask is None else of_mask(places, position).unsqueeze(0)
    if hidden is not None:
        seen = places < position if mask is None else (places < position) & mask[0]
        caches.masked_fill_(~seen.unsqueeze(1), hidden)
    check(layer, of_norm, caches, torch.tensor([position], device="cuda", dtype=indices), mask)


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize("indices", [torch.int32, torch.int64])
@pytest.mark.parametrize("capacity", [1, 40, MOST_PLACES])
@pytest.mark.parametrize(("columns", "heads"), [(1600, 25), (200, 3)])
@torch.no_grad()
def test_a_position_outside_the_cache_writes_nothing(
    columns: int, heads: int, capacity: int, indices: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer, of_norm = layer_of(columns, heads, torch.bfloat16, "cuda")
    for position in (capacity, capacity + 33, -1, -5):
        caches = caches_of(1, heads, capacity, HEAD_DIM, layer[0])
        check(layer, of_norm, caches, torch.tensor([position], device="cuda", dtype=indices), None)


@pytest.mark.gpu
@needs_sm90
@every_half
@every_norm
@pytest.mark.parametrize(("columns", "heads"), LARGE)
@torch.no_grad()
def test_keys_and_values_to_the_bit(columns: int, heads: int, norm: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shift, is_biased, position in ((0.0, True, 0), (0.0, False, 70), (100.0, True, 299)):
        layer, of_norm = layer_of(columns, heads, dtype, "cuda", norm=norm, shift=shift, is_biased=is_biased)
        caches, positions = caches_of(1, heads, 300, HEAD_DIM, layer[0]), torch.tensor([position], device="cuda")
        decode_qkv_attention_(*layer, *caches, positions, **of_norm, eps=EPS, backend="cuda")

        def project(layer: Layer = layer, of_norm: dict[str, Any] = of_norm) -> Tensor:
            return decode_linear(*layer, **of_norm, eps=EPS, backend="cuda")

        assert same_bits(caches[:, 0, :, position], project().view(3, heads, HEAD_DIM)[1:])
        (launch,) = launches_of(project)
        assert "decode_linear_gemv_kernel" in launch.name


def place_apart(tensor: Tensor) -> Tensor:
    """Contiguous, and one element past an aligned address."""
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.gpu
@needs_sm90
@torch.no_grad()
def test_what_it_does_not_take_is_left_to_two_ops() -> None:
    torch.manual_seed(0)

    def arguments_of(
        *,
        columns: int = 1024,
        heads: int = 3,
        capacity: int = 40,
        dtype: torch.dtype = torch.bfloat16,
        change: Callable[[Tensor], Tensor] | None = None,
        of: str = "",
        **layer: Any,
    ) -> tuple[Layer, dict[str, Any], list[Tensor]]:
        (input, weight, bias), of_norm = layer_of(columns, heads, dtype, "cuda", **layer)
        caches = caches_of(len(input), heads, capacity, layer.get("head_dim", HEAD_DIM), weight)
        tensors = {"input": input, "weight": weight, "bias": bias, "keys": caches[0], "values": caches[1], **of_norm}
        if change is not None:
            tensors[of] = change(tensors[of])
        of_norm = {name: tensors[name] for name in of_norm}
        return (tensors["input"], tensors["weight"], tensors["bias"]), of_norm, [tensors["keys"], tensors["values"]]

    def ran(layer: Layer, of_norm: dict[str, Any], caches: list[Tensor]) -> list[str]:
        # Where they lie decides on the kernel.
        expected_caches = [place_apart(cache) if cache.data_ptr() % 16 else cache.clone() for cache in caches]
        positions, options = torch.tensor([21], device="cuda"), {"mask": None, "scale": 0.125, "eps": EPS}
        expected = two_ops(layer, of_norm, expected_caches, positions, **options)
        for backend in ("auto", "cuda"):
            with RawCalls() as raw:
                output = decode_qkv_attention_(
                    *layer, *caches, positions, **of_norm, **options, pdl=True, backend=backend
                )
            if raw.names() == TWO_OPS:
                assert all(map(torch.equal, (output, *caches), (expected, *expected_caches)))
        return raw.names()

    def takes(layer: Layer, of_norm: dict[str, Any], caches: list[Tensor]) -> bool:
        return takes_qkv_attention(*layer, *caches, **of_norm)

    for like in (
        {},
        {"dtype": torch.float16},
        {"norm": RMS_NORM},
        {"is_biased": False},
        {"capacity": MOST_PLACES},
        *({"columns": columns, "heads": heads} for columns, heads in LAYERS),
    ):
        arguments = arguments_of(**like)
        assert takes(*arguments) and ran(*arguments) == ["decode_qkv_attention_.default"], like
        layer, of_norm, caches = arguments
        least = tuned("qkv_attention_min_columns", layer[0].device)
        assert is_fast(*layer, *caches, **of_norm) == (like.get("columns", 1024) >= least)
        positions, mask = torch.tensor([21], device="cuda"), torch.ones_like(caches[0][:, 0, :, 0], dtype=torch.bool)

        def call(arguments: Any = arguments, positions: Tensor = positions, mask: Tensor = mask) -> Tensor:
            layer, of_norm, caches = arguments
            return decode_qkv_attention_(*layer, *caches, positions, mask=mask, **of_norm, backend="cuda")

        assert ["decode_qkv_attention_kernel" in launch.name for launch in launches_of(call)] == [True], like
    for unlike in (
        {"rows": 2},
        {"columns": MOST_COLUMNS + 8},
        {"columns": 1028},
        {"head_dim": 32},
        {"head_dim": 128},
        {"capacity": MOST_PLACES + 1},
        {"dtype": torch.float32},
        {"dtype": torch.float64},
        {"change": lying_in_rows, "of": "weight"},
        *({"change": place_apart, "of": of} for of in ("input", "keys", "values", "norm_weight", "norm_bias")),
        *({"change": Tensor.float, "of": of} for of in ("bias", "norm_weight", "norm_bias")),
    ):
        arguments = arguments_of(**unlike)
        assert not takes(*arguments) and ran(*arguments) == TWO_OPS, unlike
        layer, of_norm, caches = arguments
        assert not is_fast(*layer, *caches, **of_norm)


@pytest.mark.gpu
@needs_sm90
@torch.no_grad()
def test_tensors_on_another_device_are_refused() -> None:
    layer, of_norm = layer_of(1024, 3, torch.bfloat16, "cuda")
    caches = caches_of(1, 3, 40, HEAD_DIM, layer[0])
    before, positions = caches.clone(), torch.tensor([5])
    for keys, place, mask, message in (
        (caches[0], positions, None, "positions must be int64 or int32 on cuda"),
        (caches[0], positions.cuda(), torch.ones(1, 40, dtype=torch.bool), "mask must be bool"),
        (caches[0].cpu(), positions.cuda(), None, "key_cache must be bfloat16 on cuda"),
    ):
        with pytest.raises(RuntimeError, match=message):
            decode_qkv_attention_(*layer, keys, caches[1], place, mask=mask, **of_norm, backend="cuda")
    assert torch.equal(caches, before)


@pytest.mark.gpu
@needs_sm90
@torch.no_grad()
def test_the_raw_op_passes_torch_s_opcheck() -> None:
    torch.manual_seed(0)
    for columns, heads, norm in ((1024, 16, LAYER_NORM), (200, 3, RMS_NORM)):
        layer, of_norm = layer_of(columns, heads, torch.bfloat16, "cuda", norm=norm)
        caches, positions = caches_of(1, heads, 40, HEAD_DIM, layer[0]), torch.tensor([33], device="cuda")
        for mask in (None, torch.rand(1, 40, device="cuda") > 0.3):
            arguments = (*layer, *caches, positions, mask, 0.125, *of_norm.values(), EPS, False)
            torch.library.opcheck(RAW["cuda"], arguments)


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize(("columns", "heads"), [(1024, 16), (1280, 20), (1600, 25)])
@torch.no_grad()
def test_steps_that_overlap_in_a_graph(columns: int, heads: int) -> None:
    """Each attends to what those ahead have written, where their last kernels have counted to, replay after replay."""
    torch.manual_seed(0)
    steps, first, capacity, vocabulary, dtype = 20, 245, 300, 2400, torch.bfloat16
    (_, weight, bias), of_norm = layer_of(columns, heads, dtype, "cuda")
    layers = [layer_of(columns, heads, dtype, "cuda") for _ in range(2)]
    caches = torch.stack([caches_of(1, heads, capacity, HEAD_DIM, weight) for _ in range(3)])
    square = torch.randn(columns, columns, device="cuda").to(dtype).T / columns**0.5
    token_table, position_table = (torch.randn(n, columns, device="cuda").to(dtype) for n in (vocabulary, capacity))
    tokens, positions, length, pad = torch.zeros(4, 1, device="cuda", dtype=torch.int64)
    ids = torch.zeros(1, steps, device="cuda", dtype=torch.int64)
    unfinished, going = torch.ones(2, 1, device="cuda", dtype=torch.bool)
    options = {"scale": HEAD_DIM**-0.5}

    def results_of(overlap: bool) -> list[Tensor]:
        results, how = [], {"pdl": overlap, "backend": "cuda"}
        for _ in range(steps):
            stream = decode_embedding(tokens, token_table, positions, position_table, **how)
            qkv = decode_linear(stream, weight, bias, **of_norm, **how)
            vectors = qkv.view(1, 3, heads, HEAD_DIM).unbind(1)
            attended = decode_attention_(*vectors, *caches[0], positions, **options, **how)
            stream = decode_linear(attended, square, residual=stream, **how)
            for ((_, *of_layer), norm), of_caches in zip(layers, caches[1:], strict=True):
                attended = decode_qkv_attention_(stream, *of_layer, *of_caches, positions, **norm, **options, **how)
                stream = decode_linear(attended, square, residual=stream, **how)
                results += [attended, stream]
            scores = decode_linear(stream, token_table, norm=LAYER_NORM, **how)
            decode_select_(scores, tokens, ids, length, unfinished, going, pad, counters=[positions], **how)
        return results

    def start(token: int) -> None:
        tokens.fill_(token), positions.fill_(first), length.zero_()
        caches[:, :, :, :, first:] = torch.nan

    start(0)
    results_of(True)
    graph = torch.cuda.CUDAGraph()
    with RawCalls() as raw, torch.cuda.graph(graph):
        results = results_of(True)
    assert raw.names().count("decode_qkv_attention_.default") == 2 * steps
    for token in (1, 7, vocabulary - 1):
        start(token)
        expected, expected_ids = results_of(False), ids.clone()
        expected_caches = caches.clone()
        start(token)
        graph.replay()
        assert torch.equal(ids, expected_ids) and all(map(torch.equal, results, expected))
        assert same_bits(caches, expected_caches) and caches[:, :, :, :, : first + steps].isfinite().all()
        assert all(result.isfinite().all() for result in results)
