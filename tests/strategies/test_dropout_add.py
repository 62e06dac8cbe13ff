"""`FusedDropoutAdd`: which blocks train with dropout, add and norm as one op, with what result, and when their own."""

import copy
import pickle
import statistics
from unittest import mock

import pytest
import torch
from torch import nn

import fuseopt
from fuseopt import ops
from fuseopt.blocks.dropout_add import GPT2DropoutAddForward, T5DropoutAddForward
from fuseopt.ops.dropout_add_layer_norm import dropout
from tests import tiny
from tests.ops.cases import Graphs
from tests.pairs import stock_and_fused

pytestmark = pytest.mark.usefixtures("each_device")

CONFIG = {"kernel_fusion": {"triton_kernels": ["FusedDropoutAdd"], "jit": False}}
# family -> the op, and its calls in a forward: T5 has one a layer of the encoder and two of the decoder.
CASES = {
    "gpt2": ("dropout_add_layer_norm", 2),
    "t5": ("dropout_add_rms_norm", 2 * 1 + 2 * 2),
    "mt5": ("dropout_add_rms_norm", 6),
}
every_family = pytest.mark.parametrize("family", CASES)


def inner_dropouts(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The places of the dropouts before inner adds, in the order of a forward."""
    if hasattr(model, "transformer"):
        return [
            (getattr(block, name), "resid_dropout")
            for block in model.transformer.h
            for name in ("attn", "crossattention")
            if hasattr(block, name)
        ]
    blocks = [*model.encoder.block, *model.decoder.block]
    return [(layer, "dropout") for block in blocks for layer in block.layer[:-1]]


def model_of(family: str, p: float = 0.3, **options) -> nn.Module:
    """In training mode, without another dropout than those before inner adds."""
    model = tiny.FAMILIES[family](**options)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    for owner, name in inner_dropouts(model):
        getattr(owner, name).p = p
    return model.train()


class Replayed(nn.Module):
    """The dropout that a call of the op drew."""

    def __init__(self, seed: torch.Tensor, p: float) -> None:
        super().__init__()
        self.seed, self.p = seed, p

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return dropout(input, self.seed, self.p).to(input.dtype)


def run(model: nn.Module, **options) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of one batch."""
    batch = tiny.inputs(model)
    loss = model(**batch, labels=batch.get("decoder_input_ids", batch["input_ids"]), **options).loss
    return loss, list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


def drawn(family: str, model: nn.Module, **options) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
    """The seeds of `run`, and what that returns."""
    name, _ = CASES[family]
    with mock.patch.object(ops, name, wraps=getattr(ops, name)) as called:
        loss, gradients = run(model, **options)
    return [call.kwargs["seed"] for call in called.call_args_list], loss, gradients


def assert_as_stock_with(seeds: list[torch.Tensor], stock: nn.Module, loss, gradients, **options) -> None:
    places = inner_dropouts(stock)
    for (owner, name), seed in zip(places, seeds, strict=True):
        setattr(owner, name, Replayed(seed, getattr(owner, name).p))
    expected_loss, expected = run(stock, **options)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert (gradient is None) == (wanted is None)
        if wanted is not None:
            assert (gradient - wanted).norm() <= 1e-4 * wanted.norm() + 1e-7


@every_family
def test_a_training_step_is_stock_s_with_the_dropout_that_was_drawn(family: str) -> None:
    stock, fused = stock_and_fused(model_of(family), CONFIG, strict=False)
    seeds, loss, gradients = drawn(family, fused)
    assert len({seed.item() for seed in seeds}) == CASES[family][1]
    assert_as_stock_with(seeds, stock, loss, gradients)


def test_cross_attention_of_gpt2() -> None:
    stock, fused = stock_and_fused(model_of("gpt2", add_cross_attention=True), CONFIG, strict=False)
    states = torch.randn(2, 5, 24)
    seeds, loss, gradients = drawn("gpt2", fused, encoder_hidden_states=states)
    assert len(seeds) == 4
    assert_as_stock_with(seeds, stock, loss, gradients, encoder_hidden_states=states)


def error_under_autocast_over_stock_s(family: str, seed: int) -> float:
    """Of the gradients of a step, against float64's, with the dropout that the step drew."""
    stock, fused = stock_and_fused(model_of(family), CONFIG, strict=False)
    torch.manual_seed(seed)
    with torch.autocast(stock.device.type, torch.float16):
        seeds, loss, gradients = drawn(family, fused)
    exact = copy.deepcopy(stock).double()
    losses, errors = [], []
    for model, mode in ((exact, False), (stock, True)):
        for (owner, name), seed in zip(inner_dropouts(model), seeds, strict=True):
            setattr(owner, name, Replayed(seed, getattr(owner, name).p))
        with torch.autocast(stock.device.type, torch.float16, enabled=mode):
            losses.append(run(model))
    assert loss.dtype == losses[1][0].dtype
    for found in (gradients, losses[1][1]):
        pairs = [(g.double(), w) for g, w in zip(found, losses[0][1], strict=True) if w is not None]
        errors.append(sum((g - w).norm() ** 2 for g, w in pairs) ** 0.5)
    return (errors[0] / errors[1]).item()


@every_family
def test_gradients_under_autocast_are_no_further_from_float64_than_stock_s(family: str) -> None:
    # On a GPU one rounding can turn a ReLU over, and with it one draw's error into any multiple of the other's.
    assert statistics.median(error_under_autocast_over_stock_s(family, seed) for seed in range(5)) <= 1.15


@every_family
def test_without_training_or_dropout_the_class_s_own_forward_runs(family: str) -> None:
    stock, fused = stock_and_fused(model_of(family), CONFIG, strict=False)
    stock.eval(), fused.eval()
    seeds, loss, _ = drawn(family, fused)
    assert seeds == [] and torch.equal(loss, run(stock)[0])
    stock.train(), fused.train()
    for model in (stock, fused):
        for owner, name in inner_dropouts(model):
            getattr(owner, name).p = 0.0
    seeds, loss, _ = drawn(family, fused)
    assert seeds == [] and torch.equal(loss, run(stock)[0])


@every_family
def test_beside_fused_norms(family: str) -> None:
    stock, _ = stock_and_fused(model_of(family), CONFIG, strict=False)
    norm = "FusedLayerNorm" if family == "gpt2" else "FusedRMSNorm"
    both = {"kernel_fusion": CONFIG["kernel_fusion"] | {"custom_cuda_kernels": [norm]}}
    fused = fuseopt.initialize(copy.deepcopy(stock), both)
    seeds, loss, gradients = drawn(family, fused)
    assert_as_stock_with(seeds, stock, loss, gradients)


@every_family
def test_hooks_send_the_block_to_its_own_forward(family: str) -> None:
    _, fused = stock_and_fused(model_of(family), CONFIG, strict=False)
    seen = []
    block = fused.transformer.h[0] if family == "gpt2" else fused.encoder.block[0]
    norm, dropout = (block.ln_2, block.attn.resid_dropout) if family == "gpt2" else (None, block.layer[0].dropout)
    norm = block.layer[1].layer_norm if norm is None else norm
    for module in (norm, dropout):
        hook = module.register_forward_hook(lambda *_: seen.append("hook"))
        assert len(drawn(family, fused)[0]) == CASES[family][1] - 1
        hook.remove()
    assert len(seen) == 2
    assert len(drawn(family, fused)[0]) == CASES[family][1]


def test_an_attention_that_raises_leaves_its_dropout_as_it_was() -> None:
    _, fused = stock_and_fused(model_of("gpt2"), CONFIG, strict=False)
    attention = fused.transformer.h[0].attn

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    hook = attention.c_proj.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        run(fused)
    hook.remove()
    assert not attention.resid_dropout.is_deferred
    assert (attention.resid_dropout(torch.ones(1000)) == 0).any()


@every_family
def test_gradient_checkpointing_is_left_to_the_class(family: str) -> None:
    stock, fused = stock_and_fused(model_of(family), CONFIG, strict=False)
    losses = []
    for model in (stock, fused):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)
        losses.append(run(model, use_cache=False))
    torch.testing.assert_close(*(loss for loss, _ in losses))
    torch.testing.assert_close(*([g for g in gradients if g is not None] for _, gradients in losses))


