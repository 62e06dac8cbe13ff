"""Linear layers with weights in 8 or 4 bits beside float32, bfloat16 and torchao: errors, times and a roofline."""

import argparse
import importlib
import importlib.util
import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from fuseopt import ops

OUT = Path("build") / "examples" / "low_bit_linear"  # git ignores build/
KINDS = {
    "int8": {"bits": 8},
    "int4, groups of 128": {"bits": 4},
    "int4, groups of 32": {"bits": 4, "group": 32},
    "int4, zero points": {"bits": 4, "symmetric": False},
}
HELD = 2**27  # bytes of copies of a weight, more than caches hold; consecutive calls read different copies


# On a GPU the kernels read another order, and multiply with inputs in 16 bits.
def quantized(weight: Tensor, **kind) -> ops.LowBitWeight | ops.PackedWeight:
    found = ops.quantize(weight, **kind)
    return ops.pack_for_cuda(found, weight.dtype) if weight.is_cuda else found


# 1. A layer in 8 or 4 bits. Its weight is no Parameter: values and scales are not trained.
class LowBitLinear(nn.Module):
    def __init__(self, linear: nn.Linear, **kind) -> None:
        super().__init__()
        self.weight, self.bias = quantized(linear.weight, **kind), linear.bias

    def forward(self, input: Tensor) -> Tensor:
        return ops.low_bit_linear(input, self.weight, self.bias)


# 2. The check. Only the weight is rounded: products and sums are those of the dequantised weight.
def check(device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    linear, input = nn.Linear(512, 96, device=device, dtype=dtype), torch.randn(3, 512, device=device, dtype=dtype)
    bound = 1e-5 if dtype is torch.float32 else 2e-2
    for name, kind in KINDS.items():
        layer = LowBitLinear(linear, **kind)
        dequantized = ops.dequantize(ops.unpacked(layer.weight), torch.float64)
        wanted = F.linear(input.double(), dequantized, linear.bias.double())
        torch.testing.assert_close(layer(input).double(), wanted, rtol=bound, atol=bound)
        off = (dequantized - linear.weight).pow(2).mean().sqrt() / linear.weight.std()
        print(f"{name}: as float64 with the dequantised weight, which is off by {off:.2%} of the weight's deviation")


# 3. The ways to multiply, each with the weight that it reads.
def ways(weight: Tensor) -> dict[str, tuple[Callable[[Tensor, object], Tensor], object]]:
    half = weight.bfloat16()
    found = {"float32": (F.linear, weight), "bfloat16": (in_half(F.linear), half)}
    multiply, read = (in_half(ops.low_bit_linear), half) if weight.is_cuda else (ops.low_bit_linear, weight)
    found |= {name: (multiply, quantized(read, **kind)) for name, kind in KINDS.items()}
    for bits in (8, 4):
        name = f"torchao int{bits}"
        try:
            found[name] = (F.linear, torchao_weight(weight, bits))
        except Exception as error:  # the other contenders still get rows
            found[name] = (None, f"{type(error).__name__}: {error}".splitlines()[0])
    return found


def in_half(multiply: Callable) -> Callable[[Tensor, object], Tensor]:
    return lambda x, w: multiply(x.bfloat16(), w)


def torchao_weight(weight: Tensor, bits: int) -> Tensor:
    library = importlib.import_module("torchao.quantization")
    linear = nn.Linear(*reversed(weight.shape), bias=False, device=weight.device)
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    library.quantize_(linear, getattr(library, f"Int{bits}WeightOnlyConfig")())
    return linear.weight


def size_of(weight: object) -> int:
    """Bytes of the tensors that a weight consists of."""
    if hasattr(weight, "__tensor_flatten__"):
        return sum(getattr(weight, name).nbytes for name in weight.__tensor_flatten__()[0])
    return weight.nbytes


def copied(weight: object) -> object:
    """A weight of the same values in other memory."""
    if isinstance(weight, Tensor):
        return weight.clone()
    return weight._replace(**{name: t.clone() for name, t in weight._asdict().items() if isinstance(t, Tensor)})


# 4. Times. Each call reads a copy of the weight that is no longer in the caches.
def seconds(call: Callable[[], object]) -> float:
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.05).median


