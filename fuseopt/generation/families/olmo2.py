"""OlmoStep and Olmo2Step: OlmoForCausalLM and Olmo2ForCausalLM as DecoderSpecs."""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from fuseopt.generation.engine.layers import Norm
from fuseopt.generation.families.decoder_spec import RotaryPositions
from fuseopt.generation.families.llama_like import LlamaLikeStep, llama_like, rotary_of


class Olmo2Step(LlamaLikeStep):
    """Upstream: `Olmo2ForCausalLM.forward` for one token a row. Norms follow attention and feed-forward."""

    model_class, children = llama_like("olmo2.Olmo2")
    norm_kind = "float32_rms_norm"
    norms: ClassVar[tuple[str | None, ...]] = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")

    @staticmethod
    def rotary_by_layer(model: nn.Module) -> Sequence[RotaryPositions | None]:
        rotary = rotary_of(model.model.rotary_emb)._replace(is_rounded=False)
        return (rotary,) * len(model.model.layers)


class OlmoStep(Olmo2Step):
    """Upstream: `OlmoForCausalLM.forward` for one token a row. Llama with LayerNorms that have no weights."""

    model_class, children = llama_like("olmo.Olmo", norm="LayerNorm")
    norms = LlamaLikeStep.norms
    config_fields = (*Olmo2Step.config_fields, "clip_qkv")

    @staticmethod
    def not_supported_reasons(model: nn.Module) -> list[str]:
        reasons = LlamaLikeStep.not_supported_reasons(model)
        if model.config.clip_qkv is not None:
            reasons.append("clip_qkv bounds queries, keys and values")
        return reasons

    @classmethod
    def norm_of(cls, norm: nn.Module, like: Tensor) -> Norm:
        # transformers has the eps in the forward.
        return Norm("layer_norm", like.new_ones(norm.normalized_shape), None, 1e-5)
