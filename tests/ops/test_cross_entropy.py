"""cross_entropy and linear_cross_entropy beyond the contract: F.cross_entropy's own answers, and what is refused."""

import pytest
import torch
import torch.nn.functional as F

from fuseopt import ops
from fuseopt.ops import registry
from tests.ops.cases import Case, RawCalls, cases

every_case = pytest.mark.parametrize("case", cases("cross_entropy", "linear_cross_entropy"))


def call(case: Case, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **kwargs) -> torch.Tensor:
    """The loss of the rows of `x` through the layer `weight`, by either op."""
    if case.op.name == "cross_entropy":
        return case(F.linear(x, weight), target, **kwargs)
    return case(x, weight, None, target, **kwargs)


def inputs(case: Case, rows: int = 12, features: int = 8, classes: int = 61, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    x = torch.randn(rows, features, device=case.device, dtype=dtype, requires_grad=True)
    weight = torch.randn(classes, features, device=case.device, dtype=dtype, requires_grad=True)
    return x, weight, torch.randint(classes, (rows,), device=case.device)


@every_case
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", ["nowhere", "somewhere", "everywhere"])
def test_losses_and_gradients_are_torch_s(case: Case, reduction: str, label_smoothing: float, ignored: str) -> None:
    x, weight, target = inputs(case)
    target[{"nowhere": slice(0, 0), "somewhere": slice(0, 5), "everywhere": slice(None)}[ignored]] = 7
    options = {"ignore_index": 7, "label_smoothing": label_smoothing, "reduction": reduction}
    expected = F.cross_entropy(F.linear(x, weight), target, **options)
    loss = call(case, x, weight, target, **options)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    assert loss.isnan().any() == (ignored == "everywhere" and reduction == "mean")
    grads = torch.autograd.grad(loss.sum(), (x, weight))
    for grad, wanted in zip(grads, torch.autograd.grad(expected.sum(), (x, weight)), strict=True):
        assert grad.isfinite().all()
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-6)


@every_case
def test_z_loss_adds_the_squared_logsumexp(case: Case) -> None:
    x, weight, target = inputs(case)
    target[3] = -100
    logits = F.linear(x, weight)
    penalty = logits.logsumexp(-1).square()[target != -100].mean()
    loss = call(case, x, weight, target, z_loss=0.3)
    torch.testing.assert_close(loss, F.cross_entropy(logits, target) + 0.3 * penalty)


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_gives_a_float32_loss_and_gradients_of_the_inputs_dtype(case: Case, dtype: torch.dtype) -> None:
    x, weight, target = inputs(case, dtype=dtype)
    loss = call(case, x, weight, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(x, weight).float(), target))
    loss.backward()
    assert x.grad.dtype == weight.grad.dtype == dtype


@every_case
def test_a_large_loss_scale_does_not_overflow_half_precision(case: Case) -> None:
    """As GradScaler's: the scale itself is out of float16's range, the gradients times it are not."""
    x, weight, target = inputs(case, rows=200, dtype=torch.float16)
    (131072.0 * call(case, x, weight, target)).backward()
    exact = F.cross_entropy(F.linear(x.double(), weight.double()), target)
    expected = torch.autograd.grad(131072.0 * exact, (x, weight))
    for tensor, wanted in zip((x, weight), expected, strict=True):
        assert tensor.grad.isfinite().all()
        torch.testing.assert_close(tensor.grad, wanted, rtol=2e-2, atol=2e-2 * wanted.abs().max().item())


@every_case
@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient(case: Case, frozen: int) -> None:
    x, weight, target = inputs(case)
    (x, weight)[frozen].requires_grad_(False)
    call(case, x, weight, target).backward()
    assert (x.grad is None, weight.grad is None) == (frozen == 0, frozen == 1)


@every_case
def test_a_gradient_asked_for_twice_is_the_same_twice(case: Case) -> None:
    x, weight, target = inputs(case)
    loss = call(case, x, weight, target)
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (x, weight))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("case", cases("linear_cross_entropy"))
def test_no_gradient_is_computed_where_none_is_wanted(case: Case) -> None:
    x, weight, target = inputs(case)
    with torch.no_grad(), RawCalls() as raw:
        call(case, x, weight, target)
    for _, args in raw.calls:
        assert args[-3:] == (False, False, False)
    assert bool(raw.calls) == (case.backend != "reference")


@pytest.mark.parametrize("case", cases("linear_cross_entropy"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_as_linear_does_and_keeps_the_loss_in_float32(case: Case, dtype: torch.dtype) -> None:
    x, weight, target = inputs(case)
    with torch.autocast(case.device.type, dtype):
        loss = call(case, x, weight, target)
        expected = F.cross_entropy(F.linear(x, weight).float(), target)
        inside = list(torch.autograd.grad(loss, (x, weight)))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
    for grad, wanted in zip(inside, torch.autograd.grad(expected, (x, weight)), strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, wanted, rtol=3e-2, atol=1e-3)


@pytest.mark.parametrize("case", cases("linear_cross_entropy"))
def test_product_dtype_does_what_autocast_does_without_it(case: Case) -> None:
    x, weight, target = inputs(case)
    with torch.autocast(case.device.type, torch.bfloat16):
        expected = call(case, x, weight, target)
    loss = call(case, x, weight, target, product_dtype=torch.bfloat16)
    assert torch.equal(loss, expected)
    assert not torch.equal(loss, call(case, x, weight, target))


def test_targets_out_of_range_are_refused_on_a_cpu() -> None:
    for bad in (61, -1):
        target = torch.tensor([0, bad])
        with pytest.raises(IndexError, match="out of bounds"):
            ops.cross_entropy(torch.zeros(2, 61), target, backend="reference")
        with pytest.raises(IndexError, match="out of bounds"):
            ops.linear_cross_entropy(torch.zeros(2, 4), torch.zeros(61, 4), None, target, backend="reference")


def test_arguments_that_do_not_fit_are_refused() -> None:
    logits, target = torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64)
    x, weight = torch.zeros(3, 4), torch.zeros(5, 4)
    with pytest.raises(TypeError, match="int64"):
        ops.cross_entropy(logits, torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"target must have shape \(3,\), not \(4,\)"):
        ops.cross_entropy(logits, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="label_smoothing"):
        ops.cross_entropy(logits, target, label_smoothing=1.5)
    with pytest.raises(ValueError, match="reduction"):
        ops.cross_entropy(logits, target, reduction="avg")
    with pytest.raises(ValueError, match="flatten it"):
        ops.linear_cross_entropy(x[None], weight, None, target)
    with pytest.raises(ValueError, match="weight must have shape"):
        ops.linear_cross_entropy(x, weight[:, :3], None, target)
    with pytest.raises(ValueError, match="bias must have shape"):
        ops.linear_cross_entropy(x, weight, torch.zeros(4), target)
    with pytest.raises(TypeError, match="one dtype"):
        ops.linear_cross_entropy(x.bfloat16(), weight, None, target)


def test_triton_is_asked_before_the_reference() -> None:
    for name in ("cross_entropy", "linear_cross_entropy"):
        assert [backend.name for backend in registry.get(name).backends] == ["triton", "reference"]
