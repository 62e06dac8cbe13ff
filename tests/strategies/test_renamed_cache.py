"""Models whose forwards take the key-value cache as `cache`, as from transformers 5.24."""

import functools
import sys

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM

import fuseopt
from fuseopt.model_index import Site
from tests import tiny

GENERATION = {"generation": {"enable": True}}
ROTARY = {"kernel_fusion": {"triton_kernels": ["FusedRotaryEmbedding"], "jit": False}}
NORM = {"kernel_fusion": {"custom_cuda_kernels": ["FusedRMSNorm"], "jit": False}}


def rename_cache(monkeypatch: pytest.MonkeyPatch, cls: type[nn.Module]) -> None:
    """Give the class the forward of transformers 5.24, in which `past_key_values` is `cache`."""
    stock = cls.forward

    @functools.wraps(stock)
    def forward(self, *args, cache=None, **kwargs):
        return stock(self, *args, past_key_values=cache, **kwargs)

    del forward.__wrapped__
    monkeypatch.setattr(cls, "forward", forward)


@pytest.mark.parametrize(("cls", "config"), [(LlamaForCausalLM, GENERATION), (LlamaAttention, ROTARY)])
def test_a_forward_with_a_renamed_cache_stays_stock(monkeypatch, cls, config):
    model = tiny.decoder("llama")
    assert fuseopt.plan(model, config).replacements
    rename_cache(monkeypatch, cls)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.24.0")
    planned = fuseopt.plan(model, config)
    assert not planned.replacements
    assert "transformers 5.24.0 passes the key-value cache as `cache`" in planned.skips[0].reason
    assert "pip install 'transformers<5.24'" in planned.skips[0].reason
    with pytest.raises(fuseopt.errors.PlanError, match=r"5\.24\.0 passes"):
        fuseopt.initialize(model, config, strict=True)


def test_other_modules_of_such_a_model_are_replaced(monkeypatch):
    model = tiny.decoder("llama")
    stock = tiny.logits(model)
    count = len(fuseopt.plan(model, NORM).replacements)
    rename_cache(monkeypatch, LlamaForCausalLM)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.24.0")
    assert len(fuseopt.plan(model, NORM).replacements) == count > 0
    torch.testing.assert_close(tiny.logits(fuseopt.initialize(model, NORM)), stock)


def test_a_cache_of_another_kind_in_a_supported_release_is_no_reason(monkeypatch):
    rename_cache(monkeypatch, LlamaForCausalLM)
    assert fuseopt.plan(tiny.decoder("llama"), GENERATION).replacements


def test_a_replaced_child_counts_even_if_it_is_false(monkeypatch):
    """As an empty ModuleList is."""
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.24.0")
    rename_cache(monkeypatch, LlamaForCausalLM)
    model = tiny.decoder("llama")
    model.heads = nn.ModuleList()
    assert Site(model, "lm_head", "lm_head").renamed_cache_reason is None
    assert Site(model, "heads", "heads").renamed_cache_reason is None
    assert Site(model, "generate", "generate").renamed_cache_reason
