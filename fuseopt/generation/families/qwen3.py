"""Qwen3Step: Qwen3ForCausalLM as a DecoderSpec."""

from fuseopt.generation.families.llama_like import LlamaLikeStep, llama_like


class Qwen3Step(LlamaLikeStep):
    """Upstream: `Qwen3ForCausalLM.forward` for one token a row."""

    model_class, children = llama_like("qwen3.Qwen3")
    windowed = "typed"
