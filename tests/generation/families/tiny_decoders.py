"""Tiny random models of the families whose decode step is a DecoderSpec: what is special to a family is on."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers import (
    BartForConditionalGeneration,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MarianMTModel,
    MBartForConditionalGeneration,
    OPTConfig,
    OPTForCausalLM,
    PegasusForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from fuseopt.generation.families.spec_step import SpecStep
from fuseopt.generation.families.step_interface import decode_step_class
from fuseopt.models import full_name, policy_for
from tests import tiny

GROUPED = {"num_attention_heads": 6, "num_key_value_heads": 2}
_IDS = {"vocab_size": tiny.VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def grouped(model_type: str, **config: object) -> nn.Module:
    """Of a family whose config names sizes as Llama's does, with heads that share keys and values."""
    return tiny.decoder(model_type, **GROUPED, **config)


def stablelm(**config: object) -> nn.Module:
    rotary = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
    return grouped("stablelm", hidden_size=48, rope_parameters=rotary, **config)


def gpt_neox(**config: object) -> nn.Module:
    rotary = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
    sizes = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3}
    return tiny.random_model(GPTNeoXForCausalLM, GPTNeoXConfig(**_IDS, **sizes, rope_parameters=rotary, **config))


def gptj() -> nn.Module:
    sizes = {"n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 3, "rotary_dim": 4}
    return tiny.random_model(GPTJForCausalLM, GPTJConfig(**_IDS, **sizes))


def opt(**config: object) -> nn.Module:
    sizes = {"hidden_size": 24, "word_embed_proj_dim": 24, "ffn_dim": 40, "num_attention_heads": 3}
    layers = {"num_hidden_layers": 2, "max_position_embeddings": 64}
    return tiny.random_model(OPTForCausalLM, OPTConfig(**_IDS | sizes | layers | config))


def scaled(rope_type: str, **parameters: float) -> Callable[[], nn.Module]:
    """A Llama whose rotary embedding is scaled."""
    rotary = {"rope_type": rope_type, "rope_theta": 1e4, "original_max_position_embeddings": 16, **parameters}
    return partial(grouped, "llama", rope_parameters=rotary)


MULTIPLIERS = {
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "logits_scaling": 3.0,
}
_GEMMA = {"sliding_window": 4, "query_pre_attn_scalar": 8}
_TYPES = {"layer_types": ["sliding_attention", "full_attention"]}
_FULL = {"layer_types": ["full_attention", "full_attention"]}  # which only the caches of Mistral and Phi-3 read

DECODERS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": tiny.gpt2,
    "llama": partial(grouped, "llama", attention_bias=True, mlp_bias=True),
    "llama3_rope": scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    "linear_rope": scaled("linear", factor=4.0),
    "yarn_rope": scaled("yarn", factor=4.0),
    "mistral": partial(grouped, "mistral", sliding_window=4),
    "mistral_full_cache": partial(grouped, "mistral", sliding_window=4, **_FULL),
    "qwen2": partial(grouped, "qwen2", use_sliding_window=True, sliding_window=4, **_TYPES),
    "qwen3": partial(grouped, "qwen3"),
    "smollm3": partial(grouped, "smollm3", no_rope_layers=[1, 0]),
    "stablelm": partial(stablelm, use_qkv_bias=True),
    "stablelm_parallel": partial(stablelm, use_parallel_residual=True),
    "starcoder2": partial(grouped, "starcoder2", sliding_window=4),
    "cohere": partial(grouped, "cohere", hidden_size=48, logit_scale=0.3, attention_bias=True),
    "phi3": partial(grouped, "phi3", sliding_window=4),
    "phi3_full_cache": partial(grouped, "phi3", sliding_window=4, **_FULL),
    "gemma": partial(grouped, "gemma"),
    "gemma2": partial(grouped, "gemma2", attn_logit_softcapping=2.0, final_logit_softcapping=3.0, **_GEMMA, **_TYPES),
    "gemma3": partial(grouped, "gemma3_text", **_GEMMA, **_TYPES),
    "gpt_neox": gpt_neox,
    "gpt_neox_sequential": partial(gpt_neox, use_parallel_residual=False),
    "gptj": gptj,
    "gptj_rounded": lambda: gptj().to(torch.bfloat16).float(),  # stored sines and cosines too
    "granite": partial(grouped, "granite", **MULTIPLIERS),
    "olmo": partial(grouped, "olmo"),
    "olmo2": partial(grouped, "olmo2"),
    "opt": opt,
    "opt_projected": partial(opt, word_embed_proj_dim=16),
    "opt_350m": partial(opt, word_embed_proj_dim=16, do_layer_norm_before=False),
    "opt_post_norm": partial(opt, do_layer_norm_before=False),
}
"""Decoder-only models, by the name of a family or of a variant."""


def bart(model_class: type[nn.Module], **config: object) -> nn.Module:
    """Of BART or a family whose config has the same names."""
    sizes = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64}
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
    inner = {"encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "scale_embedding": True}
    ids = {"decoder_start_token_id": 2, "forced_eos_token_id": None, "forced_bos_token_id": None}
    model = tiny.random_model(model_class, model_class.config_class(**_IDS | ids, **sizes, **heads, **inner, **config))
    with torch.no_grad():
        model.final_logits_bias.normal_()
    return model


def whisper() -> nn.Module:
    """With two languages, two tasks, and timestamps from token 36 on; it reads 60 frames at a time."""
    sizes = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8, "max_source_positions": 30}
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "max_target_positions": 40}
    ids = {"decoder_start_token_id": 3, "begin_suppress_tokens": None, "suppress_tokens": None}
    inner = {"encoder_ffn_dim": 40, "decoder_ffn_dim": 40}
    config = WhisperConfig(**_IDS, **sizes, **heads, **ids, **inner)
    model = tiny.random_model(WhisperForConditionalGeneration, config)
    languages = {"lang_to_id": {"<|en|>": 31, "<|de|>": 32}, "task_to_id": {"transcribe": 33, "translate": 34}}
    times = {"no_timestamps_token_id": 35, "max_initial_timestamp_index": 4, "prev_sot_token_id": 30}
    vars(model.generation_config).update(is_multilingual=True, **languages, **times)
    return model


ENCODER_DECODERS: dict[str, Callable[[], nn.Module]] = {
    "t5": tiny.t5,
    "t5_gated": tiny.t5_gated,
    "mt5": tiny.mt5,
    "mt5_of_t5": partial(tiny.mt5, scale_decoder_outputs=True),  # which only T5 reads
    "umt5": tiny.umt5,
    "bart": partial(bart, BartForConditionalGeneration),
    "marian": partial(bart, MarianMTModel, decoder_vocab_size=tiny.VOCAB),
    "mbart": partial(bart, MBartForConditionalGeneration),
    "pegasus": partial(bart, PegasusForConditionalGeneration),
}
"""Models with an encoder, likewise."""


def step_of(model: nn.Module) -> type[SpecStep]:
    """The decode step that the model's policy names."""
    step = decode_step_class(policy_for(model).decode_steps[full_name(type(model))])
    assert issubclass(step, SpecStep)
    return step


def randomised(model: nn.Module) -> nn.Module:
    """Weights whose attention, norms and biases all show in the logits."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu") * scale)
    return model.eval()
