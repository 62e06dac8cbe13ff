"""cross_entropy_grad_ against float64, on every backend."""

from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuseopt.errors import BackendError
from fuseopt.ops import cross_entropy_grad_, linear_cross_entropy
from tests.axes import covering
from tests.ops.cases import Case, cases, examples, require_backend

every_case = pytest.mark.parametrize("case", cases("cross_entropy_grad_"))
on_a_gpu = pytest.mark.parametrize(
    "case", [case for case in cases("cross_entropy_grad_") if case.values[0].device.type == "cuda"]
)
IGNORED = -100
NEITHER = 10**9


def exact(logits: Tensor, target: Tensor, classes: int, smoothing: float, z_loss: float) -> tuple[Tensor, Tensor]:
    """Losses, and the gradient of their sum, in float64."""
    rows = logits[:, :classes].detach().double().requires_grad_()
    losses = F.cross_entropy(rows, target, ignore_index=IGNORED, label_smoothing=smoothing, reduction="none")
    losses = losses + (z_loss * rows.logsumexp(-1).square()).masked_fill(target == IGNORED, 0.0)
    (grad,) = torch.autograd.grad(losses.sum(), rows)
    return losses.detach(), F.pad(grad, (0, logits.shape[1] - classes))


def some_targets(rows: int, classes: int, device: torch.device) -> Tensor:
    target = torch.randint(classes, (rows,), device=device)
    target[::3] = IGNORED
    target[1:2], target[2:3] = 0, classes - 1
    return target


def call(case: Case, logits: Tensor, target: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """Losses and what is in the place of the logits; nothing may count on what was there before."""
    require_backend(case)
    written = logits.clone()
    dtype = torch.promote_types(logits.dtype, torch.float32)
    losses = torch.full(target.shape, torch.nan, dtype=dtype, device=logits.device)
    in_range = torch.zeros(target.shape, dtype=torch.bool, device=logits.device)
    assert case(written, target, losses, in_range, **options) is None
    classes = options.get("classes", logits.shape[1])
    assert torch.equal(in_range, (target == IGNORED) | ((target >= 0) & (target < classes)))
    return losses, written


def check(case: Case, logits: Tensor, classes: int, smoothing: float = 0.0, z_loss: float = 0.0) -> None:
    rows = len(logits)
    target = some_targets(rows, classes, logits.device)
    true_losses, true_grad = exact(logits, target, classes, smoothing, z_loss)
    weights = torch.randn(rows, device=logits.device, dtype=true_losses.dtype)
    options = {"classes": classes, "label_smoothing": smoothing, "z_loss": z_loss}
    # A gradient is a sum of these, and may be far smaller than they are.
    addends = logits[:, :classes].double().softmax(-1) * (1 + 2 * z_loss * 50) + smoothing / classes
    addends = F.pad(addends, (0, logits.shape[1] - classes))
    addends.scatter_add_(1, target.clamp(min=0)[:, None], torch.ones_like(addends[:, :1]))
    rtol = 1e-11
    if logits.dtype != torch.float64:
        # An exponential is as exact as its exponent: what is below the maximum, but in torch the logit itself.
        reach = logits.abs().amax() if case.backend == "reference" else (logits.amax(1) - logits.amin(1)).float().amax()
        rtol = 4e-6 + 2e-7 * reach.item()
        if case.backend == "reference" and smoothing:
            # Torch adds up the target of a row, in a thread one number after the other to the one that is near 1.
            threads = 1024 if logits.is_cuda else 1
            rtol += torch.finfo(torch.float32).eps / 2 * classes / threads
    for grad_output in (None, weights.to(torch.promote_types(logits.dtype, torch.float32))):
        losses, written = call(case, logits, target, grad_output=grad_output, **options)
        torch.testing.assert_close(losses.double(), true_losses, rtol=rtol, atol=2 * rtol)
        assert (losses[::3] == 0).all() and (written[::3] == 0).all() and (written[:, classes:] == 0).all()
        factor = 1.0 if grad_output is None else weights[:, None]
        expected, types = true_grad * factor, torch.finfo(logits.dtype)
        # Exponentials below float32's normal numbers may be zeros before they are multiplied.
        smallest = max(types.smallest_normal, torch.finfo(torch.float32).smallest_normal) * (1 + abs(factor))
        bound = rtol * addends * abs(factor) + types.eps / 2 * expected.abs() + smallest
        assert ((written.double() - expected).abs() <= 1.01 * bound).all()
    losses, written = call(case, logits, target, writes_gradient=False, **options)
    torch.testing.assert_close(losses.double(), true_losses, rtol=rtol, atol=2 * rtol)
    assert torch.equal(written, logits)


@every_case
@covering(
    options=[(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.3, 1e-2)],
    width=[64, 1024],
    dtype=[torch.float32, torch.float16, torch.bfloat16, torch.float64],
)
def test_losses_and_gradients(case: Case, dtype: torch.dtype, width: int, options: tuple[float, float]) -> None:
    if not case.samples(dtype):
        pytest.skip(f"{case.backend} does not take {dtype}")
    torch.manual_seed(0)
    # Each number of padding columns takes the interpreter a second.
    for padding in (0, 31) if case.device.type == "cpu" else (0, 1, 31, 63):
        logits = (2 * torch.randn(7, width, device=case.device)).to(dtype)
        check(case, logits, width - padding, *options)


@on_a_gpu
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("width", [4096, 8256, 32128, 50304, 56000, 128256, 262144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_registers_shared_memory_or_neither_can_hold(
    case: Case, dtype: torch.dtype, width: int, smoothing: float
) -> None:
    torch.manual_seed(0)
    logits = (2 * torch.randn(5, width, device=case.device)).to(dtype)
    for classes in (width - 47, width):
        check(case, logits, classes, smoothing)


@settings(max_examples=examples(40), deadline=None)
@given(
    rows=st.integers(1, 9),
    vectors=st.integers(1, 700),
    past=st.integers(0, 7),
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
    scale=st.sampled_from((0.0, 1.0, 30.0)),
    offset=st.sampled_from((0.0, 1000.0, -1000.0)),
    smoothing=st.sampled_from((0.0, 0.2)),
)
@every_case
def test_losses_and_gradients_of_random_sizes_against_float64(
    case: Case, rows, vectors, past, dtype, scale, offset, smoothing
) -> None:
    width = vectors * 16 // dtype.itemsize
    if case.backend == "triton" and case.device.type == "cpu":
        rows, width = min(rows, 3), min(width, 512)
    logits = (scale * torch.randn(rows, width, device=case.device) + offset).to(dtype)
    check(case, logits, max(width - past, 1), smoothing)


@every_case
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("width", [64, 9024])
def test_values_that_are_not_finite(case: Case, width: int, smoothing: float) -> None:
    logits = torch.zeros(6, width, device=case.device)
    logits[0] = -torch.inf
    logits[1, 7] = torch.inf
    logits[2, 7] = torch.nan
    logits[3, 7] = -torch.inf
    logits[4, 8] = -torch.inf
    target = torch.tensor([7, 7, 8, 7, 7, 7], device=case.device)
    losses, written = call(case, logits, target, label_smoothing=smoothing)
    expected, grad = exact(logits, target, width, smoothing, 0.0)
    torch.testing.assert_close(losses, expected.float(), equal_nan=True)
    assert losses[:3].isnan().all() and losses[3] == torch.inf
    torch.testing.assert_close(written[4:], grad[4:].float(), equal_nan=True)


@every_case
def test_a_target_that_is_no_class_is_told_and_written_nowhere(case: Case) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 128, device=case.device)
    target = torch.tensor([3, NEITHER, -1, 100], device=case.device)
    whole, written = call(case, logits, target, classes=100)
    apart, alone = call(case, logits[:1], target[:1], classes=100)
    assert torch.equal(whole[:1], apart) and torch.equal(written[:1], alone)
    assert (written[:, 100:] == 0).all()


@on_a_gpu
def test_repeats_to_the_bit(case: Case) -> None:
    torch.manual_seed(0)
    logits = torch.randn(200, 50304, device=case.device, dtype=torch.bfloat16)
    target = some_targets(200, 50257, case.device)
    first = call(case, logits, target, classes=50257, label_smoothing=0.1)
    for _ in range(5):
        assert all(map(torch.equal, call(case, logits, target, classes=50257, label_smoothing=0.1), first))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "classes", "calls"),
    [(torch.bfloat16, 4090, 1), (torch.bfloat16, 61, 0), (torch.float32, 2050, 1), (torch.float64, 4090, 0)],
    ids=str,
)
def test_the_loss_of_a_head_runs_on_the_cuda_kernel(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, classes: int, calls: int
) -> None:
    from fuseopt.ops.triton import linear_cross_entropy as kernels

    counted = Mock(wraps=kernels.CROSS_ENTROPY_GRAD["cuda"])
    monkeypatch.setattr(kernels, "CROSS_ENTROPY_GRAD", {"cuda": counted})
    x, weight = (torch.randn(rows, 64, device="cuda", dtype=dtype, requires_grad=True) for rows in (40, classes))
    linear_cross_entropy(x, weight, None, torch.randint(classes, (40,), device="cuda"), backend="triton").backward()
    assert counted.call_count == calls


