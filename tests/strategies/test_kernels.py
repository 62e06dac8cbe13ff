"""The `kernels` strategy: which path runs, with what result, in every dtype and mode that users run."""

import copy
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fuseopt
from fuseopt import ops
from fuseopt.modules import FusedMLP
from fuseopt.strategies.eager_attention import FusedSoftmaxConfig
from tests import tiny

pytestmark = pytest.mark.usefixtures("each_device")


def config(*kernels, **block):
    return {"kernel_fusion": {"custom_cuda_kernels": list(kernels), "jit": False, **block}}


CASES = {
    ("gpt2", "FusedLayerNorm"): ("layer_norm", 5),
    ("gpt2", "FusedGELU"): ("gelu", 2),
    ("gpt2", "FusedSoftmax"): ("softmax", 2),
    ("t5", "FusedRMSNorm"): ("rms_norm", 2 * 2 + 3 * 2 + 2),
    ("t5", "FusedSoftmax"): ("softmax", 2 + 2 * 2),
    ("t5_gated", "FusedGELU"): ("gelu", 4),
    ("umt5", "FusedSoftmax"): ("softmax", 6),
    ("mt5", "FusedRMSNorm"): ("rms_norm", 12),
    ("t5_gated", "FusedGatedGELU"): ("gated_activation", 4),
    ("umt5", "FusedGatedGELU"): ("gated_activation", 4),
    ("gemma", "FusedGatedGELU"): ("gated_activation", 2),
    ("llama", "FusedSwiGLU"): ("gated_activation", 2),
    ("phi3", "FusedSwiGLU"): ("gated_activation", 2),
}


class RawOps(TorchDispatchMode):
    """Counts the raw ops of fuseopt that run."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fuseopt":
            self.counts[func] += 1
        return func(*args, **kwargs or {})


cases = pytest.mark.parametrize("case", CASES, ids="-".join)


def raw_forward(op):
    """The raw op that a call without gradient comes to: a norm's has no statistics to return."""
    return getattr(torch.ops.fuseopt, op if op.endswith("norm") else f"{op}_fwd")


@cases
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_every_call_goes_through_the_op(case, backend):
    family, kernel = case
    op, calls = CASES[case]
    model = tiny.FAMILIES[family](attn_implementation="eager")
    stock = tiny.logits(model)
    with mock.patch.object(ops, op, wraps=getattr(ops, op)) as called, RawOps() as ran:
        fuseopt.initialize(model, config(kernel, backend=backend), strict=True)
        fused = tiny.logits(model)
    assert called.call_count == calls
    assert ran.counts == ({} if backend == "reference" else {raw_forward(op).default: calls})
    torch.testing.assert_close(fused, stock, rtol=1e-5, atol=1e-5)


TRITON_CASES = [
    ("gpt2", "FusedLayerNorm"),
    ("t5", "FusedRMSNorm"),
    ("gpt2", "FusedSoftmax"),
    ("gpt2", "FusedGELU"),
    ("gemma", "FusedGatedGELU"),
    ("llama", "FusedSwiGLU"),
]


@pytest.mark.parametrize("case", TRITON_CASES, ids="-".join)
def test_triton_kernels_run_on_a_gpu_and_fall_back_elsewhere(case):
    family, kernel = case
    op, calls = CASES[case]
    model = tiny.FAMILIES[family](attn_implementation="eager")
    stock = tiny.logits(model)
    fuseopt.initialize(model, {"kernel_fusion": {"triton_kernels": [kernel], "jit": False}})
    with RawOps() as ran:
        torch.testing.assert_close(tiny.logits(model), stock, rtol=1e-5, atol=1e-5)
    raw = raw_forward(op)
    assert ran.counts == {raw.triton if model.device.type == "cuda" else raw.default: calls}
    row = fuseopt.report(model).replaced[0]
    if model.device.type == "cuda":
        assert row.backend == "triton"
        batch = tiny.inputs(model)
        model(**batch, labels=batch.get("decoder_input_ids", batch["input_ids"])).loss.backward()
        with RawOps() as ran:
            model(**batch, labels=batch.get("decoder_input_ids", batch["input_ids"])).loss.backward()
        assert ran.counts[getattr(torch.ops.fuseopt, f"{op}_bwd").triton] == calls
    else:
        assert row.backend == "cpu" and "triton: runs on cuda tensors" in row.reason


@cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_in_half_precision_is_no_larger_than_stock(case, dtype):
    family, kernel = case
    model = tiny.FAMILIES[family](attn_implementation="eager")
    exact = tiny.logits(copy.deepcopy(model).double())
    stock = tiny.logits(model.to(dtype))
    fuseopt.initialize(model, config(kernel))
    fused = tiny.logits(model)
    assert fused.dtype == stock.dtype
    error, allowed = (fused.double() - exact).norm(), (stock.double() - exact).norm()
    assert error <= 1.15 * allowed + torch.finfo(dtype).eps * exact.norm()


@cases
def test_autocast_gives_the_dtype_and_size_of_error_that_stock_has(case):
    family, kernel = case
    model = tiny.FAMILIES[family](attn_implementation="eager")
    exact = tiny.logits(copy.deepcopy(model).double())
    with torch.autocast(model.device.type, torch.bfloat16):
        stock = tiny.logits(model)
        fused = tiny.logits(fuseopt.initialize(model, config(kernel)))
    assert fused.dtype == stock.dtype
    assert (fused.double() - exact).norm() <= 1.15 * (stock.double() - exact).norm() + 1e-3 * exact.norm()


@cases
def test_gradients_are_stock_s(case):
    family, kernel = case
    model = tiny.FAMILIES[family](attn_implementation="eager")
    batch = tiny.inputs(model)
    labels = batch.get("decoder_input_ids", batch["input_ids"])

    def gradients():
        model.zero_grad()
        model(**batch, labels=labels).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    stock = gradients()
    fuseopt.initialize(model, config(kernel))
    for name, gradient in gradients().items():
        least = 1e-5 * stock[name].abs().max().item()
        torch.testing.assert_close(gradient, stock[name], rtol=1e-4, atol=least, msg=name)


def test_fold_bias_adds_it_inside_the_op_and_only_in_float32():
    model = tiny.gpt2()
    stock = tiny.logits(model)
    fuseopt.initialize(model, config({"name": "FusedGELU", "fold_bias": True}), strict=True)
    assert isinstance(model.transformer.h[0].mlp, FusedMLP)
    with mock.patch.object(nn.functional, "gelu", wraps=nn.functional.gelu):
        torch.testing.assert_close(tiny.logits(model), stock, rtol=1e-5, atol=1e-5)
    seen = _bias_arguments(model)
    assert len(seen) == 2 and all(bias is not None for bias in seen)
    assert _bias_arguments(model.bfloat16()) == [None, None]


def _bias_arguments(model):
    seen = []
    for block in model.transformer.h:
        mlp = block.mlp
        plain, folded = mlp.activation, mlp.bias_activation
        mlp.activation = lambda input, plain=plain: (seen.append(None), plain(input))[1]
        mlp.bias_activation = lambda input, bias, folded=folded: (seen.append(bias), folded(input, bias))[1]
    tiny.logits(model)
    return seen[-len(model.transformer.h) :]


@pytest.mark.parametrize("request_", [{"name": "FusedGELU", "fold_bias": True}, "jit"])
def test_a_folded_bias_honours_what_is_done_to_the_children(request_):
    model = tiny.gpt2()
    block = config(request_) if request_ != "jit" else {"kernel_fusion": {"jit": True}}
    fuseopt.initialize(model, block)
    seen = []
    model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda *_: seen.append("c_fc"))
    model.transformer.h[0].mlp.act.register_forward_hook(lambda *_: seen.append("act"))
    tiny.logits(model)
    assert seen == ["c_fc", "act"]
    doubled = tiny.gpt2()
    for each in (model, doubled):
        each.transformer.h[1].mlp.c_fc = _Doubled(each.transformer.h[1].mlp.c_fc)
    torch.testing.assert_close(tiny.logits(model), tiny.logits(doubled), rtol=1e-5, atol=1e-5)


