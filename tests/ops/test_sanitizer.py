"""Every op's CUDA kernels under compute-sanitizer: accesses out of bounds, and races in shared memory."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fuseopt.build import loader, toolchain
from fuseopt.ops import registry
from tests.ops.cases import DTYPES, functional_names

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
TOOLS = ("memcheck", "racecheck")

# What samples of an op do not reach: writing into arguments, and the kernels for the sizes of models.
OWN_TESTS = {
    "cross_entropy_grad_": (
        "test_cross_entropy_grad.py",
        "cuda-cuda and not float64 and (test_losses or -50304- or -262144-)",
    ),
    "decode_attention_": ("decode/test_attention.py", "test_kernel_against or test_kernel_for_many"),
    "decode_attention_, grouped": (
        "decode/test_grouped_attention.py",
        "tensor_cores or plain_kernel or many_rows or encoders_cache",
    ),
    "decode_attention_, 8 bits": ("decode/test_quantized_attention.py", "test_kernel"),
    "decode_rotary_store_": ("decode/test_rotary_store.py", "test_kernel_against"),
    "partial softmaxes that are no numbers": (
        "decode/test_attention.py",
        "no_numbers and (bfloat16 or float32) and (64 or 128)",
    ),
    "decode_beams_": ("decode/test_beams.py", "test_is_what_beam_search_does and cuda-cuda"),
    **{
        f"decode_linear, {rows} rows": (
            "decode/test_linear.py",
            f"test_layers_of_models and bfloat16 and -{rows}-torch",
        )
        for rows in (1, 8, 64)
    },
    # Those that take the kernels of tiles: all layers of so many rows take racecheck longer than there is.
    "decode_linear, 200 rows": (
        "decode/test_linear.py",
        "test_layers_of_models and bfloat16 and -200-torch and (768-768-3 or 5008-1032 or 2056-776)",
    ),
    "decode_linear, 32 normalised rows": ("test_shared_memory.py", "with_a_norm_of_many_rows and 32-1280"),
    "decode_linear, one row of float16": ("decode/test_linear_range.py", "0.005 or no_numbers"),
    "decode_linear, 128 rows": (
        "decode/test_linear.py",
        "test_layers_of_models and bfloat16 and -128-torch and 768-768-3",
    ),
    "decode_linear of decoders": (
        "decode/test_linear_decoders.py",
        "test_layers_of_decoders and bfloat16 and (-1-torch or -11-torch) and (odd or small or Qwen3)",
    ),
    "decode_packed_linear": (
        "decode/test_packed_linear.py",
        "test_layers_of_models and bfloat16 and (8-0-2048 or 512-8 or 1600) or any_size and bfloat16",
    ),
    "decode_head_select_": (
        "decode/test_head_select.py",
        "test_ties_in_vocabularies and rms_norm and bfloat16 and 512-8-",
    ),
    "decode_head_select_, addends": (
        "decode/test_head_select.py",
        "test_inputs_in_addends and cuda-cuda and 8-768 and torch.float16",
    ),
    "decode_linear_low_rank": (
        "decode/test_low_rank.py",
        "test_the_kernels and bfloat16 and (-1-torch and Qwen3 or -2-torch and up)",
    ),
    "decode_linear_partials": ("decode/test_linear_partials.py", "against_float64"),
    "decode_linear of a vocabulary": ("decode/test_linear.py", "test_a_product_as_wide and bfloat16"),
    "decode_qkv_attention_": (
        "decode/test_qkv_attention.py",
        "test_layers_of_models and bfloat16 and (1600-25-300 or 200-3-300)",
    ),
    "decode_sample_": ("decode/test_sample.py", "cuda-cuda and (test_draws_what_transformers or test_ties)"),
    "decode_sample_, numbers": ("decode/test_sample.py", "generators_numbers and not reference and 300"),
    "decode_select_": ("decode/test_select.py", "cuda-cuda and (test_is_what or test_draws_what)"),
    "decode_softmax_linear": ("decode/test_softmax_linear.py", "test_kernel_against and bfloat16 and same and 12-768"),
    "drawn_continuations": ("decode/test_beam_candidates.py", "multinomial and not reference"),
    "layer_norm_of_sum_bwd": ("test_layer_norm_of_sum_bwd.py", "cuda-cuda and (sizes_of_models or autograd)"),
    "prompt_attention_": ("decode/test_prompt_attention.py", "bfloat16 and (2-25-64 or test_later_tokens and 64-30)"),
    "rms_norm, light blocks": ("test_rms_norm.py", "test_every_shape_of_kernel and float32-1000-8-"),
    "softmax of a vocabulary": ("test_softmax.py", "test_wide_rows and 50257 and float32 and cuda-cuda"),
    "softmax held in a cluster": ("test_softmax.py", "test_rows_that_a_cluster_shares and False and 131075-8-"),
    "softmax of several rows a warp": ("test_softmax.py", "only_differences and -0.3 and bfloat16-255- and cuda-cuda"),
    "softmax in a cluster of 16": ("test_softmax.py", "test_rows_that_a_cluster_shares and False and 262144-8-"),
}

# What a tool fails at by itself.
NOT_TAKEN = {
    ("racecheck", "decode_linear_low_rank"): "racecheck 2025.3.1 ends with an internal error in a process of torch; of "
    "five variants of such a layer in a program without torch it reports no hazard",
}


def without_caching(tool: str) -> dict[str, str]:
    """Each tensor in an allocation of its own, so that memcheck knows where it ends."""
    return {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {}


@pytest.fixture(autouse=True)
def sanitizer() -> str:
    path = shutil.which("compute-sanitizer")
    if path is None:
        pytest.skip("compute-sanitizer is not on PATH")
    return path


def reports(sanitizer: str, tool: str, *command: str, kernels: str, **environment: str) -> tuple[int, str]:
    """How many errors and hazards `tool` reports of the kernels whose name contains `kernels`, and all it prints."""
    options = ["--tool", tool, "--kernel-name", f"kns={kernels}", "--print-limit", "20"]
    if tool == "memcheck":
        options += ["--report-api-errors", "no"]  # torch asks CUDA questions that it expects to be refused
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    process = subprocess.run(
        [sanitizer, *options, *command],
        cwd=ROOT,
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    printed = process.stdout + process.stderr
    assert process.returncode == 0, printed
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", printed)
    assert summary, printed
    return int(summary[1]), printed


@pytest.mark.parametrize("name", [name for name in functional_names() if registry.CUDA in registry.get(name).backends])
@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_reports_nothing_of_any_op(sanitizer: str, tool: str, name: str) -> None:
    assert loader.load("cuda").status == "loaded"
    command = (sys.executable, "-m", "tests.ops.sanitized", name)
    count, printed = reports(sanitizer, tool, *command, kernels="fuseopt", **without_caching(tool))
    assert count == 0, printed
    calls = re.search(r"(\d+) calls", printed)
    assert calls and int(calls[1]) >= 3 * len(DTYPES), printed


@pytest.mark.parametrize("name", OWN_TESTS)
@pytest.mark.parametrize("tool", TOOLS)
def test_no_reports_in_tests_of_its_own(sanitizer: str, tool: str, name: str) -> None:
    if (tool, name) in NOT_TAKEN:
        pytest.skip(NOT_TAKEN[tool, name])
    file, chosen = OWN_TESTS[name]
    options = ("-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "gpu", "-k", chosen)
    command = (sys.executable, "-m", "pytest", *options, str(Path(__file__).parent / file))
    environment = {**without_caching(tool), "SANITIZED": "1"}
    count, printed = reports(sanitizer, tool, *command, kernels="fuseopt", **environment)
    assert count == 0, printed
    assert re.search(r"\d+ passed", printed) and "skipped" not in printed, printed


@pytest.mark.parametrize("tool", TOOLS)
def test_what_is_wrong_is_reported(sanitizer: str, tool: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.cu").write_text("""
        namespace wrong {
        __global__ void overrun(float* x) { x[threadIdx.x] = 1; }
        __global__ void race(float* x) {
            __shared__ float shared[64];
            shared[threadIdx.x] = threadIdx.x;
            x[threadIdx.x % 32] = shared[63 - threadIdx.x];
        }
        }
        int main() {
            float* x;
            cudaMalloc(&x, 32 * sizeof(float));
            wrong::overrun<<<1, 33>>>(x);
            wrong::race<<<1, 64>>>(x);
            cudaDeviceSynchronize();
        }
    """)
    program = str(tmp_path / "wrong")
    subprocess.run([toolchain.find_nvcc(), "-arch=native", str(tmp_path / "wrong.cu"), "-o", program], check=True)
    kernel = {"memcheck": "overrun", "racecheck": "race"}[tool]
    assert reports(sanitizer, tool, program, kernels=kernel)[0] > 0
    assert reports(sanitizer, tool, program, kernels="another")[0] == 0
