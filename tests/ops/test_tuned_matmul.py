"""tuned_matmul: torch's own product is what it computes, whichever of the library's algorithms runs."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuseopt.errors import BackendError
from fuseopt.ops import tuned_matmul
from fuseopt.ops.tuned_matmul import ACTIVATIONS, WITH_GELU, measuring, multiply_into
from tests.ops.cases import RawCalls, error, examples
from tests.ops.variations import LAYOUTS, poisoned_allocations

HALVES = (torch.bfloat16, torch.float16)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def expected(left: Tensor, right: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    product = left.double() @ right.double()
    product = product if bias is None else product + bias.double()
    return ACTIVATIONS[activation](product) if activation else product


def assert_right(left: Tensor, right: Tensor, bias: Tensor | None = None, **kwargs) -> Tensor:
    judge = expected(left, right, bias, kwargs.get("activation"))
    with poisoned_allocations():
        output = tuned_matmul(left, right, bias, **kwargs)
    dtype = torch.float32 if kwargs.get("float_result") else left.dtype
    assert output.dtype is dtype and output.shape == judge.shape and output.is_contiguous()
    # A product of 16-bit numbers is exact in float32, and so is what TF32 or less would have lost.
    steps = torch.finfo(dtype).eps + torch.finfo(torch.float32).eps * left.shape[1] ** 0.5
    assert error([output], [judge], least=float(left.double().norm() * right.double().norm()) / 100) <= 4 * steps
    return output


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=examples(60), deadline=None)
@given(
    sizes=st.tuples(*3 * [st.one_of(st.sampled_from([8, 64, 256]), st.integers(1, 100))]),
    dtype=st.sampled_from([*HALVES, torch.float32]),
    has_bias=st.booleans(),
    activation=st.sampled_from([None, *ACTIVATIONS]),
    float_result=st.booleans(),
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=3, max_size=3),
    seed=st.integers(0, 2**31),
)
def test_any_size_and_layout(device, sizes, dtype, has_bias, activation, float_result, layouts, seed) -> None:
    generator = torch.Generator(device).manual_seed(seed)
    rows, inner, columns = sizes
    left, right, bias = (
        layout(torch.randn(shape, device=device, dtype=dtype, generator=generator))
        for layout, shape in zip(layouts, ((rows, inner), (inner, columns), (columns,)), strict=True)
    )
    has_bias = has_bias and not float_result
    assert_right(left, right, bias if has_bias else None, activation=activation, float_result=float_result)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("sizes", [(4096, 768, 2304), (2048, 3072, 768)])
def test_layers_of_models_forward_and_backward(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, inner, columns = sizes
    input, weight, grad = (
        torch.randn(shape, device="cuda", dtype=dtype) for shape in ((rows, inner), (inner, columns), (rows, columns))
    )
    assert_right(input, weight, torch.randn(columns, device="cuda", dtype=dtype))
    assert_right(grad, weight.t())
    output = assert_right(input.t(), grad, float_result=True)
    # Not rounded on the way, neither the result nor parts of the sum.
    assert error([output], [expected(input.t(), grad)]) < torch.finfo(dtype).eps / 100


@pytest.mark.gpu
@pytest.mark.parametrize("measure", [False, True])
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("sizes", [(2048, 4089, 1024), (512, 8192, 512), (2048, 1024, 4089)])
def test_the_sum_is_rounded_once_after_the_bias(sizes, activation, measure) -> None:
    """Where K is split, cuBLASLt's kernels round before they add the bias: 1.3 times this error."""
    torch.manual_seed(0)
    rows, inner, columns = sizes
    left, right = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((rows, inner), (columns, inner)))
    bias = torch.randn(columns, device="cuda", dtype=torch.bfloat16) * inner**0.5
    exact = left.double() @ right.double().t() + bias
    exact = exact if activation is None else exact.relu()
    result = tuned_matmul(left, right.t(), bias, activation=activation, measure=measure, backend="cuda")
    of_one_rounding = (exact.bfloat16() - exact).norm()
    assert 0.9 * of_one_rounding < (result - exact).norm() < 1.02 * of_one_rounding


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("sizes", [(2048, 768, 3072), (40, 24, 72)])
def test_with_gelu_the_sum_is_kept_beside_it(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, inner, columns = sizes
    left, right, bias = (
        torch.randn(shape, device="cuda", dtype=dtype) / inner**0.25
        for shape in ((rows, inner), (inner, columns), (columns,))
    )
    with poisoned_allocations():
        kept, activated = WITH_GELU["cuda"](left, right, bias, True)
    for output, activation in ((kept, None), (activated, "gelu_tanh")):
        judge = expected(left, right, bias, activation)
        assert output.dtype is dtype and output.is_contiguous()
        assert error([output], [judge]) <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 2, (torch.bfloat16, torch.float32), (torch.float32,) * 2])
