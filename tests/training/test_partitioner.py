"""Under any budget the backward pass finds the dropout that was drawn, and keeps less the lower the budget is."""

import functools
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import fuseopt
from fuseopt.training import partitioner
from tests import tiny
from tests.training_steps import assert_slope, norms_in_float64, saved_bytes, saved_tensors

aten = torch.ops.aten
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


class Net(nn.Module):
    """Matmuls with dropout between them: [batch, 16] -> [batch, 16]."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.4)
        return x


def fused(model: nn.Module, budget: float, backend: str = "aot_eager") -> nn.Module:
    torch._dynamo.reset()
    options = {"memory_efficient_fusion": {"budget": budget, "backend": backend}}
    return fuseopt.initialize(model.double().train(), {"kernel_fusion": options}, strict=True)


@functools.cache
def kept_of_net(backend: str, device: str, layers: int) -> int:
    """Bytes that a step keeps at a budget of 1."""
    x = torch.randn(64, 16, dtype=torch.float64, device=device)
    return saved_bytes(fused(Net(layers).to(device), 1.0, backend), x)


def check_net(budget: float, backend: str, device: str = "cpu", layers: int = 4) -> None:
    everything = kept_of_net(backend, device, layers)
    torch.manual_seed(0)
    model, x = Net(layers).to(device), torch.randn(64, 16, dtype=torch.float64, device=device)
    fused(model, budget, backend)
    assert_slope(model, lambda: model(x).square().mean())
    assert budget == 1 or saved_bytes(model, x) < everything


@each_device
@pytest.mark.parametrize("budget", [1, 0.75, 0.5, 0.25, 0.01, 0])
def test_gradients_of_dropout_at_every_budget(budget, device):
    check_net(budget, "aot_eager", device)


def test_the_key_of_cached_code_has_what_autocast_casts_to():
    keys = [partitioner.Partitioner(in_regions=True).uuid()]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            keys.append(partitioner.Partitioner(in_regions=True).uuid())
    assert len(set(keys)) == 3 and keys[0] == partitioner.Partitioner(in_regions=True).uuid()


@each_device
def test_inductor_makes_the_masks_again(device):
    check_net(0.05, "inductor", device, layers=1)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gpt2", "t5"])
@pytest.mark.parametrize("budget", [0.5, 0.1])
def test_gradients_of_models_with_inductor(family, budget):
    check_model(family, budget, "inductor", "cuda")


@pytest.mark.parametrize(
    ("family", "budget"),
    [("gpt2", 0.5), pytest.param("gpt2", 0, marks=pytest.mark.slow), pytest.param("t5", 0.2, marks=pytest.mark.slow)],
)
def test_gradients_of_models(family, budget):
    check_model(family, budget, "aot_eager", "cpu")


def check_model(family: str, budget: float, backend: str, device: str) -> None:
    rate = (
        {"dropout_rate": 0.2, "num_layers": 1}
        if family == "t5"
        else {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2, "n_layer": 1}
    )
    model = fused(norms_in_float64(tiny.FAMILIES[family](**rate)).to(device), budget, backend)
    batch = tiny.inputs(model)
    assert_slope(model, lambda: model(**batch).logits.square().mean())


@pytest.mark.gpu
def test_attention_that_draws_its_own_mask_is_not_called_again():
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.3}
    gradients = []
    for budget in (1, 0.05):
        model = fused(tiny.gpt2(**rates).cuda(), budget).float()
        ids = tiny.inputs(model, batch=4, length=64)["input_ids"]
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=cpu) as profile, torch.autocast("cuda", torch.bfloat16):
            torch.manual_seed(7)
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        kernels = ("flash_attention", "efficient_attention", "cudnn_attention")
        assert any(kernel in event.key for event in profile.key_averages() for kernel in kernels)
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    size = sum(gradient.square().sum() for gradient in gradients[0].values()) ** 0.5
    error = sum((gradients[1][name] - gradient).square().sum() for name, gradient in gradients[0].items()) ** 0.5
    assert error <= 0.02 * size


def test_the_lower_the_budget_the_less_is_kept():
    model = tiny.gpt2(n_layer=1)
    batch = tiny.inputs(model)
    kept = [saved_bytes(fused(fuseopt.restore(model), budget), **batch) for budget in (1, 0.4, 0)]
    assert kept == sorted(set(kept), reverse=True)


LIBRARY = torch.library.Library("fuseopt_test", "DEF")
LIBRARY.define("product(Tensor input) -> (Tensor, Tensor)")
PRODUCT = torch.ops.fuseopt_test.product.default
products = []


def product(input):
    products.append(input)
    return input.sin(), input.cos()


LIBRARY.impl("product", product, "CompositeExplicitAutograd")


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input):
        output, slope = PRODUCT(input)
        ctx.save_for_backward(slope)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output * ctx.saved_tensors[0]


class Products(Net):
    def forward(self, x):
        for layer in self.layers:
            x = layer(Product.apply(layer(x)).tanh())
        return x


@pytest.mark.parametrize("known", [True, False])
def test_under_a_budget_ops_that_multiply_matrices_are_not_computed_again(known, monkeypatch):
    if known:
        monkeypatch.setattr(partitioner, "_EXPENSIVE_OPS", partitioner._EXPENSIVE_OPS | {PRODUCT})
    model, x = fused(Products(3), 0.3), torch.randn(64, 16, dtype=torch.float64)
    model(x).sum().backward()
    products.clear()
    loss = model(x).sum()
    assert len(products) == 3
    loss.backward()
    assert (len(products) == 3) is known


def test_rows_of_a_parameter_are_looked_up_again():
    model = nn.Sequential(nn.Embedding(50, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU())
    kept = saved_tensors(fused(model, 1.0), torch.arange(30).view(5, 6))
    assert [tuple(tensor.shape) for tensor in kept if tensor.numel() == 5 * 6 * 16] == [(30, 16)]
    assert any(tensor.dtype == torch.int64 for tensor in kept)


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "draws"),
    [
        (aten.native_dropout.default, (0, 0.1, True), {}, True),
        (aten.rand.default, ([3],), {}, True),
        (aten.add.Tensor, (0, 0), {}, False),
        (aten._scaled_dot_product_flash_attention.default, (0, 0, 0), {}, False),
        (aten._scaled_dot_product_flash_attention.default, (0, 0, 0, 0.0), {}, False),
        (aten._scaled_dot_product_flash_attention.default, (0, 0, 0, 0.1), {}, True),
        (aten._scaled_dot_product_efficient_attention.default, (0, 0, 0, None, True), {"dropout_p": 0.1}, True),
        (aten._scaled_dot_product_cudnn_attention.default, (0, 0, 0, None, True, 0.1), {}, True),
        (aten._scaled_dot_product_cudnn_attention.default, (0, 0, 0, None, True), {}, False),
    ],
)
def test_what_random_ops_return_is_kept(op, args, kwargs, draws):
    assert partitioner._is_random(fx.Graph().call_function(op, args, kwargs)) == draws


# With an autograd function of fuseopt's in the graph.
STEP = """
import json, torch, fuseopt
from torch._dynamo.utils import counters

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
config = {"kernel_fusion": {"custom_cuda_kernels": ["FusedGELU"], "memory_efficient_fusion": True}}
fuseopt.initialize(model.train(), config, strict=True)
model(torch.randn(4, 8)).square().mean().backward()
found = {name: counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass")}
print(json.dumps([found, model[0].weight.grad.tolist()]))
"""


@pytest.mark.slow
def test_a_second_process_finds_what_the_first_has_compiled(tmp_path):
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    results = []
    for _ in range(2):
        command = [sys.executable, "-W", "ignore", "-c", STEP]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
    (first, gradient), (second, found_gradient) = results
    assert first == {"hit": 0, "miss": 1, "bypass": 0}
    assert second == {"hit": 1, "miss": 0, "bypass": 0}
    assert found_gradient == gradient
