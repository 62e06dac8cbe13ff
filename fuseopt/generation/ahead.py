"""HeadStart: a GPU works on the prompt while the host is in transformers' preparation of the call."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from fuseopt.generation import tiers
from fuseopt.generation.graphs import Prompt, StepGraphs
from fuseopt.generation.layers import has_kernel
from fuseopt.generation.state import DecodeState, Sizes, prompt_length_for
from fuseopt.generation.survey import Survey, survey

# Of keys and values of a prompt, which are kept twice: what a few prompts of this size take is not missed elsewhere.
_MOST_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Ahead:
    """A decoder's prompt that has been queued already, for a call that is as plain as it looks.

    Attributes:
        input_ids: [rows, length], the caller's own.
        attention_mask: of the same shape, the caller's own, or None.
        state: as a prefill leaves it, with room for the prompt alone.
        note: why it could not be captured, or nothing.
    """

    input_ids: Tensor
    attention_mask: Tensor | None
    state: DecodeState
    note: str

    def load(self, state: DecodeState) -> None:
        """Gives another state the keys, values and logits."""
        length = self.input_ids.shape[1]
        state.cache[:, :, :, :, :length] = self.state.cache[:, :, :, :, :length]
        state.logits.copy_(self.state.logits)


class HeadStart:
    """Call: the arguments of a generate() -> what it has been relieved of.

    An encoder's output goes to transformers as one of the arguments, and a decoder's prompt to the decode loop, which
    takes it if it finds the call prepared as expected.

    Args:
        model: as a step's.
        graphs: where captured prompts are kept.
        max_length: slots of the cache up to which calls are served.
    """

    def __init__(self, model: nn.Module, graphs: StepGraphs, max_length: int) -> None:
        self.model, self.graphs, self.max_length = model, graphs, max_length
        self._encoder: Any = None
        self._key: tuple[Hashable, ...] = ()
        self._survey: Survey | None = None

    def __call__(
        self, step: Any, arguments: Mapping[str, Any], others: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Ahead | None, str]:
        """Queues what it can.

        Args:
            step: of `model`.
            arguments: all, by name.
            others: those of them that generate() passes on to whom they may concern.

        Returns:
            `others`, with the output of an encoder; the prompt of a decoder; and a note for the report.
        """
        encodes, encoded = step.encoder_class is not None, others.get("encoder_outputs") is not None
        captures = self.graphs.max_graphs and has_kernel("decode_attention", step.token_embedding)
        if encoded or not captures:
            return others, None, ""
        reason = next(tiers.ahead_reasons(self.model, arguments, others), None)
        if reason is None and encodes:
            reason = self._prepare_encoder(step)
        if reason is not None:
            return others, None, f"transformers ran the encoder: {reason}" if encodes else ""
        ids = next(arguments[name] for name in ("inputs", "input_ids") if arguments.get(name) is not None)
        mask = arguments.get("attention_mask")
        try:
            with torch.no_grad(), self.graphs.in_stream_order(ids.device):
                if not encodes:
                    return others, self._prefill(step, ids, mask), ""
                result = self._encoder(self.graphs, ids, mask)
        except torch.OutOfMemoryError:
            return others, None, "there was no memory to run the prompt ahead"
        if result is None:
            return others, None, ""
        output, note = result
        return {**others, "encoder_outputs": BaseModelOutput(output)}, None, note

    def _prepare_encoder(self, step: Any) -> str | None:
        """Makes the encoder, anew where what it stands on has changed, or says why it has to be transformers' own."""
        found = self._survey = survey(self.model, (self.model.encoder,), step.module_classes, self._survey)
        if found.reason is not None:
            return found.reason
        key = (*found.key, *step.encoder_class.constants(self.model))
        if self._encoder is None or key != self._key:
            self.graphs.clear()
            self._encoder, self._key = step.encoder_class(self.model), key
        return None

    def _prefill(self, step: Any, input_ids: Tensor, attention_mask: Tensor | None) -> Ahead | None:
        rows, length = input_ids.shape
        padded, longest = prompt_length_for(rows, length), step.max_length(self.model)
        if padded is None or padded > self.max_length or length == 1 or (longest is not None and length > longest):
            return None
        if rows * padded * step.shape.bytes_per_slot > _MOST_BYTES:
            return None
        sizes = Sizes(rows, padded)
        state = self.graphs.state(sizes, lambda: DecodeState(sizes, step.shape, step.vocab))
        positions = state.slots[None, :length]
        if attention_mask is not None:
            # As transformers numbers the tokens of rows with padding.
            positions = (attention_mask.long().cumsum(1) - 1).clamp_min_(0)
        state.load_prompt(input_ids, attention_mask, positions)
        note = self.graphs.run_prompt(Prompt(step.prefill, state, padded, attention_mask is not None))
        return Ahead(input_ids, attention_mask, state, note)
