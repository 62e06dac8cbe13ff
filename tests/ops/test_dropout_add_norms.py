"""dropout_add_layer_norm and dropout_add_rms_norm beyond the contract: which elements are dropped, what is refused."""

import pytest
import torch
import torch.nn.functional as F

from fuseopt import ops
from fuseopt.errors import BackendError
from fuseopt.ops.philox import keep_mask, philox
from fuseopt.ops.rms_norm import rms_norm_reference
from tests.ops.cases import Case, RawCalls, cases

NAMES = ("dropout_add_layer_norm", "dropout_add_rms_norm")
every_case = pytest.mark.parametrize("case", cases(*NAMES))


def seed_of(value: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.tensor([value], device=device)


def kept(case: Case, shape: tuple[int, ...], seed: int, p: float) -> torch.Tensor:
    """Which elements come through, as the op itself shows."""
    ones = torch.ones(shape, device=case.device)
    _, sum = case(ones, torch.zeros_like(ones), seed=seed_of(seed, case.device), p=p)
    torch.testing.assert_close(sum[sum != 0], torch.full_like(sum[sum != 0], 1 / (1 - p)))
    return sum != 0


def test_philox_gives_the_published_numbers() -> None:
    """The known answer of Philox4x32-10 for key and counter zero, from Random123's kat_vectors."""
    zero = torch.zeros(1, dtype=torch.int64)
    numbers = torch.cat(philox(zero, zero, zero)).tolist()
    assert numbers == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@every_case
@pytest.mark.parametrize("shape", [(7, 3), (2, 5, 33), (300, 64)], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.99])
def test_the_seed_decides_and_nothing_else(case: Case, shape: tuple[int, ...], p: float) -> None:
    mask = kept(case, shape, 2**61 + 12345, p)
    assert torch.equal(mask.cpu(), keep_mask(seed_of(2**61 + 12345), torch.Size(shape), p))
    assert torch.equal(mask, kept(case, shape, 2**61 + 12345, p))


def test_shares_and_neighbours_are_those_of_independent_draws() -> None:
    shape = torch.Size((512, 1024))
    for p in (0.05, 0.1, 0.5):
        mask = keep_mask(seed_of(7), shape, p).double()
        deviation = (p * (1 - p) / mask.numel()) ** 0.5
        assert abs(mask.mean() - (1 - p)) < 5 * deviation + 2**-17
        for other in (mask.roll(1, 0), mask.roll(1, 1), mask.roll(8, 1), keep_mask(seed_of(8), shape, p).double()):
            correlation = ((mask - 1 + p) * (other - 1 + p)).mean() / (p * (1 - p))
            assert correlation.abs() < 5 / mask.numel() ** 0.5
        for axis in (0, 1):
            shares = mask.mean(axis)
            assert (shares - (1 - p)).abs().max() < 6 * (p * (1 - p) / shape[axis]) ** 0.5


@every_case
def test_the_backward_drops_what_the_forward_dropped(case: Case) -> None:
    torch.manual_seed(0)
    input, residual = (torch.randn(9, 40, device=case.device, requires_grad=True) for _ in range(2))
    norm, sum = case(input, residual, seed=seed_of(3, case.device), p=0.4)
    (norm.square().sum() + sum.sin().sum()).backward()
    mask = keep_mask(seed_of(3, case.device), input.shape, 0.4)
    assert torch.equal(input.grad != 0, mask)
    torch.testing.assert_close(input.grad[mask], residual.grad[mask] / 0.6)


@every_case
def test_without_dropout_it_is_an_add_and_a_norm(case: Case) -> None:
    torch.manual_seed(0)
    input, residual = (torch.randn(5, 24, device=case.device) for _ in range(2))
    weight, bias = torch.randn(2, 24, device=case.device)
    if case.op.name == "dropout_add_layer_norm":
        parameters, expected = (weight, bias), F.layer_norm(input + residual, (24,), weight, bias)
    else:
        parameters, expected = (weight,), F.rms_norm(input + residual, (24,), weight, eps=1e-6)
    norm, sum = case(input, residual, *parameters, seed=seed_of(0, case.device), p=0.0)
    torch.testing.assert_close(sum, input + residual)
    torch.testing.assert_close(norm, expected)


@pytest.mark.parametrize("case", cases("dropout_add_rms_norm"))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("cast_order", "offset"), [("input", 1.0), ("t5", 0.0), ("llama", 0.0), ("llama", 0.5)])
def test_the_norm_is_that_of_the_sum_in_every_cast_order(
    case: Case, dtype: torch.dtype, cast_order: str, offset: float
) -> None:
    torch.manual_seed(0)
    for input_dtype, weight_dtype in ((dtype, dtype), (torch.float32, dtype), (dtype, torch.float32)):
        input, residual = (torch.randn(6, 48, device=case.device).to(input_dtype) for _ in range(2))
        weight = torch.randn(48, device=case.device).to(weight_dtype)
        options = {"cast_order": cast_order, "offset": offset}
        norm, sum = case(input, residual, weight, seed=seed_of(5, case.device), p=0.2, **options)
        expected = rms_norm_reference(sum, weight, **options)
        assert norm.dtype == expected.dtype
        if norm.dtype == dtype:  # a sum of squares in another order may round a value in some hundreds the other way
            assert (norm != expected).float().mean() < 0.03
        torch.testing.assert_close(norm, expected, rtol=2 * torch.finfo(norm.dtype).eps, atol=1e-6)


@every_case
def test_no_mask_is_saved_for_the_backward(case: Case) -> None:
    if case.backend == "reference":
        return
    saved: list[torch.Tensor] = []
    input, residual = (torch.randn(6, 16, device=case.device, requires_grad=True) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        _, sum = case(input, residual, seed=seed_of(0, case.device), p=0.1)
    large = [tensor for tensor in saved if tensor.numel() == input.numel()]
    assert [tensor.data_ptr() for tensor in large] == [sum.data_ptr()]


@pytest.mark.parametrize("case", [case for case in cases(*NAMES) if case.values[0].backend == "triton"])
def test_rows_too_long_for_a_kernel_are_left_to_the_reference(case: Case) -> None:
    input = torch.randn(2, 8193, device=case.device)
    seed = seed_of(0, case.device)
    with RawCalls() as raw:
        case.op.function(input, input, seed=seed, p=0.1)
    assert raw.calls == []
    with pytest.raises(ValueError, match="at most"):
        input = torch.randn(2, 20_000, device=case.device)
        case(input, input, seed=seed, p=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_that_do_not_fit_are_refused(name: str) -> None:
    function, input, seed = getattr(ops, name), torch.zeros(3, 8), seed_of(0)
    for p in (-0.1, 1.0):
        with pytest.raises(ValueError, match="p must be at least 0 and less than 1"):
            function(input, input, seed=seed, p=p)
    with pytest.raises(ValueError, match="residual must have shape"):
        function(input, input[:2], seed=seed, p=0.1)
    with pytest.raises(ValueError, match="seed must have shape"):
        function(input, input, seed=seed[0], p=0.1)
    with pytest.raises(ValueError, match="weight must have shape"):
        function(input, input, torch.ones(7), seed=seed, p=0.1)
    with pytest.raises(BackendError, match="no backend 'cuda'"):
        function(input, input, seed=seed, p=0.1, backend="cuda")


def test_an_unknown_cast_order_is_refused() -> None:
    with pytest.raises(ValueError, match="cast_order must be"):
        ops.dropout_add_rms_norm(torch.zeros(3, 8), torch.zeros(3, 8), seed=seed_of(0), p=0.1, cast_order="gpt2")
