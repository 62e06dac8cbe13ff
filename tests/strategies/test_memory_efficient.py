"""`memory_efficient_fusion`: training steps run compiled, everything else as it did, and nothing else changes.

Most tests leave Inductor out, which takes up to a minute a graph: Dynamo, AOT Autograd and the partitioner, which
decide what is kept and recomputed, run as they would with it.
"""

import copy
import gc
import inspect
import io
import pickle
import sys
import types
import weakref

import pytest
import torch
import torch._dynamo
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    GPT2DoubleHeadsModel,
    GPT2ForQuestionAnswering,
    GPT2ForSequenceClassification,
    GPT2ForTokenClassification,
    T5ForQuestionAnswering,
    T5ForSequenceClassification,
)

import fuseopt
from fuseopt import training
from fuseopt.errors import CompileError, PlanError
from fuseopt.strategies import memory_efficient
from fuseopt.training import forward, partitioner
from fuseopt.training.forward import TrainingForward
from tests import tiny
from tests.training_steps import assert_slope, saved_bytes

CONFIG = {"kernel_fusion": {"enable": True, "memory_efficient_fusion": True}}
LABELS = torch.arange(14).view(2, 7) + 3
SIZES = {
    "gpt2": {"n_layer": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "t5": {"num_layers": 1, "dropout_rate": 0.0},
    "t5_gated": {"num_layers": 1, "dropout_rate": 0.0},
}


class Net(nn.Module):
    """Not a transformers model: residual layers with dropout, [batch, 16] -> [batch, 16]."""

    def __init__(self, layers: int = 3, dropout: float = 0.4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, scale=1.0):
        for layer in self.layers:
            x = x + self.dropout(F.gelu(layer(x)))
        return x * scale


def with_inductor(test):
    return pytest.mark.parametrize("graphs", ["inductor"], indirect=True)(test)


def model_of(family: str, **config) -> nn.Module:
    return tiny.FAMILIES[family](**SIZES[family] | config).train()


def batch_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {"input_ids": tiny.inputs(model)["input_ids"], "labels": LABELS}


def assert_same_gradients(fused: nn.Module, stock: nn.Module, rtol: float = 1e-5) -> None:
    for name, parameter in stock.named_parameters():
        gradient = fused.get_parameter(name).grad
        # Autograd leaves out a head that the loss does not use; a compiled graph gives it zeros.
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert (gradient - expected).norm() <= rtol * expected.norm() + 1e-6, name


def assert_same_step(fused: nn.Module, stock: nn.Module, **batch) -> None:
    outputs, expected = fused(**batch), stock(**batch)
    assert type(outputs) is type(expected)
    outputs.loss.backward()
    expected.loss.backward()
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(outputs.logits, expected.logits, rtol=1e-5, atol=1e-5)
    assert_same_gradients(fused, stock)


def check_several_steps(family: str) -> None:
    fused = model_of(family)
    stock = copy.deepcopy(fused)
    fuseopt.initialize(fused, CONFIG, strict=True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in (fused, stock)]
    for _ in range(4):
        assert_same_step(fused, stock, **batch_of(stock))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert fused(**batch_of(fused)).past_key_values is None


@pytest.mark.parametrize("family", ["gpt2", "t5", pytest.param("t5_gated", marks=pytest.mark.slow)])
def test_several_steps_give_the_losses_and_gradients_of_stock(family, graphs):
    check_several_steps(family)
    assert (graphs.compiled, graphs.calls) == (1, 5)


@pytest.mark.parametrize(
    ("cls", "labels"),
    [
        # Those of one tensor of labels run under the whole preset in test_every_head.py.
        pytest.param(GPT2ForSequenceClassification, {"labels": torch.tensor([0, 1])}, marks=pytest.mark.slow),
        pytest.param(GPT2ForTokenClassification, {"labels": LABELS % 2}, marks=pytest.mark.slow),
        (GPT2ForQuestionAnswering, {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 3])}),
        (
            GPT2DoubleHeadsModel,
            {"labels": LABELS, "mc_labels": torch.tensor([0]), "mc_token_ids": torch.tensor([[6, 6]])},
        ),
        pytest.param(T5ForSequenceClassification, {"labels": torch.tensor([0, 1])}, marks=pytest.mark.slow),
        pytest.param(
            T5ForQuestionAnswering,
            {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 3])},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_other_heads_are_one_graph_too(cls, labels, graphs):
    family = "gpt2" if cls.__name__.startswith("GPT2") else "t5"
    base = model_of(family)
    torch.manual_seed(0)
    base.config.classifier_dropout = 0.0
    base.config.pad_token_id = 0
    fused = cls(base.config).train()
    stock = copy.deepcopy(fused)
    fuseopt.initialize(fused, CONFIG, strict=True)
    ids = tiny.inputs(base)["input_ids"]
    if cls is T5ForSequenceClassification:
        ids[:, -1] = base.config.eos_token_id
    if cls is GPT2DoubleHeadsModel:
        ids = ids[None]
        labels = labels | {"labels": labels["labels"][None]}
    outputs, expected = fused(input_ids=ids, **labels), stock(input_ids=ids, **labels)
    outputs.loss.backward()
    expected.loss.backward()
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-5, atol=0)
    assert_same_gradients(fused, stock)
    assert (graphs.compiled, graphs.calls) == (1, 1)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_everything_but_training_steps_is_the_class_own_forward(family, graphs):
    fused = model_of(family)
    stock = copy.deepcopy(fused)
    fuseopt.initialize(fused, CONFIG)
    batch = batch_of(stock)
    with torch.no_grad():
        assert torch.equal(fused(**batch).logits, stock(**batch).logits)
        assert fused(**batch).past_key_values is not None
    cached = fused(**batch, use_cache=True)
    assert cached.past_key_values is not None and cached.loss.requires_grad
    captured = "decoder_hidden_states" if family == "t5" else "hidden_states"
    assert len(fused(**batch, output_hidden_states=True)[captured]) == 2
    prompt = batch["input_ids"]
    for mode in (True, False):
        fused.train(mode), stock.train(mode)
        tokens = [m.generate(prompt, max_new_tokens=5, do_sample=False) for m in (fused, stock)]
        assert torch.equal(*tokens)
    assert torch.equal(fused(**batch).logits, stock(**batch).logits)
    assert (graphs.compiled, graphs.calls) == (0, 0)


