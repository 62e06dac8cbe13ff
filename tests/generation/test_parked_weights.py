"""generate() with packed weights while the Parameters are in host memory, `keep: "cpu"`."""

import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fuseopt
from fuseopt.generation.engine import low_bit
from fuseopt.generation.engine.parked_weights import is_parked
from fuseopt.ops.low_bit import quantize
from tests.generation.same_calls import calls_of, prompt
from tests.generation.test_low_bit import SWEPT, dequantised
from tests.generation.test_packed_weights import forced

pytestmark = pytest.mark.usefixtures("packs")
WEIGHTS = {"bits": 8, "keep": "cpu"}


def made(family: str = "llama", **sizes: int) -> nn.Module:
    return SWEPT[family](**sizes).half()


def fused(model: nn.Module, keep: str = "cpu") -> nn.Module:
    return fuseopt.initialize(model, {"generation": {"weights": {**WEIGHTS, "keep": keep}}})


def parked(model: nn.Module) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if is_parked(module)}


def short(model: nn.Module) -> dict[str, torch.Tensor]:
    return prompt(model, 2, 5, seed=3, padded=False)


@pytest.fixture
def generated() -> tuple[nn.Module, nn.Module]:
    """A model whose weights a call of generate() has parked, and its stock copy."""
    model = made()
    stock = copy.deepcopy(model)
    fused(model).generate(**short(model), max_new_tokens=3)
    assert len(parked(model)) > 10 and calls_of(model)[-1].tier.value == "T0"
    return model, stock


def assert_same_state(model: nn.Module, stock: nn.Module) -> None:
    expected = stock.state_dict()
    state = model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name].cpu(), tensor.cpu()) for name, tensor in expected.items())


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= 0.02 * expected.abs().max()


