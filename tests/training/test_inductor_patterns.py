"""Inductor looks for its patterns in joint graphs where there may be some, and in all that comes after these."""

import functools

import pytest
import torch
from torch import fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes import joint_graph, pad_mm

import fuseopt
from fuseopt.errors import CompileError
from fuseopt.training import inductor_patterns, partitioner
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


def test_views_of_a_padded_product_have_its_strides():
    def function(call, left, right):
        head = call(aten.view.default, call(aten.mm.default, left, right), [2, 8, 61])
        return (
            call(aten.permute.default, head, [1, 0, 2]),
            call(aten.view.default, head, [-1]),
            call(aten.sin.default, head),
        )

    graph = traced(function, [16, 8], [8, 61], device="meta")
    left, right, product, head, turned, flat, sine, _ = graph.nodes
    with inductor_patterns.only_where_useful():
        before, after = (getattr(inductor_config, place) for place in inductor_patterns.PLACES)
        before(graph)
        with graph.inserting_before(product):
            padded = graph.call_function(aten.constant_pad_nd.default, (right, [0, 3]))
            wide = graph.call_function(aten.mm.default, (left, padded))
            narrow = graph.call_function(aten.slice.Tensor, (wide, 1, 0, -3))
        for node in (padded, wide, narrow):
            given = fx.node.map_arg(node.args, lambda argument: argument.meta["val"])
            node.meta["val"] = node.target(*given)
        product.replace_all_uses_with(narrow)
        graph.erase_node(product)
        after(graph)
    assert head.meta["val"].stride() == (512, 64, 1) and turned.meta["val"].stride() == (64, 512, 1)
    # Not views of it: a copy, and a result.
    assert flat.meta["val"].stride() == (1,) and sine.meta["val"].stride() == (488, 61, 1)


@pytest.mark.slow  # Inductor's C++ for two sizes
def test_steps_of_any_size_with_a_padded_product_that_is_kept(monkeypatch):
    class Head(nn.Linear):
        def forward(self, x, labels):
            logits = super().forward(x)
            return nn.functional.cross_entropy(logits.float().view(-1, 61), labels.view(-1)), logits

    monkeypatch.setattr(pad_mm, "check_device", lambda left, right: True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    torch._dynamo.reset()
    head = Head(16, 61, bias=False).bfloat16()
    compiled = torch.compile(head, backend=functools.partial(partitioner.compile_graph, backend="inductor", budget=1.0))
    with inductor_config.patch(force_shape_pad=True), torch.compiler.config.patch(force_disable_caches=True):
        for size in [(64, 16), (8, 128), (3, 77), (1, 9)]:
            x, labels = torch.randn(*size, 16).bfloat16(), torch.randint(61, size)
            loss, logits = compiled(x, labels)
            assert logits.stride()[1:] == (64, 1), "the product is padded"
            found, expected = (torch.autograd.grad(each, head.weight) for each in (loss, head(x, labels)[0]))
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-3)


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
