"""Gradients of a user's op: by the formula given for it, else by autograd of its reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fuseopt.errors import OpError
from fuseopt.extend.backends import Kernel, noting
from fuseopt.extend.signature import as_results, kind_of, tensors_of, with_tensors
from fuseopt.ops.library import is_differentiated_again

if TYPE_CHECKING:
    from fuseopt.extend.eager_calls import EagerCalls
    from fuseopt.extend.own_op import Op


class Call(torch.autograd.Function):
    """One eager call of a kernel of an op, differentiable; without lists of tensors."""

    @staticmethod
    def forward(ctx: Any, calls: EagerCalls, kernel: Kernel, *arguments: Any) -> Any:
        output = calls.run(kernel, arguments)
        save(ctx, calls.op, kernel.backend, arguments, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        arguments, outputs = saved(ctx)
        is_tensor = [isinstance(argument, Tensor) for argument in arguments]
        needed = [needs for needs, is_one in zip(ctx.needs_input_grad[2:], is_tensor, strict=True) if is_one]
        following = iter(gradients(ctx.op, ctx.backend, arguments, outputs, grads, needed))
        return None, None, *(next(following) if is_one else None for is_one in is_tensor)


# `Call.apply` without binding its arguments to a signature, for calls that no transform and no compiler sees.
differentiable_call = super(torch.autograd.Function, Call).apply


@dataclass(frozen=True)
class _Replayed:
    """In place of `EagerCalls`, for a call whose results are there."""

    op: Op
    output: Any

    def run(self, kernel: Kernel, arguments: Sequence[Any]) -> Any:
        return self.output


def as_python_node(op: Op, kernel: Kernel, arguments: Sequence[Any], results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of a call with the node of `Call`, in place of the one that csrc/python gave them."""
    detached = tuple(result.detach() for result in results)
    with torch.enable_grad():
        replayed = _Replayed(op, detached[0] if op.signature.results == 1 else detached)
        return as_results(differentiable_call(replayed, kernel, *arguments))


def save(ctx: Any, op: Op, backend: str, arguments: Sequence[Any], output: Any) -> None:
    """Save on an autograd context what `gradients` takes."""
    results = () if op.formula(backend) is None else as_results(output)
    ctx.op, ctx.backend, ctx.lengths = op, backend, None
    if op.signature.are_tensors:
        ctx.items = [None] * len(arguments)
        ctx.save_for_backward(*arguments, *results)
        return
    items = arguments
    if op.signature.has_lists:
        ctx.lengths = [len(argument) if isinstance(argument, (list, tuple)) else None for argument in arguments]
        items = [
            item
            for argument, length in zip(arguments, ctx.lengths, strict=True)
            for item in ([argument] if length is None else argument)
        ]
    ctx.items = [None if isinstance(item, Tensor) else item for item in items]
    ctx.save_for_backward(*[item if isinstance(item, Tensor) else None for item in items], *results)


def saved(ctx: Any) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """(arguments, results) of the call that `save` was given; no results where no formula reads them."""
    kept, count = ctx.saved_tensors, len(ctx.items)
    items = [item if tensor is None else tensor for item, tensor in zip(ctx.items, kept[:count], strict=True)]
    if ctx.lengths is not None:
        following = iter(items)
        items = [
            next(following) if length is None else [next(following) for _ in range(length)] for length in ctx.lengths
        ]
    return tuple(items), kept[count:]


def gradients(
    op: Op,
    backend: str,
    arguments: Sequence[Any],
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    needed: Sequence[bool],
    *,
    formula: Callable | None = None,
) -> list[Tensor | None]:
    """The gradient of each tensor among `arguments`; None where it is not needed.

    A second derivative is always that of the reference. So is a batch of gradients (`is_grads_batched`), whose tensors
    have no memory that a kernel could read.

    Args:
        formula: called in place of the one that was given to the op, with the same arguments.
    """
    by_hand = op.formula(backend)
    try:
        if by_hand is None or is_differentiated_again() or any(map(_is_batched, grads)):
            return of_reference(op.function, arguments, grads, needed)
        if formula is not None:
            return _scattered(formula(arguments, outputs, grads, needed), needed)
        return by_formula(op, by_hand, arguments, outputs, grads, needed)
    except RuntimeError as error:
        _check_results(op, backend, arguments, grads, error)
        raise