class _Doubled(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.weight, self.bias = inner.weight, inner.bias

    def forward(self, input):
        return 2 * self.inner(input)


def test_attention_weights_are_returned_as_stock_returns_them():
    for family in ("gpt2", "t5"):
        model = tiny.FAMILIES[family](attn_implementation="eager")
        with torch.no_grad():
            stock = model(**tiny.inputs(model), output_attentions=True)
            fuseopt.initialize(model, config("FusedSoftmax"), strict=True)
            fused = model(**tiny.inputs(model), output_attentions=True)
        assert list(fused) == list(stock)
        name = "attentions" if family == "gpt2" else "cross_attentions"
        for got, wanted in zip(getattr(fused, name), getattr(stock, name), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_the_model_s_own_choice_of_attention_still_counts():
    model = tiny.gpt2(attn_implementation="eager")
    stock = tiny.logits(model)
    fuseopt.initialize(model, config("FusedSoftmax"))
    view = model.transformer.h[0].attn.config
    assert isinstance(view, FusedSoftmaxConfig) and view.n_embd == model.config.n_embd
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    with mock.patch.object(ops, "softmax", wraps=ops.softmax) as called:
        torch.testing.assert_close(tiny.logits(model), stock, rtol=1e-5, atol=1e-5)
    assert called.call_count == 0
    with pytest.raises(AttributeError):
        _ = view.no_such_key


def test_padding_masks_reach_the_softmax():
    for family in ("gpt2", "t5"):
        model = tiny.FAMILIES[family](attn_implementation="eager")
        batch = tiny.inputs(model)
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, :3] = 0
        with torch.no_grad():
            stock = model(**batch).logits
            fused = fuseopt.initialize(model, config("FusedSoftmax"))(**batch).logits
        torch.testing.assert_close(fused, stock, rtol=1e-5, atol=1e-5)


def test_reordered_attention_stays():
    model = tiny.gpt2(attn_implementation="eager", reorder_and_upcast_attn=True)
    with pytest.warns(UserWarning, match="reorder_and_upcast_attn"):
        fuseopt.initialize(model, config("FusedSoftmax"))


def test_t5_in_half_precision_keeps_wo_in_float32():
    model = tiny.t5()
    model.half()
    for module in model.modules():
        if hasattr(module, "wo"):
            module.wo.float()
    stock = tiny.logits(model)
    fused = tiny.logits(fuseopt.initialize(model, config("FusedRMSNorm")))
    assert fused.dtype == stock.dtype
    torch.testing.assert_close(fused, stock, rtol=2e-2, atol=2e-2)


def test_frozen_norm_weights_get_no_gradient():
    model = fuseopt.initialize(tiny.t5(), config("FusedRMSNorm"))
    norm = model.encoder.final_layer_norm
    norm.weight.requires_grad_(False)
    batch = tiny.inputs(model)
    model(**batch, labels=batch["decoder_input_ids"]).loss.backward()
    assert norm.weight.grad is None and model.encoder.block[0].layer[0].layer_norm.weight.grad is not None


def test_python_spelt_gelus_stay():
    model = tiny.gpt2(activation_function="gelu_python")
    with pytest.warns(UserWarning, match="asks for the formula in Python"):
        fuseopt.initialize(model, config("FusedGELU"))


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate"])
def test_every_gelu_of_transformers_is_told_apart(activation):
    model = tiny.gpt2(activation_function=activation)
    stock = tiny.logits(model.double())
    fuseopt.initialize(model, config("FusedGELU"), strict=True)
    torch.testing.assert_close(tiny.logits(model), stock, rtol=1e-7, atol=1e-8)


def test_the_reason_why_a_backend_cannot_run_is_one_line():
    plan = fuseopt.plan(tiny.gpt2().cpu(), {"kernel_fusion": {"triton_kernels": ["FusedGELU"], "jit": False}})
    reasons = [row.reason for row in plan.rows if row.target == "FusedGELU" and row.replaced]
    assert reasons and all("gelu cannot run on cpu with torch.float32 by triton: " in reason for reason in reasons)
    assert not any("\n" in reason for reason in reasons) and "\\n" not in str(plan)