@torch.no_grad()
def measure(shape: tuple[int, int], rows: list[int], device: torch.device) -> list[dict]:
    weight = torch.randn(shape, device=device) / shape[1] ** 0.5
    inputs = {count: torch.randn(count, shape[1], device=device) for count in rows}
    table = []
    for way, (multiply, own) in ways(weight).items():
        if multiply is None:
            table.append({"way": way, "shape": shape, "failed": own})
            continue
        size = size_of(own)
        held = itertools.cycle([own, *(copied(own) for _ in range(HELD // size))])
        for count, input in inputs.items():
            exact = F.linear(input.double(), weight.double())
            error = ((multiply(input, own).double() - exact).norm() / exact.norm()).item()
            time = seconds(lambda: multiply(input, next(held)))  # noqa: B023 - it runs now
            moved = size + input.nbytes + exact.numel() * input.element_size()
            entry = {"way": way, "shape": shape, "rows": count, "us": time * 1e6, "error": error}
            table.append(entry | {"bytes": moved, "flops": 2 * count * weight.numel()})
    return table


def roofs(device: torch.device) -> tuple[float, float]:
    """GB/s of reading memory, and GFLOP/s of a float32 matmul."""
    large, square = torch.ones(HELD // 2, device=device), torch.randn(1024, 1024, device=device)
    return large.nbytes / seconds(large.sum) / 1e9, 2 * 1024**3 / seconds(lambda: square @ square) / 1e9


def print_table(table: list[dict], bandwidth: float) -> None:
    columns = f"{'us':>8} {'GB/s':>6} {'of memory':>9} {'over float32':>12} {'error':>8}"
    print(f"\n{'weight':>14} {'rows':>4}  {'':20} {columns}")
    plain = {(row["shape"], row["rows"]): row["us"] for row in table if row["way"] == "float32"}
    for row in sorted(table, key=lambda row: (row["shape"], row.get("rows", 0))):
        shape = "x".join(map(str, row["shape"]))
        if "failed" in row:
            print(f"{shape:>14} {'':4}  {row['way']:20} {row['failed'][:70]}")
            continue
        speed, over = row["bytes"] / row["us"] / 1e3, plain[row["shape"], row["rows"]] / row["us"]
        numbers = f"{row['us']:8.1f} {speed:6.1f} {speed / bandwidth:9.2f} {over:11.2f}x {row['error']:8.1e}"
        print(f"{shape:>14} {row['rows']:4}  {row['way']:20} {numbers}")


def save_roofline(table: list[dict], bandwidth: float, arithmetic: float, path: Path) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(8, 6), layout="tight")).subplots()
    edges, roof = [0.1, arithmetic / bandwidth, 1000.0], [0.1 * bandwidth, arithmetic, arithmetic]
    axes.plot(edges, roof, "k-", label=f"{bandwidth:.0f} GB/s, {arithmetic:.0f} GFLOP/s")
    measured = [row for row in table if "us" in row]
    for way in dict.fromkeys(row["way"] for row in measured):
        own = [row for row in measured if row["way"] == way]
        intensity = [row["flops"] / row["bytes"] for row in own]
        axes.scatter(intensity, [row["flops"] / row["us"] / 1e3 for row in own], label=way)
    axes.set(xscale="log", yscale="log", xlabel="FLOP / byte", ylabel="GFLOP/s")
    axes.legend()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__)
    default = "default: %(default)s"
    device, shapes = "cuda" if torch.cuda.is_available() else "cpu", ["2304x768", "768x3072", "32000x768"]
    parser.add_argument("--device", default=device, type=torch.device, help=default)
    parser.add_argument("--shapes", nargs="+", default=shapes, help=f"outputs x inputs; {default}")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16], help=default)
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder for results.json and roofline.png; {default}")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=options.out).close()  # raises now, not after the work, if it cannot be written
    torch.manual_seed(0)
    check(options.device)
    bandwidth, arithmetic = roofs(options.device)
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    table = [row for shape in shapes for row in measure(shape, options.rows, options.device)]
    print_table(table, bandwidth)
    found = {"read_gigabytes_per_second": bandwidth, "matmul_gigaflops_per_second": arithmetic, "rows": table}
    (options.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib"):
        save_roofline(table, bandwidth, arithmetic, options.out / "roofline.png")
    else:
        print("no plot: it needs matplotlib: pip install 'fuseopt[plot]'")
    return table


if __name__ == "__main__":
    main()
