"""SmolLM3Step: SmolLM3ForCausalLM as a DecoderSpec."""

from collections.abc import Sequence

from torch import nn

from fuseopt.generation.families.decoder_spec import RotaryPositions
from fuseopt.generation.families.llama_like import LlamaLikeStep, llama_like, rotary_of


class SmolLM3Step(LlamaLikeStep):
    """Upstream: `SmolLM3ForCausalLM.forward` for one token a row. Some layers do not rotate."""

    model_class, children = llama_like("smollm3.SmolLM3")
    windowed = "typed"

    @staticmethod
    def rotary_by_layer(model: nn.Module) -> Sequence[RotaryPositions | None]:
        rotary = rotary_of(model.model.rotary_emb)
        return [rotary if layer.self_attn.use_rope else None for layer in model.model.layers]
