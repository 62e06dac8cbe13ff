"""LoRA layers of peft around a model's linear layers: which updates they add, and what the decode step does not cover.

peft is not imported: its classes are known by name, and its layers' attributes are those of `peft.tuners.lora.layer`.
Source: https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from fuseopt.modules.base import full_name, source_class

LINEAR = "peft.tuners.lora.layer.Linear"
MAX_RANK = 256
"""Of all active adapters of a layer together."""


class Update(NamedTuple):
    """`scale * b @ a` is added to a linear layer's weight [N, K].

    Attributes:
        a: [rank, K].
        b: [N, rank].
        scale: a tensor without dimensions if the layer has been prepared for peft's `hotswap_adapter`.
    """

    a: Tensor
    b: Tensor
    scale: float | Tensor


def is_lora_linear(module: object) -> bool:
    """Whether `module` is exactly peft's LoRA layer around a linear layer."""
    return full_name(type(module)) == LINEAR


def fits(module: Any, names: Sequence[str]) -> bool:
    """Whether a module is a LoRA layer around a layer of one of the classes `names`."""
    return is_lora_linear(module) and full_name(source_class(module.base_layer)) in names


def capacity(layer: Any) -> int:
    """The rank that a layer's updates need at most while one adapter is active, or that the active ones need now.

    0 without adapters. `layer.r` is less where peft has padded the factors, for `hotswap_adapter`.
    """
    ranks = {name: len(a.weight) for name, a in layer.lora_A.items() if type(a) is nn.Linear}
    return max(sum(ranks.get(name, 0) for name in layer.active_adapters), *ranks.values(), 0)


def state_of(layer: nn.Module) -> tuple[Any, ...]:
    """What decides on a layer's updates besides its modules; equal if that has not changed."""
    state = layer.__dict__
    active = state["_active_adapter"]
    return (
        active if isinstance(active, str) else tuple(active),
        state["_disable_adapters"],
        tuple(state["merged_adapters"]),
        tuple(state["scaling"].items()),
        tuple(state["lora_variant"]),
    )


def updates(layer: Any) -> list[Update]:
    """What the layer's forward adds now; nothing if its adapters are disabled or merged into the weight."""
    if layer.disable_adapters or layer.merged:
        return []
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    return [Update(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]) for name in active]


def reasons(layer: Any) -> Iterator[str]:
    """Why the layer's forward computes something else than its linear layer and `updates`, in words that follow a
    path."""
    if layer.disable_adapters and layer.merged:
        yield "has disabled adapters, which its forward unmerges first"
    for name in layer.active_adapters if not (layer.disable_adapters or layer.merged) else ():
        if name not in layer.lora_A:
            continue
        variant = layer.lora_variant.get(name)
        if variant is not None:
            yield f"has the adapter {name!r} of another kind, {type(variant).__name__.removesuffix('Variant')}"
        parts = layer.lora_A[name], layer.lora_B[name]
        if any(type(part) is not nn.Linear for part in parts):
            yield f"has the adapter {name!r}, whose factors are not torch.nn.Linear"
        elif any(part.bias is not None for part in parts):
            yield f"has the adapter {name!r} with a bias of its own"
        if type(layer.lora_dropout[name]) not in (nn.Dropout, nn.Identity):
            yield f"has the adapter {name!r}, whose dropout is a {type(layer.lora_dropout[name]).__name__}"
    if capacity(layer) > MAX_RANK:
        yield f"has adapters of rank {capacity(layer)}, more than {MAX_RANK}"


class LoraLayers:
    """The LoRA layers among the modules that a step was built from, and what depends on their active adapters.

    Attributes:
        layers: by path.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.layers = layers
        self._state: list[tuple[Any, ...]] | None = None
        self._reason: str | None = None
        self._capacities: tuple[int, ...] = ()

    def look(self) -> tuple[str | None, tuple[int, ...]]:
        """Why their forwards compute something else than `updates`, or None; and the `capacity` of each."""
        state = [state_of(layer) for layer in self.layers.values()]
        if state != self._state:
            found = (f"{path} {reason}" for path, layer in self.layers.items() for reason in reasons(layer))
            self._state, self._reason = state, next(found, None)
            self._capacities = tuple(map(capacity, self.layers.values()))
        return self._reason, self._capacities

    def versions(self) -> tuple[Hashable, ...]:
        """Differs if the layers' updates differ in anything but the values of the factors."""
        return tuple(part for layer in self.layers.values() for part in map(_versioned, state_of(layer)))


def _versioned(part: Any) -> Hashable:
    """`part` of a layer's state, with a scale that is a tensor as its address and version."""
    if isinstance(part, tuple):
        return tuple(map(_versioned, part))
    return (part.data_ptr(), part._version) if isinstance(part, Tensor) else part


def described(layers: Mapping[str, nn.Module], unread: str | None = None) -> str:
    """Ranks, number, and who adds the updates, such as "LoRA of rank 16 on 14 linear layers, in the step".

    Args:
        unread: why no step reads the layers, if that is known.
    """
    found: list[Any] = list(layers.values())
    ranks = sorted({rank for layer in found for rank in layer.r.values()}) or [0]
    of = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    reason = unread or LoraLayers(layers).look()[0]
    where = "in the step" if reason is None else f"by transformers: {reason}"
    return f"LoRA of {of} on {len(found)} linear layer{'s' if len(found) > 1 else ''}, {where}"


def kind_of(module: object) -> str:
    """What peft has put in a module's place, in words that follow a path; empty for a module that is not peft's."""
    name = full_name(source_class(module)) if isinstance(module, nn.Module) else ""
    if name.startswith("peft.tuners.lora."):
        return f"is a LoRA layer of peft around no plain linear layer ({type(module).__name__})"
    if name.startswith("peft.tuners."):
        return f"is a layer of peft's {name.split('.')[2]}, which the decode step does not apply"
    return f"is a {type(module).__name__} of peft" if name.startswith("peft.") else ""
