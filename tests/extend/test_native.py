"""Sources of the user's own: built, cached and called; errors in the compiler's words, with file and line."""

import shutil

import pytest
import torch
from torch import Tensor

import fuseopt
from fuseopt.build import compilation, library_cache, toolchain
from fuseopt.errors import NativeBuildError, OpError
from fuseopt.extend import native, nvrtc
from fuseopt.extend.own_library import Missing

CPU = """
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

Tensor scale_add(Tensor a, Tensor b, double scale, int64_t times) {
  a = torch::stable::contiguous(a), b = torch::stable::contiguous(b);
  Tensor output = torch::stable::empty_like(a);
  const float *x = a.const_data_ptr<float>(), *y = b.const_data_ptr<float>();
  float* z = output.mutable_data_ptr<float>();
  for (int64_t i = 0; i < a.numel(); ++i) z[i] = static_cast<float>(x[i] + scale * y[i] * times);
  return output;
}
"""
SCHEMA = "(Tensor a, Tensor b, float scale=2., int times=1) -> Tensor"
BARE = """
__global__ void scale_add_kernel(const float* a, const float* b, double scale, int times, float* output, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) output[i] = a[i] + scale * b[i] * times;
}
"""
CUDA = (
    BARE
    + """
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

Tensor scale_add(Tensor a, Tensor b, double scale, int64_t times) {
  a = torch::stable::contiguous(a), b = torch::stable::contiguous(b);
  Tensor output = torch::stable::empty_like(a);
  void* stream = nullptr;
  aoti_torch_get_current_cuda_stream(a.get_device_index(), &stream);
  const int n = a.numel();
  if (n) scale_add_kernel<<<(n + 255) / 256, 256, 0, static_cast<cudaStream_t>(stream)>>>(
      a.const_data_ptr<float>(), b.const_data_ptr<float>(), scale, times, output.mutable_data_ptr<float>(), n);
  return output;
}
"""
)


@pytest.fixture
def op() -> fuseopt.Op:
    @fuseopt.op("mine::scale_add")
    def scale_add(a: Tensor, b: Tensor, scale: float = 2.0, times: int = 1) -> Tensor:
        return a + scale * b * times

    @scale_add.samples
    def _(device, dtype):
        yield torch.randn(5, 24, device=device, dtype=dtype), torch.randn(5, 24, device=device, dtype=dtype), 1.5, 3

    return scale_add


def floats_of_one_shape(a, b, scale, times):
    return (a.dtype == b.dtype == torch.float32 and a.shape == b.shape) or "takes float32 tensors of one shape"


def test_a_source_for_the_cpu_is_built_once_and_passes_check(op, tmp_path, monkeypatch):
    op.native(cpu=CPU).supports(floats_of_one_shape)
    a, b = torch.randn(3, 5), torch.randn(3, 5)
    assert op.choose(a, b).backend == "cpu" and op.choose(a.double(), b).backend == "reference"
    for scale in (2.0, 2, True):  # C++ calls the kernel itself with a float, and by `torch.ops` with another number
        torch.testing.assert_close(op(a, b, scale, 3), a + scale * b * 3)
    report = fuseopt.check(op, device="cpu")
    assert report.ok, str(report)
    monkeypatch.setattr(compilation, "build", None)  # a second time it is in the cache
    file = tmp_path / "scale_add.cpp"
    op.native(cpu=CPU)
    file.write_text(CPU)
    monkeypatch.undo()
    op.native(cpu=file)
    torch.testing.assert_close(op(a, b), a + 2 * b)


@pytest.mark.parametrize(
    "wrong",
    [
        ("double scale, int64_t times", "float scale, int64_t times"),
        ("double scale, int64_t times", "double scale, double times"),
        (", double scale, int64_t times", ", double scale"),
    ],
)
def test_arguments_that_do_not_fit_the_schema_do_not_compile(op, wrong):
    source = CPU.replace(*wrong).replace("* times", "")
    declared = r"mine::scale_add is called as: Tensor scale_add\(Tensor a, Tensor b, double scale, int64_t times\)"
    with pytest.raises(NativeBuildError, match=declared):
        op.native(cpu=source)


def test_a_source_without_the_op_s_function_is_refused_with_its_declaration(op):
    with pytest.raises(OpError, match=r"has no function 'scale_add'; define Tensor scale_add\(Tensor a, "):
        op.native(cpu=CPU.replace("scale_add", "other"))


def test_lists_optional_tensors_strings_and_several_results_are_declared_in_c_plus_plus():
    arguments = 'Tensor[] xs, Tensor? mask=None, int n=1, float p=0.5, bool flag=False, str how="a"'
    assert native.declaration("f", f"({arguments}) -> (Tensor, Tensor)") == (
        "std::tuple<Tensor, Tensor> f(std::vector<Tensor> xs, std::optional<Tensor> mask, int64_t n, double p, "
        "bool flag, std::string how)"
    )


