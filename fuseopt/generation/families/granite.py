"""GraniteStep: GraniteForCausalLM as a DecoderSpec."""

from dataclasses import replace

from torch import nn

from fuseopt.generation.families.decoder_spec import DecoderSpec
from fuseopt.generation.families.llama_like import LlamaLikeStep, llama_like


class GraniteStep(LlamaLikeStep):
    """Upstream: `GraniteForCausalLM.forward` for one token a row. Llama with multipliers."""

    model_class, children = llama_like("granite.Granite")

    @classmethod
    def spec_of(cls, model: nn.Module) -> DecoderSpec:
        return replace(
            super().spec_of(model),
            embedding_scale=model.model.embedding_multiplier,
            residual_scale=model.model.layers[0].residual_multiplier,
            head_scale=1 / model.config.logits_scaling,
        )