def test_what_does_not_fit_is_refused() -> None:
    logits, target = torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)
    losses, in_range = torch.zeros(3), torch.zeros(3, dtype=torch.bool)
    for bad in (torch.zeros(3, 7), torch.zeros(2, 3, 8), torch.zeros(8, 3).t()):
        with pytest.raises(ValueError, match="contiguous matrix"):
            cross_entropy_grad_(bad, target, losses, in_range)
    for classes in (0, 9):
        with pytest.raises(ValueError, match="classes must be 1 to 8"):
            cross_entropy_grad_(logits, target, losses, in_range, classes=classes)
    with pytest.raises(ValueError, match="classes must be 65 to 128"):
        cross_entropy_grad_(torch.zeros(3, 128), target, losses, in_range, classes=64)
    with pytest.raises(ValueError, match="losses must have shape"):
        cross_entropy_grad_(logits, target, losses[:2], in_range)
    with pytest.raises(TypeError, match=r"losses must be torch\.float32"):
        cross_entropy_grad_(logits, target, losses.double(), in_range)
    with pytest.raises(TypeError, match=r"in_range must be torch\.bool"):
        cross_entropy_grad_(logits, target, losses, in_range.int())
    with pytest.raises(ValueError, match="grad_output must be contiguous"):
        cross_entropy_grad_(logits, target, losses, in_range, grad_output=torch.zeros(6)[::2])
    with pytest.raises(TypeError, match="int64"):
        cross_entropy_grad_(logits, target.int(), losses, in_range)
    with pytest.raises(BackendError, match="autograd"):
        cross_entropy_grad_(logits.requires_grad_(), target, losses, in_range, backend="triton")
