"""decode_linear and decode_attention on a CPU at sizes that are no multiple of any vector, and on several threads."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fuseopt.errors import BackendError
from fuseopt.ops import decode_attention, decode_attention_, decode_linear, registry
from fuseopt.ops.decode.attention import decode_attention_reference
from fuseopt.ops.decode.linear import MAX_ROWS, MOST_ROWS_ON_CPU, decode_linear_reference
from tests.axes import covering
from tests.ops.cases import RawCalls, error, to_float64

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(autouse=True)
def needs_the_library() -> None:
    reasons = registry.CPU.not_supported_reasons(torch.device("cpu"), ())
    if reasons:
        pytest.skip(reasons[0])


THREADS = [1, 3, 11]


@pytest.fixture(params=THREADS)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def weight_of(layout: str, out_features: int, in_features: int, dtype: torch.dtype) -> Tensor:
    """[out_features, in_features] as Linear and Conv1D store it, as rows that lie apart, and without unit stride."""
    n, k = out_features, in_features
    weight = {
        "rows": lambda: torch.randn(n, k),
        "columns": lambda: torch.randn(k, n).T,
        "apart": lambda: torch.randn(n, k + 3)[:, 1 : k + 1],
        "strided": lambda: torch.randn(2 * n, 2 * k)[::2, ::2],
    }[layout]()
    return (weight / k**0.5).to(dtype)


@covering(
    rows=[1, 2, 3, 5, 8, 13, 31, 45],
    layout=["rows", "columns", "apart", "strided"],
    dtype=DTYPES,
    threads=THREADS,
    indirect=["threads"],
)
def test_linear_layers_that_threads_share(rows: int, layout: str, dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(rows)
    in_features, out_features = 331, 277  # enough elements for several threads
    weights = [weight_of(layout, out_features, in_features, dtype) for _ in range(2)]
    biases = [torch.randn(out_features) for _ in range(2)]
    x, residual = torch.randn(rows, in_features).to(dtype), torch.randn(rows, 2 * out_features)
    options = {"residual": residual, "activation": "gelu_tanh", "norm": "layer_norm", "eps": 1e-3}
    with RawCalls() as raw:
        output = decode_linear(x, weights, biases, **options, backend="cpu")
    assert "decode_linear.default" in raw.names()
    expected = decode_linear_reference(
        *tree_map_only(Tensor, to_float64, (x, weights, biases)), **{**options, "residual": residual.double()}
    )
    assert error([output], [expected]) <= 8 * torch.finfo(dtype if dtype.itemsize == 2 else torch.float32).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_weights_of_both_layouts_in_one_layer(gated: bool, dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(0)
    weights = [weight_of(layout, 130, 515, dtype) for layout in ("columns", "rows")]
    x = torch.randn(4, 515).to(dtype)
    options = {"gated": gated, "activation": "relu", "norm": "rms_norm", "norm_weight": torch.rand(515).to(dtype)}
    output = decode_linear(x, weights, **options, backend="cpu")
    wide = {**options, "norm_weight": options["norm_weight"].double()}
    expected = decode_linear_reference(*tree_map_only(Tensor, to_float64, (x, weights)), **wide)
    assert error([output], [expected]) <= 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("in_features", [1, 2, 15, 16, 17, 33])
@pytest.mark.parametrize("out_features", [1, 15, 17, 32, 131])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_nothing_is_read_or_written_beyond_the_ends(layout: str, out_features: int, in_features: int) -> None:
    """What lies around a weight is NaN."""
    torch.manual_seed(0)
    sizes = (out_features, in_features) if layout == "rows" else (in_features, out_features)
    around = torch.full((sizes[0] + 2, sizes[1] + 64), torch.nan)
    around[1:-1, :-64][:, : sizes[1]] = torch.randn(sizes)
    part = around[1:-1, : sizes[1]]
    weight = part if layout == "rows" else part.T
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 3, 7, 14):
            x, part = torch.randn(rows, in_features).to(dtype), weight.to(dtype)
            torch.testing.assert_close(decode_linear(x, part, backend="cpu"), x @ part.T)


def test_values_that_are_not_finite_stay_in_their_outputs() -> None:
    weight = torch.ones(140, 50)
    weight[7, 3], weight[9, 49] = torch.nan, torch.inf
    for rows in (2, 9):
        x = torch.ones(rows, 50)
        x[1, 0] = -torch.inf
        for layout in (weight, weight.T.contiguous().T):
            torch.testing.assert_close(decode_linear(x, layout, backend="cpu"), x @ weight.T, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_conv1d", [False, True])
def test_more_rows_are_left_to_the_reference(is_conv1d: bool, dtype: torch.dtype) -> None:
    weight = (torch.randn(6, 5).T if is_conv1d else torch.randn(5, 6)).to(dtype)
    most = MOST_ROWS_ON_CPU[dtype][is_conv1d]
    for rows, taken in ((most, 1), (most + 1, 0)):
        with RawCalls() as raw:
            decode_linear(torch.randn(rows, 6).to(dtype), weight)
        assert raw.names().count("decode_linear.default") == taken


def test_no_kernel_takes_more_than_max_rows() -> None:
    weight = torch.randn(5, 6)
    with pytest.raises(BackendError, match=f"'cpu' takes {MAX_ROWS} rows at most, not {MAX_ROWS + 1}"):
        decode_linear(torch.randn(MAX_ROWS + 1, 6), weight, backend="cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [5, 64, 71])
@pytest.mark.parametrize("queries_per_item", [1, 3])
def test_attention_to_a_cache(queries_per_item: int, head_dim: int, dtype: torch.dtype, threads: int) -> None:
    """Places outside starts, lengths and mask hold NaN."""
    torch.manual_seed(0)
    items, heads, capacity = 3, 2, 150
    query = torch.randn(items * queries_per_item, heads, 2 * head_dim)[..., ::2].to(dtype)
    caches = [torch.randn(items, heads, capacity, head_dim).to(dtype) for _ in range(2)]
    lengths, starts = torch.tensor([150, 97, 33]), torch.tensor([0, 5, 33])
    mask = torch.rand(items, capacity) < 0.8
    options = {"starts": starts, "mask": mask, "bias": torch.randn(heads, 40), "scale": 0.2}
    wide = {**options, "bias": options["bias"].double()}
    expected = decode_attention_reference(*tree_map_only(Tensor, to_float64, (query, *caches)), lengths, **wide)
    places = torch.arange(capacity)
    unused = ~mask | (places >= lengths[:, None]) | (places < starts[:, None])
    for cache in caches:
        cache.masked_fill_(unused[:, None, :, None], torch.nan)
    output = decode_attention(query, *caches, lengths, **options, backend="cpu")
    assert error([output], [expected]) <= 8 * torch.finfo(dtype).eps
    assert not output[2 * queries_per_item :].any()


def test_attention_along_an_ancestry(threads: int) -> None:
    torch.manual_seed(0)
    rows, heads, capacity, head_dim = 4, 3, 70, 20
    query, key, value = torch.randn(3, rows, heads, head_dim).unbind()
    caches = [torch.randn(rows, heads, capacity, head_dim) for _ in range(2)]
    copies = [cache.clone() for cache in caches]
    ancestry = torch.randint(0, rows, (rows, capacity), dtype=torch.int32)
    arguments = torch.tensor([60]), {"ancestry": ancestry, "mask": torch.rand(rows, capacity) < 0.9}
    output = decode_attention_(query, key, value, *caches, arguments[0], **arguments[1], backend="cpu")
    expected = decode_attention_(query, key, value, *copies, arguments[0], **arguments[1], backend="reference")
    torch.testing.assert_close(output, expected)
    assert all(torch.equal(*pair) for pair in zip(caches, copies, strict=True))
    assert torch.equal(caches[0][:, :, 60], key) and torch.equal(caches[1][:, :, 60], value)


def test_a_position_outside_the_cache_is_an_error() -> None:
    cache, token = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 8)
    with pytest.raises(RuntimeError, match="position 4 is outside the cache of 4 places"):
        decode_attention_(token, token, token, cache, cache.clone(), torch.tensor([4]), backend="cpu")