def test_the_signature_is_the_class_own(graphs):
    model = model_of("gpt2")
    expected = inspect.signature(model.forward)
    fuseopt.initialize(model, CONFIG)
    assert inspect.signature(model.forward) == expected
    assert isinstance(model.forward, TrainingForward) and model.forward.__self__ is model
    ids = tiny.inputs(model)["input_ids"]
    assert model(ids).past_key_values is None
    assert graphs.calls == 1
    assert model(ids, None, None, use_cache=True).past_key_values is not None
    assert graphs.calls == 1


@pytest.mark.slow
def test_new_shapes_and_masks_never_reuse_a_wrong_graph(graphs):
    fused = model_of("gpt2")
    stock = copy.deepcopy(fused)
    fuseopt.initialize(fused, CONFIG)
    for rows, length in [(2, 7), (3, 7), (3, 9), (5, 11), (4, 8)]:
        ids = tiny.inputs(stock, rows, length)["input_ids"]
        assert_same_step(fused, stock, input_ids=ids, labels=ids)
    assert graphs.compiled <= 3
    ids = tiny.inputs(stock, 4, 8)["input_ids"]
    left_padded = torch.ones_like(ids)
    left_padded[1, :3] = 0
    for mask in (torch.ones_like(ids), left_padded):
        assert_same_step(fused, stock, input_ids=ids, labels=ids, attention_mask=mask)
    assert graphs.calls == 7


def test_sizes_that_change_for_one_model_are_constant_for_the_next(graphs):
    changing = []
    for rows in ((2, 3), (5,)):
        model = fuseopt.initialize(Net(dropout=0.0), CONFIG)
        for number in rows:
            model(torch.randn(number, 16))
            given = graphs.last.graph.find_nodes(op="placeholder")
            changing.append(any(isinstance(node.meta["example_value"], torch.SymInt) for node in given))
    assert changing == [False, True, False]


