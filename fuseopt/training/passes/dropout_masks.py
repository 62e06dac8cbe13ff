"""Draws dropout masks with Philox2x32-7 from a seed and the element's position, in the forward and in the backward.

Matches: in a joint graph on an NVIDIA GPU, `inductor_prims.random` whose only use is a comparison with p.
Writes: `fuseopt::dropout_mask(seed, size, p)`, marked for recomputation together with its seed.
Does not fire: on random numbers with any other use.

Inductor's own generator, Philox4x32-10, yields four numbers of which it uses one; that takes longer than the kernel's
memory traffic. Philox2x32-7 takes a third of the instructions, so recomputing a mask in the backward is cheaper than
keeping it (one byte an element).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import inductor_prims, ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import ops
from torch.utils.checkpoint import CheckpointPolicy

from fuseopt.ops.library import LIBRARY, define
from fuseopt.ops.philox import PAIR_FACTOR, PAIR_KEY, PAIR_ROUNDS, philox_pair

_ROUND = f"mul.wide.u32 p, c, {PAIR_FACTOR}; mov.b64 {{l, h}}, p; xor.b32 c, h, k; xor.b32 c, c, r; mov.u32 r, l; "
# PTX for `philox_pair(seed=$2, position=$1)[0] - 2**31`.
DRAW = (
    "{ .reg .u32 c, r, k, l, h; .reg .u64 p; mov.u32 c, $1; mov.b64 {k, r}, $2; "
    + f"add.u32 k, k, {PAIR_KEY}; ".join([_ROUND] * PAIR_ROUNDS)
    + "xor.b32 $0, c, 0x80000000; }"
)
CONSTRAINTS = "=r,r,l"


def _fake(seed: Tensor, size: Sequence[int], p: float) -> Tensor:
    return seed.new_empty(size, dtype=torch.bool)


def keep_mask(seed: Tensor, size: Sequence[int], p: float) -> Tensor:
    """Reference of `dropout_mask`: True for the elements that dropout keeps.

    Args:
        seed: [], int64.
        size: of a contiguous tensor. Above 2**32 elements the compiled form repeats its numbers.
        p: probability of dropping an element.

    Returns:
        [*size], bool, on the device of `seed`.
    """
    position = torch.arange(torch.Size(size).numel(), device=seed.device)
    number, _ = philox_pair(seed, position)
    return (number - 2**31 >= _threshold(p)).view(size)


MASK = define("dropout_mask(Tensor seed, SymInt[] size, float p) -> Tensor", _fake)["cuda"]
LIBRARY.impl("dropout_mask", keep_mask, "CompositeExplicitAutograd")


@register_lowering(MASK, type_promotion_kind=None)
def _lower(seed: ir.TensorBox, size: Sequence[Any], p: float) -> ir.TensorBox:
    size, device, load_seed = list(size), seed.get_device_or_error(), seed.make_loader()
    position = ir.FixedLayout(device, torch.bool, size, ir.FlexibleLayout.contiguous_strides(size)).make_indexer()

    def keep(index: Sequence[Any]) -> Any:
        number = ops.inline_asm_elementwise(
            ops.index_expr(position(index), torch.int32),
            load_seed([]),
            asm=DRAW,
            constraints=CONSTRAINTS,
            dtype=torch.int32,
        )
        return ops.ge(number, ops.constant(_threshold(p), torch.int32))

    mask = ir.Pointwise.create(device=device, dtype=torch.bool, inner_fn=keep, ranges=size)
    # Realised, as Inductor's random numbers are. Inlined, it would keep the norm's backward from being fused.
    mask.realize()
    return mask


def _threshold(p: float) -> int:
    """An element is kept if its number, as a signed 32-bit integer, is at least this."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def run(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=inductor_prims.random):
        size, seed, mode = node.args
        comparison = _comparison(node)
        on_nvidia = node.meta["val"].device.type == "cuda" and torch.version.hip is None
        if mode != "rand" or seed.target is not inductor_prims.lookup_seed or comparison is None or not on_nvidia:
            continue
        with graph.inserting_before(comparison):
            mask = graph.call_function(MASK, (seed, size, comparison.args[1]))
        mask.meta = dict(comparison.meta)
        # Keeping each looked-up seed would take one tensor and one kernel per dropout.
        mask.meta["recompute"] = seed.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        comparison.replace_all_uses_with(mask)
    graph.eliminate_dead_code()


def _comparison(node: fx.Node) -> fx.Node | None:
    """The comparison with p that is the only use of the random numbers, after casts; None if there is another use."""
    while len(node.users) == 1:
        (node,) = node.users
        if node.target is torch.ops.aten.gt.Scalar:
            return node
        if node.target is not torch.ops.prims.convert_element_type.default:
            return None
    return None
