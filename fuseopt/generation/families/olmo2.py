"""Olmo2Step: Olmo2ForCausalLM as a DecoderSpec."""

from collections.abc import Sequence

from torch import nn

from fuseopt.generation.families.decoder_spec import RotaryPositions
from fuseopt.generation.families.llama_like import LlamaLikeStep, llama_like, rotary_of


class Olmo2Step(LlamaLikeStep):
    """Upstream: `Olmo2ForCausalLM.forward` for one token a row. Norms follow attention and feed-forward."""

    model_class, children = llama_like("olmo2.Olmo2")
    norm_kind = "float32_rms_norm"
    norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")

    @staticmethod
    def rotary_by_layer(model: nn.Module) -> Sequence[RotaryPositions | None]:
        rotary = rotary_of(model.model.rotary_emb)._replace(is_rounded=False)
        return (rotary,) * len(model.model.layers)
