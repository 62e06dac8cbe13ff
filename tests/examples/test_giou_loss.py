"""examples/giou_loss: values and gradients against float64 and torchvision, kernels without a GPU, and the script."""

import functools
import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

import fuseopt
from fuseopt.ops.library import TRITON_INTERPRETED
from tests.examples.native_builds import assert_compiles_for_sm_90

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "giou_loss"
pytest.importorskip("triton")


@pytest.fixture(scope="module")
def example():
    """The script's modules; their ops are gone afterwards."""
    sys.path.insert(0, str(FOLDER))
    names = ["giou_kernel", "giou_ops", "giou_timing", "main"]
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(FOLDER))
        for name in names:
            sys.modules.pop(name, None)
        for name in ("giou::loss", "giou::loss_and_gradient"):
            fuseopt.unregister(name)


def boxes_of(shape, device="cpu"):
    """Pairs that overlap, that do not, that share sides, and that are the same box."""
    torch.manual_seed(1)
    corners = torch.randint(0, 8, (2, *shape, 2), device=device)
    boxes = torch.cat((corners, corners + torch.randint(1, 8, corners.shape, device=device)), -1).float()
    boxes[1, 0] = boxes[0, 0]
    return boxes[0], boxes[1], torch.rand(shape, device=device) < 0.7


def exact_loss(boxes, targets):
    """In float64, one coordinate at a time. Boxes that only touch take no gradient of an overlap (relu at 0)."""
    x1, y1, x2, y2, u1, v1, u2, v2 = (*boxes.double().unbind(-1), *targets.double().unbind(-1))
    inter = (x2.minimum(u2) - x1.maximum(u1)).relu() * (y2.minimum(v2) - y1.maximum(v1)).relu()
    union = (x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - inter
    hull = (x2.maximum(u2) - x1.minimum(u1)) * (y2.maximum(v2) - y1.minimum(v1))
    return 1 - (inter / union - (hull - union) / hull)


def check_against_float64(ops, backend, device="cpu", shape=(7, 45)):
    boxes, targets, valid = boxes_of(shape, device)
    boxes.requires_grad_()
    targets.requires_grad_()
    exact = torch.where(valid, exact_loss(boxes, targets), 0)
    losses = ops.loss(boxes, targets, valid, backend=backend)
    assert ops.loss.choose(boxes, targets, valid, backend=backend).backend == backend
    torch.testing.assert_close(losses.double(), exact, rtol=1e-5, atol=1e-6)
    weight = torch.rand(valid.shape, device=device)
    wanted = torch.autograd.grad(exact, (boxes, targets), weight.double(), retain_graph=True)
    for found, one in zip(torch.autograd.grad(losses, (boxes, targets), weight), wanted, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-6)
    again, gradient = ops.loss_and_gradient(boxes.detach(), targets.detach(), valid, weight, backend=backend)
    torch.testing.assert_close(again, losses)
    torch.testing.assert_close(gradient, wanted[0], rtol=1e-4, atol=1e-6)
    third = torch.tensor(1 / 3, device=device)
    _, gradient = ops.loss_and_gradient(boxes.detach(), targets.detach(), valid, third, backend=backend)
    (mean,) = torch.autograd.grad(exact, boxes, torch.full_like(exact, 1 / 3))
    torch.testing.assert_close(gradient, mean, rtol=1e-4, atol=1e-6)


def test_values_and_gradients_against_float64(example):
    check_against_float64(example["giou_ops"], "reference")


def test_values_and_gradients_against_torchvision(example):
    theirs = pytest.importorskip("torchvision.ops").generalized_box_iou_loss
    boxes, targets, valid = boxes_of((7, 45))
    boxes.requires_grad_()
    wanted = torch.where(valid, theirs(boxes, targets), 0)
    found = example["giou_ops"].loss(boxes, targets, valid)
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(losses.sum(), boxes)[0] for losses in (found, wanted)]
    torch.testing.assert_close(*gradients)


@pytest.mark.interpreter
def test_triton_kernels_in_the_interpreter(example):
    check_against_float64(example["giou_ops"], "triton")


