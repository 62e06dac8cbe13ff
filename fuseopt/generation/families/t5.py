"""T5Step: T5ForConditionalGeneration (v1.0 and v1.1) as a DecoderSpec."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

from torch import Tensor, nn

from fuseopt.generation.engine.layers import linear_of
from fuseopt.generation.families.decoder_spec import CrossAttention, DecoderSpec, Layer, RelativeBias
from fuseopt.generation.families.spec_step import SpecStep
from fuseopt.generation.families.step_interface import EncoderStep
from fuseopt.generation.families.t5_encoder import T5Encoder
from fuseopt.generation.families.t5_layers import feed_forward_of, norm_of, self_attention_of
from fuseopt.modules.children import t5_children


def spec_of(model: nn.Module) -> DecoderSpec:
    """Of the decoder of a T5ForConditionalGeneration."""
    decoder, attention = model.decoder, model.decoder.block[0].layer[0].SelfAttention
    bias = _relative_bias(attention)
    return DecoderSpec(
        token_embedding=decoder.embed_tokens.weight,
        layers=tuple(_layer(block, bias) for block in decoder.block),
        final_norm=norm_of(decoder.final_layer_norm),
        head=linear_of(model.lm_head),
        head_scale=_head_scale(model),
        heads=attention.n_heads,
        kv_heads=attention.n_heads,
        head_dim=attention.key_value_proj_dim,
        clamps_float16=True,
    )


def _head_scale(model: nn.Module) -> float | None:
    return model.model_dim**-0.5 if getattr(model.config, "scale_decoder_outputs", False) else None


def _relative_bias(attention: nn.Module) -> RelativeBias:
    sizes, relative_position_bucket = _bucket_sizes(attention), attention._relative_position_bucket

    def bucket_of(distances: Tensor) -> Tensor:
        return relative_position_bucket(-distances, bidirectional=False, **sizes)

    return RelativeBias(attention.relative_attention_bias.weight, bucket_of, sizes["max_distance"])


def _bucket_sizes(attention: nn.Module) -> dict[str, int]:
    return {
        "num_buckets": attention.relative_attention_num_buckets,
        "max_distance": attention.relative_attention_max_distance,
    }


def _layer(block: nn.Module, bias: RelativeBias) -> Layer:
    own, cross, feed_forward = block.layer
    attention = cross.EncDecAttention
    return Layer(
        self_attention_of(own)._replace(relative_bias=bias),
        feed_forward_of(feed_forward),
        CrossAttention(
            norm_of(cross.layer_norm),
            linear_of(attention.q),
            linear_of(attention.k, attention.v),
            linear_of(attention.o),
            attention.scaling,
        ),
    )


class T5Step(SpecStep):
    """Upstream: the decoder of `T5ForConditionalGeneration.forward` for one token a row."""

    model_class = "transformers.models.t5.modeling_t5.T5ForConditionalGeneration"
    children = t5_children("transformers.models.t5.modeling_t5.T5")
    encoder_class: ClassVar[type[EncoderStep] | None] = T5Encoder
    spec_of = staticmethod(spec_of)

    @staticmethod
    def roots(model: nn.Module) -> tuple[nn.Module, ...]:
        return model.decoder, model.lm_head

    @staticmethod
    def constants(model: nn.Module) -> tuple[Hashable, ...]:
        attention = model.decoder.block[0].layer[0].SelfAttention
        return (*_bucket_sizes(attention).values(), _head_scale(model))
