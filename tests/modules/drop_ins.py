"""A sample module for each kind of drop-in, and a function that builds the drop-in."""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import GPT2Config, LlamaConfig, T5Config
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5Attention, T5DenseGatedActDense, T5LayerNorm
from transformers.pytorch_utils import Conv1D

from fuseopt import blocks, modules, ops
from fuseopt.models import COMMON, full_name
from fuseopt.models.gpt2 import GPT2
from fuseopt.models.t5 import T5
from fuseopt.modules.base import FusedModule
from fuseopt.modules.regions import GatedRegion, Region

WIDTH = 6


def _defined_in(package: object) -> dict[str, type[FusedModule]]:
    files = [
        importlib.import_module(f"{package.__name__}.{found.name}") for found in pkgutil.iter_modules(package.__path__)
    ]
    classes = [(file, value) for file in files for value in vars(file).values() if isinstance(value, type)]
    return {
        cls.__name__: cls for file, cls in classes if issubclass(cls, FusedModule) and cls.__module__ == file.__name__
    }


KINDS = {name: cls for name, cls in {**_defined_in(modules), **_defined_in(blocks)}.items() if cls is not FusedModule}
"""Every drop-in class of the package by its name."""


@dataclass(frozen=True)
class DropIn:
    """`source` makes a module [..., 6] -> [..., n], `kind` names the fused class and `options` those of from_module."""

    source: Callable[[], nn.Module]
    kind: str
    options: dict

    def make(self, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
        """(the source, its drop-in), which share parameters."""
        torch.manual_seed(0)
        source = self.source().to(dtype)
        return source, KINDS[self.kind].from_module(source, **self.options)


def _by_rule(source: Callable[[], nn.Module], kind: str, **options: object) -> DropIn:
    """Builds a drop-in with the options that the policies have for the source's class."""
    name = full_name(type(source()))
    rules = (rule for policy in (COMMON, GPT2, T5) for rule in (*policy.kernels, *policy.regions))
    return DropIn(source, kind, {**next(r.options for r in rules if (r.source, r.target) == (name, kind)), **options})


def _activation(name: str) -> Callable[[], nn.Module]:
    return lambda: type(ACT2FN[name])()


def _jit(name: str, region: str) -> DropIn:
    return _by_rule(_activation(name), "FusedActivation", region=Region(region, "torchscript"))


def _gpt2_mlp() -> nn.Module:
    return GPT2MLP(5, GPT2Config(n_embd=WIDTH, n_head=2, resid_pdrop=0.0))


def _llama_mlp() -> nn.Module:
    return LlamaMLP(LlamaConfig(hidden_size=WIDTH, intermediate_size=5, num_attention_heads=2))


def _t5_mlp() -> nn.Module:
    config = T5Config(d_model=WIDTH, d_ff=5, dropout_rate=0.0, feed_forward_proj="gated-gelu")
    return T5DenseGatedActDense(config)


def _t5_attention() -> nn.Module:
    config = T5Config(d_model=WIDTH, d_kv=3, num_heads=2, dropout_rate=0.0, attn_implementation="eager")
    return T5Attention(config, has_relative_attention_bias=True, layer_idx=0)


_GELU = partial(ops.gelu, approximate="tanh")
_READS = {"c_fc": Conv1D}
DROP_INS = {
    "layer_norm": _by_rule(lambda: nn.LayerNorm(WIDTH), "FusedLayerNorm"),
    "layer_norm_of_two": _by_rule(lambda: nn.LayerNorm((5, WIDTH)), "FusedLayerNorm"),
    "layer_norm_plain": _by_rule(lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), "FusedLayerNorm"),
    "layer_norm_no_bias": _by_rule(lambda: nn.LayerNorm(WIDTH, bias=False), "FusedLayerNorm"),
    "t5_norm": _by_rule(lambda: T5LayerNorm(WIDTH), "FusedRMSNorm"),
    "llama_norm": _by_rule(lambda: LlamaRMSNorm(WIDTH), "FusedRMSNorm"),
    "gemma_norm": _by_rule(lambda: GemmaRMSNorm(WIDTH), "FusedRMSNorm"),
    "rms_norm": _by_rule(lambda: nn.RMSNorm(WIDTH, eps=1e-5), "FusedRMSNorm"),
    "rms_norm_plain": _by_rule(lambda: nn.RMSNorm(WIDTH, eps=1e-5, elementwise_affine=False), "FusedRMSNorm"),
    **{
        name: _by_rule(_activation(name), "FusedGELU")
        for name in ("gelu", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh")
    },
    "torch_gelu": _by_rule(lambda: nn.GELU("tanh"), "FusedGELU"),
    "softmax": _by_rule(lambda: nn.Softmax(-1), "FusedSoftmax"),
    "softmax_of_rows": _by_rule(lambda: nn.Softmax(1), "FusedSoftmax"),
    "jit_gelu_new": _jit("gelu_new", "gelu_tanh"),
    "jit_gelu_accurate": _jit("gelu_accurate", "gelu_tanh"),
    "jit_quick_gelu": _jit("quick_gelu", "quick_gelu"),
    "jit_silu": _jit("silu", "silu"),
    "jit_relu": _by_rule(nn.ReLU, "FusedActivation", region=Region("relu", "torchscript")),
    "gpt2_mlp": DropIn(_gpt2_mlp, "FusedMLP", {"activation": _GELU, "bias_activation": _GELU, "reads": _READS}),
    "jit_gpt2_mlp": DropIn(
        _gpt2_mlp,
        "FusedMLP",
        {
            "activation": Region("gelu_tanh", "torchscript"),
            "bias_activation": Region("bias_gelu_tanh", "torchscript"),
            "reads": _READS,
        },
    ),
    "llama_mlp": _by_rule(
        _llama_mlp, "FusedGatedMLP", gated_activation=partial(ops.gated_activation, activation="silu")
    ),
    "t5_mlp": _by_rule(
        _t5_mlp, "FusedGatedMLP", gated_activation=partial(ops.gated_activation, activation="gelu_tanh")
    ),
    "jit_t5_mlp": _by_rule(_t5_mlp, "FusedGatedMLP", gated_activation=GatedRegion("gated_gelu_tanh", "torchscript")),
    "head": DropIn(lambda: nn.Linear(WIDTH, 17, bias=False), "FusedLMHead", {}),
    "training_head": DropIn(lambda: nn.Linear(WIDTH, 17, bias=False), "FusedLinearCrossEntropy", {}),
    "dropout": DropIn(lambda: nn.Dropout(0.0), "DeferredDropout", {}),
    "t5_attention": DropIn(_t5_attention, "FusedRelativeAttention", {}),
}