def test_a_parked_layer_takes_its_input_by_name(generated: tuple[nn.Module, nn.Module]) -> None:
    model, stock = generated
    path, layer = next(iter(parked(model).items()))
    twin = stock.get_submodule(path)
    x = torch.randn(3, twin.weight.shape[1]).to(twin.weight)
    assert torch.equal(layer(input=x), twin(input=x)) and not is_parked(layer)


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_logits_are_those_of_weights_on_the_device(family: str) -> None:
    model = made(family)
    stock, on_device = copy.deepcopy(model), fused(copy.deepcopy(model), "device")
    places = {path: module.weight.data_ptr() for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    inputs = short(model)
    found = forced(fused(model), inputs)
    assert torch.equal(found, forced(on_device, inputs))
    assert not parked(on_device) and len(parked(model)) > 3
    for path, module in parked(model).items():
        assert module.weight.is_cpu and module.weight.data_ptr() != places.get(path)
        assert module.weight.is_pinned() == torch.cuda.is_available()
    said = [" ".join(each.generate.report_lines()) for each in (model, on_device)]
    assert "MiB in host memory" in said[0] and "host memory" not in said[1]
    assert_same_state(model, stock)
    tied = [module for module in model.modules() if getattr(module, "weight", 0) is model.get_input_embeddings().weight]
    assert not any(map(is_parked, tied))


def test_only_the_parameter_holds_host_memory(generated: tuple[nn.Module, nn.Module]) -> None:
    for layer in parked(generated[0]).values():
        storage = layer.weight.untyped_storage()
        assert torch._C._storage_Use_Count(storage._cdata) == 2  # the Parameter, and `storage`


def test_long_prompts_multiply_with_the_dequantised_weights() -> None:
    model = made(max_position_embeddings=128)
    inputs = prompt(model, 2, 40, seed=3, padded=False)
    stock = dequantised(model, bits=8)
    assert_near(forced(fused(model), inputs), forced(stock, inputs))
    assert parked(model) and not calls_of(model)[-1].unquantised_prompt


def test_saved_weights_are_the_models(generated: tuple[nn.Module, nn.Module], tmp_path) -> None:
    model, stock = generated
    model.save_pretrained(tmp_path)
    saved, expected = load_file(tmp_path / "model.safetensors"), stock.state_dict()
    assert parked(model) and all(torch.equal(tensor, expected[name].cpu()) for name, tensor in saved.items())


def forward(model: nn.Module) -> torch.Tensor:
    return model(**short(model)).logits


def stock_call(model: nn.Module) -> torch.Tensor:
    found = model.generate(**short(model), max_new_tokens=3, output_attentions=True, return_dict_in_generate=True)
    assert not hasattr(model.generate, "calls") or calls_of(model)[-1].tier.value == "T2"
    return found.sequences


def prompt_by_the_model(model: nn.Module) -> torch.Tensor:
    embeds = model.get_input_embeddings()(short(model)["input_ids"]).detach()
    found = model.generate(inputs_embeds=embeds, max_new_tokens=1, return_dict_in_generate=True, output_logits=True)
    return found.logits[0]


@pytest.mark.parametrize("use", [forward, stock_call, prompt_by_the_model])
def test_a_forward_brings_the_weights_back(use: Callable, generated: tuple[nn.Module, nn.Module]) -> None:
    model, stock = generated
    inputs, place = short(model), {parameter.device for parameter in stock.parameters()}
    before = forced(model, inputs)
    found, expected = use(model), use(stock)
    assert torch.equal(found, expected)
    assert not parked(model) and {parameter.device for parameter in model.parameters()} == place
    assert "host memory" not in " ".join(model.generate.report_lines())
    with mock.patch.object(low_bit, "quantize") as unused:
        assert torch.equal(forced(model, inputs), before)
    assert not unused.called and parked(model)
    assert_same_state(model, stock)


def filled_like(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.new_full((64, 96), 0.1))


def test_edits_of_parked_weights_are_quantised_again(generated: tuple[nn.Module, nn.Module]) -> None:
    model, stock = generated
    layers, others = model.model.layers, stock.model.layers
    edits: list[Callable[[nn.ModuleList], object]] = [
        lambda layers: layers[0].mlp.up_proj.weight.mul_(-3),
        lambda layers: layers[1].self_attn.o_proj.load_state_dict({"weight": torch.ones(96, 48)}, strict=False),
        lambda layers: setattr(layers[0].mlp.down_proj.weight, "data", layers[0].mlp.down_proj.weight.data * 2),
        lambda layers: layers[1].mlp.gate_proj.weight.data.neg_(),
        lambda layers: setattr(layers[0].mlp.up_proj, "weight", filled_like(layers[0].input_layernorm.weight)),
    ]
    inputs = short(model)
    for edit in edits:
        with torch.no_grad(), mock.patch.object(low_bit, "quantize", wraps=quantize) as counted:
            edit(layers), edit(others)
            found = forced(model, inputs)
        assert counted.call_count == 1 and parked(model)
        assert_near(found, forced(dequantised(stock, bits=8), inputs))
    assert_same_state(model, stock)


def test_a_forward_that_another_thread_or_a_lack_of_memory_interrupts(generated: tuple[nn.Module, nn.Module]) -> None:
    model, stock = generated
    layer, expected = model.model.layers[0].mlp.up_proj, stock.model.layers[0].mlp.up_proj
    input = expected.weight.new_ones(2, 96)
    looked_up = layer.forward  # as a second thread does before the first has brought the weight back
    with mock.patch.object(torch.Tensor, "to", side_effect=torch.OutOfMemoryError), pytest.raises(RuntimeError):
        layer(input)
    assert is_parked(layer)
    for _ in range(2):
        assert torch.equal(looked_up(input), expected(input)) and not is_parked(layer)


def test_a_forward_set_around_that_of_a_parked_layer_stays(generated: tuple[nn.Module, nn.Module]) -> None:
    model, stock = generated
    layer, place = model.model.layers[0].mlp.up_proj, stock.lm_head.weight.device
    wrapped = layer.forward = mock.Mock(wraps=layer.forward)
    for _ in range(2):
        assert torch.equal(forward(model), forward(stock))
    assert layer.forward is wrapped and wrapped.call_count == 2 and layer.weight.device == place
    fuseopt.restore(model)
    assert torch.equal(forward(model), forward(stock)) and wrapped.call_count == 3


def test_restored_and_copied_models(generated: tuple[nn.Module, nn.Module]) -> None:
    model, stock = generated
    inputs = short(model)
    before = forced(model, inputs)
    twin, third = copy.deepcopy(model), copy.deepcopy(model)
    assert torch.equal(forward(third), forward(stock)) and parked(model) and not parked(third)
    assert torch.equal(forced(twin, inputs), before) and parked(twin)
    fuseopt.restore(twin)
    fuseopt.restore(model)
    for one in (model, twin):
        assert not parked(one) and "forward" not in one.lm_head.__dict__
        assert torch.equal(forward(one), forward(stock))
        assert_same_state(one, stock)
    # A plan for a fused model is made for its Parameters on the device.
    fused(model).generate(**inputs, max_new_tokens=2)
    assert parked(model) and fuseopt.plan(model, "inference").replacements and not parked(model)


def test_training(generated: tuple[nn.Module, nn.Module]) -> None:
    model, stock = generated
    inputs = short(model)
    for one in (model, stock):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        one.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
        optimizer.step()
        one.eval()
    assert_same_state(model, stock)
    with torch.inference_mode():
        assert_near(forced(model, inputs), forced(dequantised(stock, bits=8), inputs))
        assert parked(model) and torch.equal(forward(model), forward(stock))
    assert not any(parameter.is_inference() for parameter in model.parameters())


def test_verify() -> None:
    model = made()
    found = fuseopt.verify(model, {"generation": {"weights": WEIGHTS}}, short(model))
    assert found.ok and found.low_bit is not None and not parked(model), str(found)
