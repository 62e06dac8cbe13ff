"""LlamaStep: LlamaForCausalLM as a DecoderSpec."""

from fuseopt.generation.families.llama_like import LlamaLikeStep, llama_like


class LlamaStep(LlamaLikeStep):
    """Upstream: `LlamaForCausalLM.forward` for one token a row."""

    model_class, children = llama_like("llama.Llama")
