"""Drop-in modules: each shares the state of the module that it replaces, and can be swapped with it at any time."""

from fuseopt.modules.activations import FusedActivation, FusedGELU, FusedSoftmax
from fuseopt.modules.base import FusedModule
from fuseopt.modules.causal_lm_loss import FusedCausalLMLoss
from fuseopt.modules.linear_cross_entropy import FusedLinearCrossEntropy
from fuseopt.modules.lm_head import FusedLMHead
from fuseopt.modules.mlp import FusedGatedMLP, FusedMLP
from fuseopt.modules.norms import FusedLayerNorm, FusedRMSNorm

__all__ = [
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
    "FusedSoftmax",
]
