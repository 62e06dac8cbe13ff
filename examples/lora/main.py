"""The end of a LoRA layer, act(base + scale * delta + bias), in one kernel: by an expression, in Triton and in CUDA."""

import argparse
import dataclasses
import importlib.util
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

import fuseopt


# 1. One op, whose reference is plain PyTorch. base and delta are [..., width], bias is [width].
@fuseopt.op("lora::epilogue")
def epilogue(base: Tensor, delta: Tensor, bias: Tensor, scale: float, activation: str) -> Tensor:
    y = base + scale * delta + bias
    return y if activation == "none" else getattr(F, activation)(y)


@epilogue.samples
def _(device, dtype):
    for activation in ("gelu", "none", "relu", "silu"):  # `bench` times the first
        base, delta, bias = (torch.randn(shape, device=device, dtype=dtype) for shape in ((16, 64), (16, 64), (64,)))
        yield base, delta, bias, 0.5, activation


@epilogue.flops
def _(base, *others):
    return {"none": 3, "relu": 4, "silu": 10, "gelu": 25}[others[-1]] * base.numel()  # about: erf takes 20


# 2. The same by an expression, for one activation: a Triton kernel forward and one backward, without kernel text.
by_expression = fuseopt.elementwise("lora::by_expression", "gelu(base + scale * delta + bias)", scalars=("scale",))
by_expression.samples(lambda device, dtype: iter([next(epilogue.sample_arguments(device, dtype))[:4]]))


# 3. In Triton: one kernel for both directions. The activation is a constexpr, so each has a kernel of its own.
@triton.jit
def epilogue_kernel(
    base_ptr, delta_ptr, bias_ptr, output_ptr, grad_ptr, grad_delta_ptr, grad_bias_ptr, rows, width, scale,
    ACTIVATION: tl.constexpr, BACKWARD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    sums = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        place = row.to(tl.int64)[:, None] * width + column[None, :]
        base = tl.load(base_ptr + place, mask=mask, other=0.0).to(tl.float32)
        delta = tl.load(delta_ptr + place, mask=mask, other=0.0).to(tl.float32)
        x = base + scale * delta + bias[None, :]
        if ACTIVATION == "relu":
            gate = tl.where(x <= 0, 0.0, 1.0)
            slope = gate
        elif ACTIVATION == "gelu":
            z = x * 0.7071067811865476
            bell = tl.exp(-z * z)
            if output_ptr.dtype.element_ty == tl.float32:
                gate = 0.5 + 0.5 * tl.erf(z)
            else:  # Abramowitz and Stegun, 7.1.26, with an error of 1e-7: 15 instructions fewer
                t = 1 / (1 + 0.3275911 * tl.abs(z))
                tail = t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))
                tail = 0.5 * bell * t * (0.254829592 + t * (-0.284496736 + tail))
                gate = tl.where(x < 0, tail, 1 - tail)
            slope = gate + 0.3989422804014327 * x * bell
        elif ACTIVATION == "silu":
            gate = tl.sigmoid(x)
            slope = gate * (1 + x * (1 - gate))
        else:
            gate = 1.0
            slope = 1.0
        if BACKWARD:
            grad = slope * tl.load(grad_ptr + place, mask=mask, other=0.0).to(tl.float32)
            tl.store(output_ptr + place, grad, mask=mask)  # the gradient of base
            tl.store(grad_delta_ptr + place, grad * scale, mask=mask)
            sums += tl.sum(grad, axis=0)
        else:
            tl.store(output_ptr + place, x * gate, mask=mask)
    if BACKWARD:  # each program's share, to be summed without atomics
        tl.store(grad_bias_ptr + tl.program_id(0) * width + column, sums, mask=column < width)


def takes(base, delta, bias, scale, activation):
    is_fit = base.dim() > 0 and base.shape == delta.shape and bias.shape == base.shape[-1:]
    is_plain = all(t.dtype == base.dtype != torch.float64 and t.is_contiguous() for t in (base, delta, bias))
    return (is_fit and is_plain) or "takes contiguous base, delta [..., width], bias [width] of one dtype, not float64"


def launch(base, delta, bias, scale, activation, grad=None):
    """The output; with `grad`, the gradients of base, delta and bias. A tile has about 1,024 elements."""
    rows, width = base.numel() // max(base.shape[-1], 1), base.shape[-1]
    columns = min(triton.next_power_of_2(max(width, 1)), 1024)
    programs = min(triton.cdiv(rows, 1024 // columns), 2**31 - 1 if grad is None else 1056)  # 8 on each of 132 SMs
    output, grad_delta, shares = torch.empty_like(base), None, None
    if grad is not None:
        grad_delta, shares = torch.empty_like(base), bias.new_empty((programs, width), dtype=torch.float32)
    if base.numel():
        epilogue_kernel[programs, triton.cdiv(width, columns)](
            base, delta, bias, output, grad, grad_delta, shares, rows, width, scale,
            ACTIVATION=activation, BACKWARD=grad is not None, ROWS=1024 // columns, COLUMNS=columns,
        )  # fmt: skip
    return output if grad is None else (output, grad_delta, shares.sum(0))


epilogue.kernel("triton", takes)(launch)
for backend in ("triton", "cuda"):  # epilogue.cu has the forward alone
    epilogue.backward(backend)(lambda inputs, output, grad: launch(*inputs, grad.contiguous()))


# 4. In CUDA, with launch code.
def whole_packs(base, delta, bias, scale, activation):
    starts = [t.storage_offset() * t.element_size() % 16 for t in (base, delta, bias)]
    fits = base.shape[-1] % 8 == 0 and not any(starts) and base.nbytes < 2**36
    return fits or "takes a multiple of 8 columns, from multiples of 16 bytes on, up to 64 GiB"


epilogue.native(cuda=Path(__file__).with_name("epilogue.cu")).supports(takes, "cuda").supports(whole_packs, "cuda")


# 5. The contract first, then the times: bandwidth against batch size, as a share of a copy's.
def main(arguments: list[str] | None = None) -> None:
    on_gpu = torch.cuda.is_available()
    shapes = [f"{4**n}x1024" for n in range(5, 10)] if on_gpu else ["64x128", "256x128"]
    dtypes = ["bfloat16", "float32"] if on_gpu else ["float32"]
    parser, default = argparse.ArgumentParser(description=__doc__), "default: %(default)s"
    parser.add_argument("--shapes", nargs="+", default=shapes, help=f"rows x width; {default}")
    parser.add_argument("--dtypes", nargs="+", default=dtypes, help=default)
    parser.add_argument("--out", type=Path, default="build/examples/lora", help=f"folder of results; {default}")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for report in map(fuseopt.check, (epilogue, by_expression)):
        assert report.ok, report
        print(f"{report.name} keeps its contract: {len(report.rows)} checks")
    timed = [op.bench(options.shapes, options.dtypes) for op in (epilogue, by_expression)]
    results = dataclasses.replace(timed[0], benchmark="lora", rows=timed[0].rows + timed[1].rows)
    print(results.to_markdown())
    results.save(options.out / "lora.json")
    if importlib.util.find_spec("matplotlib") is not None:
        results.plot(options.out / "lora.png", "bandwidth")
        results.plot(options.out / "roofline.png", "roofline")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
