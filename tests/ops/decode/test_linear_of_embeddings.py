"""A linear layer that looks up its input, against decode_embedding and decode_linear."""

import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuseopt.bench.suites.kernels import launches_of
from fuseopt.ops import decode_embedding, decode_linear, decode_linear_of_embeddings, decode_select_
from fuseopt.ops.decode.linear_of_embeddings import takes_embeddings
from tests.ops.cases import examples
from tests.ops.variations import poisoned_allocations

MOST_ROWS = 8
HALVES = (torch.bfloat16, torch.float16)
LAYER_NORM, RMS_NORM = "layer_norm", "t5_rms_norm"
# (K, N) of layers that the kernel for one row takes: GPT-2 XL's, one whose K ends within a stage of a warp, and two
# whose K the blocks of a cluster share out.
LARGE = ((1600, 4800), (1288, 6408), (2056, 4104), (3208, 2056))


def embedding(
    rows: int, columns: int, dtype: torch.dtype, device: str | torch.device, *, counts: tuple[int, int] = (61, 17)
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, positions = (torch.randint(0, count, (rows,), device=device) for count in counts)
    tables = (torch.randn(count, columns, device=device).to(dtype) for count in counts)
    token_weight, position_weight = tables
    return tokens, token_weight, positions, position_weight


def layer(
    columns: int, outputs: int, dtype: torch.dtype, device: str | torch.device, norm: str = LAYER_NORM
) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """A weight [N, K] that lies as [K, N], and a bias; and a norm."""

    def make(*size: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(size, device=device)).to(dtype)

    of_norm = {"norm": norm, "norm_weight": make(columns), "norm_bias": make(columns) if norm == LAYER_NORM else None}
    return (make(columns, outputs, scale=columns**-0.5).T, make(outputs)), of_norm


@pytest.mark.parametrize("indices", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM])
def test_is_an_embedding_and_a_layer(
    each_device: torch.device, norm: str, dtype: torch.dtype, indices: torch.dtype
) -> None:
    torch.manual_seed(0)
    tokens, token_weight, positions, position_weight = embedding(6, 24, dtype, each_device)
    tokens, positions = (tensor.to(indices).view(2, 3) for tensor in (tokens, positions))
    rows = (tokens, token_weight, positions, position_weight)
    arguments, of_norm = layer(24, 16, dtype, each_device, norm)
    output, sum = decode_linear_of_embeddings(*rows, *arguments, **of_norm)
    assert torch.equal(sum, token_weight[tokens] + position_weight[positions])
    torch.testing.assert_close(output, decode_linear(sum, *arguments, **of_norm))


def test_wrong_tokens_positions_and_weights_are_refused_by_name() -> None:
    tokens, token_weight, positions, position_weight = embedding(2, 12, torch.float32, "cpu")
    weight = torch.randn(5, 12)
    for arguments, exception, words in (
        ((tokens.float(), token_weight, positions, position_weight, weight), TypeError, "tokens must be int32 or"),
        ((tokens, token_weight, positions[:1], position_weight, weight), ValueError, "positions"),
        ((tokens, token_weight, positions, position_weight[:, :8], weight), ValueError, "position_weight"),
        ((tokens, token_weight, positions, position_weight, torch.randn(5, 13)), ValueError, "weight"),
    ):
        with pytest.raises(exception, match=re.escape(words)):
            decode_linear_of_embeddings(*arguments, norm=LAYER_NORM)


def assert_same_bits_as_one_after_the_other(
    rows: tuple[Tensor, Tensor, Tensor, Tensor], arguments: tuple[Tensor, Tensor], of_norm: dict[str, Any]
) -> None:
    assert takes_embeddings(*rows, *arguments, **of_norm)
    with poisoned_allocations():
        output, sum = decode_linear_of_embeddings(*rows, *arguments, **of_norm, backend="cuda")
        overlapping = decode_linear_of_embeddings(*rows, *arguments, **of_norm, pdl=True, backend="cuda")
    assert torch.equal(output, overlapping[0]) and torch.equal(sum, overlapping[1])
    assert torch.equal(sum, decode_embedding(*rows, backend="cuda"))
    assert torch.equal(output, decode_linear(sum, *arguments, **of_norm, backend="cuda"))


@pytest.mark.gpu
@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.integers(1, MOST_ROWS),
    outputs=st.integers(180, 300).map(lambda eighths: 8 * eighths),
    columns=st.integers(1, 96).map(lambda eighths: 8 * eighths),
    dtype=st.sampled_from(HALVES),
    norm=st.sampled_from([LAYER_NORM, RMS_NORM]),
    shift=st.sampled_from([0.0, 0.0, 100.0]),
    seed=st.integers(0, 2**31),
)
def test_same_bits_as_one_after_the_other(
    rows: int, outputs: int, columns: int, dtype: torch.dtype, norm: str, shift: float, seed: int
) -> None:
    """For a row whose mean is far from 0 the kernel computes the deviation in another way."""
    torch.manual_seed(seed)
    tokens, token_weight, positions, position_weight = embedding(rows, columns, dtype, "cuda")
    token_weight += shift
    of_rows = (tokens, token_weight, positions, position_weight)
    assert_same_bits_as_one_after_the_other(of_rows, *layer(columns, outputs, dtype, "cuda", norm))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("norm", "is_biased"), [(LAYER_NORM, True), (LAYER_NORM, False), (RMS_NORM, False)])