def test_the_first_size_goes_on_by_its_own_graph(graphs, monkeypatch):
    """As after the last batch of an epoch, which has fewer rows."""
    ran = []

    def compile_graph(graph, inputs, **options):
        run, number = graphs(graph, inputs, **options), graphs.compiled
        return lambda *arguments: ran.append(number) or run(*arguments)

    monkeypatch.setattr(partitioner, "compile_graph", compile_graph)
    model = Net(dropout=0.0)
    stock = copy.deepcopy(model)
    fuseopt.initialize(model, CONFIG)
    for rows in (8, 8, 5, 8, 3, 4, 8):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(model(x), stock(x))
    assert ran == [1, 1, 2, 1, 2, 2, 1]


def test_autocast_and_accumulated_gradients(graphs):
    fused = model_of("gpt2")
    stock = copy.deepcopy(fused)
    fuseopt.initialize(fused, CONFIG)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            outputs, expected = (model(**batch_of(model)) for model in (fused, stock))
        assert outputs.logits.dtype is expected.logits.dtype is torch.bfloat16
        torch.testing.assert_close(outputs.loss, expected.loss, rtol=2e-3, atol=0)
        outputs.loss.backward()
        expected.loss.backward()
    assert_same_gradients(fused, stock, rtol=0.05)
    assert (graphs.compiled, graphs.calls) == (1, 2)
    fused.zero_grad()
    stock.zero_grad()
    assert_same_step(fused, stock, **batch_of(stock))


def check_dropout_gradients(make) -> None:
    torch.manual_seed(0)
    model = fuseopt.initialize(make().double(), CONFIG)
    x = torch.randn(64, 16, dtype=torch.float64)
    assert_slope(model, lambda: model(x).square().mean())


def test_the_backward_pass_recomputes_the_dropout_that_was_drawn(graphs):
    check_dropout_gradients(Net)
    assert graphs.compiled == 1


def test_dropout_is_on_in_training_and_off_in_eval(graphs):
    model = Net()
    x = torch.randn(8, 16)
    expected = copy.deepcopy(model).eval()(x)
    fuseopt.initialize(model, CONFIG)
    model(x)
    torch.manual_seed(1)
    first, second = model(x), model(x)
    torch.manual_seed(1)
    assert torch.equal(model(x), first) and not torch.equal(first, second)
    assert torch.equal(model.eval()(x), expected)
    assert not torch.equal(model.train()(x), expected)
    model.dropout.eval()
    torch.testing.assert_close(model(x), expected)
    assert graphs.compiled == 2


def test_less_is_kept_for_the_backward_pass(graphs, monkeypatch):
    model, x = Net(), torch.randn(64, 16)
    stock = saved_bytes(model, x)
    fused = saved_bytes(fuseopt.initialize(model, CONFIG), x)
    monkeypatch.setattr(partitioner, "_OPTIONS", {})
    min_cut = saved_bytes(fuseopt.initialize(fuseopt.restore(model), CONFIG), x)
    assert graphs.calls == 2
    assert fused < 0.8 * min_cut < 0.8 * stock


def test_gpt2_keeps_less_for_the_backward_pass(graphs):
    model = tiny.gpt2(n_layer=1).train()
    stock = saved_bytes(model, **batch_of(model))
    assert saved_bytes(fuseopt.initialize(model, CONFIG), **batch_of(model)) < 0.6 * stock
    assert graphs.calls == 1


def test_gradient_checkpointing_stays_in_force(graphs):
    model = model_of("gpt2", n_layer=2)
    stock = copy.deepcopy(model)
    fuseopt.initialize(model, CONFIG)
    without = saved_bytes(model, **batch_of(model))
    model.gradient_checkpointing_enable()
    assert saved_bytes(model, **batch_of(model)) < 0.6 * without
    assert_same_step(model, stock, **batch_of(model))
    assert graphs.compiled == 2


