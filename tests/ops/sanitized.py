"""`python -m tests.ops.sanitized OP`: an op on its CUDA kernels, small but in awkward sizes; run by test_sanitizer.py.

Inputs are made, and results compared, on the CPU: hardly a kernel but fuseopt's own runs on the GPU.
"""

import sys

import torch
from torch import Tensor

from fuseopt.build import loader
from fuseopt.ops import registry
from fuseopt.ops.registry import SampleInput
from tests.ops.cases import (
    DTYPES,
    OF_THEIR_OWN_SIZES,
    Case,
    error,
    map_tensors,
    results,
    tensors,
    to_float64,
)
from tests.ops.variations import LAYOUTS, laid_out, poisoned_allocations, with_columns, with_rows

# A row in a warp, in a block, in several trips of a block; with and without a tail past the last 16-byte access.
COLUMNS = (8, 31, 768, 1025, 4096, 12_289, 70_001)
# More rows than a GPU has multiprocessors, and more elements than it runs threads.
MANY = (300, 1032)


def on_cuda(tensor: Tensor) -> Tensor:
    """A copy with the same strides and alignment: the memory around the tensor comes along."""
    storage = tensor.untyped_storage().cuda()
    copy = torch.empty(0, dtype=tensor.dtype, device="cuda")
    copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return copy.requires_grad_(tensor.requires_grad)


def on_the_cpu(case: Case, sample: SampleInput) -> list[Tensor]:
    """The outputs, and the gradients of one and the same gradients of them."""
    outputs = results(case(*sample.args, **sample.kwargs))
    if not outputs[0].requires_grad:
        return [output.cpu() for output in outputs]
    inputs = [tensor for tensor in tensors(sample) if tensor.requires_grad]
    # Of one sign: what cancels in the sum over many rows is rounding.
    waves = ((torch.arange(output.numel()).sin() + 0.25).view(output.shape).to(output.dtype) for output in outputs)
    grad_outputs = [on_cuda(wave) if outputs[0].is_cuda else wave for wave in waves]
    torch.autograd.backward(outputs, grad_outputs)
    return [*(output.detach().cpu() for output in outputs), *(tensor.grad.cpu() for tensor in inputs)]


def main(name: str) -> None:
    state = loader.load("cuda")
    assert state.status == "loaded", state.reason
    op, calls = registry.get(name), 0
    on_cpu, kernels = Case(op, "reference", torch.device("cpu")), Case(op, "cuda", torch.device("cuda"))
    for dtype in DTYPES:
        if dtype not in op.candidates("cuda")[0].dtypes:
            continue
        samples = on_cpu.samples(dtype, requires_grad=True)
        sizes = () if name in OF_THEIR_OWN_SIZES else COLUMNS
        wide = [with_columns(samples[index % 3], columns) for index, columns in enumerate(sizes)]
        many = [] if name in OF_THEIR_OWN_SIZES else [with_rows(samples[0], *MANY)]
        for index, sample in enumerate([*many, *samples, *wide]):
            sample = laid_out(sample, LAYOUTS[index % len(LAYOUTS)])
            with poisoned_allocations():
                actual = on_the_cpu(kernels, map_tensors(on_cuda, sample))
            if name.endswith("norm"):  # whose raw op of a call without gradient is another
                with torch.no_grad():
                    actual_forward = on_the_cpu(kernels, map_tensors(on_cuda, sample))
                assert all(map(torch.equal, actual_forward, actual)), (dtype, index)
            expected = on_the_cpu(on_cpu, map_tensors(to_float64, sample))
            eps = max(torch.finfo(tensor.dtype).eps for tensor in actual if tensor.is_floating_point())
            assert error(actual, expected) <= 16 * max(eps, torch.finfo(dtype).eps), (dtype, index)
            calls += 1
    torch.cuda.synchronize()
    print(f"{calls} calls")


if __name__ == "__main__":
    main(sys.argv[1])
