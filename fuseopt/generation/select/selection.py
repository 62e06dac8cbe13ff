"""Selection: from logits to the next token of every row and whether the row continues, on the device."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from fuseopt import ops
from fuseopt.generation.engine.device_constants import TrackedCopy
from fuseopt.generation.engine.residual_stream import HeadInput
from fuseopt.generation.engine.state import DecodeState
from fuseopt.generation.select.device_processors import DeviceProcessor, Edits, sampling_filters
from fuseopt.ops import LogitsEdits
from fuseopt.ops.decode.sample import draws_numbers
from fuseopt.ops.decode.torch_draw import offset_of_draw


class Selection:
    """Call: a DecodeState and logits [rows, vocab] -> nothing; writes the state's tokens, ids and flags.

    Upstream: the loop of `GenerationMixin._sample` from the logits on. Random numbers are drawn from torch's default
    generator, the same as there.

    Args:
        processors: in transformers' order.
        do_sample: draw from the distribution; else take the likeliest token.
        eos: token ids [any] after which a row is padded, or None.
        keep_logits, keep_scores: write the float32 logits, before and after processing, to the state.

    Attributes:
        key: equal for selections that one captured step can serve, once `load` has copied their values.
    """

    _draws_tokens = True

    def __init__(
        self,
        processors: tuple[DeviceProcessor, ...] = (),
        do_sample: bool = False,
        eos: Tensor | None = None,
        *,
        keep_logits: bool = False,
        keep_scores: bool = False,
    ) -> None:
        self.processors, self.do_sample, self.eos = processors, do_sample, eos
        self.keep_logits, self.keep_scores = keep_logits, keep_scores
        # The op that selects can apply the last edits itself, and filters after them if it draws a token. That op also
        # writes processed scores where they are kept.
        is_left_to_op = do_sample or not keep_scores
        self._op_keeps_scores = do_sample and keep_scores
        uses_scores = keep_scores or not self._draws_tokens
        filters, self._filters = sampling_filters(processors if do_sample else (), uses_scores)
        before = processors[: len(processors) - filters]
        last = before[-1] if before else None
        self._last_edits = last if isinstance(last, Edits) and is_left_to_op else None
        self._processors_before = before if self._last_edits is None else before[:-1]
        self._takes_likeliest = not (self._processors_before or do_sample or keep_logits or keep_scores)
        self.key: Hashable = (
            do_sample,
            keep_logits,
            keep_scores,
            None if eos is None else eos.shape,
            *(processor.key for processor in processors),
        )

    @property
    def not_captured(self) -> str:
        """Why a step with this selection cannot be captured on a GPU; empty if it can."""
        return ""

    def offset_of_draw(self, state: DecodeState) -> int:
        """By how much a call advances the offset of torch's generator if its kernel draws; 0 if torch draws."""
        if not (self.do_sample and self._kernel_draws(state)):
            return 0
        return offset_of_draw(state.logits.numel(), state.device)

    def _kernel_draws(self, state: DecodeState) -> bool:
        return draws_numbers(state.logits, self._filters)

    @property
    def may_end_early(self) -> bool:
        """Whether all rows can finish before the maximal length."""
        return self.eos is not None and self.eos.numel() > 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors whose values a captured step reads."""
        own = () if self.eos is None else (self.eos,)
        return (*own, *(tensor for processor in self.processors for tensor in processor.tensors))

    def own_tensors(self) -> None:
        """Replaces `tensors` by copies before a capture, since `load` will write to them."""
        sources = self.tensors
        # A tensor made in inference mode has no version counter.
        with torch.inference_mode(False), torch.no_grad():
            self._clone_tensors()
        for copy, source in zip(self._copies, sources, strict=True):
            copy.mark_equal(source)

    def _clone_tensors(self) -> None:
        self.eos = None if self.eos is None else self.eos.clone()
        for processor in self.processors:
            processor.own_tensors()

    def holds(self, other: Selection) -> bool:
        """Whether the other selection has an equal `key` and `load` would change nothing."""
        return self.key == other.key and all(
            copy.holds(value) for copy, value in zip(self._copies, other.tensors, strict=True)
        )

    def load(self, other: Selection) -> None:
        """Copies the values of another Selection with an equal `key`."""
        for copy, value in zip(self._copies, other.tensors, strict=True):
            copy(value)

    @functools.cached_property
    def _copies(self) -> tuple[TrackedCopy, ...]:
        return tuple(map(TrackedCopy, self.tensors))

    def begin(self, state: DecodeState, input_ids: Tensor, pad: Tensor | None, has_ids: bool = False) -> None:
        """Prepares the state for the first selection of a generate() call.

        Args:
            input_ids: prompts [rows, length].
            pad: id that finished rows are given, [] int64, or None.
            has_ids: `state.ids` contains the prompts already.
        """
        length = input_ids.shape[1]
        if not has_ids:
            state.ids[:, :length] = input_ids
        state.length.fill_(length)
        state.flags.fill_(True)
        if pad is not None:
            state.load_pad(pad)

    def end(self, state: DecodeState, hidden: HeadInput) -> None:
        """Selects at the end of a step and advances to the next slot; writes no logits if nothing reads them."""
        if not (self._takes_likeliest and hidden.has_kernel_to_select):
            self(state, hidden.logits())
            return
        assert hidden.norm is not None, "has_kernel_to_select"
        ops.decode_head_select_(
            hidden.hidden,
            hidden.head.weights[0],
            *self._written(state),
            split_k_partials=hidden.split_k_partials,
            **hidden.norm.of_op,
            eps=hidden.norm.eps,
            counters=(state.counters,),
            edits=self._edits_left(state),
            pdl=True,
            prefetch=hidden.head.prefetch,
        )

    def __call__(self, state: DecodeState, logits: Tensor, *, advance: bool = True) -> None:
        """Selects from `logits`; with `advance`, also advances the state to its next slot."""
        counters = (state.counters,) if advance else ()
        if self.keep_logits:
            state.logits.copy_(logits)
        scores = self._processed(state, logits)
        options: dict[str, Any] = {"counters": counters, "edits": self._edits_left(state), "pdl": True}
        if self.do_sample:
            options |= {"filters": self._filters, "kept": state.scores if self._op_keeps_scores else None}
            # Numbers [rows, vocab], as torch.multinomial draws them for one sample of a row.
            numbers = None
            if self.offset_of_draw(state):
                options["random"] = state.random
            else:
                numbers = torch.empty(scores.shape, dtype=torch.float32, device=scores.device).exponential_()
            ops.decode_sample_(scores, numbers, *self._written(state), **options)
        else:
            ops.decode_select_(scores, *self._written(state), **options)

    def _written(self, state: DecodeState) -> tuple[Tensor | None, ...]:
        """The tensors of the state that the selecting ops write, and the EOS ids, in the ops' order."""
        return state.tokens, state.ids, state.length, state.unfinished, state.going, state.pad, self.eos

    def _processed(self, state: DecodeState, scores: Tensor) -> Tensor:
        """Scores after all processors except the edits that the selecting op applies."""
        for processor in self._processors_before:
            scores = processor(state, scores)
        if self.keep_scores and not self._op_keeps_scores:
            state.scores.copy_(scores)
        return scores

    def _edits_left(self, state: DecodeState) -> LogitsEdits | None:
        return None if self._last_edits is None else self._last_edits.of(state)