# On a CPU the numbers that decide what is dropped are drawn by a hundred operations for each of T5's calls.
@pytest.mark.parametrize(
    ("family", "one_layer"), [("gpt2", {"n_layer": 1}), pytest.param("t5", {"num_layers": 1}, marks=pytest.mark.gpu)]
)
def test_memory_efficient_fusion_has_the_op_in_its_one_graph(family: str, one_layer: dict[str, int], graphs) -> None:
    both = {"kernel_fusion": CONFIG["kernel_fusion"] | {"memory_efficient_fusion": True}}
    stock, _ = stock_and_fused(model_of(family, **one_layer), CONFIG, strict=False)
    fused = fuseopt.initialize(copy.deepcopy(stock), both)
    torch.manual_seed(1)
    _, gradients = run(fused, use_cache=False)
    assert graphs.compiled == 1
    # Of a graph's forward that draws its seeds as the modules do, in the same order.
    eager = fuseopt.initialize(copy.deepcopy(stock), CONFIG)
    torch.manual_seed(1)
    _, expected = run(eager, use_cache=False)
    for gradient, wanted in zip(gradients, expected, strict=True):
        if wanted is not None:
            assert (gradient - wanted).norm() <= 1e-4 * wanted.norm() + 1e-7


@every_family
def test_restore_gives_every_object_back_and_copies_run_their_own_blocks(family: str) -> None:
    model = tiny.FAMILIES[family]()
    before = tiny.snapshot(model)
    fuseopt.initialize(model, CONFIG)
    fuseopt.restore(model)
    assert tiny.snapshot(model) == before
    _, fused = stock_and_fused(model_of(family), CONFIG, strict=False)
    torch.manual_seed(4)
    expected, _ = run(fused)
    others = copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.add_(1.0)
    for other in others:
        torch.manual_seed(4)
        seeds, loss, _ = drawn(family, other)
        assert len(seeds) == CASES[family][1] and torch.equal(loss, expected)


