"""Linear layers of pre-quantised checkpoints, in the layouts that the libraries document.

The classes have the full names of the libraries' classes, and forwards that compute the same.
"""

import copy
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Quantised(NamedTuple):
    """Integers [N, K], scales and zero points [N, groups], drawn at random. A zero point is the integer of weight 0."""

    integers: Tensor
    scales: Tensor
    zeros: Tensor

    def dequantised(self) -> Tensor:
        size = self.integers.shape[1] // self.scales.shape[1]
        scales, zeros = (tensor.double().repeat_interleave(size, dim=1) for tensor in (self.scales, self.zeros))
        return ((self.integers - zeros) * scales).float()


def drawn(outputs: int, inputs: int, bits: int, groups: int, symmetric: bool, dtype: torch.dtype) -> Quantised:
    low, high = (-128, 128) if bits == 8 else (0, 16)
    middle = 0 if bits == 8 else 8
    zeros = torch.full((outputs, groups), middle) if symmetric else torch.randint(low, high, (outputs, groups))
    scales = (torch.rand(outputs, groups) + 0.5) / 2 ** (bits - 1) / inputs**0.5
    return Quantised(torch.randint(low, high, (outputs, inputs)), scales.to(dtype), zeros)


def named(cls: type, name: str) -> type:
    cls.__module__, _, cls.__qualname__ = name.rpartition(".")
    return cls


