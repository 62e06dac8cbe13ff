"""GPTJStep: GPTJForCausalLM as a DecoderSpec."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fuseopt.generation.engine.layers import activation_of, layer_norm_of, linear_of
from fuseopt.generation.families.decoder_spec import DecoderSpec, FeedForward, Layer, RotaryPositions, SelfAttention
from fuseopt.generation.families.spec_step import SpecStep
from fuseopt.modules.children import GPTJ_CHILDREN


def _layer(block: nn.Module, rotary: RotaryPositions) -> Layer:
    own, mlp = block.attn, block.mlp
    qkv = linear_of(own.q_proj, own.k_proj, own.v_proj)
    return Layer(
        SelfAttention(
            layer_norm_of(block.ln_1), qkv, linear_of(own.out_proj), 1 / float(own.scale_attn), rotary=rotary
        ),
        FeedForward(None, linear_of(mlp.fc_in), activation_of(mlp.act), linear_of(mlp.fc_out)),
    )


class GPTJStep(SpecStep):
    """Upstream: `GPTJForCausalLM.forward` for one token a row. Neighbouring elements of a head are rotated."""

    model_class = "transformers.models.gptj.modeling_gptj.GPTJForCausalLM"
    children = GPTJ_CHILDREN
    prompt_attentions = ("eager",)

    @staticmethod
    def spec_of(model: nn.Module) -> DecoderSpec:
        body, attention = model.transformer, model.transformer.h[0].attn
        # Stored, as a cast of the model has rounded them.
        rotary = RotaryPositions(None, interleaved=True, stored=attention.embed_positions)
        return DecoderSpec(
            token_embedding=body.wte.weight,
            layers=tuple(_layer(block, rotary) for block in body.h),
            final_norm=layer_norm_of(body.ln_f),
            head=linear_of(model.lm_head),
            heads=attention.num_attention_heads,
            kv_heads=attention.num_attention_heads,
            head_dim=attention.head_dim,
            max_length=len(attention.embed_positions),
            parallel_residual=True,
        )

    @staticmethod
    def roots(model: nn.Module) -> tuple[nn.Module, ...]:
        return model.transformer, model.lm_head

    @staticmethod
    def buffers_of(model: nn.Module) -> Sequence[nn.Module]:
        return [block.attn for block in model.transformer.h]
