"""StepModelProxy: stands for the model in transformers' decoding methods, with the decode step as its forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from fuseopt.generation.engine.graphs import StepGraphs, StepWork
from fuseopt.generation.prompt.early_work import EarlyPrompt
from fuseopt.generation.prompt.prefill import Prefilled, prefill
from fuseopt.generation.prompt.prompts import joined_notes


class StepModelProxy:
    """Proxy of a model for `GenerationMixin._sample` and `_beam_search`, called as functions of the model's class.

    Overrides the forward and the methods that feed it; every other attribute is the model's. Cache, masks and positions
    are in the static state, and a step reads the last token of each row. Processors, criteria, streamers and the
    bookkeeping of beams are transformers' own code.

    Args:
        work: a step without a selection, on a state that fits the call.
        early: the prompt, if it was queued early.

    Attributes:
        prefilled: what the prefill left.
        steps: steps run after it.
        note: that of the prefill, and why the step was not captured in a CUDA graph.
    """

    def __init__(self, model: nn.Module, graphs: StepGraphs, work: StepWork, early: EarlyPrompt | None = None) -> None:
        self.model, self.graphs, self.work, self.early = model, graphs, work, early
        self.prefilled = Prefilled(0)
        self.steps, self.note = 0, ""

    @property
    def slots(self) -> int:
        """How many slots of the cache are filled."""
        return self.prefilled.slots + self.steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def _prefill(
        self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], is_first_iteration: bool = True
    ) -> CausalLMOutput:
        work = self.work
        self.prefilled = prefill(
            work.forward, self.model, self.graphs, work.state, input_ids, generation_config, model_kwargs, self.early
        )
        self.note = self.prefilled.note
        if self.prefilled.pending:
            work()
        return self._output()

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        return {"input_ids": input_ids}

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any, **kwargs: Any) -> Any:
        return model_kwargs

    def __call__(self, input_ids: Tensor, return_dict: bool = True) -> CausalLMOutput:
        if self.steps == 1:
            self.note = joined_notes(self.prefilled.note, self.graphs.capture(self.work))
        self.work.state.tokens.copy_(input_ids[:, -1])
        # A step that has failed halfway can run again: it has not moved on to the next slot.
        self.graphs.retried(self.work)
        self.steps += 1
        return self._output()

    def _reorder_cache(self, past_key_values: Any, beam_idx: Tensor) -> Any:
        """Makes row i continue beam `beam_idx[i]`, of the same item, so that the encoder's cache stays."""
        state = self.work.state
        assert state.beams is not None
        state.beams.follow(beam_idx, state.slot)
        return past_key_values

    def _output(self) -> CausalLMOutput:
        # transformers copies the logits before the next step overwrites them.
        return CausalLMOutput(logits=self.work.state.logits[:, None])
