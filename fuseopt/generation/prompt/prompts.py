"""Runs prompts that are in a DecodeState by the decode step's prefill, padded to a length class where graphs exist."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fuseopt.generation.engine.graphs import PromptWork, StepGraphs
from fuseopt.generation.engine.layers import has_cuda_kernel
from fuseopt.generation.engine.state import DecodeState, prompt_length_for
from fuseopt.generation.families.step_interface import DecodeStep


def run_forward(
    forward: Callable[[DecodeState, int, bool], None],
    graphs: StepGraphs,
    state: DecodeState,
    prompts: int,
    length: int,
    masked: bool = False,
    *,
    any_start: bool = False,
) -> str:
    """Runs `forward` on the prompts in `state`, padded to their length class if such prompts are captured.

    Args:
        length: tokens of each prompt to run, from slot `state.start` on.
        any_start: a captured prompt may serve other starts than this one (see `DecodeStep.takes_any_start`).

    Returns:
        why the prompt could not be captured, empty if it was or no capture was tried.
    """
    # Without the kernels, attention multiplies masked values by 0, and padding may leave NaN, which that keeps.
    captures = graphs.max_graphs and has_cuda_kernel(state.attention_op, state.encoded)
    padded = prompt_length_for(prompts, length, state.device) if captures else None
    if padded is not None and state.start and state.start + padded > state.sizes.capacity:
        padded = None
    state.may_pad, state.start_varies = padded is not None, any_start
    if state.start:
        state.start_slot.fill_(state.start)
    if padded is None:
        forward(state, length, masked)
        return ""
    return graphs.run_prompt(PromptWork(forward, state, padded, masked))


def run_tokens(
    step: DecodeStep,
    graphs: StepGraphs,
    state: DecodeState,
    input_ids: Tensor,
    keep: Tensor | None,
    positions: Tensor | None,
) -> str:
    """Runs the prompts of a decoder-only model, without the prefixes that the prefix cache has.

    Args:
        input_ids, keep, positions: as for `DecodeState.load_prompt`.

    Returns:
        for the report: why the prompt could not be captured, and what the prefix cache did; empty if neither.
    """
    (rows, length), prefixes, before = input_ids.shape, graphs.prefixes, state.prompts
    state.load_prompt(input_ids, keep, positions)
    if prefixes is None:
        return run_forward(step.prefill, graphs, state, rows, length, keep is not None)
    match = prefixes.find(step.shape, input_ids, keep, positions)
    if isinstance(match, str):
        note = run_forward(step.prefill, graphs, state, rows, length, keep is not None)
        return joined_notes(note, f"the prefix cache was not used: {match}")
    while True:
        prefixes.load(match, state, before)
        new, any_start = length - match.start, match.start > 0 and keep is None and step.takes_any_start(state)
        note = run_forward(step.prefill, graphs, state, rows, new, keep is not None, any_start=any_start)
        # The device reads samples of the weights before the prompt, and the host waits for them after queuing it.
        confirmed = prefixes.confirmed(match)
        if confirmed is match:
            return joined_notes(note, match.note, prefixes.store(match, state))
        match, before = confirmed, ()


def joined_notes(*notes: str) -> str:
    """Notes for the report, joined by "; ", without empty ones."""
    return "; ".join(filter(None, notes))


def run_encoded(
    step: DecodeStep, graphs: StepGraphs, state: DecodeState, encoded: Tensor, keep: Tensor | None, first: Tensor | int
) -> str:
    """Fills the cross-attention cache of `state`, and runs the decoder on its first token.

    Args:
        step: the decode step of an encoder-decoder; `begin` is called on it.
        encoded: an encoder's output [items, length, width].
        keep: attention mask [items, any], nonzero where a slot counts, or None where all do.
        first: tokens [rows], or one for all rows.

    Returns:
        as `run_forward`.
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

    PyTorch's copy of strided tensors moves one element a thread. So tensors aligned to 16 bytes are copied as
    complex128, whose elements have 16 bytes.
    """
    wide = torch.complex128
    ratio = wide.itemsize // vectors.dtype.itemsize
    if cache.dtype is vectors.dtype and is_aligned(cache, ratio) and is_aligned(vectors, ratio):
        cache, vectors = cache.view(wide), vectors.view(wide)
    if counts is None:
        cache.copy_(vectors)
    else:
        torch.where(counts, vectors, cache.new_zeros(()), out=cache)


def is_aligned(vectors: Tensor, to: int) -> bool:
    """Whether vectors in the last dimension, and their distances, are multiples of `to` elements."""
    *outer, innermost = vectors.stride()
    return innermost == 1 and not any(number % to for number in (*outer, vectors.shape[-1], vectors.storage_offset()))
