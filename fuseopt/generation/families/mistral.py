"""MistralStep: MistralForCausalLM as a DecoderSpec."""

from fuseopt.generation.families.llama_like import LlamaLikeStep, llama_like


class MistralStep(LlamaLikeStep):
    """Upstream: `MistralForCausalLM.forward` for one token a row."""

    model_class, children = llama_like("mistral.Mistral")
    windowed = "all"