SOURCE_OF_KINDS = """
#include <torch/csrc/stable/tensor.h>
#include "new_tensor.h"
using torch::stable::Tensor;

std::tuple<Tensor, Tensor> of_kinds(
    const std::vector<Tensor>& xs, std::optional<Tensor> mask, int64_t n, double p, bool flag, std::string how) {
  Tensor sum = fuseopt::new_tensor_like(xs[0]), count = fuseopt::new_tensor_like(xs[0]);
  for (int64_t i = 0; i < xs[0].numel(); ++i) {
    float total = 0;
    for (const Tensor& x : xs) total += x.const_data_ptr<float>()[i];
    if (mask.has_value()) total *= mask->const_data_ptr<float>()[i];
    sum.mutable_data_ptr<float>()[i] = p * total + (flag ? n : 0);
    count.mutable_data_ptr<float>()[i] = how.size();
  }
  return {sum, count};
}
"""


def test_all_kinds_of_arguments_reach_a_native_function():
    @fuseopt.op("mine::of_kinds")
    def of_kinds(
        xs: list[Tensor], mask: Tensor | None, n: int, p: float, flag: bool, how: str
    ) -> tuple[Tensor, Tensor]:
        total = sum(xs) if mask is None else sum(xs) * mask
        return p * total + (n if flag else 0), torch.full_like(xs[0], len(how))

    of_kinds.native(cpu=SOURCE_OF_KINDS)
    xs = [torch.randn(3, 5) for _ in range(3)]
    for mask in (None, torch.randn(3, 5)):
        given = of_kinds(xs, mask, 3, 0.25, True, "four", backend="cpu")
        for one, other in zip(given, of_kinds.function(xs, mask, 3, 0.25, True, "four"), strict=True):
            torch.testing.assert_close(one, other)


def test_a_source_that_does_not_compile_is_shown_with_file_and_line(op, tmp_path):
    file = tmp_path / "broken.cpp"
    file.write_text(CPU.replace("a.numel()", "a.number_of_elements()"))
    with pytest.raises(NativeBuildError, match=rf"{file}:12:\d+: error: .*number_of_elements"):
        op.native(cpu=file)
    with pytest.raises(NativeBuildError, match=r"mine::scale_add \(cpu source\):12:"):
        op.native(cpu=file.read_text())
    with pytest.raises(OpError, match=r"no file 'absent.cpp' for the cpu source"):
        op.native(cpu="absent.cpp")
    with pytest.raises(OpError, match="give native a source"):
        op.native()
    with pytest.raises(OpError, match="a bare kernel needs"):
        op.native(cuda=BARE, kernel="scale_add_kernel")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "must be text or the path of a file, not ''"),
        (3, "must be text or the path of a file, not 3"),
        (CPU + "// \ud800", "is not UTF-8"),
        (".", "no file '.' for the cpu source, which is a folder"),
    ],
)
def test_what_is_no_source_is_refused(op, given, says):
    with pytest.raises(OpError, match=says):
        op.native(cpu=given)


def test_a_source_of_odd_text_in_a_folder_of_an_odd_name(op, tmp_path):
    folder = tmp_path / 'a b "q" \\ $ ü'
    folder.mkdir()
    (folder / "twice.h").write_text("#define TWICE 2\r\n")
    odd = '#include "twice.h"\n// "quoted" \'s ü \\ trailing\n' + CPU.replace("scale * y[i]", "TWICE * y[i]")
    file = folder / "scale_add.cpp"
    file.write_bytes(odd.replace("\n", "\r\n").encode())
    op.native(cpu=file)
    a, b = torch.randn(3, 5), torch.randn(3, 5)
    assert op.choose(a, b).backend == "cpu"
    torch.testing.assert_close(op(a, b, 5.0), a + 2 * b)
    file.write_bytes(b"// \xfc\n")
    with pytest.raises(OpError, match="mine::scale_add: its cpu source is not UTF-8"):
        op.native(cpu=file)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kernel": "a b"}, "'a b' is no name of a kernel"),
        ({"grid": 3}, "its grid must be a function, not 3"),
        ({"block": 0}, "its block must be a positive int, or up to three of them, not 0"),
        ({"block": (1, 2, 3, 4)}, "its block must be"),
        ({"block": "256"}, "its block must be"),
        ({"block": True}, "its block must be"),
    ],
)
def test_launches_that_are_refused(op, options, says):
    with pytest.raises(OpError, match=says):
        op.native(**{"cuda": BARE, "kernel": "scale_add_kernel", "grid": lambda *_: 1, **options})


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_cuda_without_a_gpu_is_a_reason(op):
    op.native(cuda=CUDA)
    (reason,) = op.choose(torch.ones(2), torch.ones(2)).refused["cuda"]
    assert reason.startswith("its cuda source is not built: ") and "CUDA" in reason


