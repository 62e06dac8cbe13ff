"""decode_embedding, and steps that begin with it, against PyTorch's embedding."""

import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseopt.ops import decode_embedding, decode_linear, decode_select_

Rows = tuple[Tensor, Tensor, Tensor, Tensor]


def rows_of(
    rows: int, columns: int, dtype: torch.dtype, device: str | torch.device, *, counts: tuple[int, int] = (61, 17)
) -> Rows:
    """Tokens and positions, each with its table."""
    tokens, positions = (torch.randint(0, count, (rows,), device=device) for count in counts)
    token_weight, position_weight = (torch.randn(count, columns, device=device).to(dtype) for count in counts)
    return tokens, token_weight, positions, position_weight


@pytest.mark.parametrize("indices", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [24, 5])
def test_is_the_sum_of_both_embeddings(
    each_device: torch.device, columns: int, dtype: torch.dtype, indices: torch.dtype
) -> None:
    torch.manual_seed(0)
    tokens, token_weight, positions, position_weight = rows_of(6, columns, dtype, each_device)
    tokens, positions = (tensor.to(indices).view(2, 3) for tensor in (tokens, positions))
    expected = F.embedding(tokens, token_weight)
    assert torch.equal(decode_embedding(tokens, token_weight), expected)
    both = decode_embedding(tokens, token_weight, positions, position_weight)
    assert torch.equal(both, expected + F.embedding(positions, position_weight))


def test_wrong_tokens_positions_and_weights_are_refused_by_name() -> None:
    tokens, token_weight, positions, position_weight = rows_of(2, 12, torch.float32, "cpu")
    for arguments, exception, words in (
        ((tokens.float(), token_weight, positions, position_weight), TypeError, "tokens must be int32 or"),
        ((tokens, token_weight, positions[:1], position_weight), ValueError, "positions"),
        ((tokens, token_weight, positions, position_weight[:, :8]), ValueError, "position_weight"),
        ((tokens, token_weight, positions), ValueError, "positions and position_weight go together"),
    ):
        with pytest.raises(exception, match=re.escape(words)):
            decode_embedding(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize(("token", "position"), [(61, 0), (0, -1)])
def test_an_index_out_of_range_fails_an_assertion(token: int, position: int) -> None:
    """As in PyTorch's embedding; after the assertion the process cannot use the GPU."""
    program = f"""
import torch
from fuseopt import ops
from fuseopt.build import loader
assert loader.load("cuda").status == "loaded"
torch.set_default_device("cuda"), torch.set_default_dtype(torch.bfloat16)
rows = torch.tensor([{token}]), torch.randn(61, 768), torch.tensor([{position}]), torch.randn(17, 768)
ops.decode_embedding(*rows, backend="cuda")
torch.cuda.synchronize()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode != 0 and "device-side assert" in ended.stderr, ended.stderr[-500:]


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "outputs"), [(768, 2304), (1600, 4800), (1288, 6408), (2056, 4104), (3208, 2056)])
def test_steps_that_overlap_in_a_graph(columns: int, outputs: int) -> None:
    """Each looks up what the one ahead has chosen, and hands its sum on, replay after replay."""
    torch.manual_seed(0)
    steps, dtype = 20, torch.bfloat16
    of_rows = rows_of(1, columns, dtype, "cuda", counts=(outputs, steps))
    tokens, _, positions, _ = of_rows

    def make(*size: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(size, device="cuda")).to(dtype)

    weight, bias, square = make(columns, outputs, scale=columns**-0.5).T, make(outputs), make(columns, columns)
    norm = {"norm": "layer_norm", "norm_weight": make(columns), "norm_bias": make(columns)}
    ids = torch.zeros(1, steps, device="cuda", dtype=torch.int64)
    length, pad = torch.zeros(2, 1, device="cuda", dtype=torch.int64)
    unfinished, going = torch.ones(2, 1, device="cuda", dtype=torch.bool)

    def results_of(overlap: bool) -> list[Tensor]:
        results = []
        for _ in range(steps):
            sum = decode_embedding(*of_rows, pdl=overlap, backend="cuda")
            output = decode_linear(sum, weight, bias, **norm, pdl=overlap, backend="cuda")
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