@pytest.mark.parametrize(("columns", "outputs"), LARGE)
def test_a_large_layer(columns: int, outputs: int, norm: str, is_biased: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    arguments, of_norm = layer(columns, outputs, dtype, "cuda", norm)
    of_norm["norm_bias"] = of_norm["norm_bias"] if is_biased else None
    for shift in (0.0, 100.0):
        tokens, token_weight, positions, position_weight = embedding(1, columns, dtype, "cuda")
        of_rows = (tokens, token_weight + shift, positions, position_weight)
        assert_same_bits_as_one_after_the_other(of_rows, arguments, of_norm)


@pytest.mark.gpu
@pytest.mark.parametrize(("token", "position"), [(61, 0), (0, -1)])
@pytest.mark.parametrize("op", ["decode_embedding", "few rows", "a large layer"])
def test_an_index_out_of_range_fails_an_assertion(op: str, token: int, position: int) -> None:
    """As in PyTorch's embedding; after the assertion the process cannot use the GPU."""
    columns, outputs = LARGE[0] if op == "a large layer" else (768, 2304)
    program = f"""
import torch
from fuseopt import ops
from fuseopt.build import loader
from fuseopt.ops.decode.linear_of_embeddings import takes_embeddings
assert loader.load("cuda").status == "loaded"
torch.set_default_device("cuda"), torch.set_default_dtype(torch.bfloat16)
rows = torch.tensor([{token}]), torch.randn(61, {columns}), torch.tensor([{position}]), torch.randn(17, {columns})
layer = torch.randn({columns}, {outputs}).T, torch.randn({outputs})
norm = {{"norm": "layer_norm", "norm_weight": torch.randn({columns}), "norm_bias": torch.randn({columns})}}
if {op == "decode_embedding"}:
    ops.decode_embedding(*rows, backend="cuda")
else:
    assert takes_embeddings(*rows, *layer, **norm)
    ops.decode_linear_of_embeddings(*rows, *layer, **norm, backend="cuda")
torch.cuda.synchronize()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode != 0 and "device-side assert" in ended.stderr, ended.stderr[-500:]


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "outputs"), [(768, 2304), *LARGE])
def test_steps_that_overlap_in_a_graph(columns: int, outputs: int) -> None:
    """Each looks up what the one ahead has chosen, and hands its sum on, replay after replay."""
    torch.manual_seed(0)
    steps, dtype = 20, torch.bfloat16
    of_rows = embedding(1, columns, dtype, "cuda", counts=(outputs, steps))
    tokens, _, positions, _ = of_rows
    arguments, of_norm = layer(columns, outputs, dtype, "cuda")
    square = torch.randn(columns, columns, device="cuda").to(dtype)
    ids = torch.zeros(1, steps, device="cuda", dtype=torch.int64)
    length, pad = torch.zeros(2, 1, device="cuda", dtype=torch.int64)
    unfinished, going = torch.ones(2, 1, device="cuda", dtype=torch.bool)

    def results_of(overlap: bool) -> list[Tensor]:
        results = []
        for _ in range(steps):
            output, sum = decode_linear_of_embeddings(*of_rows, *arguments, **of_norm, pdl=overlap, backend="cuda")
            results += [output, sum, decode_linear(sum, square, pdl=overlap, backend="cuda")]
            end = (tokens, ids, length, unfinished, going, pad)
            decode_select_(output, *end, counters=[positions], pdl=overlap, backend="cuda")
        return results

    def start(token: int) -> None:
        tokens.fill_(token), positions.zero_(), length.zero_()

    start(0)
    results_of(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = results_of(True)
    for token in (1, 7, outputs - 1):
        start(token)
        expected, expected_ids = results_of(False), ids.clone()
        start(token)
        graph.replay()
        assert torch.equal(ids, expected_ids) and all(map(torch.equal, results, expected))


@pytest.mark.gpu
def test_what_it_does_not_take_is_left_to_two_kernels() -> None:
    torch.manual_seed(0)

    def launches(
        rows: int = 1, columns: int = 768, outputs: int = 2304, dtype: torch.dtype = torch.bfloat16, **changed: Any
    ) -> list[str]:
        tokens, token_weight, positions, position_weight = embedding(rows, columns, dtype, "cuda")
        if "indices" in changed:
            tokens, positions = tokens.to(changed["indices"]), positions.to(changed["indices"])
        if "offset" in changed:  # as of parameters that are views of one flat tensor
            position_weight = torch.randn(17 * columns + 1, device="cuda").to(dtype)[1:].view(17, columns)
        if "stride" in changed:
            token_weight = token_weight.repeat(1, 2)[:, :columns]
        of_rows = (tokens, token_weight, positions, position_weight)
        arguments, of_norm = layer(columns, outputs, dtype, "cuda")
        output, sum = decode_linear_of_embeddings(*of_rows, *arguments, **of_norm)
        assert torch.equal(output, decode_linear(sum, *arguments, **of_norm))
        called = launches_of(lambda: decode_linear_of_embeddings(*of_rows, *arguments, **of_norm))
        return [launch.name for launch in called if "decode" in launch.name]

    assert len(launches()) == len(launches(rows=MOST_ROWS)) == len(launches(dtype=torch.float16)) == 1
    for columns, outputs in LARGE:
        (name,) = launches(columns=columns, outputs=outputs)
        assert "decode_linear_gemv_kernel" in name
    for unlike in (
        {"rows": MOST_ROWS + 1},
        {"columns": 1024, "outputs": 3072},
        {"rows": 2, "columns": 1600, "outputs": 4800},
        {"outputs": 64},
        {"dtype": torch.float32},
        {"indices": torch.int32},
        {"offset": 1},
        {"stride": 2},
    ):
        assert len(launches(**unlike)) == 2, unlike
