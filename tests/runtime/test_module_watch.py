"""What is below a module, found faster than by torch's own walk."""

import pytest
from torch import nn

from fuseopt.runtime.module_watch import parameters_below
from tests import tiny


class Odd(nn.Module):
    """Parameters of its own and of a list, one of them twice, places without any, and a module in two places."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(3, 2).weight
        self.register_parameter("bias", None)
        self.shared = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
        self.again = self.shared[0]
        self.several = nn.ParameterList([nn.Linear(1, 1).weight, self.weight])
        self.none = None
        self.register_module("missing", None)


@pytest.mark.parametrize("make", [Odd, nn.ReLU, tiny.gpt2, tiny.t5], ids=lambda make: make.__name__)
def test_parameters_are_those_of_torch_s_walk(make):
    model = make()
    found = parameters_below(model)
    assert len(found) == len(list(model.parameters()))
    assert set(map(id, found)) == set(map(id, model.parameters()))
