"""Parameters whose values are in host memory while decode steps read quantised copies of them.

A parked layer keeps its Parameter, so `state_dict`, `save_pretrained` and edits work as before. Its forward on the
instance is a `ParkedForward`, by which other code sees that it must not read the weight past the layer's forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fuseopt.runtime.references import weak_attribute


class ParkedForward:
    """Forward of a parked layer: brings the weight back to the device of its input, then runs the class's forward.

    Refers weakly to its layer, and is copied and pickled with it.
    """

    layer = weak_attribute("layer")

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
    """Those of `layers` of a model that alone hold their weight, have the forward of their class, and whose weight was
    made outside of inference mode."""
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
    """Undoes `park` of all layers of a model, whose other Parameters say to which device weights belong."""
    parked = [module for module in model.modules() if is_parked(module)]
    if not parked:
        return
    weights = {id(layer.weight) for layer in parked}
    device = next(parameter.device for parameter in model.parameters() if id(parameter) not in weights)
    for layer in parked:
        fetch(layer, device)
