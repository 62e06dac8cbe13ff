"""Generalised IoU loss of padded boxes: eager, torch.compile, Triton and CUDA; forward, with backward, and in one pass.

Every op is checked before it is timed. Sizes are small on a CPU, where only eager and torch.compile run.
"""

import argparse
import importlib.util
import json
from pathlib import Path

import torch
from giou_ops import loss, loss_and_gradient
from torch import Tensor
from torch.utils.benchmark import Timer

import fuseopt


def padded_boxes(batch: int, boxes: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Predicted and true boxes (x1, y1, x2, y2) [batch, boxes, 4], and which of them are no padding."""
    corners = torch.rand(batch, boxes, 2, device=device)
    targets = torch.cat((corners, corners + torch.rand(batch, boxes, 2, device=device) + 0.1), -1)
    predicted = targets + 0.05 * torch.rand(batch, boxes, 4, device=device)
    lengths = torch.randint(boxes // 2, boxes + 1, (batch, 1), device=device)
    valid = torch.arange(boxes, device=device) < lengths
    return predicted.to(dtype).requires_grad_(), targets.to(dtype), valid


def mean_loss(boxes: Tensor, targets: Tensor, valid: Tensor, backend: str) -> Tensor:
    return loss(boxes, targets, valid, backend=backend).sum(dtype=torch.float32) / valid.sum()


def mean_loss_with_cast(boxes: Tensor, targets: Tensor, valid: Tensor, backend: str) -> Tensor:
    """As losses are often called in half precision: the boxes are cast outside, in passes of their own."""
    return mean_loss(boxes.float(), targets.float(), valid, backend)


def in_one_pass(boxes: Tensor, targets: Tensor, valid: Tensor, backend: str) -> Tensor:
    """The mean loss, with the boxes' gradient set: the model's backward would start by `boxes.backward(gradient)`."""
    weight = (1 / valid.sum()).to(boxes.dtype)
    losses, boxes.grad = loss_and_gradient(boxes.detach(), targets, valid, weight, backend=backend)
    return losses.sum(dtype=torch.float32) * weight


def ways(device: torch.device, dtype: torch.dtype) -> dict[str, tuple]:
    """Name of each row of the table: (function, backend); only those that this machine can run."""
    able = [*loss.backends_on(device.type)[0], "compile"]
    found = {"eager": (mean_loss, "reference")}
    if dtype != torch.float32:
        found["eager, cast to float32"] = (mean_loss_with_cast, "reference")
    found["torch.compile"] = (torch.compile(mean_loss), "reference")
    if "triton" in able:
        found["Triton"] = (mean_loss, "triton")
        found["Triton inside torch.compile"] = (torch.compile(mean_loss), "triton")
        found["Triton, cast to float32"] = (mean_loss_with_cast, "triton")
    if "cuda" in able:
        found["CUDA"] = (mean_loss, "cuda")
    for backend in ("reference", "triton", "cuda"):
        if backend in able:
            found[f"in one pass, {backend}"] = (in_one_pass, backend)
    return found


def microseconds(call, device: torch.device) -> float:
    if device.type == "cuda":
        from triton.testing import do_bench  # by events, with the L2 cache emptied before each call

        return 1e3 * do_bench(call, return_mode="median")
    return 1e6 * Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=0.05).median


def measure(batch: int, boxes: int, device: torch.device, dtype: torch.dtype) -> list[dict]:
    torch.compiler.reset()
    torch.manual_seed(0)
    inputs = padded_boxes(batch, boxes, device, dtype)
    predicted = inputs[0]

    def exact() -> Tensor:
        wide = [t.detach().double().requires_grad_(t is predicted) if t.is_floating_point() else t for t in inputs]
        mean_loss(*wide, "reference").backward()
        return wide[0].grad

    rows, reference = [], exact()
    for name, (function, backend) in ways(device, dtype).items():

        def both(function=function, backend=backend) -> Tensor:
            predicted.grad = None
            value = function(*inputs, backend)
            if function is not in_one_pass:
                value.backward()
            return value

        both()
        error = (predicted.grad.double() - reference).norm() / reference.norm()
        row = {"way": name, "dtype": str(dtype).removeprefix("torch."), "pairs": batch * boxes, "error": error.item()}
        if function is not in_one_pass:
            with torch.no_grad():
                row["forward_us"] = microseconds(lambda: function(*inputs, backend), device)  # noqa: B023
        rows.append({**row, "both_us": microseconds(both, device)})
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
        report = fuseopt.check(op, device=options.device)
        if not report.ok:
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
