"""GPT2Step: GPT2LMHeadModel as a DecoderSpec."""

from __future__ import annotations

from torch import nn

from fuseopt.generation.engine.layers import activation_of, conv1d_of, layer_norm_of, linear_of
from fuseopt.generation.families.decoder_spec import DecoderSpec, FeedForward, Layer, SelfAttention
from fuseopt.generation.families.spec_step import SpecStep
from fuseopt.modules.children import GPT2_CHILDREN


def spec_of(model: nn.Module) -> DecoderSpec:
    """Of a GPT2LMHeadModel without cross-attention."""
    transformer, attention = model.transformer, model.transformer.h[0].attn
    return DecoderSpec(
        token_embedding=transformer.wte.weight,
        position_embedding=transformer.wpe.weight,
        max_length=transformer.wpe.weight.shape[0],
        layers=tuple(_layer(block) for block in transformer.h),
        final_norm=layer_norm_of(transformer.ln_f),
        head=linear_of(model.lm_head),
        heads=attention.num_heads,
        kv_heads=attention.num_heads,
        head_dim=attention.head_dim,
    )


def _layer(block: nn.Module) -> Layer:
    attention, mlp = block.attn, block.mlp
    return Layer(
        SelfAttention(
            layer_norm_of(block.ln_1), conv1d_of(attention.c_attn), conv1d_of(attention.c_proj), attention.scaling
        ),
        FeedForward(layer_norm_of(block.ln_2), conv1d_of(mlp.c_fc), activation_of(mlp.act), conv1d_of(mlp.c_proj)),
    )


class GPT2Step(SpecStep):
    """Upstream: `GPT2LMHeadModel.forward` for one token a row."""

    model_class = "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel"
    children = GPT2_CHILDREN
    spec_of = staticmethod(spec_of)

    @staticmethod
    def roots(model: nn.Module) -> tuple[nn.Module, ...]:
        return model.transformer, model.lm_head

    @staticmethod
    def not_supported_reasons(model: nn.Module) -> list[str]:
        if model.config.add_cross_attention:
            return ["it has cross-attention"]
        if model.config.reorder_and_upcast_attn:
            return ["reorder_and_upcast_attn computes attention in a float32 order of its own"]
        return []
