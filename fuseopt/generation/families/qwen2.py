"""Qwen2Step: Qwen2ForCausalLM as a DecoderSpec."""

from fuseopt.generation.families.llama_like import LlamaLikeStep, llama_like


class Qwen2Step(LlamaLikeStep):
    """Upstream: `Qwen2ForCausalLM.forward` for one token a row."""

    model_class, children = llama_like("qwen2.Qwen2")
    windowed = "typed"
