"""Which kernel takes a layer: the table in csrc/cuda/decode/linear/README.md against the launchers themselves.

The launchers run on the host, against a CUDA runtime that records. Device code is compiled without optimisation, which
takes 10 s, and never runs.
"""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fuseopt.build import toolchain
from fuseopt.ops.decode.linear import FEW_ROWS, is_fast

FOLDER = toolchain.CSRC / "cuda" / "decode" / "linear"
HERE = Path(__file__).parent
NO_NORM, LAYER_NORM, RMS_NORM = 0, 1, 2
GELU_TANH, SILU, RELU, IDENTITY = 1, 2, 3, 4
ROWS = (1, 2, 8, 16, 32, 64, 128, 256)
# Compute capability, multiprocessors, shared memory of a block and of a multiprocessor.
DEVICES = {"H200": (90, 132, 232448, 233472), "A100": (80, 108, 166912, 167936), "RTX 5090": (120, 170, 101376, 102400)}

# K, N, weights, N of those after the first, is [K, N], norm, activation, gated, residual.
Layer = tuple[int, int, int, int, int, int, int, int, int]


def gpt2(k: int) -> dict[str, Layer]:
    return {
        "query, key, value": (k, 3 * k, 1, 0, 1, LAYER_NORM, IDENTITY, 0, 0),
        "attention's output": (k, k, 1, 0, 1, NO_NORM, IDENTITY, 0, 1),
        "up": (k, 4 * k, 1, 0, 1, LAYER_NORM, GELU_TANH, 0, 0),
        "down": (4 * k, k, 1, 0, 1, NO_NORM, IDENTITY, 0, 1),
        "head": (k, 50257, 1, 0, 0, LAYER_NORM, IDENTITY, 0, 0),
    }


def t5(k: int, wide: int) -> dict[str, Layer]:
    return {
        "query, key, value": (k, k, 3, k, 0, RMS_NORM, IDENTITY, 0, 0),
        "cross-attention's query": (k, k, 1, 0, 0, RMS_NORM, IDENTITY, 0, 0),
        "attention's output": (k, k, 1, 0, 0, NO_NORM, IDENTITY, 0, 1),
        "up": (k, wide, 1, 0, 0, RMS_NORM, RELU, 0, 0),
        "up, gated": (k, wide, 2, wide, 0, RMS_NORM, GELU_TANH, 1, 0),
        "down": (wide, k, 1, 0, 0, NO_NORM, IDENTITY, 0, 1),
        "head": (k, 32128, 1, 0, 0, RMS_NORM, IDENTITY, 0, 0),
    }


def llama(k: int, query: int, key: int, wide: int, vocabulary: int) -> dict[str, Layer]:
    return {
        "query, key, value": (k, query, 3, key, 0, RMS_NORM, IDENTITY, 0, 0),
        "attention's output": (query, k, 1, 0, 0, NO_NORM, IDENTITY, 0, 1),
        "up, gated": (k, wide, 2, wide, 0, RMS_NORM, SILU, 1, 0),
        "down": (wide, k, 1, 0, 0, NO_NORM, IDENTITY, 0, 1),
        "head": (k, vocabulary, 1, 0, 0, RMS_NORM, IDENTITY, 0, 0),
    }


