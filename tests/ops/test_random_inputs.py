"""Every op of the registry on its native kernels: random sizes, strides, alignments and dtypes against float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_flatten

from fuseopt.ops import registry
from fuseopt.ops.registry import SampleInput
from tests.ops.cases import (
    DTYPES,
    Case,
    functional_names,
    gradients,
    map_tensors,
    mean_error,
    native_cases,
    results,
    tensors,
    to_float64,
)
from tests.ops.variations import (
    LAYOUTS,
    columns_of,
    laid_out,
    poisoned_allocations,
    resized,
    with_columns,
    with_rows,
)

# An error may be so many times the plain reference's in the same dtype, and so many rounding steps beside that: float32
# and float64 results carry the error of sums taken in another order, which the rounding of narrower ones hides. Of a
# gradient four times as many: where torch keeps a float32 intermediate, an op keeps its rounded output (softmax).
ERROR_FACTOR = 1.5
ROUNDING_STEPS = {torch.float64: 32, torch.float32: 4, torch.float16: 0.5, torch.bfloat16: 0.5}
GRADIENT_STEPS = 4

MOST_ELEMENTS = {"cpu": 2**13, "cuda": 2**20}
# Fewer columns than this and the statistics of a row may cancel: then the error of either side is one of chance.
FEWEST_COLUMNS = 8

some_columns = st.one_of(
    st.integers(FEWEST_COLUMNS, 100),
    st.integers(100, 20_000),
    st.builds(lambda power, off: 2**power + off, st.integers(4, 14), st.integers(-1, 1)),
    st.integers(1, 2000).map(lambda groups: 8 * groups),
)


def with_random_sizes(sample: SampleInput, columns: int, others: list[int], most_elements: int) -> SampleInput:
    """`sample` with `columns` columns and its other sizes taken from `others`, cut so that no tensor has too many."""
    width = columns_of(sample)
    old = sorted({size for tensor in tensors(sample) for size in tensor.shape} - {0, 1, width})
    sizes = dict(zip(old, others, strict=False))
    largest = max(math.prod(sizes.get(size, 1) for size in tensor.shape if size != width) for tensor in tensors(sample))
    return resized(sample, {**sizes, width: max(FEWEST_COLUMNS, min(columns, most_elements // largest))})


def assert_no_worse_than_reference(case: Case, sample: SampleInput, grad_output_layout=torch.clone) -> None:
    judge = map_tensors(to_float64, sample)
    plains = results(case.op.reference(*sample.args, **sample.kwargs))
    exacts = results(case.op.reference(*judge.args, **judge.kwargs))
    with poisoned_allocations():
        outputs = results(case(*sample.args, **sample.kwargs))
    for output, plain, exact in zip(outputs, plains, exacts, strict=True):
        assert (output.shape, output.dtype) == (plain.shape, plain.dtype)
        step = ROUNDING_STEPS[output.dtype] * torch.finfo(output.dtype).eps
        assert_close_enough(output, plain, exact, "output", step)
    if not outputs[0].requires_grad:
        return
    grad_outputs = [
        grad_output_layout(torch.randn_like(output, memory_format=torch.contiguous_format)) for output in outputs
    ]
    with poisoned_allocations():
        grads = gradients(case, sample, grad_outputs)
    plain_grads = gradients(case.op.reference, sample, grad_outputs)
    exact_grads = gradients(case.op.reference, judge, [grad_output.double() for grad_output in grad_outputs])
    for index, (grad, plain_grad, exact_grad) in enumerate(zip(grads, plain_grads, exact_grads, strict=True)):
        assert grad is not None and plain_grad is not None and exact_grad is not None
        slack = max(
            ROUNDING_STEPS[dtype] * torch.finfo(dtype).eps
            for dtype in (grad.dtype, *(output.dtype for output in outputs))
        )
        assert_close_enough(grad, plain_grad, exact_grad, f"gradient {index}", GRADIENT_STEPS * slack)


def assert_close_enough(actual: Tensor, plain: Tensor, exact: Tensor, name: str, slack: float) -> None:
    error, plain_error = mean_error(actual, exact), mean_error(plain, exact)
    assert error <= ERROR_FACTOR * plain_error + slack, f"{name}: {error:.3g}, the reference's {plain_error:.3g}"


@pytest.mark.parametrize("case", native_cases("cpu", "cuda"))
@settings(max_examples=40, deadline=None)
@given(
    which=st.integers(0, 99),
    dtype=st.sampled_from(DTYPES),
    columns=some_columns,
    others=st.lists(st.integers(1, 40), min_size=4, max_size=4),
    layout=st.sampled_from(LAYOUTS),
    grad_layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 2**31),
)
def test_error_is_no_larger_than_the_references(case, which, dtype, columns, others, layout, grad_layout, seed) -> None:
    samples = [sample for sample in case.samples(dtype, requires_grad=True) if all(t.numel() for t in tensors(sample))]
    torch.manual_seed(seed)
    sample = samples[which % len(samples)]
    sample = with_random_sizes(sample, columns, others, MOST_ELEMENTS[case.device.type])
    assert_no_worse_than_reference(case, laid_out(sample, layout), grad_layout)


@pytest.mark.parametrize("case", native_cases("cuda"))
@pytest.mark.parametrize("columns", [32_768, 131_080, 262_144, 300_001, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_rows_are_no_worse_than_the_reference(case: Case, columns: int, dtype: torch.dtype) -> None:
    sample = with_columns(case.samples(dtype, requires_grad=True)[0], columns)
    assert_no_worse_than_reference(case, sample)


@pytest.mark.parametrize("case", native_cases("cuda"))
@pytest.mark.parametrize("rows", [8, 1024])
@pytest.mark.parametrize("columns", [128, 768, 4096, 8200, 20_001, 50_257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_rows_and_many(case: Case, rows: int, columns: int, dtype: torch.dtype) -> None:
    """A kernel may take the few another way than the many."""
    assert_no_worse_than_reference(case, with_rows(case.samples(dtype, requires_grad=True)[0], rows, columns))


@pytest.mark.parametrize("name", functional_names())
def test_resized_samples_keep_the_options(name: str) -> None:
    """Else the tests above would call an op in ways that no user can."""
    for sample in registry.get(name).sample_inputs(torch.device("cpu"), torch.float32, False):
        values, structure = tree_flatten((sample.args, dict(sample.kwargs)))
        found = resized(sample, {})
        new_values, new_structure = tree_flatten((found.args, dict(found.kwargs)))
        assert new_structure == structure
        for value, new_value in zip(values, new_values, strict=True):
            if isinstance(value, Tensor):
                assert (new_value.shape, new_value.dtype) == (value.shape, value.dtype)
            else:
                assert new_value == value


@pytest.mark.gpu
def test_what_an_op_allocates_is_poisoned() -> None:
    """Else the tests above would not see an element that is never written."""
    for parameter in native_cases("cuda"):
        case = parameter.values[0]
        sample = case.samples(torch.float32)[0]
        case(*sample.args, **sample.kwargs)
        with (
            poisoned_allocations(),
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile,
        ):
            case(*sample.args, **sample.kwargs)
        assert "aten::fill_" in {event.key for event in profile.key_averages()}, case.op.name


@pytest.mark.parametrize("case", native_cases("cuda"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_from_run_to_run(case: Case, dtype: torch.dtype) -> None:
    for sample in case.samples(dtype, requires_grad=True)[:3]:
        others = sorted({size for tensor in tensors(sample) for size in tensor.shape} - {columns_of(sample)})
        sizes = dict(zip(others, (61, 37, 11), strict=False))
        large = resized(sample, {**sizes, columns_of(sample): 1037})
        first: list[Tensor] | None = None
        for _ in range(20):
            with poisoned_allocations():
                outputs = results(case(*large.args, **large.kwargs))
                computed = [output.detach() for output in outputs]
                if outputs[0].requires_grad:
                    computed += gradients(case, large, [torch.ones_like(output) for output in outputs])
            first = first or computed
            assert all(map(torch.equal, computed, first))