TARGETS = {"DeferredDropout", "ResidualForward", GPT2DropoutAddForward.__name__, T5DropoutAddForward.__name__}


def reasons(model: nn.Module, config: dict, replaced: bool) -> set[str]:
    return {
        row.reason for row in fuseopt.plan(model, config).rows if row.replaced is replaced and row.target in TARGETS
    }


def test_what_stays_and_why() -> None:
    model = tiny.gpt2()
    targets = [row.target for row in fuseopt.plan(model, CONFIG).rows if row.replaced]
    assert targets == ["GPT2DropoutAddForward", "DeferredDropout"] * 2
    assert any("policy 'common' names no block" in reason for reason in reasons(tiny.llama(), CONFIG, False))
    assert reasons(tiny.gpt2(resid_pdrop=0.0), CONFIG, False) == {"its dropouts drop nothing"}
    model.transformer.h[0].attn.resid_dropout.register_forward_hook(lambda *_: None)
    assert any("one of its dropouts has hooks" in reason for reason in reasons(model, CONFIG, False))
    winner = [{"name": "FusedLayerNorm", "fuse_residual": True}]
    both = {"kernel_fusion": CONFIG["kernel_fusion"] | {"custom_cuda_kernels": winner}}
    found = reasons(tiny.gpt2(), both, False)
    assert any("GPT2BlockForward by strategy kernels has" in reason for reason in found)
    assert any("it needs transformer.h.0.forward" in reason for reason in found)


@pytest.mark.gpu
@pytest.mark.parametrize("each_device", ["cuda"], indirect=True)
@every_family
def test_the_kernel_runs_on_a_gpu(family: str) -> None:
    _, fused = stock_and_fused(model_of(family), CONFIG, strict=False)
    graphs = Graphs()
    torch._dynamo.reset()
    torch.compile(fused, backend=graphs.compiled, fullgraph=True)(
        **tiny.inputs(fused), use_cache=False
    ).logits.sum().backward()
    name, calls = CASES[family]
    assert graphs.forward.count(f"{name}_fwd.triton") == graphs.backward.count(f"{name}_bwd.triton") == calls
