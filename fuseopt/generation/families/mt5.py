"""MT5Step and UMT5Step: MT5ForConditionalGeneration and UMT5ForConditionalGeneration as DecoderSpecs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from torch import Tensor, nn

from fuseopt.generation.families.decoder_spec import DecoderSpec, RelativeBias
from fuseopt.generation.families.t5 import T5Step, spec_of
from fuseopt.modules.children import t5_children


class MT5Step(T5Step):
    """Upstream: the decoder of `MT5ForConditionalGeneration.forward` for one token a row."""

    model_class = "transformers.models.mt5.modeling_mt5.MT5ForConditionalGeneration"
    children = t5_children("transformers.models.mt5.modeling_mt5.MT5")

    @staticmethod
    def spec_of(model: nn.Module) -> DecoderSpec:
        # A config converted from T5's may have `scale_decoder_outputs`, which MT5's forward does not read.
        return replace(spec_of(model), head_scale=None)


class UMT5Step(T5Step):
    """Upstream: the decoder of `UMT5ForConditionalGeneration.forward` for one token a row.

    Each layer has a relative bias of its own. transformers runs the encoder.
    """

    model_class = "transformers.models.umt5.modeling_umt5.UMT5ForConditionalGeneration"
    children = t5_children("transformers.models.umt5.modeling_umt5.UMT5")
    encoder_class = None

    @staticmethod
    def spec_of(model: nn.Module) -> DecoderSpec:
        spec = spec_of(model)
        layers = (
            layer._replace(self_attention=layer.self_attention._replace(relative_bias=_bias(block)))
            for layer, block in zip(spec.layers, model.decoder.block, strict=True)
        )
        return replace(spec, layers=tuple(layers), head_scale=_head_scale(model))

    @staticmethod
    def constants(model: nn.Module) -> tuple[Hashable, ...]:
        return (*T5Step.constants(model), _head_scale(model))


def _head_scale(model: nn.Module) -> float | None:
    return model.model_dim**-0.5 if model.config.tie_word_embeddings else None


def _bias(block: nn.Module) -> RelativeBias:
    attention = block.layer[0].SelfAttention

    def bucket_of(distances: Tensor) -> Tensor:
        return attention._relative_position_bucket(-distances)

    return RelativeBias(attention.relative_attention_bias.weight, bucket_of, attention.relative_attention_max_distance)
