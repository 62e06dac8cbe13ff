"""Cross-entropy of logits against class indices, in float32 throughout, with label smoothing and z-loss.

Label smoothing: Szegedy et al. 2016 (arXiv 1512.00567). z-loss, which keeps the logits from drifting: Chowdhery et al.
2022 (PaLM, arXiv 2204.02311).
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseopt.ops import registry
from fuseopt.ops.library import (
    apply,
    check_shape,
    compute_dtype,
    define,
    is_differentiated_again,
    needs_autograd,
    reference_vjp,
    without_autocast,
)

REDUCTIONS = ("none", "sum", "mean")


def _fwd_fake(
    input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    losses, row_max, row_sum = (input.new_empty(target.shape, dtype=compute_dtype(input)) for _ in range(3))
    return losses, row_max, row_sum


def _bwd_fake(
    grad_output: Tensor,
    input: Tensor,
    target: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    return input.new_empty(input.shape)


FWD = define(
    "cross_entropy_fwd(Tensor input, Tensor target, int ignore_index, float label_smoothing, float z_loss)"
    " -> (Tensor, Tensor, Tensor)",
    _fwd_fake,
    triton="fuseopt.ops.triton.cross_entropy",
)
BWD = define(
    "cross_entropy_bwd(Tensor grad_output, Tensor input, Tensor target, Tensor row_max, Tensor row_sum,"
    " int ignore_index, float label_smoothing, float z_loss) -> Tensor",
    _bwd_fake,
    triton="fuseopt.ops.triton.cross_entropy",
)


def plain_losses(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float) -> Tensor:
    """The loss of each row in plain PyTorch: logits [*, classes] -> [*]."""
    with without_autocast(logits):
        rows = logits.to(compute_dtype(logits)).flatten(0, -2)
        losses = F.cross_entropy(
            rows, target.flatten(), ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
        )
        if z_loss:
            penalty = z_loss * rows.logsumexp(-1).square()
            losses = losses + penalty.masked_fill(target.flatten() == ignore_index, 0.0)
        return losses.view(target.shape)


def reduce(losses: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Reduces the losses of rows; the mean is over rows that are not ignored, and NaN if all are."""
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignore_index).sum()


def check_arguments(target: Tensor, rows: torch.Size, label_smoothing: float, reduction: str) -> None:
    """Raises TypeError or ValueError for arguments that the ops on class indices do not take."""
    if target.dtype != torch.int64:
        raise TypeError(f"target must hold class indices as int64, not {target.dtype}")
    check_shape("target", target, rows)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must lie between 0 and 1, not {label_smoothing}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be 'none', 'sum' or 'mean', not {reduction!r}")


def cross_entropy_reference(
    input: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """`cross_entropy` by torch's own."""
    losses = plain_losses(input, target, ignore_index, label_smoothing, z_loss)
    return reduce(losses, target, ignore_index, reduction)


class _CrossEntropy(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return FWD[backend](*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.backend, input, target, *ctx.scalars = inputs
        _, *statistics = output
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, target, *statistics)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return (None,) * 6
        input, target, row_max, row_sum = ctx.saved_tensors
        if is_differentiated_again():
            ignore_index, label_smoothing, z_loss = ctx.scalars
            reference = partial(
                plain_losses, target=target, ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss
            )
            (grad_input,) = reference_vjp(reference, grad_output, (input,))
        else:
            grad_input = BWD[ctx.backend](grad_output, input, target, row_max, row_sum, *ctx.scalars)
        return None, grad_input, None, None, None, None


def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    backend: str = "auto",
) -> Tensor:
    """`F.cross_entropy(input.float(), target)` for classes in the last dimension, without a copy of the logits.

    Autocast does not change it: the arithmetic is in float32 (float64 where `input` is float64).

    Args:
        input: logits, [*, classes], any strides; float32, float16, bfloat16 or float64.
        target: class indices, [*], int64.
        ignore_index: target of rows that count for nothing.
        label_smoothing: share of the target that is spread over all classes, 0 to 1.
        z_loss: adds `z_loss * logsumexp(input)**2` to the loss of each row.
        reduction: "none", "sum", or "mean" over the rows that are not ignored (NaN if all are).
        backend: "auto", "triton" or "reference".

    Returns:
        [] or, for "none", [*]: float32, or float64 where `input` is. The gradient has the dtype of `input`.

    Raises:
        TypeError: a target that is not int64, such as one of probabilities.
        ValueError: a target of another shape, `label_smoothing` out of range, an unknown `reduction`.
        IndexError: on CPU, a target that is neither a class nor `ignore_index`; on a GPU that fails an assertion there.
        BackendError: the backend named cannot run here; the message says why.
    """
    check_arguments(target, input.shape[:-1], label_smoothing, reduction)
    chosen = registry.pick("cross_entropy", backend, input.device, (input.dtype,))
    scalars = ignore_index, label_smoothing, z_loss
    if chosen == "reference":
        losses = plain_losses(input, target, *scalars)
    elif needs_autograd(input):
        losses = apply(_CrossEntropy, chosen, input, target, *scalars)[0]
    else:
        losses = FWD[chosen](input, target, *scalars)[0]
    return reduce(losses, target, ignore_index, reduction)


def random_target(device: torch.device, *shape: int, classes: int, ignore_index: int | None = -100) -> Tensor:
    """Class indices; the second and every fourth after it is `ignore_index`, unless that is None."""
    target = torch.randint(classes, shape, device=device)
    if ignore_index is not None:
        target.view(-1)[1::4] = ignore_index
    return target


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(*shape: int, ignore_index: int | None = -100, **kwargs: Any) -> registry.SampleInput:
        *rows, classes = shape
        input = torch.randn(shape, device=device, dtype=dtype).requires_grad_(requires_grad)
        target = random_target(device, *rows, classes=classes, ignore_index=ignore_index)
        if ignore_index is not None:
            kwargs["ignore_index"] = ignore_index
        return registry.SampleInput((input, target), kwargs)

    yield make(4, 33, reduction="none")
    yield make(2, 3, 17)
    yield make(3, 64, ignore_index=None, reduction="sum")
    yield make(4, 11, ignore_index=3, label_smoothing=0.1, z_loss=0.01)
    yield make(2, 3, 19, label_smoothing=0.3, reduction="none")
    yield make(3, 2, z_loss=0.1, reduction="sum")
    yield make(0, 8, reduction="none")


def bench_input(device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> registry.SampleInput:
    input = torch.randn(rows, columns, device=device, dtype=dtype, requires_grad=True)
    return registry.SampleInput((input, torch.randint(columns, (rows,), device=device)))


def _float32_cross_entropy(input: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(input.float(), target)


registry.register(
    registry.Op(
        name="cross_entropy",
        function=cross_entropy,
        reference=cross_entropy_reference,
        sample_inputs=sample_inputs,
        backends=(registry.TRITON, registry.REFERENCE),
        benchmarks=(
            registry.Benchmark(
                bench_input,
                shapes=("8192x50257", "8192x32128"),
                torch=_float32_cross_entropy,
            ),
        ),
    )
)
