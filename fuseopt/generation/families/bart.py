"""BartStep, MBartStep, PegasusStep and MarianStep: decoders behind an encoder, with LayerNorms, as DecoderSpecs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from torch import nn

from fuseopt.generation.engine.layers import Linear, activation_of, layer_norm_of, linear_of
from fuseopt.generation.families.decoder_spec import CrossAttention, DecoderSpec, FeedForward, Layer, SelfAttention
from fuseopt.generation.families.spec_step import SpecStep
from fuseopt.modules.children import Children, bart_children


def bart_like(name: str, model_class: str = "ForConditionalGeneration", **classes: str) -> tuple[str, Children]:
    """`model_class` and `children` of the family whose classes begin with `name`, such as "bart.Bart".

    Args:
        classes: as `bart_children` takes them.
    """
    module, _, prefix = name.partition(".")
    prefix = f"transformers.models.{module}.modeling_{module}.{prefix}"
    return prefix + model_class, bart_children(prefix, prefix + model_class, **classes)


class BartStep(SpecStep):
    """Upstream: the decoder of `BartForConditionalGeneration.forward` for one token a row.

    Attributes:
        norms_first: whether norms are of a sublayer's input, as in mBART, or of the sum after it.
    """

    model_class, children = bart_like("bart.Bart", embedding="ScaledWordEmbedding", positions="Learned")
    norms_first: ClassVar[bool] = False

    @classmethod
    def spec_of(cls, model: nn.Module) -> DecoderSpec:
        decoder, attention = model.model.decoder, model.model.decoder.layers[0].self_attn
        tokens, offset = decoder.embed_tokens, getattr(decoder.embed_positions, "offset", 0)
        positions = decoder.embed_positions.weight[offset:]
        scale = tokens.embed_scale if hasattr(tokens, "embed_scale") else decoder.embed_scale
        final_norm, embedding_norm = (getattr(decoder, name, None) for name in ("layer_norm", "layernorm_embedding"))
        return DecoderSpec(
            token_embedding=tokens.weight,
            embedding_scale=None if scale == 1 else scale,
            position_embedding=positions,
            embedding_norm=None if embedding_norm is None else layer_norm_of(embedding_norm),
            max_length=len(positions),
            layers=tuple(cls._layer(block) for block in decoder.layers),
            final_norm=None if final_norm is None else layer_norm_of(final_norm),
            head=cls.head_of(model),
            heads=attention.num_heads,
            kv_heads=attention.num_heads,
            head_dim=attention.head_dim,
        )

    @staticmethod
    def head_of(model: nn.Module) -> Linear:
        return replace(linear_of(model.lm_head), biases=(model.final_logits_bias[0],))

    @classmethod
    def _layer(cls, block: nn.Module) -> Layer:
        own, cross = block.self_attn, block.encoder_attn
        modules = block.self_attn_layer_norm, block.encoder_attn_layer_norm, block.final_layer_norm
        norms, none = [layer_norm_of(norm) for norm in modules], (None, None, None)
        first, after = (norms, none) if cls.norms_first else (none, norms)
        qkv, key_value = linear_of(own.q_proj, own.k_proj, own.v_proj), linear_of(cross.k_proj, cross.v_proj)
        up, down = linear_of(block.fc1), linear_of(block.fc2)
        return Layer(
            SelfAttention(first[0], qkv, linear_of(own.out_proj), own.scaling, sum_norm=after[0]),
            FeedForward(first[2], up, activation_of(block.activation_fn), down, sum_norm=after[2]),
            CrossAttention(
                first[1], linear_of(cross.q_proj), key_value, linear_of(cross.out_proj), cross.scaling, after[1]
            ),
        )

    @staticmethod
    def roots(model: nn.Module) -> tuple[nn.Module, ...]:
        return model.model, model.lm_head

    @staticmethod
    def not_supported_reasons(model: nn.Module) -> list[str]:
        bias = model.final_logits_bias
        # `children` are not checked yet.
        weight = getattr(model.lm_head, "weight", bias)
        return [] if bias.dtype is weight.dtype else [f"final_logits_bias is {bias.dtype}, the head {weight.dtype}"]

    @staticmethod
    def buffers_of(model: nn.Module) -> Sequence[nn.Module]:
        return (model,)


class MBartStep(BartStep):
    """Upstream: the decoder of `MBartForConditionalGeneration.forward` for one token a row."""

    model_class, children = bart_like("mbart.MBart", embedding="ScaledWordEmbedding", positions="Learned")
    norms_first = True


class PegasusStep(BartStep):
    """Upstream: the decoder of `PegasusForConditionalGeneration.forward` for one token a row."""

    model_class, children = bart_like("pegasus.Pegasus", positions="Sinusoidal")
    norms_first = True


class MarianStep(BartStep):
    """Upstream: the decoder of `MarianMTModel.forward` for one token a row."""

    model_class, children = bart_like("marian.Marian", "MTModel", positions="Sinusoidal")
