"""Linear layers of pre-quantised checkpoints: their layouts, each read as a `LowBitWeight` of the same numbers.

The libraries that define such layers are not imported: classes are recognised by their full names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fuseopt.modules import lora
from fuseopt.modules.base import full_name
from fuseopt.modules.children import CONV1D, LINEAR
from fuseopt.ops.low_bit import DTYPES, GROUPS, LowBitWeight, no_kernel_reason, pack, unpack

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
"""Prefix of a class's full name -> the library that defines layers or weights of that class."""


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


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """The weight [N, K] of a linear layer, as its checkpoint stores it.

    Attributes:
        layout: library or method, and dtype, such as "AWQ int4".
        shape: (N, K).
        bits, group: those of the LowBitWeight that `read` returns.
        scales: in the shape of the layout; float32, bfloat16 or float16.
        tensors: all that the layer's forward reads, with its bias.
        whole: reads the LowBitWeight of all outputs of the layer.
        begin, end: the range of these outputs that is this object's weight; `end` is None for the last.
    """

    layout: str
    shape: tuple[int, int]
    bits: int
    group: int
    scales: Tensor
    tensors: tuple[Tensor, ...]
    whole: Callable[[], LowBitWeight]
    begin: int = 0
    end: int | None = None

    @property
    def format(self) -> str:
        """Must be equal for weights that one kernel reads together: "groups of 128, scales of torch.float16"."""
        groups = f"groups of {self.group}, " if self.bits == 4 else ""
        return f"{groups}scales of {self.scales.dtype}"

    def halves(self) -> tuple[QuantisedWeight, QuantisedWeight]:
        """The weights of the first and of the second half of the outputs."""
        middle, inputs = self.shape[0] // 2, self.shape[1]
        last = replace(self, shape=(self.shape[0] - middle, inputs), begin=middle)
        return replace(self, shape=(middle, inputs), end=middle), last

    def read(self) -> LowBitWeight:
        """The weight as kernels read it; int4 values are copies."""
        values, scales, zeros, bits, group = self.whole()
        rows = slice(self.begin, self.end)
        return LowBitWeight(values[rows], scales[rows], None if zeros is None else zeros[rows], bits, group)

    def stand_in(self, dtype: torch.dtype | None = None) -> Tensor:
        """A placeholder [N, K] that expands one NaN, so any use of its values shows.

        Args:
            dtype: None for that of the scales.
        """
        return self.scales.new_full((), torch.nan, dtype=dtype).expand(self.shape)


def is_quantised(module: nn.Module) -> bool:
    """Whether a module, its weight, or the layer inside a LoRA layer is of a class for which this file has a reader."""
    return _reader(module) is not None


def fits(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether a module is a quantised layer that replaces a linear layer or a Conv1D, if `names` has one of these."""
    return full_name(type(module)) in _MODULES and (LINEAR in names or CONV1D in names)


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
        _require(plain, read.layout, "its tensors are of a subclass, such as sharded ones")
        _require(read.scales.dtype in DTYPES, read.layout, f"its scales are {read.scales.dtype}")
    except _NotRead as reason:
        raise UnreadableWeight(str(reason), module) from None
    except (AttributeError, IndexError, TypeError) as error:
        # Another version of the library stores other attributes.
        raise UnreadableWeight(f"is quantised, and laid out otherwise than is known here ({error})", module) from error
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
        return _MODULES.get(name)
    parameters = module._parameters
    if "weight_packed" in parameters:
        return _compressed_tensors
    weight = parameters.get("weight")
    return None if type(weight) is nn.Parameter else _TENSORS.get(full_name(type(weight)))


def _inside_lora(module: nn.Module) -> QuantisedWeight:
    raise _NotRead("is a LoRA layer around a quantised layer")


class _NotRead(Exception):
    pass


def _require(condition: bool, layout: str, reason: str) -> None:
    if not condition:
        raise _NotRead(f"is quantised ({layout}): {reason}")


def _check_device(layout: str, device: torch.device) -> None:
    reason = "its tensors have no data" if device.type == "meta" else no_kernel_reason(device)
    _require(reason is None, layout, reason or "")


def _group(layout: str, inputs: int, groups: int) -> int:
    """The group size of the LowBitWeight: stored groups that are larger are split into several of equal scales."""
    size = inputs // max(groups, 1)
    fits = size * groups == inputs and size % GROUPS[0] == 0 and size > 0
    _require(fits, layout, f"its {groups} groups of {inputs} inputs are not of a multiple of {GROUPS[0]} inputs")
    return max(group for group in GROUPS if size % group == 0)


def _int4(group: int, nibbles: Tensor, scales: Tensor, zeros: Tensor | None) -> LowBitWeight:
    """The weight of nibbles uint8 [N, K], and scales and zero points [N, groups of at least `group` inputs]."""
    parts = nibbles.shape[1] // scales.shape[1] // group
    scales = scales.detach().repeat_interleave(parts, dim=1)
    if zeros is not None:
        zeros = None if bool((zeros == 8).all()) else zeros.repeat_interleave(parts, dim=1)
    return LowBitWeight(pack(nibbles), scales, zeros, 4, group)


def _int8(values: Tensor, scales: Tensor) -> LowBitWeight:
    """The weight of values int8 [N, K], and scales [N, 1], or [1, 1] for all outputs."""
    spread = scales.detach().float().expand(len(values), 1)
    return LowBitWeight(values.contiguous(), spread.contiguous(), None, 8, values.shape[1])


def _in_order(words: Tensor) -> Tensor:
    """int32 [..., n] -> uint8 [..., 8 n]: the nibbles of each word, the lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & 15).to(torch.uint8).flatten(-2)


