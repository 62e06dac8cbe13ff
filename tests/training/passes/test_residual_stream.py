"""The residual stream is kept once in each long layer, or under a budget in any, always in the same place."""

import itertools
import operator

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from fuseopt.training import partitioner
from fuseopt.training.passes import residual_stream

INVOKE = torch.ops.higher_order.invoke_subgraph


class Layer(nn.Module):
    """Sublayers [batch, 16] -> [batch, 16], float64, each of which adds to the residual stream."""

    def __init__(self, sublayers: int, length: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(sublayers))
        self.length = length

    def forward(self, x):
        for number, linear in enumerate(self.linears):
            y = F.layer_norm(x, (16,))
            for _ in range(self.length + number):
                y = y.sin() * 1.5
            # Of half the bytes, so that it is kept rather than the sum.
            x = x + linear(y.float()).double()
        return x


def step(sublayers: int, length: int, layers: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return nn.Sequential(*(Layer(sublayers, length) for _ in range(layers))), torch.randn(3, 16, dtype=torch.float64)


@pytest.fixture
def kept(monkeypatch):
    """Of each joint graph the places of what is marked, and the parts that forward and backward are calls of."""
    marks, parts = [], []

    def keep(graph, plain=residual_stream.run, **options):
        plain(graph, **options)
        nodes = list(graph.nodes)
        marks.append([n for n, node in enumerate(nodes) if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE])

    def outline(module, plain=partitioner.regional_compile.outline):
        result = plain(module)
        calls = result.graph.find_nodes(op="call_function", target=INVOKE)
        parts.append([node.args[1] for node in calls])
        return result

    monkeypatch.setattr(residual_stream, "run", keep)
    monkeypatch.setattr(partitioner.regional_compile, "outline", outline)
    return marks, parts


def compiled(model: nn.Module) -> nn.Module:
    split = partitioner.Partitioner(in_regions=True)
    backend = aot_autograd(
        fw_compiler=partitioner._run_as_it_is, partition_fn=split, decompositions=select_decomp_table
    )
    return partitioner.functorch_config.patch(partitioner._OPTIONS)(torch.compile(model, backend=backend))


def test_long_layers_are_equal(kept):
    model, x = step(3, 10, 5)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    gradients = torch.autograd.grad(compiled(model)(x).square().sum(), list(model.parameters()))
    torch.testing.assert_close(gradients, expected)
    (marks,), (forward, backward) = kept
    assert len(marks) == 5 and len({end - start for start, end in itertools.pairwise(marks)}) == 1
    # One for each of the three matmuls of a layer, but for the layers at the ends.
    assert [len(set(names[4:-4])) for names in (forward, backward)] == [3, 3] and len(forward) == 16


@pytest.mark.slow
def test_without_it_they_are_not(kept, monkeypatch):
    monkeypatch.setattr(residual_stream, "_LONG", 10**6)
    model, x = step(3, 10, 5)
    compiled(model)(x).sum().backward()
    (marks,), (_, backward) = kept
    assert not marks and len(set(backward[4:-4])) > 3


@pytest.mark.parametrize(
    ("sublayers", "length", "layers"),
    [
        pytest.param(2, 2, 7, id="short", marks=pytest.mark.slow),
        pytest.param(3, 10, 2, id="two layers", marks=pytest.mark.slow),
        pytest.param(1, 2, 9, id="one sublayer"),
    ],
)
def test_others_are_left_alone(kept, sublayers, length, layers):
    model, x = step(sublayers, length, layers)
    compiled(model)(x).sum().backward()
    assert kept[0] == [[]]


@pytest.mark.parametrize(
    ("places", "additions"),
    [
        ([0, 50, 100, 150, 200], 0),
        ([0, 100, 200, 300], 1),
        ([0, 40, 110, 150, 220, 260], 2),
        ([5, 40, 110, 150, 220, 260], 2),  # the first layer is another
        ([0, 40, 110, 150, 220, 261], 0),
        ([0, 100], 0),
        ([], 0),
    ],
)
def test_additions_of_a_layer_are_found_by_their_distances(places, additions):
    assert residual_stream._layer(places, 100) == additions


def peak_bytes(graph: fx.Graph) -> int:
    """Of what is there at once while `graph` runs one operation after the other, its inputs included."""
    owners: dict[fx.Node, fx.Node] = {}
    last_uses: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        is_view = node.target is operator.getitem or getattr(node.target, "is_view", False)
        owners[node] = owners[node.all_input_nodes[0]] if is_view else node
        for source in node.all_input_nodes:
            last_uses[owners[source]] = node
    sizes = {
        node: sum(value.nbytes for value in pytree.tree_leaves(node.meta["val"]) if value is not None)
        for node in set(owners.values())
        if node.op != "output"
    }
    there = sum(sizes[node] for node in graph.find_nodes(op="placeholder"))
    peak = there
    for node in graph.nodes:
        there += sizes[node] if node.op == "call_function" and owners[node] is node else 0
        peak = max(peak, there)
        there -= sum(sizes[owner] for owner, last in last_uses.items() if last is node and node.op != "output")
    return peak


@pytest.mark.parametrize("keeps", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_lower_budget_lowers_the_peak_of_the_backward(keeps, monkeypatch):
    backwards = []

    def cut(*args, plain=partitioner.min_cut_rematerialization_partition, **kwargs):
        forward, backward = plain(*args, **kwargs)
        backwards.append(backward.graph)
        return forward, backward

    monkeypatch.setattr(partitioner, "min_cut_rematerialization_partition", cut)
    if not keeps:
        monkeypatch.setattr(residual_stream, "run", lambda graph, **_: None)
    for budget in (1, 0.3):
        model, x = step(2, 2, 7)
        with partitioner.functorch_config.patch(activation_memory_budget=budget):
            compiled(model)(x).sum().backward()
    high, low = map(peak_bytes, backwards)
    assert (low < high) is keeps


def test_below_a_budget_of_1_short_layers_keep_it_too(kept):
    model, x = step(2, 2, 4)
    with partitioner.functorch_config.patch(activation_memory_budget=0.5):
        compiled(model)(x).sum().backward()
    (marks,) = kept[0]
    assert len(marks) == 4


def test_values_that_nobody_knows_are_no_stream():
    graph = fx.Graph()
    x = graph.placeholder("x")
    for _ in range(9):
        x = graph.call_function(torch.ops.aten.add.Tensor, (x, graph.get_attr("constant")))
    residual_stream.run(graph)
    assert not any(node.meta for node in graph.nodes)
