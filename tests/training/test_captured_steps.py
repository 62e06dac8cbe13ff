"""Steps in CUDA graphs train as steps without do, and what a step handed out stays as it was."""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import fuseopt
from fuseopt.errors import CompileError
from fuseopt.modules.lazy_logits import LazyLogits
from fuseopt.training import captured_steps, forward, partitioner, step_timing
from tests import tiny
from tests.training_steps import HostSpan, capture_on_cpu

CAPTURED = {"kernel_fusion": {"memory_efficient_fusion": {"cuda_graphs": True}}}
NO_DROPOUT = {
    "gpt2": {"n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "t5": {"num_layers": 2, "dropout_rate": 0.0},
}


class Scaled(nn.Module):
    """A model of one weight. `compiled` is a step of it, which counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 4.0))
        self.calls = 0

    def compiled(self, weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        self.calls += 1
        kept = torch.rand(3) < 0.5
        hidden = weight * weight * x
        return hidden.sum() + (hidden * kept).sum(), hidden, kept, None


def step_of(model: Scaled, when: bool | str = True) -> captured_steps.CapturableStep:
    return captured_steps.CapturableStep(model.compiled, captured_steps.CapturedSteps(model, when))


def train(step: captured_steps.CapturableStep, model: Scaled, x: torch.Tensor, **kwargs: bool) -> torch.Tensor:
    """The loss, after a backward pass."""
    loss = step(model.weight, x)[0]
    loss.backward(**kwargs)
    return loss


@pytest.fixture
def captured(monkeypatch):
    return capture_on_cpu(monkeypatch)


def test_replayed_steps_give_what_the_compiled_step_gives(captured):
    torch.manual_seed(0)
    model, stock = Scaled(), Scaled()
    step = step_of(model)
    for seed in range(5):
        x = torch.randn(3)
        results = []
        for run, weight in ((step, model.weight), (stock.compiled, stock.weight)):
            torch.manual_seed(seed)
            loss, hidden, kept, none = run(weight, x)
            (loss if seed % 2 else loss + hidden.square().sum()).backward()
            results.append((loss, hidden, kept))
            assert none is None and not kept.requires_grad
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)
        # What it accumulates to, and every other step what it begins with.
        assert torch.equal(model.weight.grad, stock.weight.grad)
        if seed % 2:
            model.zero_grad(), stock.zero_grad()
    assert captured == ["captured", *["replayed"] * 4]


def test_what_was_returned_stays_as_it_was(captured):
    model = Scaled()
    step = step_of(model)
    train(step, model, torch.ones(3))
    _, hidden, kept, _ = step(model.weight, torch.ones(3))
    before = hidden.detach().clone(), kept.clone()
    hidden.sum().backward()
    for seed in range(4):
        torch.manual_seed(seed)
        train(step, model, torch.randn(3))
    assert torch.equal(hidden, before[0]) and torch.equal(kept, before[1])
    assert captured.count("replayed") == 5


@pytest.mark.parametrize("by_grad", [True, False])
def test_gradients_that_somebody_keeps_end_the_graphs_and_stay_as_they_were(by_grad, captured):
    model = Scaled()
    step = step_of(model)
    train(step, model, torch.ones(3))
    model.zero_grad()
    if by_grad:
        (kept,) = torch.autograd.grad(step(model.weight, torch.ones(3))[1].sum(), model.weight)
    else:
        step(model.weight, torch.ones(3))[1].sum().backward()
        kept = model.weight.grad[1:]
        model.zero_grad()
    with pytest.warns(UserWarning, match="gradients of an earlier step are kept"):
        train(step, model, torch.full((3,), 5.0))
    train(step, model, torch.ones(3))
    assert kept.tolist() == [2, 4, 6][-len(kept) :]
    assert captured == ["captured", "replayed"]


class OneBuffer(torch.autograd.Function):
    """The sum of the products of two weights with `x`, whose gradients lie in one buffer."""

    @staticmethod
    def forward(ctx, first, second, x):
        ctx.save_for_backward(x)
        return ((first + second) * x).sum()

    @staticmethod
    def backward(ctx, slope):
        (x,) = ctx.saved_tensors
        buffer = torch.cat([x, x]) * slope
        return buffer[:3], buffer[3:], None


def test_gradients_in_one_buffer_are_accumulated(captured):
    model = nn.ParameterList([torch.ones(3), torch.ones(3)])
    steps = captured_steps.CapturedSteps(model, True)
    step = captured_steps.CapturableStep(lambda *inputs: (OneBuffer.apply(*inputs),), steps)
    for count in range(1, 5):
        step(*model, torch.ones(3))[0].backward()
        assert all(weight.grad.tolist() == [count] * 3 for weight in model)
    kept = model[1].grad[:2]
    model.zero_grad()
    step(*model, torch.ones(3))[0].backward()
    assert captured == ["captured", *["replayed"] * 4] and kept.tolist() == [4, 4]
    kept = model[0].grad[:2]
    model[0].grad = None
    with pytest.warns(UserWarning, match="gradients of an earlier step are kept"):
        step(*model, torch.ones(3))[0].backward()
    assert kept.tolist() == [1, 1] and model[1].grad.tolist() == [2, 2, 2]


def test_a_replayed_step_has_as_many_backward_passes_as_are_asked_for(captured):
    """Its gradients have new memory and the forward's random numbers, and the generator's state is unchanged."""
    model = Scaled()
    step = step_of(model)
    train(step, model, torch.ones(3))
    model.zero_grad()
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.arange(3.0) + 1
        loss, _, kept, _ = step(model.weight, x)
        expected = 2 * model.weight.detach() * x * (1 + kept.float())
        torch.rand(5)
        state = torch.get_rng_state()
        grads = [torch.autograd.grad(loss, model.weight, retain_graph=True)[0] for _ in range(2)]
        assert torch.equal(state, torch.get_rng_state())
        loss.backward(retain_graph=True)
        loss.backward()
        assert torch.equal(model.weight.grad, 2 * expected)
        assert torch.equal(grads[0], expected) and torch.equal(grads[1], expected)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        model.zero_grad()
    assert captured == ["captured", *["replayed"] * 4]


def test_a_forward_beside_one_that_is_to_go_back_again_is_not_replayed(captured):
    model = Scaled()
    step = step_of(model)
    train(step, model, torch.ones(3))
    model.zero_grad()
    first = step(model.weight, torch.ones(3))[1].sum()
    first.backward(retain_graph=True)
    step(model.weight, torch.full((3,), 5.0))[1].sum().backward()
    first.backward()
    assert model.weight.grad.tolist() == [14, 28, 42]
    assert captured == ["captured", "replayed"]


def test_a_replayed_step_has_no_second_derivative_and_says_so(captured):
    model = Scaled()
    step = step_of(model)
    train(step, model, torch.ones(3))
    model.zero_grad()
    loss = step(model.weight, torch.ones(3))[1].sum()
    with pytest.raises(CompileError, match=r"cannot be differentiated again \(create_graph=True\): call fuseopt"):
        torch.autograd.grad(loss, model.weight, create_graph=True)
    loss.backward()
    assert model.weight.grad.tolist() == [2, 4, 6]


def test_steps_with_several_backward_passes_are_not_captured(captured):
    model = Scaled()
    step = step_of(model)
    train(step, model, torch.ones(3), retain_graph=True)
    with pytest.warns(UserWarning, match=r"not captured: a step has several backward passes \(retain_graph\)"):
        train(step, model, torch.ones(3))
    assert captured == []


def test_a_forward_that_comes_before_the_last_ones_backward_is_not_replayed(captured):
    model = Scaled()
    step = step_of(model)
    train(step, model, torch.ones(3))
    model.zero_grad()
    first, second = step(model.weight, torch.ones(3))[1], step(model.weight, torch.full((3,), 2.0))[1]
    (first.sum() + second.sum()).backward()
    assert model.weight.grad.tolist() == [6, 12, 18]
    assert captured == ["captured", "replayed"]
    train(step, model, torch.ones(3))
    assert captured == ["captured", "replayed", "replayed"]


def test_forwards_that_nobody_goes_back_from(captured):
    model = Scaled()
    step = step_of(model)
    step(model.weight, torch.ones(3))
    step(model.weight, torch.ones(3))
    assert not captured
    train(step, model, torch.ones(3))
    step(model.weight, torch.ones(3))
    train(step, model, torch.ones(3))
    assert captured == ["captured", "replayed", "replayed"]


def test_pytorchs_errors_of_a_backward_pass(captured):
    model = Scaled()
    step = step_of(model)
    train(step, model, torch.ones(3))
    loss = train(step, model, torch.ones(3))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    loss = step(model.weight, torch.ones(3))[0]
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert captured == ["captured", "replayed", "replayed"]


def test_a_weight_that_moves_is_captured_anew_a_few_times(captured):
    model = Scaled()
    step = step_of(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for moves in range(7):
            model.weight.data = model.weight.data.clone() + moves
            for _ in range(3):
                step(model.weight, torch.full((3,), 2.0))[1].sum().backward()
                assert torch.equal(model.weight.grad, 4 * model.weight.detach())
                model.zero_grad()
    assert captured == ["captured", "replayed", "replayed"] * 4
    assert ["addresses of parameters have changed 4 times" in str(warning.message) for warning in caught] == [True]


def test_a_step_that_writes_to_what_it_is_given_is_not_captured(captured):
    def compiled(weight, x):
        loss = (weight * x.clone()).sum()
        x.add_(1)
        return (loss,)

    model = Scaled()
    for when in (True, "auto"):
        captured.clear()
        steps = captured_steps.CapturedSteps(model, when)
        step, x = captured_steps.CapturableStep(compiled, steps), torch.zeros(3)
        train(step, model, x)
        if when is True:
            with pytest.raises(CompileError, match="writes to its inputs is not captured; ask for"):
                train(step, model, x)
            assert x.tolist() == [1, 1, 1]
            continue
        for _ in range(5):
            train(step, model, x)
        assert x.tolist() == [6, 6, 6] and captured == ["captured"]
        assert steps.report_lines() == ("training steps: a training step that writes to its inputs is not captured",)


@pytest.mark.parametrize("when", [True, "auto"])
def test_without_the_memory_for_it_a_step_is_not_captured(when, captured, monkeypatch):
    def no_memory(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore of it")

    monkeypatch.setattr(torch, "zeros_like", no_memory)
    model = Scaled()
    step = step_of(model, when)
    train(step, model, torch.ones(3))
    if when is True:
        with pytest.raises(CompileError, match="too little memory for what a training step reads and writes: CUDA out"):
            train(step, model, torch.ones(3))
        return
    for _ in range(4):
        train(step, model, torch.ones(3))
    assert captured == ["captured"] and "too little memory" in step._steps.report_lines()[0]
    assert model.calls == 6  # one of them while it was tried


def test_under_hooks_for_saved_tensors_nothing_is_replayed(captured):
    model = Scaled()
    step = step_of(model)
    train(step, model, torch.ones(3))
    train(step, model, torch.ones(3))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        train(step, model, torch.ones(3))
    assert kept and captured == ["captured", "replayed"]


def test_in_somebodys_own_graph_nothing_is_replayed(captured, monkeypatch):
    model = Scaled()
    step = step_of(model)
    train(step, model, torch.ones(3))
    train(step, model, torch.ones(3))
    calls = model.calls
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        train(step, model, torch.ones(3))
    assert captured == ["captured", "replayed"] and model.calls == calls + 1
    train(step, model, torch.ones(3))
    assert captured == ["captured", "replayed", "replayed"]


@pytest.mark.parametrize("gpu_over_host, has_room", [(1.0, True), (2.0, True), (1.0, False)])
def test_auto_captures_where_the_gpu_waits_and_there_is_room(gpu_over_host, has_room, captured, monkeypatch):
    monkeypatch.setattr(HostSpan, "device_over_host", gpu_over_host)
    monkeypatch.setattr(captured_steps, "_fits_in_memory", lambda device: has_room)
    model = Scaled()
    step = step_of(model, "auto")
    for _ in range(5):
        train(step, model, torch.ones(3))
    (line,) = step._steps.report_lines()
    if gpu_over_host == 1 and has_room:
        assert captured == ["captured", "replayed", "replayed"] and "in CUDA graphs; 0.0 MiB" in line
    else:
        assert not captured
        assert ("too little memory" if gpu_over_host == 1 else "the GPU takes longer") in line


class Loop:
    """Somebody's training loop around `run`, which may be a captured step of the model: what it did and what it has."""

    def __init__(self, model: Scaled, run: Callable[..., Any]) -> None:
        self.model, self.run = model, run
        self.forwards: list[tuple[torch.Tensor | None, ...]] = []
        self.kept: list[torch.Tensor] = []

    def act(self, name: str, number: int) -> bool:
        """Whether PyTorch refused it."""
        weight, place = self.model.weight, number % max(len(self.forwards), 1)
        chosen = self.forwards[place : place + 1]
        try:
            if name == "forward":
                torch.manual_seed(number)
                self.forwards.append(self.run(weight, torch.randn(3)))
            elif name == "forget" and chosen:
                del self.forwards[place]
            elif name == "backward" and chosen:
                chosen[0][0].backward()
            elif name == "backward of hidden states" and chosen:
                chosen[0][1].square().sum().backward()
            elif name == "gradient" and chosen:
                self.kept += torch.autograd.grad(chosen[0][0], weight)
            elif name == "no gradient":
                weight.grad = None
            elif name == "move":
                weight.data = weight.data.clone()
            elif weight.grad is not None:
                if name == "keep":
                    self.kept.append(weight.grad)
                elif name == "zero":
                    weight.grad.zero_()
                elif name == "step":
                    with torch.no_grad():
                        weight -= 0.01 * weight.grad
        except RuntimeError as error:
            assert any(known in str(error) for known in ("second time", "inplace operation")), error
            return True
        return False

    def tensors(self) -> list[torch.Tensor | None]:
        return [
            self.model.weight,
            self.model.weight.grad,
            *self.kept,
            *(value for out in self.forwards for value in out),
        ]


ACTS = (
    *("forward", "backward", "forward", "backward", "no gradient", "step", "zero", "keep"),
    *("gradient", "backward of hidden states", "forget", "move"),
)


@given(acts=st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 5)), max_size=40))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_loop_goes_as_it_would(acts, captured):
    models = Scaled(), Scaled()
    loops = Loop(models[0], step_of(models[0])), Loop(models[1], models[1].compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # One step, from which on the others are captured.
        for act in (("forward", 0), ("backward", 0), ("forget", 0), *acts):
            found, expected = (loop.act(*act) for loop in loops)
            assert found == expected, act
            for one, other in zip(*(loop.tensors() for loop in loops), strict=True):
                assert (one is None and other is None) or torch.equal(one, other), act


def test_a_step_that_goes_takes_its_graphs_with_it(captured):
    model = Scaled()
    step = step_of(model)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            train(step, model, torch.ones(3))
        graphs = weakref.ref(step._graphs)
        del step
        assert graphs() is None
    finally:
        gc.enable()
    assert captured == ["captured", "replayed", "replayed"]


def test_only_steps_of_one_size_on_a_gpu_are_captured():
    assert not captured_steps.can_capture([torch.ones(2)])
    fake = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        assert captured_steps.can_capture([torch.empty(2, device="cuda"), None])
        assert captured_steps.can_capture([torch.empty_strided((2,), (3,), device="cuda")])
        assert not captured_steps.can_capture([torch.empty(1, device="cuda").expand(2)])
        assert not captured_steps.can_capture([TwoTensor(torch.empty(2, device="cuda"), torch.empty(2, device="cuda"))])
        assert not captured_steps.can_capture([torch.empty(2, device="cuda"), torch.empty(2)])


def test_without_the_options_of_torch_the_report_says_so(monkeypatch):
    monkeypatch.setattr(captured_steps, "_PRIVATE", ((torch._C, "_gone"),))
    model = fuseopt.initialize(tiny.FAMILIES["gpt2"]().train(), CAPTURED)
    assert not model.forward.cuda_graphs
    assert "without CUDA graphs (torch" in fuseopt.report(model).to_json()


@pytest.mark.parametrize("before", [True, False])
def test_what_fully_shard_has_taken_is_not_captured(before, monkeypatch):
    given = []
    monkeypatch.setattr(partitioner, "compile_graph", lambda graph, inputs, **options: given.append(options) or graph)
    model = tiny.FAMILIES["gpt2"](n_layer=1).train()
    if before:
        monkeypatch.setattr(forward, "_is_sharded", lambda module: module is model)
    fuseopt.initialize(model, CAPTURED)
    assert ("without CUDA graphs (fully_shard" in fuseopt.report(model).to_json()) == before
    monkeypatch.setattr(forward, "_is_sharded", lambda module: module is model)
    torch._dynamo.reset()
    ids = tiny.inputs(model)["input_ids"]
    model(input_ids=ids, labels=ids)
    assert [options["captured"] for options in given] == [None]


@pytest.fixture
def replayed(monkeypatch):
    """One entry for every CUDA graph that was launched."""
    replay, entries = torch.cuda.CUDAGraph.replay, []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: entries.append(replay(graph)))
    return entries


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("when", [pytest.param(True, marks=pytest.mark.slow), "auto"])
def test_steps_with_gradient_checkpointing_are_not_captured(when, device, monkeypatch):
    """What a block draws is drawn again in its backward pass, by generators that a graph does not know."""
    events = capture_on_cpu(monkeypatch)
    model = tiny.FAMILIES["gpt2"](n_layer=1).train().to(device)
    model.gradient_checkpointing_enable()
    options = {"backend": "aot_eager", "cuda_graphs": when}
    fuseopt.initialize(model, {"kernel_fusion": {"memory_efficient_fusion": options}}, strict=True)
    ids = tiny.inputs(model)["input_ids"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            model(input_ids=ids, labels=ids).loss.backward()
    note = "training steps are not captured: gradient checkpointing draws"
    assert any(note in str(warning.message) for warning in caught) == (when is True)
    assert "not captured: gradient checkpointing" in fuseopt.report(model).to_json() and not events


def test_compiled_steps_go_with_restore(monkeypatch):
    """Dynamo would keep them, and with them the memory of graphs, for as long as the process runs."""
    compiled = []

    class Kept:
        def __init__(self, graph: torch.fx.GraphModule) -> None:
            self.graph = graph
            compiled.append(weakref.ref(self))

        def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.graph(*inputs)

    monkeypatch.setattr(partitioner, "compile_graph", lambda graph, inputs, **options: Kept(graph))
    model = fuseopt.initialize(tiny.FAMILIES["gpt2"](n_layer=1).train(), CAPTURED)
    ids = tiny.inputs(model)["input_ids"]
    model(input_ids=ids, labels=ids).loss.backward()
    gc.collect()
    assert [reference() is not None for reference in compiled] == [True]
    fuseopt.restore(model)
    gc.collect()
    assert [reference() for reference in compiled] == [None]


def trained(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor], list]:
    """Losses, logits and weights of steps of two batches each, of which every third is evaluated in between."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = [tiny.inputs(model, batch=4, seed=seed)["input_ids"] for seed in range(3)]
    losses, logits = [], []
    for step in range(6):
        for micro in range(2):
            ids = batches[(step + micro) % 3]
            outputs = model(input_ids=ids, labels=ids)
            outputs.loss.backward()
            losses.append(outputs.loss)
            logits.append(outputs.logits.detach())
        if step % 3 == 1:
            model.eval()
            with torch.no_grad():
                losses.append(model(input_ids=ids, labels=ids).loss)
            model.train()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return losses, logits, list(model.parameters())


@pytest.mark.parametrize("family", ["gpt2", pytest.param("t5", marks=pytest.mark.slow)])
def test_logits_are_lazy_as_without_graphs(family, captured):
    torch._dynamo.reset()
    layers = {"gpt2": "n_layer", "t5": "num_layers"}[family]
    stock = tiny.FAMILIES[family](**NO_DROPOUT[family] | {layers: 1}).train()
    model = copy.deepcopy(stock)
    fusion = {"backend": "aot_eager", "cuda_graphs": True}
    kernels = {"triton_kernels": ["FusedLinearCrossEntropy"], "memory_efficient_fusion": fusion}
    fuseopt.initialize(model, {"kernel_fusion": kernels})
    kept = []
    for seed in range(5):
        outputs = []
        for each in (model, stock):
            ids = tiny.inputs(each, seed=seed)["input_ids"]
            outputs.append(each(input_ids=ids, labels=ids))
            loss = outputs[-1].loss
            if seed % 2:
                loss = loss + outputs[-1].logits.float().square().mean()
            each.zero_grad()
            loss.backward()
        assert isinstance(outputs[0].logits, LazyLogits)
        kept.append([output.logits for output in outputs])
        gradients = ([parameter.grad for parameter in each.parameters()] for each in (model, stock))
        for found, expected in zip(*gradients, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert captured.count("replayed") == 4
    for found, expected in kept:
        torch.testing.assert_close(found.tensor(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("family", NO_DROPOUT)
def test_accumulated_gradients_and_kept_outputs_are_those_without_graphs(family, replayed):
    torch._dynamo.reset()
    model = tiny.FAMILIES[family](**NO_DROPOUT[family]).train().cuda()
    stock = copy.deepcopy(model)
    fuseopt.initialize(model, CAPTURED, strict=True)
    found = trained(model)
    assert len(replayed) > 12
    for got, expected in zip(found, trained(stock), strict=True):
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_steps_of_two_kinds_add_up(device, monkeypatch, replayed):
    """Gradients in the memory of one kind's graphs stay as they are while the other kind's run."""
    torch._dynamo.reset()
    events = capture_on_cpu(monkeypatch) if device == "cpu" else []
    model = tiny.FAMILIES["gpt2"](**NO_DROPOUT["gpt2"] | {"n_layer": 1}).train().to(device)
    stock = copy.deepcopy(model)
    options = {"backend": "aot_eager" if device == "cpu" else "inductor", "cuda_graphs": True}
    fuseopt.initialize(model, {"kernel_fusion": {"memory_efficient_fusion": options}}, strict=True)
    ids = tiny.inputs(model, batch=4)["input_ids"]
    for step in range(12):
        for each in (model, stock):
            each.transformer.wpe.weight.requires_grad_(step % 2 == 0)
            each(input_ids=ids, labels=ids).loss.backward()
        if step % 4 == 3:
            for name, parameter in stock.named_parameters():
                torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-3, atol=1e-4)
            model.zero_grad(), stock.zero_grad()
    assert events.count("captured") == (2 if device == "cpu" else 0)
    assert events.count("replayed") == (10 if device == "cpu" else 0)
    assert len(replayed) == (0 if device == "cpu" else 20)


@pytest.mark.gpu
def test_two_forwards_before_a_backward():
    torch._dynamo.reset()
    model = tiny.FAMILIES["gpt2"](**NO_DROPOUT["gpt2"]).train().cuda()
    stock = copy.deepcopy(model)
    fuseopt.initialize(model, CAPTURED, strict=True)
    ids = [tiny.inputs(model, seed=seed)["input_ids"] for seed in range(2)]
    for _ in range(4):
        for each in (model, stock):
            each.zero_grad()
            sum(each(input_ids=tokens, labels=tokens).loss for tokens in ids).backward()
        for name, parameter in stock.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("left_out", [1, 3])
def test_forwards_without_a_backward_before_the_first_step(left_out, replayed):
    torch._dynamo.reset()
    model = tiny.FAMILIES["gpt2"](**{**NO_DROPOUT["gpt2"], "attn_pdrop": 0.5}).train().cuda()
    fuseopt.initialize(model, CAPTURED, strict=True)
    ids = tiny.inputs(model)["input_ids"]
    for _ in range(left_out):
        model(input_ids=ids, labels=ids)
    assert not replayed
    norms = []
    for _ in range(4):
        model(input_ids=ids, labels=ids).loss.backward()
        norms.append(model.transformer.wte.weight.grad.norm().item())
        model.zero_grad()
    assert replayed and len(set(norms)) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("family", NO_DROPOUT)
def test_steps_in_graphs_draw_what_others_draw(family, replayed):
    results = []
    for cuda_graphs in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = tiny.FAMILIES[family]().train().cuda()
        config = {"kernel_fusion": {"memory_efficient_fusion": {"cuda_graphs": cuda_graphs}}}
        fuseopt.initialize(model, config, strict=True)
        ids = tiny.inputs(model)["input_ids"]
        found = []
        for seed in range(5):
            torch.manual_seed(seed)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            found += [loss.detach(), torch.rand(3, device="cuda")]
            found += [parameter.grad.clone() for parameter in model.parameters()]
            model.zero_grad()
        results.append(found)
        assert len(replayed) == (8 if cuda_graphs else 0)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
def test_gradients_kept_on_a_gpu(replayed):
    torch._dynamo.reset()
    model = tiny.FAMILIES["gpt2"](**NO_DROPOUT["gpt2"]).train().cuda()
    stock = copy.deepcopy(model)
    fuseopt.initialize(model, CAPTURED, strict=True)
    ids = [tiny.inputs(model, seed=seed)["input_ids"] for seed in range(3)]

    def gradients(each: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(each(input_ids=tokens, labels=tokens).loss, list(each.parameters()))

    first, second = gradients(model, ids[0]), gradients(model, ids[1])
    assert len(replayed) == 2
    with pytest.warns(UserWarning, match="gradients of an earlier step are kept"):
        third = gradients(model, ids[2])
    for _ in range(3):
        gradients(model, ids[0])
    assert len(replayed) == 2
    for found, tokens in zip((first, second, third), ids, strict=True):
        torch.testing.assert_close(found, gradients(stock, tokens), rtol=1e-3, atol=1e-4)


def pooled_bytes() -> int:
    """What CUDA graphs hold on to."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))


