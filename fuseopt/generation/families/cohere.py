"""CohereStep: CohereForCausalLM as a DecoderSpec."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from fuseopt.generation.families.decoder_spec import DecoderSpec, RotaryPositions
from fuseopt.generation.families.llama_like import LlamaLikeStep, llama_like, rotary_of


class CohereStep(LlamaLikeStep):
    """Upstream: `CohereForCausalLM.forward` for one token a row. Neighbouring elements of a head are rotated."""

    model_class, children = llama_like("cohere.Cohere", norm="LayerNorm")
    norm_kind = "layer_norm"
    norms = ("input_layernorm", None, None, None)

    @staticmethod
    def not_supported_reasons(model: nn.Module) -> list[str]:
        reasons = LlamaLikeStep.not_supported_reasons(model)
        if model.config.use_qk_norm:
            reasons.append("use_qk_norm has a norm of its own for each head")
        return reasons

    @classmethod
    def spec_of(cls, model: nn.Module) -> DecoderSpec:
        return replace(super().spec_of(model), parallel_residual=True, head_scale=model.logit_scale)

    @staticmethod
    def rotary_by_layer(model: nn.Module) -> Sequence[RotaryPositions | None]:
        rotary = rotary_of(model.model.rotary_emb)._replace(interleaved=True)
        return (rotary,) * len(model.model.layers)
