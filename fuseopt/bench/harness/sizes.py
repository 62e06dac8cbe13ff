"""ARCHITECTURES: the sizes of checkpoints, by name, as fields of their transformers configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NO_ENDS: Mapping[str, Any] = {"bos_token_id": None, "eos_token_id": None}


def _llama(width: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, **others: Any) -> dict[str, Any]:
    """Sizes by the names of Llama's config."""
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **others,
    }


def _llama3(factor: float) -> dict[str, Any]:
    """The rotation of Llama 3.1 and 3.2."""
    rotary = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_parameters": rotary}


def _bart(width: int, inner: int, layers: int, heads: int, vocab: int, **others: Any) -> dict[str, Any]:
    """Sizes by the names of BART's config, with as many layers in the encoder as in the decoder."""
    return {
        "d_model": width,
        **{f"{side}_ffn_dim": inner for side in ("encoder", "decoder")},
        **{f"{side}_layers": layers for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": heads for side in ("encoder", "decoder")},
        "vocab_size": vocab,
        **others,
    }


def _rotary(base: float, **others: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base, **others}}


_QWEN: Mapping[str, Any] = {"max_position_embeddings": 32768, **_rotary(1e6)}
_MULTILINGUAL_T5: Mapping[str, Any] = {
    "d_model": 768,
    "d_ff": 2048,
    "num_layers": 12,
    "num_heads": 12,
    "tie_word_embeddings": False,
    "decoder_start_token_id": 0,
}
_MISTRAL_7B: Mapping[str, Any] = _llama(4096, 14336, 32, 32, 8, 32000, sliding_window=4096, tie_word_embeddings=False)
_GPT_J: Mapping[str, Any] = {"tie_word_embeddings": False, **_NO_ENDS}
_AYA_8B: Mapping[str, Any] = _llama(4096, 14336, 32, 32, 8, 256000, logit_scale=0.125, **_rotary(10000.0))
# Sizes are those of the original checkpoints' config.json files.
ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-medium": ("gpt2", {"n_layer": 24, "n_embd": 1024, "n_head": 16}),
    "gpt2-large": ("gpt2", {"n_layer": 36, "n_embd": 1280, "n_head": 20}),
    "gpt2-xl": ("gpt2", {"n_layer": 48, "n_embd": 1600, "n_head": 25}),
    "gpt2-tiny": ("gpt2", {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 512, **_NO_ENDS}),
    # As in examples/checkpoints.
    "gpt2-kjv": (
        "gpt2",
        {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": 256, "vocab_size": 4096, **_NO_ENDS},
    ),
    "llama-kjv": (
        "llama",
        _llama(256, 704, 4, 4, 2, 2938, max_position_embeddings=256, tie_word_embeddings=True, **_NO_ENDS),
    ),
    "t5-kjv": ("t5", {"d_model": 256, "d_ff": 768, "num_layers": 3, "num_heads": 4, "vocab_size": 4096}),
    "t5-small": ("t5", {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8}),
    "t5-base": ("t5", {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}),
    "t5-large": ("t5", {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16}),
    "t5-v1_1-base": (
        "t5",
        {
            "d_model": 768,
            "d_ff": 2048,
            "num_layers": 12,
            "num_heads": 12,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
        },
    ),
    "llama-3.2-1b": (
        "llama",
        _llama(2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True, **_llama3(32.0)),
    ),
    "llama-3.1-8b": ("llama", _llama(4096, 14336, 32, 32, 8, 128256, **_llama3(8.0))),
    "smollm2-135m": (
        "llama",
        _llama(576, 1536, 30, 9, 3, 49152, max_position_embeddings=8192, tie_word_embeddings=True),
    ),
    "llama-tiny": (
        "llama",
        _llama(64, 128, 2, 4, 2, 512, max_position_embeddings=256, tie_word_embeddings=True, **_NO_ENDS),
    ),
    "qwen2.5-0.5b": ("qwen2", _llama(896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True, **_QWEN)),
    "qwen3-0.6b": ("qwen3", _llama(1024, 3072, 28, 16, 8, 151936, head_dim=128, tie_word_embeddings=True, **_QWEN)),
    "gemma-3-1b": ("gemma3_text", _llama(1152, 6912, 26, 4, 1, 262144, head_dim=256, sliding_window=512)),
    "smollm2-360m": (
        "llama",
        _llama(960, 2560, 32, 15, 5, 49152, max_position_embeddings=8192, tie_word_embeddings=True),
    ),
    "smollm3-3b": ("smollm3", _llama(2048, 11008, 36, 16, 4, 128256, tie_word_embeddings=True, **_rotary(5e6))),
    "mistral-7b": ("mistral", _MISTRAL_7B),
    "mistral-7b-6-layers": ("mistral", {**_MISTRAL_7B, "num_hidden_layers": 6}),
    "phi-3-mini": ("phi3", _llama(3072, 8192, 32, 32, 32, 32064, sliding_window=2047, tie_word_embeddings=False)),
    "gemma-2b": ("gemma", _llama(2048, 16384, 18, 8, 1, 256000, head_dim=256)),
    "gemma-2-2b": ("gemma2", _llama(2304, 9216, 26, 8, 4, 256000, head_dim=256, query_pre_attn_scalar=256)),
    "olmo-1b": ("olmo", _llama(2048, 8192, 16, 16, 16, 50304, tie_word_embeddings=True)),
    "olmo2-1b": ("olmo2", _llama(2048, 8192, 16, 16, 16, 100352, tie_word_embeddings=False, **_rotary(5e5))),
    "granite-3-2b": (
        "granite",
        _llama(
            *(2048, 8192, 40, 32, 8, 49155),
            tie_word_embeddings=True,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.015625,
            logits_scaling=8.0,
            **_rotary(1e7),
        ),
    ),
    "stablelm-2-1.6b": (
        "stablelm",
        _llama(*(2048, 5632, 24, 32, 32, 100352), use_qkv_bias=True, **_rotary(1e4, partial_rotary_factor=0.25)),
    ),
    "starcoder2-3b": ("starcoder2", _llama(3072, 12288, 30, 24, 2, 49152, sliding_window=4096, **_rotary(1e6))),
    "aya-expanse-8b": ("cohere", _AYA_8B),
    "aya-expanse-8b-4-layers": ("cohere", {**_AYA_8B, "num_hidden_layers": 4}),
    "pythia-410m": (
        "gpt_neox",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "vocab_size": 50304,
            **_rotary(10000.0, partial_rotary_factor=0.25),
        },
    ),
    "gpt-j-6b": ("gptj", _GPT_J),
    "gpt-j-6b-4-layers": ("gptj", {**_GPT_J, "n_layer": 4}),
    "opt-125m": ("opt", {}),
    "opt-350m": (
        "opt",
        {
            "hidden_size": 1024,
            "word_embed_proj_dim": 512,
            "ffn_dim": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "do_layer_norm_before": False,
        },
    ),
    "bart-base": ("bart", _bart(768, 3072, 6, 12, 50265)),
    "mbart-large": ("mbart", _bart(1024, 4096, 12, 16, 250027, scale_embedding=True, decoder_start_token_id=2)),
    "pegasus-large": ("pegasus", _bart(1024, 4096, 16, 16, 96103, scale_embedding=True, activation_function="relu")),
    "opus-mt": (
        "marian",
        _bart(
            *(512, 2048, 6, 8, 58101),
            scale_embedding=True,
            activation_function="swish",
            max_position_embeddings=512,
            decoder_start_token_id=58100,
            forced_eos_token_id=None,
        ),
    ),
    "mt5-base": ("mt5", {**_MULTILINGUAL_T5, "vocab_size": 250112}),
    "umt5-base": ("umt5", {**_MULTILINGUAL_T5, "vocab_size": 256384}),
    "whisper-small": (
        "whisper",
        {**_bart(768, 3072, 12, 12, 51865), "architectures": ["WhisperForConditionalGeneration"]},
    ),
    "t5-tiny": ("t5", {"d_model": 64, "d_ff": 128, "d_kv": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 512}),
}
