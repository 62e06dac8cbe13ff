"""Projections of one matrix are one product each way, where that costs no copy; what comes of it is as exact."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fuseopt.training import partitioner
from fuseopt.training.graph_nodes import MATMULS
from fuseopt.training.passes import merge_projections

# Inductor pads rows whose number is no multiple of 8, each product its own.
SIZE, HEADS, LENGTH = 32, 2, 8


class Attention(nn.Module):
    """[batch, length, SIZE] -> the same; `attend` is given queries, keys and values [batch, heads, length, dim]."""

    def __init__(self, attend, *, bias=(False, False, False)):
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.q, self.k, self.v = (nn.Linear(SIZE, SIZE, bias=b) for b in bias)
        self.o = nn.Linear(SIZE, SIZE, bias=False)
        self.attend = attend

    def heads(self, x):
        return x.view(*x.shape[:2], -1, SIZE // HEADS).transpose(1, 2)

    def forward(self, x, states=None):
        hidden = self.norm(x)
        states = hidden if states is None else states
        output = self.attend(*map(self.heads, (self.q(hidden), self.k(states), self.v(states))))
        return x + self.o(output.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.gate, self.up, self.down = nn.Linear(SIZE, width), nn.Linear(SIZE, width), nn.Linear(width, SIZE)

    def forward(self, x):
        hidden = self.norm(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class Between(Attention):
    """Whose matrix has gradients of something else between those of its projections."""

    def forward(self, x):
        hidden = self.norm(x)
        q, sine, k = self.q(hidden), hidden.sin(), self.k(hidden)
        return x + self.o(q.sigmoid() * sine + k.tanh() * hidden.cos() + self.v(hidden))


def by_torch(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def by_turning(q, k, v):
    """As with rotary embeddings: of values the backward takes what the product was, and of the others what became."""
    return F.scaled_dot_product_attention(q.sin(), k.cos(), v)


def by_sums(q, k, v):
    """Whose backward is operation by operation, so that kernels write what comes of it."""
    return q.sigmoid() * k.mean(2, keepdim=True) + v.sin() * 0.5


@pytest.fixture(autouse=True)
def also_on_a_cpu(monkeypatch):
    monkeypatch.setattr(merge_projections, "_is_half", lambda value: value.dtype in (torch.float16, torch.bfloat16))


@pytest.fixture
def counted(monkeypatch):
    """Of each joint graph, how many products there were before, and are."""
    counts = []

    def products(graph):
        return sum(node.target in MATMULS for node in graph.nodes)

    def join(graph, plain=merge_projections.run):
        before = products(graph)
        plain(graph)
        graph.lint()
        counts.append((before, products(graph)))

    monkeypatch.setattr(merge_projections, "run", join)
    return counts


def step(model, inputs, backend="aot_eager", dtype=torch.bfloat16, **options):
    """The output and all gradients of a step under autocast."""
    torch._dynamo.reset()
    compiled = functools.partial(partitioner.compile_graph, backend=backend, budget=1.0)
    model = torch.compile(copy.deepcopy(model), backend=compiled, fullgraph=True, **options)
    inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    with torch.autocast(inputs[0].device.type, dtype):
        output = model(*inputs)
    output.float().square().sum().backward()
    gradients = [x.grad for x in (*inputs, *model.parameters()) if x.requires_grad]
    return [output.detach(), *gradients]


def in_float64(model, inputs):
    model = copy.deepcopy(model).double()
    inputs = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    output = model(*inputs)
    output.square().sum().backward()
    return [output.detach(), *(x.grad for x in (*inputs, *model.parameters()) if x.requires_grad)]


def assert_as_exact(model, inputs, monkeypatch, **options):
    """As the same step with each product by itself, in norm."""
    exact, joined = in_float64(model, inputs), step(model, inputs, **options)
    with monkeypatch.context() as patch:
        patch.setattr(merge_projections, "run", lambda graph: None)
        plain = step(model, inputs, **options)
    for found, other, expected in zip(joined, plain, exact, strict=True):
        assert (found.shape, found.dtype, found.stride()) == (other.shape, other.dtype, other.stride())
        errors = [(result - expected).norm() / expected.norm() for result in (found, other)]
        assert errors[0] <= 1.5 * errors[1] + 1e-3


def random(*shape, requires_grad=True):
    return torch.randn(shape).requires_grad_(requires_grad)


# Products there were, forward and backward, and are.
STEPS = {
    "written by kernels": (lambda: Attention(by_sums), 12, 6),
    "with biases": (lambda: Attention(by_sums, bias=(True, True, True)), 12, 6),
    "one with a bias": (lambda: Attention(by_sums, bias=(False, False, True)), 12, 9),
    "gated": (Gated, 9, 6),
    "with other gradients between": (lambda: Between(by_sums), 12, 6),
    "by flash attention, forward alone": (lambda: Attention(by_torch), 12, 10),
}


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", STEPS)
def test_merged_projections_save_products_and_keep_outputs_and_gradients(name, backend, counted, monkeypatch):
    make, before, after = STEPS[name]
    torch.manual_seed(0)
    assert_as_exact(make(), [random(3, LENGTH, SIZE)], monkeypatch, backend=backend)
    # On a CPU flash attention's parts are products.
    assert counted[0][0] - counted[0][1] == before - after


def frozen(model, *names):
    for name in names:
        model.get_parameter(f"{name}.weight").requires_grad_(False)
    return model


LEFT = {
    # The gradient of the matrix is one product, of two weights' two.
    "a frozen weight": (lambda: frozen(Attention(by_sums), "k"), True, 11, 7),
    "frozen weights": (lambda: frozen(Attention(by_sums), "q", "k", "v"), True, 9, 5),
    # No gradient of the matrix: forward alone.
    "a matrix without a gradient": (lambda: frozen(Plain(by_sums), "norm"), False, 9, 7),
}


class Plain(Attention):
    """Whose projections take what the model does."""

    def __init__(self, attend):
        super().__init__(attend)
        self.norm = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return self.o(self.attend(*map(self.heads, (self.q(x), self.k(x), self.v(x)))).transpose(1, 2).flatten(2))


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("name", LEFT)
def test_what_has_no_gradient(name, counted, monkeypatch):
    make, requires_grad, before, after = LEFT[name]
    torch.manual_seed(0)
    assert_as_exact(make(), [random(3, LENGTH, SIZE, requires_grad=requires_grad)], monkeypatch)
    assert counted == [(before, after)]


class Returned(Attention):
    """Which returns its keys too, laid out as they were."""

    def forward(self, x):
        hidden = self.norm(x)
        return self.o(self.q(hidden) * self.v(hidden).sigmoid()) + self.k(hidden).sum(), self.k(hidden)


def not_contiguous(q, k, v):
    return q + k.transpose(1, 2).reshape(-1).cumsum(0).view(k.transpose(1, 2).shape).transpose(1, 2) + v


@torch.library.custom_op("test_merged_projections::contiguous_only", mutates_args=())
def contiguous_only(x: torch.Tensor) -> torch.Tensor:
    assert x.is_contiguous()
    return x * 2


contiguous_only.register_fake(torch.empty_like)
contiguous_only.register_autograd(lambda ctx, grad: grad * 2)


class ByAnotherOp(Attention):
    def forward(self, x):
        return x + self.o(sum(contiguous_only(projection(x)) for projection in (self.q, self.k, self.v)))


class InHalf(Attention):
    """Whose weights no step casts."""

    def __init__(self, attend):
        super().__init__(attend)
        self.to(torch.bfloat16)


class Checkpointed(Attention):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Apart(Attention):
    """With another product between its projections."""

    def forward(self, x):
        q = self.q(x)
        return x + self.o(q.sigmoid()) * self.k(x)


SEPARATE = {
    "with another product between": lambda: Apart(by_sums),
    "of widths that no address is aligned for": lambda: Gated(20),
    "of weights that are not cast": lambda: InHalf(by_sums),
    "of which values alone are kept": lambda: Attention(by_turning),
    "taken by an op of somebody else": lambda: ByAnotherOp(by_sums),
    "checkpointed": lambda: Checkpointed(by_sums),
}


@pytest.mark.parametrize("name", SEPARATE)
def test_products_that_do_not_belong_together_stay_apart(name, counted):
    model = SEPARATE[name]()
    dtype = next(model.parameters()).dtype
    step(model, [random(2, LENGTH, SIZE).to(dtype).detach().requires_grad_()])
    assert all(before == after for before, after in counted)


def test_without_autocast_all_stay(counted):
    torch._dynamo.reset()
    compiled = functools.partial(partitioner.compile_graph, backend="aot_eager", budget=1.0)
    torch.compile(Gated(), backend=compiled)(random(2, LENGTH, SIZE)).sum().backward()
    ((before, after),) = counted
    assert before == after == 9


def test_sizes_that_change_stay(counted):
    step(Gated(), [random(2, LENGTH, SIZE)], dynamic=True)
    ((before, after),) = counted
    assert before == after == 9


def test_what_is_returned_is_laid_out_as_before(counted):
    torch._dynamo.reset()
    compiled = functools.partial(partitioner.compile_graph, backend="aot_eager", budget=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        _, keys = torch.compile(Returned(by_sums), backend=compiled)(random(2, LENGTH, SIZE))
    assert keys.is_contiguous() and keys.untyped_storage().nbytes() == keys.nbytes
    ((before, after),) = counted
    assert after < before


@pytest.mark.usefixtures("each_device")
def test_views_across_rows(counted, monkeypatch):
    torch.manual_seed(0)
    assert_as_exact(Attention(not_contiguous), [random(3, LENGTH, SIZE)], monkeypatch)
    ((before, after),) = counted
    # Queries alone are before keys, which stay, and values behind them.
    assert before == after


@pytest.mark.parametrize("make", [Gated, lambda: Attention(by_torch)])
def test_no_more_is_kept(make, monkeypatch):
    """Of a part that is kept for the backward, all of the product would be."""
    model, kept = make(), []
    for join in (merge_projections.run, lambda graph: None):
        monkeypatch.setattr(merge_projections, "run", join)
        storages = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, storages=storages: (storages.update({t.untyped_storage().data_ptr(): t.untyped_storage()}), t)[1],
            lambda t: t,
        ):
            step(model, [random(3, LENGTH, SIZE)])
        kept.append(sum(storage.nbytes() for storage in storages.values()))
    assert 0 < kept[0] <= 1.02 * kept[1]
