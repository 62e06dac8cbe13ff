"""examples/softmax: values and gradients against float64, kernels in the interpreter and compiled for sm_90."""

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch

import fuseopt
from fuseopt.bench.harness.records import Results
from fuseopt.extend import registered
from tests.examples.native_builds import assert_compiles_for_sm_90

pytest.importorskip("triton")

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "softmax"
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def main():
    before = registered().keys()
    spec = importlib.util.spec_from_file_location("softmax_main", FOLDER / "main.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in registered().keys() - before:
        fuseopt.unregister(name)


def check_against_float64(softmax, x, backend="auto"):
    x, cotangent = x.detach().requires_grad_(), torch.randn_like(x)
    wide = x.detach().double().requires_grad_()
    output, exact = softmax(x, backend=backend), torch.softmax(wide, -1)
    (grad,) = torch.autograd.grad(output, x, cotangent)
    (exact_grad,) = torch.autograd.grad(exact, wide, cotangent.double())
    # The gradient is the output times a difference of gradients, which the output's rounding may cancel.
    for found, wanted, scale in ((output, exact, 1), (grad, exact_grad, 1 + cotangent.abs().max())):
        assert (found.double() - wanted).abs().max() <= TOLERANCES[x.dtype] * exact.max() * scale


@pytest.mark.parametrize("shape", [(7, 33), (2, 3, 256), (1, 1)])
def test_reference_is_softmax(main, shape):
    check_against_float64(main.softmax, torch.randn(shape) * 10)


@pytest.mark.interpreter
@pytest.mark.parametrize("shape", [(7, 33), (2, 3, 256), (1, 1), (3, 4097), (2, 16384), (2, 16385)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_kernels_in_the_interpreter(main, shape, dtype):
    x = (torch.randn(shape) * 10).to(dtype)
    assert main.softmax.choose(x).backend == main.softmax_backward.choose(x, x).backend == "triton"
    check_against_float64(main.softmax, x)


@pytest.mark.interpreter
def test_a_row_that_begins_with_minus_infinity_has_zeros_there(main):
    x = torch.randn(1, main.WHOLE_ROW + 100)
    x[:, :9000] = float("-inf")
    torch.testing.assert_close(main.softmax(x, backend="triton"), torch.softmax(x, -1))


def test_kernels_take_what_they_say(main, monkeypatch):
    x = torch.randn(4, 8)
    assert main.contiguous(x, x) is True and main.contiguous(x) is True
    for wrong in ((x.double(),), (x.T,), (x, x[:1]), (x, x.half()), (x.sum(),)):
        assert "takes contiguous" in main.contiguous(*wrong)
    capability = [8, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    wide = torch.empty(1, 2**14, device="meta")
    assert main.in_packs(x) is True and "clusters" in main.in_packs(wide)
    capability[0] = 9
    assert main.in_packs(wide) is True
    for wrong in (x[:, :7], torch.empty(1, 2**18 + 8, device="meta"), torch.randn(33)[1:].view(4, 8)):
        assert "takes rows of a multiple of 8" in main.in_packs(wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiles without launching, on machines without a GPU")
@pytest.mark.parametrize("columns", [256, 16384, 262144])
def test_triton_kernels_compile_for_sm_90(main, columns):
    from fuseopt.ops.triton.compile_only import compile_only

    x = torch.empty(64, columns, device="meta", dtype=torch.bfloat16)
    with compile_only(90, multiprocessors=132) as compiled:
        main.launch(main.forward_kernel, x, x)
        main.launch(main.backward_kernel, x, x, x)
    assert [kernel.metadata.name for kernel in compiled] == ["forward_kernel", "backward_kernel"]
    assert {kernel.metadata.target.arch for kernel in compiled} == {90}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("name", ["softmax", "softmax_backward"])
def test_cuda_source_compiles_for_sm_90(main, name):
    assert_compiles_for_sm_90(f"rows::{name}", FOLDER / f"{name}.cu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "columns", [8, 256, 264, 1000, 1024, 2048, 4096, 8192, 16384, 16392, 32768, 65536, 131072, 262136, 262144]
)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_kernels_on_a_gpu(main, backend, dtype, columns):
    x = (torch.randn(9, columns, device="cuda") * 10).to(dtype)
    main.softmax.choose(x, backend=backend)
    check_against_float64(main.softmax, x, backend)


def test_script_checks_times_and_saves(main, tmp_path, capsys):
    main.main(["--shapes", "4x16", "--dtypes", "float32", "--out", str(tmp_path / "a" / "new")])
    printed = capsys.readouterr().out
    assert "rows::softmax keeps its contract" in printed and "rows::softmax_backward keeps its contract" in printed
    rows = Results.load(tmp_path / "a" / "new" / "softmax.json").rows
    for way, tensors in (("fwd", 2), ("bwd", 3)):
        found = {row.variant: row for row in rows if row.case == f"rows::softmax {way}, 4x16, float32"}
        assert found.keys() >= {"reference", "eager", "torch", "copy"}
        assert found["torch"].difference is not None and found["copy"].bytes == tensors * 4 * 16 * 4
    assert (tmp_path / "a" / "new" / "softmax.png").exists() == (importlib.util.find_spec("matplotlib") is not None)
