"""Parts of the contract of an op that are asked of ops from outside the package too."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fuseopt.ops.registry import SampleInput
from tests.ops.cases import (
    OF_TF32_PRODUCTS,
    Case,
    Graphs,
    RawCalls,
    answers_a_question,
    error,
    gradients,
    map_tensors,
    results,
    tensors,
    to_float64,
)


def random_gradients(output: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [torch.randn_like(tensor) for tensor in results(output)]


def total(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return torch.stack([tensor.sum() for tensor in results(output)]).sum()


def rounding(*dtypes: torch.dtype) -> float:
    """What rounding to the lowest of `dtypes` may cost; in float64 the judge is no better than the judged."""
    eps = max(torch.finfo(dtype).eps if dtype.is_floating_point else 0.0 for dtype in dtypes)
    return 32 * eps if eps == torch.finfo(torch.float64).eps else 4 * eps


def assert_accurate(case: Case, sample: SampleInput) -> None:
    """The output, and for inputs that require it the gradients, are no worse than the plain reference's own."""
    judge = map_tensors(to_float64, sample)
    outputs = results(case(*sample.args, **sample.kwargs))
    plains = results(case.op.reference(*sample.args, **sample.kwargs))
    exacts = results(case.op.reference(*judge.args, **judge.kwargs))
    for output, plain, exact in zip(outputs, plains, exacts, strict=True):
        assert (output.shape, output.dtype, output.device) == (plain.shape, plain.dtype, plain.device)
        assert error([output], [exact]) <= 2 * error([plain], [exact]) + rounding(output.dtype)
    if not any(tensor.requires_grad for tensor in tensors(sample)):
        return
    grad_outputs = random_gradients(tuple(outputs))
    grads = gradients(case, sample, grad_outputs)
    plain_grads = gradients(case.op.reference, sample, grad_outputs)
    exact_grads = gradients(case.op.reference, judge, [grad_output.double() for grad_output in grad_outputs])
    inputs = [tensor for tensor in tensors(sample) if tensor.requires_grad]
    for input, grad, plain_grad, exact_grad in zip(inputs, grads, plain_grads, exact_grads, strict=True):
        assert grad is not None and (grad.shape, grad.dtype) == (input.shape, input.dtype)
        lowest = rounding(grad.dtype, *(output.dtype for output in outputs))
        bound = 2 * error([plain_grad], [exact_grad]) + lowest * (4 if case.op.name in OF_TF32_PRODUCTS else 1)
        assert error([grad], [exact_grad]) <= bound


def of_tensors(case: Case, sample: SampleInput) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The call `sample` as a function of its positional tensors alone."""
    positions = [index for index, value in enumerate(sample.args) if isinstance(value, Tensor)]

    def function(*values: Tensor) -> Tensor:
        args = list(sample.args)
        for position, value in zip(positions, values, strict=True):
            args[position] = value
        return case(*args, **sample.kwargs)

    return function, tuple(sample.args[position] for position in positions)


def assert_derivatives(case: Case) -> None:
    """First and second ones, in float64, against differences."""
    for sample in case.differentiable_samples(torch.float64):
        if any(tensor.numel() == 0 for tensor in tensors(sample)):
            continue
        function, inputs = of_tensors(case, sample)
        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def assert_one_graph(case: Case) -> None:
    """`torch.compile` makes one graph of a call, with the raw ops that run without it, and the same outputs.

    A kernel that must be asked whether it takes tensors, which depends on their addresses, is not in a graph.
    """
    # What the reference runs is torch's to compile.
    for sample in case.samples(torch.float32)[: 1 if case.backend == "reference" else 2]:
        torch._dynamo.reset()
        graphs = Graphs()
        compiled = torch.compile(case.op.function, fullgraph=True, backend=graphs.compiled)
        torch.testing.assert_close(
            compiled(*sample.args, **sample.kwargs, backend=case.backend), case(*sample.args, **sample.kwargs)
        )
        with RawCalls() as raw:
            case(*sample.args, **sample.kwargs)
        if any(answers_a_question(op) for op, _ in raw.calls):
            with FakeTensorMode() as fake, RawCalls() as raw:
                without_addresses = map_tensors(fake.from_tensor, sample)
                case(*without_addresses.args, **without_addresses.kwargs)
        assert graphs.forward == raw.names()
