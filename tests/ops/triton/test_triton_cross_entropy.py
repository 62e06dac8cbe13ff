import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fuseopt.ops.triton.linear_cross_entropy as linear_kernels
from fuseopt.ops.triton import (
    cross_entropy_bwd,
    cross_entropy_fwd,
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
)
from fuseopt.tuning import tuned
from tests.ops.variations import every_view_of_rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# Two classes; narrow and odd rows; rows that start at every offset from a 16-byte boundary; several blocks.
SHAPES = [(5, 2), (9, 33), (2, 3, 129), (9, 1009), (9, 33003), (3, 40000)]
OPTIONS = {"plain": (0.0, 0.0), "smoothed": (0.1, 0.0), "z-loss": (0.0, 1e-2), "both": (0.3, 1e-2)}
options = pytest.mark.parametrize(("smoothing", "z_loss"), OPTIONS.values(), ids=OPTIONS)
IGNORED = -100


def reference(logits, target, smoothing, z_loss):
    """The loss of each row, in float64."""
    rows = logits.double().flatten(0, -2)
    loss = F.cross_entropy(rows, target.flatten(), ignore_index=IGNORED, label_smoothing=smoothing, reduction="none")
    penalty = z_loss * rows.logsumexp(-1).square()
    return (loss + penalty.masked_fill(target.flatten() == IGNORED, 0.0)).view(target.shape)


def reference_gradients(grad_output, function, *inputs):
    inputs = [input.detach().double().requires_grad_() for input in inputs]
    return torch.autograd.grad(function(*inputs), inputs, grad_output.double())


def some_targets(device, shape, classes):
    target = torch.randint(classes, shape, device=device)
    target.view(-1)[::3] = IGNORED
    target.view(-1)[1], target.view(-1)[2] = 0, classes - 1
    return target


@options
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_backward(device, assert_matches, dtype, shape, smoothing, z_loss):
    if shape[-1] > 2000 and (dtype, smoothing) not in ((torch.bfloat16, 0.0), (torch.float32, 0.1)):
        return
    torch.manual_seed(0)
    input = 2 * torch.randn(shape, dtype=dtype, device=device)
    target = some_targets(device, shape[:-1], shape[-1])
    grad_output = torch.randn(shape[:-1], dtype=torch.promote_types(dtype, torch.float32), device=device)
    losses, *statistics = cross_entropy_fwd(input, target, IGNORED, smoothing, z_loss)
    assert losses.dtype == grad_output.dtype
    assert_matches(losses, reference(input, target, smoothing, z_loss), torch.float32 if dtype.itemsize < 8 else dtype)
    assert torch.equal(losses == 0, target == IGNORED)
    grad_input = cross_entropy_bwd(grad_output, input, target, *statistics, IGNORED, smoothing, z_loss)
    assert grad_input.dtype == dtype
    (expected,) = reference_gradients(grad_output, lambda x: reference(x, target, smoothing, z_loss), input)
    assert_matches(grad_input, expected)
    assert (grad_input[target == IGNORED] == 0).all()


@pytest.mark.parametrize("columns", [40, 3001])
@every_view_of_rows
@pytest.mark.parametrize("padding", [8, 21])
def test_strided_inputs_are_read_right_and_not_written_to(device, assert_matches, view, columns, padding):
    torch.manual_seed(0)
    storage = torch.randn(2, 3, columns + padding, device=device)
    before = storage.clone()
    input = view(storage, columns)
    target = some_targets(device, (*input.shape[:-1], 2), columns)[..., 0]
    losses, *statistics = cross_entropy_fwd(input, target, IGNORED, 0.1, 0.0)
    assert_matches(losses, reference(input, target, 0.1, 0.0))
    grad_output = torch.ones((), device=device).expand(target.shape)
    grad_input = cross_entropy_bwd(grad_output, input, target, *statistics, IGNORED, 0.1, 0.0)
    assert_matches(grad_input, reference_gradients(grad_output, lambda x: reference(x, target, 0.1, 0.0), input)[0])
    assert torch.equal(storage, before)


