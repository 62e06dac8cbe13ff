"""Tiny models without dropout, copies of them under each block of a config, and the gradients of a step."""

import copy

import torch
from torch import nn

import fuseopt
from fuseopt.kernel_table import CUSTOM, listed
from tests import tiny

KERNELS = {"custom_cuda_kernels": list(listed(CUSTOM))}
HEAD = {"triton_kernels": ["FusedLinearCrossEntropy"]}
BLOCKS = {
    "kernels": KERNELS | {"jit": False},
    "kernels-jit": KERNELS | {"jit": True},
    "kernels-head": KERNELS | HEAD | {"jit": False},
    "kernels-memory": KERNELS | {"memory_efficient_fusion": True},
    "kernels-head-memory": KERNELS | HEAD | {"memory_efficient_fusion": True},
    "kernels-jit-head-memory": KERNELS | HEAD | {"jit": True, "memory_efficient_fusion": True},
    "budget": {"memory_efficient_fusion": {"budget": 0.5, "backend": "aot_eager"}},
}
WITHOUT_DROPOUT = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "t5": {"dropout_rate": 0.0},
    "t5_gated": {"dropout_rate": 0.0},
}
ONE_LAYER = {"gpt2": {"n_layer": 1}, "t5": {"num_layers": 1}, "t5_gated": {"num_layers": 1}}


def stock_model(family: str, attention: str = "eager", **config: int) -> nn.Module:
    return tiny.FAMILIES[family](attn_implementation=attention, **WITHOUT_DROPOUT[family], **config)


def fused_copy(model: nn.Module, block: str, **options: str) -> nn.Module:
    return fuseopt.initialize(copy.deepcopy(model), {"kernel_fusion": BLOCKS[block] | options})


def batch_of(model: nn.Module, seed: int = 1) -> dict[str, torch.Tensor]:
    batch = tiny.inputs(model, seed=seed)
    return batch | {"labels": batch.get("decoder_input_ids", batch["input_ids"])}


def training_step(model: nn.Module, seed: int = 1) -> dict[str, torch.Tensor]:
    """The gradients of one step."""
    model.train().zero_grad()
    model(**batch_of(model, seed)).loss.backward()
    return gradients_of(model)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def difference(actual: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    return sum((actual[name].double() - exact[name]).square().sum().item() for name in exact) ** 0.5
