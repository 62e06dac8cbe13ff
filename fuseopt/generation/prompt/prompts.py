"""Prompts in a DecodeState: run by the decode step's own means, padded where a captured run can serve them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fuseopt.generation.engine.graphs import Prompt, StepGraphs
from fuseopt.generation.engine.layers import has_kernel
from fuseopt.generation.engine.state import DecodeState, prompt_length_for
from fuseopt.generation.families.step_interface import DecodeStep


def run_forward(
    forward: Callable[[DecodeState, int, bool], None],
    graphs: StepGraphs,
    state: DecodeState,
    prompts: int,
    length: int,
    masked: bool = False,
) -> str:
    """Runs `forward` on the prompts in `state`, padded to their length class where a captured one can serve it.

    Returns:
        why it could not be captured, or nothing.
    """
    # Without the kernels, masked slots are multiplied by 0, which leaves NaN that padding may put there as it is.
    captures = graphs.max_graphs and has_kernel("decode_attention", state.cache)
    padded = prompt_length_for(prompts, length) if captures else None
    if padded is not None:
        return graphs.run_prompt(Prompt(forward, state, padded, masked))
    forward(state, length, masked)
    return ""


def run_encoded(
    step: DecodeStep, graphs: StepGraphs, state: DecodeState, encoded: Tensor, keep: Tensor | None, first: Tensor | int
) -> str:
    """Fills the cross-attention cache of `state`, and lets the decoder take a first token.

    Args:
        step: a decode step of an encoder-decoder, before its first step in a call.
        encoded: an encoder's output [items, length, width].
        keep: attention mask [items, any], nonzero where a slot counts, or None where all do.
        first: tokens [rows], or one for all.

    Returns:
        why it could not be captured, or nothing.
    """
    length = encoded.shape[1]
    state.encoded[:, :length] = encoded
    state.load_cross(length, keep)
    step.begin()
    state.begin(0)
    state.tokens[:] = first
    return run_forward(step.prefill, graphs, state, state.sizes.items, length)


def store(cache: Tensor, vectors: Tensor, counts: Tensor | None = None) -> None:
    """`cache.copy_(vectors)` for [..., head_dim] of any strides; writes 0 where `counts`, bool [..., 1], is False.

    Vectors that lie apart are moved 16 bytes at a time where they are aligned to that: a thread of PyTorch's copy moves
    one element after another, of whatever size.
    """
    wide = torch.complex128
    ratio = wide.itemsize // vectors.dtype.itemsize
    if cache.dtype is vectors.dtype and _is_aligned(cache, ratio) and _is_aligned(vectors, ratio):
        cache, vectors = cache.view(wide), vectors.view(wide)
    if counts is None:
        cache.copy_(vectors)
    else:
        torch.where(counts, vectors, cache.new_zeros(()), out=cache)


def _is_aligned(vectors: Tensor, to: int) -> bool:
    *apart, within = vectors.stride()
    return within == 1 and not any(number % to for number in (*apart, vectors.shape[-1], vectors.storage_offset()))
