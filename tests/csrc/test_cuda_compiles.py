"""Every .cu compiles without a GPU, and no kernel spills more than a few registers."""

import re
import subprocess
from pathlib import Path

import pytest

from fuseopt.build import make_prebuilt, toolchain
from tests.csrc import kernel_resources as resources_module
from tests.csrc.kernel_resources import KernelResources, kernel_resources

# Bytes, stores and loads together: a kernel held to few registers, for one more block in flight, may spill some.
MAX_SPILLED_BYTES = 64
SOURCES = sorted((toolchain.CSRC / "cuda").rglob("*.cu"))
HOST_ONLY = {"packed_linear.cu", "shared_memory.cu"}
# Compiled within two seconds each. Of the others quick runs parse all, in test_units.py.
QUICK = {
    "cross_entropy_grad.cu",
    "decode_embedding.cu",
    "decode_softmax_linear.cu",
    "edit_logits.cu",
    "layer_norm_of_sum_bwd.cu",
    "norm_bwd_few_rows.cu",
    "norm_column_sums.cu",
    "norm_odd_rows.cu",
    "shared_memory.cu",
    "short_attention_mma.cu",
}
COMPILED = [
    pytest.param(source, architecture, marks=[pytest.mark.slow] * (architecture != "90" or source.name not in QUICK))
    for architecture in ("90", "80")
    for source in SOURCES
]


@pytest.fixture(autouse=True)
def nvcc():
    try:
        return toolchain.find_nvcc()
    except toolchain.ToolchainError as error:
        pytest.skip(str(error))


@pytest.fixture
def cache(pytestconfig) -> Path | None:
    """Where reports are kept from run to run."""
    if not pytestconfig.pluginmanager.has_plugin("cacheprovider"):
        return None
    return pytestconfig.cache.mkdir("kernel_resources")


@pytest.mark.parametrize(
    ("source", "architecture"), COMPILED, ids=lambda value: value.name if isinstance(value, Path) else f"sm_{value}"
)
def test_compiles_with_next_to_no_spills(source, architecture, cache):
    kernels = kernel_resources(source, [architecture], cache)
    expected = set() if source.name in HOST_ONLY else {f"sm_{architecture}"}
    assert {kernel.architecture for kernel in kernels} == expected
    spilling = [kernel for kernel in kernels if kernel.spilled_bytes > MAX_SPILLED_BYTES]
    assert not spilling


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_compiles_for_the_oldest_and_the_newest_shipped_architecture(source, nvcc, cache):
    """The oldest lacks what newer ones have, such as cp.async and bfloat16 arithmetic."""
    known = toolchain.known_architectures(nvcc)
    shipped = [a for a in make_prebuilt.SHIPPED_ARCHITECTURES if a in known]
    architectures = [shipped[0], shipped[-1]]
    expected = set() if source.name in HOST_ONLY else {f"sm_{architecture}" for architecture in architectures}
    assert {kernel.architecture for kernel in kernel_resources(source, architectures, cache)} == expected


def test_vectors_are_accessed_as_aligned_as_they_are_checked_to_be(tmp_path, nvcc):
    """Eight floats at an address aligned to 16 bytes: from sm_100 on one access could take them, aligned to 32."""
    if "100" not in toolchain.known_architectures(nvcc):
        pytest.skip("nvcc compiles for no GPU with such accesses")
    source = tmp_path / "columns.cu"
    source.write_text("""
        #include "cuda/norm/norm.cuh"
        __global__ void copy(fuseopt::TypedPointer from, float* to) {
            fuseopt::Columns<float, 8> columns;
            columns.load(from, threadIdx.x * 8);
            for (int i = 0; i < 8; ++i) to[threadIdx.x * 8 + i] = columns[i];
        }
    """)
    output = tmp_path / "columns.ptx"
    flags = [*toolchain.NVCC_FLAGS, f"-I{toolchain.CSRC}", "-arch=compute_100", "-ptx"]
    subprocess.run([nvcc, *flags, str(source), "-o", str(output)], check=True, capture_output=True)
    assert "ld.global.v4" in output.read_text()
    assert "ld.global.v8" not in output.read_text()


def test_spills_are_seen(tmp_path):
    source = tmp_path / "spill.cu"
    source.write_text("""
        __global__ void __launch_bounds__(1024, 2) spills(float* x) {
            float v[200];
            for (int i = 0; i < 200; ++i) v[i] = x[i * 1024 + threadIdx.x];
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < 200; ++i) x[i * 1024 + threadIdx.x] = v[i] * v[(i * 7) % 200];
        }
        __global__ void does_not(float* x) { x[threadIdx.x] = 1; }
    """)
    spills, does_not = sorted(kernel_resources(source, ["90"]), key=lambda kernel: -kernel.registers)
    assert "spills" in spills.name
    assert (spills.architecture, does_not.architecture) == ("sm_90", "sm_90")
    assert spills.spilled_bytes > MAX_SPILLED_BYTES
    assert does_not.spilled_bytes == 0


def test_a_source_that_does_not_compile_fails(tmp_path):
    (tmp_path / "broken.cu").write_text("#error words of nvcc\n")
    with pytest.raises(subprocess.CalledProcessError) as failure:
        kernel_resources(tmp_path / "broken.cu", ["90"])
    assert "words of nvcc" in failure.value.stderr


def test_a_report_is_kept_until_source_header_flags_or_nvcc_change(tmp_path, monkeypatch):
    (tmp_path / "answer.h").write_text("constexpr int kAnswer = 42;\n")
    (tmp_path / "kernels.h").write_text('#include "answer.h"\n')
    source = tmp_path / "kernel.cu"
    source.write_text('#include "kernels.h"\n__global__ void kernel(int* x) { *x = kAnswer; }\n')
    compiled = []

    def resources(command: list[str]) -> list[KernelResources]:
        compiled.append(command)
        return [KernelResources("kernel", re.search(r"code=(sm_\d+)", " ".join(command))[1], len(compiled), 0)]

    monkeypatch.setattr(resources_module, "_resources", resources)

    def is_compiled(architecture="90") -> bool:
        before = len(compiled)
        (kernel,) = kernel_resources(source, [architecture], tmp_path)
        assert kernel.architecture == f"sm_{architecture}" and kernel.registers <= len(compiled)
        return len(compiled) > before

    assert is_compiled() and not is_compiled()
    assert is_compiled("80") and not is_compiled("80") and not is_compiled()
    (tmp_path / "answer.h").write_text("constexpr int kAnswer = 43;\n")
    assert is_compiled() and not is_compiled()
    source.write_text(source.read_text() + "\n")
    assert is_compiled() and not is_compiled()
    (report,) = tmp_path.glob("kernel.cu-90.json")
    report.write_text(report.read_text()[:20])
    assert is_compiled() and not is_compiled()
    monkeypatch.setattr(toolchain, "NVCC_FLAGS", (*toolchain.NVCC_FLAGS, "-lineinfo"))
    assert is_compiled() and not is_compiled()
    monkeypatch.setattr(resources_module, "_version", lambda nvcc: "release 99.0")
    assert is_compiled() and not is_compiled()
