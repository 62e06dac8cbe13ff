"""Phi3Step: Phi3ForCausalLM as a DecoderSpec."""

from fuseopt.generation.families.llama_like import LlamaLikeStep, llama_like


class Phi3Step(LlamaLikeStep):
    """Upstream: `Phi3ForCausalLM.forward` for one token a row. Projections are packed."""

    model_class, children = llama_like("phi3.Phi3")
    windowed = "all"
