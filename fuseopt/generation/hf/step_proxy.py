"""FastModel: what transformers' own decoding methods are given as the model where they have to run on the host."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from fuseopt.generation.engine.graphs import Step, StepGraphs
from fuseopt.generation.prompt.early_prefill import Ahead
from fuseopt.generation.prompt.prefill import Prefilled, prefill


class FastModel:
    """Passes for a model in `GenerationMixin._sample` and `_beam_search`, called as functions of their class.

    All that these ask of the model is the model's own, but for the forward and what feeds it: the static state has the
    cache, masks and positions, and a step takes the last token of each row. So processors, criteria, streamers and the
    bookkeeping of beams are transformers' to the letter.

    Args:
        step: without a selection, on a state that fits the call.
        ahead: the caller's prompt, if it has run already.
    """

    def __init__(self, model: nn.Module, graphs: StepGraphs, step: Step, ahead: Ahead | None = None) -> None:
        self.model, self.graphs, self.step, self.ahead = model, graphs, step, ahead
        self.prefilled = Prefilled(0)
        self.steps, self.note = 0, ""

    @property
    def slots(self) -> int:
        """How many slots of the cache are filled by now."""
        return self.prefilled.slots + self.steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def _prefill(
        self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], is_first_iteration: bool = True
    ) -> CausalLMOutput:
        step = self.step
        self.prefilled = prefill(
            step.forward, self.model, self.graphs, step.state, input_ids, generation_config, model_kwargs, self.ahead
        )
        self.note = self.prefilled.note
        if self.prefilled.pending:
            step()
        return self._output()

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        return {"input_ids": input_ids}

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any, **kwargs: Any) -> Any:
        return model_kwargs

    def __call__(self, input_ids: Tensor, return_dict: bool = True) -> CausalLMOutput:
        if self.steps == 1:
            self.note = self.graphs.capture(self.step) or self.note
        self.step.state.tokens.copy_(input_ids[:, -1])
        self.step()
        self.steps += 1
        return self._output()

    def _reorder_cache(self, past_key_values: Any, beam_idx: Tensor) -> Any:
        """Lets every row go on from a beam of its item, with whom it shares what the encoder said."""
        state = self.step.state
        assert state.beams is not None
        state.beams.follow(beam_idx, state.slot)
        return past_key_values

    def _output(self) -> CausalLMOutput:
        # The methods copy the logits before the next step overwrites them.
        return CausalLMOutput(logits=self.step.state.logits[:, None])
