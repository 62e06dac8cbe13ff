"""Linear layers with weights in 8 or 4 bits beside float32, bfloat16 and torchao: errors, times and a roofline."""

import argparse
import copy
import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from fuseopt import ops
from fuseopt.bench.harness.records import Record, Results
from fuseopt.bench.harness.roofline import peaks

KINDS = {
    "int8": {"bits": 8},
    "int4, groups of 128": {"bits": 4},
    "int4, groups of 32": {"bits": 4, "group": 32},
    "int4, zero points": {"bits": 4, "symmetric": False},
}
HELD = 2**27  # bytes of copies of a weight, more than caches hold; consecutive calls read different copies


# 1. A layer in 8 or 4 bits. Its weight is no Parameter: values and scales are not trained.
class LowBitLinear(nn.Module):
    def __init__(self, linear: nn.Linear, **kind) -> None:
        super().__init__()
        self.weight, self.bias = quantized(linear.weight, **kind), linear.bias

    def forward(self, input: Tensor) -> Tensor:
        return ops.low_bit_linear(input, self.weight, self.bias)


# On a GPU the kernels read another order, and multiply with inputs in 16 bits.
def quantized(weight: Tensor, **kind) -> ops.LowBitWeight | ops.PackedWeight:
    found = ops.quantize(weight, **kind)
    return ops.pack_for_cuda(found, weight.dtype) if weight.is_cuda else found


# 2. The check. Only the weight is rounded: products and sums are those of the dequantised weight.
def check(device: torch.device) -> None:
    dtype, bound = (torch.bfloat16, 2e-2) if device.type == "cuda" else (torch.float32, 1e-5)
    linear, input = nn.Linear(512, 96, device=device, dtype=dtype), torch.randn(3, 512, device=device, dtype=dtype)
    for name, kind in KINDS.items():
        layer = LowBitLinear(linear, **kind)
        dequantized = ops.dequantize(ops.unpacked(layer.weight), torch.float64)
        wanted = F.linear(input.double(), dequantized, linear.bias.double())
        torch.testing.assert_close(layer(input).double(), wanted, rtol=bound, atol=bound)
        off = (dequantized - linear.weight).pow(2).mean().sqrt() / linear.weight.std()
        print(f"{name}: as float64 with the dequantised weight, which is off by {off:.2%} of the weight's deviation")


# 3. The weights to compare, and the product with each.
def weights_of(weight: Tensor) -> dict[str, object]:
    """Weights that stand for `weight` [outputs, inputs], or why torchao has none."""
    own = weight.bfloat16() if weight.is_cuda else weight
    found = {"float32": weight, "bfloat16": weight.bfloat16()} | {n: quantized(own, **of) for n, of in KINDS.items()}
    for bits in (8, 4):
        try:
            found[f"torchao int{bits}"] = torchao_weight(own, bits)
        except Exception as error:  # the other weights still get rows
            found[f"torchao int{bits}"] = f"failed: {type(error).__name__}: {error}".splitlines()[0][:70]
    return found


def torchao_weight(weight: Tensor, bits: int) -> Tensor:
    library = importlib.import_module("torchao.quantization")
    linear = nn.Linear(*reversed(weight.shape), bias=False, device=weight.device)
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    options = {"int4_packing_format": "tile_packed_to_4d"} if weight.is_cuda and bits == 4 else {}
    library.quantize_(linear, getattr(library, f"Int{bits}WeightOnlyConfig")(**options))
    return linear.weight


def multiply(input: Tensor, weight: object) -> Tensor:
    if isinstance(weight, Tensor):
        return F.linear(input.to(weight.dtype), weight)
    return ops.low_bit_linear(input.bfloat16() if input.is_cuda else input, weight)


def size_of(weight: object) -> int:
    """Bytes of the tensors that a weight consists of."""
    if hasattr(weight, "__tensor_flatten__"):
        return sum(getattr(weight, name).nbytes for name in weight.__tensor_flatten__()[0])
    return weight.nbytes


# 4. Times. Each call reads a copy of the weight that is no longer in the caches.
def milliseconds(call: Callable[[], object]) -> tuple[float, ...]:
    """Quartiles of the time."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    times = torch.tensor(timer.blocked_autorange(min_run_time=0.05).times) * 1e3
    return tuple(times.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist())


@torch.no_grad()
def measure(shape: str, rows: list[int], device: torch.device, bandwidth: float) -> list[Record]:
    """A row for each weight and number of rows. `bandwidth` is that of a copy, GB/s."""
    outputs, inputs = map(int, shape.split("x"))
    weight = torch.randn(outputs, inputs, device=device) / inputs**0.5
    table, of_float32 = [], {}  # and the median of float32 by number of rows
    for name, own in weights_of(weight).items():
        if isinstance(own, str):
            table.append(Record(shape, name, note=own))
            continue
        held = itertools.cycle([own, *(copy.deepcopy(own) for _ in range(HELD // size_of(own)))])
        for count in rows:
            input = torch.randn(count, inputs, device=device)
            exact = F.linear(input.double(), weight.double())
            error = ((multiply(input, own).double() - exact).norm() / exact.norm()).item()
            time = milliseconds(lambda: multiply(input, next(held)))  # noqa: B023 - it runs now
            base = of_float32.setdefault(count, time[1])
            speed_up = tuple(base / each for each in reversed(time))
            moved = size_of(own) + input.nbytes + exact.numel() * input.element_size()
            of_copy = moved / time[1] / 1e6 / bandwidth
            numbers = {"bytes": moved, "flops": 2 * count * weight.numel(), "difference": f"{error:.1e}"}
            table.append(Record(f"{shape}, rows: {count}", name, time, speed_up, of_copy=of_copy, **numbers))
    return sorted(table, key=lambda row: row.flops or 0)


def main(arguments: list[str] | None = None) -> Results:
    parser, default = argparse.ArgumentParser(description=__doc__), "default: %(default)s"
    device, shapes = "cuda" if torch.cuda.is_available() else "cpu", ["2304x768", "768x3072", "32000x768"]
    parser.add_argument("--device", default=device, type=torch.device, help=default)
    parser.add_argument("--shapes", nargs="+", default=shapes, help=f"outputs x inputs; {default}")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16], help=default)
    parser.add_argument("--out", type=Path, default="build/examples/low_bit_linear", help=f"result folder; {default}")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    check(options.device)
    table = peaks(options.device, [torch.bfloat16])  # the roofs: a large copy, and matmuls in bfloat16 and float32
    bandwidth = table[0].gigabytes_per_second
    for shape in options.shapes:
        table += measure(shape, options.rows, options.device, bandwidth)
    results = Results.measured_here("low_bit_linear", table, "us")
    print(results.to_markdown())
    results.save(options.out / "results.json")
    if importlib.util.find_spec("matplotlib"):
        results.plot(options.out / "roofline.png", "roofline")
    print(f"written to {options.out}")
    return results


if __name__ == "__main__":
    main()
