"""Cross-entropy of a linear layer's output: the loss of a language model's head, without its logits.

The idea, with many small chunks: Hsu et al. 2024 (Liger Kernel, arXiv 2410.10989).
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseopt.ops import registry
from fuseopt.ops.cross_entropy import check_arguments, plain_losses, random_target, reduce
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

_ARGUMENTS = (
    "Tensor input, Tensor weight, Tensor? bias, Tensor target, int ignore_index, float label_smoothing, float z_loss,"
    " ScalarType product_dtype, bool need_input_grad, bool need_weight_grad, bool need_bias_grad"
)


def _gradients_fake(
    input: Tensor, weight: Tensor, product_dtype: torch.dtype, need_input: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(input, weight)
    return (
        input.new_empty(input.shape, dtype=product_dtype) if need_input else input.new_empty(0, dtype=dtype),
        input.new_empty(weight.shape if need_weight else (0,), dtype=dtype),
        input.new_empty(weight.shape[:1] if need_bias else (0,), dtype=dtype),
    )


def _fwd_fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    product_dtype: torch.dtype,
    *need_grad: bool,
) -> tuple[Tensor, ...]:
    losses = input.new_empty(target.shape, dtype=compute_dtype(input, weight))
    return losses, *_gradients_fake(input, weight, product_dtype, *need_grad)


def _bwd_fake(grad_output: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return _fwd_fake(*arguments)[1:]


FWD = define(
    f"linear_cross_entropy_fwd({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _fwd_fake,
    triton="fuseopt.ops.triton.linear_cross_entropy",
)
BWD = define(
    f"linear_cross_entropy_bwd(Tensor grad_output, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _bwd_fake,
    triton="fuseopt.ops.triton.linear_cross_entropy",
)


def linear_dtype(input: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype that F.linear computes in: autocast's dtype if that is on, else the common dtype of both tensors."""
    # As in `library.is_autocast`: torch 2.11 cannot compile some queries, and the meta device has no autocast.
    device = input.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and input.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    if weight.dtype != input.dtype:
        raise TypeError(f"input and weight must have one dtype, not {input.dtype} and {weight.dtype}")
    return input.dtype


def _plain_losses(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
) -> Tensor:
    with without_autocast(input):
        logits = F.linear(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return plain_losses(logits, target, ignore_index, label_smoothing, z_loss)


def linear_cross_entropy_reference(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    product_dtype: torch.dtype | None = None,
) -> Tensor:
    """`linear_cross_entropy` by torch's own."""
    dtype = product_dtype or linear_dtype(input, weight)
    losses = _plain_losses(input, weight, bias, target, ignore_index, label_smoothing, z_loss, dtype)
    return reduce(losses, target, ignore_index, reduction)


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss of each row. Their incoming gradients are known only in the backward, so that recomputes the logits."""

    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Any) -> Tensor:
        return FWD[backend](*arguments, False, False, False)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.backend, input, weight, bias, target, *ctx.scalars = inputs
        ctx.save_for_backward(input, weight, bias, target)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        if is_differentiated_again():
            gradients = _reference_gradients(grad_output, *tensors, *ctx.scalars)
        else:
            gradients = BWD[ctx.backend](grad_output, *tensors, *ctx.scalars, *ctx.needs_input_grad[1:4])
        return None, *_cast(ctx.needs_input_grad[1:4], gradients, tensors), None, None, None, None, None


class _ReducedLinearCrossEntropy(torch.autograd.Function):
    """The sum of the losses over `count`. Its gradient is one number, so the forward computes all others up to that."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        backend: str, count: Tensor | None, need_grad: tuple[bool, bool, bool], *arguments: Any
    ) -> tuple[Tensor, ...]:
        losses, *gradients = FWD[backend](*arguments, *need_grad)
        total = losses.sum()
        return total if count is None else total / count, *gradients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, count, _, input, weight, bias, target, *ctx.scalars = inputs
        _, *gradients = output
        ctx.mark_non_differentiable(*gradients)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(count, input, weight, bias, target, *gradients)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return (None,) * 11
        count, *tensors, grad_input, grad_weight, grad_bias = ctx.saved_tensors
        # If every row is ignored, the loss is NaN and all gradients are zero, as in torch.
        scale = grad_output if count is None else grad_output / count.clamp(min=1)
        if is_differentiated_again():
            gradients = _reference_gradients(scale.expand(tensors[3].shape), *tensors, *ctx.scalars)
        else:
            # Shape [1] takes part in type promotion and [] does not: half precision is scaled in float32, rounded once.
            gradients = tuple(gradient * scale.reshape(1) for gradient in (grad_input, grad_weight, grad_bias))
        needed = ctx.needs_input_grad[3:6]
        return None, None, None, *_cast(needed, gradients, tensors), None, None, None, None, None


def _reference_gradients(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    scalars = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss, "dtype": dtype}
    reference = partial(_plain_losses, target=target, **scalars)
    return reference_vjp(reference, grad_output, (input, weight, bias))


