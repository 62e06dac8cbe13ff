"""Softmax over rows of 256 to 262,144 columns: naive PyTorch, torch.softmax, torch.compile, Triton and CUDA."""

import argparse
import importlib.util
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

import fuseopt

WHOLE_ROW = 16384  # columns that a Triton program holds in registers; it reads wider rows twice


# 1. The op. Its reference reads and writes each row several times. Its gradient is an op too, with kernels of its own.
@fuseopt.op("rows::softmax")
def softmax(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


@fuseopt.op("rows::softmax_backward")
def softmax_backward(output: Tensor, grad: Tensor) -> Tensor:
    return output * (grad - (output * grad).sum(-1, keepdim=True))


@softmax.samples
def _(device, dtype):
    for shape in ((16, 256), (2, WHOLE_ROW + 8)):
        yield (torch.randn(shape, device=device, dtype=dtype),)


softmax.backward(lambda inputs, output, grad: softmax_backward(output, grad))
softmax_backward.samples(lambda *of: ((x.softmax(-1), torch.randn_like(x)) for (x,) in softmax.sample_arguments(*of)))


# 2. Triton: a tile of whole rows, or one row in two passes.
@triton.jit
def load(pointer, row, column, rows, columns, other=0.0):
    mask = (row < rows) & (column < columns)
    return tl.load(pointer + row.to(tl.int64) * columns + column, mask=mask, other=other).to(tl.float32)


@triton.jit
def store(pointer, row, column, rows, columns, values):
    mask = (row < rows) & (column < columns)
    tl.store(pointer + row.to(tl.int64) * columns + column, values, mask=mask)


@triton.jit
def forward_kernel(x_ptr, output_ptr, rows, columns, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    if WHOLE:
        x = load(x_ptr, row, column, rows, columns, float("-inf"))
        e = tl.exp(x - tl.max(x, axis=1)[:, None])
        store(output_ptr, row, column, rows, columns, e / tl.sum(e, axis=1)[:, None])
    else:  # each lane has a maximum and a sum of its own, merged after the first pass
        top = tl.full((ROWS, COLUMNS), float("-inf"), dtype=tl.float32)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, columns, COLUMNS):
            x = load(x_ptr, row, start + column, rows, columns, float("-inf"))
            higher = tl.maximum(top, x)
            total = tl.where(higher == float("-inf"), 0.0, total * tl.exp(top - higher) + tl.exp(x - higher))
            top = higher
        highest = tl.max(top, axis=1)[:, None]
        total = tl.sum(total * tl.exp(top - highest), axis=1)[:, None]
        for start in range(0, columns, COLUMNS):
            x = load(x_ptr, row, start + column, rows, columns)
            store(output_ptr, row, start + column, rows, columns, tl.exp(x - highest) / total)


@triton.jit
def backward_kernel(y_ptr, g_ptr, x_ptr, rows, columns, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    if WHOLE:
        y, grad = load(y_ptr, row, column, rows, columns), load(g_ptr, row, column, rows, columns)
        store(x_ptr, row, column, rows, columns, y * (grad - tl.sum(y * grad, axis=1)[:, None]))
    else:
        sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, columns, COLUMNS):
            y = load(y_ptr, row, start + column, rows, columns)
            sums += y * load(g_ptr, row, start + column, rows, columns)
        mean = tl.sum(sums, axis=1)[:, None]
        for start in range(0, columns, COLUMNS):
            y, grad = load(y_ptr, row, start + column, rows, columns), load(g_ptr, row, start + column, rows, columns)
            store(x_ptr, row, start + column, rows, columns, y * (grad - mean))


def contiguous(*tensors):
    alike = {(t.shape, t.dtype, t.is_contiguous(), t.dim() > 0, t.dtype != torch.float64) for t in tensors}
    return (len(alike) == 1 and all(next(iter(alike))[2:])) or "takes contiguous tensors of one kind, not float64"


def launch(kernel, *tensors):
    """Run a Triton kernel on tensors of one shape, whose last is the result, and return that."""
    result = tensors[-1]
    if result.numel():
        columns, is_whole = result.shape[-1], result.shape[-1] <= WHOLE_ROW
        rows, block = result.numel() // columns, triton.next_power_of_2(columns) if is_whole else 4096
        tile = max(2048 // block, 1)
        sizes = {"WHOLE": is_whole, "ROWS": tile, "COLUMNS": block, "num_warps": min(max(tile * block // 512, 4), 16)}
        kernel[(triton.cdiv(rows, tile),)](*tensors, rows, columns, **sizes)
    return result


softmax.kernel("triton", contiguous)(lambda x: launch(forward_kernel, x, torch.empty_like(x)))
softmax_backward.kernel("triton", contiguous)(lambda y, grad: launch(backward_kernel, y, grad, torch.empty_like(grad)))


# 3. CUDA: rows.cuh has the kernel, and says who holds a row.
def in_packs(*tensors):
    columns, size = tensors[0].shape[-1], tensors[0].element_size()
    if columns % 8 or columns > 262144 or any(t.storage_offset() * size % 16 for t in tensors):
        return "takes rows of a multiple of 8 columns, at most 262,144, from multiples of 16 bytes on"
    has_clusters = torch.cuda.get_device_capability()[0] >= 9
    return has_clusters or columns * size <= 32768 or "rows of over 32 KiB need a GPU with clusters"


for op in (softmax, softmax_backward):
    op.native(cuda=Path(__file__).parent / f"{op.__name__}.cu").supports(contiguous, "cuda").supports(in_packs, "cuda")


# 4. The contract first, then the times: each way as a share of a copy of as many bytes.
def main(arguments: list[str] | None = None) -> None:
    on_gpu = torch.cuda.is_available()
    shapes = [f"{2 ** (26 - n)}x{2**n}" for n in range(8, 19, 2)] if on_gpu else ["64x256", "16x1024"]
    dtypes = ["bfloat16", "float32"] if on_gpu else ["float32"]
    parser, default = argparse.ArgumentParser(description=__doc__), "default: %(default)s"
    parser.add_argument("--shapes", nargs="+", default=shapes, help=f"rows x columns; {default}")
    parser.add_argument("--dtypes", nargs="+", default=dtypes, help=default)
    parser.add_argument("--out", type=Path, default="build/examples/softmax", help=f"folder of results; {default}")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for report in map(fuseopt.check, (softmax, softmax_backward)):
        assert report.ok, report
        print(f"{report.name} keeps its contract: {len(report.rows)} checks")
    results = softmax.bench(options.shapes, options.dtypes, torch_op=lambda x: torch.softmax(x, -1))
    print(results.to_markdown())
    results.save(options.out / "softmax.json")
    if importlib.util.find_spec("matplotlib") is not None:
        results.plot(options.out / "softmax.png", "bandwidth")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
