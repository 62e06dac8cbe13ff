"""What users do to modules inside a model: adapters, subclasses, quantised leaves, parametrisations, hooks."""

from __future__ import annotations

import copy
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers.utils import ModelOutput

Surgery = Callable[[nn.Module, str, type[nn.Module]], None]
"""Called with a model, the path of a module in it, and the class of that module in stock transformers."""

FACTOR = 1.5


class Inapplicable(Exception):
    """This cannot be done to the module."""


def lora(model: nn.Module, path: str, stock: type[nn.Module], **options: bool) -> None:
    peft = _peft_for(stock)
    if stock is nn.Embedding and options:
        raise Inapplicable
    transposed = stock.__name__ == "Conv1D"
    config = peft.LoraConfig(
        r=2, target_modules=re.escape(path), init_lora_weights=False, fan_in_fan_out=transposed, **options
    )
    _inject(config, model)


def dora(model: nn.Module, path: str, stock: type[nn.Module]) -> None:
    lora(model, path, stock, use_dora=True)


def ia3(model: nn.Module, path: str, stock: type[nn.Module]) -> None:
    peft = _peft_for(stock)
    if stock is nn.Embedding:
        raise Inapplicable
    transposed = stock.__name__ == "Conv1D"
    pattern = re.escape(path)
    config = peft.IA3Config(
        target_modules=pattern, feedforward_modules=pattern, init_ia3_weights=False, fan_in_fan_out=transposed
    )
    _inject(config, model)


def subclass(model: nn.Module, path: str, stock: type[nn.Module]) -> None:
    """Replaces a module by a subclass with its own forward, on the same Parameters."""

    class Changed(stock):
        def forward(self, *args, **kwargs):
            return changed(super().forward(*args, **kwargs))

    child, made = model.get_submodule(path), Changed.__new__(Changed)
    made.__dict__.update(child.__dict__)
    made.__dict__.pop("forward", None)
    for name in ("_parameters", "_buffers", "_modules"):
        made.__dict__[name] = dict(child.__dict__[name])
    model.set_submodule(path, made)


def another_class(model: nn.Module, path: str, stock: type[nn.Module]) -> None:
    """Replaces a module by one of another class, whose `weight` and `bias` have another meaning."""

    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            for name, parameter in inner.named_parameters(recurse=False):
                setattr(self, name, parameter)

        def forward(self, *args, **kwargs):
            return changed(self.inner(*args, **kwargs))

    model.set_submodule(path, Wrapped(model.get_submodule(path)))


def misplaced(model: nn.Module, path: str, stock: type[nn.Module]) -> None:
    """Replaces a module by one of a class that the model has elsewhere, or by one with other parameters."""
    child = model.get_submodule(path)
    torch.manual_seed(0)
    if stock.__name__ == "Conv1D":
        made = nn.Linear(*child.weight.shape)
    elif stock is nn.Linear:
        made = nn.Linear(*reversed(child.weight.shape), bias=child.bias is None)
    elif stock is nn.Dropout:
        made = nn.Tanh()
    elif child._modules or stock is nn.Embedding:
        raise Inapplicable
    else:
        made = nn.Dropout(0.0)
    model.set_submodule(path, made.train(child.training))


def quantised(model: nn.Module, path: str, stock: type[nn.Module]) -> None:
    """Replaces a leaf by one that has int8 weights of another name and no `weight`."""

    class Quantised(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.register_buffer("scale", inner.weight.detach().abs().max() / 127)
            self.register_buffer("rounded", (inner.weight.detach() / self.scale).round().to(torch.int8))
            object.__setattr__(self, "plain", copy.copy(inner))

        def forward(self, *args, **kwargs):
            weight = {"weight": self.rounded * self.scale}
            return torch.func.functional_call(self.plain, weight, args, kwargs)

    child = model.get_submodule(path)
    if not isinstance(child._parameters.get("weight"), nn.Parameter) or child._modules:
        raise Inapplicable
    made = stock.__new__(stock)
    made.__dict__.update(child.__dict__, _parameters=dict(child._parameters))
    model.set_submodule(path, Quantised(made).train(child.training))


class RoundedWeight(Tensor):
    """A quantised weight as torchao has it: a subclass whose values are made when an operation reads it."""

    @staticmethod
    def __new__(cls, rounded: Tensor, scale: Tensor) -> RoundedWeight:
        made = Tensor._make_wrapper_subclass(cls, rounded.shape, dtype=scale.dtype, device=rounded.device)
        made.rounded, made.scale = rounded, scale
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].rounded, args[0].scale)
        if func.namespace == "fuseopt":
            raise NotImplementedError(f"RoundedWeight does not implement {func}")
        plain = tree_map_only(cls, lambda tensor: tensor.rounded * tensor.scale, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def tensor_subclass(model: nn.Module, path: str, stock: type[nn.Module]) -> None:
    """Quantises the weight, in a module of the same class."""
    child = model.get_submodule(path)
    weight = child._parameters.get("weight")
    if weight is None or child._modules:
        raise Inapplicable
    scale = weight.detach().abs().max() / 127
    rounded = (weight.detach() / scale).round().to(torch.int8)
    child.weight = nn.Parameter(RoundedWeight(rounded, scale), requires_grad=False)


class _Scaled(nn.Module):
    def forward(self, weight):
        return FACTOR * weight


def parametrised(model: nn.Module, path: str, stock: type[nn.Module]) -> None:
    child = model.get_submodule(path)
    if not isinstance(child._parameters.get("weight"), nn.Parameter):
        raise Inapplicable
    nn.utils.parametrize.register_parametrization(child, "weight", _Scaled())


def hook(model: nn.Module, path: str, stock: type[nn.Module]) -> None:
    model.get_submodule(path).register_forward_hook(lambda module, args, output: changed(output))


def backward_hook(model: nn.Module, path: str, stock: type[nn.Module]) -> None:
    model.get_submodule(path).register_full_backward_hook(lambda module, into, out: changed(into))


def own_forward(model: nn.Module, path: str, stock: type[nn.Module]) -> None:
    child = model.get_submodule(path)
    inner = child.forward
    child.forward = lambda *args, **kwargs: changed(inner(*args, **kwargs))


SURGERIES: dict[str, Surgery] = {
    function.__name__: function
    for function in (
        lora,
        dora,
        ia3,
        subclass,
        another_class,
        misplaced,
        quantised,
        tensor_subclass,
        parametrised,
        hook,
        backward_hook,
        own_forward,
    )
}


def changed(output: object) -> object:
    """The output of a module with its first floating-point tensor changed, as neither scaling nor dropout undoes."""
    if isinstance(output, tuple):
        return (changed(output[0]), *output[1:])
    if isinstance(output, ModelOutput):
        output.last_hidden_state = changed(output.last_hidden_state)
        return output
    return FACTOR * output + 0.125


def _peft_for(stock: type[nn.Module]) -> Any:
    if not importlib.util.find_spec("peft") or not (stock in (nn.Linear, nn.Embedding) or stock.__name__ == "Conv1D"):
        raise Inapplicable
    import peft

    return peft


def _inject(config: Any, model: nn.Module) -> None:
    from peft import inject_adapter_in_model

    torch.manual_seed(0)
    inject_adapter_in_model(config, model)