def test_cuda_without_nvcc_is_a_reason(op, monkeypatch):
    monkeypatch.setattr(native, "_check_device", lambda: None)
    monkeypatch.setattr(native, "_capability", lambda: "90")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(nvrtc, "_library", no_nvrtc)
    op.native(cuda=BARE, kernel="scale_add_kernel", grid=lambda *_: 1)
    (reason,) = op.choose(torch.ones(2), torch.ones(2)).refused["cuda"]
    assert "there is no libnvrtc" in reason and "no nvcc: not in CUDA_HOME" in reason


def no_nvrtc():
    raise Missing("there is no libnvrtc of torch's CUDA")


needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


@needs_nvcc
def test_cuda_sources_compile_without_a_gpu(monkeypatch):
    monkeypatch.setattr(nvrtc, "_library", no_nvrtc)
    source = native.Source.of("mine::scale_add", "cuda", BARE)
    assert native.cubin(source, "scale_add_kernel", "90").startswith(b"\x7fELF")
    broken = native.Source.of("mine::scale_add", "cuda", BARE.replace("threadIdx.x", "threadIdx.w"))
    with pytest.raises(NativeBuildError, match=r"mine::scale_add \(cuda source\)\(3\): error"):
        native.cubin(broken, "scale_add_kernel", "90")
    with pytest.raises(OpError, match="has no `__global__ void other"):
        native.cubin(source, "other", "90")


@pytest.fixture
def without_nvcc(monkeypatch):
    """A process that has NVRTC, and no nvcc."""
    try:
        nvrtc._library()
    except Missing as reason:
        pytest.skip(str(reason))

    def find_nvcc():
        raise toolchain.ToolchainError("no nvcc")

    monkeypatch.setattr(toolchain, "find_nvcc", find_nvcc)


def test_a_bare_kernel_is_compiled_by_nvrtc(without_nvcc, tmp_path):
    source = native.Source.of("mine::scale_add", "cuda", BARE)
    assert native.cubin(source, "scale_add_kernel", "90").startswith(b"\x7fELF")
    (tmp_path / "twice.h").write_text("#define TWICE(x) ((x) + (x))\n")
    file = tmp_path / "kernel.cu"
    file.write_text('#include "twice.h"\n' + BARE.replace("a[i] +", "TWICE(a[i]) +"))
    assert native.cubin(native.Source.of("mine::scale_add", "cuda", file), "scale_add_kernel", "80")
    file.write_text(file.read_text().replace("threadIdx.x", "threadIdx.w"))
    with pytest.raises(NativeBuildError, match=rf"{file}\(4\): error: .*"):
        native.cubin(native.Source.of("mine::scale_add", "cuda", file), "scale_add_kernel", "90")


@needs_nvcc
def test_what_nvrtc_refuses_is_left_to_nvcc():
    text = "#include <cstdio>\n#include <vector>\n" + BARE.replace("int times", "int32_t times")
    source = native.Source.of("mine::scale_add", "cuda", text)
    assert native.cubin(source, "scale_add_kernel", "90").startswith(b"\x7fELF")
    broken = native.Source.of("mine::scale_add", "cuda", text.replace("threadIdx.x", "threadIdx.w"))
    with pytest.raises(NativeBuildError, match=r"mine::scale_add \(cuda source\)\(5\): error"):
        native.cubin(broken, "scale_add_kernel", "90")


@needs_nvcc
@pytest.mark.slow
def test_a_cuda_source_with_launch_code_is_built_without_a_gpu():
    source = native.Source.of("mine::scale_add", "cuda", CUDA)
    library = native.build(
        "mine::scale_add", "scale_add__native", "cuda", source, toolchain.cuda_recipe(["90"]), SCHEMA
    )
    assert library_cache.damage(library) is None


@pytest.mark.gpu
@pytest.mark.parametrize("bare", [False, True])
def test_cuda_sources_pass_check_on_a_gpu(op, bare, request):
    if bare:
        request.getfixturevalue("without_nvcc")
        op.native(cuda=BARE, kernel="scale_add_kernel", grid=lambda a, *_: (a.numel() + 255) // 256)
    else:
        op.native(cuda=CUDA)
    op.supports(floats_of_one_shape, "cuda")
    a, b = torch.randn(3, 5, device="cuda"), torch.randn(3, 5, device="cuda")
    assert op.choose(a, b).backend == "cuda"
    report = fuseopt.check(op, device="cuda")
    assert report.ok, str(report)
