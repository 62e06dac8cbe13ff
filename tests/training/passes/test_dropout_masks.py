"""Masks drawn by a few instructions are Philox's to the bit, and only Inductor's on a GPU are exchanged for them."""

import pytest
import torch
from torch import fx, nn
from torch._inductor import inductor_prims
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy

import fuseopt
from fuseopt.ops.philox import philox_pair
from fuseopt.training.passes import dropout_masks
from fuseopt.training.passes.dropout_masks import MASK, keep_mask
from tests.training_steps import assert_slope, saved_tensors

aten, prims = torch.ops.aten, torch.ops.prims
SEED = 0x0123456789ABCDEF


def test_numbers_are_those_of_random123():
    """From its kat_vectors: philox2x32, 7 rounds. There a counter has two words, and a key one."""
    for position, upper, key, expected in (
        (0, 0, 0, (0x257A3673, 0xCD26BE2A)),
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, (0xAB302C4D, 0x3DC9D239)),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, (0xBEDBBE6B, 0xE4C770B3)),
    ):
        seed = torch.tensor(upper << 32 | key if upper < 2**31 else (upper - 2**32) << 32 | key)
        numbers = philox_pair(seed, torch.tensor([position]))
        assert tuple(number.item() for number in numbers) == expected


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_asked_for_and_others_for_another_seed(p):
    masks = torch.stack([keep_mask(torch.tensor(seed), (300, 400), p) for seed in (0, 1, SEED, -SEED)])
    assert masks.double().mean((1, 2)).sub(1 - p).abs().max() < 5 * (p * (1 - p) / masks[0].numel()) ** 0.5
    both = masks.flatten(1).double().corrcoef()
    assert both.fill_diagonal_(0).abs().max() < 5 / masks[0].numel() ** 0.5
    assert torch.equal(keep_mask(torch.tensor(SEED), (400, 300), p).flatten(), masks[2].flatten())


def test_all_or_nothing():
    assert keep_mask(torch.tensor(SEED), (999,), 0.0).all()
    assert not keep_mask(torch.tensor(SEED), (999,), 1.0).any()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(7,), (3, 1000), (5, 129, 17), (1 << 20,)])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.77, 1.0])
def test_inductor_draws_what_the_reference_draws(size, p):
    torch._dynamo.reset()
    compiled = torch.compile(lambda seed: MASK(seed, size, p).to(torch.float32) * 2, fullgraph=True)
    for seed in (SEED, -SEED):
        seed = torch.tensor(seed, device="cuda")
        assert torch.equal(compiled(seed), keep_mask(seed, size, p).float() * 2)


def graph_of(device: str, mode: str = "rand", dtype: torch.dtype | None = torch.bfloat16, twice: bool = False):
    """As Inductor leaves dropout: random numbers from a seed, perhaps in another dtype, greater than p."""
    graph = fx.Graph()
    with FakeTensorMode():
        seed, drawn = torch.empty((), dtype=torch.int64, device=device), torch.empty(4, 6, device=device)
    node = graph.call_function(inductor_prims.lookup_seed, (graph.placeholder("seeds"), 1))
    node.meta["val"] = seed
    numbers = node = graph.call_function(inductor_prims.random, ([4, 6], node, mode))
    node.meta["val"] = drawn
    if dtype is not None:
        node = graph.call_function(prims.convert_element_type.default, (node, dtype))
        node.meta["val"] = drawn
    mask = graph.call_function(aten.gt.Scalar, (node, 0.25))
    mask.meta |= {"val": drawn, "from": "dropout"}
    graph.output((mask, numbers) if twice else (mask,))
    return graph


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_mask_is_drawn_by_the_backward_too(dtype):
    graph = graph_of("cuda", dtype=dtype)
    dropout_masks.run(graph)
    seed, mask = (node for node in graph.nodes if node.op == "call_function")
    assert mask.target is MASK and mask.args == (seed, [4, 6], 0.25) and mask.meta["from"] == "dropout"
    assert seed.meta["recompute"] is mask.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE


@pytest.mark.parametrize("others", [{"device": "cpu"}, {"mode": "randn"}, {"twice": True}])
def test_other_random_numbers_stay(others):
    graph = graph_of(**{"device": "cuda", **others})
    dropout_masks.run(graph)
    assert graph.find_nodes(op="call_function", target=inductor_prims.random)
    assert not graph.find_nodes(op="call_function", target=MASK)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + nn.functional.dropout(nn.functional.gelu(layer(x)), 0.4)
        return x


@pytest.mark.gpu
def test_no_mask_is_kept_and_gradients_are_of_what_was_dropped():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Net().double().cuda().train(), torch.randn(64, 16, dtype=torch.float64, device="cuda")
    fuseopt.initialize(model, {"kernel_fusion": {"memory_efficient_fusion": True}}, strict=True)
    assert_slope(model, lambda: model(x).square().mean())
    kept = saved_tensors(model, x)
    assert not any(tensor.dtype == torch.bool for tensor in kept)
    # Seeds stand two apart, see regional_compile.py.
    assert any(tensor.dtype == torch.int64 and tensor.numel() == 8 for tensor in kept)