@pytest.mark.parametrize("offset", [1e4, -1e4, 3e4])
def test_large_logits_cost_no_precision(device, assert_matches, offset):
    torch.manual_seed(0)
    input = torch.randn(4, 301, device=device) + offset
    target = torch.tensor([0, 7, 300, 5], device=device)
    losses, *statistics = cross_entropy_fwd(input, target, IGNORED, 0.1, 0.0)
    torch.testing.assert_close(losses.double(), reference(input, target, 0.1, 0.0), rtol=1e-5, atol=1e-5)
    grad_input = cross_entropy_bwd(torch.ones_like(losses), input, target, *statistics, IGNORED, 0.0, 0.0)
    (expected,) = reference_gradients(torch.ones_like(losses), lambda x: reference(x, target, 0.0, 0.0), input)
    assert_matches(grad_input, expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("columns", [50, 9001])
def test_values_that_are_not_finite(device, columns, smoothing):
    input = torch.zeros(6, columns, device=device)
    input[0] = -torch.inf
    input[1, 7] = torch.inf
    input[2, 7] = torch.nan
    input[3, 7] = -torch.inf
    input[4, 8] = -torch.inf
    target = torch.tensor([7, 7, 8, 7, 7, 7], device=device)
    losses = cross_entropy_fwd(input, target, IGNORED, smoothing, 0.0)[0]
    expected = reference(input, target, smoothing, 0.0).float()
    torch.testing.assert_close(losses, expected, equal_nan=True)
    assert losses[:3].isnan().all() and losses[3] == torch.inf


def linear_reference(input, weight, bias, target, smoothing, z_loss):
    return reference(F.linear(input, weight, bias), target, smoothing, z_loss)


def linear_case(device, dtype, rows, features, classes):
    input = torch.randn(rows, features, device=device, dtype=dtype)
    weight = torch.randn(classes, features, device=device, dtype=dtype)
    bias = torch.randn(classes, device=device, dtype=dtype)
    return input, weight, bias, some_targets(device, (rows,), classes)


@options
@pytest.mark.parametrize("classes", [64, 61, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_linear_in_several_chunks(device, assert_matches, monkeypatch, set_tuned, dtype, classes, smoothing, z_loss):
    monkeypatch.setattr(linear_kernels, "CHUNK_ROWS", 4)
    set_tuned("linear_cross_entropy_chunk_bytes", 0)
    torch.manual_seed(0)
    *tensors, target = linear_case(device, dtype, 11, 24, classes)
    assert len(list(linear_kernels.chunks(11, classes * dtype.itemsize, 24, device))) == 3
    arguments = (*tensors, target, IGNORED, smoothing, z_loss, dtype, True, True, True)
    losses, *gradients = linear_cross_entropy_fwd(*arguments)
    expected = linear_reference(*(tensor.double() for tensor in tensors), target, smoothing, z_loss)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}
    torch.testing.assert_close(losses.double(), expected, **tolerance)
    for weights, found in (
        (torch.ones_like(losses), gradients),
        (torch.randn_like(losses), None),
    ):
        found = found or linear_cross_entropy_bwd(weights, *arguments)
        exact = reference_gradients(weights, lambda *t: linear_reference(*t, target, smoothing, z_loss), *tensors)
        for gradient, wanted in zip(found, exact, strict=True):
            torch.testing.assert_close(gradient.double(), wanted, **tolerance)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True), (False,) * 3])
