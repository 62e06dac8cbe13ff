"""Attributes that a model's own forward reads and a decode step takes from elsewhere: whether both would agree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from fuseopt.models.policy import modeling_name
from fuseopt.modules.base import full_name, source_class
from fuseopt.modules.children import CONV1D, LAYER_NORM

_GPT2 = "transformers.models.gpt2.modeling_gpt2.GPT2"
_T5S = tuple(f"transformers.models.{name}.modeling_{name}.{name.upper()}" for name in ("t5", "mt5", "umt5"))


def _of_gpt2_attention(attention: Any) -> Mapping[str, object]:
    heads, width = attention.config.num_attention_heads, attention.config.hidden_size
    return {"num_heads": heads, "head_dim": width // heads, "split_size": width}


def _of_t5_attention(attention: Any) -> Mapping[str, object]:
    config, bias = attention.config, attention._modules.get("relative_attention_bias")
    buckets = {} if bias is None else {"relative_attention_num_buckets": bias.weight.shape[0]}
    sizes = {"n_heads": config.num_heads, "key_value_proj_dim": config.d_kv, "is_decoder": config.is_decoder}
    return {**sizes, **buckets, "has_relative_attention_bias": bias is not None}


def _of_grouped_attention(attention: Any) -> Mapping[str, object]:
    config = attention.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    expected = {"head_dim": head_dim, "num_key_value_groups": heads // kv_heads, "num_key_value_heads": kv_heads}
    # These are StableLM's and Cohere's.
    expected |= {"num_heads": heads, "qk_layernorm": getattr(config, "qk_layernorm", False)}
    expected |= {"use_qk_norm": getattr(config, "use_qk_norm", False)}
    if "rotary_ndims" in attention.__dict__:
        expected["rotary_ndims"] = int(head_dim * config.rope_parameters["partial_rotary_factor"])
    return {name: value for name, value in expected.items() if name in attention.__dict__} | {"is_causal": True}


def _of_neox_attention(attention: Any) -> Mapping[str, object]:
    return {"head_size": attention.config.hidden_size // attention.config.num_attention_heads, "is_causal": True}


def _of_gptj_attention(attention: Any) -> Mapping[str, object]:
    config = attention.config
    heads = config.num_attention_heads
    return {"num_attention_heads": heads, "head_dim": config.hidden_size // heads, "rotary_dim": config.rotary_dim}


def _of_opt_attention(attention: Any) -> Mapping[str, object]:
    heads, width = attention.config.num_attention_heads, attention.config.hidden_size
    return {"num_heads": heads, "head_dim": width // heads}


def _of_sliding_model(model: Any) -> Mapping[str, object]:
    return {"has_sliding_layers": "sliding_attention" in model.config.layer_types}


_GROUPED = (
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "SmolLM3",
    "Phi3",
    "Gemma",
    "Gemma2",
    "Gemma3",
    "Granite",
    "Cohere",
    "Olmo",
    "Olmo2",
    "StableLm",
    "Starcoder2",
)
_NEOX = "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoX"

_EXPECTED: Mapping[str, Callable[[Any], Mapping[str, object]]] = {
    CONV1D: lambda module: {"nf": module.weight.shape[1]},
    # None, which no LayerNorm has, says that one without a weight is not for a decode step.
    LAYER_NORM: lambda module: {"normalized_shape": None if module.weight is None else tuple(module.weight.shape)},
    f"{_GPT2}Attention": _of_gpt2_attention,
    **{modeling_name(f"{name.lower()}.{name}Attention"): _of_grouped_attention for name in _GROUPED},
    **{modeling_name(f"{name.lower()}.{name}Model"): _of_sliding_model for name in ("Qwen2", "Qwen3", "SmolLM3")},
    f"{_NEOX}Attention": _of_neox_attention,
    f"{_NEOX}Layer": lambda layer: {"use_parallel_residual": layer.attention.config.use_parallel_residual},
    modeling_name("stablelm.StableLmDecoderLayer"): lambda layer: {
        "use_parallel_residual": layer.self_attn.config.use_parallel_residual
    },
    modeling_name("gptj.GPTJAttention"): _of_gptj_attention,
    modeling_name("opt.OPTAttention"): _of_opt_attention,
    modeling_name("granite.GraniteDecoderLayer"): lambda layer: {
        "residual_multiplier": layer.self_attn.config.residual_multiplier
    },
    **{f"{prefix}Attention": _of_t5_attention for prefix in _T5S},
    **{f"{prefix}Block": lambda block: {"is_decoder": len(block.layer) > 2} for prefix in _T5S},
    **{f"{prefix}Stack": lambda stack: {"is_decoder": stack.config.is_decoder} for prefix in _T5S},
}
"""By the full name of a module's class: the values for which its forward computes what a decode step computes."""


def contradictions(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """The modules with an attribute for which their forward computes something else or raises, and its name.

    Every attribute that is looked at is in `fuseopt.runtime.module_watch.REDUNDANT`.

    Args:
        modules: as `modules_below` finds them, so those of the last layer first.
    """
    layers: defaultdict[tuple[type, str], list[Any]] = defaultdict(list)
    for module in reversed(modules):
        state = module.__dict__
        of = _EXPECTED.get(full_name(source_class(module)))
        if of is not None:
            yield from ((module, name) for name, value in of(module).items() if state.get(name) != value)
        for name, child in state["_modules"].items():
            if child is not None and "layer_idx" in child.__dict__:
                layers[type(module), name].append(child)
    for children in layers.values():
        taken: set[object] = set()
        # Attentions without a cache, such as an encoder's, have no number.
        for child in children if any(child.layer_idx is not None for child in children) else ():
            # Two layers of one number would share a place in transformers' cache, and numbers above have none.
            index, config = child.layer_idx, child.config
            if index in taken or index not in range(
                max(config.num_hidden_layers, getattr(config, "decoder_layers", 0))
            ):
                yield child, "layer_idx"
            taken.add(index)
