"""GPTNeoXStep: GPTNeoXForCausalLM (Pythia) as a DecoderSpec."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fuseopt.generation.engine.layers import activation_of, layer_norm_of, linear_of
from fuseopt.generation.families.decoder_spec import DecoderSpec, FeedForward, Layer, RotaryPositions, SelfAttention
from fuseopt.generation.families.llama_like import rope_reasons, rotary_of
from fuseopt.generation.families.spec_step import SpecStep
from fuseopt.modules.children import GPT_NEOX_CHILDREN


def _layer(block: nn.Module, rotary: RotaryPositions) -> Layer:
    own, mlp = block.attention, block.mlp
    return Layer(
        SelfAttention(
            layer_norm_of(block.input_layernorm),
            linear_of(own.query_key_value),
            linear_of(own.dense),
            own.scaling,
            per_head=True,
            rotary=rotary,
        ),
        FeedForward(
            layer_norm_of(block.post_attention_layernorm),
            linear_of(mlp.dense_h_to_4h),
            activation_of(mlp.act),
            linear_of(mlp.dense_4h_to_h),
        ),
    )


class GPTNeoXStep(SpecStep):
    """Upstream: `GPTNeoXForCausalLM.forward` for one token a row. A part of each head is rotated."""

    model_class = "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXForCausalLM"
    children = GPT_NEOX_CHILDREN

    @staticmethod
    def spec_of(model: nn.Module) -> DecoderSpec:
        body, attention = model.gpt_neox, model.gpt_neox.layers[0].attention
        rotary, heads = rotary_of(body.rotary_emb), model.config.num_attention_heads
        return DecoderSpec(
            token_embedding=body.embed_in.weight,
            layers=tuple(_layer(block, rotary) for block in body.layers),
            final_norm=layer_norm_of(body.final_layer_norm),
            head=linear_of(model.lm_head),
            heads=heads,
            kv_heads=heads,
            head_dim=attention.head_size,
            parallel_residual=body.layers[0].use_parallel_residual,
        )

    @staticmethod
    def roots(model: nn.Module) -> tuple[nn.Module, ...]:
        return model.gpt_neox, model.lm_head

    @staticmethod
    def not_supported_reasons(model: nn.Module) -> list[str]:
        return rope_reasons(model.gpt_neox)

    @staticmethod
    def buffers_of(model: nn.Module) -> Sequence[nn.Module]:
        return (model.gpt_neox.rotary_emb,)
