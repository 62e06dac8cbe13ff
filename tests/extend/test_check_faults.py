"""`fuseopt.check` names each of these faults of a kernel, a gradient or a fake."""

import re

import pytest
import torch
from torch import Tensor

import fuseopt
from tests.extend.failures import failures as of_check


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.relu(a * b + c)


def with_kernel(kernel) -> fuseopt.Op:
    op = fuseopt.op("mine::mul_add_relu")(fused)
    op.kernel("cpu")(kernel)

    @op.samples
    def _(device, dtype):
        yield tuple(torch.randn(4, 24, device=device, dtype=dtype) for _ in range(3))

    return op


def with_backward(backward) -> fuseopt.Op:
    op = with_kernel(fused)

    @op.backward
    def _(inputs, output, grad_output):
        a, b, c = inputs
        grad = torch.where(output > 0, grad_output, 0)
        return backward(a, b, c, grad)

    return op


def failures(op: fuseopt.Op, dtype: torch.dtype = torch.float32, **options) -> dict[str, str]:
    torch.manual_seed(0)
    return of_check(op, dtypes=(dtype,), **options)


def test_a_backward_wrong_for_broadcast_inputs_only():
    found = failures(with_backward(lambda a, b, c, g: (g * b, g * a, g if c.shape == g.shape else g[: len(c)])))
    assert found.keys() == {"gradient, fp32"} and "gradient of c (broadcast)" in found["gradient, fp32"]
    found = failures(with_backward(lambda a, b, c, g: (g * b, g * a, g if c.dim() == g.dim() else 2 * g.sum(0))))
    assert found.keys() == {"gradient, fp32"} and "gradient of c (broadcast)" in found["gradient, fp32"]


def test_a_backward_wrong_where_one_gradient_is_needed():
    op = with_kernel(fused)

    @op.backward
    def _(inputs, output, grad_output, needed):
        a, b, _ = inputs
        grad = torch.where(output > 0, grad_output, 0)
        return grad * b if needed[0] else None, grad * a if all(needed) else grad, grad

    found = failures(op)
    assert found.keys() == {"gradient, fp32"} and "tensor 1 (if no other is needed)" in found["gradient, fp32"]


def test_a_kernel_wrong_for_one_column():
    def kernel(a, b, c):
        return torch.zeros_like(fused(a, b, c)) if a.shape[-1:] == (1,) else fused(a, b, c)

    found = failures(with_kernel(kernel))
    assert "off by" in found["odd shapes, fp32"] and "(4, 1)" in found["odd shapes, fp32"]


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_what_is_wrong_in_a_half_type_only(dtype):
    factor = 1 + 8 * torch.finfo(dtype).eps

    def kernel(a, b, c):
        return fused(a, b, c) * (factor if a.dtype == dtype else 1)

    assert not failures(with_kernel(kernel))
    fuseopt.unregister("mine::mul_add_relu")
    short = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    assert "off by" in failures(with_kernel(kernel), dtype)[f"as sampled, {short}"]
    fuseopt.unregister("mine::mul_add_relu")
    op = with_backward(lambda a, b, c, g: (g * b * (factor if g.dtype == dtype else 1), g * a, g))
    assert "gradient of a" in failures(op, dtype)[f"gradient, {short}"]


def after(tensor: Tensor) -> Tensor:
    """Zero times what is in memory after a contiguous tensor."""
    end = tensor.storage_offset() + tensor.numel()
    room = tensor.untyped_storage().nbytes() // tensor.element_size()
    return 0 * tensor.as_strided((1,), (1,), end) if tensor.is_contiguous() and end < room else tensor.new_zeros(1)


@pytest.mark.parametrize(
    "kernel",
    [
        lambda a, b, c: fused(a, b, c) + after(a),
        lambda a, b, c: fused(*(t.as_strided(t.shape, t.stride(), 0) for t in (a, b, c))),
    ],
    ids=["past the end", "from the start of the memory"],
)
def test_a_kernel_that_reads_outside_of_a_tensor(kernel):
    found = failures(with_kernel(kernel))
    assert found["in larger memory, fp32"].endswith("is not finite where the function's is")
    assert "as sampled, fp32" not in found


