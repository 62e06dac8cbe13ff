"""Selection: from logits to the next token of every row, and whether the row goes on, without the host."""

from __future__ import annotations

import functools
from collections.abc import Hashable

import torch
from torch import Tensor, nn

from fuseopt import ops
from fuseopt.generation.engine.device_constants import Copied
from fuseopt.generation.engine.layers import HeadInput
from fuseopt.generation.engine.state import DecodeState
from fuseopt.generation.select.device_processors import DeviceProcessor, Edits
from fuseopt.ops import LogitsEdits


class Selection:
    """Call: a DecodeState and logits [rows, vocab] -> nothing; writes `tokens`, `ids` and flags, counts on.

    Upstream: the loop of `GenerationMixin._sample` from the logits on; random numbers are drawn as there, from torch's
    default generator.

    Args:
        processors: in transformers' order.
        do_sample: draw from the distribution, or take the likeliest token.
        eos: token ids [any] after which a row is padded, or None.
        keep_logits, keep_scores: whether the logits in float32, as they come and as processed, are wanted in the state.
    """

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
        # The last edits are left to the op that selects, unless their result is wanted.
        last = processors[-1] if processors else None
        self._last_edits = last if isinstance(last, Edits) and not (do_sample or keep_scores) else None
        self._processors_before = processors if self._last_edits is None else processors[:-1]
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
        """Why a step that ends so is left to run eagerly on a GPU, or nothing."""
        return ""

    @property
    def may_end_early(self) -> bool:
        """Whether `going` can tell that no row is left before the longest sequence is full."""
        return self.eos is not None and self.eos.numel() > 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        own = () if self.eos is None else (self.eos,)
        return (*own, *(tensor for processor in self.processors for tensor in processor.tensors))

    def own_tensors(self) -> None:
        """Lets `tensors` be nobody else's, since those of later calls will be written over them."""
        sources = self.tensors
        # A tensor made in inference mode would not say whether it has been written to.
        with torch.inference_mode(False), torch.no_grad():
            self._clone_tensors()
        for copy, source in zip(self._copies, sources, strict=True):
            copy.trust(source)

    def _clone_tensors(self) -> None:
        self.eos = None if self.eos is None else self.eos.clone()
        for processor in self.processors:
            processor.own_tensors()

    def holds(self, other: Selection) -> bool:
        """Whether the other one has an equal `key`, and `load` would change nothing."""
        return self.key == other.key and all(
            copy.holds(value) for copy, value in zip(self._copies, other.tensors, strict=True)
        )

    def load(self, other: Selection) -> None:
        """Takes over the values of another Selection with an equal `key`."""
        for copy, value in zip(self._copies, other.tensors, strict=True):
            copy(value)

    @functools.cached_property
    def _copies(self) -> tuple[Copied, ...]:
        return tuple(map(Copied, self.tensors))

    def begin(self, state: DecodeState, input_ids: Tensor, pad: Tensor | None, has_ids: bool = False) -> None:
        """Before the first call.

        Args:
            input_ids: prompts [rows, length].
            pad: the id [] that finished rows are given.
            has_ids: the state has the prompts already.
        """
        length = input_ids.shape[1]
        if not has_ids:
            state.ids[:, :length] = input_ids
        state.length.fill_(length)
        state.flags.fill_(True)
        if pad is not None:
            state.load_pad(pad)

    def end(self, state: DecodeState, hidden: HeadInput) -> None:
        """The call for a step that ends so, and moves on to its next slot; without logits where nobody reads them."""
        if not (self._takes_likeliest and hidden.has_kernel_to_select):
            self(state, hidden.logits())
            return
        kind, weight, bias, eps = hidden.norm
        ops.decode_head_select_(
            hidden.hidden,
            hidden.head.weights[0],
            *self._written(state),
            addends=hidden.split_k_partials,
            norm=kind,
            norm_weight=weight,
            norm_bias=bias,
            eps=eps,
            counters=(state.counters,),
            edits=self._edits_left(state),
            overlap=True,
            ahead=hidden.head.prefetch,
        )

    def __call__(self, state: DecodeState, logits: Tensor, *, advance: bool = True) -> None:
        """With `advance`, the state moves on to its next slot."""
        counters = (state.counters,) if advance else ()
        if self.keep_logits:
            state.logits.copy_(logits)
        scores, divisors = self._processed(state, logits), None
        if self.do_sample:
            # What torch.multinomial does for one sample, which looks the probabilities through several times beside.
            scores = nn.functional.softmax(scores.float(), dim=-1)
            divisors = torch.empty_like(scores).exponential_()
        ops.decode_select_(
            scores,
            *self._written(state),
            counters=counters,
            divisors=divisors,
            edits=self._edits_left(state),
            overlap=True,
        )

    def _written(self, state: DecodeState) -> tuple[Tensor | None, ...]:
        """What the ops that end a step take of its state, in their order, and the ids that end a row."""
        return state.tokens, state.ids, state.length, state.unfinished, state.going, state.pad, self.eos

    def _processed(self, state: DecodeState, scores: Tensor) -> Tensor:
        """After all processors but the edits that are left to the op that selects."""
        for processor in self._processors_before:
            scores = processor(state, scores)
        if self.keep_scores:
            state.scores.copy_(scores)
        return scores

    def _edits_left(self, state: DecodeState) -> LogitsEdits | None:
        return None if self._last_edits is None else self._last_edits.of(state)
