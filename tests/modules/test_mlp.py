"""FusedGatedMLP behind FusedGatedGELU and FusedSwiGLU: which path runs, and what is left to the source."""

import copy
import pickle
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.t5.modeling_t5 import T5DenseGatedActDense

import fuseopt
from fuseopt import ops
from fuseopt.modules import FusedGatedMLP, FusedGELU
from fuseopt.modules.base import fused_class
from tests import tiny

pytestmark = pytest.mark.usefixtures("each_device")

CASES = {
    "t5_gated": ("FusedGatedGELU", "encoder.block.1.layer.1.DenseReluDense", "act"),
    "gemma": ("FusedGatedGELU", "model.layers.1.mlp", "act_fn"),
    "llama": ("FusedSwiGLU", "model.layers.1.mlp", "act_fn"),
    "phi3": ("FusedSwiGLU", "model.layers.1.mlp", "activation_fn"),
}
every_case = pytest.mark.parametrize("family", CASES)


def config(*kernels, **block):
    return {"kernel_fusion": {"custom_cuda_kernels": list(kernels), "jit": False, **block}}


def fused(model, family, **options):
    return fuseopt.initialize(model, config(CASES[family][0]), **options)


def loss(model):
    batch = tiny.inputs(model)
    return model(**batch, labels=batch.get("decoder_input_ids", batch["input_ids"])).loss


class RawOps(TorchDispatchMode):
    """Counts the raw gated activations that run, and the dtypes that they are given and asked for."""

    def __init__(self):
        super().__init__()
        self.counts, self.dtypes, self.inputs = Counter(), set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fuseopt":
            self.counts[func] += 1
        if func is torch.ops.fuseopt.gated_activation_fwd.default:
            gate, up, _, *activation_dtype = args
            output = func(*args, **kwargs or {})
            self.dtypes.add((gate.dtype, *(activation_dtype or [gate.dtype]), output.dtype))
            self.inputs.append((gate, up))
            return output
        return func(*args, **kwargs or {})


@every_case
def test_state_dict_is_the_source_s_own_and_restore_gives_it_back(family):
    model = tiny.FAMILIES[family]()
    before, keys = tiny.snapshot(model), list(model.state_dict())
    source = model.get_submodule(CASES[family][1])
    fused(model, family, strict=True)
    module = model.get_submodule(CASES[family][1])
    assert fused_class(module) is FusedGatedMLP
    assert list(model.state_dict()) == keys
    assert all(map(lambda a, b: a is b, module.parameters(), source.parameters()))
    fuseopt.restore(model)
    assert model.get_submodule(CASES[family][1]) is source
    assert tiny.snapshot(model) == before


@every_case
def test_training_runs_the_raw_backward_checkpointing_included(family):
    model = tiny.FAMILIES[family]().train()
    calls = 4 if family == "t5_gated" else 2
    torch.manual_seed(0)
    loss(model).backward()
    stock = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    fused(model, family)
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        torch.manual_seed(0)
        with RawOps() as ran:
            loss(model).backward()
        forward, backward = torch.ops.fuseopt.gated_activation_fwd, torch.ops.fuseopt.gated_activation_bwd
        assert ran.counts == {forward.default: (1 + checkpointing) * calls, backward.default: calls}
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, stock[name], rtol=1e-4, atol=1e-5, msg=name)


@every_case
def test_dtypes_under_autocast_are_the_source_s(family):
    model = tiny.FAMILIES[family]()
    path, act = CASES[family][1:]
    source = model.get_submodule(path)
    input = torch.randn(3, 24, requires_grad=True)
    with torch.autocast(input.device.type, torch.bfloat16):
        activated = getattr(source, act)(torch.randn(3, 8, dtype=torch.bfloat16))
        stock = source(input)
        fused(model, family)
        with RawOps() as ran:
            output = model.get_submodule(path)(input)
    assert ran.dtypes == {(torch.bfloat16, activated.dtype, activated.dtype)}
    assert output.dtype == stock.dtype
    torch.testing.assert_close(output, stock, rtol=2e-2, atol=2e-2)
    (gradient,) = torch.autograd.grad(output.float().sum(), input)
    (expected,) = torch.autograd.grad(stock.float().sum(), input)
    torch.testing.assert_close(gradient, expected, rtol=5e-2, atol=5e-2)


def test_gelu_new_is_float32_under_the_autocast_of_a_gpu():
    model = fused(tiny.t5_gated(), "t5_gated")
    with torch.autocast(model.device.type, torch.bfloat16), RawOps() as ran:
        tiny.logits(model)
    wide = torch.float32 if model.device.type == "cuda" else torch.bfloat16
    assert ran.dtypes == {(torch.bfloat16, wide, wide)}


def test_a_packed_projection_is_read_in_place():
    model = fused(tiny.phi3(), "phi3")
    with RawOps() as ran:
        tiny.logits(model)
    for gate, up in ran.inputs:
        assert gate.stride(-2) == up.stride(-2) == 2 * gate.shape[-1]
        assert up.data_ptr() - gate.data_ptr() == gate.shape[-1] * gate.element_size()


