"""Readers of the weights of torchao, which are Parameters of a tensor subclass. torchao is not imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fuseopt.modules.quantised_weight import (
    NotRead,
    QuantisedWeight,
    check_device,
    group_size,
    int4_weight,
    int8_weight,
    made,
    require,
)
from fuseopt.ops.low_bit import LowBitWeight


def _torchao_int8(module: nn.Linear) -> QuantisedWeight:
    layout, weight = "torchao int8", _torchao_weight("torchao int8", module, "act_quant_kwargs", "act_pre_scale")
    scales, zeros, (outputs, inputs) = weight.scale, weight.zero_point, weight.qdata.shape
    require(scales.shape in ((outputs, 1), (1, 1)), layout, "only a scale for each output is read, not for groups")
    require(zeros is None or not bool(zeros.any()), layout, "it has zero points")
    tensors = (scales, weight.qdata, *(() if zeros is None else (zeros,)))
    return made(layout, module, (outputs, inputs), 8, inputs, tensors, lambda: int8_weight(weight.qdata, scales))


def _torchao_intx(module: nn.Linear) -> QuantisedWeight:
    weight = _torchao_weight("torchao intx", module, "activation_quantization")
    scales, zeros, values = weight.scale, weight.zero_point, weight.qdata
    bits = {torch.int4: 4, torch.int8: 8}.get(weight.target_dtype, 0)
    layout = f"torchao int{bits}" if bits else "torchao intx"
    require(bits > 0, layout, f"values of {weight.target_dtype} are not read")
    require(scales.shape == zeros.shape, layout, "its scales and zero points have other shapes")
    in_range = zeros.dtype is torch.int8 and bool(((zeros >= -8) & (zeros < 8)).all())
    require(in_range, layout, "its zero points are not integers of 4 bits")
    outputs, inputs = values.shape
    tensors, shape = (scales, values, zeros), (outputs, inputs)
    if bits == 8:
        require(scales.shape == (outputs, 1), layout, "only a scale for each output is read, not for groups")
        require(not bool(zeros.any()), layout, "it has zero points")
        return made(layout, module, shape, 8, inputs, tensors, lambda: int8_weight(values, scales))
    require(len(scales) == outputs, layout, "its scales are not for each output")
    group = group_size(layout, inputs, scales.shape[1])

    def read() -> LowBitWeight:
        return int4_weight(group, (values + 8).to(torch.uint8), scales, (zeros + 8).to(torch.uint8))

    return made(layout, module, shape, 4, group, tensors, read)


def _floating_zeros(module: nn.Linear) -> QuantisedWeight:
    raise NotRead("is quantised (torchao int4): its zero points are floating point, not integers")


def _torchao_weight(layout: str, module: nn.Linear, *unset: str) -> Any:
    weight: Any = module.weight
    check_device(layout, weight.device)
    require(weight.dim() == 2, layout, f"its weight has {weight.dim()} dimensions")
    for name in unset:
        # Versions of torchao that lack the attribute cannot do what it stands for.
        require(getattr(weight, name, None) is None, layout, f"its input is quantised or scaled too ({name})")
    return weight


TORCHAO_TENSORS: dict[str, Callable[[Any], QuantisedWeight]] = {
    "torchao.quantization.Int8Tensor": _torchao_int8,
    "torchao.quantization.Int4Tensor": _floating_zeros,
    "torchao.quantization.IntxUnpackedToInt8Tensor": _torchao_intx,
    "torchao.prototype.quantization.int4.int4_opaque_tensor.Int4OpaqueTensor": _floating_zeros,
}
"""Full name of the class of a torch.nn.Linear's weight -> what reads it."""
