"""verify: what it says of exact, inexact and wrong fusions, and that it leaves the model as it was."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import fuseopt
from fuseopt import modules
from fuseopt.blocks import stack_runner
from fuseopt.errors import ConfigError, InputsError, NotAModelError
from fuseopt.verify_runs import in_float64, outputs

GELU = {"kernel_fusion": {"custom_cuda_kernels": ["FusedGELU"], "backend": "reference", "jit": False}}
# The package has a function of that name.
verify_module = importlib.import_module("fuseopt.verify")
NORM = {"kernel_fusion": {"custom_cuda_kernels": ["FusedRMSNorm"], "backend": "reference", "jit": False}}


@pytest.fixture
def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=97, bos_token_id=None, eos_token_id=None, pad_token_id=0
    )
    return GPT2LMHeadModel(config).train()


@pytest.fixture
def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 97}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    input_ids = torch.randint(1, 97, (2, 11), generator=torch.Generator().manual_seed(0))
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exact_fusion_passes(gpt2, inputs, dtype):
    found = fuseopt.verify(gpt2.to(dtype), GELU, inputs, generate={"max_new_tokens": 6, "no_repeat_ngram_size": 2})
    assert found.ok, found
    assert found.replaced == 2
    assert found.output == "logits"
    assert 0 < found.stock_error < 1000 * torch.finfo(dtype).eps
    assert found.tokens_agree or dtype is torch.bfloat16
    assert found.tokens_count is (dtype is torch.float32)
    assert f"verify: ok, {fuseopt.plan(gpt2, GELU).summary}\n" in str(found)


def test_a_slightly_wrong_kernel_fails(gpt2, inputs, monkeypatch):
    monkeypatch.setattr(modules.FusedGELU, "forward", lambda self, input: F.gelu(input))
    found = fuseopt.verify(gpt2, GELU, inputs)
    assert not found.ok
    assert found.fused_error > found.tolerance > found.stock_error
    assert found.difference == pytest.approx(found.fused_error, rel=0.1)
    assert found.tokens_agree is None
    assert str(found).startswith(f"verify: FAILED ({found.problem}), ") and found.problem.startswith("logits: error ")


@pytest.mark.parametrize(
    "wrong",
    [lambda x: x * float("nan"), lambda x: F.gelu(x, approximate="tanh").double()],
    ids=["nan", "dtype"],
)
def test_nan_and_another_dtype_fail(inputs, monkeypatch, wrong):
    monkeypatch.setattr(modules.FusedGELU, "forward", lambda self, input: wrong(input))
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(approximate="tanh"))
    found = fuseopt.verify(model, GELU, {"input": torch.randn(3, 8)})
    assert not found.ok
    assert found.fused_error == float("inf")


def test_other_tokens_fail_although_the_logits_pass(gpt2, inputs, monkeypatch):
    ngram = {"kernel_fusion": {"custom_cuda_kernels": ["FusedNoRepeatNGram"], "backend": "reference", "jit": False}}
    generation = pytest.importorskip("fuseopt.generation.select.logits_processor_list")
    monkeypatch.setattr(generation.ProcessorGroup, "__call__", lambda self, input_ids, scores, inplace: -scores)
    found = fuseopt.verify(gpt2, ngram, inputs, generate={"max_new_tokens": 6, "no_repeat_ngram_size": 2})
    assert found.tokens_agree is False
    assert found.fused_error <= found.tolerance
    assert not found.ok


def test_the_judge_is_float64_throughout(t5):
    # T5LayerNorm asks for float32 by name; with rounding to it anywhere, the copy would be 1e-8 off at best.
    norm = t5.encoder.final_layer_norm
    hidden = torch.randn(5, 32)
    judged = in_float64(outputs, norm, {"hidden_states": hidden})["output"]
    exact = hidden.double() * torch.rsqrt(hidden.double().pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    torch.testing.assert_close(judged, exact * norm.weight.double(), rtol=1e-15, atol=0)


def test_t5_with_sampling_and_labels(t5, inputs):
    labels = {"labels": inputs["input_ids"]}
    found = fuseopt.verify(t5, NORM, {**inputs, **labels}, generate={"max_new_tokens": 6, "do_sample": True})
    assert found.ok, found
    assert found.tokens_agree


@pytest.mark.parametrize("fused_before", [False, True])
def test_the_model_is_left_as_found(gpt2, inputs, fused_before):
    gpt2.transformer.h[1].eval()
    if fused_before:
        fuseopt.initialize(gpt2, GELU)
    found_modules = dict(gpt2.named_modules())
    flags = {path: module.training for path, module in found_modules.items()}
    state = {name: (id(value), value.clone()) for name, value in gpt2.state_dict(keep_vars=True).items()}
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)

    fuseopt.verify(gpt2, GELU, inputs, generate={"max_new_tokens": 3, "do_sample": True})

    assert torch.equal(torch.rand(1), expected)
    assert all(module is found_modules[path] for path, module in gpt2.named_modules())
    assert {path: module.training for path, module in gpt2.named_modules()} == flags
    for name, value in gpt2.state_dict(keep_vars=True).items():
        assert id(value) == state[name][0]
        assert torch.equal(value, state[name][1])
    assert bool(fuseopt.report(gpt2).replaced) is fused_before


def test_the_model_is_left_as_found_when_the_fused_run_raises(gpt2, inputs, monkeypatch):
    def broken(self, input):
        raise RuntimeError("broken kernel")

    monkeypatch.setattr(modules.FusedGELU, "forward", broken)
    with pytest.raises(RuntimeError, match="broken kernel"):
        fuseopt.verify(gpt2, GELU, inputs)
    assert gpt2.training
    assert not fuseopt.report(gpt2).replaced


def test_verify_refuses_bad_arguments(gpt2, inputs):
    with pytest.raises(NotAModelError):
        fuseopt.verify("gpt2", GELU, inputs)
    with pytest.raises(InputsError, match="the config comes before the inputs"):
        fuseopt.verify(gpt2, inputs)
    with pytest.raises(ConfigError, match="FusedGELU"):
        fuseopt.verify(gpt2, {"kernel_fusion": {"custom_cuda_kernels": ["FusedGELUU"]}}, inputs)
    with pytest.raises(ValueError, match="no floating-point tensor"):
        fuseopt.verify(_Counts(), "reference", {"input": torch.ones(2)})


def test_arguments_of_generate_are_no_inputs_of_the_forward(gpt2, inputs):
    """GPT-2's forward takes any keyword, and ignores this one: what is measured would be no generate()."""
    wanted = r"max_new_tokens is an argument of generate\(\).*pass generate={'max_new_tokens': 8}"
    with pytest.raises(InputsError, match=wanted):
        fuseopt.verify(gpt2, GELU, {**inputs, "max_new_tokens": 8})
    assert fuseopt.verify(gpt2, GELU, {**inputs, "use_cache": False}).ok


class _Counts(nn.Module):
    def forward(self, input):
        return input.numel()


def test_what_is_captured_is_judged_too(gpt2, inputs, monkeypatch):
    """As on a GPU, where a size is captured when it has come a few times."""
    monkeypatch.setattr(stack_runner, "DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(verify_module, "_CALLS", {"cpu": 4})
    blocks = {"kernel_fusion": {"custom_cuda_kernels": ["FusedBlock"], "backend": "reference", "jit": False}}
    assert fuseopt.verify(gpt2, blocks, inputs).ok
    run = stack_runner.StackWork.run

    def wrong(work):
        run(work)
        work.state.output = 1.01 * work.state.output

    monkeypatch.setattr(stack_runner.StackWork, "run", wrong)
    assert not fuseopt.verify(gpt2, blocks, inputs).ok