MODELS = {
    "GPT-2": gpt2(768),
    "GPT-2 medium": gpt2(1024),
    "GPT-2 large": gpt2(1280),
    "GPT-2 XL": gpt2(1600),
    "T5-base": t5(768, 3072),
    "T5-large": t5(1024, 4096),
    "Qwen3-0.6B": llama(1024, 2048, 1024, 3072, 151936),
    "Llama-3.2-1B": llama(2048, 2048, 512, 8192, 128256),
    "Llama-3.1-8B": llama(4096, 4096, 1024, 14336, 128256),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        nvcc = toolchain.find_nvcc()
    except toolchain.ToolchainError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("launches")
    include = toolchain.toolkit_root(nvcc) / "include"
    device = ("-gencode=arch=compute_90,code=compute_90", "-Xcicc=-O0", "-w", *toolchain.NVCC_FLAGS)
    sources = {"launches": HERE / "launches.cu", "memory": toolchain.CSRC / "cuda" / "common" / "shared_memory.cu"}
    for name, source in sources.items():
        command = [nvcc, *device, *toolchain.include_flags(), "-c", str(source), "-o", str(folder / f"{name}.o")]
        subprocess.run(command, check=True)
    objects = [str(folder / f"{name}.o") for name in sources]
    # What stays unresolved is never called: launches by <<<>>>, and kernels of other dtypes.
    link = ["-no-pie", "-Wl,--unresolved-symbols=ignore-all", "-o", str(folder / "launches")]
    command = ["g++", "-std=c++17", f"-isystem{include}", str(HERE / "fake_runtime.cpp"), *objects, *link]
    subprocess.run(command, check=True)
    return folder / "launches"


def launches(program: Path, device: str, cases: Sequence[tuple[int, ...]], *, is_float32: bool = False) -> list[str]:
    lines = "".join(" ".join(map(str, case)) + "\n" for case in cases)
    command = [str(program), *map(str, DEVICES[device]), str(int(is_float32))]
    return subprocess.run(command, input=lines, capture_output=True, text=True, check=True).stdout.splitlines()


def kernel_of(launch: str) -> str:
    return re.findall(r"decode_linear_(\w+)_kernel<", launch)[0]


def python_takes_blas(layer: Layer, rows: int, capability: int) -> bool:
    k, n, weights, others, is_kn, norm, _, _, has_residual = layer
    with FakeTensorMode():
        widths = [n, *[others] * (weights - 1)]
        shapes = [(k, width) if is_kn else (width, k) for width in widths]
        stored = [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
        layer_weights = [weight.T if is_kn else weight for weight in stored]
        input = torch.empty(rows, k, device="cuda", dtype=torch.bfloat16)
        residual = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16) if has_residual else None
        return not is_fast(input, layer_weights, residual, (None, "layer_norm", "rms_norm")[norm])


def table(program: Path, device: str) -> list[str]:
    """The rows of the README's table for a device."""
    named = [(model, role, layer) for model, layers in MODELS.items() for role, layer in layers.items()]
    cases = [(*layer, rows) for _, _, layer in named for rows in ROWS]
    found = dict(zip(cases, launches(program, device, cases), strict=True))
    lines = []
    for model, role, layer in named:
        taken = [
            "BLAS" if python_takes_blas(layer, rows, DEVICES[device][0]) else kernel_of(found[(*layer, rows)])
            for rows in ROWS
        ]
        lines.append(f"| {model} | {role} | {'[K, N]' if layer[4] else '[N, K]'} | {' | '.join(taken)} |")
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_the_table_says_which_kernel_takes_a_layer(program: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capability = DEVICES[device][0] // 10, DEVICES[device][0] % 10
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    text = (FOLDER / "README.md").read_text()
    section = re.search(rf"(?ms)^### {device}.*?\n(\| model .*?)\n(?:\n|\Z)", text)
    assert section is not None
    assert section[1].splitlines()[2:] == table(program, device)


@pytest.mark.slow
def test_the_table_says_which_kernel_takes_a_layer_of_float32(program: Path) -> None:
    """A norm runs before with more than `FEW_ROWS` rows if it is a LayerNorm, a gate after."""
    lines = []
    for model in ("GPT-2", "GPT-2 XL", "T5-base"):
        for role, layer in MODELS[model].items():
            k, n, weights, others, is_kn, norm, *_ = layer
            apart = (k, n, weights, others, is_kn, NO_NORM if norm == LAYER_NORM else norm, IDENTITY, 0, 0)
            cases = [(*(layer if rows <= FEW_ROWS else apart), rows) for rows in ROWS]
            found = map(kernel_of, launches(program, "H200", cases, is_float32=True))
            taken = ["BLAS" if rows > FEW_ROWS and n % 8 else kernel for rows, kernel in zip(ROWS, found, strict=True)]
            lines.append(f"| {model} | {role} | {'[K, N]' if is_kn else '[N, K]'} | {' | '.join(taken)} |")
    text = (FOLDER / "README.md").read_text()
    section = re.search(r"(?ms)^### float32.*?\n(\| model .*?)\n(?:\n|\Z)", text)
    assert section is not None
    assert section[1].splitlines()[2:] == lines


@pytest.mark.slow
def test_shapes_of_launches(program: Path) -> None:
    """Grid, threads and cluster of a layer for each kernel."""
    xl, base = MODELS["GPT-2 XL"], MODELS["T5-base"]
    cases = [
        (*MODELS["GPT-2"]["up"], 1),
        (*xl["up"], 1),
        (*xl["query, key, value"], 1),
        (*xl["attention's output"], 1),
        (*xl["down"], 1),
        (*xl["up"], 8),
        (*xl["head"], 1),
        (*base["query, key, value"], 64),
        (*base["query, key, value"], 256),
        (*base["down"], 256),
    ]
    shapes = [
        (kernel_of(line), *re.findall(r"grid (\S+) threads (\d+) cluster (\d+)", line)[0])
        for line in launches(program, "H200", cases)
    ]
    assert shapes == [
        ("skinny_mma", "48,1,1", "384", "1"),
        ("gemv", "100,1,1", "256", "1"),
        ("gemv", "75,1,1", "256", "3"),
        ("gemv", "25,1,1", "256", "5"),
        ("gemv", "100,1,1", "256", "4"),
        ("streamed_kn", "100,1,1", "256", "1"),
        ("streamed_nk", "262,1,1", "256", "1"),
        ("many_rows", "24,3,2", "256", "1"),
        ("tiles", "12,3,2", "256", "1"),
        ("tiles", "48,1,4", "256", "4"),
    ]


@pytest.mark.slow
def test_shapes_of_launches_of_float32(program: Path) -> None:
    """A long K is split over a cluster, except for one row of [N, K]; tiles and parts of K fill the device."""
    gpt2, base = MODELS["GPT-2"], MODELS["T5-base"]
    cases = {
        (*gpt2["down"], 1): ("fma", "192,1,1", "4"),
        (*base["down"], 1): ("fma", "96,1,1", "1"),
        (*base["down"], 8): ("fma", "192,1,1", "4"),
        (*base["query, key, value"], 128): ("tiles", "36,3,2", "3"),
        (*base["cross-attention's query"], 128): ("tiles", "48,1,4", "4"),
        (*base["up"], 128): ("tiles", "96,1,2", "2"),
        (*base["down"], 128): ("tiles", "96,1,2", "8"),
        (*base["down"], 64): ("tiles", "96,1,2", "8"),
        (*base["head"], 128): ("tiles", "502,1,2", "1"),
    }
    lines = launches(program, "H200", list(cases), is_float32=True)
    shapes = [(kernel_of(line), *re.findall(r"grid (\S+) threads 256 cluster (\d+)", line)[0]) for line in lines]
    assert shapes == list(cases.values())


def test_the_readme_names_files_lines_and_kernels_that_are_there() -> None:
    readme = (FOLDER / "README.md").read_text()
    places = re.findall(r"\| `(\w+)` \| \[`([\w.]+)`\]\(([\w.]+)\) \| (\d+) \|", readme)
    text = "".join(path.read_text() for path in FOLDER.glob("*.cu*"))
    kernels = set(re.findall(r"\b(decode_\w+_kernel)\(const __grid_constant__", text))
    assert {kernel for kernel, *_ in places} == kernels
    for kernel, shown, file, line in places:
        assert shown == file and f"{kernel}(" in (FOLDER / file).read_text().splitlines()[int(line) - 1], kernel
