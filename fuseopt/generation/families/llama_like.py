"""LlamaLikeStep: base of Llama and of the families that name their modules as it does.

A family derives from LlamaLikeStep, and says in class attributes where it differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from fuseopt.generation.engine.layers import Norm, activation_of, halves_of, linear_of
from fuseopt.generation.families.decoder_spec import DecoderSpec, FeedForward, Layer, RotaryPositions, SelfAttention
from fuseopt.generation.families.spec_step import SpecStep
from fuseopt.modules.children import Children, llama_children

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def rotary_of(module: nn.Module, layer_type: str = "") -> RotaryPositions:
    """Of a module such as LlamaRotaryEmbedding, or of one that has frequencies for each type of layer."""
    prefix = f"{layer_type}_" if layer_type else ""
    return RotaryPositions(getattr(module, f"{prefix}inv_freq"), getattr(module, f"{prefix}attention_scaling", 1.0))


def rope_reasons(stack: nn.Module) -> list[str]:
    """Why the stack's rotary embedding does not rotate by a fixed table. `children` are not checked yet."""
    types = getattr(getattr(stack, "rotary_emb", None), "rope_type", {})
    kinds = {*types.values()} if isinstance(types, dict) else {types}
    unknown = sorted(kind for kind in kinds if kind not in _ROPE_TYPES)
    return [f"rope_type is {kind!r}, whose frequencies depend on the length" for kind in unknown]


def llama_like(name: str, **differences: str) -> tuple[str, Children]:
    """`model_class` and `children` of the family whose classes begin with `name`, such as "llama.Llama".

    Args:
        differences: as `llama_children` takes them.
    """
    module, _, prefix = name.partition(".")
    prefix = f"transformers.models.{module}.modeling_{module}.{prefix}"
    return f"{prefix}ForCausalLM", llama_children(prefix, **differences)


class LlamaLikeStep(SpecStep):
    """Base of the steps of such families.

    Attributes:
        norm_kind: of all norms.
        norms: names of a layer's norms: before attention, after it, before the feed-forward, after it.
        windowed: the layers for which the config's `sliding_window` holds: "none", "all", or "typed", those that its
            `layer_types` calls "sliding_attention".
    """

    config_fields: ClassVar[tuple[str, ...]] = (
        *("num_hidden_layers", "num_attention_heads", "sliding_window", "layer_types"),
        *("final_logit_softcapping", "logits_scaling"),
    )
    norm_kind: ClassVar[str] = "rms_norm"
    norms: ClassVar[tuple[str | None, ...]] = ("input_layernorm", None, "post_attention_layernorm", None)
    windowed: ClassVar[str] = "none"

    @staticmethod
    def roots(model: nn.Module) -> tuple[nn.Module, ...]:
        return model.model, model.lm_head

    @staticmethod
    def not_supported_reasons(model: nn.Module) -> list[str]:
        return rope_reasons(model.model)

    @staticmethod
    def buffers_of(model: nn.Module) -> Sequence[nn.Module]:
        return model.model.rotary_emb, model.model.embed_tokens

    @classmethod
    def spec_of(cls, model: nn.Module) -> DecoderSpec:
        body, config = model.model, model.config
        attention = body.layers[0].self_attn
        kv_heads = config.num_attention_heads // attention.num_key_value_groups
        rotary = cls.rotary_by_layer(model)
        return DecoderSpec(
            token_embedding=body.embed_tokens.weight,
            layers=tuple(
                cls.layer_of(block, rotary[index], body.embed_tokens.weight) for index, block in enumerate(body.layers)
            ),
            final_norm=cls.norm_of(body.norm, body.embed_tokens.weight),
            head=linear_of(model.lm_head),
            heads=config.num_attention_heads,
            kv_heads=kv_heads,
            head_dim=attention.head_dim,
        )

    @staticmethod
    def rotary_by_layer(model: nn.Module) -> Sequence[RotaryPositions | None]:
        return (rotary_of(model.model.rotary_emb),) * len(model.model.layers)

    @classmethod
    def layer_of(cls, block: nn.Module, rotary: RotaryPositions | None, like: Tensor) -> Layer:
        own, mlp = block.self_attn, block.mlp
        modules = [None if name is None else getattr(block, name) for name in cls.norms]
        norms = [None if module is None else cls.norm_of(module, like) for module in modules]
        if hasattr(own, "qkv_proj"):
            qkv = linear_of(own.qkv_proj)
        else:
            qkv = linear_of(own.q_proj, own.k_proj, own.v_proj)
        attention = SelfAttention(
            norms[0],
            qkv,
            linear_of(own.o_proj),
            own.scaling,
            rotary=rotary,
            q_norm=cls.norm_of(own.q_norm, like) if hasattr(own, "q_norm") else None,
            k_norm=cls.norm_of(own.k_norm, like) if hasattr(own, "k_norm") else None,
            window=cls.window_of(own),
            output_norm=norms[1],
        )
        return Layer(attention, cls.feed_forward_of(mlp)._replace(norm=norms[2], output_norm=norms[3]))

    @classmethod
    def window_of(cls, attention: nn.Module) -> int | None:
        config = attention.config
        if cls.windowed == "typed":
            slides = config.layer_types[attention.layer_idx] == "sliding_attention"
        else:
            slides = cls.windowed == "all"
        return config.sliding_window if slides else None

    @staticmethod
    def feed_forward_of(mlp: nn.Module) -> FeedForward:
        if hasattr(mlp, "gate_up_proj"):
            up, activation = halves_of(mlp.gate_up_proj), mlp.activation_fn
        else:
            up, activation = linear_of(mlp.gate_proj, mlp.up_proj), mlp.act_fn
        return FeedForward(None, up, activation_of(activation), linear_of(mlp.down_proj))

    @classmethod
    def norm_of(cls, norm: nn.Module, like: Tensor) -> Norm:
        """Args:
        like: a tensor with the dtype and the device of norms that have no weight.
        """
        eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        return Norm(cls.norm_kind, norm.weight, getattr(norm, "bias", None), eps)