def _cast(needed: tuple[bool, ...], gradients: tuple[Any, ...], tensors: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    """The gradients that are needed, each in the dtype of its tensor."""
    return tuple(
        gradient.to(tensor.dtype) if is_needed else None
        for is_needed, gradient, tensor in zip(needed, gradients, tensors, strict=False)
    )


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    product_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """`cross_entropy(F.linear(input, weight, bias), target)`, of whose logits a kernel keeps a few thousand rows only.

    Logits are rounded to the dtype of the product; what follows is in float32, sums over rows included (float64 where a
    tensor is float64). For "sum" and "mean" the gradients are computed in the forward, where one is needed; for "none"
    the backward repeats the forward.

    Args:
        input: [rows, features], any strides; float32, float16, bfloat16 or float64.
        weight: [classes, features].
        bias: [classes] or None.
        target: class indices, [rows], int64.
        ignore_index: target of rows that count for nothing.
        label_smoothing: share of the target that is spread over all classes, 0 to 1.
        z_loss: adds `z_loss * logsumexp(logits)**2` to the loss of each row.
        reduction: "none", "sum", or "mean" over the rows that are not ignored (NaN if all are).
        product_dtype: what input, weight and bias are cast to; by default what F.linear would compute in: autocast's
            dtype, or the one that they all have.
        backend: "auto", "triton" or "reference"; the last keeps the logits.

    Returns:
        [] or, for "none", [rows]: float32, or float64 where `input` is.

    Raises:
        TypeError: a target that is not int64; input and weight of different dtypes, with neither autocast nor
            `product_dtype`.
        ValueError: tensors whose shapes do not fit, `label_smoothing` out of range, an unknown `reduction`.
        IndexError: on CPU, a target that is neither a class nor `ignore_index`; on a GPU that fails an assertion there.
        BackendError: the backend named cannot run here; the message says why.
    """
    if input.dim() != 2:
        raise ValueError(f"input must have shape [rows, features], not {tuple(input.shape)}; flatten it")
    check_shape("weight", weight, torch.Size((weight.shape[0], input.shape[1])))
    if bias is not None:
        check_shape("bias", bias, weight.shape[:1])
    check_arguments(target, input.shape[:1], label_smoothing, reduction)
    dtype = product_dtype or linear_dtype(input, weight)
    chosen = registry.pick("linear_cross_entropy", backend, input.device, (input.dtype, weight.dtype))
    scalars = ignore_index, label_smoothing, z_loss
    if chosen == "reference":
        losses = _plain_losses(input, weight, bias, target, *scalars, dtype)
        return reduce(losses, target, ignore_index, reduction)
    tensors = (input, weight, bias)
    arguments = (*tensors, target, *scalars, dtype)
    if not needs_autograd(*tensors):
        losses = FWD[chosen](*arguments, False, False, False)[0]
        return reduce(losses, target, ignore_index, reduction)
    if reduction == "none":
        return apply(_LinearCrossEntropy, chosen, *arguments)
    count = (target != ignore_index).sum() if reduction == "mean" else None
    need_grad = tuple(needs_autograd(tensor) if tensor is not None else False for tensor in tensors)
    return apply(_ReducedLinearCrossEntropy, chosen, count, need_grad, *arguments)[0]


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(
        rows: int, features: int, classes: int, *, bias: bool = False, ignore_index: int | None = -100, **kwargs: Any
    ) -> registry.SampleInput:
        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype).requires_grad_(requires_grad)

        target = random_target(device, rows, classes=classes, ignore_index=ignore_index)
        if ignore_index is not None:
            kwargs["ignore_index"] = ignore_index
        weight = draw(classes, features)
        return registry.SampleInput((draw(rows, features), weight, draw(classes) if bias else None, target), kwargs)

    yield make(4, 16, 33, reduction="none")
    yield make(3, 8, 17, bias=True, label_smoothing=0.1, z_loss=0.01, reduction="none")
    yield make(5, 24, 61)
    yield make(4, 8, 64, bias=True, ignore_index=None, reduction="sum")
    yield make(4, 5, 11, ignore_index=3, label_smoothing=0.2, z_loss=0.01)
    yield make(0, 8, 19, reduction="none")


def bench_input(
    device: torch.device, dtype: torch.dtype, rows: int, features: int, classes: int
) -> registry.SampleInput:
    input = torch.randn(rows, features, device=device, dtype=dtype, requires_grad=True)
    weight = (0.02 * torch.randn(classes, features, device=device, dtype=dtype)).requires_grad_()
    return registry.SampleInput((input, weight, None, torch.randint(classes, (rows,), device=device)))


def _torch_linear_cross_entropy(input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(input, weight, bias).float(), target)


registry.register(
    registry.Op(
        name="linear_cross_entropy",
        function=linear_cross_entropy,
        reference=linear_cross_entropy_reference,
        sample_inputs=sample_inputs,
        backends=(registry.TRITON, registry.REFERENCE),
        benchmarks=(
            registry.Benchmark(
                bench_input,
                shapes=("16384x768x50257", "16384x768x32128"),
                torch=_torch_linear_cross_entropy,
            ),
        ),
    )
)