@pytest.mark.slow
def test_t5_is_checkpointed_too(graphs):
    model = model_of("t5")
    stock = copy.deepcopy(model)
    fuseopt.initialize(model, CONFIG)
    without = saved_bytes(model, **batch_of(model))
    for each in (model, stock):
        each.gradient_checkpointing_enable()
    assert saved_bytes(model, **batch_of(model)) < 0.9 * without
    assert_same_step(model, stock, **batch_of(model))
    assert all(block.layer[1].EncDecAttention.gradient_checkpointing for block in model.decoder.block)
    assert graphs.compiled == 2


class Checkpointed(Net):
    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(self.block, layer, x, use_reentrant=False)
        return x

    def block(self, layer, x):
        return x + self.dropout(F.gelu(layer(x)))


def test_checkpointed_dropout_is_recomputed_as_drawn(graphs):
    check_dropout_gradients(Checkpointed)
    assert graphs.compiled == 1


def test_frozen_parameters_and_more_variants_than_dynamo_allows_by_default(graphs):
    model = fuseopt.initialize(Net(layers=4, dropout=0.0), CONFIG)
    x = torch.randn(4, 16)
    parameters = list(model.parameters())
    for count in range(len(parameters) + 1):
        for position, parameter in enumerate(parameters):
            parameter.requires_grad_(position < count)
        model(x.clone().requires_grad_()).sum().backward()
        assert [parameter.grad is not None for parameter in parameters] == [p < count for p in range(8)]
        model.zero_grad()
    assert graphs.compiled == graphs.calls == 9


def test_hooks_fire_whenever_they_were_registered(graphs):
    model = fuseopt.initialize(Net(), CONFIG)
    x, fired = torch.randn(4, 16), []
    model(x)
    handles = [module.register_forward_hook(lambda *_: fired.append(1)) for module in (model, model.layers[1])]
    model(x)
    assert len(fired) == 2
    for handle in handles:
        handle.remove()
    model(x)
    assert len(fired) == 2 and graphs.calls == 3


def through_torch_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_torch_save])
def test_copies_run_on_their_own_weights_and_restore(copied, graphs):
    for model in (model_of("gpt2"), Net(dropout=0.0)):
        fuseopt.initialize(model, CONFIG)
        twin = copied(model)
        assert twin.forward.model is twin and type(twin.forward) is TrainingForward
        fuseopt.restore(twin)
        assert "forward" not in twin.__dict__ and "_loss_function" not in twin.__dict__
    x = torch.randn(4, 16)
    before = model(x)
    twin = copied(model)
    torch.nn.init.zeros_(twin.layers[0].weight)
    twin(x).sum().backward()
    assert model.layers[0].weight.grad is None and not torch.equal(twin(x), before)
    assert torch.equal(model(x), before)
    assert (graphs.compiled, graphs.calls) == (2, 4)


def test_two_models_of_a_class_do_not_meet(graphs):
    untouched, first, second = (Net(dropout=0.0) for _ in range(3))
    x = torch.randn(4, 16)
    expected = [model(x) for model in (untouched, first, second)]
    fuseopt.initialize(first, CONFIG)
    fuseopt.initialize(second, CONFIG)
    for model, output in zip((untouched, first, second), expected, strict=True):
        torch.testing.assert_close(model(x), output)
    assert (graphs.compiled, graphs.calls) == (2, 2)
    assert "forward" not in untouched.__dict__ and "forward" not in Net(dropout=0.0).__dict__


def test_restore_and_save_pretrained(graphs, tmp_path):
    model = model_of("gpt2")
    model.save_pretrained(tmp_path)  # which notes the architecture in the config
    before, keys = tiny.snapshot(model), list(model.state_dict())
    fuseopt.initialize(model, CONFIG)
    assert model.loss_type is None and list(model.state_dict()) == keys
    assert [row.target for row in fuseopt.report(model).replaced] == ["TrainingForward", "ForCausalLMLoss"]
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model) and "forward" not in loaded.__dict__
    torch.testing.assert_close(tiny.logits(loaded), tiny.logits(model.eval()))
    fuseopt.restore(model.train())
    assert tiny.snapshot(model) == before


