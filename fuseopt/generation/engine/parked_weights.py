"""Moves Parameters to host memory while decode steps read quantised copies of them.

A layer whose weight is in host memory is called parked. It keeps its Parameter, so `state_dict`, `save_pretrained` and
edits work as before. Its instance attribute `forward` is a `ParkedForward`, which tells other code not to read the
weight without calling the layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fuseopt.runtime.references import code_of_forward, weak_attribute


class ParkedForward:
    """Forward of a parked layer: moves the weight to the device of the input, then runs the class's forward.

    It holds a weak reference to its layer, and is copied and pickled with it.
    """

    layer = weak_attribute("layer")
    __code__ = code_of_forward("layer")

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.layer
        (input, *_) = (*args, *kwargs.values())
        fetch(layer, input.device)
        return type(layer).forward(layer, *args, **kwargs)


def is_parked(layer: nn.Module) -> bool:
    """Whether a layer's weight is in host memory, put there by `park`."""
    return type(layer.__dict__.get("forward")) is ParkedForward


def parkable(model: nn.Module, layers: Iterable[nn.Module]) -> set[nn.Module]:
    """The `layers` of a model that can be parked.

    No other module may hold the weight, the layer must use its class's forward, and the weight must have been made
    outside of inference mode.
    """
    holders = Counter(id(held) for module in model.modules() for held in module._parameters.values())
    return {
        layer
        for layer in layers
        if holders[id(layer.weight)] == 1 and "forward" not in layer.__dict__ and not layer.weight.is_inference()  # type: ignore[operator]
    }


def park(layer: nn.Module) -> None:
    """Moves a layer's weight to host memory, pinned if it comes from a GPU. The Parameter stays the same object."""
    weight: Any = layer.weight
    # First, so that an interrupt never leaves a weight in host memory that no forward brings back.
    layer.forward = ParkedForward(layer)  # type: ignore[assignment]
    with torch.inference_mode(False), torch.no_grad():
        host = torch.empty_like(weight, device="cpu", pin_memory=weight.is_cuda, requires_grad=False)
        weight.data = host.copy_(weight)


def fetch(layer: nn.Module, device: torch.device) -> None:
    """Undoes `park`, with the weight on `device`. Waits for the copy, as other threads and streams may read it next."""
    weight: Any = layer.weight
    # A tensor made in inference mode could not be trained later.
    with torch.inference_mode(False), torch.no_grad():
        weight.data = weight.data.to(device)
    # Last, so that an interrupt and other threads find a forward that brings the weight back. One of them may be first.
    if is_parked(layer):  # else somebody has set a forward around this one meanwhile
        layer.__dict__.pop("forward", None)


def fetch_all(model: nn.Module) -> None:
    """Undoes `park` for all layers of a model, onto the device of its first Parameter that is not parked."""
    parked = [module for module in model.modules() if is_parked(module)]
    if not parked:
        return
    weights = {id(layer.weight) for layer in parked}
    device = next(parameter.device for parameter in model.parameters() if id(parameter) not in weights)
    for layer in parked:
        fetch(layer, device)