def _torchao_int8(module: nn.Linear) -> QuantisedWeight:
    layout, weight = "torchao int8", _torchao_weight("torchao int8", module, "act_quant_kwargs", "act_pre_scale")
    scales, zeros, (outputs, inputs) = weight.scale, weight.zero_point, weight.qdata.shape
    _require(scales.shape in ((outputs, 1), (1, 1)), layout, "only a scale for each output is read, not for groups")
    _require(zeros is None or not bool(zeros.any()), layout, "it has zero points")
    tensors = (scales, weight.qdata, *(() if zeros is None else (zeros,)))
    return _weight(layout, module, (outputs, inputs), 8, inputs, tensors, lambda: _int8(weight.qdata, scales))


def _torchao_intx(module: nn.Linear) -> QuantisedWeight:
    weight = _torchao_weight("torchao intx", module, "activation_quantization")
    scales, zeros, values = weight.scale, weight.zero_point, weight.qdata
    bits = {torch.int4: 4, torch.int8: 8}.get(weight.target_dtype, 0)
    layout = f"torchao int{bits}" if bits else "torchao intx"
    _require(bits > 0, layout, f"values of {weight.target_dtype} are not read")
    _require(scales.shape == zeros.shape, layout, "its scales and zero points have other shapes")
    in_range = zeros.dtype is torch.int8 and bool(((zeros >= -8) & (zeros < 8)).all())
    _require(in_range, layout, "its zero points are not integers of 4 bits")
    outputs, inputs = values.shape
    tensors, shape = (scales, values, zeros), (outputs, inputs)
    if bits == 8:
        _require(scales.shape == (outputs, 1), layout, "only a scale for each output is read, not for groups")
        _require(not bool(zeros.any()), layout, "it has zero points")
        return _weight(layout, module, shape, 8, inputs, tensors, lambda: _int8(values, scales))
    _require(len(scales) == outputs, layout, "its scales are not for each output")
    group = _group(layout, inputs, scales.shape[1])

    def read() -> LowBitWeight:
        return _int4(group, (values + 8).to(torch.uint8), scales, (zeros + 8).to(torch.uint8))

    return _weight(layout, module, shape, 4, group, tensors, read)


def _floating_zeros(module: nn.Linear) -> QuantisedWeight:
    raise _NotRead("is quantised (torchao int4): its zero points are floating point, not integers")


def _torchao_weight(layout: str, module: nn.Linear, *unset: str) -> Any:
    weight: Any = module.weight
    _check_device(layout, weight.device)
    _require(weight.dim() == 2, layout, f"its weight has {weight.dim()} dimensions")
    for name in unset:
        # Versions of torchao that lack the attribute cannot do what it stands for.
        _require(getattr(weight, name, None) is None, layout, f"its input is quantised or scaled too ({name})")
    return weight


