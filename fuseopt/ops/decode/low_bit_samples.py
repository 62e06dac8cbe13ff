"""Small calls of linear layers with weights in 8 or 4 bits, for tests of all ops that compute one."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fuseopt.ops import registry
from fuseopt.ops.low_bit import LowBitWeight, quantize


def sample_weight(
    device: torch.device, dtype: torch.dtype, outputs: int, inputs: int, bits: int, symmetric: bool = True
) -> LowBitWeight:
    # float64 is not quantised; its inputs meet a weight of float32.
    dtype = torch.float32 if dtype is torch.float64 else dtype
    return quantize(torch.randn(outputs, inputs, device=device, dtype=dtype), bits, 32, symmetric)


def low_bit_samples(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def weights(*outputs: int, inputs: int = 64, bits: int = 4, symmetric: bool = True) -> list[LowBitWeight]:
        return [sample_weight(device, dtype, n, inputs, bits, symmetric) for n in outputs]

    layer_norm = {"norm": "layer_norm", "norm_weight": make(64), "norm_bias": make(64)}
    rms_norm = {"norm": "rms_norm", "norm_weight": make(64), "eps": 1e-6}
    gemma = {"norm": "gemma_rms_norm", "norm_weight": make(64), "eps": 1e-6}
    wide = torch.promote_types(dtype, torch.float32)
    for bits, symmetric in ((8, True), (4, True), (4, False)):
        kind: dict[str, Any] = {"bits": bits, "symmetric": symmetric}
        biases = [make(n) for n in (32, 8, 7)]
        yield registry.SampleInput((make(3, 64), weights(40, **kind), make(40)), {**layer_norm, "activation": "gelu"})
        yield registry.SampleInput((make(2, 2, 64), weights(32, 8, 7, **kind), biases), rms_norm)
        gated = {**gemma, "activation": "gelu_tanh", "gated": True}
        yield registry.SampleInput((make(9, 64), weights(24, 24, **kind)), gated)
        yield registry.SampleInput((make(1, 96), weights(7, inputs=96, **kind)), {"residual": make(1, 7, dtype=wide)})
    yield registry.SampleInput((make(5, 33), weights(7, inputs=33, bits=8), make(7)), {"activation": "silu"})
    yield registry.SampleInput((make(0, 64), weights(4)))
