"""Reader of the layers that compressed-tensors has packed. compressed-tensors is not imported."""

from __future__ import annotations

from typing import Any

from fuseopt.modules.quantised_weight import (
    QuantisedWeight,
    check_device,
    group_size,
    int4_weight,
    made,
    require,
    unpack_in_order,
)
from fuseopt.ops.low_bit import LowBitWeight


def compressed_tensors(module: Any) -> QuantisedWeight:
    """The weight of a torch.nn.Linear whose Parameters compressed-tensors has packed."""
    scheme, parameters = module.quantization_scheme, module._parameters
    of, layout = scheme.weights, f"compressed-tensors int{scheme.weights.num_bits}"
    packed, scales, zeros = (parameters.get(f"weight_{name}") for name in ("packed", "scale", "zero_point"))
    check_device(layout, packed.device)
    require(of.num_bits == 4 and of.type == "int", layout, "only packed int4 is read")
    activations = scheme.input_activations is None and scheme.output_activations is None
    require(activations, layout, "its activations are quantised too")
    require("weight_g_idx" not in parameters, layout, "weight_g_idx orders its groups by activations")
    outputs, inputs = module.out_features, module.in_features
    require(packed.shape == (outputs, inputs // 8), layout, f"weight_packed has shape {tuple(packed.shape)}")
    require(scales.dim() == 2 and len(scales) == outputs, layout, "its scales are not for each output")
    group = group_size(layout, inputs, scales.shape[1])
    expected = None if of.symmetric else (-(-outputs // 8), scales.shape[1])
    found = None if zeros is None else tuple(zeros.shape)
    require(found == expected, layout, f"weight_zero_point has shape {found}, not {expected}")

    def read() -> LowBitWeight:
        of_groups = None if zeros is None else unpack_in_order(zeros.T).T[:outputs]
        return int4_weight(group, unpack_in_order(packed), scales, of_groups)

    tensors = (scales, packed, *(() if zeros is None else (zeros,)))
    return made(layout, module, (outputs, inputs), 4, group, tensors, read)
