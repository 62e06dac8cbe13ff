"""Drop-in modules: each holds the state of the module it stands in for, and can be exchanged for it at any time."""

from fuseopt.modules.activations import FusedActivation, FusedGELU, FusedSoftmax
from fuseopt.modules.base import FusedModule
from fuseopt.modules.causal_attention import CausalStackForward
from fuseopt.modules.causal_lm_loss import FusedCausalLMLoss
from fuseopt.modules.dropout_add import DeferredDropout, GPT2DropoutAddForward, T5DropoutAddForward
from fuseopt.modules.gpt2_inference import GPT2InferenceForward, GPT2StackForward
from fuseopt.modules.linear_cross_entropy import FusedLinearCrossEntropy
from fuseopt.modules.lm_head import FusedLMHead
from fuseopt.modules.mlp import FusedGatedMLP, FusedMLP
from fuseopt.modules.norms import FusedLayerNorm, FusedRMSNorm
from fuseopt.modules.relative_attention import FusedRelativeAttention, RelativeStackForward
from fuseopt.modules.residual import GPT2BlockForward, T5BlockForward
from fuseopt.modules.rotary_embedding import RotaryAttentionForward
from fuseopt.modules.t5_inference import T5InferenceForward, T5StackForward

__all__ = [
    "CausalStackForward",
    "DeferredDropout",
    "FusedActivation",
    "FusedCausalLMLoss",
    "FusedGELU",
    "FusedGatedMLP",
    "FusedLMHead",
    "FusedLayerNorm",
    "FusedLinearCrossEntropy",
    "FusedMLP",
    "FusedModule",
    "FusedRMSNorm",
    "FusedRelativeAttention",
    "FusedSoftmax",
    "GPT2BlockForward",
    "GPT2DropoutAddForward",
    "GPT2InferenceForward",
    "GPT2StackForward",
    "RelativeStackForward",
    "RotaryAttentionForward",
    "T5BlockForward",
    "T5DropoutAddForward",
    "T5InferenceForward",
    "T5StackForward",
]