@pytest.mark.parametrize("measure", [False, True])
def test_into_a_tensor_and_onto_it(device: str, dtypes: tuple[torch.dtype, torch.dtype], measure: bool) -> None:
    torch.manual_seed(0)
    dtype, result = dtypes
    # So large that there is something to choose from.
    left, right = (torch.randn(192, 192, device=device, dtype=dtype) for _ in range(2))
    before = torch.randn(192, 192, device=device, dtype=result)
    judge, allowed = expected(left.t(), right), 2 * torch.finfo(result).eps + 16 * torch.finfo(torch.float32).eps
    output = torch.full_like(before, torch.nan)
    multiply_into(output, left.t(), right, measure=measure)
    assert error([output], [judge]) <= allowed
    output = before.clone()
    multiply_into(output, left.t(), right, accumulate=True, measure=measure)
    assert error([output], [before.double() + judge]) <= allowed


@pytest.mark.parametrize("device", DEVICES)
def test_products_of_one_kind_each_have_their_own_bias(device: str) -> None:
    torch.manual_seed(0)
    for _ in range(4):
        assert_right(*(torch.randn(shape, device=device) for shape in ((24, 16), (16, 40), (40,))), activation="relu")


@pytest.mark.gpu
def test_the_algorithm_stays_once_it_is_measured() -> None:
    left, right = (torch.randn(1536, 1536, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    with RawCalls() as raw:
        first = tuned_matmul(left, right, measure=True)
    assert raw.names() == ["tuned_matmul.default"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tuned_matmul(left, right)
    graph.replay()
    for other in (captured, tuned_matmul(left, right, measure=False), tuned_matmul(left, right)):
        assert torch.equal(other, first)


@pytest.mark.gpu
def test_nothing_is_measured_during_a_capture_nor_unasked() -> None:
    left, right = (torch.randn(1528, 1528, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def launches(measure: bool) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            tuned_matmul(left, right, measure=measure)
            torch.cuda.synchronize()
        return sum(event.count for event in profile.key_averages() if event.device_type.name == "CUDA")

    judge = tuned_matmul(left, right, measure=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tuned_matmul(left, right, measure=True)
    graph.replay()
    assert torch.equal(captured, judge)
    unasked, asked, again = launches(False), launches(True), launches(True)
    assert unasked <= 3 and asked > 10 and again <= 3


@pytest.mark.gpu
def test_threads_measure_one_after_the_other() -> None:
    left, right = (torch.randn(1520, 1520, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    outputs: list[Tensor] = []

    def run() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            outputs.append(tuned_matmul(left, right, measure=True))
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 4 and all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.gpu
def test_measures_where_that_is_said_and_torch_need_not_be_deterministic() -> None:
    def first_call(size: int) -> int:
        left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            tuned_matmul(left, right)
            torch.cuda.synchronize()
        return sum(event.count for event in profile.key_averages() if event.device_type.name == "CUDA")

    assert first_call(1512) <= 3
    with measuring():
        assert first_call(1504) > 10
        torch.use_deterministic_algorithms(True)
        try:
            assert first_call(1496) <= 3
        finally:
            torch.use_deterministic_algorithms(False)
    assert first_call(1488) <= 3


def test_what_is_refused() -> None:
    left, right, bias = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5)
    for wrong, kwargs, message in (
        ((left[0], right), {}, "must be \\[rows, inner\\]"),
        ((left, right.t()), {}, "must be \\[rows, inner\\]"),
        ((left, right, bias[:4]), {}, "bias must have shape"),
        ((left, right.double()), {}, "one dtype"),
        ((left, right, bias), {"float_result": True}, "has no bias"),
        ((left, right), {"activation": "silu"}, "activation must be None, 'relu', 'gelu_tanh'"),
    ):
        with pytest.raises(ValueError, match=message):
            tuned_matmul(*wrong, **kwargs)
    with pytest.raises(BackendError, match="takes no part in autograd"):
        tuned_matmul(left.requires_grad_(), right, backend="cuda")
    assert tuned_matmul(left, right).requires_grad
