"""The ops: functions on tensors, each with several backends. `fuseopt.ops.registry` lists them."""

from fuseopt.ops.gated_activation import gated_activation
from fuseopt.ops.gelu import gelu
from fuseopt.ops.layer_norm import layer_norm
from fuseopt.ops.no_repeat_ngram import encoder_no_repeat_ngram, no_repeat_ngram
from fuseopt.ops.rms_norm import rms_norm
from fuseopt.ops.softmax import softmax

__all__ = [
    "encoder_no_repeat_ngram",
    "gated_activation",
    "gelu",
    "layer_norm",
    "no_repeat_ngram",
    "rms_norm",
    "softmax",
]
