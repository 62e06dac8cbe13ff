"""EarlyWork and EarlyPrompt: what EarlyPrefill has queued for one call."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fuseopt.generation.engine.decode_run import DecodeRun
from fuseopt.generation.engine.state import DecodeState


@dataclass(frozen=True)
class EarlyPrompt:
    """A prompt that was queued before transformers prepared the call.

    The prepared call takes it only if it contains the objects `inputs` and `attention_mask` themselves.

    Attributes:
        inputs: the caller's input_ids [rows, length], or the encoder's output that transformers was given.
        attention_mask: the caller's, of the prompt's shape, or None.
        state: as a prefill leaves it. If it is not the state that the call decodes in, it holds the prompt alone.
        note: for the report: why the prompt was not captured in a CUDA graph, and what the prefix cache did.
        first_token: the decoder's first input token in all rows; None for decoder-only models.
        run: the decoding of the call, whose first steps are queued after the prompt; None if none are.
    """

    inputs: Any
    attention_mask: Tensor | None
    state: DecodeState
    note: str
    first_token: int | None = None
    run: DecodeRun | None = None

    def matches(self, mask: Tensor | None, first_token: Any) -> bool:
        """Whether the decoder of an encoder-decoder began as the prepared call says."""
        return self.first_token == first_token and (self.attention_mask is None) == (mask is None)

    def copy_to(self, state: DecodeState) -> None:
        """Copies keys, values and logits of a decoder-only model's prompt to a state of another capacity."""
        length = self.inputs.shape[1]
        for target, source in ((state.cache, self.state.cache), (state.scales, self.state.scales)):
            if target is not None and source is not None:
                target[:, :, :, :, :length].copy_(source[:, :, :, :, :length])
        state.logits.copy_(self.state.logits)


class EarlyWork(NamedTuple):
    """What was done for a call before transformers prepares it.

    Attributes:
        extra: the call's arguments that are not parameters of generate(), with `encoder_outputs` added if the encoder
            has run.
        prompt: None if no prompt was queued, or if it was discarded.
        note: for the report.
        buffers: static tensors that the GPU may use until the current stream has waited for the early work.
        is_unmasked: no token of the prompts is masked.
        encoder_inputs: prompts [items, length] and mask that the encoder has run on; None if it has not.
        call_key: key of the call in `CallOutcomes`; None if the call has none.
    """

    extra: Mapping[str, Any]
    prompt: EarlyPrompt | None = None
    note: str = ""
    buffers: Any = None
    is_unmasked: bool = False
    encoder_inputs: tuple[Tensor, Tensor | None] | None = None
    call_key: Hashable = None
