"""StableLmStep: StableLmForCausalLM as a DecoderSpec."""

from dataclasses import replace

from torch import nn

from fuseopt.generation.families.decoder_spec import DecoderSpec
from fuseopt.generation.families.llama_like import LlamaLikeStep, llama_like


class StableLmStep(LlamaLikeStep):
    """Upstream: `StableLmForCausalLM.forward` for one token a row. Llama with LayerNorms and a partial rotation."""

    model_class, children = llama_like("stablelm.StableLm", norm="")
    norm_kind = "layer_norm"
    config_fields = (*LlamaLikeStep.config_fields, "use_parallel_residual")

    @staticmethod
    def not_supported_reasons(model: nn.Module) -> list[str]:
        reasons = LlamaLikeStep.not_supported_reasons(model)
        if model.config.qk_layernorm:
            reasons.append("qk_layernorm has a norm of its own for each head")
        return reasons

    @classmethod
    def spec_of(cls, model: nn.Module) -> DecoderSpec:
        return replace(super().spec_of(model), parallel_residual=model.model.layers[0].use_parallel_residual)
