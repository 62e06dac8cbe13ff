"""Generalised IoU loss as two ops, the losses alone and with their gradient, with Triton and CUDA kernels for both."""

from pathlib import Path

import torch
from giou_kernel import launch
from torch import Tensor

import fuseopt

SOURCE = Path(__file__).with_name("giou.cu")


def area(sides: Tensor) -> Tensor:
    return sides[..., 0] * sides[..., 1]


def larger_share(a: Tensor, b: Tensor) -> Tensor:
    """How much of the gradient of max(a, b) is a's: all, none, or half where they are equal."""
    return torch.where(a > b, 1.0, torch.where(a == b, 0.5, 0.0)).to(a.dtype)


@fuseopt.op("giou::loss")
def loss(boxes: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    """[batch, boxes] losses 1 - GIoU of boxes (x1, y1, x2, y2), in at least float32; 0 where not valid."""
    dtype = torch.promote_types(boxes.dtype, torch.float32)
    low, high, target_low, target_high = (*boxes.to(dtype).split(2, -1), *targets.to(dtype).split(2, -1))
    sides = torch.minimum(high, target_high) - torch.maximum(low, target_low)
    inter = torch.where((sides > 0).all(-1), area(sides), 0)
    union = area(high - low) + area(target_high - target_low) - inter
    hull = area(torch.maximum(high, target_high) - torch.minimum(low, target_low))
    losses = 1 - inter / (union + 1e-7) + (hull - union) / (hull + 1e-7)
    return torch.where(valid, losses, 0).to(boxes.dtype)


@fuseopt.op("giou::loss_and_gradient")
def loss_and_gradient(boxes: Tensor, targets: Tensor, valid: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The losses, and the gradient of their sum weighted by `weight` ([batch, boxes] or one number) for `boxes`."""
    dtype = torch.promote_types(boxes.dtype, torch.float32)
    low, high, target_low, target_high = (*boxes.to(dtype).split(2, -1), *targets.to(dtype).split(2, -1))
    sides = torch.minimum(high, target_high) - torch.maximum(low, target_low)
    hull_sides = torch.maximum(high, target_high) - torch.minimum(low, target_low)
    overlaps = (sides > 0).all(-1)
    inter, hull = torch.where(overlaps, area(sides), 0), area(hull_sides) + 1e-7
    union = area(high - low) + area(target_high - target_low) - inter + 1e-7
    losses = 1 - inter / union + (hull - union) / hull
    by_union = inter / union**2 - 1 / hull
    by_inter = torch.where(overlaps, -1 / union - by_union, 0)
    # The derivative of an area for one side is the other side.
    inner = by_inter.unsqueeze(-1) * sides.flip(-1)
    outer = (union / hull**2).unsqueeze(-1) * hull_sides.flip(-1)
    own = by_union.unsqueeze(-1) * (high - low).flip(-1)
    for_low = -inner * larger_share(low, target_low) - outer * larger_share(target_low, low) - own
    for_high = inner * larger_share(target_high, high) + outer * larger_share(high, target_high) + own
    scale = torch.where(valid, weight.to(dtype), 0).unsqueeze(-1)
    return torch.where(valid, losses, 0).to(boxes.dtype), (torch.cat((for_low, for_high), -1) * scale).to(boxes.dtype)


@loss.samples
def _(device, dtype):
    for shape in ((3, 37), (1, 300)):
        corners, sizes = (torch.rand(2, *shape, 2, device=device) + 0.1 for _ in range(2))
        boxes = torch.cat((corners, corners + sizes), -1).to(dtype)
        yield boxes[0], boxes[1], torch.rand(shape, device=device) < 0.7


@loss_and_gradient.samples
def _(device, dtype):
    for boxes, targets, valid in loss.sample_arguments(device, dtype):
        yield boxes, targets, valid, torch.rand(valid.shape, device=device).to(dtype)
        yield boxes, targets, valid, torch.ones((), device=device, dtype=dtype)


def is_packed(boxes: Tensor, targets: Tensor, valid: Tensor, *weight: Tensor) -> bool | str:
    """What the kernels take: contiguous tensors of one shape and dtype, and one weight for all or one a pair."""
    floats = (boxes, targets, *weight)
    packed = all(t.dtype == boxes.dtype != torch.float64 and t.is_contiguous() for t in floats)
    shapes = boxes.shape == targets.shape == (*valid.shape, 4) and valid.dtype == torch.bool and valid.is_contiguous()
    weights = all(t.shape in (valid.shape, ()) for t in weight)
    return (packed and shapes and weights) or "takes contiguous boxes of one shape and dtype, not float64"


@loss.kernel("triton", supports=is_packed)
def _(boxes, targets, valid):
    losses = torch.empty_like(valid, dtype=boxes.dtype)
    launch(boxes, targets, valid, None, losses)
    return losses


@loss_and_gradient.kernel("triton", supports=is_packed)
def _(boxes, targets, valid, weight):
    losses, gradient = torch.empty_like(valid, dtype=boxes.dtype), torch.empty_like(boxes)
    launch(boxes, targets, valid, weight, losses, gradient)
    return losses, gradient


def backward_by(backend: str):
    """The gradient of `loss` by the kernel of one backend. The loss is symmetric: targets take the boxes' place."""

    def formula(inputs, losses, grad_losses, needed):
        boxes, targets, valid = inputs
        pairs = (boxes, targets), (targets, boxes)
        grad_losses = grad_losses.contiguous()
        return [
            loss_and_gradient(one, other, valid, grad_losses, backend=backend)[1] if needs else None
            for (one, other), needs in zip((*pairs, (valid, valid)), needed, strict=True)
        ]

    return formula


for backend in ("triton", "cuda"):
    loss.backward(backend)(backward_by(backend))
for op in (loss, loss_and_gradient):
    op.native(cuda=SOURCE).supports(is_packed, "cuda")