def _gptq(module: Any) -> QuantisedWeight:
    layout = _check_packed("GPTQ", module)
    qweight, qzeros, scales, g_idx = module.qweight, module.qzeros, module.scales, module.g_idx
    inputs, outputs = module.in_features, module.out_features
    groups, of_inputs = len(scales), torch.arange(inputs, device=g_idx.device)
    _require(qweight.shape == (inputs // 8, outputs), layout, f"its qweight has shape {tuple(qweight.shape)}")
    group = _group(layout, inputs, groups)
    in_order = g_idx.shape == (inputs,) and bool((g_idx == of_inputs // (inputs // groups)).all())
    _require(in_order, layout, "g_idx orders its groups by activations (desc_act)")

    def read() -> LowBitWeight:
        # Zero points are used as GPTQModel stores them after loading (format 2).
        return _int4(group, _in_order(qweight.T), scales.T, _in_order(qzeros).T)

    return _weight(layout, module, (outputs, inputs), 4, group, (scales, qweight, qzeros, g_idx), read)


def _awq(module: Any) -> QuantisedWeight:
    layout = _check_packed("AWQ", module)
    qweight, qzeros, scales = module.qweight, module.qzeros, module.scales
    inputs, outputs = module.in_features, module.out_features
    _require(qweight.shape == (inputs, outputs // 8), layout, f"its qweight has shape {tuple(qweight.shape)}")
    group = _group(layout, inputs, len(scales))

    def read() -> LowBitWeight:
        # A word has eight outputs, in the order of the inputs in a word of LowBitWeight.
        return _int4(group, unpack(qweight).T, scales.T, unpack(qzeros).T)

    return _weight(layout, module, (outputs, inputs), 4, group, (scales, qweight, qzeros), read)


def _check_packed(method: str, module: Any) -> str:
    """The layout of a GPTQModel layer; raises _NotRead unless its weight has 4 bits and no kernel has repacked it."""
    layout = f"{method} int{module.bits}"
    _check_device(layout, module.qweight.device)
    repacked = getattr(module, "linear_mode", None) not in (None, "train") or getattr(module, "transformed", False)
    _require(module.bits == 4, layout, "only 4 bits are read")
    _require(not repacked, layout, "its forward has repacked it for a kernel")
    _require(module.qweight.dtype is torch.int32, layout, f"it is packed into {module.qweight.dtype}")
    _require(getattr(module, "adapter", None) is None, layout, "it has an adapter")
    _require(getattr(module, "had_K", None) is None, layout, "its input is rotated")
    scales, zeros, outputs = module.scales.shape, module.qzeros.shape, module.out_features
    in_words = scales == (scales[0], outputs) and zeros == (scales[0], outputs // 8) and outputs % 8 == 0
    _require(in_words, layout, f"its scales and qzeros have shapes {tuple(scales)} and {tuple(zeros)}")
    return layout


def _compressed_tensors(module: Any) -> QuantisedWeight:
    scheme, parameters = module.quantization_scheme, module._parameters
    of, layout = scheme.weights, f"compressed-tensors int{scheme.weights.num_bits}"
    packed, scales, zeros = (parameters.get(f"weight_{name}") for name in ("packed", "scale", "zero_point"))
    _check_device(layout, packed.device)
    _require(of.num_bits == 4 and of.type == "int", layout, "only packed int4 is read")
    activations = scheme.input_activations is None and scheme.output_activations is None
    _require(activations, layout, "its activations are quantised too")
    _require("weight_g_idx" not in parameters, layout, "weight_g_idx orders its groups by activations")
    outputs, inputs = module.out_features, module.in_features
    _require(packed.shape == (outputs, inputs // 8), layout, f"weight_packed has shape {tuple(packed.shape)}")
    _require(scales.dim() == 2 and len(scales) == outputs, layout, "its scales are not for each output")
    group = _group(layout, inputs, scales.shape[1])
    expected = None if of.symmetric else (-(-outputs // 8), scales.shape[1])
    found = None if zeros is None else tuple(zeros.shape)
    _require(found == expected, layout, f"weight_zero_point has shape {found}, not {expected}")

    def read() -> LowBitWeight:
        of_groups = None if zeros is None else _in_order(zeros.T).T[:outputs]
        return _int4(group, _in_order(packed), scales, of_groups)

    tensors = (scales, packed, *(() if zeros is None else (zeros,)))
    return _weight(layout, module, (outputs, inputs), 4, group, tensors, read)


def _weight(
    layout: str,
    module: Any,
    shape: tuple[int, int],
    bits: int,
    group: int,
    tensors: tuple[Tensor, ...],
    read: Callable[[], LowBitWeight],
) -> QuantisedWeight:
    # The scales come first; the bias is added here.
    bias = () if module.bias is None else (module.bias,)
    return QuantisedWeight(layout, shape, bits, group, tensors[0], (*tensors, *bias), read)


_QLINEAR = "gptqmodel.nn_modules.qlinear"
_GPTQ_CLASSES = (
    *("torch.TorchLinear", "torch.TorchQuantLinear", "torch_fused.TorchFusedLinear"),
    *("torch_fused.TorchFusedQuantLinear", "torch_aten_kernel.TorchAtenLinear"),
)
_AWQ_CLASSES = (
    *("torch_awq.AwqTorchLinear", "torch_awq.AwqTorchQuantLinear", "torch_fused_awq.TorchFusedAwqLinear"),
    *("torch_fused_awq.TorchFusedAwqQuantLinear", "torch_aten_kernel_awq.TorchAtenAwqLinear"),
)
_MODULES: dict[str, Callable[[Any], QuantisedWeight]] = {
    **{f"{_QLINEAR}.{name}": _gptq for name in _GPTQ_CLASSES},
    **{f"{_QLINEAR}.{name}": _awq for name in _AWQ_CLASSES},
}
"""Full name of a layer's class -> what reads its weight. GPTQModel has renamed its classes."""
_TENSORS: dict[str, Callable[[Any], QuantisedWeight]] = {
    "torchao.quantization.Int8Tensor": _torchao_int8,
    "torchao.quantization.Int4Tensor": _floating_zeros,
    "torchao.quantization.IntxUnpackedToInt8Tensor": _torchao_intx,
    "torchao.prototype.quantization.int4.int4_opaque_tensor.Int4OpaqueTensor": _floating_zeros,
}
"""Full name of the class of a torch.nn.Linear's weight -> what reads it."""