def test_a_fused_model_is_freed(graphs):
    model = fuseopt.initialize(Net(), CONFIG)
    model(torch.randn(4, 16)).sum().backward()
    watch = weakref.ref(model)
    del model
    gc.collect()
    assert watch() is None


def test_other_transforms_take_the_class_own_forward(graphs):
    model = Net(dropout=0.0)
    x = torch.randn(4, 16)
    expected = model(x)
    fuseopt.initialize(model, CONFIG)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradient = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(parameters)
    assert set(gradient) == set(parameters)
    assert graphs.compiled == 0


def test_somebodys_own_default_device_is_traced_through(graphs):
    """It is a mode, whose function Dynamo traces at every operation."""
    model = fuseopt.initialize(Net(dropout=0.0), CONFIG)
    x = torch.randn(4, 16)
    expected = model.eval()(x)
    with torch.device("cpu"):
        torch.testing.assert_close(model.train()(x), expected)
    torch.testing.assert_close(model(x), expected)
    assert graphs.calls == 2


def test_accelerate_wraps_and_unwraps_it(graphs):
    model = fuseopt.initialize(Net(dropout=0.0), CONFIG)
    x = torch.randn(4, 16)
    expected = model(x)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare(model)
    torch.testing.assert_close(prepared(x), expected, rtol=0.05, atol=0.05)
    assert (graphs.compiled, graphs.calls) == (2, 2)
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    torch.testing.assert_close(unwrapped(x), expected)
    assert unwrapped is model and graphs.calls == 3


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_kernels_run_inside_the_graph(attention, graphs):
    kernels = ["FusedLayerNorm", "FusedGELU", *(["FusedSoftmax"] if attention == "eager" else [])]
    fused = model_of("gpt2", attn_implementation=attention)
    stock = copy.deepcopy(fused)
    fuseopt.initialize(
        fused, {"kernel_fusion": CONFIG["kernel_fusion"] | {"custom_cuda_kernels": kernels}}, strict=True
    )
    assert_same_step(fused, stock, **batch_of(stock))
    assert (graphs.compiled, graphs.calls) == (1, 1)


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.ReLU()))


def hooked() -> nn.Module:
    model = Net()
    model.forward = lambda x: x
    return model


def compiled_in_place() -> nn.Module:
    model = Net()
    model.compile()
    return model


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (scripted, "TorchScript module"),
        (hooked, "forward has been replaced on the instance"),
        (compiled_in_place, "already compiled"),
        (lambda: torch.compile(Net()), "forward has been replaced on the instance"),
        (lambda: nn.ModuleList([Net()]), "no forward"),
    ],
)
def test_what_cannot_be_compiled_is_skipped_with_the_reason(make, reason):
    model = make()
    with pytest.warns(UserWarning, match=f"memory_efficient_fusion .* matches nothing in the model: .*{reason}"):
        fuseopt.initialize(model, CONFIG)
    with pytest.raises(PlanError, match=reason):
        fuseopt.initialize(model, CONFIG, strict=True)