@pytest.mark.gpu
def test_small_steps_are_captured_unasked_and_give_their_memory_back(replayed, monkeypatch):
    torch._dynamo.reset()
    # Whoever shares the GPU takes time on it.
    monkeypatch.setattr(step_timing, "_Span", HostSpan)
    model = tiny.FAMILIES["t5"](d_model=512, d_kv=64).train().cuda()
    ids = tiny.inputs(model, batch=64)["input_ids"].repeat(1, 16)
    gc.collect()
    torch.cuda.empty_cache()
    before = pooled_bytes()
    fuseopt.initialize(model, {"kernel_fusion": {"memory_efficient_fusion": True}}, strict=True)
    for _ in range(6):
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
    assert "training steps: in CUDA graphs" in fuseopt.report(model).to_json()
    assert len(replayed) == 6
    held = pooled_bytes() - before
    fuseopt.restore(model)
    gc.collect()
    torch.cuda.empty_cache()
    # The BLAS library keeps the workspace of the stream that was captured.
    assert pooled_bytes() - before < held - 2**26


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [1, 5])
def test_a_step_in_somebodys_own_graph(steps):
    """The whole step, which may have been captured before."""
    torch._dynamo.reset()
    model = tiny.FAMILIES["gpt2"](**NO_DROPOUT["gpt2"]).train().cuda()
    stock = copy.deepcopy(model)
    fuseopt.initialize(model, CAPTURED, strict=True)
    ids = tiny.inputs(model)["input_ids"]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(steps):
            model(input_ids=ids, labels=ids).loss.backward()
            model.zero_grad()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    ids.copy_(ids.flip(0))
    graph.replay()
    expected = stock(input_ids=ids, labels=ids).loss
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_steps_that_cannot_be_captured_go_on(replayed, monkeypatch):
    """T5 makes a number on the host into a tensor, which Inductor's code does not."""
    torch._dynamo.reset()
    monkeypatch.setattr(step_timing, "_GPU_OVER_HOST", float("inf"))
    model = tiny.FAMILIES["t5"](**NO_DROPOUT["t5"]).train().cuda()
    stock = copy.deepcopy(model)
    fuseopt.initialize(model, {"kernel_fusion": {"memory_efficient_fusion": {"backend": "aot_eager"}}}, strict=True)
    ids = tiny.inputs(model)["input_ids"]
    for _ in range(5):
        for each in (model, stock):
            each.zero_grad()
            each(input_ids=ids, labels=ids).loss.backward()
    assert "a training step could not be captured" in fuseopt.report(model).to_json() and not replayed
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_dropout_differs_from_step_to_step():
    torch._dynamo.reset()
    model = fuseopt.initialize(tiny.FAMILIES["gpt2"](n_layer=1, resid_pdrop=0.5).train().cuda(), CAPTURED)
    ids = tiny.inputs(model)["input_ids"]
    losses = []
    for _ in range(7):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        model.zero_grad()
        losses.append(loss.item())
    assert len(set(losses)) == 7
