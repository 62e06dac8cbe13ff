"""WhisperStep: the decoder of WhisperForConditionalGeneration as a DecoderSpec."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fuseopt.generation.engine.layers import Linear, linear_of
from fuseopt.generation.families.bart import BartStep
from fuseopt.modules.children import WHISPER_CHILDREN


class WhisperStep(BartStep):
    """Upstream: the decoder of `WhisperForConditionalGeneration.forward` for one token a row."""

    model_class = "transformers.models.whisper.modeling_whisper.WhisperForConditionalGeneration"
    children = WHISPER_CHILDREN
    norms_first = True
    ignores_encoder_mask = True

    @staticmethod
    def head_of(model: nn.Module) -> Linear:
        return linear_of(model.proj_out)

    @staticmethod
    def roots(model: nn.Module) -> tuple[nn.Module, ...]:
        return model.model, model.proj_out

    @staticmethod
    def not_supported_reasons(model: nn.Module) -> list[str]:
        return []

    @staticmethod
    def buffers_of(model: nn.Module) -> Sequence[nn.Module]:
        return ()