def test_without_a_compiler_it_is_skipped(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = model_of("gpt2")
    with pytest.warns(UserWarning, match="'no-such-compiler' is not on PATH"):
        fuseopt.initialize(model, CONFIG)
    assert "forward" not in model.__dict__ and "_loss_function" not in model.__dict__


@pytest.mark.parametrize("gone", ["an option of Dynamo", "an option of AOT Autograd", "a module of Inductor"])
def test_without_what_is_private_to_torch_it_is_skipped(gone, monkeypatch):
    reason = "lacks gone_by_now"
    if gone == "an option of Dynamo":
        monkeypatch.setitem(forward._DYNAMO_OPTIONS, "gone_by_now", True)
    elif gone == "an option of AOT Autograd":
        monkeypatch.setitem(partitioner._OPTIONS, "gone_by_now", True)
    else:
        monkeypatch.delattr(training, "partitioner")
        monkeypatch.delitem(sys.modules, partitioner.__name__)
        monkeypatch.setitem(sys.modules, "torch._inductor.custom_graph_pass", None)
        reason = "lacks a private module or function that it uses: import of torch._inductor.custom_graph_pass"
    model = model_of("gpt2")
    with pytest.warns(UserWarning, match=f"memory_efficient_fusion .* matches nothing in the model: .*{reason}"):
        fuseopt.initialize(model, CONFIG)
    assert "forward" not in model.__dict__ and "_loss_function" not in model.__dict__


def test_a_failing_backend_shows_before_the_backward_pass(graphs, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no code today")

    monkeypatch.setattr(graphs, "compile_graph", refuse)
    with pytest.raises(CompileError) as caught:
        fuseopt.initialize(Net(), CONFIG, strict=True)(torch.randn(4, 16))
    assert "no code today" in str(caught.value.__cause__)


def test_wrong_input_raises_what_the_class_own_forward_raises(graphs):
    fused = model_of("gpt2")
    stock = copy.deepcopy(fused)
    fuseopt.initialize(fused, CONFIG)
    ids = tiny.inputs(stock)["input_ids"]
    wrong = [{"input_ids": ids, "inputs_embeds": torch.randn(2, 7, 24)}, {"input_ids": ids, "labels": ids[:, :3]}]
    for arguments in wrong:
        with pytest.raises(ValueError) as expected:
            stock(**arguments)
        with pytest.raises(ValueError) as raised:
            fused(**arguments)
        assert str(raised.value) == str(expected.value)


def test_the_plan_says_by_what_large_products_run_on_a_gpu():
    def choice(backend: str, *devices: str):
        index = types.SimpleNamespace(devices=tuple(map(torch.device, devices)))
        return memory_efficient._backend_choice(backend, index)

    assert choice("inductor", "cpu").libraries == () == choice("aot_eager", "cuda").libraries
    assert choice("inductor", "cpu").refused is None is choice("aot_eager", "cuda").refused
    on_gpu = choice("inductor", "cpu", "cuda")
    if torch.cuda.is_available():
        assert on_gpu.libraries == ("cuda",) and on_gpu.refused is None
    else:
        assert on_gpu.libraries == () and on_gpu.refused.startswith("matmuls by cuBLAS's default algorithm: its native")


# T5 on machines with a GPU, which have the processors for it: Inductor's C++ for GPT-2, a file for each of 51 loops,
# takes a CPU fifteen seconds, for T5 twice that. In quick runs tests/examples/test_oslo_tutorial.py has GPT-2's.
@with_inductor
@pytest.mark.parametrize(
    "family",
    [
        pytest.param("gpt2", marks=pytest.mark.slow),
        pytest.param("t5", marks=pytest.mark.gpu),
        pytest.param("t5_gated", marks=pytest.mark.gpu),
    ],
)
def test_inductor_gives_the_losses_and_gradients_of_stock(family, graphs):
    check_several_steps(family)
    assert graphs.compiled == 1


@pytest.mark.gpu
@with_inductor
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_of_any_size_on_a_gpu(dtype, padded, graphs):
    stock = model_of("gpt2", n_layer=4, n_embd=128, n_head=2, n_positions=128).to("cuda", dtype)
    fused = fuseopt.initialize(copy.deepcopy(stock), CONFIG, strict=True)
    for rows, length in [(256, 16), (8, 128), (1, 128), (3, 77), (1, 9)]:
        ids = tiny.inputs(stock, rows, length)["input_ids"].cuda()
        batch = {"input_ids": ids, "labels": ids}
        if padded:
            batch["attention_mask"] = torch.ones_like(ids)
            batch["attention_mask"][0, : length // 2] = 0
        losses = [model(**batch).loss for model in (fused, stock)]
        found, expected = (
            torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, list(model.parameters()))]).float()
            for loss, model in zip(losses, (fused, stock), strict=True)
        )
        torch.testing.assert_close(*losses, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=0)
        assert (found - expected).norm() <= (1e-4 if dtype == torch.float32 else 5e-2) * expected.norm()