@pytest.mark.interpreter
@pytest.mark.slow
@pytest.mark.parametrize("op", ["loss", "loss_and_gradient"])
def test_triton_kernels_pass_check(example, op):
    report = fuseopt.check(getattr(example["giou_ops"], op), device="cpu")
    assert report.ok, str(report)
    passed = {row.check for row in report.rows if row.backend == "triton" and row.status == "ok"}
    assert {"as sampled, bf16", "empty, fp32", "gradient, fp16", "opcheck"} <= passed


@pytest.mark.skipif(TRITON_INTERPRETED, reason="of processes in which Triton compiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_configuration_compiles_for_sm_90(example, dtype):
    from fuseopt.ops.triton.compile_only import compile_only

    kernel = example["giou_kernel"]
    boxes, valid = torch.empty(64, 4, device="meta", dtype=dtype), torch.empty(64, device="meta", dtype=torch.bool)
    losses = torch.empty(64, device="meta", dtype=dtype)
    with compile_only(90, 132) as compiled:
        for config in kernel.CONFIGS:
            for with_gradient in (False, True):
                kernel.giou_kernel[(1,)](
                    boxes, boxes, valid, losses, losses, boxes, 64, 1,
                    WITH_GRADIENT=with_gradient, **config.all_kwargs(),
                )  # fmt: skip
    assert len(compiled) == 2 * len(kernel.CONFIGS)
    assert all(each.metadata.target.arch == 90 for each in compiled)
    assert all(each.metadata.shared == 0 for each in compiled)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("op", ["loss", "loss_and_gradient"])
def test_the_cuda_source_compiles_for_sm_90(example, op):
    assert_compiles_for_sm_90(f"giou::{op}", FOLDER / "giou.cu")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_kernels_on_a_gpu(example, backend):
    check_against_float64(example["giou_ops"], backend, "cuda")
    check_against_float64(example["giou_ops"], backend, "cuda", (257, 259))  # more than TUNED_PAIRS


@pytest.mark.slow
def test_the_script_writes_its_table(example, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # for speed
    arguments = ["--device", "cpu", "--batch", "2", "--boxes", "16", "--dtypes", "float32", "bfloat16"]
    rows = example["main"].main([*arguments, "--out", str(tmp_path)])
    named = [row["way"] for row in rows if row["dtype"] == "bfloat16" and row["way"] != "torchvision"]
    assert named[:2] == ["eager", "torch.compile"] and "one pass, reference" in named
    assert all(row["error"] < (1e-6 if row["dtype"] == "float32" else 1e-2) for row in rows)
    assert json.loads((tmp_path / "results.json").read_text()) == rows
    assert (tmp_path / "plot.png").exists() == ("no plot" not in (printed := capsys.readouterr().out))
    assert "giou::loss: fuseopt.check finds nothing wrong with reference" in printed


def test_a_contender_that_fails_is_a_row(example, monkeypatch, capsys):
    def broken(*_):
        raise ValueError("out of boxes\nand more")

    script = example["main"]
    ways = script.ways
    monkeypatch.setattr(script, "ways", lambda *given: {"broken": (broken, "")} | ways(*given))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # for speed
    broken_row, *others = script.measure_all(2, 16, torch.device("cpu"), torch.float32)
    assert broken_row["failed"] == "ValueError: out of boxes" and "both_us" not in broken_row
    assert others and all(row["timed_by"] == "host clock" and row["both_us"] > 0 for row in others)
    script.print_table([broken_row])
    assert "ValueError: out of boxes" in capsys.readouterr().out


@pytest.mark.gpu
def test_calls_that_wait_for_the_gpu_are_timed_by_events(example):
    boxes = torch.rand(1000, device="cuda")
    timed = example["giou_timing"].timed
    assert timed([lambda: boxes[boxes > 0.5]], boxes.device)[1] == "events"
    assert timed([lambda: boxes + 1], boxes.device)[1] == "CUDA graph"
    assert torch.cuda.get_sync_debug_mode() == 0
