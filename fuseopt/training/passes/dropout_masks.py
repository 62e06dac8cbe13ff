"""Dropout masks of a compiled step on a GPU, each a short function of a seed and of where an element stands.

Inductor draws by Philox4x32-10 and uses one of its four numbers, which takes longer than the memory traffic of the
kernel around it. Philox2x32-7 takes a third of the instructions, so that the backward pass can afford to draw again
what it would else have to keep: a byte an element.
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
# `philox_pair`'s first number at position $1 for the seed $2, less 2**31.
DRAW = (
    "{ .reg .u32 c, r, k, l, h; .reg .u64 p; mov.u32 c, $1; mov.b64 {k, r}, $2; "
    + f"add.u32 k, k, {PAIR_KEY}; ".join([_ROUND] * PAIR_ROUNDS)
    + "xor.b32 $0, c, 0x80000000; }"
)
CONSTRAINTS = "=r,r,l"


def _fake(seed: Tensor, size: Sequence[int], p: float) -> Tensor:
    return seed.new_empty(size, dtype=torch.bool)


def keep_mask(seed: Tensor, size: Sequence[int], p: float) -> Tensor:
    """Which elements of a contiguous tensor of `size` dropout keeps.

    Args:
        seed: [], int64.
        size: of fewer than 2**32 elements; of more, numbers repeat in the compiled form.
        p: the share that is dropped.

    Returns:
        [*size], boolean, on the device of `seed`.
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
    # A buffer of its own, as Inductor's random numbers have: inlined, it is not fused with the norm's backward.
    mask.realize()
    return mask


def _threshold(p: float) -> int:
    """An element is kept where its number, of 32 bits with a sign, is no less."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def shorten(graph: fx.Graph) -> None:
    """Exchanges the masks that a joint graph draws on a GPU for `dropout_mask`, to be drawn anew by the backward."""
    for node in graph.find_nodes(op="call_function", target=inductor_prims.random):
        size, seed, mode = node.args
        comparison = _comparison(node)
        on_nvidia = node.meta["val"].device.type == "cuda" and torch.version.hip is None
        if mode != "rand" or seed.target is not inductor_prims.lookup_seed or comparison is None or not on_nvidia:
            continue
        with graph.inserting_before(comparison):
            mask = graph.call_function(MASK, (seed, size, comparison.args[1]))
        mask.meta = dict(comparison.meta)
        # The seed too: each would be kept as a tensor of its own, by a kernel of its own.
        mask.meta["recompute"] = seed.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        comparison.replace_all_uses_with(mask)
    graph.eliminate_dead_code()


def _comparison(node: fx.Node) -> fx.Node | None:
    """Where the one use of what `node` draws, in whatever dtype, is to ask which of it is greater than p."""
    while len(node.users) == 1:
        (node,) = node.users
        if node.target is torch.ops.aten.gt.Scalar:
            return node
        if node.target is not torch.ops.prims.convert_element_type.default:
            return None
    return None
