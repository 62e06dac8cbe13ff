"""Triton kernels, with the raw ops' own signatures. The only package of fuseopt that imports triton."""

import sys

from triton.runtime.jit import JITFunction

from fuseopt.ops.triton.cross_entropy import cross_entropy_bwd, cross_entropy_fwd
from fuseopt.ops.triton.cross_entropy_grad import cross_entropy_grad_
from fuseopt.ops.triton.dropout_add_norm import (
    dropout_add_layer_norm_bwd,
    dropout_add_layer_norm_fwd,
    dropout_add_rms_norm_bwd,
    dropout_add_rms_norm_fwd,
)
from fuseopt.ops.triton.gated_activation import gated_activation_bwd, gated_activation_fwd
from fuseopt.ops.triton.gelu import gelu_bias_bwd, gelu_bwd, gelu_fwd
from fuseopt.ops.triton.layer_norm import layer_norm, layer_norm_bwd, layer_norm_fwd
from fuseopt.ops.triton.linear_cross_entropy import linear_cross_entropy_bwd, linear_cross_entropy_fwd
from fuseopt.ops.triton.relative_attention import relative_attention_fwd
from fuseopt.ops.triton.relative_attention_bwd import relative_attention_bwd, relative_attention_bwd_joined
from fuseopt.ops.triton.relative_attention_tiles import relative_attention_line
from fuseopt.ops.triton.rms_norm import rms_norm, rms_norm_bwd, rms_norm_fwd
from fuseopt.ops.triton.rotary_embedding import rotary_embedding_bwd, rotary_embedding_fwd
from fuseopt.ops.triton.softmax import softmax_bwd, softmax_fwd

__all__ = [
    "cross_entropy_bwd",
    "cross_entropy_fwd",
    "cross_entropy_grad_",
    "dropout_add_layer_norm_bwd",
    "dropout_add_layer_norm_fwd",
    "dropout_add_rms_norm_bwd",
    "dropout_add_rms_norm_fwd",
    "gated_activation_bwd",
    "gated_activation_fwd",
    "gelu_bias_bwd",
    "gelu_bwd",
    "gelu_fwd",
    "layer_norm",
    "layer_norm_bwd",
    "layer_norm_fwd",
    "linear_cross_entropy_bwd",
    "linear_cross_entropy_fwd",
    "relative_attention_bwd",
    "relative_attention_bwd_joined",
    "relative_attention_fwd",
    "relative_attention_line",
    "rms_norm",
    "rms_norm_bwd",
    "rms_norm_fwd",
    "rotary_embedding_bwd",
    "rotary_embedding_fwd",
    "softmax_bwd",
    "softmax_fwd",
]


def _name_kernels() -> None:
    """Makes Triton's cache keys independent of the order of first uses, so that processes share compiled kernels.

    A key covers the constants that a function uses. Of constants used by functions that it calls, it covers only those
    that Triton has seen by then. So all keys are computed here, in one order.
    """
    for name in sorted(module for module in sys.modules if module.startswith(f"{__name__}.")):
        for member in vars(sys.modules[name]).values():
            if isinstance(member, JITFunction):
                member.cache_key  # noqa: B018


_name_kernels()
