"""Expressions on a GPU: csrc/python launches Triton's kernels for every kind of call, with the right values."""

import threading

import pytest
import torch
import triton
from torch import Tensor

import fuseopt

pytestmark = pytest.mark.gpu
EXPRESSION = "where(a > b, scale * a, b) * c + shift"


@pytest.fixture
def op(asked) -> fuseopt.Op:
    return fuseopt.elementwise("mine::launched", EXPRESSION, scalars=("scale", "shift"))


def drawn(*shape, dtype=torch.float32, device="cuda"):
    return torch.randn(shape, device=device, dtype=dtype)


def check(output, op, inputs, scale, shift):
    exact = op.function(*(tensor.double() for tensor in inputs), scale, shift)
    assert output.is_contiguous() and output.shape == exact.shape
    torch.testing.assert_close(output, exact.to(output.dtype), equal_nan=True)


def kinds(dtype):
    """Inputs of calls, each of another kind."""
    memory = drawn(4000, dtype=dtype)
    other = torch.float32 if dtype != torch.float32 else torch.bfloat16
    yield drawn(64, dtype=dtype), drawn(64, dtype=dtype), drawn(64, dtype=dtype)
    yield drawn(65, dtype=dtype), drawn(65, dtype=dtype), drawn(1, dtype=dtype)
    yield drawn(8, 768, dtype=dtype), drawn(768, dtype=dtype), drawn(8, 1, dtype=dtype)
    yield drawn(7, 33, dtype=dtype), drawn(33, dtype=other), drawn(dtype=dtype)
    yield drawn(33, 7, dtype=dtype).t(), drawn(7, 33, dtype=dtype), drawn(7, 66, dtype=dtype)[:, ::2]
    yield memory[1:100], memory[7:106], memory[200:299]
    yield memory[8:107], memory[16:115], memory[201:300]
    yield drawn(dtype=dtype), drawn(dtype=dtype), drawn(dtype=dtype)
    yield drawn(3, 4, 5, dtype=dtype), drawn(5, dtype=dtype), drawn(dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_kind_of_call_is_prepared_once(op, dtype, asked):
    met = list(kinds(dtype))
    for scale, shift in ((2.0, 0.5), (3, -1), (float("inf"), 1e-3)):
        for inputs in met:
            check(op(*inputs, scale=scale, shift=shift), op, inputs, scale, shift)
    assert asked.count("prepare_forward") == asked.count("_takes") == len(met) and "forward" not in asked


def test_calls_that_are_not_prepared_run_by_triton(op, asked):
    copied = drawn(2, 3, 4).permute(2, 1, 0), drawn(4, 3, 2), drawn(4, 1, 2)
    empty = drawn(0, 5), drawn(0, 5), drawn(5)
    for _ in range(2):
        for inputs in (copied, empty):
            check(op(*inputs, scale=2.0, shift=1.0), op, inputs, 2.0, 1.0)
    assert asked.count("prepare_forward") == 2 and asked.count("forward") == 4


def test_a_number_on_the_cpu_is_for_pytorch(op):
    a, b, c = drawn(8), drawn(8), torch.tensor(2.0)
    assert "one device" in op.choose(a, b, c, 2.0, 1.0).refused["triton"][0]
    op(a, b, c.cuda(), scale=2.0, shift=1.0)
    check(op(a, b, c, scale=2.0, shift=1.0, backend="reference"), op, (a, b, c), 2.0, 1.0)


def test_the_current_stream_is_that_of_the_launch(op):
    a, b, c = drawn(64), drawn(64), drawn(64)
    op(a, b, c, scale=1.0, shift=0.0)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        a.fill_(3.0)
        b.fill_(4.0)
        output = op(a, b, c, scale=1.0, shift=0.0)
    stream.synchronize()
    torch.testing.assert_close(output, 4 * c)


def test_a_captured_launch_reads_new_values(op, asked):
    a, b, c = drawn(8, 33), drawn(33), drawn(8, 33)
    op(a, b, c, scale=2.0, shift=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = op(a, b, c, scale=2.0, shift=0.5)
    for tensor in (a, b, c):
        tensor.normal_()
    graph.replay()
    check(output, op, (a, b, c), 2.0, 0.5)
    assert asked == ["_takes", "prepare_forward"]


def test_a_thread_that_has_launched_nothing(op, asked):
    inputs = drawn(64), drawn(64), drawn(64)
    op(*inputs, scale=2.0, shift=0.5)
    found = []
    thread = threading.Thread(target=lambda: found.append(op(*inputs, scale=3.0, shift=0.5)))
    thread.start()
    thread.join()
    check(found[0], op, inputs, 3.0, 0.5)
    assert asked == ["_takes", "prepare_forward"]


@pytest.mark.multigpu
def test_a_device_that_is_not_the_current_one(op, asked):
    for device in ("cuda:1", "cuda:0", "cuda:1", "cuda:0"):
        inputs = [drawn(64, device=device) for _ in range(3)]
        output = op(*inputs, scale=2.0, shift=0.5)
        assert output.device == torch.device(device)
        check(output, op, inputs, 2.0, 0.5)
    assert asked.count("prepare_forward") == 2 and "forward" not in asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduce_grad", [True, False])
def test_gradients(dtype, reduce_grad, asked):
    op = fuseopt.elementwise("mine::launched", EXPRESSION, scalars=("scale", "shift"), reduce_grad=reduce_grad)
    shapes = ((70, 33), (33,), (70, 33)), ((64,), (64,), (64,)), ((7, 5), (5,), ())
    for scale, shift in ((2.0, 0.5), (3, -1)):
        for of_call in shapes:
            inputs = [drawn(*shape, dtype=dtype).requires_grad_() for shape in of_call]
            wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
            output = op(*inputs, scale=scale, shift=shift)
            exact = op.function(*wide, scale, shift)
            check(output.detach(), op, [tensor.detach() for tensor in inputs], scale, shift)
            for cotangent in (torch.randn_like(output), drawn(1, dtype=dtype).expand_as(output)):
                found = torch.autograd.grad(output, inputs, cotangent, retain_graph=True)
                wanted = torch.autograd.grad(exact, wide, cotangent.double(), retain_graph=True)
                for one, other, tensor in zip(found, wanted, inputs, strict=True):
                    assert one.dtype == tensor.dtype and one.shape == tensor.shape
                    rtol, atol = (2e-2, 2e-1) if dtype == torch.bfloat16 else (1e-5, 1e-4)
                    torch.testing.assert_close(one, other.to(dtype), rtol=rtol, atol=atol)
    assert asked.count("prepare_forward") == 3 and asked.count("prepare_backward") == 6
    assert "forward" not in asked and "backward" not in asked


def test_triton_compiles_and_launches_nothing_for_a_known_kind(op, monkeypatch):
    inputs = [drawn(*shape).requires_grad_() for shape in ((70, 33), (33,), (1, 33))]

    def step():
        output = op(*inputs, scale=2.0, shift=0.5)
        return [output, *torch.autograd.grad(output, inputs, torch.ones_like(output))]

    first = step()
    for owner, name in ((triton.runtime.jit.JITFunction, "run"), (triton.compiler.CompiledKernel, "__getitem__")):
        monkeypatch.setattr(owner, name, lambda *given, **named: pytest.fail("by Triton's launcher"))
    assert all(map(torch.equal, first, step()))


def test_a_hook_on_launches_sees_them(op, asked):
    inputs = drawn(64), drawn(64), drawn(64)
    op(*inputs, scale=2.0, shift=0.5)
    seen = []
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(seen.append)
    try:
        check(op(*inputs, scale=2.0, shift=0.5), op, inputs, 2.0, 0.5)
    finally:
        hooks.remove(seen.append)
    assert seen and asked.count("forward") == 1


def test_under_torch_compile_and_again_after_registering(asked):
    inputs = drawn(8, 33), drawn(33), drawn(8, 33)
    for expression in ("a * b + scale * c", "a - b + scale * c"):
        op = fuseopt.elementwise("mine::again", expression, scalars=("scale",))
        compiled = torch.compile(lambda *given, op=op: op(*given, scale=2.0, backend="triton") * 2, fullgraph=True)
        for _ in range(2):
            exact = op.function(*(tensor.double() for tensor in inputs), 2.0)
            torch.testing.assert_close(op(*inputs, scale=2.0), exact.float())
            torch.testing.assert_close(compiled(*inputs), 2 * exact.float())
        fuseopt.unregister("mine::again")
    assert asked.count("prepare_forward") == 2


def test_a_bare_kernel_in_autocast_and_under_torch_compile_is_launched_too(monkeypatch):
    source = """
    __global__ void added(const float* a, const float* b, float* output, int n) {
      const int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) output[i] = a[i] + b[i];
    }
    """

    @fuseopt.op("mine::added")
    def op(a: Tensor, b: Tensor) -> Tensor:
        return a + b

    op.native(cuda=source, kernel="added", grid=lambda a, b: -(-a.numel() // 256))
    monkeypatch.setattr(torch.cuda._utils._CudaKernel, "__call__", lambda *given, **named: pytest.fail("by torch"))
    a, b = drawn(33, 7), drawn(7, 33).t()
    assert torch.equal(op(a, b), a + b)
    with torch.autocast("cuda"):
        assert torch.equal(op(a, b), a + b)
    compiled = torch.compile(lambda a, b: op(a, b, backend="cuda") * 2, fullgraph=True)
    assert torch.equal(compiled(a, b), 2 * (a + b))
