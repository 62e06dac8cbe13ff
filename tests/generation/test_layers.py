"""What decode steps are made of."""

from types import ModuleType

import pytest
import torch
from torch import nn

from fuseopt.bench.architectures import random_model
from fuseopt.generation import layers_t5, step_gpt2, step_t5
from fuseopt.generation.layers import Linear, linear, linear_of, look_ahead
from fuseopt.generation.state import DecodeState, Sizes
from fuseopt.generation.step_gpt2 import GPT2Step
from fuseopt.generation.step_t5 import T5Step


def test_a_layer_brings_in_the_one_after_the_next() -> None:
    layers = [linear_of(nn.Linear(2, 3)) for _ in range(4)]
    head = linear_of(nn.Linear(2, 5))
    look_ahead(layers, head)
    assert [layer.ahead for layer in layers] == [layers[2].weights, layers[3].weights, (), ()]
    assert head.ahead == layers[0].weights


@pytest.mark.parametrize(
    ("name", "step_class", "modules"),
    [("gpt2-tiny", GPT2Step, (step_gpt2,)), ("t5-tiny", T5Step, (step_t5, layers_t5))],
)
def test_steps_read_ahead_in_the_order_they_run_in(
    name: str, step_class: type, modules: tuple[ModuleType, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a layer brings in is what the layer after the next reads."""
    model = random_model(name, torch.device("cpu"), torch.float32)
    step = step_class(model)
    ran: list[Linear] = []

    def recorded(input: torch.Tensor, layer: Linear, **options: object) -> torch.Tensor:
        ran.append(layer)
        return linear(input, layer, **options)

    for module in modules:
        monkeypatch.setattr(module, "linear", recorded)
    state = DecodeState(Sizes(1, 8, 8 if name.startswith("t5") else 0), step.shape, step.vocab)
    state.begin(0, None, None)
    state.load_cross(state.sizes.cross_capacity, None)
    with torch.no_grad():
        step(state)
    assert len(ran) > 4
    *body, head = ran
    for layer, later in zip(body, body[2:], strict=False):
        assert layer.ahead is later.weights
    assert head.ahead is body[0].weights
