"""Generalised IoU loss of padded boxes: eager, torch.compile, Triton and CUDA; forward, with backward, and in one pass.

Every op is checked before it is timed. Sizes are small on a CPU.
"""

import argparse
import importlib.util
import json
from functools import partial
from pathlib import Path

import torch
from giou_ops import loss, loss_and_gradient
from torch import Tensor
from torch.utils.benchmark import Timer

import fuseopt


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


def microseconds(calls: list, device: torch.device) -> float:
    """Time of one call; on a GPU as part of a CUDA graph of all, whose boxes together exceed the L2 cache."""
    run = calls[0]
    if device.type == "cuda":
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for call in calls * 2:
                call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        run = graph.replay
    return 1e6 * Timer("run()", globals={"run": run}).blocked_autorange(min_run_time=0.05).median / len(calls)


def forward_and_backward(function, inputs: tuple, backend: str) -> None:
    inputs[0].grad = None
    value = function(*inputs, backend)
    if function is not one_pass:
        value.backward()


def measure(batch: int, boxes: int, device: torch.device, dtype: torch.dtype) -> list[dict]:
    torch.compiler.reset()
    torch.manual_seed(0)
    sets = [padded_boxes(batch, boxes, device, dtype) for _ in range(8 if device.type == "cuda" else 1)]
    wide = [t.detach().double() if t.is_floating_point() else t for t in sets[0]]
    forward_and_backward(native, (wide[0].requires_grad_(), *wide[1:]), "reference")
    rows = []
    for name, (function, backend) in ways(device, dtype).items():
        timed = [(function, inputs, backend) for inputs in sets]
        forward_and_backward(*timed[0])
        error = (sets[0][0].grad.double() - wide[0].grad).norm() / wide[0].grad.norm()
        row = {"way": name, "dtype": str(dtype).removeprefix("torch."), "pairs": batch * boxes, "error": error.item()}
        if function is not one_pass:
            forward = torch.no_grad()(function)
            row["forward_us"] = microseconds([partial(forward, *inputs, backend) for inputs in sets], device)
        rows.append(row | {"both_us": microseconds([partial(forward_and_backward, *each) for each in timed], device)})
    return rows


def print_table(rows: list[dict]) -> None:
    print(f"{'':30}{'dtype':>10}{'forward':>12}{'+ backward':>12}{'gradient off by':>18}")
    for row in rows:
        forward = f"{row['forward_us']:.1f} us" if "forward_us" in row else "-"
        print(f"{row['way']:30}{row['dtype']:>10}{forward:>12}{row['both_us']:>9.1f} us{row['error']:>18.1e}")


def save_plot(rows: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(9, 6), layout="tight")).subplots()
    names = [f"{row['way']}, {row['dtype']}" for row in rows]
    axes.barh(names, [row["both_us"] for row in rows], color="lightgrey", label="forward and backward")
    axes.barh(names, [row.get("forward_us", 0) for row in rows], color="tab:blue", label="forward")
    axes.invert_yaxis()
    axes.set(xlabel="us", title=f"generalised IoU loss, {rows[0]['pairs']:,} pairs of boxes")
    axes.legend()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--batch", type=int, help="images; 1024 on a GPU, 8 on a CPU")
    parser.add_argument("--boxes", type=int, default=1024, help="of an image, with padding")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--out", type=Path, default=Path("giou_loss"), help="folder for the results and the plot")
    options = parser.parse_args(arguments)
    for op in (loss, loss_and_gradient):
        if not (report := fuseopt.check(op, device=options.device)).ok:
            raise SystemExit(str(report))
        print(f"{op.name}: fuseopt.check finds nothing wrong with {', '.join(op.backends_on(options.device.type)[0])}")
    batch = options.batch or (1024 if options.device.type == "cuda" else 8)
    dtypes = [getattr(torch, name) for name in options.dtypes]
    rows = [row for dtype in dtypes for row in measure(batch, options.boxes, options.device, dtype)]
    print_table(rows)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib"):
        save_plot(rows, options.out / "plot.png")
    else:
        print("no plot: it needs matplotlib")
    return rows


if __name__ == "__main__":
    main()
