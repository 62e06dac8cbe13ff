"""The ops: functions on tensors, each with several backends. `fuseopt.ops.registry` lists them."""

import sys
import warnings
from typing import Any

from fuseopt import moved_modules
from fuseopt.ops.add_layer_norm import add_layer_norm
from fuseopt.ops.add_rms_norm import add_rms_norm
from fuseopt.ops.cross_entropy import cross_entropy
from fuseopt.ops.cross_entropy_grad import cross_entropy_grad_
from fuseopt.ops.decode.attention import decode_attention, decode_attention_
from fuseopt.ops.decode.beam_candidates import beam_candidates, drawn_continuations
from fuseopt.ops.decode.beams import decode_beams_
from fuseopt.ops.decode.edit_logits import LogitsEdits, edit_logits
from fuseopt.ops.decode.embedding import decode_embedding
from fuseopt.ops.decode.head_select import decode_head_select_
from fuseopt.ops.decode.linear import decode_linear
from fuseopt.ops.decode.linear_partials import decode_linear_of_sum, decode_linear_partials
from fuseopt.ops.decode.low_bit_linear import decode_low_bit_linear, low_bit_linear
from fuseopt.ops.decode.low_rank import decode_linear_low_rank
from fuseopt.ops.decode.packed_linear import decode_packed_linear
from fuseopt.ops.decode.prefix_attention import prefix_attention
from fuseopt.ops.decode.prompt_attention import prompt_attention_
from fuseopt.ops.decode.qkv_attention import decode_qkv_attention_
from fuseopt.ops.decode.quantized_heads import dequantize_heads, quantize_heads
from fuseopt.ops.decode.rotary_store import decode_rotary_store_
from fuseopt.ops.decode.sample import SamplingFilters, decode_sample_, filter_scores
from fuseopt.ops.decode.select import decode_select_
from fuseopt.ops.decode.softmax_linear import decode_softmax_linear
from fuseopt.ops.dropout_add_layer_norm import dropout_add_layer_norm
from fuseopt.ops.dropout_add_rms_norm import dropout_add_rms_norm
from fuseopt.ops.gated_activation import gated_activation
from fuseopt.ops.gelu import gelu
from fuseopt.ops.layer_norm import layer_norm
from fuseopt.ops.layer_norm_of_sum_bwd import layer_norm_of_sum_bwd
from fuseopt.ops.linear_cross_entropy import linear_cross_entropy
from fuseopt.ops.low_bit import LowBitWeight, dequantize, quantize
from fuseopt.ops.no_repeat_ngram import encoder_no_repeat_ngram, no_repeat_ngram
from fuseopt.ops.packed_weight import PackedWeight, pack_for_cuda, unpacked
from fuseopt.ops.process_logits import process_logits
from fuseopt.ops.relative_attention import relative_attention
from fuseopt.ops.rms_norm import rms_norm
from fuseopt.ops.rotary_embedding import rotary_embedding
from fuseopt.ops.short_attention import short_attention
from fuseopt.ops.softmax import softmax
from fuseopt.ops.tuned_matmul import tuned_matmul

__all__ = [
    "LogitsEdits",
    "LowBitWeight",
    "PackedWeight",
    "SamplingFilters",
    "add_layer_norm",
    "add_rms_norm",
    "beam_candidates",
    "cross_entropy",
    "cross_entropy_grad_",
    "decode_attention",
    "decode_attention_",
    "decode_beams_",
    "decode_embedding",
    "decode_head_select_",
    "decode_linear",
    "decode_linear_low_rank",
    "decode_linear_of_sum",
    "decode_linear_partials",
    "decode_low_bit_linear",
    "decode_packed_linear",
    "decode_qkv_attention_",
    "decode_rotary_store_",
    "decode_sample_",
    "decode_select_",
    "decode_softmax_linear",
    "dequantize",
    "dequantize_heads",
    "drawn_continuations",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "edit_logits",
    "encoder_no_repeat_ngram",
    "filter_scores",
    "gated_activation",
    "gelu",
    "layer_norm",
    "layer_norm_of_sum_bwd",
    "linear_cross_entropy",
    "low_bit_linear",
    "no_repeat_ngram",
    "pack_for_cuda",
    "prefix_attention",
    "process_logits",
    "prompt_attention_",
    "quantize",
    "quantize_heads",
    "relative_attention",
    "rms_norm",
    "rotary_embedding",
    "short_attention",
    "softmax",
    "tuned_matmul",
    "unpacked",
]


def decode_linear_addends(*arguments: Any, overlap: bool = False, ahead: Any = (), **options: Any) -> Any:
    """`decode_linear_partials`, under the names of earlier versions."""
    warnings.warn("decode_linear_addends is called decode_linear_partials", DeprecationWarning, stacklevel=2)
    return decode_linear_partials(*arguments, pdl=overlap, prefetch=ahead, **options)


def decode_quantized_attention(*tensors: Any, **options: Any) -> Any:
    """`decode_attention`, under the name of earlier versions, whose scales came after the caches."""
    return _with_named_scales("decode_attention", 3, tensors, options)


def decode_quantized_attention_(*tensors: Any, **options: Any) -> Any:
    """`decode_attention_`, under the name of earlier versions, whose scales came after the caches."""
    return _with_named_scales("decode_attention_", 5, tensors, options)


def _with_named_scales(name: str, place: int, tensors: tuple[Any, ...], options: dict[str, Any]) -> Any:
    earlier = name.replace("attention", "quantized_attention")
    message = f"{earlier} is called {name}, which takes key_scales and value_scales by name"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    scales = zip(("key_scales", "value_scales"), tensors[place : place + 2], strict=False)
    return globals()[name](*tensors[:place], *tensors[place + 2 :], **dict(scales), **options)


moved_modules.keep_functions(sys.modules[__name__])
