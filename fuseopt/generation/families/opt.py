"""OPTStep: OPTForCausalLM as a DecoderSpec."""

from __future__ import annotations

from torch import nn

from fuseopt.generation.engine.layers import activation_of, layer_norm_of, linear_of
from fuseopt.generation.families.decoder_spec import DecoderSpec, FeedForward, Layer, SelfAttention
from fuseopt.generation.families.spec_step import SpecStep
from fuseopt.modules.children import OPT_CHILDREN


def _layer(block: nn.Module) -> Layer:
    own, is_before = block.self_attn, block.do_layer_norm_before
    norms = layer_norm_of(block.self_attn_layer_norm), layer_norm_of(block.final_layer_norm)
    before, after = (norms, (None, None)) if is_before else ((None, None), norms)
    qkv, out = linear_of(own.q_proj, own.k_proj, own.v_proj), linear_of(own.out_proj)
    return Layer(
        SelfAttention(before[0], qkv, out, own.scaling, sum_norm=after[0]),
        FeedForward(
            before[1], linear_of(block.fc1), activation_of(block.activation_fn), linear_of(block.fc2), sum_norm=after[1]
        ),
    )


class OPTStep(SpecStep):
    """Upstream: `OPTForCausalLM.forward` for one token a row. Positions are learned, with an offset.

    In OPT-350M, projections lead from the embeddings' width to the layers' and back.
    """

    model_class = "transformers.models.opt.modeling_opt.OPTForCausalLM"
    children = OPT_CHILDREN

    @staticmethod
    def spec_of(model: nn.Module) -> DecoderSpec:
        decoder, attention = model.model.decoder, model.model.decoder.layers[0].self_attn
        positions, norm = decoder.embed_positions.weight[decoder.embed_positions.offset :], decoder.final_layer_norm
        projections = [None if part is None else linear_of(part) for part in (decoder.project_in, decoder.project_out)]
        return DecoderSpec(
            token_embedding=decoder.embed_tokens.weight,
            embedding_projection=projections[0],
            position_embedding=positions,
            max_length=len(positions),
            layers=tuple(_layer(block) for block in decoder.layers),
            final_norm=None if norm is None else layer_norm_of(norm),
            head_projection=projections[1],
            head=linear_of(model.lm_head),
            heads=attention.num_heads,
            kv_heads=attention.num_heads,
            head_dim=attention.head_dim,
        )

    @staticmethod
    def roots(model: nn.Module) -> tuple[nn.Module, ...]:
        return model.model, model.lm_head

    @staticmethod
    def not_supported_reasons(model: nn.Module) -> list[str]:
        affine = model.config.layer_norm_elementwise_affine
        return [] if affine else ["layer_norm_elementwise_affine leaves its LayerNorms without weights"]
