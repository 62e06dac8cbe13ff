"""Where and when kernels run on a GPU: graphs, streams, devices that are not current, more than 2**31 elements."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from fuseopt.ops import gated_activation
from fuseopt.ops.registry import SampleInput
from tests.ops.cases import OF_THEIR_OWN_SIZES, Case, cases, error, gradients, map_tensors, results, tensors
from tests.ops.variations import resized

CUDA_CASES = [case for case in cases() if case.values[0].device.type == "cuda"]
KERNELS = [case for case in CUDA_CASES if case.values[0].backend != "reference"]
ROW_KERNELS = [case for case in KERNELS if case.values[0].op.name not in OF_THEIR_OWN_SIZES]
on_cuda = pytest.mark.parametrize("case", CUDA_CASES)
on_kernels = pytest.mark.parametrize("case", KERNELS)
on_row_kernels = pytest.mark.parametrize("case", ROW_KERNELS)


def outputs_and_gradients(case: Case, sample: SampleInput) -> list[Tensor]:
    """The outputs, and for inputs that require it their gradients."""
    outputs = results(case(*sample.args, **sample.kwargs))
    if not outputs[0].requires_grad:
        return outputs
    grad_outputs = [torch.ones_like(output) for output in outputs]
    return [*(output.detach() for output in outputs), *gradients(case, sample, grad_outputs)]


def other_values(tensor: Tensor) -> Tensor:
    return tensor.detach().flip(-1) if tensor.dim() > 0 else tensor.detach()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # of an op on tensors without elements
@on_cuda
def test_a_graph_replayed_on_changed_inputs(case: Case) -> None:
    changed = False
    for sample in case.samples(case.dtype, requires_grad=True):
        before = outputs_and_gradients(case, sample)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = outputs_and_gradients(case, sample)
        graph.replay()
        torch.testing.assert_close(captured, before, equal_nan=True)
        with torch.no_grad():
            for tensor in tensors(sample):
                tensor.copy_(other_values(tensor))
        graph.replay()
        after = outputs_and_gradients(case, sample)
        torch.testing.assert_close(captured, after, equal_nan=True)
        changed |= not torch.equal(after[0], before[0])
    assert changed


@on_kernels
def test_runs_on_the_current_stream(case: Case) -> None:
    """The inputs are written late, on a stream that no other stream waits for."""
    for sample in case.samples(case.dtype, requires_grad=True):
        expected = outputs_and_gradients(case, sample)
        late = map_tensors(lambda t: torch.zeros_like(t).requires_grad_(t.requires_grad), sample)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            with torch.no_grad():
                for tensor, value in zip(tensors(late), tensors(sample), strict=True):
                    tensor.copy_(value)
            output = outputs_and_gradients(case, late)
        stream.synchronize()
        torch.testing.assert_close(output, expected, equal_nan=True)


def _next_part(parts: Iterator[Tensor], tensor: Tensor) -> Tensor:
    return next(parts).view(tensor.shape) if tensor.is_floating_point() else tensor


@on_row_kernels
def test_waits_for_a_kernel_that_lets_it_start_early(case: Case) -> None:
    """The inputs are written by a long kernel of fuseopt's just ahead, into memory that held other values."""
    for sample in case.samples(case.dtype):
        expected = results(case(*sample.args, **sample.kwargs))
        floats = [tensor.contiguous() for tensor in tensors(sample) if tensor.is_floating_point()]
        values = torch.cat([torch.zeros(2**26, device=case.device), *(tensor.flatten() for tensor in floats)])
        gate = torch.ones_like(values)
        torch.full_like(values, float("nan"))  # where the product will lie
        torch.cuda.synchronize()
        product = gated_activation(gate, values, "relu", backend="cuda")
        *_, written = product.split([2**26, sum(tensor.numel() for tensor in floats)])
        late = map_tensors(partial(_next_part, iter(written.split([tensor.numel() for tensor in floats]))), sample)
        output = results(case(*late.args, **late.kwargs))
        torch.testing.assert_close(output, expected, equal_nan=True)


@pytest.mark.multigpu
@on_kernels
def test_inputs_on_a_device_that_is_not_current(case: Case) -> None:
    there = torch.device("cuda:1")
    for sample in case.samples(case.dtype, requires_grad=True):
        expected = outputs_and_gradients(case, sample)
        moved = map_tensors(lambda t: t.detach().to(there).requires_grad_(t.requires_grad), sample)
        output = outputs_and_gradients(case, moved)
        assert torch.cuda.current_device() == 0 and {tensor.device for tensor in output} == {there}
        assert error([tensor.cpu() for tensor in output], [tensor.cpu() for tensor in expected]) <= 1e-6


@pytest.mark.slow
@pytest.mark.usefixtures("most_of_a_gpu")
@on_row_kernels
@pytest.mark.parametrize("columns", [2049, 4096, 50_257])
def test_more_than_2_to_the_31_elements(case: Case, columns: int) -> None:
    """The last rows, and their gradients, are what the same rows give alone."""
    sample = case.samples(torch.bfloat16, requires_grad=True)[0]
    if "seed" in sample.kwargs:
        pytest.skip("what a row becomes depends on its number")
    first, *between, last = next(tensor for tensor in tensors(sample) if tensor.is_floating_point()).shape
    rows = 2**31 // columns + 5
    large = resized(sample, {**dict.fromkeys(between, 1), first: rows, last: columns})
    end = map_tensors(lambda t: (t.detach()[-3:] if t.shape[0] == rows else t).requires_grad_(t.requires_grad), large)
    outputs = results(case(*large.args, **large.kwargs))
    for output, expected in zip(outputs, results(case.op.reference(*end.args, **end.kwargs)), strict=True):
        assert output.shape[0] == rows
        assert_same_rounding(output[-3:], expected)
    if outputs[0].requires_grad:
        grad_outputs = [torch.randn_like(output) for output in outputs]
        grads = gradients(case, large, grad_outputs)
        expected_grads = gradients(case.op.reference, end, [grad_output[-3:] for grad_output in grad_outputs])
        of_rows = [(got, wanted) for got, wanted in zip(grads, expected_grads, strict=True) if got.shape[0] == rows]
        assert of_rows
        for got, wanted in of_rows:
            assert_same_rounding(got[-3:], wanted)


def assert_same_rounding(actual: Tensor, expected: Tensor) -> None:
    step = torch.finfo(expected.dtype).eps
    size = expected[expected.isfinite()].abs().mean().item()
    torch.testing.assert_close(actual, expected, rtol=2 * step, atol=step * size)
