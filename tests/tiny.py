"""Tiny randomly initialised models of the families that have a policy, and a snapshot of all that a swap must keep."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LongT5Config,
    LongT5ForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    PreTrainedConfig,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

VOCAB = 61
_GPT2_SIZES = {
    "vocab_size": VOCAB,
    "n_positions": 64,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_T5_SIZES = {
    "vocab_size": VOCAB,
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 3,
    "decoder_start_token_id": 0,
}
_LLAMA_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# By the names that sizes have in the configs of transformers.
_SIZES = _LLAMA_SIZES | {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "dim", "embedding_size"), 32),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "attention_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "hidden_dim", "dim_ff"), 40),
    **dict.fromkeys(("n_layer", "encoder_layers", "decoder_layers", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 2),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("d_kv", "dim_head", "state_size", "q_lora_rank", "kv_lora_rank", "v_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    "n_positions": 64,
    "max_source_positions": 30,
    "rotary_dim": 4,
    "moe_intermediate_size": 16,
    "attention_types": [[["global", "local"], 1]],
}


def gpt2(seed: int = 0, **config) -> GPT2LMHeadModel:
    return random_model(GPT2LMHeadModel, GPT2Config(**_GPT2_SIZES | config), seed)


def t5(seed: int = 0, **config) -> T5ForConditionalGeneration:
    return random_model(T5ForConditionalGeneration, T5Config(**_T5_SIZES | config), seed)


def t5_gated(seed: int = 0, **config) -> T5ForConditionalGeneration:
    return t5(seed, feed_forward_proj="gated-gelu", tie_word_embeddings=False, **config)


def mt5(seed: int = 0, **config) -> MT5ForConditionalGeneration:
    return random_model(MT5ForConditionalGeneration, MT5Config(**_T5_SIZES | config), seed)


def umt5(seed: int = 0, **config) -> UMT5ForConditionalGeneration:
    return random_model(UMT5ForConditionalGeneration, UMT5Config(**_T5_SIZES | config), seed)


def longt5(seed: int = 0, **config) -> LongT5ForConditionalGeneration:
    sizes = _T5_SIZES | {"local_radius": 4, "encoder_attention_type": "local"}
    return random_model(LongT5ForConditionalGeneration, LongT5Config(**sizes | config), seed)


def decoder(model_type: str, seed: int = 0, **config) -> nn.Module:
    """Of a family whose config names sizes as Llama's does."""
    sizes = AutoConfig.for_model(model_type, **_LLAMA_SIZES | config)
    return random_model(MODEL_FOR_CAUSAL_LM_MAPPING[type(sizes)], sizes, seed)


def of_class(cls: type, seed: int = 0, **given: int) -> nn.Module:
    """Of any class of transformers, if its config names sizes as others do; without dropout, caches off.

    Args:
        given: sizes that are to be others, by their names in the config.
    """
    known = cls.config_class().to_dict()
    sizes = {name: size for name, size in _SIZES.items() if name in known}
    dropouts = {name: 0.0 for name, value in known.items() if "drop" in name and isinstance(value, float)}
    config = cls.config_class(**sizes | given, **dropouts, decoder_start_token_id=0, use_cache=False)
    return _drawn(cls, config, seed).float()


def labelled(model: nn.Module) -> dict[str, torch.Tensor]:
    """Arguments of a training step of such a model, some labels ignored."""
    batch = inputs(model)
    labels = batch["input_ids"].clone()
    labels[0, :2] = -100
    if model.main_input_name != "input_features":
        return {"input_ids": batch["input_ids"], "labels": labels}
    if model.config.model_type == "whisper":
        shape = 2, model.config.num_mel_bins, 2 * model.config.max_source_positions
    else:
        shape = 2, 40, model.config.input_feat_per_channel
    return {"input_features": torch.randn(shape), "labels": labels}


llama = partial(decoder, "llama")
gemma = partial(decoder, "gemma")
gemma3 = partial(decoder, "gemma3_text")
mistral = partial(decoder, "mistral")
phi3 = partial(decoder, "phi3")
qwen2 = partial(decoder, "qwen2")
qwen3 = partial(decoder, "qwen3")


FAMILIES = {
    "gpt2": gpt2,
    "t5": t5,
    "t5_gated": t5_gated,
    "mt5": mt5,
    "umt5": umt5,
    "longt5": longt5,
    "llama": llama,
    "gemma": gemma,
    "phi3": phi3,
}


def inputs(model: nn.Module, batch: int = 2, length: int = 7, seed: int = 1) -> dict[str, torch.Tensor]:
    """input_ids (and decoder_input_ids) of shape [batch, length] for a forward of `model`."""
    generator = torch.Generator("cpu").manual_seed(seed)
    ids = torch.randint(3, VOCAB, (batch, length), generator=generator, device="cpu").to(
        next(model.parameters()).device
    )
    if model.config.is_encoder_decoder:
        return {"input_ids": ids, "decoder_input_ids": ids.flip(1)[:, 1:].contiguous()}
    return {"input_ids": ids}


def logits(model: nn.Module, **kwargs) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs(model), **kwargs).logits


def snapshot(model: nn.Module) -> dict[str, object]:
    """Everything that restore must give back, by identity where identity is what counts."""
    return {
        "modules": {path: id(module) for path, module in model.named_modules(remove_duplicate=False)},
        "attributes": {path: dict.fromkeys(module.__dict__) for path, module in model.named_modules()},
        "parameters": {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)},
        "storage": {name: tensor.data_ptr() for name, tensor in model.state_dict().items()},
        "training": {path: module.training for path, module in model.named_modules()},
        "dtypes": {name: (p.dtype, p.device, p.requires_grad) for name, p in model.named_parameters()},
        "hooks": {path: list(module._forward_hooks) for path, module in model.named_modules()},
        "configs": {path: id(m.config) for path, m in model.named_modules() if hasattr(m, "config")},
        "config": model.config.to_dict() if hasattr(model, "config") else None,
    }


def random_model(model_class: type, config: PreTrainedConfig, seed: int = 0) -> nn.Module:
    """In evaluation mode. Ones of norms and zeros of biases are changed: they would hide an op that skips them."""
    model = _drawn(model_class, config, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, device="cpu").to(parameter.device))
    return model.eval()


def _drawn(model_class: type, config: PreTrainedConfig, seed: int) -> nn.Module:
    """A model on the default device; a seed draws its weights on the CPU, so that they are the same on any device."""
    torch.manual_seed(seed)
    with torch.device("cpu"):
        model = model_class(config)
    return model.to(torch.empty(0).device)


def assert_same_gradients(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal up to float32's rounding: of each tensor's own largest value, and of the largest of all."""
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        error = (actual[name] - gradient).abs().max().item()
        assert error <= 1e-4 * gradient.abs().max().item() + 1e-6 * max(largest, 1.0), f"{name}: {error}"
