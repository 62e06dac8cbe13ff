"""generate() on a model that changes, is copied, shared between threads, interrupted or short of memory."""

import copy
import gc
import pickle
import re
import threading
import weakref
from unittest import mock

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import fuseopt
from fuseopt.config import GenerationOptions
from fuseopt.generation.engine.graphs import StepGraphs, StepWork
from fuseopt.generation.engine.state import DecodeState
from fuseopt.generation.tiers import Tier
from fuseopt.kernel_table import CUSTOM, listed
from tests import tiny
from tests.changes import edit, replace

GENERATION = {"generation": {"enable": True}}
pytestmark = pytest.mark.usefixtures("each_device")
on_a_gpu = pytest.mark.parametrize("each_device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


@pytest.fixture(params=["gpt2", "t5"])
def model(request, each_device):
    return tiny.FAMILIES[request.param]()


def generate(model, **kwargs):
    inputs = tiny.inputs(model, batch=2)["input_ids"]
    torch.manual_seed(0)
    return model.generate(inputs, **{"attention_mask": torch.ones_like(inputs), "max_new_tokens": 8, **kwargs})


def assert_as_stock(model, **kwargs):
    """Fused as it is now, against the class's own generate(), in the device loop."""
    wanted = type(model).generate(model, **_arguments(model, kwargs))
    got = model.generate(**_arguments(model, kwargs))
    assert torch.equal(got.sequences, wanted.sequences)
    for ours, theirs in zip(got.logits, wanted.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert model.generate.calls[-1].tier is Tier.DEVICE_LOOP, model.generate.calls[-1]


def _arguments(model, kwargs):
    inputs = tiny.inputs(model, batch=2)["input_ids"]
    torch.manual_seed(0)
    details = {"return_dict_in_generate": True, "output_logits": True}
    return {"inputs": inputs, "attention_mask": torch.ones_like(inputs), "max_new_tokens": 8, **details, **kwargs}


def load(model):
    weights = {name: 1.3 * weight for name, weight in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    model.tie_weights()


def resize(model):
    model.resize_token_embeddings(tiny.VOCAB + 9)


def untie(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0).clone())


def widen(model):
    model.double()


def norm_eps(model):
    for module in model.modules():
        for name in {"eps", "variance_epsilon"} & set(vars(module)):
            setattr(module, name, 0.5)


def merge_lora(model):
    peft = pytest.importorskip("peft")
    targets = ["c_attn", "c_fc"] if model.config.model_type == "gpt2" else ["q", "wo"]
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).eval()
    generate(model)
    assert model.generate.calls[-1].tier is Tier.DEVICE_LOOP
    assert adapted.merge_and_unload() is model


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize(
    "change", [edit, replace, load, resize, untie, widen, norm_eps, merge_lora], ids=lambda f: f.__name__
)
def test_what_is_changed_between_calls_shows(model, change):
    fuseopt.initialize(model, GENERATION)
    before = model.generate(**_arguments(model, {})).logits[-1]
    change(model)
    assert_as_stock(model)
    assert_as_stock(model, do_sample=True, max_new_tokens=12)
    assert_as_stock(model, num_beams=3, no_repeat_ngram_size=1)
    after = model.generate(**_arguments(model, {})).logits[-1]
    assert after.shape != before.shape or not torch.equal(after, before)


@pytest.mark.parametrize("is_before", [True, False], ids=["before initialize", "after it"])
def test_methods_that_accelerate_leaves_on_modules_are_those_of_their_classes(model, is_before):
    accelerate = pytest.importorskip("accelerate")
    device = model.device.type
    for hooked in (is_before, not is_before):
        if hooked:
            accelerate.dispatch_model(model, {"": device}, force_hooks=True)
            accelerate.hooks.remove_hook_from_module(model, recurse=True)
            assert "forward" in vars(model) and "forward" in vars(model.lm_head)
        else:
            fuseopt.initialize(model, GENERATION)
    assert_as_stock(model)
    module = model.lm_head
    module.forward = lambda hidden: 2 * type(module).forward(module, hidden)
    generate(model)
    assert "lm_head has had its forward replaced" in model.generate.calls[-1].reason


def test_a_model_that_gave_nan_is_cured(model):
    fuseopt.initialize(model, GENERATION)
    generate(model, max_new_tokens=3)
    embeddings = model.get_input_embeddings().weight
    kept = embeddings.detach().clone()
    with torch.no_grad():
        embeddings.fill_(torch.nan)
        assert not model.generate(**_arguments(model, {"max_new_tokens": 20})).logits[-1].isfinite().any()
        embeddings.copy_(kept)
    for tokens in (3, 20):
        assert_as_stock(model, max_new_tokens=tokens)


def test_half_and_back(model):
    fuseopt.initialize(model, GENERATION)
    weights = copy.deepcopy(model.state_dict())
    wanted = generate(model)
    generate(model.half())
    assert model.generate.calls[-1].tier is Tier.DEVICE_LOOP
    generate(model.bfloat16())
    assert model.generate.calls[-1].tier is Tier.DEVICE_LOOP
    model.float().load_state_dict(weights)
    assert torch.equal(generate(model), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gpt2", "t5", "t5_gated"])
def test_moved_between_devices(family):
    model = fuseopt.initialize(tiny.FAMILIES[family](), GENERATION)
    for device in ("cpu", "cuda", "cpu", "cuda"):
        model.to(device)
        with torch.device(device):
            assert_as_stock(model)
            assert_as_stock(model, num_beams=2)


def test_prompts_batches_and_models_take_turns(model):
    other = fuseopt.initialize(type(model)(model.config).eval(), GENERATION)
    fuseopt.initialize(model, GENERATION)
    for batch, length in ((2, 7), (1, 3), (2, 9), (3, 1), (2, 7)):
        for each in (model, other):
            inputs = tiny.inputs(each, batch=batch, length=length)["input_ids"]
            assert_as_stock(each, inputs=inputs, attention_mask=torch.ones_like(inputs))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_generates_by_itself(model, duplicate):
    fuseopt.initialize(model, GENERATION)
    generate(model)
    other = duplicate(model)
    assert other.generate.model is other and model.generate.model is model
    edit(other)
    assert_as_stock(other)
    assert not fuseopt.report(fuseopt.restore(other)).since and "generate" not in other.__dict__
    assert_as_stock(model)


OPTIONS = {
    "max_batch": 4,
    "max_length": 64,
    "max_graphs": 2,
    "cache_dtype": "int8",
    "weights": "int8",
    "prefix_cache_mib": 2,
}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_copy_has_the_options(option, duplicate):
    assert {*OPTIONS, "enable"} == {*GenerationOptions.__dataclass_fields__}
    model = fuseopt.initialize(tiny.gpt2(), {"generation": {option: OPTIONS[option]}})
    wanted, other = generate(model), duplicate(model)
    assert torch.equal(generate(other), wanted) and other.generate.options == model.generate.options
    assert other.generate.calls[-1].tier is model.generate.calls[-1].tier


def test_the_method_looks_like_the_class_s(model):
    import inspect

    stock = model.generate
    fuseopt.initialize(model, GENERATION)
    assert inspect.signature(model.generate) == inspect.signature(stock)
    assert model.generate.__doc__ == stock.__doc__ and model.generate.__name__ == "generate"
    assert model.generate.__self__ is model


def test_a_second_thread_is_served_at_the_same_time(model):
    """The one that comes while another call decodes goes to transformers, and neither waits for the other."""
    fuseopt.initialize(model, GENERATION)
    wanted = generate(fuseopt.restore(copy.deepcopy(model)))
    inside, leave = threading.Event(), threading.Event()

    class Waits(LogitsProcessor):
        def __call__(self, input_ids, scores):
            inside.set()
            assert leave.wait(30)
            return scores

    results = []
    first = threading.Thread(
        target=lambda: results.append(generate(model, logits_processor=LogitsProcessorList([Waits()])))
    )
    first.start()
    assert inside.wait(30)
    results.append(generate(model))
    assert model.generate.calls[-1].reason == "another call of generate() was running on this model"
    leave.set()
    first.join(30)
    assert len(results) == 2 and all(torch.equal(result, wanted) for result in results)
    assert_as_stock(model)


@on_a_gpu
def test_two_models_are_captured_at_the_same_time(each_device):
    models = [tiny.gpt2(), tiny.t5()]
    wanted = [generate(model) for model in models]
    both_are_ready, capture, results = threading.Barrier(2, timeout=30), StepGraphs.capture, {}

    def capture_when_both_are_ready(graphs, step):
        both_are_ready.wait()
        return capture(graphs, step)

    def decode(model):
        results[model] = generate(model)

    with mock.patch.object(StepGraphs, "capture", capture_when_both_are_ready):
        threads = [threading.Thread(target=decode, args=(fuseopt.initialize(model, GENERATION),)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    for model, tokens in zip(models, wanted, strict=True):
        assert model.generate.calls[-1].steps == "graph", model.generate.calls[-1]
        assert torch.equal(results[model], tokens) and torch.equal(generate(model), tokens)
    assert_as_stock(models[0], do_sample=True)


@pytest.mark.multigpu
@pytest.mark.parametrize("each_device", [torch.device("cuda", 1)], indirect=True, ids=str)
def test_a_device_that_is_not_current(model):
    """Nor was it at the first capture of the process."""
    first = fuseopt.initialize(tiny.gpt2().to("cuda:0"), GENERATION)
    generate(first)
    assert first.generate.calls[-1].steps == "graph"
    fuseopt.initialize(model, GENERATION)
    for _ in range(2):
        assert_as_stock(model)
        assert model.generate.calls[-1].steps == "graph"
    assert torch.cuda.current_device() == 0


def test_generate_called_from_inside_generate(model):
    fuseopt.initialize(model, GENERATION)
    wanted, seen = generate(model), []

    class Nested(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append(generate(model))
            return scores

    assert torch.equal(generate(model, logits_processor=LogitsProcessorList([Nested()])), wanted)
    assert seen and all(torch.equal(result, wanted) for result in seen)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # where it is the capture that is interrupted
@pytest.mark.parametrize("tier", [Tier.DEVICE_LOOP, Tier.FAST_FORWARD])
def test_an_interrupted_call_leaves_nothing_behind(model, tier):
    fuseopt.initialize(model, GENERATION)
    kwargs = {} if tier is Tier.DEVICE_LOOP else {"max_time": 1e6}
    calls = 0

    def interrupt(step):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return original(step)

    original = StepWork.__call__
    with mock.patch.object(StepWork, "__call__", interrupt), pytest.raises(KeyboardInterrupt):
        generate(model, **kwargs)
    assert model.generate.calls[-1].tier is tier and model.generate.calls[-1].note == "an error was raised"
    assert_as_stock(model)


def test_no_memory_for_the_cache(model):
    fuseopt.initialize(model, GENERATION)
    wanted = generate(model)
    with mock.patch.object(DecodeState, "__init__", side_effect=torch.OutOfMemoryError("no memory")):
        model.generate.graphs.clear()
        assert torch.equal(generate(model), wanted)
    call = model.generate.calls[-1]
    assert call.tier is Tier.STOCK and call.reason.startswith("there was no memory for a cache of 2 rows")
    assert_as_stock(model)


@on_a_gpu
def test_no_memory_for_a_graph(model):
    fuseopt.initialize(model, GENERATION)
    with mock.patch.object(StepWork, "capture", side_effect=torch.OutOfMemoryError("no memory")):
        assert_as_stock(model)
    call = model.generate.calls[-1]
    assert call.steps == "eager" and call.note.endswith("could not be captured: no memory")
    assert_as_stock(model)
    assert model.generate.calls[-1].steps == "graph"


@on_a_gpu
def test_a_capture_that_cuda_gives_up(model):
    fuseopt.initialize(model, GENERATION)
    run, stream = StepWork.run, torch.cuda.current_stream()

    def waiting_run(step):
        run(step)
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()

    with mock.patch.object(StepWork, "run", waiting_run):
        assert_as_stock(model, do_sample=True)
    call = model.generate.calls[-1]
    assert call.steps == "eager" and "could not be captured" in call.note
    assert torch.cuda.current_stream() == stream
    assert_as_stock(model, do_sample=True)
    assert model.generate.calls[-1].steps == "graph"
    # Memory that another stream has used can be had again.
    used = torch.cuda.memory_allocated()
    elsewhere = torch.ones(2**20)
    elsewhere.record_stream(torch.cuda.Stream())
    del elsewhere
    torch.cuda.synchronize()
    torch.ones(1)
    assert torch.cuda.memory_allocated() == used


@on_a_gpu
def test_a_replay_waits_for_what_torch_does_ahead_of_a_capture(model, monkeypatch):
    """Which sets the offset of random numbers to 0, on the stream of the capture."""
    fuseopt.initialize(model, GENERATION)
    begin, capture, waits = torch.cuda.CUDAGraph.capture_begin, StepWork.capture, []

    def late(graph, *args, **kwargs):
        # Longer than the capture takes, beside other tests too.
        torch.cuda._sleep(3 * 10**9)
        begin(graph, *args, **kwargs)

    def captured(step, *args):
        capture(step, *args)
        waits.append(not torch.cuda.current_stream().query())

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", late)
    monkeypatch.setattr(StepWork, "capture", captured)
    assert_as_stock(model, do_sample=True)
    assert waits == [True]


@on_a_gpu
def test_graphs_are_reused_bounded_and_freed(model):
    fuseopt.initialize(model, {"generation": {"max_graphs": 2}})
    captures, capture = [], StepWork.capture
    with mock.patch.object(StepWork, "capture", lambda step, *args: captures.append(args) or capture(step, *args)):
        for length in (3, 7, 9, 5):
            inputs = tiny.inputs(model, batch=2, length=length)["input_ids"]
            assert_as_stock(model, inputs=inputs, attention_mask=torch.ones_like(inputs))
            assert_as_stock(model, inputs=inputs, attention_mask=torch.ones_like(inputs), do_sample=True)
        assert len(captures) == 2
        for batch in (1, 2, 3, 4):
            inputs = tiny.inputs(model, batch=batch)["input_ids"]
            assert_as_stock(model, inputs=inputs, attention_mask=torch.ones_like(inputs))
    assert model.generate.graphs.steps == 2
    assert any(re.search("2 steps.* captured as CUDA graphs", line) for line in fuseopt.report(model).since)
    states = [weakref.ref(step.state) for step in model.generate.graphs._steps.values()]
    fuseopt.restore(model)
    gc.collect()
    assert states and all(state() is None for state in states)


def test_restore_frees_what_is_kept(model):
    fuseopt.initialize(model, GENERATION)
    generate(model)
    kept = weakref.ref(model.generate)
    fuseopt.restore(model)
    assert kept() is None and "generate" not in model.__dict__


@pytest.mark.filterwarnings("ignore:fuseopt. .* matches nothing in the model")
@pytest.mark.parametrize(
    "kernels",
    [
        list(listed(CUSTOM)),
        [{"name": name, "fuse_residual": True} for name in ("FusedRMSNorm", "FusedLayerNorm")],
        [{"name": "FusedGELU", "fold_bias": True}],
    ],
    ids=["all", "fuse_residual", "fold_bias"],
)
def test_generation_beside_fused_modules(model, kernels):
    stock = [generate(model), generate(model, no_repeat_ngram_size=2, max_time=1e6)]
    fuseopt.initialize(model, {**GENERATION, "kernel_fusion": {"custom_cuda_kernels": kernels}})
    assert len(fuseopt.report(model).replaced) > 1
    assert torch.equal(generate(model), stock[0])
    assert model.generate.calls[-1].tier is Tier.DEVICE_LOOP, model.generate.calls[-1]
    assert torch.equal(generate(model, no_repeat_ngram_size=2, max_time=1e6), stock[1])
    assert model.generate.calls[-1].tier is Tier.FAST_FORWARD
    assert_as_stock(model, no_repeat_ngram_size=2)


def test_a_step_is_rebuilt_only_when_something_moved(each_device):
    model = fuseopt.initialize(tiny.gpt2(), GENERATION)
    with mock.patch.object(StepGraphs, "clear", autospec=True) as clear:
        generate(model)
        edit(model)
        generate(model)
        assert clear.call_count == 1
        replace(model)
        generate(model)
        assert clear.call_count == 2
