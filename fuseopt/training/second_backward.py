"""An error for second derivatives of a compiled step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuseopt.errors import CompileError


def without_second_derivatives(run: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """Wraps a compiled graph so that differentiating its gradients raises CompileError."""

    def step(*inputs: Any) -> Sequence[Any]:
        outputs = run(*inputs)
        node = next((node for node in map(_made_by, outputs) if node is not None), None)
        if node is not None:
            node.register_hook(_watch_gradients)
        return outputs

    return step


def _made_by(output: Any) -> Any:
    """The autograd node of the compiled backward that `output`, or the tensor of which it is a view, comes from."""
    node = output.grad_fn if isinstance(output, Tensor) else None
    while node is not None and not hasattr(node, "_forward_cls"):
        node = node.next_functions[0][0] if node.next_functions else None
    return node


def _watch_gradients(gradients: Sequence[Tensor | None], _: Any) -> None:
    if torch.is_grad_enabled():
        for gradient in gradients:
            if gradient is not None and gradient.grad_fn is not None:
                gradient.grad_fn.register_prehook(refuse)


def refuse(*_: Any) -> None:
    """Raises CompileError: the gradients of a compiled step cannot be differentiated."""
    raise CompileError(
        "gradients of a training step that memory_efficient_fusion has compiled cannot be differentiated again "
        "(create_graph=True): call fuseopt.restore(model), or leave memory_efficient_fusion out of the config"
    )
