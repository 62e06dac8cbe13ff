"""Cross-entropy of logits against class indices, with the gradient written over the logits."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseopt.ops import registry
from fuseopt.ops.cross_entropy import check_arguments, plain_losses, random_target
from fuseopt.ops.library import check_shape, compute_dtype, define

# Most columns beyond the classes: matrix products are fast with a multiple of 64 columns.
_PADDING = 63


RAW = define(
    "cross_entropy_grad_(Tensor(a!) logits, Tensor? grad_output, Tensor target, Tensor(b!) losses,"
    " Tensor(c!) in_range, int classes, int ignore_index, float label_smoothing, float z_loss, bool writes_gradient)"
    " -> ()",
    lambda *arguments: None,
    triton="fuseopt.ops.triton.cross_entropy_grad",
)


def _reference(
    logits: Tensor,
    grad_output: Tensor | None,
    target: Tensor,
    losses: Tensor,
    in_range: Tensor,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    writes_gradient: bool,
) -> None:
    is_class = (target >= 0) & (target < classes)
    in_range.copy_(is_class | (target == ignore_index))
    # torch raises for a target that is no class; here `in_range` reports it.
    counted = torch.where(in_range, target, 0)
    with torch.enable_grad():
        rows = logits[:, :classes].detach().to(compute_dtype(logits)).requires_grad_()
        values = plain_losses(rows, counted, ignore_index, label_smoothing, z_loss)
        losses.copy_(values.detach())
        if writes_gradient:
            (grad,) = torch.autograd.grad(values, rows, torch.ones_like(values) if grad_output is None else grad_output)
            logits.copy_(F.pad(grad, (0, logits.shape[1] - classes)))


def cross_entropy_grad_(
    logits: Tensor,
    target: Tensor,
    losses: Tensor,
    in_range: Tensor,
    *,
    grad_output: Tensor | None = None,
    classes: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    writes_gradient: bool = True,
    backend: str = "auto",
) -> None:
    """Puts the `cross_entropy` of each row into `losses`, and the gradient of their sum into `logits`.

    Args:
        logits: [rows, width], contiguous, rows of whole 16 bytes; float32, float16, bfloat16 or float64. Read, then
            written to: zeros past the classes.
        target: [rows] int64.
        losses: [rows] float32, or float64 where `logits` are. Written to; 0 in rows that are ignored.
        in_range: [rows] bool. Written to: whether the target is a class or `ignore_index`. Loss and gradient of a row
            where it is neither mean nothing.
        grad_output: [rows], in the dtype of the losses, that gradients are multiplied by; ones by default.
        classes: how many of the columns are classes, all but 63 at least; `width` by default.
        ignore_index: target of rows whose loss and gradient are 0.
        label_smoothing: share of the target that is spread over all classes, 0 to 1.
        z_loss: adds `z_loss * logsumexp(logits)**2` to the loss of each row.
        writes_gradient: else the logits stay as they are.
        backend: "auto", "cuda", "triton" or "reference".

    Raises:
        TypeError: dtypes other than these.
        ValueError: shapes that do not fit together, `label_smoothing` out of range.
        BackendError: the backend named cannot run here, or logits that require a gradient under grad mode.
    """
    if logits.dim() != 2 or not logits.is_contiguous() or logits.shape[1] * logits.itemsize % 16:
        raise ValueError(
            f"logits must be a contiguous matrix [rows, width] of whole 16 bytes a row, not {tuple(logits.shape)} with"
            f" strides {logits.stride()}"
        )
    rows, width = logits.shape
    classes = width if classes is None else classes
    fewest = max(width - _PADDING, 1)
    if not fewest <= classes <= width:
        raise ValueError(f"classes must be {fewest} to {width}, the columns of the logits, not {classes}")
    check_arguments(target, logits.shape[:1], label_smoothing, "none")
    of_rows = {"losses": (losses, compute_dtype(logits)), "in_range": (in_range, torch.bool)}
    if grad_output is not None:
        of_rows["grad_output"] = grad_output, compute_dtype(logits)
    for name, (tensor, dtype) in of_rows.items():
        check_shape(name, tensor, torch.Size((rows,)))
        if tensor.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, not {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, not of stride {tensor.stride(0)}")
    chosen = registry.pick_without_gradient("cross_entropy_grad_", backend, (logits.dtype,), logits)
    run = _reference if chosen == "reference" else RAW[chosen]
    run(
        *(logits, grad_output, target.contiguous(), losses, in_range),
        *(classes, ignore_index, label_smoothing, z_loss, writes_gradient),
    )


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(rows: int, width: int, classes: int, **options: object) -> registry.SampleInput:
        logits = torch.randn(rows, width, device=device, dtype=dtype)
        target = random_target(device, rows, classes=classes)
        losses = torch.empty(rows, device=device, dtype=compute_dtype(logits))
        in_range = torch.empty(rows, device=device, dtype=torch.bool)
        return registry.SampleInput((logits, target, losses, in_range), {"classes": classes, **options})

    yield make(4, 64, 64)
    yield make(3, 128, 77, label_smoothing=0.1, z_loss=0.01)
    yield make(5, 64, 33, writes_gradient=False)
    yield make(0, 64, 64)


registry.register(
    registry.Op(
        name="cross_entropy_grad_",
        function=cross_entropy_grad_,
        reference=partial(cross_entropy_grad_, backend="reference"),
        sample_inputs=sample_inputs,
        backends=(
            registry.NativeBackend("cuda", (torch.float32, torch.float16, torch.bfloat16)),
            registry.TRITON,
            registry.REFERENCE,
        ),
        in_place=True,
    )
)