def words(nibbles: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Packs nibbles [..., 8 n] into int32 [..., n]; bits 4 i to 4 i + 3 of a word are its nibble `order[i]`."""
    parts = nibbles.unflatten(-1, (-1, 8)).long()
    packed = sum(parts[..., index] << 4 * place for place, index in enumerate(order))
    return torch.where(packed >= 2**31, packed - 2**32, packed).int().contiguous()


def nibbles_of(packed: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    result = torch.empty(*packed.shape, 8, dtype=torch.int64)
    for place, index in enumerate(order):
        result[..., index] = packed.long() >> 4 * place & 15
    return result.flatten(-2)


class TorchLinear(nn.Module):
    """GPTQModel's layer for GPTQ."""

    def __init__(self, of: Quantised, bias: Tensor | None) -> None:
        super().__init__()
        (self.out_features, self.in_features), self.bits, groups = of.integers.shape, 4, of.scales.shape[1]
        self.adapter, self.linear_mode = None, None
        self.register_buffer("qweight", words(of.integers).T.contiguous())
        self.register_buffer("qzeros", words(of.zeros.T))
        self.register_buffer("scales", of.scales.T.contiguous())
        self.register_buffer("g_idx", torch.arange(self.in_features).int() // (self.in_features // groups))
        self.register_buffer("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        zeros = nibbles_of(self.qzeros)[self.g_idx.long()]
        weight = self.scales[self.g_idx.long()] * (nibbles_of(self.qweight.T).T - zeros)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, weight.T.to(input.dtype), bias)


class AwqTorchLinear(nn.Module):
    """GPTQModel's layer for AWQ."""

    def __init__(self, of: Quantised, bias: Tensor | None) -> None:
        super().__init__()
        (self.out_features, self.in_features), self.bits = of.integers.shape, 4
        self.adapter = None
        self.register_buffer("qweight", words(of.integers.T, AWQ_ORDER))
        self.register_buffer("qzeros", words(of.zeros.T, AWQ_ORDER))
        self.register_buffer("scales", of.scales.T.contiguous())
        self.register_buffer("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        size = self.in_features // len(self.scales)
        zeros, scales = (
            tensor.repeat_interleave(size, 0) for tensor in (nibbles_of(self.qzeros, AWQ_ORDER), self.scales)
        )
        weight = (nibbles_of(self.qweight, AWQ_ORDER) - zeros) * scales
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, weight.T.to(input.dtype), bias)


class WeightOnlyTensor(Tensor):
    """A tensor subclass of torchao: a weight that only F.linear takes."""

    @staticmethod
    def __new__(cls, **attributes: Any) -> "WeightOnlyTensor":
        values = attributes["qdata"]
        result = Tensor._make_wrapper_subclass(cls, values.shape, dtype=attributes["scale"].dtype)
        result.__dict__.update(attributes)
        return result

    def dequantize(self) -> Tensor:
        size = self.shape[1] // self.scale.shape[1]
        scales, zeros = (tensor.repeat_interleave(size, dim=1) for tensor in (self.scale, self.zero_point))
        return (self.qdata - zeros.to(self.dtype)) * scales

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is F.linear:
            input, weight, bias = arguments
            return F.linear(input, weight.dequantize(), bias)
        return super().__torch_function__(function, kinds, arguments, options or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, kinds: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(**arguments[0].__dict__)
        raise NotImplementedError(f"{cls.__name__}: {function}")

    def __deepcopy__(self, memo: Any) -> "WeightOnlyTensor":
        copied = type(self)(**copy.deepcopy(self.__dict__, memo))
        return nn.Parameter(copied, requires_grad=False) if isinstance(self, nn.Parameter) else copied


class Int8Tensor(WeightOnlyTensor):
    pass


class IntxUnpackedToInt8Tensor(WeightOnlyTensor):
    pass


class Int4Tensor(WeightOnlyTensor):
    pass


named(TorchLinear, "gptqmodel.nn_modules.qlinear.torch.TorchLinear")
named(AwqTorchLinear, "gptqmodel.nn_modules.qlinear.torch_awq.AwqTorchLinear")
for _cls in (Int8Tensor, IntxUnpackedToInt8Tensor, Int4Tensor):
    named(_cls, f"torchao.quantization.{_cls.__name__}")


def _linear(of: Quantised, bias: Tensor | None, weight: Tensor) -> nn.Linear:
    layer = nn.Linear(of.integers.shape[1], of.integers.shape[0], bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.bias = None if bias is None else nn.Parameter(bias)
    return layer


def torchao_int8(of: Quantised, bias: Tensor | None) -> nn.Module:
    values = {"qdata": of.integers.to(torch.int8), "scale": of.scales, "zero_point": of.zeros.to(torch.int8)}
    return _linear(of, bias, Int8Tensor(**values, act_quant_kwargs=None, act_pre_scale=None))


def torchao_int4(of: Quantised, bias: Tensor | None) -> nn.Module:
    values = {"qdata": (of.integers - 8).to(torch.int8), "zero_point": (of.zeros - 8).to(torch.int8)}
    kind = {"target_dtype": torch.int4, "activation_quantization": None}
    return _linear(of, bias, IntxUnpackedToInt8Tensor(**values, **kind, scale=of.scales))


# What compressed-tensors puts around the forward of a torch.nn.Linear: known by the module that it was written in.
_FORWARD = """
import torch

def quantized_forward(self, input):
    if "weight" not in self._parameters:
        raise RuntimeError("the model's hook decompresses before this forward")
    return torch.nn.functional.linear(input, self.weight, self.bias)
"""
_forward_globals = {"__name__": "compressed_tensors.quantization.lifecycle.forward"}
exec(_FORWARD, _forward_globals)


def compressed_tensors(of: Quantised, bias: Tensor | None) -> nn.Module:
    layer = _linear(of, bias, torch.zeros(()))
    del layer.weight
    symmetric = bool((of.zeros == 8).all())
    stored = {"packed": words(of.integers), "scale": of.scales, "shape": torch.tensor(of.integers.shape)}
    if not symmetric:
        padded = F.pad(of.zeros, (0, 0, 0, -len(of.zeros) % 8))
        stored["zero_point"] = words(padded.T).T.contiguous()
    for name, tensor in stored.items():
        layer.register_parameter(f"weight_{name}", nn.Parameter(tensor, requires_grad=False))
    weights = types.SimpleNamespace(num_bits=4, type="int", symmetric=symmetric)
    layer.quantization_scheme = types.SimpleNamespace(weights=weights, input_activations=None, output_activations=None)
    layer.forward = types.MethodType(_forward_globals["quantized_forward"], layer)
    return layer


def _decompress(model: nn.Module, arguments: Any) -> None:
    """The hook that compressed-tensors has on a model whose linear layers are packed."""
    model._forward_pre_hooks.clear()
    for module in model.modules():
        if "weight_packed" in module._parameters:
            packed, scales = module.weight_packed, module.weight_scale
            zeros = torch.full_like(scales, 8)
            if not module.quantization_scheme.weights.symmetric:
                zeros = nibbles_of(module.weight_zero_point.T).T[: len(packed)]
            del module.weight_packed
            module.weight = nn.Parameter(Quantised(nibbles_of(packed), scales, zeros).dequantised())


_decompress.__module__ = "compressed_tensors.compressors.model_compressors.model_compressor"


LAYOUTS: dict[str, Callable[[Quantised, Tensor | None], nn.Module]] = {
    "torchao int8": torchao_int8,
    "torchao int4": torchao_int4,
    "GPTQ int4": TorchLinear,
    "AWQ int4": AwqTorchLinear,
    "compressed-tensors int4": compressed_tensors,
}


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((path, module) for path, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D)))


def checkpoint(
    model: nn.Module,
    layout: str,
    *,
    group: int = 32,
    symmetric: bool = False,
    dtype: torch.dtype = torch.float32,
    keep: Callable[[str], bool] = lambda path: path.endswith("lm_head"),
) -> tuple[nn.Module, nn.Module]:
    """`model` with quantised linear layers of random weights, and a stock copy with the dequantised weights.

    Args:
        group: inputs that share a scale; 0 for all of them. Without effect on int8.
        dtype: of scales and biases.
        keep: whether the layer of a path is not quantised.
    """
    bits = int(layout[-1])
    dense = copy.deepcopy(model)
    for path, module in list(linears(model)):
        if keep(path):
            continue
        stored_by_input = isinstance(module, Conv1D)
        inputs, outputs = module.weight.shape if stored_by_input else module.weight.shape[::-1]
        groups = 1 if bits == 8 or not group else inputs // group
        of = drawn(outputs, inputs, bits, groups, symmetric or bits == 8, dtype)
        bias = None if module.bias is None else module.bias.detach().to(dtype)
        model.set_submodule(path, LAYOUTS[layout](of, bias).eval())
        weight = of.dequantised().to(module.weight.dtype)
        dense.get_submodule(path).weight = nn.Parameter(weight.T.contiguous() if stored_by_input else weight)
        if bias is not None:
            dense.get_submodule(path).bias = nn.Parameter(bias.to(module.weight.dtype))
    if layout.startswith("compressed-tensors"):
        model.register_forward_pre_hook(_decompress)
    return model, dense
