"""Several backward passes of a compiled step (`retain_graph=True`), and an error for second derivatives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fuseopt.errors import CompileError

_COLLECT = "collect_bw_donated_buffer_idxs"


def missing_from_torch() -> list[str]:
    """Names of the private functions used here that this version of torch lacks."""
    from torch._functorch._aot_autograd import graph_compile

    return [] if hasattr(graph_compile, _COLLECT) else [_COLLECT]


@contextlib.contextmanager
def no_donated_buffers() -> Iterator[None]:
    """Makes AOT Autograd compile backward graphs that do not overwrite their inputs, so that they can run twice.

    torch's option `donated_buffer=False` has the same effect on compilation, but has to be off during each run as well.
    """
    from torch._functorch._aot_autograd import graph_compile

    collect = getattr(graph_compile, _COLLECT)
    setattr(graph_compile, _COLLECT, lambda *_, **__: [])
    try:
        yield
    finally:
        setattr(graph_compile, _COLLECT, collect)


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
