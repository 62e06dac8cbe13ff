"""Generalised IoU loss of padded boxes: eager, torch.compile, Triton and CUDA; forward, with backward, and in one pass.

Every op is checked before it is timed. Sizes are small on a CPU.
"""

import argparse
import importlib.util
import json
import tempfile
from functools import partial
from pathlib import Path

import torch
from giou_ops import loss, loss_and_gradient
from giou_timing import timed
from torch import Tensor

import fuseopt

OUT = Path("build") / "examples" / "giou_loss"  # git ignores build/
GPU_OR_CPU = "cuda" if torch.cuda.is_available() else "cpu"


def padded_boxes(batch: int, boxes: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Predicted and true boxes [batch, boxes, 4] (x1, y1, x2, y2), which are no padding, and one over their number."""
    corners = torch.rand(batch, boxes, 2, device=device)
    targets = torch.cat((corners, corners + torch.rand(batch, boxes, 2, device=device) + 0.1), -1)
    predicted = targets + 0.05 * torch.rand(batch, boxes, 4, device=device)
    lengths = torch.randint(boxes // 2, boxes + 1, (batch, 1), device=device)
    valid = torch.arange(boxes, device=device) < lengths
    return predicted.to(dtype).requires_grad_(), targets.to(dtype), valid, (1 / valid.sum()).to(dtype)


def native(boxes: Tensor, targets: Tensor, valid: Tensor, weight: Tensor, backend: str) -> Tensor:
    return loss(boxes, targets, valid, backend=backend).sum(dtype=torch.float32) * weight


def with_cast(boxes: Tensor, targets: Tensor, valid: Tensor, weight: Tensor, backend: str) -> Tensor:
    """As losses are often called in half precision: the boxes are cast to float32 before, in passes of their own."""
    return native(boxes.float(), targets.float(), valid, weight, backend)


def torchvision(boxes: Tensor, targets: Tensor, valid: Tensor, weight: Tensor, backend: str) -> Tensor:
    losses = importlib.import_module("torchvision.ops").generalized_box_iou_loss(boxes.float(), targets.float())
    return torch.where(valid, losses, 0).sum() * weight


def one_pass(boxes: Tensor, targets: Tensor, valid: Tensor, weight: Tensor, backend: str) -> Tensor:
    """Losses and the mean's gradient, from which the model's backward starts: `boxes.backward(gradient)`."""
    losses, boxes.grad = loss_and_gradient(boxes.detach(), targets, valid, weight, backend=backend)
    return losses


def ways(device: torch.device, dtype: torch.dtype) -> dict[str, tuple]:
    """Name of each row of the table: (function, backend); only those that this machine can run."""
    found = {"torchvision": (torchvision, "")} if importlib.util.find_spec("torchvision") else {}
    found |= {"eager": (with_cast, "reference"), "torch.compile": (torch.compile(with_cast), "reference")}
    kernels = [backend for backend in ("triton", "cuda") if backend in loss.backends_on(device.type)[0]]
    if "triton" in kernels:
        found |= {"triton": (with_cast, "triton"), "triton in torch.compile": (torch.compile(with_cast), "triton")}
    for backend in kernels:
        found[f"{backend}, no cast"] = (native, backend)
    return found | {f"one pass, {backend}": (one_pass, backend) for backend in ("reference", *kernels)}


def forward_and_backward(function, inputs: tuple, backend: str) -> None:
    inputs[0].grad = None
    value = function(*inputs, backend)
    if function is not one_pass:
        value.backward()


def measure(way: str, function, backend: str, sets: list[tuple], exact: Tensor, device: torch.device) -> dict:
    """One row. `exact` is the gradient in float64 of the first set."""
    row = {"way": way, "dtype": str(sets[0][0].dtype).removeprefix("torch."), "pairs": sets[0][2].numel()}
    both = [partial(forward_and_backward, function, inputs, backend) for inputs in sets]
    try:
        both[0]()
        row["error"] = ((sets[0][0].grad.double() - exact).norm() / exact.norm()).item()
        if function is not one_pass:
            row["forward_us"], _ = timed([partial(torch.no_grad()(function), *each, backend) for each in sets], device)
        row["both_us"], row["timed_by"] = timed(both, device)
    except Exception as error:  # of one contender: the others are still worth a row
        row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return row


def measure_all(batch: int, boxes: int, device: torch.device, dtype: torch.dtype) -> list[dict]:
    torch.compiler.reset()
    torch.manual_seed(0)
    sets = [padded_boxes(batch, boxes, device, dtype) for _ in range(8 if device.type == "cuda" else 1)]
    wide = [t.detach().double() if t.is_floating_point() else t for t in sets[0]]
    forward_and_backward(native, (wide[0].requires_grad_(), *wide[1:]), "reference")
    return [measure(name, *way, sets, wide[0].grad, device) for name, way in ways(device, dtype).items()]


def print_table(rows: list[dict]) -> None:
    print(f"{'':26}{'dtype':>9}{'forward':>12}{'+ backward':>12}{'gradient off by':>17}  timed by")
    for row in rows:
        us = [f"{row[key]:.1f} us" if key in row else "-" for key in ("forward_us", "both_us")]
        how = f"{row.get('error', float('nan')):>17.1e}  {row.get('failed') or row['timed_by']}"
        print(f"{row['way']:26}{row['dtype']:>9}{us[0]:>12}{us[1]:>12}{how}")


def save_plot(rows: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(9, 6), layout="tight")).subplots()
    names = [f"{row['way']}, {row['dtype']}" for row in rows]
    axes.barh(names, [row.get("both_us", 0) for row in rows], color="lightgrey", label="forward and backward")
    axes.barh(names, [row.get("forward_us", 0) for row in rows], color="tab:blue", label="forward")
    axes.invert_yaxis()
    axes.set(xlabel="us", title=f"generalised IoU loss, {rows[0]['pairs']:,} pairs of boxes")
    axes.legend()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=GPU_OR_CPU, type=torch.device, help="default: %(default)s")
    parser.add_argument("--batch", type=int, help="images; default: 1024 on a GPU, 8 on a CPU")
    parser.add_argument("--boxes", type=int, default=1024, help="boxes per image, with padding; default: %(default)s")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"], help="default: %(default)s")
    parser.add_argument(
        "--out", type=Path, default=OUT, help="folder for the results and the plot; default: %(default)s"
    )
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=options.out).close()  # raises now, not after the work, if it cannot be written
    for op in (loss, loss_and_gradient):
        if not (report := fuseopt.check(op, device=options.device)).ok:
            raise SystemExit(str(report))
        print(f"{op.name}: fuseopt.check finds nothing wrong with {', '.join(op.backends_on(options.device.type)[0])}")
    batch = options.batch or (1024 if options.device.type == "cuda" else 8)
    dtypes = [getattr(torch, name) for name in options.dtypes]
    rows = [row for dtype in dtypes for row in measure_all(batch, options.boxes, options.device, dtype)]
    print_table(rows)
    (options.out / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib"):
        save_plot(rows, options.out / "plot.png")
    else:
        print("no plot: it needs matplotlib: pip install 'fuseopt[plot]'")
    print(f"written to {options.out}")
    return rows


if __name__ == "__main__":
    main()