def test_only_the_gradients_that_are_wanted(device, wanted):
    torch.manual_seed(0)
    *tensors, target = linear_case(device, torch.float32, 7, 8, 61)
    every = linear_cross_entropy_fwd(*tensors, target, IGNORED, 0.0, 0.0, torch.float32, True, True, True)
    losses, *gradients = linear_cross_entropy_fwd(*tensors, target, IGNORED, 0.0, 0.0, torch.float32, *wanted)
    assert torch.equal(losses, every[0])
    for gradient, expected, is_wanted in zip(gradients, every[1:], wanted, strict=True):
        assert torch.equal(gradient, expected) if is_wanted else gradient.numel() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_in_half_precision_are_no_worse_than_in_two_steps(device, monkeypatch, set_tuned, dtype):
    """Chunks too: what they add up to is kept in float32."""
    set_tuned("linear_cross_entropy_chunk_bytes", 0)
    monkeypatch.setattr(linear_kernels, "CHUNK_ROWS", 16)
    torch.manual_seed(0)
    input, weight, _, target = linear_case(device, dtype, 200, 32, 61)
    losses, *gradients = linear_cross_entropy_fwd(
        input, weight, None, target, IGNORED, 0.0, 0.0, dtype, True, True, False
    )
    exact = reference_gradients(
        torch.ones_like(losses), lambda x, w: linear_reference(x, w, None, target, 0, 0), input, weight
    )
    leaves = [input.requires_grad_(), weight.requires_grad_()]
    stock = torch.autograd.grad(F.cross_entropy(F.linear(*leaves).float(), target, reduction="sum"), leaves)
    for gradient, plain, wanted in zip(gradients, stock, exact, strict=False):
        # Half a unit in the last place more in the interpreter, which truncates.
        slack = 1.1 if device.type == "cuda" else 2.2
        assert (gradient.double() - wanted).norm() <= slack * (plain.double() - wanted).norm()


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 20),
    classes=st.integers(1, 300),
    smoothing=st.sampled_from([0.0, 0.2, 1.0]),
    ignored=st.sampled_from(["none", "some", "all"]),
    seed=st.integers(0, 2**31),
)
@pytest.mark.parametrize(
    "run", [pytest.param("cpu", marks=pytest.mark.interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_losses_and_gradients_of_random_sizes_against_float64(run, rows, classes, smoothing, ignored, seed):
    torch.manual_seed(seed)
    input, weight, bias = (torch.randn(shape, device=run) for shape in ((rows, 8), (classes, 8), (classes,)))
    target = torch.randint(classes, (rows,), device=run)
    if ignored != "none":
        target[:: 1 if ignored == "all" else 2] = IGNORED
    expected = linear_reference(input.double(), weight.double(), bias.double(), target, smoothing, 0.01)
    losses, grad_input, grad_weight, grad_bias = linear_cross_entropy_fwd(
        input, weight, bias, target, IGNORED, smoothing, 0.01, torch.float32, True, True, True
    )
    torch.testing.assert_close(losses.double(), expected, rtol=1e-4, atol=1e-4)
    exact = reference_gradients(
        torch.ones_like(losses), lambda *t: linear_reference(*t, target, smoothing, 0.01), input, weight, bias
    )
    for gradient, wanted in zip((grad_input, grad_weight, grad_bias), exact, strict=True):
        torch.testing.assert_close(gradient.double(), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("bad", [61, -1, 2**40])
def test_a_target_that_is_no_class_fails_an_assertion(device, bad):
    if device.type == "cuda":
        pytest.skip("an assertion that fails on a GPU takes the process's context with it")
    *tensors, target = linear_case(device, torch.float32, 5, 8, 61)
    target[3] = bad
    with pytest.raises(RuntimeError, match="neither ignore_index nor a class"):
        linear_cross_entropy_fwd(*tensors, target, IGNORED, 0.0, 0.0, torch.float32, True, True, True)
    with pytest.raises(RuntimeError, match="neither ignore_index nor a class"):
        cross_entropy_fwd(torch.zeros(5, 61), target, IGNORED, 0.0, 0.0)


def test_chunks_cover_every_row_once_and_fit_the_buffer():
    for rows, width in ((1, 64), (65536, 50304), (5632, 50304), (3, 300_032), (10**6, 64)):
        slices = list(linear_kernels.chunks(rows, 2 * width, 768, torch.device("cpu")))
        assert [row for s in slices for row in (s.start, s.stop)] == sorted(
            [0, rows, *(s.stop for s in slices[:-1]), *(s.start for s in slices[1:])]
        )
        largest = max(s.stop - s.start for s in slices)
        most = tuned("linear_cross_entropy_chunk_bytes", torch.device("cpu"))
        assert largest * width * 2 <= most or largest <= linear_kernels.CHUNK_ROWS


@pytest.mark.parametrize(
    ("width", "features", "expected"),
    # 132 multiprocessors: GPT-2's 44 x 3 tiles of 128 x 256 are one round, of Llama-3.2-1B's 17 x 8 four are a second.
    [(50304, 768, 44), (128256, 2048, 16), (50304, 1024, 33), (151936, 1024, 14), (300_032, 4096, 7), (10**7, 64, 1)],
)
def test_chunks_leave_few_multiprocessors_idle(width, features, expected):
    first = next(linear_kernels.chunks(10**6, 2 * width, features, torch.device("cpu")))
    assert first == slice(0, 128 * expected)


@pytest.mark.gpu
def test_more_than_2_to_31_elements(assert_matches):
    rows, columns = 2**31 // 50257 + 5, 50257
    input = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")
    target = torch.randint(columns, (rows,), device="cuda")
    losses, *statistics = cross_entropy_fwd(input, target, IGNORED, 0.0, 0.0)
    assert_matches(losses[-3:], reference(input[-3:], target[-3:], 0.0, 0.0))
    grad_input = cross_entropy_bwd(torch.ones_like(losses), input, target, *statistics, IGNORED, 0.0, 0.0)
    last = reference_gradients(torch.ones(3, device="cuda"), lambda x: reference(x, target[-3:], 0.0, 0.0), input[-3:])
    assert_matches(grad_input[-3:], last[0])