@every_case
def test_hooks_on_the_module_skip_it_and_hooks_on_the_activation_are_called(family):
    model = tiny.FAMILIES[family]()
    path, act = CASES[family][1:]
    stock = tiny.logits(model)
    handle = model.get_submodule(path).register_forward_hook(lambda *_: None)
    fused(model, family)
    assert type(model.get_submodule(path)) is not FusedGatedMLP
    (reason,) = {row.reason for row in fuseopt.report(model).skipped}
    assert "carries hooks" in reason
    handle.remove()
    fused(fuseopt.restore(model), family)
    seen = []
    getattr(model.get_submodule(path), act).register_forward_hook(lambda *_: seen.append("act"))
    with RawOps() as ran:
        torch.testing.assert_close(tiny.logits(model), stock, rtol=1e-5, atol=1e-5)
    assert seen == ["act"]
    assert ran.counts.total() == (3 if family == "t5_gated" else 1)


class _Doubled(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.weight = inner, inner.weight

    def forward(self, input):
        return 2 * self.inner(input)


@every_case
def test_an_adapter_around_a_projection_counts(family):
    model, doubled = fused(tiny.FAMILIES[family](), family), tiny.FAMILIES[family]()
    for each in (model, doubled):
        block = each.get_submodule(CASES[family][1])
        for name, child in list(block.named_children()):
            if isinstance(child, nn.Linear):
                setattr(block, name, _Doubled(child))
    with RawOps() as ran:
        torch.testing.assert_close(tiny.logits(model), tiny.logits(doubled), rtol=1e-5, atol=1e-5)
    assert ran.counts.total() == (4 if family == "t5_gated" else 2)


def test_a_subclass_stays():
    class Mine(LlamaMLP):
        pass

    model = tiny.llama()
    mine = Mine(model.config)
    model.model.layers[0].mlp = mine
    fused(model, "llama")
    assert model.model.layers[0].mlp is mine and fused_class(model.model.layers[1].mlp) is FusedGatedMLP
    reasons = {row.reason for row in fuseopt.report(model).skipped}
    assert reasons == {"it is a subclass of LlamaMLP, so its forward may differ"}


def test_each_name_takes_its_own_activations_and_names_the_other():
    model = tiny.gemma()
    with pytest.warns(UserWarning, match="its activation is GELUTanh, which FusedGatedGELU takes"):
        fuseopt.initialize(model, config("FusedSwiGLU"))
    with pytest.warns(UserWarning, match="its activation is ReLUSquaredActivation"):
        fuseopt.initialize(tiny.llama(hidden_act="relu2"), config("FusedSwiGLU"))
    with pytest.warns(UserWarning, match="asks for the formula in Python"):
        fuseopt.initialize(tiny.gemma(hidden_act="gelu_python"), config("FusedGatedGELU"))


@pytest.mark.parametrize("kernels", [("FusedGELU", "FusedGatedGELU"), ("FusedGatedGELU", "FusedGELU")])
def test_the_block_goes_before_its_activation_and_both_names_are_met(kernels):
    model = fuseopt.initialize(tiny.t5_gated(), config(*kernels), strict=True)
    kinds = {fused_class(module) for module in model.modules()}
    assert FusedGatedMLP in kinds and FusedGELU not in kinds
    with RawOps() as ran:
        tiny.logits(model)
    assert set(ran.counts) == {torch.ops.fuseopt.gated_activation_fwd.default}


def test_wo_in_another_dtype_gets_its_input_in_that():
    model = tiny.t5_gated().half()
    for block in model.modules():
        if isinstance(block, T5DenseGatedActDense):
            block.wo.float()
    stock = tiny.logits(model)
    torch.testing.assert_close(tiny.logits(fused(model, "t5_gated")), stock, rtol=2e-2, atol=2e-2)


def test_wo_in_int8_gets_its_input_as_it_is():
    class Int8Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(24, 40, dtype=torch.int8), requires_grad=False)

        def forward(self, input):
            assert input.dtype == torch.float32
            return input @ self.weight.to(input.dtype).mT

    model = fused(tiny.t5_gated(), "t5_gated")
    block = model.get_submodule(CASES["t5_gated"][1])
    block.wo = Int8Linear()
    assert block(torch.randn(2, 24)).shape == (2, 24)


@every_case
def test_it_compiles_whole_and_can_be_copied(family):
    model = fused(tiny.FAMILIES[family](), family)
    module = model.get_submodule(CASES[family][1])
    input = torch.randn(3, 24)
    eager = module(input)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(input), eager, rtol=1e-5, atol=1e-5)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(input), eager)


def test_from_module_alone():
    source = LlamaMLP(tiny.llama().config)
    names = {"act": "act_fn", "gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    module = FusedGatedMLP.from_module(
        source, gated_activation=partial(ops.gated_activation, activation="silu"), **names
    )
    input = torch.randn(2, 5, 24)
    torch.testing.assert_close(module(input), source(input))
