"""examples/dlrm: ops and model against float64, kernels without a GPU, host syncs counted, and the script."""

import functools
import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

import fuseopt
from fuseopt.extend import replaced
from fuseopt.ops.library import TRITON_INTERPRETED
from tests.examples.native_builds import assert_compiles_for_sm_90

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "dlrm"
pytest.importorskip("triton")


@pytest.fixture(scope="module")
def example():
    """The script's modules; their ops and replacements are gone afterwards."""
    sys.path.insert(0, str(FOLDER))
    names = ["dlrm_kernel", "dlrm_ops", "dlrm_model", "main"]
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(FOLDER))
        for name in names:
            sys.modules.pop(name, None)
        for name in ("FusedLinearReLU", "LinearThenBiasReLU", "FusedInteraction"):
            replaced.unreplace(name)
        for name in ("bias_relu", "linear_relu", "interaction", "interaction_backward"):
            fuseopt.unregister(f"dlrm::{name}")


def exact_interaction(features):
    """In float64, a pair at a time."""
    wide = features.double()
    pairs = [(wide[:, i] * wide[:, j]).sum(-1, keepdim=True) for i in range(wide.shape[1]) for j in range(i)]
    return torch.cat((wide[:, 0], *pairs), 1)


SHAPES = [(5, 27, 16), (3, 7, 20), (9, 27, 128), (4, 32, 72), (1, 2, 136)]


def check_interaction(ops, backend, device="cpu", dtype=torch.float32, shapes=SHAPES):
    """Errors are of each result's rounding: sums are in float32."""
    tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for shape in shapes:
        features = torch.randn(shape, device=device, dtype=dtype).requires_grad_()
        assert ops.interaction.choose(features, backend=backend).backend == backend
        found, exact = ops.interaction(features, backend=backend), exact_interaction(features)
        assert found.dtype == dtype and relative(found, exact) < tolerance
        cotangent = torch.randn_like(found)
        (wanted,) = torch.autograd.grad(exact, features, cotangent.double())
        (gradient,) = torch.autograd.grad(found, features, cotangent)
        assert relative(gradient, wanted) < tolerance
        again = ops.interaction_backward(features.detach(), cotangent, backend=backend)
        torch.testing.assert_close(again, gradient)


