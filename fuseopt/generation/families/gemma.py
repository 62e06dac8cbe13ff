"""GemmaStep, Gemma2Step and Gemma3Step: the text models of Gemma 1 to 3 as DecoderSpecs."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from fuseopt.generation.families.decoder_spec import DecoderSpec, Layer, RotaryPositions
from fuseopt.generation.families.llama_like import LlamaLikeStep, llama_like, rotary_of

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


class GemmaStep(LlamaLikeStep):
    """Upstream: `GemmaForCausalLM.forward` for one token a row. Norm weights are stored minus one."""

    model_class, children = llama_like("gemma.Gemma", embedding="TextScaledWordEmbedding")
    norm_kind = "gemma_rms_norm"

    @staticmethod
    def not_supported_reasons(model: nn.Module) -> list[str]:
        reasons = LlamaLikeStep.not_supported_reasons(model)
        if getattr(model.config, "use_bidirectional_attention", False):
            reasons.append("use_bidirectional_attention lets tokens attend to later ones")
        return reasons

    @classmethod
    def spec_of(cls, model: nn.Module) -> DecoderSpec:
        tokens = model.model.embed_tokens
        return replace(
            super().spec_of(model),
            embedding_scale=float(tokens.embed_scale.to(tokens.weight.dtype)),
            head_softcap=getattr(model.config, "final_logit_softcapping", None),
        )


class Gemma2Step(GemmaStep):
    """Upstream: `Gemma2ForCausalLM.forward` for one token a row. Scores are capped, and some layers have a window."""

    model_class, children = llama_like("gemma2.Gemma2", embedding="TextScaledWordEmbedding")
    norms = _NORMS
    windowed = "typed"
    prompt_attentions = ("eager", "sdpa")
    config_fields = (*GemmaStep.config_fields, "_attn_implementation")

    @classmethod
    def layer_of(cls, block: nn.Module, rotary: RotaryPositions | None, like: Tensor) -> Layer:
        layer, own = super().layer_of(block, rotary, like), block.self_attn
        # Some versions of transformers run it with "sdpa" too, whose scores are not capped.
        softcap = own.attn_logit_softcapping if own.config._attn_implementation == "eager" else None
        return layer._replace(self_attention=layer.self_attention._replace(softcap=softcap))


class Gemma3Step(GemmaStep):
    """Upstream: `Gemma3ForCausalLM.forward` for one token a row. Layers with a window rotate by other frequencies."""

    model_class, children = llama_like("gemma3.Gemma3", model="TextModel", embedding="TextScaledWordEmbedding")
    norms = _NORMS
    windowed = "typed"

    @staticmethod
    def rotary_by_layer(model: nn.Module) -> Sequence[RotaryPositions | None]:
        types = model.config.layer_types
        rotary = {layer_type: rotary_of(model.model.rotary_emb, layer_type) for layer_type in {*types}}
        return [rotary[layer_type] for layer_type in types]
