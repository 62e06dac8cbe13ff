"""layer_norm_of_sum_bwd against float64 and against autograd, on every backend."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fuseopt.errors import BackendError
from fuseopt.ops import layer_norm_of_sum_bwd
from fuseopt.ops.layer_norm_of_sum_bwd import (
    MOST_ADDENDS,
    MOST_COLUMNS,
    layer_norm_of_sum_bwd_reference,
    random_arguments,
)
from tests.ops.cases import Case, RawCalls, cases, error, examples, require_backend
from tests.ops.variations import poisoned_allocations

every_case = pytest.mark.parametrize("case", cases("layer_norm_of_sum_bwd"))
on_a_gpu = pytest.mark.parametrize(
    "case", [case for case in cases("layer_norm_of_sum_bwd") if case.values[0].device.type == "cuda"]
)
HALVES = (torch.float16, torch.bfloat16)


def double(arguments):
    return tree_map_only(Tensor, Tensor.double, arguments)


def check(case: Case, arguments, far: float = 0.0) -> None:
    """Each result is as far from float64's as its rounding, and float32 at a distance of `far` from zero, take it."""
    require_backend(case)
    with poisoned_allocations(), RawCalls() as raw:
        results = case(*arguments)
    assert len(raw.calls) == (case.backend != "reference")
    exact = layer_norm_of_sum_bwd_reference(*double(arguments))
    for name, result, expected in zip(results._fields, results, exact, strict=True):
        assert result.shape == expected.shape and result.is_contiguous(), name
        # What `grad_columns` sums up has been rounded.
        dtype = arguments[0].dtype if name == "grad_columns" else result.dtype
        bound = 32 * (1 + far) * torch.finfo(torch.float32).eps + (torch.finfo(dtype).eps if dtype in HALVES else 0.0)
        assert error([result], [expected]) <= bound, name
    assert torch.equal(results.rounded, results.grad.to(results.rounded.dtype))


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize(
    ("addends", "shape"),
    [
        (3, (300, 768)),
        (0, (2, 3, 8)),
        (MOST_ADDENDS, (1000, 40)),
        (2, (77, 1600)),
        (1, (5, MOST_COLUMNS)),
        (1, (1, 136)),
        (4, (0, 64)),
    ],
    ids=str,
)
def test_gradients_of_sizes_of_models_against_float64(case: Case, dtype, addends, shape):
    torch.manual_seed(0)
    check(case, random_arguments(case.device, dtype, addends, *shape))


@on_a_gpu
@settings(max_examples=examples(30), deadline=None)
@given(
    rows=st.integers(0, 3000),
    columns=st.integers(1, MOST_COLUMNS // 8),
    addends=st.integers(0, MOST_ADDENDS),
    dtype=st.sampled_from((torch.float32, *HALVES)),
    far=st.sampled_from((0.0, 1e3)),
)
def test_gradients_of_random_sizes_against_float64(case: Case, rows, columns, addends, dtype, far):
    """Also where the rows are far from zero, as streams are."""
    torch.manual_seed(rows)
    grad_output, grad_sum, base, added, weight, bias, mean, rstd = random_arguments(
        case.device, dtype, addends, min(rows, 2**19 // columns), 8 * columns
    )
    check(case, (grad_output, grad_sum, base + far, added, weight, bias, mean + far, rstd), far)


@every_case
def test_is_what_autograd_computes(case: Case):
    """Of a bias added to a stream, and a norm of that."""
    require_backend(case)
    torch.manual_seed(0)
    dtype = torch.float32 if case.backend == "cuda" else torch.float64
    grad_output, grad_sum, base, added, weight, bias, *_ = random_arguments(case.device, dtype, 2, 33, 72)
    of_sum = torch.zeros(72, device=case.device, dtype=dtype).requires_grad_()
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    x = base + added[0] + added[1] + of_sum
    output, mean, rstd = torch.native_layer_norm(x, (72,), weight, bias, 1e-5)
    grads = torch.autograd.grad((x, output), (x, weight, bias, of_sum), (grad_sum, grad_output))
    with torch.no_grad():
        results = case(grad_output, grad_sum, base, added, weight, bias, mean.squeeze(-1), rstd.squeeze(-1))
    assert error([results.output], [output]) <= 1e-6
    assert error([results.grad, results.grad_weight, results.grad_bias, results.grad_columns], grads) <= 1e-5


@on_a_gpu
def test_repeats_to_the_bit_and_reads_what_is_not_aligned(case: Case):
    require_backend(case)
    arguments = random_arguments(case.device, torch.bfloat16, 3, 5000, 768)
    first = case(*arguments)

    def moved(tensor: Tensor) -> Tensor:
        return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)

    for others in (arguments, tree_map_only(Tensor, moved, arguments)):
        assert all(map(torch.equal, first, case(*others)))


@on_a_gpu
@pytest.mark.parametrize(("dtype", "columns"), [(torch.bfloat16, 12), (torch.float32, 2), (torch.float16, 2056)])
def test_rows_that_the_kernel_does_not_take(case: Case, dtype, columns):
    require_backend(case)
    arguments = random_arguments(case.device, dtype, 1, 4, columns)
    with RawCalls() as raw:
        layer_norm_of_sum_bwd(*arguments)
    assert raw.calls == []
    if case.backend == "cuda":
        with pytest.raises(RuntimeError, match="rows must be whole 16 bytes"):
            case(*arguments)


def test_refuses_what_does_not_fit():
    arguments = list(random_arguments(torch.device("cpu"), torch.bfloat16, 2, 4, 16))

    def with_argument(place: int, value: object) -> list[object]:
        return [*arguments[:place], value, *arguments[place + 1 :]]

    with pytest.raises(TypeError, match=r"grad_sum must be torch.float32, not torch.bfloat16"):
        layer_norm_of_sum_bwd(*with_argument(1, arguments[0]))
    with pytest.raises(TypeError, match=r"addends\[0\] must be torch.bfloat16"):
        layer_norm_of_sum_bwd(*with_argument(3, [arguments[2]]))
    with pytest.raises(ValueError, match=r"mean must have shape \(4,\), not \(16,\)"):
        layer_norm_of_sum_bwd(*with_argument(6, arguments[4]))
    with pytest.raises(ValueError, match="7 addends, of 6 at most"):
        layer_norm_of_sum_bwd(*with_argument(3, [arguments[0]] * 7))
    with pytest.raises(TypeError, match=r"floating point matrix, not torch\.int64"):
        layer_norm_of_sum_bwd(*with_argument(0, torch.zeros(4, 16, dtype=torch.int64)))
    with pytest.raises(BackendError, match="takes no part in autograd"):
        layer_norm_of_sum_bwd(*with_argument(4, arguments[4].requires_grad_()), backend="cuda")


def test_a_norm_of_what_was_added():
    """The reference itself, against F.layer_norm."""
    grad_output, grad_sum, base, added, weight, bias, mean, rstd = random_arguments(
        torch.device("cpu"), torch.float64, 3, 7, 24
    )
    x = base + sum(added)
    results = layer_norm_of_sum_bwd_reference(grad_output, grad_sum, base, added, weight, bias, mean, rstd)
    torch.testing.assert_close(results.output, F.layer_norm(x, (24,), weight, bias, 1e-5))
