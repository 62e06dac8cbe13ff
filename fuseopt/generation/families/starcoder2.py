"""Starcoder2Step: Starcoder2ForCausalLM as a DecoderSpec."""

from torch import nn

from fuseopt.generation.engine.layers import activation_of, linear_of
from fuseopt.generation.families.decoder_spec import FeedForward
from fuseopt.generation.families.llama_like import LlamaLikeStep, llama_like


class Starcoder2Step(LlamaLikeStep):
    """Upstream: `Starcoder2ForCausalLM.forward` for one token a row. Llama with LayerNorms and no gates."""

    model_class, children = llama_like("starcoder2.Starcoder2", norm="")
    norm_kind = "layer_norm"
    windowed = "all"

    @staticmethod
    def feed_forward_of(mlp: nn.Module) -> FeedForward:
        return FeedForward(None, linear_of(mlp.c_fc), activation_of(mlp.act), linear_of(mlp.c_proj))
