"""Which weights the linear layers of a decode step read into the L2 cache for later layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fuseopt.generation.engine.layers import Linear
from fuseopt.tuning import multiprocessors, tuned


def plan_l2_prefetch(layers: Sequence[Linear], head: Linear) -> None:
    """Sets `prefetch` of a step's linear layers, given in the order they run in.

    Each prefetches the weights of the layer after the next. Large layers skip that, since their own weight loads
    already saturate memory bandwidth; if the next layer is large too, they prefetch a part of its weight, late. The
    head reads more than the L2 cache holds; at its end it prefetches the weights of the next step's first layer.
    """
    for layer, following, later in zip(layers, [*layers[1:], head], [*layers[2:], head, head], strict=True):
        layer.prefetch = _prefetchable(later, layer)
        if _skips_prefetch(layer):
            skip_both = _skips_prefetch(following) and not (layer.low_bit or following.low_bit)
            layer.prefetch = _first_part(following.weights[0]) if skip_both else ()
    head.prefetch = _prefetchable(layers[0], head)


def _prefetchable(layer: Linear, reader: Linear) -> tuple[Tensor, ...]:
    """The tensors of a layer that `reader` prefetches; none with quantised weights, where a prefetch gains nothing."""
    return () if layer.low_bit or reader.low_bit else layer.weights


def _skips_prefetch(layer: Linear) -> bool:
    """True if a layer has more bytes than a GPU's blocks hold, so that its weight loads already saturate bandwidth.

    The kernels use the same limit (`most_held_bytes` in csrc/cuda/decode/linear/params.cuh). The choice of a layer's
    kernel uses another limit, which is lower for a long K (`exceeds_registers` there).
    """
    weight = layer.stored[0]
    name = "decode_linear_held_bytes" if weight.T.is_contiguous() else "decode_linear_nk_held_bytes"
    held_bytes = tuned(name, weight.device) * multiprocessors(weight.device)
    return sum(weight.nbytes for weight in layer.stored) >= held_bytes


def _first_part(weight: Tensor) -> tuple[Tensor, ...]:
    """The first rows of a weight [N, K] that is stored as [K, N], as many as a large layer prefetches."""
    lines = weight.T
    count = len(lines) // tuned("decode_linear_prefetch_divisor", weight.device)
    return (lines[:count],) if lines.is_contiguous() else ()
