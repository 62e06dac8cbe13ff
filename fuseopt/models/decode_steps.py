"""Decode steps of the families that the common policy covers."""

from collections.abc import Mapping

from fuseopt.generation.families.step_interface import StepName
from fuseopt.models.policy import modeling_name

_FAMILIES = "fuseopt.generation.families"
# model type -> prefix of its classes and of its step, whose module has the model type's name.
_CAUSAL = {
    "cohere": "Cohere",
    "gemma": "Gemma",
    "gpt_neox": "GPTNeoX",
    "gptj": "GPTJ",
    "granite": "Granite",
    "llama": "Llama",
    "mistral": "Mistral",
    "olmo2": "Olmo2",
    "opt": "OPT",
    "phi3": "Phi3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "smollm3": "SmolLM3",
    "stablelm": "StableLm",
    "starcoder2": "Starcoder2",
}

DECODE_STEPS: Mapping[str, StepName] = {
    **{
        modeling_name(f"{model_type}.{prefix}ForCausalLM"): f"{_FAMILIES}.{model_type}.{prefix}Step"
        for model_type, prefix in _CAUSAL.items()
    },
    **{
        modeling_name(model_class): f"{_FAMILIES}.bart.{step}"
        for model_class, step in (
            ("bart.BartForConditionalGeneration", "BartStep"),
            ("marian.MarianMTModel", "MarianStep"),
            ("mbart.MBartForConditionalGeneration", "MBartStep"),
            ("pegasus.PegasusForConditionalGeneration", "PegasusStep"),
        )
    },
    modeling_name("whisper.WhisperForConditionalGeneration"): f"{_FAMILIES}.whisper.WhisperStep",
    modeling_name("olmo.OlmoForCausalLM"): f"{_FAMILIES}.olmo2.OlmoStep",
    modeling_name("gemma2.Gemma2ForCausalLM"): f"{_FAMILIES}.gemma.Gemma2Step",
    modeling_name("gemma3.Gemma3ForCausalLM"): f"{_FAMILIES}.gemma.Gemma3Step",
}
"""By the full name of a model class, as `ModelPolicy.decode_steps`."""