def relative(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


def check_linear_relu(ops, backend, device="cpu"):
    given = [torch.randn(shape, device=device, requires_grad=True) for shape in ((33, 24), (40, 24), (40,))]
    assert ops.linear_relu.choose(*given, backend=backend).backend == backend
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    found, exact = ops.linear_relu(*given, backend=backend), torch.relu(wide[0] @ wide[1].T + wide[2])
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)
    cotangent = torch.randn_like(found)
    wanted = torch.autograd.grad(exact, wide, cotangent.double())
    for one, other in zip(torch.autograd.grad(found, given, cotangent), wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def check_bias_relu(ops, backend, device="cpu"):
    x, bias = (torch.randn(shape, device=device, requires_grad=True) for shape in ((33, 44), (44,)))
    assert ops.bias_relu.choose(x, bias, backend=backend).backend == backend
    found, exact = ops.bias_relu(x, bias, backend=backend), torch.relu(x.double() + bias.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    cotangent = torch.randn_like(found)
    wanted = torch.autograd.grad(exact, (x, bias), cotangent.double())
    for one, other in zip(torch.autograd.grad(found, (x, bias), cotangent), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_ops_against_float64(example):
    check_interaction(example["dlrm_ops"], "reference")
    check_bias_relu(example["dlrm_ops"], "reference")
    check_linear_relu(example["dlrm_ops"], "reference")


@pytest.mark.interpreter
def test_triton_kernels_in_the_interpreter(example):
    check_interaction(example["dlrm_ops"], "triton")
    check_bias_relu(example["dlrm_ops"], "triton")
    # Triton's interpreter gets tl.dot of bfloat16 wrong.
    report = fuseopt.check(example["dlrm_ops"].interaction, device="cpu", dtypes=(torch.float32, torch.float16))
    assert report.ok, str(report)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_interaction_on_a_gpu(example, backend, dtype):
    shapes = [shape for shape in SHAPES if backend == "triton" or shape[2] * dtype.itemsize % 16 == 0]
    check_interaction(example["dlrm_ops"], backend, "cuda", dtype, shapes)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interaction_keeps_nan_on_a_gpu(example, dtype):
    features = torch.randn(9, 27, 128, device="cuda", dtype=dtype)
    features[4, 11, 77] = torch.nan
    found = example["dlrm_ops"].interaction(features, backend="cuda")
    assert torch.equal(found.isnan(), exact_interaction(features).isnan())


@pytest.mark.gpu
def test_bias_and_relu_on_a_gpu(example):
    for backend in ("triton", "cuda"):
        check_bias_relu(example["dlrm_ops"], backend, "cuda")
    check_linear_relu(example["dlrm_ops"], "cuda", "cuda")


@pytest.mark.skipif(TRITON_INTERPRETED, reason="of processes in which Triton compiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_triton_kernels_compile_for_sm_90(example, dtype):
    from fuseopt.ops.triton.compile_only import compile_only

    ops, features = example["dlrm_ops"], torch.empty(64, 27, 128, device="meta", dtype=dtype)
    with compile_only(90, 132) as compiled:
        output = ops.interaction_by_triton(features)
        ops.interaction_backward_by_triton(features, output)
    assert [kernel.metadata.name for kernel in compiled] == ["interaction_kernel", "interaction_backward_kernel"]
    assert all(kernel.metadata.target.arch == 90 for kernel in compiled)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(
    ("op", "file"),
    [("bias_relu", "bias_relu.cu"), ("interaction", "interaction.cu"), ("interaction_backward", "interaction.cu")],
)
def test_the_cuda_sources_compile_for_sm_90(example, op, file):
    assert_compiles_for_sm_90(f"dlrm::{op}", FOLDER / file)


def test_hashing_spreads_ids_over_the_rows(example):
    rows = example["dlrm_model"].hashed(torch.arange(100_000) * 64, 100)
    counts = torch.bincount(rows, minlength=100)
    assert len(counts) == 100 and counts.min() > 500 and counts.max() < 2000


def test_initialize_puts_the_parts_in_and_the_model_computes_the_same(example):
    model_file = example["dlrm_model"]
    torch.manual_seed(0)
    model = model_file.DLRM(100, 16, 32)
    dense, ids, _ = model_file.clicks(8, torch.device("cpu"))
    wanted = model(dense, ids)
    wanted.sum().backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    fused = fuseopt.initialize(model, example["main"].PARTS)
    modules = list(fused.modules())
    assert sum(isinstance(module, model_file.FusedLinearReLU) for module in modules) == 4
    assert sum(isinstance(module, model_file.FusedInteraction) for module in modules) == 1
    found = fused(dense, ids)
    found.sum().backward()
    torch.testing.assert_close(found, wanted)
    for parameter, grad in zip(fused.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_script_removes_the_syncs_and_writes_its_table(example, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # for speed
    arguments = ["--device", "cpu", "--batch", "16", "--rows", "50", "--steps", "2", "--no-bench"]
    rows = example["main"].main([*arguments, "--out", str(tmp_path)])
    assert [row["way"] for row in rows] == [
        "eager, with host syncs", "eager", "torch.compile", "fused parts", "fused parts in torch.compile",
        "fused interaction alone",
    ]  # fmt: skip
    assert json.loads((tmp_path / "results.json").read_text()) == rows
    printed = capsys.readouterr().out
    assert "host syncs of 3 steps, before: {'aten::_local_scalar_dense': 6}" in printed
    assert "FusedInteraction" in printed
    assert all(json.loads((tmp_path / f"{name}.trace.json").read_text())["traceEvents"] for name in ("before", "after"))


def test_training_lowers_the_loss(example):
    torch.manual_seed(0)
    model = example["dlrm_model"].DLRM(100, 16, 32)
    losses = example["main"].train(model, [example["dlrm_model"].clicks(256, torch.device("cpu"))], 60)
    assert losses[-1] < losses[0] - 0.03
