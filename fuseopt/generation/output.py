"""What generate() returns for a call that the device loop decoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from transformers.generation.utils import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)

from fuseopt.generation.engine.graphs import StepWork
from fuseopt.generation.engine.state import DecodeState
from fuseopt.generation.prepared_call import PreparedCall
from fuseopt.generation.prompt.prefill import Prefilled
from fuseopt.generation.select import beam_selection

# By whether there is an encoder, and whether there are beams.
_OUTPUTS: Mapping[tuple[bool, bool], Any] = {
    (False, False): GenerateDecoderOnlyOutput,
    (False, True): GenerateBeamDecoderOnlyOutput,
    (True, False): GenerateEncoderDecoderOutput,
    (True, True): GenerateBeamEncoderDecoderOutput,
}


class Decoded(NamedTuple):
    """What a decode loop returns.

    Attributes:
        slots: how many slots of the cache are filled.
        prefilled: what the prefill left.
    """

    output: Any
    work: StepWork
    slots: int
    prefilled: Prefilled
    note: str


class StepRecords(NamedTuple):
    """Tensors [rows, vocab] float32, one a step, for `output_scores` and `output_logits`; None if not requested."""

    scores: list[Tensor] | None
    logits: list[Tensor] | None


def step_records(config: Any) -> StepRecords:
    """Empty records for what a GenerationConfig requests."""
    detailed = config.return_dict_in_generate
    return StepRecords(
        [] if detailed and config.output_scores else None, [] if detailed and config.output_logits else None
    )


def output_of(
    prepared: PreparedCall,
    state: DecodeState,
    steps: int,
    prompt_slots: int,
    records: StepRecords,
    *,
    is_encoder_decoder: bool,
) -> Any:
    """Token ids [rows, length + steps], or transformers' output class around them if the config requests it.

    Args:
        steps: tokens a row that were generated.
        prompt_slots: slots of the cache that the prompts filled.
    """
    config, length = prepared.config, prepared.input_ids.shape[1]
    of_beams: dict[str, Any] = {}
    if state.beams is None:
        sequences = state.ids[:, : length + steps].clone()
    else:
        fill = beam_selection.fill_of(config)
        sequences, scores, beam_indices = state.beams.best(config.num_return_sequences, length, prompt_slots, fill)
        of_beams = {"sequences_scores": scores if config.output_scores else None, "beam_indices": beam_indices}
    if not config.return_dict_in_generate:
        return sequences
    return _OUTPUTS[is_encoder_decoder, state.beams is not None](
        sequences=sequences,
        scores=None if records.scores is None else tuple(records.scores),
        logits=None if records.logits is None else tuple(records.logits),
        past_key_values=prepared.model_kwargs["past_key_values"] if prepared.returns_cache else None,
        **of_beams,
    )
