"""Norms over a residual stream that is not kept: their backward is one call, which adds the stream up again."""

import contextlib

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional as F

import fuseopt
from fuseopt.ops.layer_norm_of_sum_bwd import RAW, layer_norm_of_sum_bwd_reference
from fuseopt.training import partitioner
from fuseopt.training.passes import recomputed_norms
from tests import tiny

SIZE = 16


class Block(nn.Module):
    def __init__(self, norm: nn.Module, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = norm, nn.Linear(SIZE, SIZE, bias), dropout

    def forward(self, x):
        y = self.linear(self.norm(x))
        return x + (F.dropout(y, self.dropout) if self.dropout else y)


class Stack(nn.Module):
    """[2, 3] tokens -> a loss. Its stream is float32, what is added to it bfloat16."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(7, SIZE)
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(SIZE)
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.5, 0.5)

    def forward(self, tokens):
        x = self.embeddings(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).square().mean()


def blocks(count: int, norm=nn.LayerNorm, **options) -> list[Block]:
    torch.manual_seed(0)
    return [Block(norm(SIZE), **options) for _ in range(count)]


@pytest.fixture
def calls(monkeypatch, set_tuned):
    """The arguments of each call; small tensors on a CPU are taken, and computed by the reference."""
    found = []

    def run(*arguments):
        found.append(arguments)
        return tuple(result.contiguous() for result in layer_norm_of_sum_bwd_reference(*arguments))

    set_tuned("recomputed_norms_min_elements", 0)
    monkeypatch.setattr(recomputed_norms, "_is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(recomputed_norms, "is_available", lambda: True)
    with contextlib.closing(_Library()) as library:
        library.impl("layer_norm_of_sum_bwd", run, "CPU")
        yield found


class _Library(torch.library.Library):
    def __init__(self) -> None:
        super().__init__("fuseopt", "IMPL")

    def close(self) -> None:
        self._destroy()


def gradients(model: nn.Module, tokens, *, compiled: bool, autocast: bool = True, budget: float = 1.0):
    torch._dynamo.reset()
    step = model
    if compiled:
        split = partitioner.Partitioner(in_regions=True)
        backend = aot_autograd(
            fw_compiler=partitioner._run_as_it_is, partition_fn=split, decompositions=select_decomp_table
        )
        step = torch.compile(model, backend=backend)
    with (
        partitioner.functorch_config.patch({**partitioner._OPTIONS, partitioner._BUDGET: budget}),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        loss = step(tokens)
    return torch.autograd.grad(loss, list(model.parameters()))


def assert_same_gradients(model: nn.Module, **options) -> None:
    tokens = torch.tensor([[1, 5, 2], [0, 5, 6]])
    expected = gradients(model, tokens, compiled=False, **options)
    for actual, stock in zip(gradients(model, tokens, compiled=True, **options), expected, strict=True):
        assert actual.dtype == stock.dtype and actual.shape == stock.shape
        assert (actual - stock).norm() <= 0.01 * stock.norm()


@pytest.mark.parametrize(
    ("count", "bias"), [(1, True), (2, False), (4, True), pytest.param(8, False, marks=pytest.mark.slow), (15, True)]
)
def test_gradients_and_what_is_read(calls, count, bias):
    """One call a norm but the last, whose gradient is no product's; each reads three addends at most."""
    assert_same_gradients(Stack(blocks(count, bias=bias)))
    # What only one norm begins with is not written out for it: the embeddings of a single block.
    assert len(calls) == (count if count > 1 else 0)
    read = [len(addends) for _, _, _, addends, *_ in reversed(calls)]
    most = recomputed_norms.ADDENDS_PER_CALL
    # A sum that is kept is read as it is; those in between begin at each third one.
    kept = [place for place in range(count) if place % (2 * most) == 0]
    if count > 2 * most:
        assert read == [0 if place in kept else (place - 1) % most + 1 for place in range(count)]
    assert max(read, default=0) <= most
    # Every sixth sum is kept, and one in between is written out.
    assert len({base.data_ptr() for _, _, base, *_ in calls}) <= count // most + 1


@pytest.mark.parametrize("budget", [pytest.param(0.5, marks=pytest.mark.slow), 0.0])
def test_under_a_budget(calls, budget):
    assert_same_gradients(Stack(blocks(9)), budget=budget)


def test_bias_gradients_are_sums_of_what_was_rounded(calls):
    model = Stack(blocks(4))
    tokens = torch.tensor([[1, 5, 2], [0, 5, 6]])
    names = [name for name, _ in model.named_parameters()]
    grads = dict(zip(names, gradients(model, tokens, compiled=True), strict=True))
    for number, arguments in enumerate(reversed(calls[:-1])):
        results = layer_norm_of_sum_bwd_reference(*arguments)
        expected = results.rounded.float().sum((0, 1)).bfloat16().float()
        torch.testing.assert_close(grads[f"blocks.{number}.linear.bias"], expected)


OTHERS = {
    "float32 throughout": ({}, {"autocast": False}),
    "dropout in between": ({"dropout": 0.1}, {}),
    "another norm": ({"norm": nn.RMSNorm}, {}),
    "a norm without parameters": ({"norm": lambda size: nn.LayerNorm(size, elementwise_affine=False)}, {}),
    "a norm without a bias": ({"norm": lambda size: nn.LayerNorm(size, bias=False)}, {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_norms_that_cannot_be_recomputed_are_kept(calls, name):
    of_blocks, options = OTHERS[name]
    # With dropout, enough for norms of what is kept.
    model, tokens = Stack(blocks(8 if "dropout" in of_blocks else 4, **of_blocks)), torch.tensor([[1, 5, 2], [0, 5, 6]])
    if "dropout" in of_blocks:
        torch.manual_seed(1)
        assert all(grad.isfinite().all() for grad in gradients(model, tokens, compiled=True))
        # But for norms of what is kept.
        assert all(addends == [] for _, _, _, addends, *_ in calls) and len(calls) < 4
        return
    assert_same_gradients(model, **options)
    assert calls == []


def test_small_ones_stay(calls, set_tuned):
    set_tuned("recomputed_norms_min_elements", 6 * SIZE + 1)
    assert_same_gradients(Stack(blocks(4)))
    assert calls == []


class Shifted(nn.Module):
    """A norm without a bias, and a matrix added in its place, on either side."""

    def __init__(self, size: int, first: bool) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(size, bias=False), first
        self.matrix = nn.Parameter(torch.zeros(2, 3, size))

    def forward(self, x):
        return self.matrix + self.norm(x) if self.first else self.norm(x) + self.matrix


@pytest.mark.parametrize("first", [True, False])
def test_a_matrix_is_no_bias(calls, first):
    assert_same_gradients(Stack(blocks(3, norm=lambda size: Shifted(size, first))))
    assert calls == []


def test_parameters_that_are_not_aligned_stay(calls):
    """As those in one buffer of an optimizer, one behind the other."""
    model = Stack(blocks(3))
    model.blocks[0].norm.weight = nn.Parameter(torch.ones(SIZE + 1)[1:])
    assert_same_gradients(model)
    assert len(calls) == 2


@pytest.mark.gpu
def test_steps_of_gpt2_call_the_kernel():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    assert recomputed_norms.is_available()
    torch.manual_seed(0)
    sizes = {"n_embd": 128, "n_head": 4, "n_layer": 8, "n_positions": 128}
    model = tiny.gpt2(**sizes, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0).cuda().train()
    tokens = torch.randint(model.config.vocab_size, (80, 128), device="cuda")

    def step():
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.item(), [parameter.grad.clone() for parameter in model.parameters()]

    loss, expected = step()
    fuseopt.initialize(model, "training")
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fused, grads = step()
    names = [event.key for event in profile.key_averages() for _ in range(event.count)]
    assert sum("layer_norm_of_sum_bwd_kernel" in name for name in names) == 16
    assert abs(fused - loss) <= 1e-3 * loss
    for grad, stock in zip(grads, expected, strict=True):
        assert (grad - stock).norm() <= 0.05 * stock.norm()


def test_the_op_is_that_of_the_native_library():
    assert RAW["cuda"] is torch.ops.fuseopt.layer_norm_of_sum_bwd.default
