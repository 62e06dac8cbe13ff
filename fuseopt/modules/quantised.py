"""Linear layers of pre-quantised checkpoints: their layouts, each read as a `LowBitWeight` of the same numbers.

The libraries that define such layers are not imported: classes are recognised by their full names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from fuseopt.modules import lora
from fuseopt.modules.base import full_name
from fuseopt.modules.children import CONV1D, LINEAR
from fuseopt.modules.quantised_compressed import compressed_tensors
from fuseopt.modules.quantised_gptqmodel import GPTQMODEL_LAYERS
from fuseopt.modules.quantised_torchao import TORCHAO_TENSORS
from fuseopt.modules.quantised_weight import NotRead, QuantisedWeight, require
from fuseopt.ops.low_bit import DTYPES

_CT = "compressed_tensors."
_CT_FORWARD = f"{_CT}quantization.lifecycle.forward"
_CT_HOOK = f"{_CT}compressors.model_compressors.model_compressor"
_LIBRARIES = {
    "bitsandbytes.": "bitsandbytes",
    "hqq.": "HQQ",
    "gptqmodel.": "GPTQModel",
    "torchao.": "torchao",
    "optimum.quanto.": "quanto",
    _CT: "compressed-tensors",
    "transformers.integrations.": "transformers",
}
"""Library that defines a layer or weight, by the first part of its class's full name."""


class UnreadableWeight(Exception):
    """A quantised layer that no decode step computes.

    Attributes:
        reason: why, as the end of a sentence that begins with the layer's path.
        module: the layer.
    """

    def __init__(self, reason: str, module: nn.Module) -> None:
        super().__init__(reason)
        self.reason, self.module = reason, module

    def said_of(self, model: nn.Module) -> str:
        """The reason, with the layer's path in `model`."""
        path = next((path for path, module in model.named_modules() if module is self.module), "a linear layer")
        return f"{path} {self.reason}"


def is_quantised(module: nn.Module) -> bool:
    """Whether a module, its weight, or the layer inside a LoRA layer is of a class for which this file has a reader."""
    return _reader(module) is not None


def fits(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether a module is a quantised layer that replaces a linear layer or a Conv1D, if `names` has one of these."""
    return full_name(type(module)) in GPTQMODEL_LAYERS and (LINEAR in names or CONV1D in names)


def quantised_weight(module: nn.Module) -> QuantisedWeight | None:
    """The weight of a quantised linear layer; None for a module that is not one.

    Raises:
        UnreadableWeight: the layer is quantised, and `LowBitWeight` cannot hold its weight, or a LoRA layer is around
            it.
    """
    reader = _reader(module)
    if reader is None:
        return None
    try:
        read = reader(module)
        plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in read.tensors)
        require(plain, read.layout, "its tensors are of a subclass, such as sharded ones")
        require(read.scales.dtype in DTYPES, read.layout, f"its scales are {read.scales.dtype}")
    except NotRead as reason:
        raise UnreadableWeight(str(reason), module) from None
    except (AttributeError, IndexError, TypeError) as error:
        # Another version of the library stores other attributes.
        raise UnreadableWeight(f"is quantised in a layout that fuseopt cannot read ({error})", module) from error
    return read


def quantised_weights(modules: Sequence[nn.Module]) -> tuple[QuantisedWeight, ...]:
    """The weights of layers that read the same input; empty if they are not quantised.

    Raises:
        UnreadableWeight: as `quantised_weight` does, or because one kernel cannot read the weights together.
    """
    found = [quantised_weight(module) for module in modules]
    weights = tuple(weight for weight in found if weight is not None)
    if weights and (len(weights) < len(found) or len({weight.format for weight in weights}) > 1):
        stored = ", ".join("floating point" if each is None else f"{each.layout}, {each.format}" for each in found)
        first = next(module for module, weight in zip(modules, found, strict=True) if weight is not None)
        raise UnreadableWeight(f"is not quantised like the layers that read the same input: {stored}", first)
    return weights


def described(weights: Iterable[QuantisedWeight]) -> str:
    """Numbers and layouts of layers, such as "14 pre-quantised linear layers (torchao int8)"."""
    # Both halves of a layer share its scales, and are counted once.
    layouts = Counter({id(weight.scales): weight.layout for weight in weights}.values())
    return ", ".join(f"{count} pre-quantised linear layers ({layout})" for layout, count in layouts.items())


def stored_tensors(module: nn.Module) -> tuple[Sequence[Tensor], str | None]:
    """The tensors that a quantised layer's forward reads, and None; or none, and why no decode step reads the layer."""
    try:
        weight = quantised_weight(module)
    except UnreadableWeight as error:
        return (), error.reason
    return () if weight is None else weight.tensors, None


def library_of(module: object) -> str:
    """Class and library of a quantised layer that is not read, as "is a Linear4bit of bitsandbytes, ..."; else ""."""
    weight = module._parameters.get("weight") if isinstance(module, nn.Module) else None
    for cls in (type(module), type(weight)):
        made_by = next((name for start, name in _LIBRARIES.items() if full_name(cls).startswith(start)), None)
        if made_by is not None:
            what = "is" if cls is type(module) else "has a weight that is"
            return f"{what} a {cls.__name__} of {made_by}, a layout that the decode step does not read"
    return ""


def reason_against(module: nn.Module) -> str | None:
    """Why no decode step reads a quantised layer, "" if one does; None for a module that is not quantised."""
    if is_quantised(module):
        return stored_tensors(module)[1] or ""
    return library_of(module) or None


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module's forward is the wrapper that compressed-tensors sets on a layer."""
    function = getattr(module.__dict__.get("forward"), "__func__", None)
    return getattr(function, "__globals__", {}).get("__name__") == _CT_FORWARD


def only_decompresses(model: nn.Module) -> bool:
    """Whether the only hook of a model is that of compressed-tensors, which decompresses it before its forward."""
    others = (model._forward_hooks, model._backward_hooks, model._backward_pre_hooks)
    hooks = list(model._forward_pre_hooks.values())
    return bool(hooks) and not any(others) and all(getattr(hook, "__module__", None) == _CT_HOOK for hook in hooks)


def _reader(module: nn.Module) -> Callable[[Any], QuantisedWeight] | None:
    name = full_name(type(module))
    if name == lora.LINEAR:
        return None if _reader(module.base_layer) is None else _inside_lora  # type: ignore[arg-type]
    if name != LINEAR:
        return GPTQMODEL_LAYERS.get(name)
    parameters = module._parameters
    if "weight_packed" in parameters:
        return compressed_tensors
    weight = parameters.get("weight")
    return None if type(weight) is nn.Parameter else TORCHAO_TENSORS.get(full_name(type(weight)))


def _inside_lora(module: nn.Module) -> QuantisedWeight:
    raise NotRead("is a LoRA layer around a quantised layer")