def test_a_kernel_wrong_for_empty_tensors():
    found = failures(with_kernel(lambda a, b, c: fused(a, b, c) if a.numel() else a.new_empty(1, 24)))
    assert "gave float32 (1, 24)" in found["empty, fp32"]


def test_a_backward_that_fails_for_empty_tensors():
    def backward(a, b, c, g):
        if not g.numel():
            raise RuntimeError("an empty grid")
        return g * b, g * a, g

    ((check, detail),) = failures(with_backward(backward)).items()
    assert check == "gradient, fp32"
    assert re.match(r"RuntimeError: an empty grid \(test_check_faults\.py:\d+\), called with \(0, 24\)", detail)


def test_a_backward_that_takes_its_gradient_for_contiguous():
    def backward(a, b, c, g):
        return g * b, g * a, g

    op = with_backward(backward)

    @op.backward
    def _(inputs, output, grad_output):
        a, b, _ = inputs
        if grad_output.numel() and 0 in grad_output.stride():
            grad_output = grad_output + 1
        return backward(a, b, None, torch.where(output > 0, grad_output, 0))

    assert "from a gradient with strides of 0" in failures(op)["gradient, fp32"]


def test_a_fake_with_other_strides_or_wrong_for_broadcast_inputs_only():
    op = with_kernel(fused)
    op.fake(lambda a, b, c: a.new_empty(a.shape[::-1]).t() if a.dim() == 2 else torch.empty_like(a))
    assert "with strides (1, 4), the real one is float32 (4, 24) with strides (24, 1)" in failures(op)["fake"]
    op.fake(lambda a, b, c: a.new_empty(a.shape))
    assert "is float32 (1, 24)" in failures(op)["fake"] and "(broadcast)" in failures(op)["fake"]


def test_runs_that_differ():
    def noise(tensor):
        return 1 + 1e-7 * torch.randint(-1, 2, tensor.shape)

    op = with_kernel(lambda a, b, c: fused(a, b, c) * noise(a + b + c).to(a.dtype))
    assert failures(op)["same bits again"] == "the results of two runs differ; pass same_bits=False if they may"
    assert "same bits again" not in failures(op, same_bits=False)
    fuseopt.unregister("mine::mul_add_relu")
    found = failures(with_backward(lambda a, b, c, g: (g * b * noise(g), g * a, g)))
    assert found["same bits again"].startswith("the gradients of two runs differ")


def test_a_kernel_that_remembers_results():
    known: dict = {}

    def kernel(*given):
        key = tuple((t.shape, t.stride(), t.dtype, t.data_ptr()) for t in given)
        return known.setdefault(key, fused(*given)).clone()

    assert "off by" in failures(with_kernel(kernel))["new values, same memory"]


@pytest.mark.parametrize("given", [False, True])
def test_a_kernel_that_ignores_an_argument(given):
    @fuseopt.op("mine::scaled")
    def scaled(a: Tensor, b: Tensor | None = None, scale: float = 1.0) -> Tensor:
        return a * scale if b is None else a * scale + b

    @scaled.samples
    def _(device, dtype):
        a, b = torch.randn(2, 4, 24, device=device, dtype=dtype)
        yield a, b if given else None, 1.0

    scaled.kernel("cpu")(lambda a, b, scale: a * scale)
    found = failures(scaled)
    assert ("as sampled, fp32" if given else "optional arguments, fp32") in found
    scaled.kernel("cpu")(lambda a, b, scale: a * scale + b)  # takes it for granted
    assert ("optional arguments, fp32" if given else "as sampled, fp32") in failures(scaled)
    scaled.kernel("cpu")(lambda a, b, scale: a if b is None else a + b)
    assert "other numbers, fp32" in failures(scaled)
    scaled.kernel("cpu")(scaled.function)
    assert not failures(scaled)
