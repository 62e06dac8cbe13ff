"""Computes the loss from the head's input and weight, so that the compiled step never has the logits.

Matches: in a graph of Dynamo, `head_logits` (see `modules/linear_cross_entropy.py`) whose result goes only to cross
    entropy over all rows with class indices, and to the caller.
Writes: `head_loss`, which is `ops.linear_cross_entropy`, in place of head and loss. The graph returns the head's
    input in place of the logits; a wrapper makes `LazyLogits` of it for the caller.
Does not fire: if anything else reads the logits, the loss has class weights or class probabilities, or the weight is
    computed inside the graph.

`LazyLogits` alone cannot do this: Dynamo treats a `torch.nn.CrossEntropyLoss` as a call on tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fuseopt.modules.lazy_logits import LazyLogits, LinearOutput
from fuseopt.modules.linear_cross_entropy import HEAD_ARGUMENTS, LOGITS
from fuseopt.ops.library import define_node


def _loss(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    backend: str,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    dtype: torch.dtype,
) -> Tensor:
    output = LinearOutput(input, weight, bias, backend)
    return output.cross_entropy(target, ignore_index, label_smoothing, reduction).to(dtype)


_LOSS = define_node(
    f"head_loss({HEAD_ARGUMENTS}, Tensor target, int ignore_index, float label_smoothing, str reduction,"
    " ScalarType dtype) -> Tensor",
    _loss,
)
_CROSS_ENTROPY = inspect.signature(F.cross_entropy)


class _DroppedLogits(NamedTuple):
    """Logits that a graph no longer returns.

    Attributes:
        output: position among the graph's outputs, which now holds the head's input.
        weight: position of the head's weight among the graph's inputs.
        bias: position of its bias, or None.
        backend: option of `ops.linear_cross_entropy`.
    """

    output: int
    weight: int
    bias: int | None
    backend: str

    def lazy(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> LazyLogits:
        """The `LazyLogits` for a call with these inputs and outputs."""
        hidden, weight = outputs[self.output], inputs[self.weight]
        bias = None if self.bias is None else inputs[self.bias]
        shape = (*hidden.shape[:-1], len(weight))
        return LazyLogits(LinearOutput(hidden, weight, bias, self.backend), hidden.dtype, shape)


def run(module: fx.GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Runs the pass; returns a wrapper for the compiled graph, which puts `LazyLogits` in place of the logits."""
    graph, dropped = module.graph, []
    inputs: dict[Any, int] = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
    for logits in graph.find_nodes(op="call_function", target=LOGITS.func):
        _, input, weight, bias, backend = logits.args
        losses = _losses(logits)
        if losses is None or any(tensor is not None and tensor not in inputs for tensor in (weight, bias)):
            continue
        hidden = _cast(input, logits)
        for loss, given in losses.items():
            _exchange(loss, (hidden, weight, bias, backend), given)
        _erase_readers(logits)
        for place, returned in enumerate(graph.output_node().args[0]):
            if returned is logits:
                dropped.append(_DroppedLogits(place, inputs[weight], inputs.get(bias), backend))
        logits.replace_all_uses_with(hidden)
        graph.erase_node(logits)
    module.recompile()

    def with_lazy_logits(run: Callable[..., Any]) -> Callable[..., Any]:
        def step(*inputs: Any) -> list[Any]:
            outputs = list(run(*inputs))
            for each in dropped:
                outputs[each.output] = each.lazy(inputs, outputs)
            return outputs

        return step if dropped else run

    return with_lazy_logits


def _losses(logits: fx.Node) -> dict[fx.Node, dict[str, Any]] | None:
    """Calls of cross-entropy on the logits, with their arguments; None if anything else reads the logits."""
    rows = _rows(logits)
    if rows is None:
        return None
    losses = {}
    for of_rows in rows:
        for loss in of_rows.users:
            if loss.target is not F.cross_entropy:
                return None
            given = _CROSS_ENTROPY.bind(*loss.args, **loss.kwargs)
            given.apply_defaults()
            losses[loss] = given.arguments
            if not _is_plain(of_rows, **given.arguments):
                return None
    return losses


def _rows(logits: fx.Node) -> list[fx.Node] | None:
    """The logits as [rows, classes], possibly cast to float32; None if anything else reads the logits."""
    found: list[fx.Node] = []
    for user in logits.users:
        if user.op == "output":
            continue
        if user.op != "call_method" or user.target not in ("float", "view", "reshape"):
            return None
        value = _value(user)
        if user.target == "float":
            upcast = _rows(user)
            if upcast is None or any(reader.op == "output" for reader in user.users):
                return None
            found += upcast
        elif value.dim() == 2 and value.shape[1] == _value(logits).shape[-1]:
            found.append(user)
        else:
            return None
    return found


def _is_plain(
    rows: fx.Node, input: Any, target: Any, weight: Any, size_average: Any, reduce: Any, **options: Any
) -> bool:
    """Whether `ops.linear_cross_entropy` supports a loss with these arguments."""
    of_classes = target is not rows and _value(target).dtype == torch.int64 and _value(target).dim() == 1
    return input is rows and of_classes and weight is None and size_average is None and reduce is None


def _cast(input: fx.Node, logits: fx.Node) -> fx.Node:
    """`input` in the dtype of the logits, which differs from its own under autocast."""
    dtype = _value(logits).dtype
    if _value(input).dtype == dtype:
        return input
    with logits.graph.inserting_before(logits):
        hidden = logits.graph.call_method("to", (input, dtype))
    hidden.meta = {**input.meta, "example_value": _value(input).to(dtype)}
    return hidden


def _exchange(loss: fx.Node, head: tuple[Any, ...], given: dict[str, Any]) -> None:
    options = (given[name] for name in ("target", "ignore_index", "label_smoothing", "reduction"))
    with loss.graph.inserting_before(loss):
        fused = loss.graph.call_function(_LOSS.func, (*_LOSS.args, *head, *options, _value(loss).dtype))
    fused.meta = loss.meta
    loss.replace_all_uses_with(fused)
    loss.graph.erase_node(loss)


def _erase_readers(logits: fx.Node) -> None:
    """Erases the views and casts that only the replaced losses read."""
    for reader in [user for user in logits.users if user.op == "call_method"]:
        _erase_readers(reader)
        logits.graph.erase_node(reader)


def _value(node: fx.Node) -> Tensor:
    return node.meta["example_value"]
