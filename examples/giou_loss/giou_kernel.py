"""The Triton kernel of the generalised IoU loss: a block of pairs a program, losses alone or with the gradient."""

import triton
import triton.language as tl

EPS = tl.constexpr(1e-7)


@triton.jit
def larger(a, b):
    """How much of the gradient of max(a, b) is a's: all, none, or half where they are equal."""
    return tl.where(a > b, 1.0, tl.where(a == b, 0.5, 0.0))


@triton.jit
def corners(pointer, start, pairs, BLOCK: tl.constexpr):
    """x1, y1, x2, y2 of a block of boxes, each box by one load of a thread."""
    place = start * 4 + tl.arange(0, 4 * BLOCK)
    boxes = tl.load(pointer + place, mask=place < pairs * 4, other=0.0).to(tl.float32)
    x, y = tl.split(tl.reshape(boxes, (BLOCK, 2, 2)))
    x1, x2 = tl.split(x)
    y1, y2 = tl.split(y)
    return x1, y1, x2, y2


@triton.jit
def giou_kernel(
    boxes_ptr, targets_ptr, valid_ptr, weight_ptr, losses_ptr, gradient_ptr, pairs, weight_stride,
    WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    pair = start + tl.arange(0, BLOCK)
    x1, y1, x2, y2 = corners(boxes_ptr, start, pairs, BLOCK)
    u1, v1, u2, v2 = corners(targets_ptr, start, pairs, BLOCK)
    valid = tl.load(valid_ptr + pair, mask=pair < pairs, other=0).to(tl.int1)
    width, height = tl.minimum(x2, u2) - tl.maximum(x1, u1), tl.minimum(y2, v2) - tl.maximum(y1, v1)
    overlaps = (width > 0) & (height > 0)
    inter = tl.where(overlaps, width * height, 0.0)
    union = (x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - inter
    hull_width, hull_height = tl.maximum(x2, u2) - tl.minimum(x1, u1), tl.maximum(y2, v2) - tl.minimum(y1, v1)
    hull = hull_width * hull_height
    per_union, per_hull = 1 / (union + EPS), 1 / (hull + EPS)
    losses = 1 - inter * per_union + (hull - union) * per_hull
    tl.store(losses_ptr + pair, tl.where(valid, losses, 0.0), mask=pair < pairs)
    if WITH_GRADIENT:
        weight = tl.load(weight_ptr + pair * weight_stride, mask=pair < pairs, other=0.0).to(tl.float32)
        by_union = inter * per_union * per_union - per_hull
        by_inter = tl.where(overlaps, -per_union - by_union, 0.0)
        by_hull = (union + EPS) * per_hull * per_hull
        across, along, area_x, area_y = by_hull * hull_height, by_hull * hull_width, y2 - y1, x2 - x1
        gx1 = -by_inter * height * larger(x1, u1) - across * larger(u1, x1) - by_union * area_x
        gy1 = -by_inter * width * larger(y1, v1) - along * larger(v1, y1) - by_union * area_y
        gx2 = by_inter * height * larger(u2, x2) + across * larger(x2, u2) + by_union * area_x
        gy2 = by_inter * width * larger(v2, y2) + along * larger(y2, v2) + by_union * area_y
        scale = tl.where(valid, weight, 0.0)
        x = tl.join(tl.where(valid, gx1 * scale, 0.0), tl.where(valid, gx2 * scale, 0.0))
        y = tl.join(tl.where(valid, gy1 * scale, 0.0), tl.where(valid, gy2 * scale, 0.0))
        place = start * 4 + tl.arange(0, 4 * BLOCK)
        tl.store(gradient_ptr + place, tl.reshape(tl.join(x, y), (4 * BLOCK,)), mask=place < pairs * 4)


# A pair a thread. With two, numbers of float32 boxes pass between threads: 9 to 23% slower on an H200.
CONFIGS = [triton.Config({"BLOCK": 32 * warps}, num_warps=warps) for warps in (2, 4, 8)]
tuned_kernel = triton.autotune(CONFIGS, key=["WITH_GRADIENT"])(giou_kernel)
TUNED_PAIRS = 2**16  # fewer are not worth the second that tuning takes


def launch(boxes, targets, valid, weight, losses, gradient=None):
    """Run the kernel on contiguous tensors: `losses` alone, or with `gradient` weighted by `weight`, into both."""
    if not (pairs := valid.numel()):
        return
    grid = lambda meta: (triton.cdiv(pairs, meta["BLOCK"]),)  # noqa: E731
    arguments = (
        boxes,
        targets,
        valid,
        weight,
        losses,
        gradient,
        pairs,
        1 if weight is not None and weight.dim() else 0,
    )
    if pairs < TUNED_PAIRS:
        giou_kernel[grid](*arguments, WITH_GRADIENT=gradient is not None, BLOCK=128, num_warps=4)
    else:
        tuned_kernel[grid](*arguments, WITH_GRADIENT=gradient is not None)
