"""Readers of the layers of GPTQModel: GPTQ and AWQ. GPTQModel is not imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fuseopt.modules.quantised_weight import (
    QuantisedWeight,
    check_device,
    group_size,
    int4_weight,
    made,
    require,
    unpack_in_order,
)
from fuseopt.ops.low_bit import LowBitWeight, unpack


def _gptq(module: Any) -> QuantisedWeight:
    layout = _check_packed("GPTQ", module)
    qweight, qzeros, scales, g_idx = module.qweight, module.qzeros, module.scales, module.g_idx
    inputs, outputs = module.in_features, module.out_features
    groups, of_inputs = len(scales), torch.arange(inputs, device=g_idx.device)
    require(qweight.shape == (inputs // 8, outputs), layout, f"its qweight has shape {tuple(qweight.shape)}")
    group = group_size(layout, inputs, groups)
    in_order = g_idx.shape == (inputs,) and bool((g_idx == of_inputs // (inputs // groups)).all())
    require(in_order, layout, "g_idx orders its groups by activations (desc_act)")

    def read() -> LowBitWeight:
        # Zero points are used as GPTQModel stores them after loading (format 2).
        return int4_weight(group, unpack_in_order(qweight.T), scales.T, unpack_in_order(qzeros).T)

    return made(layout, module, (outputs, inputs), 4, group, (scales, qweight, qzeros, g_idx), read)


def _awq(module: Any) -> QuantisedWeight:
    layout = _check_packed("AWQ", module)
    qweight, qzeros, scales = module.qweight, module.qzeros, module.scales
    inputs, outputs = module.in_features, module.out_features
    require(qweight.shape == (inputs, outputs // 8), layout, f"its qweight has shape {tuple(qweight.shape)}")
    group = group_size(layout, inputs, len(scales))

    def read() -> LowBitWeight:
        # A word has eight outputs, in the order of the inputs in a word of LowBitWeight.
        return int4_weight(group, unpack(qweight).T, scales.T, unpack(qzeros).T)

    return made(layout, module, (outputs, inputs), 4, group, (scales, qweight, qzeros), read)


def _check_packed(method: str, module: Any) -> str:
    """The layout of a GPTQModel layer; raises NotRead unless its weight has 4 bits and no kernel has repacked it."""
    layout = f"{method} int{module.bits}"
    check_device(layout, module.qweight.device)
    repacked = getattr(module, "linear_mode", None) not in (None, "train") or getattr(module, "transformed", False)
    require(module.bits == 4, layout, "only 4 bits are read")
    require(not repacked, layout, "its forward has repacked it for a kernel")
    require(module.qweight.dtype is torch.int32, layout, f"it is packed into {module.qweight.dtype}")
    require(getattr(module, "adapter", None) is None, layout, "it has an adapter")
    require(getattr(module, "had_K", None) is None, layout, "its input is rotated")
    scales, zeros, outputs = module.scales.shape, module.qzeros.shape, module.out_features
    in_words = scales == (scales[0], outputs) and zeros == (scales[0], outputs // 8) and outputs % 8 == 0
    require(in_words, layout, f"its scales and qzeros have shapes {tuple(scales)} and {tuple(zeros)}")
    return layout


_QLINEAR = "gptqmodel.nn_modules.qlinear"
_GPTQ_CLASSES = (
    *("torch.TorchLinear", "torch.TorchQuantLinear", "torch_fused.TorchFusedLinear"),
    *("torch_fused.TorchFusedQuantLinear", "torch_aten_kernel.TorchAtenLinear"),
)
_AWQ_CLASSES = (
    *("torch_awq.AwqTorchLinear", "torch_awq.AwqTorchQuantLinear", "torch_fused_awq.TorchFusedAwqLinear"),
    *("torch_fused_awq.TorchFusedAwqQuantLinear", "torch_aten_kernel_awq.TorchAtenAwqLinear"),
)
GPTQMODEL_LAYERS: dict[str, Callable[[Any], QuantisedWeight]] = {
    **{f"{_QLINEAR}.{name}": _gptq for name in _GPTQ_CLASSES},
    **{f"{_QLINEAR}.{name}": _awq for name in _AWQ_CLASSES},
}
"""Full name of a layer's class -> what reads its weight. GPTQModel has renamed its classes."""
