"""Steps with weights in 8 or 4 bits on a CPU: by the kernels, without Python, with the dequantised model's tokens."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import fuseopt
from fuseopt.build import loader
from fuseopt.ops.decode.low_bit_linear import RAW
from fuseopt.ops.low_bit import dequantize, quantize
from tests import tiny
from tests.generation.same_calls import assert_same, generate, prompt

NEW = 9
WEIGHTS = {"int8": {"bits": 8}, "int4": {"bits": 4, "group": 32}, "zeros": {"bits": 4, "group": 32, "symmetric": False}}
MODELS = {
    "gpt2": lambda: tiny.gpt2(n_embd=32, n_head=4),
    "t5": lambda: tiny.t5(d_model=32, num_heads=4, d_ff=64),
}


@pytest.fixture(autouse=True)
def needs_the_libraries() -> None:
    if loader.python_library() is None or loader.state("cpu").status != "loaded":
        pytest.skip("the libraries for the CPU and for Python are not loaded")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Size]]:
    """The shapes of the inputs that Python gave the kernel."""
    seen: list[torch.Size] = []
    kernel = RAW["cpu"]
    monkeypatch.setitem(RAW, "cpu", lambda input, *rest: seen.append(input.shape) or kernel(input, *rest))
    return seen


def dequantised(model: nn.Module, **options: object) -> nn.Module:
    """Stock, with the dequantised weights of all that a step multiplies with, in tensors of their own."""
    stock = copy.deepcopy(model)
    for name, module in stock.named_modules():
        is_conv1d = type(module).__name__ == "Conv1D"
        of_prompt = name.startswith("encoder.") or name.endswith(("EncDecAttention.k", "EncDecAttention.v"))
        if of_prompt or not (is_conv1d or isinstance(module, nn.Linear)):
            continue
        weight = module.weight.T if is_conv1d else module.weight
        rounded = dequantize(quantize(weight, **options))
        module.weight = nn.Parameter(rounded.T.contiguous() if is_conv1d else rounded)
    return stock


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("family", MODELS)
def test_recorded_steps(family: str, weights: str, rows: int, calls: list[torch.Size]) -> None:
    model = MODELS[family]()
    stock = dequantised(model, **WEIGHTS[weights])
    fuseopt.initialize(model, {"generation": {"weights": WEIGHTS[weights]}})
    counts = []
    for call in range(3):
        inputs = prompt(model, rows, 6, seed=call)
        arguments = {"max_new_tokens": NEW, "min_new_tokens": NEW}
        assert_same(generate(model, inputs, **arguments), generate(stock, inputs, **arguments))
        assert model.generate.calls[-1].steps == "recorded"
        counts.append(len(calls))
        calls.clear()
    # Steps of later calls are replayed: Python calls the kernel for their prompts alone.
    assert counts[0] > counts[1] == counts[2]
