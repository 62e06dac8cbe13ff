"""Kernels that need much shared memory, launched from two threads and with the limits of smaller devices."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseopt.ops import decode_attention_, decode_linear, short_attention, softmax
from fuseopt.ops.decode.linear import decode_linear_reference
from tests.ops.cases import error, launched_kernels, to_float64

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
SM_120 = 101376  # bytes of shared memory that a block may have there, the least from sm_80 on
SM_75 = 65536


def limited(limit: int, test: str) -> str:
    """Output of one test of this file in a process with `limit` bytes of shared memory per block."""
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "gpu"]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment = {**inherited, "FUSEOPT_SHARED_MEMORY_LIMIT": str(limit)}
    done = subprocess.run(
        [*command, f"{__file__}::{test}"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout + done.stderr
    return done.stdout


def test_two_threads_launch_one_kernel_with_different_sizes() -> None:
    """A softmax of 100 KB a row beside one of 56 KB; one thread must not take away what the other's launch needs."""
    failures: list[str] = []

    def softmaxes(columns: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                x = torch.randn(264, columns, device="cuda", dtype=torch.bfloat16)
                expected = F.softmax(x, -1)
                x.requires_grad_()  # so that calls go through the dispatcher, which releases Python's lock
                for _ in range(300):
                    if (softmax(x, backend="cuda") - expected).abs().max() > 1e-2:
                        failures.append(f"wrong result of {columns} columns")
        except RuntimeError as exception:  # of a thread of its own: for the assertion below
            failures.append(f"{columns} columns: {exception}")

    threads = [threading.Thread(target=softmaxes, args=(columns,)) for columns in (28672, 36864, 50176, 57344)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("columns", [1152, 1160, 1280, 1536])
@pytest.mark.parametrize("rows", [17, 24, 32])
@torch.no_grad()
def test_layers_with_a_norm_of_many_rows(rows: int, columns: int, transposed: bool) -> None:
    """GPT-2 large's, among others: at 32 rows a whole tile takes more than sm_120 has."""
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    x, outputs = torch.randn(rows, columns, **options), 3840
    weight = torch.randn(columns, outputs, **options).T if transposed else torch.randn(outputs, columns, **options)
    norm = {"norm": "layer_norm", "norm_weight": torch.rand(columns, **options) + 0.5}
    norm["norm_bias"] = torch.randn(columns, **options)
    output = decode_linear(x, weight, **norm, backend="cuda")
    exact = {name: to_float64(value) if isinstance(value, Tensor) else value for name, value in norm.items()}
    judge = decode_linear_reference(to_float64(x), to_float64(weight), **exact)
    plain = decode_linear_reference(x, weight, **norm)
    assert error([output], [judge]) <= 1.5 * error([plain], [judge]) + torch.finfo(torch.bfloat16).eps
    if os.environ.get("SANITIZED"):  # beside compute-sanitizer there is no profiler
        return
    (kernel,) = launched_kernels(lambda: decode_linear(x, weight, **norm, backend="cuda"))
    # The last template argument is how many groups of 8 rows a tile has.
    print(f"\nran {rows} {columns} {transposed}: {kernel.split('(fuseopt::ManyRows')[0][-12:]}")
    assert "decode_linear_many_rows_kernel" in kernel


def test_a_device_with_less_shared_memory_takes_smaller_tiles() -> None:
    """On sm_120 the layers of GPT-2 large raised."""
    chosen = limited(SM_120, "test_layers_with_a_norm_of_many_rows")
    ran = dict(line.removeprefix("ran ").split(": ") for line in chosen.splitlines() if line.startswith("ran "))
    assert len(ran) == 24
    for layer, kernel in ran.items():
        _, columns, _ = layer.split()
        groups = int(kernel.rstrip(">").split(",")[-1].strip().removeprefix("(int)"))
        assert groups == (4 if int(columns) <= 1152 else 2), (layer, kernel)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("rows", "capacity"), [(1, 40), (40, 40), (300, 40), (1, 5000), (8, 5000)])
@torch.no_grad()
def test_caches_of_grouped_heads(rows: int, head_dim: int, capacity: int) -> None:
    """On a GPU with more memory warps have up to three stages, on one with little a single one."""
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    query, key, value = (torch.randn(rows, heads, head_dim, **options) for heads in (6, 2, 2))
    caches, positions = torch.randn(2, 1, 2, capacity, head_dim, **options), torch.tensor([capacity - 2], device="cuda")
    caches = caches.repeat(1, rows, 1, 1, 1)
    plain, scale = caches.clone(), head_dim**-0.5
    output = decode_attention_(query, key, value, *caches, positions, scale=scale, backend="cuda")
    expected = decode_attention_(query, key, value, *plain, positions, scale=scale, backend="reference")
    assert torch.equal(caches, plain)
    assert error([output], [expected]) <= 8 * torch.finfo(torch.bfloat16).eps


def test_a_device_with_less_shared_memory_reads_caches_of_grouped_heads() -> None:
    assert "15 passed" in limited(SM_120, "test_caches_of_grouped_heads")


@torch.no_grad()
def test_the_longest_heads_of_float64() -> None:
    query, key, value = torch.randn(3, 2, 3, 32, 128, device="cuda", dtype=torch.float64).unbind()
    output = short_attention(query, key, value)
    torch.testing.assert_close(output, F.scaled_dot_product_attention(query, key, value).transpose(1, 2))
    print(f"\nran {len(launched_kernels(lambda: short_attention(query, key, value)))} kernels")


def test_a_device_that_has_no_room_for_the_longest_heads_takes_torchs_attention() -> None:
    """float64 on sm_75: 101376 bytes for a head."""
    assert "ran 1 kernels" in limited(SM_120, "test_the_longest_heads_of_float64")
    assert "ran 0 kernels" in limited(SM_75, "test_the_longest_heads_of_float64")