def _check_results(
    op: Op, backend: str, arguments: Sequence[Any], grads: Sequence[Tensor | None], error: RuntimeError
) -> None:
    """Raise OpError if the gradients that came in, and so the kernel's results, are not like the function's."""
    with torch.no_grad():
        wanted = as_results(op.function(*arguments))
    for grad, result in zip(grads, wanted, strict=True):
        if grad is not None and (grad.shape, grad.dtype) != (result.shape, result.dtype):
            raise OpError(
                f"{op.name}: its {backend} kernel gave {kind_of(grad)}, the function gives {kind_of(result)}"
            ) from error


def by_formula(
    op: Op,
    formula: Callable,
    arguments: Sequence[Any],
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients that a `.backward` of the op gives, each in the shape and dtype of its tensor.

    Raises:
        OpError: it gives another number of gradients.
    """
    # A kernel reads a gradient's memory, which does not hold the values of a lazy tensor.
    grads = [grad if grad is None else grad.resolve_neg().resolve_conj() for grad in grads]
    one = op.signature.results == 1
    output, grad_output = (outputs[0], grads[0]) if one else (tuple(outputs), tuple(grads))
    with noting(f"the backward of {op.name}"):
        given = formula(tuple(arguments), output, grad_output, tuple(needed))
    given = list(given) if isinstance(given, (tuple, list)) else [given]
    tensors = list(tensors_of(arguments))
    if len(given) == len(arguments) and len(given) != len(tensors):
        pairs = zip(arguments, given, strict=True)
        given = [
            item
            for argument, gradient in pairs
            for item in (
                [gradient]
                if isinstance(argument, Tensor)
                else (gradient or [None] * len(argument))
                if isinstance(argument, (list, tuple))
                else []
            )
        ]
    if len(given) != len(tensors):
        raise OpError(
            f"{op.name}: its backward gave {len(given)} gradients; it has {len(arguments)} arguments, "
            f"of which {len(tensors)} are tensors here, and must give one for each, or None"
        )
    return [
        None if not needs else torch.zeros_like(tensor) if gradient is None else _like(gradient, tensor)
        for gradient, tensor, needs in zip(given, tensors, needed, strict=True)
    ]


def _like(gradient: Tensor, tensor: Tensor) -> Tensor:
    if gradient.shape != tensor.shape:
        gradient = gradient.sum_to_size(tensor.shape)
    return gradient.to(tensor.dtype).contiguous()


def of_reference(
    function: Callable, arguments: Sequence[Any], grads: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients by autograd of `function`, which is computed again; differentiable where autograd records."""
    tensors = list(tensors_of(arguments))
    if is_differentiated_again():
        wanted = [tensor for tensor, needs in zip(tensors, needed, strict=True) if needs]

        def of_wanted(*varied: Tensor) -> tuple[Tensor, ...]:
            merged = iter(varied)
            given = [next(merged) if needs else t for t, needs in zip(tensors, needed, strict=True)]
            return tuple(r for r in as_results(function(*with_tensors(arguments, given))) if _varies(r))

        _, pull_back = torch.func.vjp(of_wanted, *wanted)
        kept = tuple(g for g, r in zip(grads, as_results(function(*arguments)), strict=True) if _varies(r))
        return _scattered(pull_back(kept), needed)
    varied = [t.detach().requires_grad_(needs) if _varies(t) else t for t, needs in zip(tensors, needed, strict=True)]
    with torch.enable_grad():
        results = as_results(function(*with_tensors(arguments, varied)))
    pairs = [(r, g) for r, g in zip(results, grads, strict=True) if r.requires_grad and g is not None]
    wanted = [tensor for tensor, needs in zip(varied, needed, strict=True) if needs]
    if not pairs:
        return [torch.zeros_like(t) if needs else None for t, needs in zip(tensors, needed, strict=True)]
    found = torch.autograd.grad([r for r, _ in pairs], wanted, [g for _, g in pairs], materialize_grads=True)
    return _scattered(found, needed)


def _is_batched(grad: Tensor | None) -> bool:
    return grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad)


def _varies(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _scattered(found: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    following = iter(found)
    return [next(following) if needs else None for needs in needed]
