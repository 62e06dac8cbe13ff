"""Inductor looks for its patterns in joint graphs where there may be some, and in all that comes after these."""

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes import joint_graph

import fuseopt
from fuseopt.errors import CompileError
from fuseopt.training import inductor_patterns
from tests.training.graphs import traced

aten = torch.ops.aten


def product(rows=16, inner=8, columns=24):
    def function(call, left, right):
        return call(aten.mm.default, left, right)

    return traced(function, [rows, inner], [inner, columns], device="meta")


def on_two_devices():
    graph = product()
    graph.placeholder("index").meta["val"] = torch.zeros(3)
    return graph


def looks(graph):
    with inductor_patterns.only_where_useful():
        first, last = (getattr(inductor_config, place) for place in inductor_patterns.PLACES)
        first(graph)
        during = inductor_config.pattern_matcher
        last(graph)
        assert inductor_config.pattern_matcher
        first(graph)
    assert inductor_config.pattern_matcher
    return during


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (product(), False),
        (product(rows=15), True),
        (product(inner=12), True),
        (product(columns=50257), True),
        (traced(lambda call, x: call(aten.amax.default, x, [-1]), [8, 8], device="meta"), True),
        (traced(lambda call, x, y: call(aten.bmm.default, x, y), [2, 8, 8], [2, 8, 8], device="meta"), True),
        (traced(lambda call, x: call(aten.mul.Tensor, x, x), [3, 5], device="meta"), False),
        (on_two_devices(), True),
    ],
)
def test_what_may_hold_patterns(graph, expected):
    assert looks(graph) == expected


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return self.layer(x).relu()


class Attending(Block):
    def forward(self, x):
        x = super().forward(x)
        return (x @ x.transpose(1, 2)).softmax(-1) @ x


@pytest.fixture
def searched(monkeypatch):
    """What was looked for in joint graphs."""
    found = []
    kind = type(joint_graph.early_patterns)
    apply = kind.apply
    joint = (joint_graph.early_patterns, *joint_graph.pass_patterns)

    def counted(self, *args):
        if any(self is patterns for patterns in joint):
            found.append(self)
        return apply(self, *args)

    monkeypatch.setattr(kind, "apply", counted)
    torch._dynamo.reset()
    with torch.compiler.config.patch(force_disable_caches=True):
        yield found


def fused(model):
    return fuseopt.initialize(model.train(), {"kernel_fusion": {"memory_efficient_fusion": True}}, strict=True)


@pytest.mark.parametrize("kind", [Block, Attending])
def test_a_step_is_searched_where_it_pays(searched, kind):
    model, x = fused(kind()), torch.randn(2, 8, 16)
    output = model(x)
    output.sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(output, fuseopt.restore(model)(x))
    assert bool(searched) == (kind is Attending) and inductor_config.pattern_matcher
    assert not any(getattr(inductor_config, place) for place in inductor_patterns.PLACES)


@pytest.mark.parametrize("place", inductor_patterns.PLACES)
def test_a_pass_of_the_users_stays(searched, place):
    class Pass(CustomGraphPass):
        called = 0

        def __call__(self, graph):
            self.called += 1
            assert inductor_config.pattern_matcher
            raise RuntimeError("seen enough")

        def uuid(self):
            return None

    own = Pass()
    with inductor_config.patch({place: own}), pytest.raises(CompileError):
        fused(Block())(torch.randn(2, 8, 16))
    assert own.called == 1 and bool(searched) == (place == inductor_patterns.PLACES[1])


def test_a_failure_leaves_the_patterns_as_they_were(searched, monkeypatch):
    def fail(graph):
        assert not inductor_config.pattern_matcher
        raise RuntimeError("not today")

    monkeypatch.setattr(joint_graph, "replace_random_passes", fail)
    with pytest.raises(CompileError):
        fused(Block())(torch.randn(2, 8, 16))
    assert inductor_config.pattern_matcher and not searched
